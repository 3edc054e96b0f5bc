"""Does it serve? A model list, one chat, one stream, and a long prompt whose KV has to cross the transfer.

Each step states what it expects; what is missed is named, and the exit code says so. Ids and stage times are printed,
so that a step can be looked up in the logs and at /admin/requests/{id}.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from pdctl.client import Client
from server.errors import PdctlError

TIMING = {"x-pdctl-timing": "1"}
# Longer than any sensible threshold, shorter than any sensible context.
LONG_WORDS = 600
STAGES = (
    "queue_ms",
    "prefill_queue_ms",
    "grant_wait_ms",
    "prefill_end_ms",
    "first_token_ms",
    "second_token_ms",
    "transfer_ms",
)


@dataclass(slots=True)
class Step:
    """One call: what came back and what was missed."""

    name: str
    seconds: float = 0.0
    id: str = ""
    text: str = ""
    record: dict[str, Any] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)


def run(client: Client, *, expects_transfer: bool) -> list[Step]:
    """All steps; one that fails does not stop the others."""
    model = ""

    def models(step: Step) -> None:
        nonlocal model
        data = client.get("/v1/models").get("data") or []
        model = str(data[0]["id"]) if data else ""
        step.text = ", ".join(str(entry["id"]) for entry in data)
        _expect(step, bool(model), "no model is served")

    steps = [_step("models", models)]
    short = "Name the capital of France in one word."
    steps.append(_step("chat", lambda step: _chat(client, model, short, step)))
    steps.append(_step("stream", lambda step: _stream(client, model, short, step)))
    long_prompt = (
        " ".join(f"Line {i} of the list says {i * 7}." for i in range(LONG_WORDS // 6)) + " Summarise the list."
    )
    steps.append(_step("transfer", lambda step: _transfer(client, model, long_prompt, step, expects_transfer)))
    return steps


def _step(name: str, call: Callable[[Step], None]) -> Step:
    step = Step(name)
    started = time.monotonic()
    try:
        call(step)
    except PdctlError as error:
        step.missed.append(error.message)
    except (KeyError, IndexError, TypeError) as error:
        step.missed.append(f"the answer has another shape than OpenAI's: {error!r}")
    step.seconds = round(time.monotonic() - started, 3)
    return step


def _expect(step: Step, is_so: bool, otherwise: str) -> None:
    if not is_so:
        step.missed.append(otherwise)


def _body(model: str, prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, **more}


def _chat(client: Client, model: str, prompt: str, step: Step, **more: Any) -> None:
    answer = client.call("POST", "/v1/chat/completions", _body(model, prompt, 16, **more), TIMING)
    choice = answer["choices"][0]
    step.id, step.text, step.record = answer["id"], choice["message"]["content"] or "", answer.get("pdctl") or {}
    _expect(step, bool(step.text), "the answer is empty")
    _expect(step, choice["finish_reason"] in ("stop", "length"), f"finish_reason is {choice['finish_reason']!r}")
    _expect(step, answer["usage"]["completion_tokens"] > 0, "usage counts no tokens")


def _stream(client: Client, model: str, prompt: str, step: Step) -> None:
    reasons = []
    for event in client.stream("/v1/chat/completions", _body(model, prompt, 16, stream=True), TIMING):
        step.id = event.get("id") or step.id
        step.record = event.get("pdctl") or step.record
        for choice in event.get("choices") or []:
            step.text += choice["delta"].get("content") or ""
            reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
    _expect(step, bool(step.text), "the stream has no text")
    _expect(step, len(reasons) == 1, f"the stream has {len(reasons)} finish reasons, expected one")


def _transfer(client: Client, model: str, prompt: str, step: Step, expects_transfer: bool) -> None:
    # A salt of its own: what an earlier smoke test left in a cache would not cross again.
    _chat(client, model, prompt, step, cache_salt=secrets.token_hex(8))
    if not expects_transfer:
        return
    path, size = step.record.get("path"), step.record.get("kv_bytes") or 0
    _expect(step, path == "pd", f"the long prompt went the way {path!r}, expected 'pd'")
    _expect(step, size > 0, "no KV bytes crossed the transfer")


def to_json(steps: list[Step]) -> dict[str, Any]:
    return {"version": 1, "ok": not any(step.missed for step in steps), "steps": [asdict(step) for step in steps]}


def show(steps: list[Step]) -> str:
    """One line a step, its stages under it."""
    lines = []
    for step in steps:
        verdict = "missed" if step.missed else "ok"
        lines.append(f"{step.name:<9} {verdict:<6} {step.seconds:7.2f} s  {step.id}  {step.text[:60]!r}")
        stages = [
            f"{key.removesuffix('_ms')} {step.record[key]:.1f}" for key in STAGES if step.record.get(key) is not None
        ]
        if step.record:
            size = f", {step.record.get('kv_bytes') or 0} KV bytes" if step.record.get("path") == "pd" else ""
            lines.append(f"          path {step.record.get('path')}{size}; ms: {', '.join(stages)}")
        lines += [f"          missed: {reason}" for reason in step.missed]
    return "\n".join(lines)
