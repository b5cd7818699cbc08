"""`python -m scheduler`: flags to configuration, event loop, exit code."""

from __future__ import annotations

import sys

import uvloop

from scheduler.config import SchedulerConfig, parse_config
from scheduler.engine import Engine, EngineConfig
from scheduler.executor_client import ClientOptions
from scheduler.fleet import FleetConfig
from scheduler.logs import configure_logs
from scheduler.server import CannotListen, ExitCode, serve


def engine_config(config: SchedulerConfig) -> EngineConfig:
    """The engine's part of the configuration."""
    fleet = FleetConfig(
        executors=config.executors,
        fingerprint=config.fingerprint,
        pipeline_depth=config.pipeline_depth,
        prefix_caching=config.prefix_caching,
        client=ClientOptions(step_timeout=config.step_timeout),
    )
    return EngineConfig(
        fleet=fleet,
        max_queue_requests=config.max_queue_requests,
        max_queue_tokens=config.max_queue_tokens,
        tenant_weights=dict(config.tenant_weights),
        exit_on_executor_loss=config.exit_on_executor_loss,
    )


async def _main(config: SchedulerConfig) -> ExitCode:
    return await serve(config, Engine(engine_config(config)))


def main() -> int:
    config = parse_config()
    configure_logs(config.log_format, config.log_level)
    try:
        return int(uvloop.run(_main(config)))
    except CannotListen as error:
        print(error, file=sys.stderr)
        return int(ExitCode.FAILURE)


if __name__ == "__main__":
    sys.exit(main())
