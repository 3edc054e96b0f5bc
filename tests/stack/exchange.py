"""One request to a live stack, whole or streamed, read the way the contract says it must be readable.

`ask` sends it; `check_stream` holds the raw bytes of a stream to what every stream must be; `gathered` puts a stream's
chunks together into what a whole answer would have been.
"""

import json
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass
class Exchange:
    status: int
    headers: httpx.Headers
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """All JSON events; [DONE] is not one."""
        events = self.raw.decode().removesuffix("\n\n").split("\n\n")
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def ask(url: str, path: str, fields: dict[str, Any], *, stream: bool = False, timing: bool = False) -> Exchange:
    body = {**fields, "stream": True} if stream else fields
    headers = {"x-pdctl-timing": "1"} if timing else {}
    answer = httpx.post(f"{url}{path}", json=body, headers=headers, timeout=120)
    return Exchange(answer.status_code, answer.headers, answer.content)


def check_stream(exchange: Exchange, path: str) -> None:
    """The framing, byte for byte, and what holds for the chunks of any request."""
    raw = exchange.raw
    assert exchange.status == 200, raw
    assert exchange.headers["content-type"].startswith("text/event-stream")
    assert exchange.headers["cache-control"] == "no-cache"
    assert exchange.headers["x-accel-buffering"] == "no"
    assert b"\r" not in raw
    assert raw.endswith(b"data: [DONE]\n\n")
    assert raw.count(b"[DONE]") == 1
    for line in raw.decode().split("\n"):
        assert not line or line.startswith("data: "), "no comment, no ping, no event name"
    for end in ("\u2028", "\u2029", "\u0085"):
        assert end.encode() not in raw, "line iterators split there"
    chunks = exchange.chunks
    assert len({(c["id"], c["created"], c["object"], c["model"]) for c in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-" if "chat" in path else "cmpl-")
    for index, parts in by_choice(chunks).items():
        assert all("finish_reason" in part and "logprobs" in part for part in parts)
        assert [bool(part["finish_reason"]) for part in parts] == [False] * (len(parts) - 1) + [True], index
        if "chat" in path:
            roles = [part["delta"].get("role") for part in parts]
            assert roles == ["assistant"] + [None] * (len(roles) - 1)
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            assert parts[-1]["delta"] == {}


def by_choice(chunks: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


@dataclass
class Result:
    """What must not depend on how or where it was made."""

    text: str
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[float | None]
    tokens: list[str]
    ids: list[int] | None


def whole(body: dict[str, Any]) -> list[Result]:
    return [
        Result(
            choice["message"]["content"] if "message" in choice else choice["text"],
            choice["finish_reason"],
            choice["stop_reason"],
            *_logprobs([choice["logprobs"]]),
            choice.get("token_ids"),
        )
        for choice in body["choices"]
    ]


def gathered(chunks: list[dict[str, Any]]) -> list[Result]:
    results = []
    for _, parts in sorted(by_choice(chunks).items()):
        texts = [part["delta"].get("content", "") if "delta" in part else part["text"] for part in parts]
        ids = [part["token_ids"] for part in parts if "token_ids" in part]
        results.append(
            Result(
                "".join(texts),
                parts[-1]["finish_reason"],
                parts[-1]["stop_reason"],
                *_logprobs([part["logprobs"] for part in parts]),
                [i for part in ids for i in part] if ids else None,
            )
        )
    return results


def _logprobs(parts: list[Any]) -> tuple[list[float | None], list[str]]:
    values: list[float | None] = []
    tokens: list[str] = []
    for part in filter(None, parts):
        if "content" in part:
            values += [entry["logprob"] for entry in part["content"]]
            tokens += [entry["token"] for entry in part["content"]]
        else:
            assert len({len(part[key]) for key in part}) == 1, "four lists of one length"
            values += part["token_logprobs"]
            tokens += part["tokens"]
    return values, tokens


def same(one: list[Result], other: list[Result]) -> bool:
    """Equal, logprobs within 1e-3."""
    return len(one) == len(other) and all(
        (a.text, a.finish_reason, a.stop_reason, a.tokens, a.ids)
        == (b.text, b.finish_reason, b.stop_reason, b.tokens, b.ids)
        and all(x == y or abs((x or 0) - (y or 0)) < 1e-3 for x, y in zip(a.logprobs, b.logprobs, strict=True))
        for a, b in zip(one, other, strict=True)
    )
