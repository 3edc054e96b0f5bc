"""The one exception tree.

    PdctlError                 everything this project raises on purpose
    +- ConfigError             a profile that cannot be used (exit 2)
    +- StartError              this machine cannot start it: port, device, memory (exit 5)
    |  +- ModelError           the model is missing, broken or not supported
    +- ProtocolError           a peer said something the protocol does not allow
    |  +- HandshakeRefused     Hello ended with a reason: wrong secret, another model card
    +- PeerLost                a connection ended or fell silent
    +- TransferError           KV did not arrive: timeout, transport failure
    +- CannotFit               a sequence that could never be held here, however long it waited
    +- OutOfBlocks             the pool has fewer free blocks than asked for; nothing was taken

Foreign errors are mapped to these at one door each: `wire` for sockets, `model_store` and `model_runner` for
transformers, `transfer` for transports. A bad peer fails a sequence, never a loop.
"""


class PdctlError(Exception):
    """Base of all deliberate errors. `code` is stable and printable; `help` says what to do about it."""

    code = "E_FAILED"

    def __init__(self, message: str, *, code: str = "", help: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.help = help
        if code:
            self.code = code


class ConfigError(PdctlError):
    code = "E_PROFILE"


class StartError(PdctlError):
    code = "E_START"


class ModelError(StartError):
    code = "E_MODEL"


class ProtocolError(PdctlError):
    code = "E_PROTOCOL"


class HandshakeRefused(ProtocolError):
    code = "E_HANDSHAKE"


class PeerLost(PdctlError):
    code = "E_PEER_LOST"


class TransferError(PdctlError):
    code = "E_TRANSFER"


class CannotFit(PdctlError):
    code = "E_CANNOT_FIT"


class OutOfBlocks(PdctlError):
    code = "E_OUT_OF_BLOCKS"
