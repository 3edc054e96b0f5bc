"""Which workers a prompt goes to. `Chooser.plan` is the whole policy, in the order in which it decides.

1. resident    a worker that decodes has the prompt's blocks but the last: nothing to send, next to nothing to read.
2. one worker  the uncached part is under the threshold, unless decode has streams whose pace it cannot keep even
               without it; or prefill has been backlogged for a while, or has a long line, and a single worker would
               have read the prompt clearly sooner, or no rate is known yet, with room for it (never when the threshold
               is 0: then every prompt crosses). For a while: what a worker reads beside its streams slows them all, and
               that is more than one prompt gains where a few came together and prefill will be through with them soon.
3. pd          the pair with the least to do: a prefill worker by prompt tokens ahead of it and by what it has cached, a
               decode worker by its marks, what it runs and what it has cached.

What the router itself has sent is fresher than any Load, so queues are counted here; cached prefixes are what workers
published, a moment ago.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from server.engine.block_pool import prefix_digests
from server.messages import NAME_BYTES
from server.router.attempt import Plan, Route
from server.router.crossover import Crossover, Mean
from server.router.timing import Record
from server.router.worker import Worker

BACKLOG_S = 1.0  # so long prompts have waited at prefill without a break
UNSEEN = 2  # times slower than prefill workers: what a worker that decodes is taken for before it has read a prompt
CLEARLY = 0.7  # a worker that decodes is only burdened with a prompt when that is so much sooner
# A decode worker with as many tokens of the prompt is worth as much as one with one sequence less.
TOKENS_A_SEQUENCE = 256


@dataclass(slots=True)
class Rates:
    """Prompt tokens a second, of prefill workers and of workers that decode as well; 0 before any was seen."""

    prefill: Mean = field(default_factory=Mean)
    local: Mean = field(default_factory=Mean)

    def observe(self, record: Record) -> None:
        stages = record.prefill_stages
        seconds = stages.get("end", 0.0) - stages.get("start", 0.0)
        num_read = record.prompt_tokens - record.cached_tokens
        if seconds > 0 and num_read > 16:  # of a few tokens it says more about the step than about the worker
            (self.prefill if record.path == "pd" else self.local).add(num_read / seconds)


class Hits:
    """How much of one prompt each worker has cached."""

    def __init__(self, prompt: Sequence[int], salt: str, block_size: int, is_wanted: bool) -> None:
        self.num_prompt = len(prompt)
        self._prompt, self._salt, self._block_size, self._is_wanted = prompt, salt, block_size, is_wanted
        self._found: dict[str, int] = {}

    @cached_property
    def _names(self) -> list[bytes]:
        # The last token is always computed: a block that it would fill is no hit.
        names = prefix_digests(self._prompt[:-1], self._salt, self._block_size) if self._is_wanted else ()
        return [digest[:NAME_BYTES] for digest in names]

    @property
    def all_tokens(self) -> int:
        return len(self._names) * self._block_size

    def tokens(self, worker: Worker) -> int:
        found = self._found.get(worker.name)
        if found is None:
            cached = worker.cached
            leading = itertools.takewhile(cached.__contains__, self._names) if cached else ()
            found = self._found[worker.name] = sum(1 for _ in leading) * self._block_size
        return found


class Chooser:
    def __init__(self, policy: str, block_size: int, max_len: int) -> None:
        self.threshold: int | None = 256  # None: `crossover` says
        self.queue_high = 8  # prompts at a prefill worker from which it is backlogged at once
        self.crossover = Crossover(max_len)
        self.rates = Rates()
        self._policy = policy
        self._block_size = block_size
        self._turn = itertools.count()

    def plan(
        self,
        prompt: Sequence[int],
        salt: str,
        pairs: list[Route],
        alone: list[Route],
        pinned: Worker | None = None,
        *,
        now: float,
    ) -> Plan | None:
        """None when there are no routes. `pinned`: the worker that a client's conversation is on. `now`: on the clock
        of `Worker.begin_reading`.

        `alone`: where a whole sequence may be done; a resident one may also go to any decode worker of `pairs`.
        """
        hits = Hits(prompt, salt, self._block_size, self._policy == "kv-aware")
        if pinned is not None and not _is_full(pinned):
            pairs = [route for route in pairs if route.worker is pinned] or pairs
            alone = [route for route in alone if route.worker is pinned] or alone
        turn = next(self._turn)
        pair = self._best(pairs, turn, lambda route: self._pair_cost(route, hits))
        single = self._best(alone, turn, lambda route: self._single_cost(route, hits, len(prompt)))
        if single is None:
            return None if pair is None else self._pair_plan(pair, hits, len(prompt))
        uncached = len(prompt) - hits.tokens(single.worker)
        one = Plan(single, uncached, num_uncached=uncached)
        if pair is None:
            return one
        two = self._pair_plan(pair, hits, uncached)
        if (holder := self._holder(pairs, alone, hits)) is not None:
            resident = hits.tokens(holder)
            return Plan(Route(holder), len(prompt) - resident, resident, two, uncached)
        if self._is_too_tight(one, two):
            return one if self._is_relief(one, two, len(prompt), now) else two
        stays = self._is_short(one.num_uncached) or self._is_relief(one, two, len(prompt), now)
        return replace(one if stays else two, by_threshold=True)

    def _holder(self, pairs: list[Route], alone: list[Route], hits: Hits) -> Worker | None:
        """Who has the prompt. One whole block may be missing beside the last: an answer's last token was never read."""
        workers = {route.worker.name: route.worker for route in (*pairs, *alone) if not _is_full(route.worker)}
        best = max(workers.values(), key=lambda worker: (hits.tokens(worker), -len(worker.open)), default=None)
        found = 0 if best is None else hits.tokens(best)
        return best if found and found >= hits.all_tokens - self._block_size else None

    def _is_short(self, num_uncached: int) -> bool:
        return self.crossover.is_local(num_uncached) if self.threshold is None else num_uncached < self.threshold

    def _is_too_tight(self, one: Plan, two: Plan) -> bool:
        """Decode streams, and cannot keep the TPOT objective on this device however few do: a short prompt beside them
        makes that worse, on any worker with streams, and it is decoded at next to no cost in a larger batch
        (adr/0015). A prompt that is short for want of what only decode has cached is not short to prefill."""
        reader = one.route.worker
        decode = two.route.worker if reader.role == "prefill" else reader
        is_tight = decode.role == "decode" and decode.load is not None and decode.load.is_tight
        limit = self.crossover.tokens if self.threshold is None else self.threshold
        return is_tight and bool(decode.open) and two.num_to_read < limit

    def _is_relief(self, one: Plan, two: Plan, num_prompt: int, now: float) -> bool:
        """Prefill is backlogged, and the single worker has the room and the time."""
        prefill, worker = two.route.prefill, one.route.worker
        assert prefill is not None
        if self.threshold == 0 or worker.role == "prefill" or not _has_room(worker, num_prompt, self._block_size):
            return False
        is_long = prefill.num_reading >= self.queue_high > worker.num_reading
        rate, local = self.rates.prefill.value, self.rates.local.value or self.rates.prefill.value / UNSEEN
        if not rate:
            return is_long
        if not is_long and now - prefill.backlogged_at < BACKLOG_S:
            return False
        sooner = (worker.prompt_tokens + one.num_to_read) / local
        return sooner < CLEARLY * (prefill.prompt_tokens + two.num_to_read) / rate

    def _best(self, routes: list[Route], turn: int, cost: Callable[[Route], tuple[float, ...]]) -> Route | None:
        if not routes:
            return None
        ahead = turn % len(routes)  # ties go round
        if self._policy == "round-robin":
            return routes[ahead]
        return min(routes[ahead:] + routes[:ahead], key=cost)

    def _pair_plan(self, pair: Route, hits: Hits, num_uncached: int) -> Plan:
        assert pair.prefill is not None
        return Plan(pair, max(1, hits.num_prompt - hits.tokens(pair.prefill)), num_uncached=num_uncached)

    def _pair_cost(self, route: Route, hits: Hits) -> tuple[float, ...]:
        assert route.prefill is not None
        ahead = route.prefill.prompt_tokens - hits.tokens(route.prefill)
        running = len(route.worker.open) - hits.tokens(route.worker) / TOKENS_A_SEQUENCE
        return (_is_full(route.worker), ahead, running)

    def _single_cost(self, route: Route, hits: Hits, num_prompt: int) -> tuple[float, ...]:
        worker = route.worker
        to_read = worker.prompt_tokens + num_prompt - hits.tokens(worker)
        return (_is_full(worker), to_read, len(worker.open))


def _is_full(worker: Worker) -> bool:
    return worker.load is not None and worker.load.over_high


def _has_room(worker: Worker, num_tokens: int, block_size: int) -> bool:
    load = worker.load
    if load is None or load.over_high:
        return False
    return load.blocks_total - load.blocks_used - load.blocks_granted > -(-num_tokens // block_size) + len(worker.open)
