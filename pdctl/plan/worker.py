"""A simulated worker: the real scheduler, with time from a stage model.

It looks at its scheduler when a message comes or a step ends, like the real one. While it only decodes it leaps over
whole runs of steps, up to the first that ends somebody; a message in the middle of one first rewinds it to the step
that is under way at that moment.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pdctl.plan.leap import LeapingScheduler
from pdctl.plan.stages import StepModel
from pdctl.plan.tally import Gaps
from server.engine.block_pool import BlockPool
from server.engine.local_prefill import LocalPrefill
from server.engine.scheduler import Limits, Step
from server.router.attempt import Plan
from server.sequence import Batch, SamplingParams, SeqId, Sequence, Slice, Token

TOKEN = Token(0)


@dataclass(slots=True, eq=False)
class Request:
    """One request under way, and where its halves are."""

    id: SeqId
    arrival: float
    prompt: list[int]
    params: SamplingParams
    first: float = 0.0
    last: float = 0.0
    transfer_s: float = 0.0
    read_from: float = -1.0  # when its prompt began to be read
    num_cached: int = 0  # tokens of it that were not read
    is_warm_up: bool = False  # not counted
    is_filler: bool = False  # nor this: it keeps its user at work
    then: tuple[int, ...] = ()  # tokens that its user adds in each further turn
    plan: Plan = None  # type: ignore[assignment]  # from when a router has chosen

    def half(self, now: float, needs_grant: bool = False) -> "Half":
        return Half(self.id, self.prompt, self.params, arrival=now, needs_grant=needs_grant, request=self)


@dataclass(slots=True, eq=False)
class Half(Sequence):
    """A sequence that knows its request."""

    request: Request = None  # type: ignore[assignment]  # a field after defaults; always given


@dataclass(slots=True)
class Leap:
    """`num_steps` steps from `start`: the first takes `first_s`, each further one `slope_s` more."""

    start: float
    num_steps: int
    first_s: float
    slope_s: float

    def after(self, k: int) -> float:
        return self.start + k * self.first_s + self.slope_s * k * (k - 1) / 2

    def num_done(self, now: float) -> int:
        """Steps that have ended by `now`."""
        gone, b, a = now - self.start, self.first_s - self.slope_s / 2, self.slope_s / 2
        k = gone / b if not a else (math.sqrt(b * b + 4 * a * gone) - b) / (2 * a)
        k = min(self.num_steps, int(k))
        while k and self.after(k) > now:  # the root is rounded
            k -= 1
        while k < self.num_steps and self.after(k + 1) <= now:
            k += 1
        return k


class SimWorker:
    """`at(time, handler, argument)` is the event queue; `sampled(worker, step)` hears of what a step brought, and
    `ended(request)` whom a leap took to its last token."""

    def __init__(
        self,
        name: str,
        model: StepModel,
        mixed: StepModel,
        limits: Limits,
        pool: BlockPool,
        clock: Callable[[], float],
        at: Callable[[float, Callable[[int], None], int], None],
        sampled: Callable[["SimWorker", Step], None],
        ended: Callable[[Request], None],
        gaps: Gaps,
        slowdown: Callable[["SimWorker"], tuple[float, float]] | None = None,
        can_leap: bool = True,
        local_prefill: LocalPrefill | None = None,
    ) -> None:
        self.name = name
        self.scheduler = LeapingScheduler(limits, pool, clock)
        self.block_size = pool.block_size
        self.link_free = 0.0
        self.busy_s = 0.0
        self._model = model
        self._mixed = mixed  # of steps in which anything decodes
        self._clock = clock
        self._at = at
        self._sampled = sampled
        self._ended = ended
        self._gaps = gaps
        self._slowdown = slowdown
        self._can_leap = can_leap and slowdown is None  # what the others do may change during a leap
        self._local_prefill = local_prefill
        self._batch: Batch | None = None
        self._began = 0.0  # of the batch under way
        self._leap: Leap | None = None
        self._version = 0  # of the event that ends the step under way; older ones are void
        self.is_decoding = False  # the batch under way holds no prompt
        self.after_step: Callable[[SimWorker], None] = lambda worker: None

    @property
    def is_computing(self) -> bool:
        return self._batch is not None or self._leap is not None

    @property
    def is_tight(self) -> bool:
        return self._local_prefill is not None and self._local_prefill.is_tight

    def interrupt(self) -> None:
        """Before a message is handled: makes the scheduler's state that of now."""
        leap = self._leap
        if leap is None or leap.num_steps == 1:
            return
        k = min(leap.num_done(self._clock()), leap.num_steps - 1)  # the event of the last step is its own
        self._land(leap, k)
        self._take_off(Leap(leap.after(k), 1, leap.first_s + k * leap.slope_s, 0.0))

    def look(self) -> None:
        """Starts a step when none is under way and there is something to compute."""
        if self._batch is not None or self._leap is not None:
            return
        num_steps = self.scheduler.num_steady() if self._can_leap else 0
        if num_steps:
            running = self.scheduler.running
            first = self._mixed.step_s(0, 0, len(running), sum(seq.num_computed for seq in running))
            self._take_off(Leap(self._clock(), num_steps, first, self._mixed.context_token_s * len(running)))
        else:
            self._start()

    def _start(self) -> None:
        now = self._clock()
        batch = self.scheduler.schedule()
        if not batch.slices:
            return
        self._batch, self._began = batch, now
        self._version += 1
        self._at(now + self._seconds(batch), self._finish, self._version)

    def _seconds(self, batch: Batch) -> float:
        num_prompt, prompt_context, num_decoding, context = 0, 0.0, 0, 0
        model = self._model
        for piece in batch.slices:
            n = piece.num_tokens
            if n == 1:
                num_decoding += 1
                context += piece.start
                if piece.seq.output:
                    model = self._mixed
            else:
                num_prompt += n
                prompt_context += n * (piece.start + n / 2)
                request: Request = piece.seq.request  # type: ignore[attr-defined]  # all sequences here are Halves
                if request.read_from < 0:
                    request.read_from, request.num_cached = self._clock(), piece.start
        self.is_decoding = not num_prompt
        reading, writing = model.parts_s(num_prompt, prompt_context, num_decoding, context)
        if self._slowdown is None:
            return reading + writing
        of_reading, of_writing = self._slowdown(self)
        return reading * of_reading + writing * of_writing

    def _finish(self, version: int) -> None:
        if version != self._version or self._batch is None:
            return
        batch, self._batch = self._batch, None
        seconds = self._clock() - self._began
        self.busy_s += seconds
        self._observe(batch, seconds)
        slices = batch.slices
        tokens: list[Token | None] = (
            [TOKEN] * len(slices) if self.is_decoding else [TOKEN if piece.samples else None for piece in slices]
        )
        sampled = self._sampled
        for step in self.scheduler.update(batch, tokens):
            sampled(self, step)
        self.after_step(self)
        self.look()

    def _observe(self, batch: Batch, seconds: float) -> None:
        """How many prompt tokens the next steps may carry beside what decodes."""
        if self._local_prefill is not None:
            self._local_prefill.observe(batch, seconds)
            self.scheduler.limits.local_prefill_tokens = self._local_prefill.tokens

    def _take_off(self, leap: Leap) -> None:
        """One of a single step is under way: nothing interrupts it, and it has its blocks."""
        if leap.num_steps == 1:
            self.scheduler.grow()
        self._leap = leap
        self._version += 1
        self._at(leap.after(leap.num_steps), self._end_leap, self._version)

    def _end_leap(self, version: int) -> None:
        leap = self._leap
        if version != self._version or leap is None:
            return
        self._leap = None
        self._land(leap, leap.num_steps)
        self.after_step(self)
        self.look()

    def _land(self, leap: Leap, k: int) -> None:
        """The first `k` steps have happened."""
        if not k:
            return
        running, add = tuple(self.scheduler.running), self._gaps.add
        ended = self.scheduler.leap(k)
        first, last = leap.after(1), leap.after(k)
        self.busy_s += last - leap.start
        if self._local_prefill is not None:
            batch = Batch([Slice(seq, seq.num_computed - 1, 1) for seq in running])
            for step in range(k):
                self._observe(batch, leap.first_s + step * leap.slope_s)
        for seq in running:
            request = seq.request  # type: ignore[attr-defined]  # all sequences here are Halves
            add(first - request.last)
            request.last = last
        if k > 1:
            add((last - first) / (k - 1), (k - 1) * len(running))
        for seq in ended:
            self._ended(seq.request)  # type: ignore[attr-defined]
