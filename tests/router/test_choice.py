"""Where a prompt goes: cached prefixes, backlog, the threshold and how it is measured, handles and whose they are."""

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.engine.block_pool import prefix_digests
from server.messages import NAME_BYTES, Blocks, Decode, Load, Prefill
from server.router.choice import Rates
from server.router.crossover import EXPLORE, Crossover, Mean
from server.router.worker import Inbox
from server.sequence import SeqId
from tests.router.conftest import SECRET, Cluster, Start, until

ADMIN = {"Authorization": f"Bearer {SECRET.decode()}"}
TIMED = {"x-pdctl-timing": "1"}
PROMPT = list(range(100, 200))  # 100 tokens: six whole blocks of 16


def names(prompt: list[int], salt: str = "") -> bytes:
    return b"".join(digest[:NAME_BYTES] for digest in prefix_digests(prompt, salt, 16))


async def publish(cluster: Cluster, worker: str, stored: bytes, removed: bytes = b"") -> None:
    """`worker` tells the router what it has cached."""
    for channel in cluster.fakes[worker]._channels:
        channel.send(Blocks(stored, removed))
    cached = cluster.stack.workers.all[worker].cached
    await until(lambda: stored[:NAME_BYTES] in cached or removed[:NAME_BYTES] not in cached)


async def ask(cluster: Cluster, prompt: list[int], **headers: str) -> dict[str, Any]:
    answer = await cluster.complete(headers={**TIMED, **headers}, prompt=prompt)
    assert answer.status == 200, answer.body
    record: dict[str, Any] = answer.json["pdctl"]
    return record


async def test_resident(start: Start) -> None:
    cluster = await start(prefill=1, decode=2)
    assert (await ask(cluster, PROMPT))["path"] == "pd"
    await publish(cluster, "decode-1", names(PROMPT))
    record = await ask(cluster, PROMPT)
    assert (record["path"], record["prefill"], record["decode"]) == ("resident", None, "decode-1")
    assert cluster.fakes["decode-1"].heard(Prefill)[0].num_resident == 96
    await publish(cluster, "decode-1", b"", names(PROMPT)[:NAME_BYTES])  # the first block is gone: nothing can be hit
    assert (await ask(cluster, PROMPT))["path"] == "pd"


async def test_a_stale_view_takes_the_other_path(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    cluster.decode.is_stale = True
    await publish(cluster, "decode-0", names(PROMPT))
    record = await ask(cluster, PROMPT)
    assert (record["path"], record["prefill"]) == ("pd", "prefill-0")
    (sent,) = cluster.decode.heard(Decode)
    assert sent.id.attempt == 1
    assert not cluster.stack.workers.all["decode-0"].open
    assert cluster.stack.workers.all["decode-0"].prompt_tokens == 0


@pytest.mark.parametrize("is_stale", [False, True])
async def test_several_choices_follow_the_first(start: Start, is_stale: bool) -> None:
    """By the plan that stood in the end, and with next to nothing to read."""
    cluster = await start(prefill=2, decode=3)
    await publish(cluster, "decode-1", names(PROMPT))
    cluster.fakes["decode-1"].is_stale = is_stale
    answer = await cluster.complete(headers=TIMED, prompt=PROMPT, n=4)
    assert len(answer.json["choices"]) == 4
    choices = (await cluster.request("GET", f"/admin/requests/{answer.json['id']}", headers=ADMIN)).json["sequences"]
    assert {(each["path"], each["prefill"], each["decode"]) for each in choices} == {
        tuple(choices[0][name] for name in ("path", "prefill", "decode"))
    }
    assert choices[0]["path"] == ("pd" if is_stale else "resident")
    sent = [message for fake in cluster.fakes.values() for message in fake.heard(Prefill)]
    assert len(sent) == (5 if is_stale else 4)
    assert all(not worker.prompt_tokens and not worker.open for worker in cluster.stack.workers.all.values())


async def test_hits_decide_what_is_short(start: Start) -> None:
    cluster = await start(prefill=1, decode=2, hybrid={"threshold_tokens": 64})
    assert (await ask(cluster, PROMPT))["path"] == "pd"
    await publish(cluster, "decode-1", names(PROMPT[:48]))  # 52 are left
    record = await ask(cluster, PROMPT)
    assert (record["path"], record["decode"]) == ("colocated", "decode-1")


async def test_prefill_by_cached_prefix(start: Start) -> None:
    cluster = await start(prefill=3, decode=1)
    await publish(cluster, "prefill-2", names(PROMPT[:64]))
    for _ in range(4):
        assert (await ask(cluster, PROMPT))["prefill"] == "prefill-2"


async def test_another_key_hits_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    cluster = await start(prefill=1, decode=1, router={"api_key_file": str(tmp_path / "keys")})
    await ask(cluster, PROMPT, Authorization="Bearer one")
    salt = cluster.prefill.heard(Prefill)[0].salt
    assert salt
    await publish(cluster, "decode-0", names(PROMPT, salt))
    assert (await ask(cluster, PROMPT, Authorization="Bearer two"))["path"] == "pd"
    assert (await ask(cluster, PROMPT, Authorization="Bearer one"))["path"] == "resident"


async def test_handle(start: Start) -> None:
    cluster = await start(prefill=1, decode=3)
    answer = await cluster.complete(prompt=PROMPT)
    handle = answer.headers["x-pdctl-kv"]
    for _ in range(4):
        assert (await ask(cluster, PROMPT, **{"x-pdctl-kv": handle}))["decode"] == handle.partition(".")[0]
    streamed = await cluster.complete(prompt=PROMPT, stream=True)
    assert streamed.headers["x-pdctl-kv"].startswith("decode-")
    for stale in ("decode-0.000000000000", "decode-7.1", "decode-1", "\\", ".", "x" * 999):
        assert (await ask(cluster, PROMPT, **{"x-pdctl-kv": stale}))["path"] == "pd"


async def test_a_handle_is_good_for_its_key_alone(start: Start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    cluster = await start(prefill=1, decode=3, router={"api_key_file": str(tmp_path / "keys")})
    headers = {"Authorization": "Bearer one"}
    handle = (await cluster.complete(prompt=PROMPT, headers=headers)).headers["x-pdctl-kv"]
    headers["x-pdctl-kv"] = handle
    assert {(await ask(cluster, PROMPT, **headers))["decode"] for _ in range(4)} == {handle.partition(".")[0]}
    headers["Authorization"] = "Bearer two"
    assert len({(await ask(cluster, PROMPT, **headers))["decode"] for _ in range(4)}) > 1, "as without one"


async def test_a_handle_does_not_lead_to_a_full_worker(start: Start) -> None:
    cluster = await start(prefill=1, decode=2)
    handle = (await cluster.complete(prompt=PROMPT)).headers["x-pdctl-kv"]
    pinned = cluster.stack.workers.all[handle.partition(".")[0]]
    assert pinned.load is not None
    pinned.load = msgspec.structs.replace(pinned.load, over_high=True)
    assert (await ask(cluster, PROMPT, **{"x-pdctl-kv": handle}))["decode"] != pinned.name


@pytest.mark.parametrize("stream", [False, True])
async def test_a_handle_names_who_holds_the_kv_in_the_end(start: Start, stream: bool) -> None:
    """decode-1 is believed to hold the prompt and does not; decode-0 has a sequence less: it gets this one."""
    cluster = await start(prefill=1, decode=2)
    cluster.fakes["decode-1"].is_stale = True
    await publish(cluster, "decode-1", names(PROMPT))
    cluster.stack.workers.all["decode-1"].attach(SeqId("test", 1, 0), Inbox())
    answer = await cluster.complete(prompt=PROMPT, stream=stream)
    assert answer.status == 200
    assert cluster.fakes["decode-1"].heard(Prefill), "it was asked first"
    assert answer.headers["x-pdctl-kv"].startswith("decode-0.")


async def test_a_full_decode_worker_comes_last(start: Start) -> None:
    cluster = await start(prefill=1, decode=2)
    await publish(cluster, "decode-0", names(PROMPT))
    for channel in cluster.fakes["decode-0"]._channels:
        channel.send(Load(0, 0, 0, 0, 0, 100, 95, 0, over_high=True))
    state = cluster.stack.workers.all["decode-0"]
    await until(lambda: state.load is not None and state.load.over_high)
    record = await ask(cluster, PROMPT)
    assert (record["path"], record["decode"]) == ("pd", "decode-1")


@pytest.mark.parametrize(("threshold", "path"), [(32, "colocated"), (0, "pd")])
async def test_backlog_spills_to_decode(start: Start, threshold: int, path: str) -> None:
    cluster = await start(prefill=1, decode=1, hybrid={"threshold_tokens": threshold})
    cluster.stack.dispatcher.use_knobs({"prefill.queue_high": 2})
    cluster.prefill.stepwise = True
    cluster.decode.token0_to_router = False
    asking = [asyncio.create_task(cluster.complete(prompt=PROMPT)) for _ in range(2)]
    await cluster.prefill.saw(Prefill, 2)
    last = asyncio.create_task(ask(cluster, [*PROMPT, 5]))
    if path == "colocated":
        assert (await last)["path"] == path
    else:
        await cluster.prefill.saw(Prefill, 3)
    cluster.prefill.step(100)
    await asyncio.gather(*asking, last)
    assert (await last)["path"] == path


async def test_a_long_line_does_not_spill_to_where_prompts_crawl(start: Start) -> None:
    """1. Prefill reads 1000 tokens a second and has a long line, nine prompts of 100. Decode, beside its streams, reads
    100 a second: one prompt there takes as long as the line, so that it crosses. 2. It reads 400: it stays. 3. With
    three before it there it would wait as long as for the line: it crosses."""
    cluster = await start(prefill=1, decode=1, hybrid={"threshold_tokens": 32})
    chooser, workers = cluster.stack.dispatcher.chooser, cluster.stack.workers.all
    for _ in range(9):
        workers["prefill-0"].begin_reading(100, time.monotonic())
    for rate, num_before, path in ((100.0, 0, "pd"), (400.0, 0, "colocated"), (400.0, 3, "pd")):
        chooser.rates = Rates(Mean(), Mean())
        chooser.rates.prefill.add(1000.0)
        chooser.rates.local.add(rate)
        for _ in range(num_before):
            workers["decode-0"].begin_reading(100, time.monotonic())
        assert (await ask(cluster, PROMPT))["path"] == path


async def test_a_few_prompts_at_once_do_not_spill(start: Start) -> None:
    """1. Prefill reads 1000 tokens a second, decode 500 beside its streams; five prompts of 100 wait at prefill: decode
    would be sooner. 2. They have just come: the next one crosses all the same. 3. There has been such a queue for two
    seconds: it stays on decode. 4. The queue was gone for a moment: the next one crosses."""
    cluster = await start(prefill=1, decode=1, hybrid={"threshold_tokens": 32})
    chooser, worker = cluster.stack.dispatcher.chooser, cluster.stack.workers.all["prefill-0"]
    chooser.rates.prefill.add(1000.0)
    chooser.rates.local.add(500.0)
    for _ in range(5):
        worker.begin_reading(100, time.monotonic())
    assert (await ask(cluster, PROMPT))["path"] == "pd"
    worker.backlogged_at -= 2
    assert (await ask(cluster, PROMPT))["path"] == "colocated"
    for _ in range(4):
        worker.end_reading(100)
    for _ in range(4):
        worker.begin_reading(100, time.monotonic())
    assert (await ask(cluster, PROMPT))["path"] == "pd"


def feed(crossover: Crossover, local: dict[int, float], pd: dict[int, float], count: int) -> list[int]:
    """Requests of every length in turn, each as slow as its path says; every threshold on the way."""
    seen = [crossover.tokens]
    for _ in range(count):
        for tokens in local:
            is_local = crossover.is_local(tokens)
            seconds = (local if is_local else pd)[tokens]
            if crossover.observe(is_local=is_local, num_uncached=tokens, seconds=seconds):
                seen.append(crossover.tokens)
    return seen


def test_crossover_finds_the_length() -> None:
    lengths = [20, 40, 80, 150, 300, 600, 1200, 2400]
    pd = {n: 0.3 + n / 1000 for n in lengths}
    slow = {n: n / 200 for n in lengths}  # alone it is slower from 75 tokens on, clearly so from 150
    assert feed(Crossover(4096), slow, pd, 40 * EXPLORE)[-1] == 128
    fast = {n: n / 900 for n in lengths}  # alike at 2400, clearly faster below
    assert feed(Crossover(4096), fast, pd, 40 * EXPLORE)[-1] == 2048


def test_crossover_stays_where_paths_are_alike() -> None:
    lengths = [20, 40, 80, 150, 300, 600]
    alike = {n: n / 500 for n in lengths}
    assert feed(Crossover(4096), alike, {n: t * 1.05 for n, t in alike.items()}, 20 * EXPLORE) == [256]


async def test_what_auto_comes_to_is_told(start: Start) -> None:
    cluster = await start(prefill=1, decode=1, hybrid={"threshold_tokens": "auto"})
    cluster.stack.dispatcher.chooser.crossover.tokens = 512
    knob = (await cluster.request("GET", "/admin/knobs", headers=ADMIN)).json["knobs"]["hybrid.threshold_tokens"]
    assert (knob["now"], knob["measured"]) == ("auto", 512)
    cluster.stack.dispatcher.use_knobs({"hybrid.threshold_tokens": 300})
    knob = (await cluster.request("GET", "/admin/knobs", headers=ADMIN)).json["knobs"]["hybrid.threshold_tokens"]
    assert "measured" not in knob


async def test_crossover_learns_only_where_the_threshold_chose(start: Start) -> None:
    """1. A short prompt stays: a figure. 2. Decode cannot keep its pace and has a stream: all cross, no figure.
    3. Decode is gone: all stay, no figure."""
    cluster = await start(prefill=1, decode=1, hybrid={"threshold_tokens": "auto"})
    crossover, decode = cluster.stack.dispatcher.chooser.crossover, cluster.stack.workers.all["decode-0"]
    assert (await ask(cluster, PROMPT))["path"] == "colocated"
    known = crossover.table()
    assert [(row["from_tokens"], row["pd_ms"]) for row in known] == [(64, None)]
    decode.load = msgspec.structs.replace(cluster.decode.load, is_tight=True)
    decode.attach(SeqId("test", 1, 0), Inbox())
    assert (await ask(cluster, PROMPT[:50]))["path"] == "pd"
    await cluster.decode.stop()
    await until(lambda: not decode.is_connected)
    assert (await ask(cluster, PROMPT[:40]))["decode"] == "prefill-0"
    assert crossover.table() == known


async def test_a_holder_beside_a_colocated_pool(start: Start) -> None:
    cluster = await start(prefill=1, decode=1, colocated=1, hybrid={"threshold_tokens": 500})
    assert (await ask(cluster, PROMPT))["decode"] == "colocated-0"
    await publish(cluster, "decode-0", names(PROMPT))
    record = await ask(cluster, PROMPT)
    assert (record["path"], record["decode"]) == ("resident", "decode-0")


async def test_a_rested_prefill_worker_takes_whole_short_prompts(start: Start) -> None:
    """1. Its probe has just crossed: short prompts stay on decode. 2. Rested, it shares them. 3. A long prompt crosses,
    and short ones leave it alone again. 4. Where every prompt crosses, it never does one alone."""
    cluster = await start(prefill=1, decode=1, hybrid={"threshold_tokens": 64, "rest_s": 1000.0})
    prefill = cluster.stack.workers.all["prefill-0"]
    short = PROMPT[:20]
    assert {(await ask(cluster, short))["decode"] for _ in range(4)} == {"decode-0"}
    prefill.crossed_at -= 1001
    records = [await ask(cluster, short) for _ in range(4)]
    assert {(r["path"], r["decode"]) for r in records} == {("colocated", "decode-0"), ("colocated", "prefill-0")}
    assert (await ask(cluster, PROMPT))["path"] == "pd"
    assert {(await ask(cluster, short))["decode"] for _ in range(4)} == {"decode-0"}
    prefill.crossed_at -= 1001
    cluster.stack.dispatcher.use_knobs({"hybrid.threshold_tokens": 0})
    assert (await ask(cluster, short))["path"] == "pd"
