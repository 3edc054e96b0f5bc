"""Log lines on stderr, the same in every process.

`PDCTL_LOG=json` makes each line one JSON object (what the supervisor asks for); otherwise a line reads
`19:26:29 INFO router message key=value`. Fields ride on the record as `extra={"fields": {...}}`, so that neither form
formats anything unless the line is written.
"""

import logging
import os
import sys
import time

import msgspec


def setup(process: str, level: int = logging.INFO) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if os.environ.get("PDCTL_LOG") == "json" else Plain(process))
    logging.basicConfig(level=level, handlers=[handler], force=True)


class JsonLines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "t": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class Plain(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {key}={value}" for key, value in getattr(record, "fields", {}).items())
        line = f"{clock} {record.levelname} {self._process} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
