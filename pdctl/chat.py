"""`pdctl chat`: a conversation with the stack, and after each answer what it took.

A terminal gets a prompt; without one, standard input is the whole question and standard output the answer alone.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pdctl.client import Client
from pdctl.exits import UsageError
from pdctl.render import note

TIMING = {"x-pdctl-timing": "1"}
Write = Callable[[str], None]


@dataclass
class Talk:
    """The turns so far and how to ask for the next."""

    client: Client
    model: str
    max_tokens: int = 256
    temperature: float = 0.0
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str, write: Write) -> dict[str, Any]:
        """Streams the answer to `write`; figures of it. An answer that broke off is not kept as a turn."""
        turns = [*self.messages, {"role": "user", "content": text}]
        body = {
            "model": self.model,
            "messages": turns,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started, answer = time.monotonic(), ""
        figures: dict[str, Any] = {}
        for event in self.client.stream("/v1/chat/completions", body, TIMING):
            figures["record"] = event.get("pdctl") or figures.get("record")
            figures["usage"] = event.get("usage") or figures.get("usage")
            for choice in event.get("choices") or []:
                piece = choice.get("delta", {}).get("content") or ""
                answer += piece
                write(piece)
        self.messages = [*turns, {"role": "assistant", "content": answer}]
        return {**figures, "seconds": time.monotonic() - started}


def summary(figures: dict[str, Any]) -> str:
    """One line: tokens, rate, and the stages that a PD path has."""
    record, usage = figures.get("record") or {}, figures.get("usage") or {}
    output, seconds = usage.get("completion_tokens") or 0, figures["seconds"]
    first = record.get("first_token_ms")
    after = seconds - (first or 0.0) / 1000
    parts = [f"{usage.get('prompt_tokens', '?')} → {output} tokens"]
    if output > 1 and after > 0:
        parts.append(f"{(output - 1) / after:.1f} tok/s")
    shown = {"ttft": first, "prefill queue": record.get("prefill_queue_ms"), "transfer": record.get("transfer_ms")}
    parts += [f"{name} {value:.0f} ms" for name, value in shown.items() if value is not None]
    if record:
        parts.append(f"{record.get('path')} {record.get('prefill') or ''}→{record.get('decode')}".replace(" →", " "))
    return "  ".join(parts)


def converse(talk: Talk, lines: Iterator[str], write: Write) -> None:
    """Turn after turn until the lines end; empty ones are passed over."""
    for line in lines:
        if line.strip():
            figures = talk.say(line.strip(), write)
            write("\n")
            note(f"  {summary(figures)}")


def typed() -> Iterator[str]:
    """What a person types; Ctrl-D ends it."""
    import readline  # noqa: F401 - input() takes its editing and history from it

    while True:
        try:
            yield input("> ")
        except EOFError:
            note("")
            return


def run(client: Client, *, message: str | None, system: str, max_tokens: int, temperature: float) -> None:
    """Raises PdctlError."""
    data = client.get("/v1/models").get("data") or []
    if not data:
        raise UsageError("the stack serves no model")
    talk = Talk(client, str(data[0]["id"]), max_tokens, temperature)
    talk.messages = [{"role": "system", "content": system}] if system else []

    def write(text: str) -> None:
        print(text, end="", flush=True)

    if message is not None:
        converse(talk, iter([message]), write)
    elif sys.stdin.isatty():
        note(f"{talk.model}; Ctrl-D ends it")
        converse(talk, typed(), write)
    else:
        converse(talk, iter([sys.stdin.read()]), write)
