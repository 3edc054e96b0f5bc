"""The engine loop's one step: ask the scheduler, compute, tell the scheduler.

1. with the lock: `scheduler.schedule()` says what to compute; blocks that move between device and host are copied.
2. without it: `runner.launch(batch)`, and what it gives is waited for, so that other threads add, abort and grant while
   a long step runs.
3. with the lock: `scheduler.update(batch, tokens)`.

A GPU does not stand still between two steps: the next one is launched before this one is waited for, as long as
`scheduler.may_schedule`: at once where nobody could come who would have a place in it, else in the last moment.

A step that raises ends the sequences of its batch, never the loop. What a heartbeat says (steps, age of the current
step, its predicted time) may be read from any thread.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from server.engine.kv_cache import KVCachePool
from server.engine.model_runner import Launched, ModelRunner
from server.engine.scheduler import Scheduler, Step
from server.sequence import Batch, Sequence, Stuck, Token

logger = logging.getLogger(__name__)

_SMOOTHING = 0.2  # weight of the newest step in its estimate
# How soon what was long lately is taken for short again, and the other way round, in steps.
_FORGETTING = 0.1
_SPARE_S = 0.0005  # between the launch of a step and the end of the one before it
_POLL_S = 0.0002
_SIZE = 64  # tokens; steps of as many of these are alike


@dataclass(slots=True)
class _Flight:
    """A step that was launched, or why it could not be."""

    batch: Batch
    started: float
    launched: Launched | None
    error: Exception | None = None


@dataclass(slots=True)
class StepResult:
    """`steps` is what `scheduler.update` gave. After a failed step `error` is set and `failed` holds the sequences
    that it ended; `stuck` are those that no token is left for."""

    batch: Batch
    steps: list[Step]
    started: float  # on the engine's clock
    seconds: float
    failed: list[Sequence] = field(default_factory=list)
    error: Exception | None = None
    stuck: list[tuple[Sequence, str]] = field(default_factory=list)


class StepTimes:
    """Seconds a step of so many tokens takes: a running mean for each power of two, and the nearest one scaled."""

    def __init__(self) -> None:
        self._mean: dict[int, tuple[float, float]] = {}  # bucket -> (tokens, seconds)
        self._least: dict[int, float] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        bucket = num_tokens.bit_length()
        tokens, mean = self._mean.get(bucket, (float(num_tokens), seconds))
        self._mean[bucket] = (
            tokens + _SMOOTHING * (num_tokens - tokens),
            mean + _SMOOTHING * (seconds - mean),
        )
        size = -(-num_tokens // _SIZE)
        least = self._least.get(size, seconds)
        self._least[size] = min(seconds, least + _FORGETTING * (seconds - least))

    def least(self, num_tokens: int) -> float:
        """What a step of about so many tokens takes at least, lately; 0.0 where there was none."""
        return self._least.get(-(-num_tokens // _SIZE), 0.0)

    @property
    def token_s(self) -> float:
        """Seconds a token takes in the steps that have most of them; 0.0 before anything was observed."""
        known = self._mean
        tokens, seconds = known[max(known)] if known else (1.0, 0.0)
        return seconds / tokens

    def predict(self, num_tokens: int) -> float:
        """0.0 before anything was observed. Scales up by tokens, never down: a step has a floor."""
        known = dict(self._mean)  # the engine thread may add to it meanwhile
        if not known:
            return 0.0
        bucket = num_tokens.bit_length()
        tokens, seconds = known[min(known, key=lambda b: (abs(b - bucket), -b))]
        return seconds * max(1.0, num_tokens / tokens)


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        # A Condition: who adds work may notify the loop, which waits on it when step() finds nothing.
        self.lock = threading.Condition(threading.Lock())
        self.num_steps = 0
        # With the lock held, on the engine's thread: what can be done with a batch before it is computed.
        self.before_execute: Callable[[Batch], None] = lambda batch: None
        self.times = StepTimes()
        self._clock = clock
        self._sleep = sleep
        self._current: tuple[float, int] | None = None  # when the running step began, its tokens
        self._ahead: _Flight | None = None  # launched behind the one that was last waited for
        self._failure: Exception | None = None  # of a launch, while another step was under way
        self._landed = 0.0  # when that one ended
        self._launch_s = 0.0  # what it takes to launch a step at most, lately

    @property
    def pool(self) -> KVCachePool:
        return self.runner.pool

    def step(self) -> StepResult | None:
        """One step; None when there is nothing to compute."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        flight, self._ahead = self._ahead or self._launch(), None
        if flight is None:
            return None
        if self.runner.is_async and flight.launched is not None:
            self._wait_for_its_end(flight, flight.launched)
            try:
                self._ahead = self._launch()
            except Exception as error:  # told by the next call: this one has a result
                self._failure = error
        result = self._land(flight)
        self._current = (self._landed, self._ahead.batch.num_tokens) if self._ahead else None
        return result

    def _wait_for_its_end(self, flight: _Flight, launched: Launched) -> None:
        """Almost: until the next step has to be launched. Who comes after that waits for one step more."""
        with self.lock:
            if not self.scheduler.may_schedule or self.scheduler.is_next_full:
                return
        began = max(flight.started, self._landed)
        latest = began + self.times.least(flight.batch.num_tokens) - self._launch_s - _SPARE_S
        with contextlib.suppress(Exception):  # of a device that failed: `collect` says so again
            while self._clock() < latest and not launched.is_done():
                self._sleep(_POLL_S)

    def settle(self) -> None:
        """Waits for the step that was launched ahead: behind it nothing writes to the pool."""
        flight, self._ahead = self._ahead, None
        if flight is not None:
            self._land(flight)

    def _launch(self) -> _Flight | None:
        asked = self._clock()
        with self.lock:
            if not self.scheduler.may_schedule:
                return None
            batch = self.scheduler.schedule()
            unready = self._prepare(batch)
        if not batch.slices:
            return None
        started = self._clock()
        if unready is not None:
            return _Flight(batch, started, None, unready)
        if self._current is None:
            self._current = (started, batch.num_tokens)
        try:
            launched = self.runner.launch(batch)
        except Exception as error:
            return _Flight(batch, started, None, error)
        took = self._clock() - asked
        self._launch_s = max(took, self._launch_s + _FORGETTING * (took - self._launch_s))
        return _Flight(batch, started, launched)

    def _land(self, flight: _Flight) -> StepResult:
        """Waits for it, and tells the scheduler. It began when the one before it ended."""
        batch, error, launched = flight.batch, flight.error, flight.launched
        sampled, seconds = [], None
        started = max(flight.started, self._landed)
        try:
            if launched is not None:
                sampled = launched.collect()
                seconds = launched.seconds() if launched.seconds is not None else None
        except Exception as e:
            error = e
        self.num_steps += 1
        self._landed = self._clock()
        if error is not None:
            return self._fail(batch, error, started)
        if seconds is None:
            seconds = self._landed - started
        self.times.observe(batch.num_tokens, seconds)
        stuck = [(s.seq, t.why) for s, t in zip(batch.slices, sampled, strict=True) if isinstance(t, Stuck)]
        tokens = [t if isinstance(t, Token) else None for t in sampled]
        with self.lock:
            # Aborted first, so that update() passes them over.
            stuck = [(seq, why) for seq, why in stuck if self._end(seq)]
            steps = self.scheduler.update(batch, tokens)
        return StepResult(batch, steps, started, seconds, stuck=stuck)

    def copy_blocks(self) -> None:
        """With the lock held, after whatever let the scheduler hand out blocks, and before anybody uses these.

        Under the lock, so that copies happen in the order in which they were decided, whichever thread decides.
        """
        if copies := self.scheduler.take_copies():
            self.runner.host.copy(copies)

    def _prepare(self, batch: Batch) -> Exception | None:
        try:
            self._weigh()
            self.copy_blocks()
            if batch.slices:
                self.before_execute(batch)
        except Exception as error:
            return error
        return None

    def _weigh(self) -> None:
        """A block goes to the host while out and in again cost less than computing its tokens."""
        pool = self.scheduler.pool
        if pool.host.num_blocks and (token_s := self.times.token_s):
            pool.host.is_worthwhile = 2 * self.runner.host.block_s < pool.block_size * token_s

    def _fail(self, batch: Batch, error: Exception, started: float) -> StepResult:
        logger.error(
            "a step of %d tokens failed; its %d sequences end", batch.num_tokens, len(batch.slices), exc_info=error
        )
        with self.lock:
            # Aborted first, so that update() frees them and registers none of the blocks that were to be written.
            failed = [s.seq for s in batch.slices if self._end(s.seq)]
            steps = self.scheduler.update(batch, [None] * len(batch.slices))
        return StepResult(batch, steps, started, self._clock() - started, failed, error)

    def _end(self, seq: Sequence) -> bool:
        """False when it is not here any more: begun again meanwhile, another has its id."""
        return self.scheduler.get(seq.id) is seq and self.scheduler.abort(seq.id) is not None

    @property
    def step_age_s(self) -> float:
        """How long the current step has been running; 0.0 between steps."""
        current = self._current
        return self._clock() - current[0] if current else 0.0

    @property
    def predicted_step_s(self) -> float:
        """What the current step should take; between steps, what one of a single token should."""
        current = self._current
        return self.times.predict(current[1] if current else 1)
