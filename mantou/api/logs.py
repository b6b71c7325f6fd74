"""Log records as lines of text or JSON, and a record for each request. Knows no prompt and no answer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from mantou.api.envelope import Exchange

_requests = logging.getLogger("mantou.request")
# Whose records the server writes, and from which level on at least; libraries keep their own ways.
_LOGGERS = {"mantou": logging.DEBUG, "uvicorn": logging.WARNING}


class TextLines(logging.Formatter):
    """`time level logger: message key=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        line += "".join(f" {name}={value}" for name, value in _fields(record).items())
        if record.exc_info:
            line += f"\n{self.formatException(record.exc_info)}"
        return line


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, the fields of the record, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def configure(style: str, level: str, stream: TextIO | None = None) -> None:
    """Sends the server's records from `level` on to `stream` (None = standard error). Call it once, at the start."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    for name, least in _LOGGERS.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(max(logging.getLevelNamesMapping()[level.upper()], least))
        logger.propagate = False


def log_request(exchange: Exchange) -> None:
    """One record for a request that is over: what came of it, for whom, how long it took.

    INFO; WARNING from 500 on, but for 503, which only says later.
    """
    status = exchange.status
    level = logging.WARNING if status is not None and status >= 500 and status != 503 else logging.INFO
    if not _requests.isEnabledFor(level):
        return
    work = exchange.work
    fields: dict[str, Any] = {
        "request_id": exchange.request_id,
        "method": exchange.method,
        "path": exchange.path,
        "status": status,
        "error": exchange.error,
        "key": exchange.caller,
        "seconds": round(exchange.seconds, 4),
    }
    if work.rows:
        fields |= {
            "response_id": work.response_id,
            "model": work.model,
            "answers": len(work.rows),
            "prompt_tokens": work.prompt_tokens,
            "cached_tokens": work.cached_tokens,
            "completion_tokens": work.completion_tokens,
            "first_token_s": None if work.first_token_s is None else round(work.first_token_s, 4),
            "finish": ",".join(work.finishes) or None,
        }
    known = {name: value for name, value in fields.items() if value is not None}
    _requests.log(level, "request", extra={"fields": known})


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    return getattr(record, "fields", {})
