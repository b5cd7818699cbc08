"""The process' log: structlog to stderr, for people or as one JSON object a line. Set up once, by the command line."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_log(form: str, level: str) -> None:
    """form "console" or "json"; level as logging names it."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
