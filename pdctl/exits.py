"""Exit codes, all of them, and the errors that only the tool raises (the shared tree is in `server.errors`)."""

from enum import IntEnum

from server.errors import ConfigError, PdctlError, StartError


class Exit(IntEnum):
    """What a command says to the shell."""

    OK = 0
    FAILURE = 1
    USAGE = 2  # wrong command line or bad profile
    NOT_RUNNING = 3
    UNREACHABLE = 4  # the supervisor is dead or does not answer
    PREFLIGHT = 5  # port, device or model: this machine cannot start it
    DEGRADED = 6  # starting, or some process is not ready
    REFUSED = 7  # the change was refused
    MISSED = 8  # a smoke or bench criterion was missed
    TIMEOUT = 124
    INTERRUPTED = 130  # Ctrl-C
    TERMINATED = 143  # SIGTERM, and the drain was cut short


class UsageError(PdctlError):
    code = "E_USAGE"


class NotRunning(PdctlError):
    code = "E_NOT_RUNNING"


class Unreachable(PdctlError):
    code = "E_UNREACHABLE"


class Refused(PdctlError):
    code = "E_REFUSED"


class Missed(PdctlError):
    code = "E_MISSED"


class TimedOut(PdctlError):
    code = "E_TIMEOUT"


_EXITS: tuple[tuple[type[PdctlError], Exit], ...] = (
    (ConfigError, Exit.USAGE),
    (UsageError, Exit.USAGE),
    (NotRunning, Exit.NOT_RUNNING),
    (Unreachable, Exit.UNREACHABLE),
    (StartError, Exit.PREFLIGHT),
    (Refused, Exit.REFUSED),
    (Missed, Exit.MISSED),
    (TimedOut, Exit.TIMEOUT),
)


def exit_of(error: PdctlError) -> Exit:
    """The code of the nearest kind; everything else is a plain failure."""
    return next((code for kind, code in _EXITS if isinstance(error, kind)), Exit.FAILURE)
