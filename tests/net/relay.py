"""A link of any rate, delay and loss between two namespaces, as a program: `relay A B MEGABITS DELAY_MS LOSS`.

A TUN device in each; what one end sends is read here and, in time, written to the other. This kernel has no netem.
"""

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import sys
import time

from tests.net import enter

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
MAX_QUEUE_S = 0.05  # what would wait longer is dropped, as a router's full queue does
MTU = 9000


def tun(namespace: str) -> int:
    enter(namespace)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", b"tun0", IFF_TUN | IFF_NO_PI))
    return fd


def relay(ends: tuple[int, int], bytes_a_second: float, delay_s: float, loss: float) -> None:
    chance, order = random.Random(7), itertools.count()
    free_at = dict.fromkeys(ends, 0.0)  # when the link towards an end has sent what it has
    due: list[tuple[float, int, int, bytes]] = []
    while True:
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, _, end, packet = heapq.heappop(due)
            try:
                os.write(end, packet)
            except OSError:
                pass  # that end is not up yet
        left = due[0][0] - now if due else 1.0
        for end in select.select(ends, [], [], left)[0]:
            other = ends[1] if end == ends[0] else ends[0]
            packet, now = os.read(end, MTU + 100), time.monotonic()
            start = max(now, free_at[other])
            if chance.random() < loss or start - now > MAX_QUEUE_S:
                continue
            free_at[other] = start + len(packet) / bytes_a_second
            heapq.heappush(due, (free_at[other] + delay_s, next(order), other, packet))


if __name__ == "__main__":
    one, other = tun(sys.argv[1]), tun(sys.argv[2])
    print("open", flush=True)
    relay((one, other), float(sys.argv[3]) * 125e3, float(sys.argv[4]) / 1e3, float(sys.argv[5]))
