"""A whole stack for a test: real supervisor, router and workers, in a state folder of its own, on a free port."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]

PD = """
version = 1
name = "{name}"
[model]
path = "{model}"
served_name = ["m"]
dtype = "{dtype}"
max_len = {max_len}
[router]
port = 0
[prefill]
workers = 1
cpus = [0]
kv_bytes = "{kv_bytes}"
[decode]
workers = 1
cpus = [1]
kv_bytes = "{kv_bytes}"
[hybrid]
threshold_tokens = 0
"""

COLOCATED = """
version = 1
name = "{name}"
[model]
path = "{model}"
served_name = ["m"]
dtype = "{dtype}"
max_len = {max_len}
[router]
port = 0
[colocated]
workers = 1
cpus = [0]
kv_bytes = "{kv_bytes}"
"""


class Running:
    """A stack that is up. `prefix`: what a command is run by, such as `ip netns exec NAME`."""

    prefix: tuple[str, ...] = ()

    def __init__(self, name: str, env: dict[str, str]) -> None:
        self.name = name
        self.env = env

    def cli(self, *args: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        command = [*self.prefix, sys.executable, "-P", "-m", "pdctl", *args]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.cli("status", self.name, "--json").stdout)
        return answer

    @property
    def url(self) -> str:
        return next(
            line.split("=", 1)[1].strip("'\"")
            for line in self.cli("env", "-n", self.name).stdout.splitlines()
            if "OPENAI_BASE_URL=" in line
        ).removesuffix("/v1")

    @property
    def folder(self) -> Path:
        return Path(self.env["PDCTL_STATE_DIR"]) / self.name

    def admin(self, path: str, method: str = "GET", body: Any = None, url: str = "") -> dict[str, Any]:
        """`url`: asked for once by who calls often, for it takes a command to learn it."""
        secret = (self.folder / "secret").read_text().strip()
        headers = {"Authorization": f"Bearer {secret}"}
        answer = httpx.request(method, (url or self.url) + path, json=body, headers=headers, timeout=15)
        assert answer.status_code < 400, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()[-3000:]}" for p in sorted((self.folder / "logs").glob("*.log")))


@contextlib.contextmanager
def running(tmp: Path, profile: str, *, env: dict[str, str] | None = None, **values: Any) -> Iterator[Running]:
    """Brings `profile` up and, however the test ends, down."""
    values = {"name": "t", "dtype": "float32", "max_len": 4096, "kv_bytes": "64MiB"} | values
    file = tmp / f"{values['name']}.toml"
    file.write_text(profile.format(**values))
    full_env = os.environ | {"PYTHONPATH": str(ROOT), "PDCTL_STATE_DIR": str(tmp / "state")} | (env or {})
    stack = Running(values["name"], full_env)
    try:
        up = stack.cli("up", str(file), "-d", "--progress", "plain", timeout_s=300)
        assert up.returncode == 0, f"{up.stdout}\n{up.stderr}\n{stack.logs()}"
        yield stack
    finally:
        stack.cli("down", stack.name, "--force")


def eventually(check: Callable[[], Any], within_s: float, what: str) -> Any:
    """Asks until `check` gives something true, and returns it."""
    deadline = time.monotonic() + within_s
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)  # between two looks at a process, not a synchronisation


def complete(url: str, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    """One /v1/completions request in token ids; the answer's first choice with `token_ids`, and the stage record."""
    body = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": 32,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    } | more
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-pdctl-timing": "1"}, timeout=300)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole["choices"][0] | {"pdctl": whole["pdctl"], "usage": whole["usage"]}
