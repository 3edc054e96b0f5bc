"""Every command in the README and docs/tuning.md works: curl, the SDK, pdctl against a stack, make by .ci/run."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.harness import ROOT, Running, running

README = (ROOT / "README.md").read_text()
TUNING = (ROOT / "docs" / "tuning.md").read_text()
DEMO = (ROOT / "profiles" / "demo.toml").read_text().replace("port = 8000", "port = 0").replace("{", "{{")


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)


def commands(page: str = README) -> list[str]:
    """One entry a command of the sh blocks; a command goes on while a quote is open."""
    found: list[str] = []
    for line in "".join(blocks("sh", page)).splitlines():
        if found and found[-1].partition("#")[0].count("'") % 2:
            found[-1] += "\n" + line
        else:
            found.append(line)
    return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("readme")
    shim = folder / "bin" / "pdctl"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m pdctl "$@"\n')
    shim.chmod(0o755)
    env = {"PATH": f"{shim.parent}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(folder / "config")}
    with running(folder, DEMO, env=env, name="demo") as stack:
        yield stack


def shell(stack: Running, command: str) -> subprocess.CompletedProcess[str]:
    """Beside the demo on port 8000 of whoever follows the README: no command may want that port."""
    command = command.replace("up demo", "up demo --set router.port=0")
    return subprocess.run(
        ["bash", "-c", command.replace("http://127.0.0.1:8000", stack.url)],
        cwd=ROOT,
        env=stack.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith(("curl", "pdctl")) and "down" not in c])
def test_command(stack: Running, command: str) -> None:
    done = shell(stack, command)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr
    if command.startswith("curl"):
        assert done.stdout.endswith("data: [DONE]\n\n")


def test_sdk(stack: Running, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    (setting,) = re.findall(r"first `(eval [^`]+)`", README)
    done = shell(stack, f"{setting} && '{sys.executable}' - << 'END'\n{code}\nEND")
    assert done.returncode == 0, done.stderr
    answer, _, record = done.stdout.rpartition("{'path': 'pd'")
    assert len(answer) > 10
    assert "'first_token_ms': " in record


@pytest.mark.parametrize("command", commands(TUNING))
def test_tuning(stack: Running, command: str) -> None:
    """After what wants the demo as it starts: these turn its knobs."""
    done = shell(stack, command)
    assert done.returncode == 0, done.stderr


def test_make_is_run_by_ci() -> None:
    made = [c.split("#")[0].strip() for c in commands() if c.startswith("make")]
    assert made == ["make demo", "make test"]
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert all(any(line.startswith(command) for line in ci) for command in made)


def test_down(stack: Running) -> None:
    done = shell(stack, next(c for c in commands() if c.startswith("pdctl down")))
    assert done.returncode == 0, done.stderr
    assert stack.cli("status", stack.name).returncode == 3
