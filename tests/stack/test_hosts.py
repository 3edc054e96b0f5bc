"""One profile, two machines: each starts its own part, and the text is that of one machine. Machines are namespaces."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.net import Net, inside, needs_root, relayed, veth
from tests.stack import reference
from tests.stack.harness import PD, ROOT, Running, complete

HOSTS = """
[transfer]
backend = "tcp"
[hosts.left]
address = "{a}"
workers = ["prefill-0"]
router = true
[hosts.right]
address = "{b}"
workers = ["decode-0"]
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_root]


class Part(Running):
    """The part of the stack that one machine runs."""

    def __init__(self, namespace: str, env: dict[str, str]) -> None:
        super().__init__("t", env)
        self.prefix = ("ip", "netns", "exec", namespace)


@contextmanager
def part(namespace: str, folder: Path, profile: Path) -> Iterator[Part]:
    folder.mkdir()
    part = Part(namespace, os.environ | {"PYTHONPATH": str(ROOT), "PDCTL_STATE_DIR": str(folder)})
    try:
        up = part.cli("up", str(profile), "-d", "--progress", "plain", timeout_s=120)
        assert up.returncode == 0, f"{up.stdout}\n{up.stderr}\n{part.logs()}"
        yield part
    finally:
        part.cli("down", "t", "--force")


@contextmanager
def both(net: Net, tmp: Path, model: Path) -> Iterator[tuple[Part, Part]]:
    """Left, with router and prefill; right, with decode."""
    secret, profile = tmp / "secret", tmp / "t.toml"
    secret.write_text("known to both")
    secret.chmod(0o600)
    values = {"name": "t", "model": model, "dtype": "float32", "max_len": 4096, "kv_bytes": "64MiB"}
    text = PD.replace('name = "{name}"', f'name = "{{name}}"\nsecret_file = "{secret}"') + HOSTS
    profile.write_text(text.format(**values, a=net.a_address, b=net.b_address))
    with ExitStack() as stack:
        right = stack.enter_context(part(net.b, tmp / "right", profile))
        left = stack.enter_context(part(net.a, tmp / "left", profile))
        yield left, right


@pytest.mark.parametrize(
    "link",
    [lambda: veth("1gbit"), lambda: relayed(megabits=200, delay_ms=5, loss=0.01)],
    ids=["1 Gbit/s", "200 Mbit/s, 5 ms away, 1 % lost"],
)
def test_same_text_over_two_machines(
    link: Callable[[], AbstractContextManager[Net]], tmp_path: Path, tiny_model_dir: Path
) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(3, 512) for _ in range(n)] for n in (1, 16, 100, 700, 1500)]
    model = reference.load(tiny_model_dir)
    with link() as net, both(net, tmp_path, tiny_model_dir) as (left, right):
        # 1. Each machine shows its own processes; the one with the router knows of the other's.
        shown = {p["name"]: p for p in left.status()["processes"]}
        assert sorted(shown) == ["decode-0", "prefill-0", "router"]
        assert {p["state"] for p in shown.values()} == {"ready"}
        assert [p["name"] for p in right.status()["processes"]] == ["decode-0"]
        assert (shown["decode-0"]["pid"], right.status()["url"]) == (0, "")
        # 2. KV crosses the network, and the answers are those of `generate`.
        url = left.url
        answers: list[dict[str, Any]] = inside(net.a, lambda: [complete(url, prompt) for prompt in prompts])
        assert [answer["token_ids"] for answer in answers] == [reference.generate(model, p, 32) for p in prompts]
        assert {answer["pdctl"]["path"] for answer in answers} == {"pd"}
        (line,) = next(p for p in left.status()["processes"] if p["name"] == "prefill-0")["numbers"]["links"]
        assert f"tcp over sockets to {net.b_address}:" in line
