"""`python -m scheduler`: flags to configuration, event loop, exit code.

Everything that takes time is imported by functions, once an interrupt is quiet.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.config import SchedulerConfig
    from scheduler.engine import EngineConfig
    from scheduler.tracing import Tracing


def engine_config(config: SchedulerConfig) -> EngineConfig:
    """The engine's part of the configuration. Raises BadTLSFiles."""
    from octavo.tls import ClientCredentials, ClientFiles

    from scheduler.engine import EngineConfig
    from scheduler.executor_client import ClientOptions
    from scheduler.fleet import FleetConfig

    credentials = None
    if config.executor_tls_ca is not None:
        credentials = ClientCredentials(
            ClientFiles(config.executor_tls_ca, config.executor_tls_cert, config.executor_tls_key)
        )
    fleet = FleetConfig(
        executors=config.executors,
        fingerprint=config.fingerprint,
        pipeline_depth=config.pipeline_depth,
        prefix_caching=config.prefix_caching,
        client=ClientOptions(
            step_timeout=config.step_timeout, credentials=credentials, server_name=config.executor_tls_name
        ),
    )
    return EngineConfig(
        fleet=fleet,
        max_queue_requests=config.max_queue_requests,
        max_queue_tokens=config.max_queue_tokens,
        tenant_weights=dict(config.tenant_weights),
        exit_on_executor_loss=config.exit_on_executor_loss,
    )


class CannotTrace(Exception):
    """OpenTelemetry is not installed; the message is a sentence for the user."""


def tracing(config: SchedulerConfig) -> Tracing | None:
    """None where it is not asked for. Raises CannotTrace."""
    if config.otlp_endpoint is None:
        return None
    try:
        from scheduler.tracing import open_tracing
    except ModuleNotFoundError as error:
        raise CannotTrace("--otlp-endpoint needs OpenTelemetry: pip install 'octavo[otel]'") from error
    return open_tracing(config.otlp_endpoint)


def main() -> int:
    import uvloop
    from octavo.tls import BadTLSFiles

    from scheduler.authentication import BadTokens
    from scheduler.config import parse_config
    from scheduler.engine import Engine
    from scheduler.logs import configure_logs
    from scheduler.server import CannotListen, ExitCode, serve

    config = parse_config()
    configure_logs(config.log_format, config.log_level)

    async def run() -> ExitCode:  # an engine is made inside its loop
        return await serve(config, Engine(engine_config(config)), tracing(config))

    try:
        return int(uvloop.run(run()))
    except (CannotTrace, CannotListen, BadTLSFiles, BadTokens) as error:
        print(f"octavo scheduler: {error}", file=sys.stderr)
        return int(ExitCode.FAILURE)


def interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C before the server listens to it, or while it is imported: nothing is begun, and nothing is to be said."""
    os._exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupted)
    sys.exit(main())
