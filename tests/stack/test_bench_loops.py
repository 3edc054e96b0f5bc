"""The request loops of `vllm bench serve` and sglang.bench_serving, as they read a stream: what they take for text, for
the end and for the count must be what was written."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.stack.exchange import ask

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LENGTHS = [(1, 1), (7, 2), (64, 16), (300, 33), (17, 64), (128, 8), (5, 100), (33, 40)]  # prompt, output


class Messages:
    """vLLM's: pieces are stripped as they come, events end at blank lines, and what is left counts once it is JSON."""

    def __init__(self) -> None:
        self._left = ""

    def add(self, piece: bytes) -> list[str]:
        *whole, self._left = (self._left + piece.decode()).split("\n\n")
        messages = [message.strip() for message in whole if message.strip()]
        if self._left.startswith("data: ") and _is_whole(self._left.removeprefix("data: ").strip()):
            messages.append(self._left.strip())
            self._left = ""
        return messages


def _is_whole(text: str) -> bool:
    if text == "[DONE]":
        return True
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def vllm_messages(answer: httpx.Response) -> Iterator[str]:
    messages = Messages()
    for piece in answer.iter_raw():
        if piece := piece.strip():
            yield from messages.add(piece)


def sglang_messages(answer: httpx.Response) -> Iterator[str]:
    """By lines, each of which is data."""
    pending = b""
    for piece in answer.iter_raw():
        *lines, pending = (pending + piece).split(b"\n")
        yield from (line.strip().decode() for line in lines if line.strip())


LOOPS = {"vllm": vllm_messages, "sglang": sglang_messages}


def fields_of(loop: str, path: str, prompt: str, output_len: int) -> dict[str, Any]:
    what = {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    if loop == "vllm" and path == CHAT:
        what = {"messages": [{"role": "user", "content": [{"type": "text", "text": prompt}]}]}
    length = {"max_tokens" if path == COMPLETIONS else "max_completion_tokens": output_len}
    common = {"model": "m", **what, **length, "temperature": 0.0, "ignore_eos": True, "stream": True}
    if loop == "sglang":
        return {**common, "best_of": 1} if path == COMPLETIONS else common
    more = {"repetition_penalty": 1.0, "logprobs": None} if path == COMPLETIONS else {}
    return {**common, **more, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_loop_reads(url: str, loop: str, path: str) -> None:
    def run(lengths: tuple[int, int]) -> None:
        prompt_len, output_len = lengths
        prompt = ask(url, "/detokenize", {"tokens": [67 + i % 26 for i in range(prompt_len)]}).body["prompt"]
        fields = fields_of(loop, path, prompt, output_len)
        text, num_pieces, usage, has_ended = "", 0, {}, False
        headers = {"x-request-id": "all carry the same one".replace(" ", "-")}
        with httpx.stream("POST", url + path, json=fields, headers=headers, timeout=60) as answer:
            assert answer.status_code == 200
            for message in LOOPS[loop](answer):
                data = message.removeprefix("data: ")
                if data == "[DONE]":
                    has_ended = True
                    continue
                chunk = json.loads(data)
                if choices := chunk.get("choices"):
                    choice = choices[0]
                    piece = choice["text"] if path == COMPLETIONS else choice["delta"].get("content")
                    text += piece or ""
                    num_pieces += bool(piece)
                else:
                    usage = chunk["usage"]
        whole = {k: v for k, v in fields.items() if k not in ("stream", "stream_options")}
        body = ask(url, path, whole).body
        choice = body["choices"][0]
        assert text == (choice["text"] if path == COMPLETIONS else choice["message"]["content"])
        assert has_ended
        assert bool(text) <= num_pieces <= output_len
        if loop == "vllm":
            assert usage["completion_tokens"] == output_len == body["usage"]["completion_tokens"]
            assert usage["prompt_tokens"] == body["usage"]["prompt_tokens"]

    with ThreadPoolExecutor(len(LENGTHS)) as clients:
        list(clients.map(run, LENGTHS))
