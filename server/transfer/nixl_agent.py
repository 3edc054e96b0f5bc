"""The one door to NVIDIA NIXL: what of its API is used here, with plain types and our errors.

Traits of 1.5.1 that shape every caller, each pinned by tests/transfer/test_nixl.py:

- Its own progress thread spins a whole core, so it is off; then nothing moves unless somebody polls. A write is DONE
  only after the target has polled as well, and its notification leaves only when the initiator polls on.
- Releasing a write that is under way does not recall it.
- An agent is known by name. A restarted process under its old name is refused by those who knew the old one.
"""

import importlib
import logging
import os
from enum import Enum
from functools import cache
from typing import Any

from torch import Tensor

from server.errors import TransferError

Piece = tuple[int, int, int]  # address, bytes, device


class WriteState(Enum):
    UNDER_WAY = "PROC"
    DONE = "DONE"
    FAILED = "ERR"


@cache
def why_missing() -> str:
    """Empty when NIXL can be used here, else why not."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # read at import; stdout is data here
    try:
        module = importlib.import_module("nixl_cu13")
        logging.getLogger("nixl").setLevel(logging.WARNING)  # INFO goes to stdout, which is data here
        plugins = module.nixl_agent("probe", module.nixl_agent_config(False, backends=[])).get_plugin_list()
    except ImportError as error:
        return f"nixl_cu13 is not installed ({error})"
    except Exception as error:
        return f"NIXL does not start: {error}"
    return "" if "UCX" in plugins else f"NIXL has no UCX plugin, only {', '.join(plugins)}"


def piece(memory: Tensor) -> Piece:
    """Where a contiguous tensor lies."""
    return memory.data_ptr(), memory.numel() * memory.element_size(), max(0, memory.get_device())


def memory_kind(memory: Tensor) -> str:
    return "VRAM" if memory.is_cuda else "DRAM"


class Agent:
    """One NIXL agent over UCX. Belongs to one thread, but for its construction."""

    def __init__(self, name: str) -> None:
        if reason := why_missing():
            raise TransferError(reason)
        module = importlib.import_module("nixl_cu13")
        try:
            self._agent: Any = module.nixl_agent(name, module.nixl_agent_config(False, backends=["UCX"]))
        except Exception as error:
            raise TransferError(f"NIXL: {error}") from error
        self.name = name

    def register(self, memory: Tensor) -> None:
        """Once for memory that is written from or to. Raises TransferError."""
        try:
            self._agent.register_memory(memory)
        except Exception as error:
            raise TransferError(f"NIXL cannot register {memory.numel()} bytes of {memory.device}: {error}") from error

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add_remote(self, metadata: bytes) -> str:
        """Its agent's name. Raises TransferError."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransferError(f"NIXL refuses the peer's address: {type(error).__name__} {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_remote(self, name: str) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            raise TransferError(f"NIXL: {error}") from error

    def write(self, remote: str, source: list[Piece], kind: str, target: list[Piece], to: str, note: bytes) -> Any:
        """Posts one write of all pieces; `note` follows it. Raises TransferError; nothing is under way then."""
        try:
            ours = self._agent.get_xfer_descs(source, kind)
            theirs = self._agent.get_xfer_descs(target, to)
            handle = self._agent.initialize_xfer("WRITE", ours, theirs, remote, note)
            if self._agent.transfer(handle) == WriteState.FAILED.value:
                raise TransferError("NIXL: the write failed when it was posted")
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"NIXL: {type(error).__name__} {error}") from error
        return handle

    def state(self, handle: Any) -> WriteState:
        """Moves things along as well."""
        try:
            return WriteState(self._agent.check_xfer_state(handle))
        except Exception:  # a peer that is gone is told as an exception of many names
            return WriteState.FAILED

    def release(self, handle: Any) -> None:
        """Of a write that is DONE or FAILED."""
        try:
            handle.release()
        except Exception:
            logging.getLogger(__name__).warning("NIXL would not release a terminal write", exc_info=True)

    def notes(self) -> list[tuple[str, bytes]]:
        """(agent, note) of writes that have landed here. Moves things along as well."""
        try:
            found = self._agent.get_new_notifs()
        except Exception as error:
            raise TransferError(f"NIXL: {error}") from error
        return [(name, bytes(note)) for name, notes in found.items() for note in notes]

    def close(self) -> None:
        """Ends the agent, and with it what was still under way from here."""
        self._agent = None
