"""Loads are what they say, and the same for both sides."""

from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from pdctl.bench.loads import Loop, Shape, from_trace, items
from pdctl.bench.traces import read
from pdctl.exits import UsageError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
2023-11-16 18:17:04.9799600,300,5
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
50,GPT-4,0,0,0,Conversation log
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 30535, "input_length": 700, "output_length": 26, "hash_ids": [46, 57]}
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_equal_seeds_equal_loads() -> None:
    shape, loop = Shape(50, 5), Loop(rate=3.0)
    assert items(shape, loop, 10, 4) == items(shape, loop, 10, 4) != items(shape, loop, 10, 5)


@pytest.mark.parametrize("burst", [0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_burstiness(burst: float) -> None:
    load = items(Shape(1, 1), Loop(rate=4.0, burst=burst), 20_000, 1)
    gaps = [b.at - a.at for a, b in pairwise(load)]
    assert fmean(gaps) == pytest.approx(0.25, rel=0.06)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burst, rel=0.06)


def test_shared_prefix() -> None:
    a, b = items(Shape(100, 5, shared=0.6), Loop(concurrency=1), 2, 1)
    assert a.prompt[:60] == b.prompt[:60]
    assert a.prompt[60:] != b.prompt[60:]
    assert len(a.prompt) == 100


def test_a_mix_has_each_length_once_in_every_run() -> None:
    mix = (10, 10, 10, 40)
    load = items(Shape(18, 5, mix=mix), Loop(concurrency=1), 40, 1)
    runs = [[len(item.prompt) for item in load[i : i + 4]] for i in range(0, 40, 4)]
    assert all(sorted(run) == sorted(mix) for run in runs)
    assert len(set(map(tuple, runs))) > 1, "in an order of its own"
    assert str(Shape(18, 5, mix=mix)) == "10x3+40/5"


def test_azure(trace: Path) -> None:
    trace.write_text(AZURE)
    found = read(trace)
    assert [(r.prompt, r.output) for r in found] == [(4808, 10), (110, 27), (300, 5)]
    assert [r.at for r in found] == pytest.approx([0, 0.052, 1.0], abs=1e-5)


def test_burst_gpt(trace: Path) -> None:
    trace.write_text(BURST)
    assert [(r.at, r.prompt, r.output) for r in read(trace)] == [(0, 472, 18), (40, 1087, 230)]


def test_mooncake_blocks_of_one_name_hold_the_same_tokens(trace: Path) -> None:
    trace.write_text(MOONCAKE)
    first, second = from_trace(read(trace), 0, 0, seed=1)
    assert (len(first.prompt), len(second.prompt), second.at) == (1100, 700, pytest.approx(3.053))
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:700] != second.prompt[512:]


def test_scaled_and_cut(trace: Path) -> None:
    trace.write_text(AZURE)
    load = from_trace(read(trace), rate=10.0, max_len=200, seed=1)
    assert load[-1].at == pytest.approx(0.2)
    assert [(len(i.prompt), i.output) for i in load] == [(190, 10), (110, 27), (195, 5)]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "", '{"timestamp": 1}\n', AZURE.splitlines()[0] + "\nx,1,1\n"])
def test_what_is_no_trace_is_refused(trace: Path, text: str) -> None:
    trace.write_text(text)
    with pytest.raises(UsageError, match="trace"):
        read(trace)
