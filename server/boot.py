"""What a process is given at its start: a JSON file that the supervisor writes, `python -P -m server.x --boot FILE`.

1. The supervisor resolves the profile, picks addresses and writes one Boot a process (`Boot.save`).
2. The process reads it (`Boot.load`) and decides nothing of this for itself.
3. It reports on `status_fd`, one JSON object a line (`Status`): stages with their share of the work, then once `ready`
   or once `error`.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from server.config import Config, Transfer
from server.errors import StartError


class Boot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`name` is this process ("router", "prefill-0", ...); `addresses` holds every worker's, by name."""

    name: str
    config: Config
    model_dir: str
    state_dir: str
    secret_file: str
    addresses: dict[str, str]
    listen_fd: int | None = None
    status_fd: int | None = None
    max_prefill: int = 0  # prefill workers that there may ever be: a landing ring is shared out among so many
    run_id: str = ""  # one `up`: what outlives a process, but not the stack, is marked with it

    @classmethod
    def load(cls, path: str | Path) -> "Boot":
        """Raises StartError with the file's name."""
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls, dec_hook=_decode_config)
        except (OSError, msgspec.MsgspecError) as error:
            raise StartError(f"{path}: {error}", help="this file is written by `pdctl up`") from error

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(msgspec.json.encode(self, enc_hook=_encode_config))

    @property
    def transfer(self) -> Transfer:
        """The profile's, with the address that this process offers for its data path."""
        config = self.config.transfer
        kind, _, rest = self.addresses.get(self.name, "").partition(":")
        host = rest.rpartition(":")[0].strip("[]") if kind == "tcp" else "127.0.0.1"
        return config if config.host else config.model_copy(update={"host": host})

    def read_secret(self) -> bytes:
        """The per-stack secret. Raises StartError."""
        try:
            secret = Path(self.secret_file).read_bytes().strip()
        except OSError as error:
            raise StartError(f"cannot read the stack's secret: {error}") from error
        if not secret:
            raise StartError(f"{self.secret_file} is empty")
        return secret


class Status:
    """The JSON lines on `status_fd`. Silent without one, and after the reader has gone: nobody waits for it then."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def stage(self, stage: str, share: float) -> None:
        self._write({"stage": stage, "share": share})

    def ready(self, detail: dict[str, Any]) -> None:
        self._write({"ready": True, "detail": detail})

    def error(self, message: str, help: str = "") -> None:
        self._write({"error": " ".join(message.split()), "help": help})

    def _write(self, record: dict[str, Any]) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, msgspec.json.encode(record) + b"\n")
        except OSError:
            self._fd = None


def _decode_config(kind: type, value: Any) -> Any:
    if kind is Config:
        return Config.model_validate(value)  # pydantic's ValidationError is a ValueError; msgspec adds the place
    raise NotImplementedError(kind)


def _encode_config(value: Any) -> Any:
    if isinstance(value, Config):
        return value.model_dump(mode="json")
    raise NotImplementedError(type(value))
