"""A real network between the ends: two namespaces joined by veth, slowed by `tc tbf`, losing packets by nftables."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RATE = "100mbit"  # so slow that the codecs keep up on a core that others use as well
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="root and iproute2"
    ),
]


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


@pytest.fixture
def net() -> Iterator[tuple[str, str]]:
    """(namespace of P, namespace of D); D is 10.99.7.2, and what goes there passes at RATE."""
    p, d = f"pdctl-p{os.getpid()}", f"pdctl-d{os.getpid()}"
    try:
        run("ip", "netns", "add", p)
        run("ip", "netns", "add", d)
        run("ip", "-n", p, "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", d)
        for name, link, address in ((p, "v0", "10.99.7.1/24"), (d, "v1", "10.99.7.2/24")):
            run("ip", "-n", name, "addr", "add", address, "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
        run("tc", "-n", p, "qdisc", "add", "dev", "v0", "root", "tbf", "rate", RATE, "burst", "256k", "latency", "50ms")
        yield p, d
    finally:
        for name in (p, d):
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True, timeout=20)


def transfer(net: tuple[str, str], codec: str) -> dict[str, Any]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}

    def end(namespace: str, *args: str) -> "subprocess.Popen[str]":
        command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "tests.transfer.netns_end", *args]
        return subprocess.Popen(command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with end(net[1], "receive", "10.99.7.2", codec) as receiver, end(net[0], "send", codec) as sender:
        try:
            assert receiver.stdout
            assert sender.stdin
            sender.stdin.write(receiver.stdout.readline())
            sender.stdin.flush()
            answer: dict[str, Any] = json.loads(receiver.stdout.readline())
            sender.stdin.write("over\n")
            sender.stdin.flush()
        finally:
            receiver.kill()
            sender.kill()
    return answer


def test_fewer_bytes_take_less_time(net: tuple[str, str]) -> None:
    """The seconds fall by the ratio of wire bytes, within 15 %: the link is what limits, not the codec."""
    plain = transfer(net, "none")
    assert plain["wire"] == plain["kv"]
    assert plain["error"] == 0
    assert plain["kv"] / plain["transfer"] < 12.5e6 * 1.1, "faster than the link"
    for name, bound in (("zstd", 0.0), ("fp8", 0.3)):
        small = transfer(net, name)
        assert small["error"] <= bound
        ratio = small["wire"] / small["kv"]
        assert small["transfer"] / plain["transfer"] == pytest.approx(ratio, rel=0.15), (plain, small)


@pytest.mark.skipif(not shutil.which("nft"), reason="nftables")
def test_lost_packets_change_nothing(net: tuple[str, str]) -> None:
    run("ip", "netns", "exec", net[1], "nft", "add table inet t")
    run("ip", "netns", "exec", net[1], "nft", "add chain inet t in { type filter hook input priority 0; }")
    run("ip", "netns", "exec", net[1], "nft", "add rule inet t in numgen random mod 100 < 1 drop")
    answer = transfer(net, "none")
    assert answer["error"] == 0
    assert answer["wire"] == answer["kv"]
