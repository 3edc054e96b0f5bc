"""The one thread that drives a transport and its Sender and Receiver.

Each turn:

1. Commands that other threads left with `call`.
2. `Sender.pump`: posts what credit allows.
3. `transport.poll`: waits for something to happen; longer when nothing is under way. `call` wakes it.
4. Each event to whom it concerns; then the timers.

What goes wrong with one sequence or peer ends that sequence or peer. Nothing ends the loop but `close`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from server.errors import TransferError
from server.transfer.base import Arrived, EndpointGone, Event, KVTransport, Offer, PeerGone, SendFailed, Sent
from server.transfer.receiver import Receiver
from server.transfer.sender import Sender
from server.transfer.streams import CPU, own_stream

log = logging.getLogger(__name__)

_POLL_BUSY_S = 0.05
_POLL_IDLE_S = 0.2  # the timers' coarsest step
_T = TypeVar("_T")


class TransferThread:
    """`on_peer_lost(peer, reason)`: its data path ended by itself. Callbacks, this one too, run on this thread. The
    blocks of sender and receiver lie on `device`."""

    def __init__(
        self,
        transport: KVTransport,
        *,
        sender: Sender | None = None,
        receiver: Receiver | None = None,
        on_peer_lost: Callable[[str, str], None] = lambda peer, reason: None,
        device: torch.device = CPU,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._transport = transport
        self._sender = sender
        self._receiver = receiver
        self._on_peer_lost = on_peer_lost
        self._clock = clock
        self._commands: deque[Callable[[], object]] = deque()
        self._closing = threading.Event()
        self._errors = 0
        self._thread = threading.Thread(target=self._loop, name="transfer", daemon=True)

    # Any thread

    def start(self) -> None:
        self._thread.start()

    def call(self, fn: Callable[..., object], *args: Any) -> None:
        """Runs `fn(*args)` on the transfer thread, in order, soon."""
        self._commands.append(lambda: fn(*args))
        self._transport.wake()

    def run(self, fn: Callable[..., _T], *args: Any, timeout_s: float = 5.0) -> _T:
        """As `call`, and waits for the result. Not from a callback that another thread waits for."""
        if threading.current_thread() is self._thread:
            return fn(*args)
        result: Future[_T] = Future()

        def command() -> None:
            try:
                result.set_result(fn(*args))
            except BaseException as e:
                result.set_exception(e)

        self.call(command)
        try:
            return result.result(timeout_s)
        except TimeoutError as e:
            raise TransferError(f"the transfer thread did not answer within {timeout_s:g} s") from e

    def connect_peer(self, peer: str, offer: Offer) -> None:
        """The prefill side's path to `peer`. That it cannot be opened comes as `on_peer_lost`, now or later."""
        self.call(self._connect, peer, offer)

    def peer_gone(self, peer: str, reason: str) -> None:
        """The control connection to `peer` ended: its path is closed, its sequences fail, its slots come back."""
        self.call(self._disconnect, peer, reason)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Ends the thread and the transport. False when it did not stop in time."""
        self._closing.set()
        if self._thread.ident is None:
            self._transport.close()
            return True
        self._transport.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def counters(self) -> dict[str, float]:
        """For Load and metrics."""
        counters = {"errors": float(self._errors), **self._transport.counters}
        for part in (self._sender, self._receiver):
            if part is not None:
                counters |= part.counters
        return counters

    # Transfer thread

    def _loop(self) -> None:
        with own_stream(self._device):
            while not self._closing.is_set():
                if not self._guard(self._turn):
                    self._closing.wait(_POLL_BUSY_S)  # whatever is broken in there, it does not get the whole core
        self._guard(self._transport.close)

    def _turn(self) -> None:
        for _ in range(len(self._commands)):
            self._guard(self._commands.popleft())
        if self._sender is not None:
            self._sender.pump()
        self._poll(0 if self._commands else _POLL_BUSY_S if self._is_busy else _POLL_IDLE_S)
        if self._receiver is not None:
            self._receiver.tick(self._clock())

    @property
    def _is_busy(self) -> bool:
        return (self._sender is not None and self._sender.is_busy) or (
            self._receiver is not None and self._receiver.is_busy
        )

    def _poll(self, timeout_s: float) -> None:
        for event in self._transport.poll(timeout_s):
            if not self._guard(self._dispatch, event) and isinstance(event, Arrived) and self._receiver is not None:
                self._guard(self._receiver.fail, event.tag.id)

    def _dispatch(self, event: Event) -> None:
        match event:
            case Sent() | SendFailed() if self._sender is not None:
                self._sender.ended(event)
            case Arrived() if self._receiver is not None:
                self._receiver.arrived(event)
            case PeerGone(peer, reason, is_quiet):
                was_known = self._forget(peer, reason)
                if self._receiver is not None and is_quiet:
                    self._receiver.endpoint_gone(peer)
                if was_known:
                    self._on_peer_lost(peer, reason)
            case EndpointGone(peer):
                if self._receiver is not None:
                    self._receiver.endpoint_gone(peer)
            case _:
                log.warning("transfer thread: nobody here for %s", type(event).__name__)

    def _connect(self, peer: str, offer: Offer) -> None:
        assert self._sender is not None
        try:
            self._sender.connect_peer(peer, offer)
        except TransferError as e:
            self._on_peer_lost(peer, e.message)

    def _disconnect(self, peer: str, reason: str) -> None:
        """Forgets the peer first, so that its end is not reported as a loss, and takes the last events at once, so that
        the same instance may join again with the next command."""
        self._forget(peer, reason)
        self._transport.disconnect(peer)
        self._poll(0)

    def _forget(self, peer: str, reason: str) -> bool:
        """Whether anybody here knew it."""
        known = False
        if self._sender is not None and self._sender.knows(peer):
            known = True
            self._guard(self._sender.peer_gone, peer, reason)
        if self._receiver is not None:
            known = known or self._receiver.knows(peer)
            self._guard(self._receiver.peer_gone, peer)
        return known

    def _guard(self, fn: Callable[..., object], *args: Any) -> bool:
        """The one door for what nobody expected. Whether it went well."""
        try:
            fn(*args)
        except Exception:
            self._errors += 1
            log.exception("transfer thread: %s", getattr(fn, "__qualname__", fn))
            return False
        return True
