"""The last minute: percentiles are measured values, and what is older than a minute is gone."""

import pytest

from server.router.stats import WINDOW_S, Stats, Window, figures, percentile
from tests.router.conftest import Start


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 0.50) == 50
    assert percentile(values, 0.95) == 95
    assert percentile([7.0], 0.95) == 7


def test_a_minute_later_nothing_is_left() -> None:
    clock = Clock()
    window = Window(clock)
    window.add(0.2)
    assert figures(window) == {"p50": 200.0, "p95": 200.0, "n": 1}
    clock.now += WINDOW_S + 0.1
    assert figures(window) == {"p50": None, "p95": None, "n": 0}
    assert window.rate() == 0


def test_a_full_window_is_shorter_and_its_rate_stays_right() -> None:
    clock = Clock()
    window = Window(clock, kept=100)
    for _ in range(1000):  # 50 a second for 20 s
        clock.now += 0.02
        window.add(1.0)
    assert window.rate() == pytest.approx(50, rel=0.05)


def test_bandwidth_takes_bytes_and_time_of_the_same_transfers() -> None:
    clock = Clock()
    stats = Stats((1.0, 0.1), clock)
    for size, seconds in ((100, 0.1), (1000, 1.0)):
        stats.sequence_over(
            prefill="prefill-0",
            decode="decode-0",
            prompt_tokens=8,
            read_tokens=5,
            seconds={"transfer": seconds, "ttft": 0.5, "tpot": seconds},
            kv_bytes=size,
            resends=0,
        )
    clock.now += 20
    value = stats.as_dict()
    assert value["kv_bytes_s"] == 1000
    assert value["slo_share"] == 0.5
    assert value["workers"]["prefill-0"]["tok_s"] == pytest.approx(10 / 20)


async def test_state_and_requests_tell_of_what_was_served(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    secret = {"Authorization": "Bearer not much of a secret"}
    before = (await cluster.request("GET", "/admin/state", headers=secret)).json["stats"]
    assert before["ttft_ms"]["n"] == 0  # probes are nobody's requests
    answer = await cluster.complete(max_tokens=4)
    stats = (await cluster.request("GET", "/admin/state", headers=secret)).json["stats"]
    assert stats["ttft_ms"]["n"] == 1
    assert stats["itl_ms"]["n"] == 3
    assert stats["totals"]["output_tokens"] == 4
    assert stats["totals"]["requests"] == 1
    rows = (await cluster.request("GET", "/admin/requests?limit=5", headers=secret)).json["requests"]
    assert [row["id"] for row in rows] == [answer.json["id"]]
    assert rows[0]["state"] == "done"
    assert rows[0]["output_tokens"] == 4
    assert (await cluster.request("GET", "/admin/requests?limit=x", headers=secret)).status == 400
    assert (await cluster.request("GET", "/admin/requests")).status == 401
