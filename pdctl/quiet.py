"""Ctrl-C while Python still imports: it ends the process as it ends any other, and no traceback is printed."""

import contextlib
import signal
from collections.abc import Iterator


def quiet_until_ready() -> None:
    """From here on Ctrl-C ends the process at once, unless whoever started it had it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, Ctrl-C is a KeyboardInterrupt again: somebody is there to catch it."""
    was_quiet = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if was_quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if was_quiet:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
