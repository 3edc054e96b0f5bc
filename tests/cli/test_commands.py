"""The command line itself: exit codes, the shape of errors, what goes to which stream, what is imported."""

import ast
import json
import os
import signal
import subprocess
import sys

import pytest

from pdctl import exits, info
from pdctl.exits import Exit, exit_of
from server import errors
from server.errors import PdctlError
from tests.process.box import TREE, Box

UNWANTED = {
    "torch",
    "transformers",
    "textual",
    "rich",
    "httpx",
    "httpx2",
    "openai",
    "pydantic",
    "asyncio",
    "numpy",
    "yaml",
}


def loaded_by(*arguments: str) -> set[str]:
    """Top-level modules in a fresh Python after one command."""
    code = (
        "import sys; from pdctl.cli import main; code = main(sys.argv[1:]); "
        "print(sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr); sys.exit(code)"
    )
    env = {**os.environ, "PYTHONPATH": str(TREE)}
    argv = [sys.executable, "-P", "-c", code, *arguments]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30, check=True)
    return set(ast.literal_eval(done.stderr.splitlines()[-1]))


def test_help_imports_little() -> None:
    assert not loaded_by("--help") & UNWANTED


@pytest.mark.parametrize("command", ["up", "status", "config"])
def test_help_of_a_command_imports_little(command: str) -> None:
    """pydantic is typer's own doing there."""
    assert not loaded_by(command, "--help") & (UNWANTED - {"pydantic"})


def test_no_command_here_loads_torch() -> None:
    assert not loaded_by("up", "demo", "--dry-run", "--set", "router.port=0") & {"torch", "transformers", "textual"}


@pytest.mark.parametrize(
    ("module", "imported"), [("pdctl", "typer"), ("pdctl", "pdctl.cli.stack"), ("pdctl.supervise", "pdctl.supervisor")]
)
def test_ctrl_c_while_python_imports_is_quiet(module: str, imported: str) -> None:
    code = (
        "import os, runpy, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {imported!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"sys.argv[1:] = ['ls']; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(TREE)}
    argv = [sys.executable, "-P", "-c", code]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_the_exit_codes_are_the_agreed_ones() -> None:
    assert {code.name: int(code) for code in Exit} == {
        "OK": 0,
        "FAILURE": 1,
        "USAGE": 2,
        "NOT_RUNNING": 3,
        "UNREACHABLE": 4,
        "PREFLIGHT": 5,
        "DEGRADED": 6,
        "REFUSED": 7,
        "MISSED": 8,
        "TIMEOUT": 124,
        "INTERRUPTED": 130,
        "TERMINATED": 143,
    }


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.PdctlError, Exit.FAILURE),
        (errors.ConfigError, Exit.USAGE),
        (errors.StartError, Exit.PREFLIGHT),
        (errors.ModelError, Exit.PREFLIGHT),
        (errors.PeerLost, Exit.FAILURE),
        (exits.UsageError, Exit.USAGE),
        (exits.NotRunning, Exit.NOT_RUNNING),
        (exits.Unreachable, Exit.UNREACHABLE),
        (exits.Refused, Exit.REFUSED),
        (exits.Missed, Exit.MISSED),
        (exits.TimedOut, Exit.TIMEOUT),
    ],
)
def test_each_error_has_its_code(kind: type[PdctlError], code: Exit) -> None:
    assert exit_of(kind("x")) is code


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["status"], Exit.NOT_RUNNING, "error[E_NOT_RUNNING]: no stack is running"),
        (["env"], Exit.NOT_RUNNING, "error[E_NOT_RUNNING]"),
        (["smoke", "x"], Exit.NOT_RUNNING, "error[E_NOT_RUNNING]: there is no stack 'x'"),
        (["up", "nosuch"], Exit.USAGE, "error[E_PROFILE]: there is no profile 'nosuch'"),
        (["up"], Exit.USAGE, "Missing argument"),
        (["up", "demo", "--no-wait"], Exit.USAGE, "--no-wait needs -d"),
        (["up", "demo", "--progress", "loud"], Exit.USAGE, "--progress loud"),
        (["up", "demo", "-d", "--timeout", "soon"], Exit.USAGE, "--timeout soon: not a duration"),
        (["up", "demo", "--set", "router"], Exit.USAGE, "expected section.key=value"),
        (["set", "decode.kv_high=nan"], Exit.USAGE, "decode.kv_high=nan: expected a finite number"),
        (["set", "slo.ttft_p95=-inf"], Exit.USAGE, "slo.ttft_p95=-inf: expected a finite number"),
        (["set", "a.b=1", "c.d=2", "a.b=3"], Exit.USAGE, "a.b is given twice: 1 and 3"),
        (["profile", "edit", "demo"], Exit.USAGE, "profile edit needs a terminal"),
        (["nosuch"], Exit.USAGE, "No such command"),
        (["down"], Exit.OK, "no stack is running"),
        (["ls"], Exit.OK, "no stack has been started"),
    ],
)
def test_what_is_said_where_nothing_runs(box: Box, arguments: list[str], code: Exit, said: str) -> None:
    answer = box(*arguments, expect=code)
    assert said in answer.stderr
    assert answer.stdout == ""


def test_profile_errors_are_listed_one_by_one(box: Box) -> None:
    box.profile.write_text(box.profile.read_text().replace("[router]", "[router]\nprot = 1\nqueue_high = 0"))
    lines = box("config", "validate", "box.toml", expect=Exit.USAGE).stderr.splitlines()
    assert lines == [
        "error[E_PROFILE]: box.toml:4: router.prot is not a key",
        "help: did you mean router.port? (0..65535)",
        "error[E_PROFILE]: box.toml:5: router.queue_high = 0 is out of range",
        "help: allowed: 1..4096",
    ]


def test_config_show_says_who_said_it(box: Box) -> None:
    shown = box("config", "show", "box.toml", "--origin", "--set", "hybrid.threshold_tokens=0").stdout.splitlines()
    assert "router.port = 0  # box.toml:4" in shown
    assert "hybrid.threshold_tokens = 0  # --set" in shown
    assert "router.queue_high = 50  # default" in shown


def test_config_schema_is_json_schema(box: Box) -> None:
    box("config", "schema", "-o", "s.json")
    schema = json.loads(box.file("s.json").read_text())
    assert {"router", "extends"} < schema["properties"].keys()


def test_profiles_are_listed_and_shown(box: Box) -> None:
    assert "colocated" in box("profile", "ls").stdout
    assert box("profile", "show", "box.toml").stdout == box.profile.read_text()


def test_ls_shows_what_runs_and_on_request_what_did(box: Box) -> None:
    # 1. One that never came up is not in the list, and is where somebody asks for all.
    box.script(decode_0={"crash": "no such tensor"})
    box.up(expect=Exit.FAILURE)
    answer = box("ls")
    assert answer.stdout == ""
    assert "1 that ended: pdctl ls -a" in answer.stderr
    assert json.loads(box("ls", "--json").stdout)["stacks"] == []
    assert box("ls", "-a").stdout.splitlines()[1].split()[:2] == ["box", "failed"]
    # 2. The next one of that name is.
    box.script()
    box.up()
    assert box("ls").stdout.splitlines()[1].split()[:2] == ["box", "ready"]


def test_status_of_an_unknown_name_offers_close_ones(box: Box) -> None:
    box.up()
    answer = box("status", "bix", expect=Exit.NOT_RUNNING)
    assert "help: did you mean box?" in answer.stderr


def test_several_stacks_need_a_name(box: Box) -> None:
    box.up()
    box.up("-n", "second")
    try:
        answer = box("status", expect=Exit.USAGE)
        assert "box, second" in answer.stderr
        assert [line.split()[:2] for line in box("ls").stdout.splitlines()[1:]] == [
            ["box", "ready"],
            ["second", "ready"],
        ]
    finally:
        box("down", "second", "--force")


def test_env_is_for_a_shell_and_has_a_key(box: Box) -> None:
    box.up()
    lines = box("env").stdout.splitlines()
    assert lines[0] == f"export OPENAI_BASE_URL={box.stack.url}/v1"
    assert lines[1].startswith("export OPENAI_API_KEY=")
    assert len(lines[1]) > len("export OPENAI_API_KEY=")


def test_smoke_prints_ids_and_fails_when_nothing_crossed(box: Box) -> None:
    box.script(router={"starts": [{}, {"kv_bytes": 0}]})
    box.up()
    steps = json.loads(box("smoke", "--json").stdout)["steps"]
    assert [(step["name"], step["missed"]) for step in steps] == [
        (n, []) for n in ("models", "chat", "stream", "transfer")
    ]
    assert steps[2]["text"] == "Paris"
    assert steps[1]["id"] == "c0"

    box("restart", "router")
    box("wait", "--for", "ready", "--timeout", "10s")
    missed = box("smoke", expect=Exit.MISSED)
    assert "no KV bytes crossed the transfer" in missed.stdout


def test_logs_by_worker_role_and_pattern(box: Box) -> None:
    box.up()
    assert "decode-0 start 1" in box("logs", "decode").stdout
    assert "prefill-0" not in box("logs", "decode-0").stdout
    assert box("logs", "--grep", "no such thing").stdout == ""
    assert "there are:" in box("logs", "decode-7", expect=Exit.USAGE).stderr


def test_wait_has_a_limit(box: Box) -> None:
    box.up()
    box("wait", "--for", "ready")
    box("wait", "--for", "stopped", "--timeout", "0.2s", expect=Exit.TIMEOUT)
    box("down")
    box("wait", "--for", "stopped")


def test_info_says_what_memory_goes_to() -> None:
    memory = {"weights": 513 * 2**20, "kv": 64 * 2**20, "host_swap": 0}
    workers = [
        {"name": name, "cpus": [0], "gpus": [], "kv_tokens": None, "memory": memory if name != "router" else {}}
        for name in ("decode-0", "router")
    ]
    model = {"served_as": [], "path": "a", "folder": "b"}
    value = {"name": "box", "url": "http://x", "model": model, "transfer": {}, "profile_file": "p", "state_dir": "s"}
    shown = info.show({**value, "versions": {}, "workers": workers, "routes": {}})
    assert "MEMORY, MIB  WEIGHTS  KV  HOST SWAP\ndecode-0     513      64  0\n" in f"{shown}\n"
