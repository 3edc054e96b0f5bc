"""`python -P -m pdctl.demo`: one command from nothing to a streamed answer and where its time went.

1. `pdctl up demo -d`; a stack that is up already is used as it is.
2. One chat answer through the openai client, streamed, with the stage record asked for.
3. The stages as a table, and how to call and stop what now runs. The stack is left running.
"""

import subprocess
import sys
import time
from typing import Any

from pdctl.client import api_key
from pdctl.exits import Exit, NotRunning, Unreachable, exit_of
from pdctl.launch import listen
from pdctl.profile import load
from pdctl.render import note, print_error, table
from pdctl.rundir import Stack, StackDir, state_root
from pdctl.status import running
from server.errors import PdctlError, StartError

NAME = "demo"
QUESTION = "Why is the sky blue? Answer in three sentences."
MAX_TOKENS = 128
UP_TIMEOUT_S = 1800.0


def main() -> int:
    try:
        stack = _up()
        record, seconds = _ask(stack)
    except PdctlError as error:
        print_error(error)
        return exit_of(error)
    print(f"\n{stages(record, seconds)}\n")
    print(_how_to(stack))
    return Exit.OK


def _up() -> Stack:
    """The demo stack, started where it does not run yet."""
    stack_dir = StackDir(state_root() / NAME)
    try:
        stack = running(stack_dir)
        if stack.state in ("ready", "degraded"):
            note(f"{NAME} is already up at {stack.url}")
            return stack
    except (NotRunning, Unreachable):
        pass  # `up` says what is in the way
    command = [sys.executable, "-P", "-m", "pdctl", "up", NAME, "-d", *_port_option()]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=UP_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    return running(stack_dir)


def _port_option() -> list[str]:
    """A demo should not fail for its port: where that is taken it says by whom and takes a free one."""
    router = load(NAME).config.router
    try:
        listen(router.host, router.port, NAME).close()
    except StartError as error:
        note(f"{error.message}; taking a free port instead")
        return ["--set", "router.port=0"]
    return []


def _ask(stack: Stack) -> tuple[dict[str, Any], float]:
    """Streams one answer to stdout: (stage record, seconds)."""
    try:
        from openai import OpenAI, OpenAIError
    except ImportError as error:
        raise PdctlError("the demo calls the server with the openai package", help="pip install openai") from error

    client = OpenAI(base_url=f"{stack.url}/v1", api_key=api_key(stack), timeout=300.0)
    print(f"> {QUESTION}\n")
    record: dict[str, Any] = {}
    started = time.monotonic()
    try:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            extra_headers={"x-pdctl-timing": "1"},
        )
        for chunk in stream:
            record = (chunk.model_extra or {}).get("pdctl") or record
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
    except OpenAIError as error:
        raise PdctlError(
            f"the server did not answer: {error}", help=f"pdctl status {NAME}; pdctl logs -n {NAME}"
        ) from error
    finally:
        client.close()
    print()
    return record, time.monotonic() - started


def stages(record: dict[str, Any], seconds: float) -> str:
    """The stage record as a table: what each stage took, and what it is."""

    def took(first: str, last: str) -> float | None:
        return None if record.get(first) is None or record.get(last) is None else record[last] - record[first]

    kib = (record.get("kv_bytes") or 0) / 1024
    decode_ms = None if record.get("second_token_ms") is None else seconds * 1000 - record["second_token_ms"]
    rows: list[tuple[str, float | None, str]] = [
        ("queue", record.get("queue_ms"), "in the router"),
        ("grant", record.get("grant_wait_ms"), f"until {record.get('decode') or 'decode'} reserved blocks"),
        (
            "prefill",
            took("prefill_start_ms", "prefill_end_ms"),
            f"{record.get('prompt_tokens')} tokens on {record.get('prefill')}",
        ),
        (
            "KV transfer",
            record.get("transfer_ms"),
            f"{kib:.0f} KiB in {record.get('chunks')} chunks",
        ),
        ("first token", record.get("first_token_ms"), "from the request's arrival; sent by prefill"),
        ("second token", record.get("second_token_ms"), "from the request's arrival; sent by decode"),
        ("decode", decode_ms, "from the second token to the last"),
    ]
    shown = [[name, "-" if ms is None else f"{ms:.1f}", what] for name, ms, what in rows]
    return table(shown, ("STAGE", "MS", f"path {record.get('path', '?')}"))


def _how_to(stack: Stack) -> str:
    # A real key is for `pdctl env` to print, when somebody asks for it.
    key, url = "..." if stack.profile["router"]["api_key_file"] else api_key(stack), f"{stack.url}/v1"
    return "\n".join(
        [
            "call it:",
            f"  curl {url}/chat/completions -H 'Content-Type: application/json' \\",
            '    -d \'{"messages": [{"role": "user", "content": "Hello"}], "model": "smollm2-135m"}\'',
            f'  python: OpenAI(base_url="{url}", api_key="{key}")',
            f"  eval $(pdctl env {NAME})     sets OPENAI_BASE_URL and OPENAI_API_KEY",
            f"look:    pdctl status {NAME}    pdctl logs -n {NAME} -f    pdctl smoke {NAME}",
            f"stop it: pdctl down {NAME}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
