"""Networks for tests: two namespaces, joined by a veth pair or by a relay that is slow, far and loses packets."""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).parents[2]
CLONE_NEWNET = 0x40000000
T = TypeVar("T")

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc") and os.path.exists("/dev/net/tun")),
    reason="root, iproute2 and /dev/net/tun",
)


@dataclass(frozen=True)
class Net:
    """Namespaces `a` and `b`; in them, the addresses by which they reach each other."""

    a: str
    b: str
    a_address: str
    b_address: str


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def enter(namespace: str) -> None:
    """This thread's network is that of `namespace` from now on."""
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(fd)


def inside(namespace: str, work: Callable[[], T]) -> T:
    """Calls `work` on a thread of its own in that network."""
    found: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            enter(namespace)
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


@contextmanager
def _namespaces() -> Iterator[tuple[str, str]]:
    names = f"pdctl-a{os.getpid()}", f"pdctl-b{os.getpid()}"
    try:
        for name in names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True, timeout=20)


@contextmanager
def veth(rate: str) -> Iterator[Net]:
    """What goes from `a` to `b` passes at `rate`, as `tc` has it."""
    with _namespaces() as (a, b):
        run("ip", "-n", a, "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", b)
        net = Net(a, b, "10.99.7.1", "10.99.7.2")
        _address(a, "v0", net.a_address)
        _address(b, "v1", net.b_address)
        run("tc", "-n", a, "qdisc", "add", "dev", "v0", "root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms")
        yield net


@contextmanager
def relayed(*, megabits: float, delay_ms: float = 0.0, loss: float = 0.0) -> Iterator[Net]:
    """Both ways at `megabits`/s, `delay_ms` late, a share `loss` of packets lost (seeded)."""
    with _namespaces() as (a, b):
        numbers = [str(number) for number in (megabits, delay_ms, loss)]
        command = [sys.executable, "-m", "tests.net.relay", a, b, *numbers]
        with subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
        ) as it:
            try:
                assert it.stdout is not None
                assert it.stdout.readline() == b"open\n"
                net = Net(a, b, "10.99.8.1", "10.99.8.2")
                _address(a, "tun0", net.a_address)
                _address(b, "tun0", net.b_address)
                yield net
            finally:
                it.kill()


def _address(namespace: str, link: str, address: str) -> None:
    run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", link)
    run("ip", "-n", namespace, "link", "set", link, "up", "mtu", "9000")
