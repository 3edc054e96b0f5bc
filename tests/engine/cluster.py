"""A simulated cluster: real schedulers and pools on both sides, virtual time, and messages that dawdle and repeat.

Nothing here polls, but for a prompt's patience with a full pool. A node looks at its scheduler when a message comes or
a step ends, so a mix that stands still has an empty event queue, or no other events, while requests are unfinished:
that is the deadlock this exists to find.
"""

import heapq
from collections.abc import Callable
from itertools import count
from random import Random

from server.engine.admission import Admission
from server.engine.block_pool import BlockPool
from server.engine.host_pool import HostPool
from server.engine.scheduler import Limits, Scheduler, Step
from server.sequence import Batch, SamplingParams, SeqId, SeqState, Sequence, Token

BLOCK, EOS, MAX_EVENTS = 4, 0, 60_000


class Stuck(Exception):
    """Nothing will ever move again, or things move for ever without an end."""


class Policy:
    """What the design says."""

    run_ahead = False  # P computes before it has a grant
    grant_on_arrival = False  # D grants before P asks
    cuts = True  # P goes on without a grant after a while, as a local sequence does, and hands over what it has by then
    admission: type[Admission] = Admission


class Request:
    def __init__(self, seq_id: SeqId, prompt: list[int], params: SamplingParams, arrival: float) -> None:
        self.id, self.prompt, self.params, self.arrival = seq_id, prompt, params, arrival
        self.is_done = self.is_aborted = False
        self.num_tokens = 0

    def half(self, now: float, needs_grant: bool = False) -> Sequence:
        return Sequence(self.id, self.prompt, self.params, arrival=now, needs_grant=needs_grant)


class Node:
    """What the two kinds of worker share: steps, and tombstones of aborted sequences."""

    def __init__(self, cluster: "Cluster", limits: Limits, num_blocks: int) -> None:
        self.cluster = cluster
        host = HostPool(cluster.random.choice([0, 4, 40]))
        self.pool = BlockPool(num_blocks, BLOCK, cluster.random.random() < 0.7, host)
        self.scheduler = Scheduler(limits, self.pool, lambda: cluster.now)
        self.batch: Batch | None = None
        self.gone: set[SeqId] = set()

    def look(self) -> None:
        """After every event: start a step if none is under way, and say what there is to say."""
        self.scheduler.check_integrity()
        if self.batch is None:
            batch = self.scheduler.schedule()
            self.scheduler.take_copies()
            if batch.slices:
                self.batch = batch
                self.cluster.at(0.01 + 0.001 * batch.num_tokens, self.finish)
        self.negotiate()
        self.scheduler.check_integrity()

    def finish(self) -> None:
        assert self.batch is not None
        batch, self.batch = self.batch, None
        random = self.cluster.random
        tokens: list[Token | None] = [Token(random.randrange(20)) if piece.samples else None for piece in batch.slices]
        for step in self.scheduler.update(batch, tokens):
            if step.token is not None:
                self.sampled(step)
        self.look()

    def negotiate(self) -> None:
        raise NotImplementedError

    def sampled(self, step: Step) -> None:
        raise NotImplementedError


class PrefillNode(Node):
    def __init__(self, cluster: "Cluster", limits: Limits, num_blocks: int) -> None:
        super().__init__(cluster, limits, num_blocks)
        self.peers: dict[SeqId, DecodeNode] = {}
        self.granted: set[SeqId] = set()
        self.early: dict[SeqId, tuple[int, int]] = {}  # grants that outran their prompts
        self.told: dict[SeqId, int] = {}  # outputs that the other side knows
        self.pushed: set[SeqId] = set()

    def prefill(self, request: Request, peer: "DecodeNode") -> None:
        if request.id in self.gone:
            return
        self.peers[request.id] = peer
        self.scheduler.add(request.half(self.cluster.now, needs_grant=True))
        if self.cluster.policy.run_ahead:
            self.cluster.send(peer.asked, request.id, self)
            self.scheduler.granted(request.id, 1, 0)
        if request.id in self.early:
            self.scheduler.granted(request.id, *self.early.pop(request.id))
        self.look()

    def negotiate(self) -> None:
        for seq in self.scheduler.grants_wanted():
            self.cluster.send(self.peers[seq.id].asked, seq.id, self)
            self.be_patient(seq.id)

    def be_patient(self, seq_id: SeqId) -> None:
        if self.cluster.policy.cuts:
            self.cluster.at(self.cluster.patience, self.lose_patience, seq_id)

    def lose_patience(self, seq_id: SeqId) -> None:
        seq = self.scheduler.get(seq_id)
        if seq is None or seq_id in self.granted or not seq.needs_grant:
            return
        if not self.scheduler.run_ahead(seq_id):
            self.be_patient(seq_id)
        self.look()

    def grant(self, seq_id: SeqId, generation: int, num_resident_blocks: int) -> None:
        if seq_id not in self.peers:
            self.granted.add(seq_id)
            self.early[seq_id] = generation, num_resident_blocks
        elif self.scheduler.granted(seq_id, generation, num_resident_blocks) or self.cluster.policy.run_ahead:
            self.granted.add(seq_id)
        self.push(seq_id)
        self.look()

    def sampled(self, step: Step) -> None:
        assert step.token is not None
        seq_id = step.seq.id
        self.cluster.token(seq_id, step)
        if step.finished:
            self.cluster.send(self.peers[seq_id].dropped, seq_id, self)
        else:
            assert step.seq.state is (SeqState.PUSHING if step.seq.needs_grant else SeqState.RUNNING)
            self.push(seq_id)

    def push(self, seq_id: SeqId) -> None:
        seq = self.scheduler.get(seq_id)
        if seq is None or seq.state is not SeqState.PUSHING or seq_id not in self.granted or seq_id in self.pushed:
            return
        if len(seq.output) in (1, self.told.get(seq_id)):
            self.pushed.add(seq_id)
            self.cluster.num_cut += len(seq.output) > 1
            self.cluster.send(self.peers[seq_id].kv, seq_id, Token(seq.output[-1]), self)
        else:  # it had run ahead of its grant
            self.granted.discard(seq_id)
            self.told[seq_id] = len(seq.output)
            self.cluster.send(self.peers[seq_id].outran, seq_id, list(seq.output))
            self.be_patient(seq_id)

    def acknowledged(self, seq_id: SeqId) -> None:
        self.scheduler.release(seq_id)
        self.look()

    def abort(self, seq_id: SeqId) -> None:
        self.gone.add(seq_id)
        self.scheduler.abort(seq_id)
        self.cluster.send(self.acknowledged, seq_id)  # once the transfer thread has dropped it
        self.look()


class DecodeNode(Node):
    def __init__(self, cluster: "Cluster", limits: Limits, num_blocks: int) -> None:
        super().__init__(cluster, limits, num_blocks)
        self.parked: dict[SeqId, Request] = {}
        self.askers: dict[SeqId, PrefillNode] = {}

    def local(self, request: Request) -> None:
        if request.id not in self.gone:
            self.scheduler.add(request.half(self.cluster.now))
            self.look()

    def decode(self, request: Request, peer: PrefillNode) -> None:
        if self.cluster.policy.grant_on_arrival:
            self.askers[request.id] = peer
        self.parked[request.id] = request
        self.expect(request.id)

    def asked(self, seq_id: SeqId, peer: PrefillNode) -> None:
        self.askers[seq_id] = peer
        self.expect(seq_id)

    def expect(self, seq_id: SeqId) -> None:
        if seq_id in self.askers and seq_id in self.parked and seq_id not in self.gone:
            self.scheduler.expect(self.parked.pop(seq_id).half(self.cluster.now))
            self.look()

    def negotiate(self) -> None:
        for seq in self.scheduler.grants_possible():
            self.grant(seq)

    def grant(self, seq: Sequence) -> None:
        for _ in range(self.cluster.random.choice([1, 1, 1, 2])):
            self.cluster.send(self.askers[seq.id].grant, seq.id, seq.generation, seq.num_resident_blocks)

    def outran(self, seq_id: SeqId, output: list[int]) -> None:
        seq = self.scheduler.get(seq_id)
        if seq is not None and self.scheduler.grant_again(seq_id, output[:-1]):
            self.grant(seq)
        self.look()

    def kv(self, seq_id: SeqId, token: Token, peer: PrefillNode) -> None:
        random, seq = self.cluster.random, self.scheduler.get(seq_id)
        if seq is not None and random.random() < 0.1:
            verified = random.randrange(len(seq.block_table) + 1)
            self.scheduler.recompute(seq_id, verified, random.choice([None, token]))
        else:
            self.scheduler.received(seq_id, token)
        if seq is not None and seq.state is SeqState.FINISHED:  # token 0 filled this pool
            self.cluster.requests[seq_id].is_done = True
        self.cluster.send(peer.acknowledged, seq_id)
        self.look()

    def sampled(self, step: Step) -> None:
        self.cluster.token(step.seq.id, step)

    def dropped(self, seq_id: SeqId, peer: PrefillNode) -> None:
        self.gone.add(seq_id)
        self.scheduler.abort(seq_id)
        self.cluster.send(peer.acknowledged, seq_id)
        self.look()

    def abort(self, seq_id: SeqId) -> None:
        self.gone.add(seq_id)
        self.scheduler.abort(seq_id)
        self.look()


class Cluster:
    """One mix: sizes, pools, knobs and requests drawn from the seed."""

    def __init__(self, seed: int, policy: type[Policy] = Policy) -> None:
        self.random = random = Random(seed)
        self.policy = policy
        self.now = 0.0
        self.patience = Random(~seed).choice([0.05, 0.3, 2.0])
        self.num_cut = 0
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self.order = count()
        self.requests: dict[SeqId, Request] = {}
        self.num_tokens = 0
        self.max_prompt = random.randrange(12, 60)
        self.slowness = random.choice([0.002, 0.05, 0.5])
        self.prefills = [PrefillNode(self, self.limits(), self.num_blocks()) for _ in range(random.randrange(1, 4))]
        self.decodes = [DecodeNode(self, self.limits(True), self.num_blocks()) for _ in range(random.randrange(1, 3))]
        for node in (*self.prefills, *self.decodes):
            node.scheduler._admission.__class__ = policy.admission
            for _ in range(random.choice([0, 1000])):  # an estimate far too low must cost preemptions only
                node.scheduler._gate.lengths.add(1)
        for n in range(random.randrange(10, 40)):
            self.invent(n)

    def num_blocks(self) -> int:
        """The null block, and barely more than the largest prompt and one token take."""
        return 1 + -(-(self.max_prompt + 1) // BLOCK) + self.random.choice([0, 0, 1, 2, 5, 15])

    def limits(self, decodes: bool = False) -> Limits:
        random = self.random
        return Limits(
            token_budget=64,
            chunk_tokens=random.choice([8, 16, 64]),
            max_seqs=random.randrange(1, 5),
            max_running=random.choice([1, 2, 8]),
            local_prefill_tokens=random.choice([0, 4, 16] if decodes else [4, 16]),
            age_limit_s=random.choice([0.1, 1.0, 100.0]),
            ahead=random.randrange(1, 6),
            ahead_share=1.0,  # pools are small here
            kv_high=random.choice([0.7, 0.92, 1.0]),
            kv_low=random.choice([0.3, 0.6]),
            queue_low=random.choice([0, 1]),
            queue_high=random.choice([2, 8]),
        )

    def invent(self, n: int) -> None:
        random = self.random
        prompt = [1] * random.randrange(self.max_prompt)
        prompt += [random.randrange(1, 9) for _ in range(random.randrange(1, self.max_prompt + 1 - len(prompt)))]
        params = SamplingParams(max_tokens=random.randrange(1, 40), stop_token_ids=(EOS,))
        request = Request(SeqId("sim", n, 0), prompt, params, random.random() * random.choice([0.1, 10.0]))
        self.requests[request.id] = request
        prefill, decode = random.choice(self.prefills), random.choice(self.decodes)
        if random.random() < 0.15:
            self.at(request.arrival, decode.local, request)
            nodes: list[PrefillNode | DecodeNode] = [decode]
        else:
            self.at(request.arrival, self.send, prefill.prefill, request, decode)
            self.at(request.arrival, self.send, decode.decode, request, prefill)
            nodes = [prefill, decode]
        if random.random() < 0.25:
            self.at(request.arrival + random.random() * 3, self.abort, request, nodes)

    def abort(self, request: Request, nodes: list[PrefillNode | DecodeNode]) -> None:
        request.is_aborted = True
        for node in nodes:
            self.send(node.abort, request.id)

    def token(self, seq_id: SeqId, step: Step) -> None:
        request = self.requests[seq_id]
        assert step.index <= request.num_tokens, "an index is left out"
        request.num_tokens = max(request.num_tokens, step.index + 1)  # index 0 may come from both sides
        request.is_done = request.is_done or step.finished
        self.num_tokens += 1

    def send(self, handler: Callable[..., None], *args: object) -> None:
        self.at(self.random.expovariate(1 / self.slowness), handler, *args)

    def at(self, delay: float, handler: Callable[..., None], *args: object) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.order), handler, args))

    def run(self) -> None:
        for _ in range(MAX_EVENTS):
            if not self.events:
                break
            self.now, _, handler, args = heapq.heappop(self.events)
            handler(*args)
        left = [r.id for r in self.requests.values() if not (r.is_done or r.is_aborted)]
        if left or self.events:
            raise Stuck(f"{len(left)} of {len(self.requests)} requests stand still, {len(self.events)} events to come")
        used = [node.pool.num_used for node in (*self.prefills, *self.decodes)]
        assert not any(used), "a pool did not end empty"
