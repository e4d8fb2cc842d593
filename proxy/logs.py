"""Log lines are an event and fields, plain for people or JSON for collectors; never a prompt, a body or a key."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Literal

import structlog

from proxy.errors import CutStream


def configure(log_format: Literal["plain", "json"]) -> None:
    """Send everything, the server's own lines included, through one formatter to standard error."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    tail: list[structlog.typing.Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if log_format == "json":
        tail.append(structlog.processors.format_exc_info)
    tail.append(last)
    formatter = structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=tail)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for chatty in ("httpx", "uvicorn", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_expected)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def _expected(record: logging.LogRecord) -> bool:
    """Drop the traceback that the server prints for what was cut on purpose: a stream, or all at the end."""
    return not (record.exc_info and isinstance(record.exc_info[1], CutStream | asyncio.CancelledError))
