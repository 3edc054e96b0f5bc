"""A real network between the ends: slow by `tc tbf`, or far and lossy by a relay."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.net import ROOT, Net, needs_root, relayed, veth

RATE = "100mbit"  # so slow that the codecs keep up on a core that others use as well
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), needs_root]


def transfer(net: Net, codec: str, chunk_blocks: int = 8) -> dict[str, Any]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}

    def end(namespace: str, *args: str) -> "subprocess.Popen[str]":
        command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "tests.transfer.netns_end", *args]
        return subprocess.Popen(command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with (
        end(net.b, "receive", net.b_address, codec, str(chunk_blocks)) as receiver,
        end(net.a, "send", codec, str(chunk_blocks)) as sender,
    ):
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


def test_fewer_bytes_take_less_time() -> None:
    """The seconds fall by the ratio of wire bytes, within 15 %: the link is what limits, not the codec."""
    with veth(RATE) as net:
        plain = transfer(net, "none")
        assert plain["wire"] == plain["kv"]
        assert plain["error"] == 0
        assert plain["kv"] / plain["transfer"] < 12.5e6 * 1.1, "faster than the link"
        for name, bound in (("zstd", 0.0), ("fp8", 0.3)):
            small = transfer(net, name)
            assert small["error"] <= bound
            ratio = small["wire"] / small["kv"]
            assert small["transfer"] / plain["transfer"] == pytest.approx(ratio, rel=0.15), (plain, small)


def test_large_chunks_are_no_faster_than_the_link() -> None:
    """A rate is bytes over the seconds of the same transfer, and these begin with the first byte, not with the first
    chunk that is whole: else few large chunks would seem to cross in no time."""
    with veth(RATE) as net:
        whole = transfer(net, "none", chunk_blocks=256)
    assert 12.5e6 * 0.5 < whole["kv"] / whole["transfer"] < 12.5e6 * 1.1


def test_lost_and_late_packets_change_nothing() -> None:
    with relayed(megabits=200, delay_ms=5, loss=0.01) as net:
        answer = transfer(net, "none")
    assert answer["error"] == 0
    assert answer["wire"] == answer["kv"]
