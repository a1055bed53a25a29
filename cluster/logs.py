"""The log format of Lockstep's processes: to stderr, which Ray stores, one line per event, as text or JSON.

Every line names its replica and rank. Further values are in `extra={"fields": {...}}`: values of a request or of the
engine, never a request's text.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

_PACKAGES = ("attention", "cluster", "configs", "parallel", "worker")


class ConsoleFormatter(logging.Formatter):
    """Writes lines such as `INFO [app:replica tp1] cluster.serve.running_engine: message key=value ...`."""

    def __init__(self, process: Mapping[str, str]) -> None:
        where = " ".join(process.values())
        super().__init__(f"%(levelname)s {f'[{where}] ' if where else ''}%(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        return f"{super().formatMessage(record)} {fields}" if fields else super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, names of the process, the line's fields, `error`."""

    def __init__(self, process: Mapping[str, str]) -> None:
        super().__init__()
        self._process = dict(process)
        # Values that JSON cannot express are written as text, so that no line is lost.
        self._encoder = msgspec.json.Encoder(enc_hook=str)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
            **_fields(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return self._encoder.encode(line).decode()


class _Handler(logging.StreamHandler[TextIO]):
    """Lockstep's own handler, which distinguishes it from other handlers of the root logger."""


def formatter(log_format: str, **process: str) -> logging.Formatter:
    """A formatter for `log_format` (`observability.log_format`: console or json). `process` has names such as replica
    and rank."""
    return (JsonFormatter if log_format == "json" else ConsoleFormatter)(process)


def log_to_stderr(log_format: str = "console", **process: str) -> None:
    """Writes Lockstep's log and warnings of other packages to stderr. Ray stores the lines and passes them on to the
    driver. Another call changes the process's names."""
    logging.basicConfig(level=logging.WARNING, handlers=[_Handler(sys.stderr)])
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            handler.setFormatter(formatter(log_format, **process))
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = record.__dict__.get("fields", {})
    return fields
