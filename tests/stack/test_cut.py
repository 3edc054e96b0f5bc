"""A full decode pool costs nobody the first token: prefill decodes until there is room, and then hands over (adr/0011).

The pool is as full as a test wants it: its marks are knobs, and one sequence is enough to be over low ones.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack.harness import PD, Running, eventually, running
from tests.stack.test_burst import slots_in
from tests.stack.test_churn import assert_nothing_left

FULL = {"decode.kv_low": 0.05, "decode.kv_high": 0.06}
ROOM = {"decode.kv_low": 0.8, "decode.kv_high": 0.92}
CHUNK = 64
START, END = (
    PD.replace("threshold_tokens = 0", "threshold_tokens = 1")
    .replace('kv_bytes = "{kv_bytes}"', 'kv_bytes = "{kv_bytes}"\nprefix_cache = false')
    .replace("cpus = [0]", f"cpus = [0]\nchunk_tokens = {CHUNK}")
    .split("[decode]")
)
PROFILE = START + "[decode]\nkv_low = 0.05\nkv_high = 0.06" + END.replace("{kv_bytes}", "{decode_kv_bytes}")
LOCAL = PROFILE.replace('name = "{name}"', 'name = "{name}"\n[supervise]\nrestart = "no"', 1)
PROMPT = [3 + (7 * i) % 500 for i in range(300)]
LONG = 600  # output tokens: there is time to look and to turn a knob


class Stream:
    """A streamed answer, read on a thread of its own until it ends or `leave`."""

    def __init__(self, url: str, **body: Any) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.logprobs: list[float] = []
        self.finish_reason = ""
        self.record: dict[str, Any] = {}
        self.error: dict[str, Any] | None = None
        self._url = url
        self._body = {"model": "m", "prompt": PROMPT, "max_tokens": LONG, "temperature": 0, "ignore_eos": True} | body
        self._has_left = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        body = self._body | {"stream": True, "return_token_ids": True}
        headers = {"x-pdctl-timing": "1"}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))
                if self._has_left:
                    return

    def _take(self, chunk: dict[str, Any]) -> None:
        with self._news:
            self.error = chunk.get("error")
            self.record = chunk.get("pdctl", {})
            for choice in chunk.get("choices", ()):
                self.ids += choice.get("token_ids") or []
                self.text += choice["text"]
                self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
                self.finish_reason = choice["finish_reason"] or self.finish_reason
            self._news.notify_all()

    def wait_for(self, num_tokens: int) -> "Stream":
        with self._news:
            assert self._news.wait_for(lambda: len(self.ids) >= num_tokens or self.error, 30), "no such token"
        return self

    def end(self) -> "Stream":
        self._thread.join(60)
        assert not self._thread.is_alive(), "the stream hangs"
        return self

    def leave(self) -> None:
        self._has_left = True
        self.end()

    @property
    def what_a_client_sees(self) -> tuple[Any, ...]:
        return self.ids, self.text, self.finish_reason, [round(value, 2) for value in self.logprobs]


class Box:
    """A stack whose decode pool is full, by what `hold` keeps there."""

    def __init__(self, stack: Running) -> None:
        self.stack, self.url = stack, stack.url
        self.pids = {p["name"]: p["pid"] for p in stack.status()["processes"]}

    def turn(self, values: dict[str, float]) -> None:
        self.stack.admin("/admin/knobs", "PATCH", {"values": values}, url=self.url)

    def load(self, worker: str) -> dict[str, Any]:
        workers = self.stack.admin("/admin/state", url=self.url)["workers"]
        load: dict[str, Any] = next(each for each in workers if each["name"] == worker)["load"]
        return load

    def steps(self, worker: str) -> int:
        """That it has made, and told of within a second."""
        at = time.monotonic()

        def said() -> int | None:
            workers = self.stack.admin("/admin/state", url=self.url)["workers"]
            found = next(each for each in workers if each["name"] == worker)
            is_new = (found["heartbeat_age_s"] or 99) < time.monotonic() - at
            return int(found["heartbeat"]["steps"]) if is_new else None

        steps: int = eventually(said, 10, "a heartbeat")
        return steps

    def hold(self) -> Stream:
        """Somebody who decodes for as long as a test lasts."""
        return Stream(self.url, prompt=[5] * 40, max_tokens=8000).wait_for(2)

    def kill(self, worker: str) -> None:
        os.kill(self.pids[worker], signal.SIGKILL)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Box]:
    with up(tmp_path_factory.mktemp("cut"), tiny_model_dir, PROFILE) as stack:
        yield Box(stack)


def up(tmp: Path, model: Path, profile: str) -> Any:
    return running(tmp, profile, model=model, max_len=8192, decode_kv_bytes=slots_in(model, 8192))


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.9, "logprobs": 2},
    "penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.2, "logprobs": 0},
    "grammar": {"structured_outputs": {"regex": "([a-z]{1,9} ){150,}"}, "temperature": 1.0, "seed": 3},
    "stop": {"temperature": 1.2, "seed": 11, "stop": ["ab", "cd"], "min_tokens": 400},
}


def test_the_text_does_not_tell(box: Box) -> None:
    """1. With room, each crosses at once. 2. With none, each has its tokens from prefill. 3. There is room: decode goes
    on in the middle of each. The client sees the same, and nothing is left on either side."""
    box.turn(ROOM)
    expected = {name: Stream(box.url, **body).end() for name, body in BODIES.items()}
    assert {stream.record["cut"] for stream in expected.values()} == {None}
    box.turn(FULL)
    holder = box.hold()
    before = box.load("prefill-0")["counters"]
    streams = {name: Stream(box.url, **body).wait_for(20) for name, body in BODIES.items()}
    assert box.load("decode-0")["over_high"]
    box.turn(ROOM)
    found = {name: stream.end() for name, stream in streams.items()}
    holder.leave()
    for name, stream in found.items():
        assert stream.what_a_client_sees == expected[name].what_a_client_sees, name
        assert stream.record["path"] == "pd"
        assert 20 <= stream.record["cut"] < len(stream.ids)
        assert stream.record["ahead_ms"] < stream.record["first_token_ms"]
        if name != "stop":  # that one is the router's: it does not wait for what decode has to tell
            assert stream.record["first_token_ms"] < stream.record["kv_ready_ms"]
    counters = box.load("prefill-0")["counters"]
    assert counters["cuts"] - before["cuts"] == len(BODIES)
    assert_nothing_left(box.stack)


def test_it_may_end_on_prefill(box: Box) -> None:
    """Decode has no room to the end: it forgets the sequence. Prefill made a step for each chunk of the prompt and one
    for each further token: nobody waited for more."""
    box.turn(FULL)
    holder = box.hold()
    before = box.steps("prefill-0")
    stream = Stream(box.url, max_tokens=50).end()
    num_steps = -(-len(PROMPT) // CHUNK) + 49
    eventually(lambda: box.steps("prefill-0") == before + num_steps, 15, "all steps told")
    assert (len(stream.ids), stream.finish_reason) == (50, "length")
    assert (stream.record["path"], stream.record["cut"]) == ("colocated", None)
    eventually(lambda: box.load("decode-0")["expected"] == 0, 5, "decode to forget it")
    holder.leave()
    assert_nothing_left(box.stack)


@pytest.mark.parametrize("when", ["ahead", "after the cut"])
def test_abort(box: Box, when: str) -> None:
    box.turn(FULL)
    holder = box.hold()
    stream = Stream(box.url).wait_for(5)
    if when == "after the cut":
        cuts = box.load("prefill-0")["counters"]["cuts"]
        box.turn(ROOM)
        eventually(lambda: box.load("prefill-0")["counters"]["cuts"] > cuts, 10, "the cut")
    stream.leave()
    holder.leave()
    assert_nothing_left(box.stack)


def is_cut(box: Box) -> Callable[[], bool]:
    return lambda: box.load("prefill-0")["counters"]["cuts"] > 0 and box.load("decode-0")["running"] > 1


@pytest.mark.parametrize(
    ("victim", "is_after"), [("prefill-0", False), ("decode-0", False), ("prefill-0", True), ("decode-0", True)]
)
def test_kill(tmp_path: Path, tiny_model_dir: Path, victim: str, is_after: bool) -> None:
    """Either dies, before decode has taken the sequence over or after it: the client gets its text, whole and right."""
    with up(tmp_path, tiny_model_dir, LOCAL) as stack:
        box = Box(stack)
        expected = Stream(box.url, temperature=0.8, seed=5).end()
        holder = box.hold()
        stream = Stream(box.url, temperature=0.8, seed=5).wait_for(20)
        if is_after:
            box.turn(ROOM)
            eventually(is_cut(box), 20, "the cut")
        box.kill(victim)
        if victim == "prefill-0" and not is_after:
            box.turn(ROOM)  # decode goes on alone as soon as it may
        assert stream.end().error is None
        assert stream.ids == expected.ids
        assert len(stream.ids) == LONG
        assert not holder.error
        holder.leave()
