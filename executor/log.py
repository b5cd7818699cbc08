"""The process' log: structlog to stderr, for people or as one JSON object a line. Set up once, by the command line."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog


class FromLibraries(logging.Handler):
    """What libraries log goes the same way, so that every line has the one form."""

    def emit(self, record: logging.LogRecord) -> None:
        logger: structlog.typing.FilteringBoundLogger = structlog.get_logger("library")
        logger.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info or None)


class StandardError:
    """Where lines go. One that finds no place, on a full disk or in a pipe that nobody reads, is lost: it must not
    take with it the request that it tells of."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure_log(form: str, level: str) -> None:
    """form "console" or "json"; level as logging names it."""
    logging.basicConfig(level=logging.WARNING, handlers=[FromLibraries()])
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            exception_formatter=structlog.dev.plain_traceback,  # the other ones print variables: prompts
        )
    )
    # The console prints tracebacks itself; JSON needs them as text.
    traceback = [structlog.processors.format_exc_info] if form == "json" else []
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *traceback,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, StandardError())),
    )
