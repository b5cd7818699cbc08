"""How the process logs: structlog on standard error, one line for each event, as text for people or as JSON."""

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


def configure_logs(log_format: str, level: str) -> None:
    """Once, before anything is logged."""
    logging.basicConfig(level=logging.WARNING, handlers=[FromLibraries()])
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if log_format == "json":
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        processors.append(
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                exception_formatter=structlog.dev.plain_traceback,  # the other ones print variables: prompts
            )
        )
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, StandardError())),
        cache_logger_on_first_use=True,
    )
