"""Real prefill and decode processes, and a router played by the test over their real sockets."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from server.boot import Boot
from server.card import text_facts
from server.config import Config
from server.grammar import json_grammar
from server.messages import (
    Abort,
    AbortAck,
    Card,
    Decode,
    Done,
    Heartbeat,
    Load,
    Pause,
    Prefill,
    Resume,
    SetKnobs,
    Tokens,
)
from server.sequence import SamplingParams, SeqId
from server.wire import Channel, Identity, connect, greet
from tests.stack import reference

ROOT = Path(__file__).parents[2]


def is_over(done: Done | None) -> bool:
    return done is not None and done.reason != "handed_over"


class Workers:
    """prefill-0 and decode-0, or more of these, on the tiny model, and the connections a router would have."""

    def __init__(self, folder: Path, model_dir: Path, num_decode: int = 1) -> None:
        self.model_dir = model_dir
        names = ("prefill-0", *(f"decode-{i}" for i in range(num_decode)))
        self.addresses = {name: f"unix:{folder}/{name}.sock" for name in names}
        self.secret = b"not a secret"
        (folder / "secret").write_bytes(self.secret)
        pool = {"workers": 1, "kv_bytes": "8MiB"}
        config = Config.model_validate(
            {
                "model": {"path": str(model_dir), "dtype": "float32", "max_len": 4096},
                "prefill": pool | {"cpus": [0]},
                "decode": pool | {"workers": num_decode, "cpus": [1] * num_decode, "host_swap_bytes": "8MiB"},
            }
        )
        self.boots = {
            name: Boot(name, config, str(model_dir), str(folder), str(folder / "secret"), self.addresses)
            for name in self.addresses
        }
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.channels: dict[str, Channel] = {}
        self.next = 0
        self.events: dict[SeqId, asyncio.Queue[tuple[str, Any]]] = {}
        self.loads: dict[str, Load] = {}
        self.steps: dict[str, int] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self, name: str, **env: str) -> None:
        read, write = os.pipe()
        boot = self.boots[name]
        file = self.folder / f"{name}.json"
        Boot(**{f: getattr(boot, f) for f in boot.__struct_fields__} | {"status_fd": write}).save(file)
        module = f"server.{name.partition('-')[0]}"
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(  # noqa: ASYNC220 (a test may wait for a fork)
                [sys.executable, "-P", "-m", module, "--boot", str(file)],
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env,
                pass_fds=[write],
                stderr=log,
            )
        os.close(write)
        await asyncio.to_thread(self._wait_ready, read)
        channel = await connect(self.addresses[name])
        card = Card(text_facts(self.model_dir, str(self.model_dir)))
        await greet(channel, Identity.new("router", "router"), self.secret, card)
        self.channels[name] = channel  # `beat` may use it from here on
        self.tasks.append(asyncio.create_task(self._read(name, channel)))

    def _wait_ready(self, fd: int) -> None:
        with os.fdopen(fd) as lines:
            for line in lines:
                said = json.loads(line)
                assert "error" not in said, said
                if said.get("ready"):
                    return
        raise AssertionError("ended before it was ready\n" + self.logs())

    async def _read(self, name: str, channel: Channel) -> None:
        while True:
            match await channel.recv():
                case Tokens(items):
                    for item in items:
                        self.events[item.id].put_nowait((name, item))
                case Done() as done:
                    self.events[done.id].put_nowait((name, done))
                case AbortAck(id):
                    self.events.setdefault(id, asyncio.Queue()).put_nowait((name, "ack"))
                case Load() as load:
                    self.loads[name] = load
                case Heartbeat(steps=steps):
                    self.steps[name] = steps

    async def beat(self) -> None:
        while True:
            for channel in self.channels.values():
                channel.send(Heartbeat())
            await asyncio.sleep(1)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        for channel in self.channels.values():
            await channel.close()
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            assert await asyncio.to_thread(process.wait, 15) == 0, self.logs()

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()}" for p in self.folder.glob("*.log"))

    def new_id(self) -> SeqId:
        self.next += 1
        id = SeqId("test", self.next, 0)
        self.events[id] = asyncio.Queue()
        return id

    def send(self, name: str, message: Any) -> None:
        self.channels[name].send(message)

    async def event(self, id: SeqId) -> tuple[str, Any]:
        async with asyncio.timeout(60):
            return await self.events[id].get()

    async def run(self, prompt: list[int], params: SamplingParams, path: str = "pd") -> tuple[list[int], list[Done]]:
        """All tokens, each index once; the Dones of those who had a part, prefill's first (they may cross)."""
        id = self.new_id()
        if path == "pd":
            self.send("prefill-0", Prefill(id, prompt, params, decode="decode-0"))
            self.send("decode-0", Decode(id, prompt, params, prefill="prefill-0"))
        else:
            self.send(path, Prefill(id, prompt, params))
        output: list[int] = []
        dones: dict[str, Done] = {}
        while not dones or (path == "pd" and len(dones) < 2 and not is_over(dones.get("prefill-0"))):
            name, event = await self.event(id)
            if isinstance(event, Done):
                dones[name] = event
            elif event.index == len(output):
                output.append(event.token.id)
            else:
                assert event.index < len(output), "a gap in the output"
                assert output[event.index] == event.token.id, "two workers, two texts"
        return output, [dones[name] for name in sorted(dones, reverse=True)]

    async def linked(self) -> None:
        """Until a sequence gets through from prefill to decode: their connection comes up by itself."""
        async with asyncio.timeout(20):
            while (await self.run([3], GREEDY))[1][0].reason == "error":
                await asyncio.sleep(0.05)  # between two tries

    async def load(self, name: str, holds: Callable[[Load], bool]) -> Load:
        """The next of its loads for which this holds."""
        async with asyncio.timeout(30):
            self.loads.pop(name, None)
            while name not in self.loads or not holds(self.loads[name]):
                await asyncio.sleep(0.02)
        return self.loads[name]

    async def settled(self) -> None:
        """Until both say that nothing is held."""
        async with asyncio.timeout(10):
            while True:
                self.loads.clear()
                while len(self.loads) < len(self.channels):
                    await asyncio.sleep(0.02)  # until both have reported anew
                if all(
                    not (w.blocks_used or w.blocks_granted or w.waiting or w.running or w.expected or w.receiving)
                    and not w.pushing
                    and w.slots_free == w.slots_total
                    for w in self.loads.values()
                ):
                    break
        assert {w.integrity for w in self.loads.values()} == {""}

    async def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes.pop(name).wait()
        await self.channels.pop(name).close()


@pytest.fixture
async def workers(tmp_path: Path, tiny_model_dir: Path) -> AsyncIterator[Workers]:
    workers = Workers(tmp_path, tiny_model_dir)
    workers.tasks.append(asyncio.create_task(workers.beat()))
    await asyncio.gather(workers.start("decode-0"), workers.start("prefill-0"))
    try:
        await workers.linked()
        yield workers
    except BaseException:
        print(workers.logs())
        raise
    finally:
        await workers.stop()


GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


async def test_the_life_of_a_sequence(workers: Workers, tiny_model_dir: Path) -> None:
    model = reference.load(tiny_model_dir)
    # 1. Through prefill and decode: the text of `generate`, whatever the prompt's length does at block and chunk edges.
    for length in (1, 16, 17, 64, 300, 1000):
        prompt = [3 + (7 * i) % 500 for i in range(length)]
        output, dones = await workers.run(prompt, GREEDY)
        assert output == reference.generate(model, prompt, 16)
        assert [done.reason for done in dones] == ["handed_over", "length"]
        stages = dones[1].stages
        assert stages["first_chunk"] <= stages["kv_ready"] <= stages["ready"] <= stages["start"]
        assert stages["kv_bytes"] > 0
    # 2. The same on one worker alone.
    output, dones = await workers.run(prompt, GREEDY, path="decode-0")
    assert output == reference.generate(model, prompt, 16)
    assert [done.reason for done in dones] == ["length"]
    # 3. Ends with its first token: decode is told to drop the grant.
    output, dones = await workers.run(prompt, SamplingParams(max_tokens=1, temperature=0.0))
    assert [done.reason for done in dones] == ["length"]
    # 4. Sampled with a seed: the same on both paths.
    sampled = SamplingParams(max_tokens=16, temperature=1.0, seed=5)
    assert (await workers.run(prompt[:50], sampled))[0] == (await workers.run(prompt[:50], sampled, "prefill-0"))[0]
    # 5. Nothing is left.
    await workers.settled()


async def test_aborts_at_every_moment(workers: Workers) -> None:
    prompt = list(range(3, 503)) * 2
    endless = SamplingParams(max_tokens=3000, temperature=0.0)
    for moment in range(8):
        id = workers.new_id()
        workers.send("prefill-0", Prefill(id, prompt, endless, decode="decode-0"))
        if moment:
            workers.send("decode-0", Decode(id, prompt, endless, prefill="prefill-0"))
        for _ in range(moment - 1):
            await workers.event(id)  # after none, the first token, the hand-over, ...
        workers.send("prefill-0", Abort(id))
        workers.send("decode-0", Abort(id))
        acks = 0
        while acks < 2:
            acks += (await workers.event(id))[1] == "ack"
    await workers.settled()


async def test_decode_goes_on_when_prefill_is_killed(workers: Workers, tiny_model_dir: Path) -> None:
    prompts = [[3 + n, *(3 + (11 * i) % 500 for i in range(1499))] for n in range(4)]
    model = reference.load(tiny_model_dir)
    expected = [reference.generate(model, prompt, 16) for prompt in prompts]
    # 1. Four prompts are under way: one has its first token, the others wait, are read, or are half sent.
    ids = [workers.new_id() for _ in prompts]
    for id, prompt in zip(ids, prompts, strict=True):
        workers.send("decode-0", Decode(id, prompt, GREEDY, prefill="prefill-0"))
        workers.send("prefill-0", Prefill(id, prompt, GREEDY, decode="decode-0"))
    firsts = [asyncio.create_task(workers.event(id)) for id in ids]
    await asyncio.wait(firsts, return_when=asyncio.FIRST_COMPLETED)
    # 2. Prefill dies. Decode computes the rest of each, and token 0 too where nobody said it.
    await workers.kill("prefill-0")
    for id, first, right in zip(ids, firsts, expected, strict=True):
        output: dict[int, int] = {}
        _, event = await first
        while not (isinstance(event, Done) and event.reason == "length"):
            if not isinstance(event, Done):
                output[event.index] = event.token.id
            _, event = await workers.event(id)
        assert [output[i] for i in sorted(output)] == right
    # 3. Another prefill worker of the same name joins without decode being restarted.
    await workers.start("prefill-0")
    await workers.linked()
    assert (await workers.run(prompts[0], GREEDY))[0] == expected[0]


async def test_a_costly_grammar_stops_nobody(workers: Workers) -> None:
    """It takes long to build, and long is many steps: they are not waited for one after the other."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 40} for i in range(3000)}}
    bound = SamplingParams(max_tokens=1, temperature=0.0, grammar=json_grammar(schema))
    stream, late = workers.new_id(), workers.new_id()
    workers.send("decode-0", Prefill(stream, [5] * 20, SamplingParams(max_tokens=3000, temperature=0.0)))
    await workers.event(stream)
    workers.send("decode-0", Prefill(late, [6] * 20, bound))
    _, event = await workers.event(late)
    assert event.index == 0
    between = workers.events[stream].qsize()
    assert between > 10, "tokens of the stream that came meanwhile"
    workers.send("decode-0", Abort(stream))
    # Once it is built, it is there for the next one, on the way through prefill too.
    output, dones = await workers.run([7] * 40, bound)
    assert (len(output), dones[0].reason) == (1, "length")


async def test_a_client_that_does_not_read_gives_its_memory_away(workers: Workers, tiny_model_dir: Path) -> None:
    prompt, num_tokens = [3 + (7 * i) % 500 for i in range(300)], 400
    id = workers.new_id()
    # 1. It decodes, and its client stops reading: no more tokens come, and its blocks stay for the time being.
    workers.send("decode-0", Prefill(id, prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0)))
    await workers.event(id)
    workers.send("decode-0", Pause(id))
    load = await workers.load("decode-0", lambda load: load.paused == 1)
    assert (load.running, load.swapped) == (1, 0) and load.blocks_used >= 300 // 16
    # 2. The knob says one second instead of thirty, and acts on those who are silent already.
    workers.send("decode-0", SetKnobs(2, {"decode.idle_swap_s": 1}))
    load = await workers.load("decode-0", lambda load: load.swapped == 1)
    assert (load.rev, load.running, load.blocks_used) == (2, 0, 0)
    # 3. Others take all of the room, one after another; what it had goes to host memory.
    for n in range(load.blocks_total * 16 // 4000 + 1):
        await workers.run([3 + n, *(3 + (11 * i) % 500 for i in range(3999))], GREEDY, path="decode-0")
    load = await workers.load("decode-0", lambda load: load.host_blocks_used > 0)
    assert load.swapped_out_bytes and load.swapped_out_blocks <= load.host_blocks_total and not load.swapped_in_blocks
    # 4. It reads on: its blocks come back, and the text is that of a client that never stopped.
    workers.send("decode-0", Resume(id))
    tokens: list[int] = []
    while not isinstance(event := (await workers.event(id))[1], Done):
        tokens.append(event.token.id)
    model = reference.load(tiny_model_dir)
    expected = await asyncio.to_thread(reference.generate, model, prompt, num_tokens)  # heartbeats go on meanwhile
    assert tokens == expected[1:]
    load = await workers.load("decode-0", lambda load: not load.paused)
    assert load.swapped_in_bytes >= load.swapped_in_blocks >= 300 // 16
    await workers.settled()


@pytest.mark.slow
async def test_another_decode_worker_takes_the_place_of_one_that_dies(tmp_path: Path, tiny_model_dir: Path) -> None:
    """KV stays on prefill until somebody has it. Every chunk to decode-0 is lost on the way, so that it is caught in
    the middle of its transfer, whatever the machine does."""
    model = reference.load(tiny_model_dir)
    prompt = [3 + (11 * i) % 500 for i in range(1500)]
    workers = Workers(tmp_path, tiny_model_dir, num_decode=2)
    workers.tasks.append(asyncio.create_task(workers.beat()))
    try:
        await asyncio.gather(
            workers.start("decode-0", PDCTL_FAULTS="transfer.lose=1"),
            workers.start("decode-1"),
            workers.start("prefill-0"),
        )
        await workers.load("prefill-0", lambda load: len(load.links) == 2)
        # 1. Prefill has read the prompt, said its first token, and waits for decode-0, which has nothing.
        id = workers.new_id()
        workers.send("prefill-0", Prefill(id, prompt, GREEDY, decode="decode-0"))
        workers.send("decode-0", Decode(id, prompt, GREEDY, prefill="prefill-0"))
        heard = [(await workers.event(id))[1] for _ in range(2)]
        assert heard[1].reason == "handed_over"
        await workers.load("decode-0", lambda load: load.counters["lost"] > 0)
        before = workers.steps.pop("prefill-0", None)
        while before is None or "prefill-0" not in workers.steps:
            await asyncio.sleep(0.02)  # heartbeats come by themselves
            before = workers.steps.get("prefill-0", before)
        # 2. decode-0 dies. decode-1 is named instead: the text is that of `generate`, each token once.
        await workers.kill("decode-0")
        workers.send("prefill-0", Prefill(id, prompt, GREEDY, decode="decode-1"))
        workers.send("decode-1", Decode(id, prompt, GREEDY, prefill="prefill-0"))
        output = {0: heard[0].token.id}
        while not (isinstance(event := (await workers.event(id))[1], Done) and event.reason == "length"):
            if not isinstance(event, Done):
                assert output.setdefault(event.index, event.token.id) == event.token.id
        assert [output[i] for i in sorted(output)] == reference.generate(model, prompt, 16)
        # 3. Prefill has not computed anything for that, decode-1 not the prompt. Nothing is left.
        workers.steps.clear()
        await workers.settled()
        while "prefill-0" not in workers.steps:
            await asyncio.sleep(0.02)  # as above
        assert workers.steps["prefill-0"] == before
        assert workers.loads["decode-1"].counters["recomputed"] == 0
        assert workers.loads["prefill-0"].counters["regranted"] == 1
    except BaseException:
        print(workers.logs())
        raise
    finally:
        await workers.stop()
