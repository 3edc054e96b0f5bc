"""A small socket beside a one-sided data path, for what one-sided writes cannot say.

A one-sided write gives the target no sign of who may write, that something is about to come, or that nothing can come
any more. The writer's lifeline says all three:

1. The preface (as on a tcp path) with the key from the offer, and the token of this path. The target admits it: TAKEN.
2. COMING, before each write is posted: the target polls from now on. TAKEN, from the target, for each that has come:
   the writer may stop polling. In between both sides poll; otherwise neither does.
3. ENDED: the writer gave the path up, though something may still be under way.
4. Its end: the writer closes it only once nothing is under way, and the kernel closes it when the process is dead. That
   is the proof a quarantined slot waits for. A line that timed out proves nothing.
"""

import errno
import hmac
import os
import socket
import struct
from contextlib import suppress

from server.errors import TransferError
from server.transfer.tcp_path import preface, tune

COMING, TAKEN, ENDED = b"\x01", b"\x02", b"\x03"
TOKEN_BYTES = 8
_PREFACE = struct.Struct("8s32s64s")
HELLO_BYTES = _PREFACE.size + TOKEN_BYTES
_PROOF = (errno.ECONNRESET, errno.EPIPE)


class LineEnded(TransferError):
    """`is_proof`: the other end's process is gone, or has closed it on purpose."""

    def __init__(self, reason: str, *, is_proof: bool) -> None:
        super().__init__(reason)
        self.is_proof = is_proof


class Line:
    """One end; never blocks."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock = sock
        self.since = now
        self.is_connected = True
        self._unsent = bytearray()

    @classmethod
    def dial(cls, address: tuple[str, int], key: str, instance: str, token: bytes, now: float) -> "Line":
        """Does not wait. Raises TransferError when it cannot even begin."""
        line = cls(socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET), now)
        tune(line.sock)
        line.is_connected = False
        line._unsent += preface(key, instance) + token
        try:
            code = line.sock.connect_ex(address)
        except OSError as error:
            code = error.errno or errno.EADDRNOTAVAIL
        if code not in (0, errno.EINPROGRESS):
            line.sock.close()
            raise TransferError(f"cannot connect to {address[0]}:{address[1]}: {os.strerror(code)}")
        return line

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def finish_connect(self) -> None:
        """Writable: connected or refused. Raises LineEnded."""
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise LineEnded(f"cannot connect: {os.strerror(code)}", is_proof=True)
        with suppress(OSError):
            self.sock.getpeername()
            self.is_connected = True
            self.tell(b"")

    def tell(self, data: bytes) -> None:
        """A line that has ended is noticed by `hear`, not here."""
        self._unsent += data
        if self.is_connected and self._unsent:
            with suppress(OSError):
                del self._unsent[: self.sock.send(self._unsent)]

    def hear(self, num_bytes: int = 4096) -> bytes:
        """What came; b"" when nothing has. Raises LineEnded."""
        try:
            data = self.sock.recv(num_bytes)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise LineEnded(f"connection lost: {error.strerror}", is_proof=error.errno in _PROOF) from error
        if not data:
            raise LineEnded("peer closed the path", is_proof=True)
        return data

    def no_more(self) -> None:
        """Tells the other end that this one has given the path up; it can still be heard."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.sock.close()


def read_hello(hello: bytes, key: str) -> tuple[str, bytes]:
    """(instance, token). Raises TransferError."""
    magic, theirs, instance = _PREFACE.unpack(hello[: _PREFACE.size])
    name = instance.rstrip(b"\0").decode(errors="replace")
    if magic != preface("", "")[:8] or not hmac.compare_digest(theirs, key.encode()) or not name:
        raise TransferError("refused: wrong preface or key")
    return name, hello[_PREFACE.size :]
