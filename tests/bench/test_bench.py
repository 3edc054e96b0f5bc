"""The whole command against two servers whose times are known, and what is made of a result."""

import copy
import json
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pdctl.bench import compare, criteria, gauges, term
from pdctl.bench.cells import paths
from pdctl.bench.report import html
from pdctl.bench.run import Asked, mix_of, plan_of, rates_of
from pdctl.bench.sample import Sample
from pdctl.bench.session import Session
from pdctl.bench.stats import change, interval, quantile, spread
from pdctl.bench.target import Target, parse_mode
from pdctl.cli.app import main
from pdctl.exits import Exit, UsageError
from tests.bench.fake_server import in_a_thread

GRID = ["--prompt", "16", "--prompt", "64", "-c", "1", "-c", "3", "--output", "6", "--rounds", "2", "--requests", "3"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Colocated: first token after 150 ms, then 10 ms each. Split: 30 ms, then 10 ms each."""
    file = tmp_path_factory.mktemp("bench") / "r.json"
    with in_a_thread(first_s=0.15) as slow, in_a_thread(first_s=0.03) as fast:
        modes = ["--mode", f"colocated={slow.url}", "--mode", f"split={fast.url}"]
        assert main(["bench", *modes, *GRID, "-o", str(file), "--report", str(file.with_suffix(".html"))]) == 0
        both = Counter(map(str, slow.requests)) & Counter(map(str, fast.requests))
        assert both.total() > 2 * 2 * (3 + 6 + 3), "the same load against each, but for what keeps users at work"
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_cells(result: dict[str, Any]) -> None:
    assert [m["name"] for m in result["modes"]] == ["colocated", "split"]
    assert len(result["cells"]) == 8
    for cell in result["cells"]:
        assert cell["errors"] == 0
        assert cell["requests"] == 2 * max(3, 2 * cell["concurrency"])
        assert (cell["prompt_tokens"], cell["output_tokens"]) == (cell["prompt"], 6)
        nominal = 150 if cell["mode"] == "colocated" else 30
        assert nominal - 2 < cell["ttft_ms"]["p50"] < nominal + 60, "never early; late as the machine is busy"
        assert 5 < cell["tpot_ms"]["p50"] < 40
        assert cell["dropped"] == (2 * cell["concurrency"] if cell["concurrency"] > 1 else 0), "in both rounds"


def test_verdict_in_words(result: dict[str, Any]) -> None:
    (line,) = [text for text in result["verdict"] if text.startswith("split against colocated")]
    assert "TTFT better in 4" in line
    assert "worse in none" in line


def test_table_people_know(result: dict[str, Any]) -> None:
    text = compare.show(result)
    assert "colocated TTFT" in text
    assert "CHANGE" in text
    assert "-7" in text or "-6" in text or "-8" in text, "a fifth of the TTFT, and some noise"


def test_report_is_whole_and_fetches_nothing(result: dict[str, Any]) -> None:
    text = html(result)
    names: list[str] = []
    HTMLParser.handle_starttag = lambda self, tag, attrs: names.append(tag)  # type: ignore[method-assign]
    HTMLParser().feed(text)
    assert names.count("svg") >= 6
    assert "script" not in names
    assert "src=" not in text
    assert "href=" not in text
    assert "NaN" not in text


def test_terminal_plots(result: dict[str, Any]) -> None:
    text = term.plots(result)
    assert "colocated 16 x 1" in text
    assert max(map(len, text.splitlines())) < 110


def test_fail_on(result: dict[str, Any]) -> None:
    assert criteria.parse("ttft_p50>50ms").missed(result)
    assert not criteria.parse("split:ttft_p50>50ms").missed(result)
    assert not criteria.parse("ttft_p99 > 5s").missed(result)
    assert criteria.parse("attained<101%").missed(result)
    with pytest.raises(UsageError, match="no quantity"):
        criteria.parse("ttft_p42>1")


def test_compare_two_results(result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slower = copy.deepcopy(result)
    for cell in slower["cells"]:
        cell["ttft_ms"] = {name: value * 3 for name, value in cell["ttft_ms"].items()}
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, value in zip(files, (result, slower), strict=True):
        file.write_text(json.dumps(value))
    assert main(["bench", "--compare", *map(str, files)]) == 0
    assert "+200%" in capsys.readouterr().out
    assert main(["bench", "--compare", *map(str, files), "--fail-on", "split:ttft_p50>60ms"]) == 8
    assert "missed: split:ttft_p50>60ms" in capsys.readouterr().err


def test_unlike_token_counts_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with in_a_thread(first_s=0.0, gap_s=0.0) as one, in_a_thread(first_s=0.0, gap_s=0.0, extra_prompt_tokens=5) as two:
        modes = ["--mode", f"a={one.url}", "--mode", f"b={two.url}"]
        code = main(["bench", *modes, "--prompt", "20", "-c", "1", "--output", "3", "--rounds", "1", "--requests", "2"])
    assert code == 2
    assert "unlike loads" in capsys.readouterr().err


def test_nothing_served_is_a_miss() -> None:
    with in_a_thread(fails_every=1) as fake:
        words = f"bench --mode {fake.url} --prompt 8 -c 1 --output 2 --rounds 1 --requests 1"
        assert main(words.split()) == 8


def test_a_mix_against_both(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    with in_a_thread() as one, in_a_thread() as two:
        modes = f"--mode colocated={one.url} --mode b={two.url}".split()
        words = ["--mix", "8,8,32", "-c", "2", "--output", "2", "--rounds", "1", "--requests", "4", "-o", str(file)]
        assert main(["bench", *modes, *words]) == 0
        assert (Counter(map(str, one.requests)) & Counter(map(str, two.requests))).total() > 4 + 2
        assert {len(r["prompt"]) for r in one.requests} >= {8, 32}
    result = json.loads(file.read_text())
    assert {(c["prompt"], *c["mix"]) for c in result["cells"]} == {(16, 8, 8, 32)}
    assert "8x2+32" in compare.show(result)
    assert "8x2+32" in html(result)


@pytest.mark.parametrize("text", ["", "8,,9", "8,x", "0,8"])
def test_what_is_no_mix_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not like"):
        mix_of(text)


def test_what_was_measured_before_an_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, begun = tmp_path / "r.json", []

    async def run(self: Session, target: Target, *more: object) -> None:
        begun.append(target.mode.name)
        if len(begun) == 2:
            raise KeyboardInterrupt
        await whole_round(self, target, *more)  # type: ignore[arg-type]

    whole_round = Session._round
    monkeypatch.setattr(Session, "_round", run)
    with in_a_thread() as one, in_a_thread() as two:
        modes = f"--mode colocated={one.url} --mode b={two.url}".split()
        words = f"--prompt 8 -c 1 --output 2 --rounds 1 --requests 2 -o {file}".split()
        assert main(["bench", *modes, *words]) == Exit.INTERRUPTED
    result = json.loads(file.read_text())
    assert [(c["mode"], c["requests"]) for c in result["cells"]] == [("colocated", 2)]
    assert not result["is_whole"]
    assert "cut short" in html(result)


def test_nothing_begins_that_would_end_too_late(tmp_path: Path) -> None:
    """Two modes, two loads, three rounds: twelve runs of ten seconds each, and 95 seconds for them."""
    now, told = [0.0], []

    def tell(done: int, total: int, what: str) -> None:
        now[0] += 10
        told.append(what)

    with in_a_thread(first_s=0.0, gap_s=0.0) as one, in_a_thread(first_s=0.0, gap_s=0.0) as two:
        modes = (f"colocated={one.url}", f"pd={two.url}")
        plan = plan_of(Asked(tmp_path, modes, prompts=(8, 16), concurrencies=(1,), output=2, requests=2, within_s=95))
        result = Session(plan, tell, clock=lambda: now[0]).run()
        count = len(told)
        early = Session(replace(plan, within_s=15), tell, clock=lambda: now[0]).run()
    # 1. Both sides have two rounds whole; of the third, which begins as the first did, one run of colocated's fits.
    assert [(c["mode"], c["prompt"], c["rounds"]) for c in result["cells"]] == [
        ("colocated", 8, 3),
        ("colocated", 16, 2),
        ("pd", 8, 2),
        ("pd", 16, 2),
    ]
    assert count == 9
    # 2. It says so.
    assert (result["is_whole"], result["runs"]) == (False, [9, 12])
    assert "9 of 12 runs; some cells have fewer rounds" in "\n".join(compare.verdict(result))
    assert "cut short" in html(result | {"verdict": compare.verdict(result)})
    # 3. A mode that was not reached is named, and passes no criterion. A result from before there was a count: as well.
    assert [(c["mode"], c["prompt"]) for c in early["cells"]] == [("colocated", 8)]
    assert "nothing of colocated 16/2 c=1, pd 8/2 c=1, pd 16/2 c=1" in "\n".join(compare.verdict(early))
    assert criteria.parse("pd:ttft_p95>9s").missed(early) == [
        "pd:ttft_p95>9s: pd 8/2 c=1 was not measured",
        "pd:ttft_p95>9s: pd 16/2 c=1 was not measured",
    ]
    assert criteria.parse("p:ttft_p95>9s").missed(result) == ["p:ttft_p95>9s: there is no mode p"]
    old = {name: value for name, value in early.items() if name not in ("runs", "not_measured")}
    assert "cut short" in html(old)
    # 4. Nothing at all in time is an error; --quick has five minutes, unless it is to do more.
    with pytest.raises(UsageError, match="nothing could be measured in 5 s"):
        Session(replace(plan, within_s=5), tell, clock=iter(range(0, 900, 9)).__next__).run()
    assert plan_of(Asked(tmp_path, is_quick=True)).within_s == pytest.approx(285)
    assert plan_of(Asked(tmp_path, is_quick=True, within_s=60)).within_s == 60
    assert plan_of(Asked(tmp_path, is_quick=True, rounds=9)).within_s == plan_of(Asked(tmp_path)).within_s == 0


def test_paths_are_told_by_who_did_it() -> None:
    records = [{"path": "pd", "decode": "decode-0"}, {"path": "colocated", "decode": "prefill-0"}, {}]
    records += [{"path": "colocated", "decode": "decode-1"}] * 2
    shares = paths([Sample(0.0, record=record) for record in records])
    assert shares == {"decode": 0.5, "pd": 0.25, "prefill": 0.25}


def test_trace_against_both(tmp_path: Path) -> None:
    trace, out = tmp_path / "t.jsonl", tmp_path / "r.json"
    rows = [{"timestamp": 100 * n, "input_length": 30 + n, "output_length": 3} for n in range(20)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    with in_a_thread(first_s=0.02) as one, in_a_thread(first_s=0.01) as two:
        modes = f"--mode colocated={one.url} --mode b={two.url}".split()
        words = ["--trace", str(trace), "--rate", "40", "--rounds", "1", "--requests", "20", "--max-len", "64"]
        assert main(["bench", *modes, *words, "-o", str(out), "--report", str(tmp_path / "r.html")]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert [(c["trace"], c["requests"], c["rate"]) for c in cells] == [("t.jsonl", 18, 40.0)] * 2
    assert all(c["requests_s"] == pytest.approx(40, rel=0.4) for c in cells)


def advised(share: float, busy: dict[str, float], changes: dict[int, float]) -> list[str]:
    cells = []
    for prompt, factor in changes.items():
        for mode, ttft in (("colocated", 100.0), ("pd", 100.0 * factor)):
            times = {"mean": ttft, "p50": ttft, "p95": ttft, "p99": ttft, "max": ttft, "low": ttft, "high": ttft}
            cells.append(
                {"mode": mode, "prompt": prompt, "output": 9, "concurrency": 4, "rate": 0, "requests": 5}
                | {"prompt_tokens": prompt, "output_tokens": 9, "ttft_ms": times, "tpot_ms": times, "itl_ms": times}
                | {
                    "requests_s": 1.0,
                    "attained": 1.0,
                    "transfer": {"share_of_ttft": share},
                    "utilisation": busy if mode == "pd" else {},
                }
            )
    modes = [{"name": "colocated", "layout": {"prefill": 0}}, {"name": "pd", "layout": {"prefill": 1}}]
    return compare.advice({"cells": cells, "modes": modes})


def test_advice() -> None:
    even = {"prefill": 0.9, "decode": 0.8}
    assert any("is 40% of TTFT" in line for line in advised(0.4, even, {128: 1.0}))
    assert not any("warning" in line for line in advised(0.3, even, {128: 1.0}))
    assert any("threshold_tokens = 1024" in line for line in advised(0.1, even, {128: 1.5, 1024: 0.8}))
    assert any("too little prefill" in line for line in advised(0.1, even, {128: 0.9, 1024: 1.4}))
    uneven = advised(0.1, {"prefill": 0.95, "decode": 0.3}, {128: 1.0})
    assert any("the prefill pool is the limit" in line for line in uneven)


def test_statistics() -> None:
    assert [quantile(range(1, 101), q) for q in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert quantile([], 0.5) == 0
    low, high = interval([[1.0, 2.0, 3.0] * 30, [1.0, 2.0, 3.0] * 30])
    assert low < 2 < high
    assert high - low == pytest.approx(4 * 0.816 / 180**0.5, rel=0.2)
    middle, low, high = change([[1.0, 1.1] * 20], [[2.0, 2.2] * 20])
    assert low < middle < high
    assert middle == pytest.approx(1.0)
    assert spread([[0.1], []]).mean == pytest.approx(100)


def test_a_swept_budget_is_one_family(tmp_path: Path) -> None:
    plan = plan_of(Asked(tmp_path, modes=("colocated", "pd=demo"), budgets=(64, 256)))
    assert [(m.name, m.family, m.sets) for m in plan.modes] == [
        ("colocated-64", "colocated", ("colocated.token_budget=64", "colocated.chunk_tokens=64")),
        ("colocated-256", "colocated", ("colocated.token_budget=256", "colocated.chunk_tokens=256")),
        ("pd", "", ()),
    ]


def swept(result: dict[str, Any], points: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """`points`: requests/s and p99 gap of each mode, at the one load of a result."""
    load = result["cells"][0]
    cells = []
    for mode, (rate, tail) in points.items():
        cells.append(copy.deepcopy(load) | {"mode": mode, "requests_s": rate})
        cells[-1]["itl_ms"]["p99"] = tail
    modes = [{"name": m, "what": m, "family": m.partition("-")[0]} for m in points]
    return result | {"modes": modes, "cells": cells, "verdict": None}


@pytest.mark.parametrize(
    ("pd", "words"),
    [
        ((4.0, 9.0), "beyond every budget of colocated in 1 (16 at 1)"),
        ((2.4, 21.0), "no better than one of them in 1 (16 at 1)"),
        ((2.2, 9.0), "the worse of the other in 1 (16 at 1)"),
    ],
)
def test_frontier(result: dict[str, Any], pd: tuple[float, float], words: str) -> None:
    """A split that beats one budget of the colocated side is measured against the others too."""
    found = swept(result, {"colocated-64": (2.0, 10.0), "colocated-256": (2.5, 20.0), "pd": pd})
    (line,) = [text for text in compare.verdict(found) if text.startswith("frontier")]
    assert words in line
    page = html(found)
    plot = page[page.index("Frontier over budgets, prompt 16") :]
    plot = plot[: plot.index("</figure>")]
    assert [plot.count(f">{budget}</text>") for budget in ("64", "256")] == [1, 1], "its points are named"
    assert plot.count("<circle") == 3


def test_ranges_of_rates() -> None:
    assert rates_of(["0.5", "1..8", "3..7"]) == (0.5, 1, 2, 4, 8, 3, 6, 7)
    with pytest.raises(UsageError, match="--rate fast"):
        rates_of(["fast"])


def test_modes() -> None:
    mode = parse_mode("hybrid=demo+hybrid.threshold_tokens=512")
    assert (mode.name, mode.what, mode.sets, mode.is_url) == ("hybrid", "demo", ("hybrid.threshold_tokens=512",), False)
    assert parse_mode("./mine.toml").name == "mine"
    assert parse_mode("http://gpu1:8000").name == "gpu1-8000"
    assert parse_mode("vllm=http://gpu1:8000/v1").what == "http://gpu1:8000/v1"


def test_bad_profile_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--mode", "no-such-profile"]) == 2
    assert main(["bench", "--mode", "a=http://x", "--mode", "a=http://y"]) == 2
    assert "two modes are called a" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-o", "--report"])
@pytest.mark.parametrize(
    ("name", "words"), [("", "is a folder"), ("no/r", "there is no folder"), ("r" * 300, "too long")]
)
def test_where_results_cannot_go_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, name: str, words: str
) -> None:
    with in_a_thread() as server:
        assert main(["bench", "--mode", server.url, "--mode", f"b={server.url}", option, str(tmp_path / name)]) == 2
        assert not server.requests
    error = capsys.readouterr().err
    assert words in error
    assert option in error


def test_a_result_does_not_take_the_place_of_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    with in_a_thread() as server:
        words = f"--mode {server.url} --mode b={server.url} --prompt 8 -c 1 --output 2 --rounds 1 --requests 1".split()
        assert main(["bench", *words, "-o", str(link)]) == 0
    assert link.is_symlink()
    assert json.loads(real.read_text())["kind"] == "bench"


def test_gauges() -> None:
    text = (
        'pdctl_worker_busy_share{role="decode",worker="decode-0"} 0.5\n'
        'pdctl_worker_busy_share{role="decode",worker="decode-1"} 1.0\n'
        'pdctl_worker_waiting{role="decode",worker="decode-0"} 3.0\nother{} 1\n'
    )
    point, workers = gauges.parse(text)
    assert workers == {"decode": 2}
    assert gauges.Gauges([(0.0, point)], workers).busy() == {"decode": 0.75}
