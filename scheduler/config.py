"""The scheduler's configuration: one frozen value, and the command line that makes it.

Nothing here reads the environment or starts anything. Every flag's help says what an absent flag means.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduler.discovery import BadTarget, split_target

LOG_FORMATS = ("console", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_INT32 = (1 << 31) - 1  # numbers go into 32-bit fields of messages, sizes into gRPC's
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Times in seconds."""

    executors: tuple[str, ...]  # HOST:PORT each
    fingerprint: str | None = None  # None: that of the first executor to join
    host: str = "127.0.0.1"
    port: int = 50051  # 0: any free one
    max_queue_requests: int = 1024
    max_queue_tokens: int = 4_000_000
    tenant_weights: tuple[tuple[str, float], ...] = ()  # names and shares; tenants that are not named have 1
    queue_timeout: float = 60.0
    stall_timeout: float = 60.0
    pipeline_depth: int = 2
    prefix_caching: bool = True
    step_timeout: float = 30.0
    grace_period: float = 30.0
    exit_on_executor_loss: bool = False
    exit_with_parent: bool = False
    max_message_bytes: int = 16 * 1024 * 1024
    reflection: bool = True
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tokens_file: Path | None = None
    health_port: int | None = None
    executor_tls_ca: Path | None = None  # the other three make no sense without it
    executor_tls_cert: Path | None = None
    executor_tls_key: Path | None = None
    executor_tls_name: str | None = None
    max_tenant_requests: int | None = None
    share_prefixes: bool = False
    otlp_endpoint: str | None = None  # URL; None: no traces
    http_port: int | None = None  # 0: any free one; None: no such port
    http_names: bool = False
    log_format: str = "console"
    log_level: str = "info"


def parse_config(arguments: Sequence[str] | None = None) -> SchedulerConfig:
    """Exits with code 2 and a sentence on a bad flag."""
    values = vars(_parser().parse_args(arguments))
    targets = tuple(target for given in values.pop("executors") for target in given)
    weights = tuple(weight for given in values.pop("tenant_weights", []) for weight in given)
    config = SchedulerConfig(executors=targets, tenant_weights=weights, **values)
    problem = _problem(config)
    if problem is not None:
        _parser().error(problem)
    return config


def _problem(config: SchedulerConfig) -> str | None:
    """Flags that do not go together."""
    if (config.tls_cert is None) != (config.tls_key is None):
        return "--tls-cert and --tls-key go together"
    if config.tls_client_ca is not None and config.tls_cert is None:
        return "--tls-client-ca needs --tls-cert and --tls-key"
    if (config.executor_tls_cert is None) != (config.executor_tls_key is None):
        return "--executor-tls-cert and --executor-tls-key go together"
    if config.executor_tls_ca is None and (config.executor_tls_cert or config.executor_tls_name):
        return "--executor-tls-cert and --executor-tls-name need --executor-tls-ca"
    return None


class _HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Names the defaults of flags that take a value and have one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.nargs == 0 or action.default in (None, argparse.SUPPRESS):
            return action.help
        return f"{action.help} (default: {_shown(action)})"


def _shown(action: argparse.Action) -> str:
    """The default as it would be written on the command line."""
    default = action.default
    if action.type is _bytes:
        return f"{default >> 20}M"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo scheduler",
        usage="octavo scheduler --executors HOST:PORT[,…] [FLAG …]",
        description="Octavo's scheduler: takes requests over gRPC, plans every step, and sends the plans to executors.",
        formatter_class=_HelpWithDefaults,
        allow_abbrev=False,
    )
    defaults = SchedulerConfig(executors=())
    repeatable = ("executors", "tenant_weights")
    parser.set_defaults(
        **{name: getattr(defaults, name) for name in SchedulerConfig.__slots__ if name not in repeatable}
    )
    parser.add_argument(
        "--fingerprint", metavar="HASH", help="serve this model only; absent: that of the first executor to join"
    )
    parser.add_argument(
        "--executors", "--executor", required=True, action="append", type=_targets, default=argparse.SUPPRESS,
        metavar="HOST:PORT[,…]", help="where executors listen; names are resolved every second, to all their addresses",
    )  # fmt: skip
    _add_listening(parser.add_argument_group("listening"))
    _add_access(parser.add_argument_group("who may call"))
    _add_executor_tls(parser.add_argument_group("connections to executors"))
    _add_queueing(parser.add_argument_group("queueing"))
    _add_planning(parser.add_argument_group("planning"))
    _add_process(parser.add_argument_group("the process"))
    return parser


def _add_listening(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", help="address to listen on")
    group.add_argument("--port", type=_port, help="port to listen on; 0 takes a free one and logs it")
    group.add_argument(
        "--max-message-bytes",
        type=_bytes,
        metavar="BYTES",
        help="longest message taken or sent, as 16777216, 16M or 1G; above: an error status",
    )
    group.add_argument(
        "--no-reflection", dest="reflection", action="store_false", default=True, help="do not describe the services"
    )
    group.add_argument(
        "--http-port",
        type=_port,
        metavar="PORT",
        help="serve a page and /metrics there; 0: a free one; absent: off",
    )
    group.add_argument("--http-names", action="store_true", help="show request ids and tenants on the page")


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate shown to clients; absent: no TLS")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM key of it")
    group.add_argument("--tls-client-ca", type=Path, metavar="FILE", help="clients must show certificates of this root")
    group.add_argument(
        "--tokens-file",
        type=Path,
        metavar="FILE",
        help="clients must show a token of it; lines of TENANT TOKEN [admin]",
    )
    group.add_argument(
        "--health-port",
        type=_port,
        metavar="PORT",
        help="answer health there, without TLS and tokens, and nothing else",
    )
    group.add_argument(
        "--max-tenant-requests", type=_positive, metavar="N", help="most requests of one tenant at once; absent: any"
    )
    group.add_argument(
        "--share-prefixes", action="store_true", help="tenants find each other's cached prefixes, and can tell by time"
    )


def _add_executor_tls(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--executor-tls-ca", type=Path, metavar="FILE", help="PEM roots of executors' certificates; absent: no TLS"
    )
    group.add_argument("--executor-tls-cert", type=Path, metavar="FILE", help="PEM certificate shown to executors")
    group.add_argument("--executor-tls-key", type=Path, metavar="FILE", help="PEM key of it")
    group.add_argument(
        "--executor-tls-name", metavar="NAME", help="that executors' certificates hold; absent: their address"
    )


def _add_queueing(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-queue-requests", type=_positive, metavar="N", help="most requests that may wait")
    group.add_argument("--max-queue-tokens", type=_positive, metavar="N", help="most tokens of KV demand that may wait")
    group.add_argument(
        "--tenant-weight", action="append", type=_weights, default=argparse.SUPPRESS, dest="tenant_weights",
        metavar="NAME=W[,…]", help="share of a tenant while others wait too; tenants that are not named have 1",
    )  # fmt: skip
    group.add_argument(
        "--queue-timeout",
        type=_patience,
        metavar="SECONDS",
        help="longest wait of a request that names none itself",
    )
    group.add_argument(
        "--stall-timeout",
        type=_patience,
        metavar="SECONDS",
        help="abort for a client that reads nothing for so long",
    )


def _add_planning(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--pipeline-depth", type=int, choices=(1, 2, 3), help="plans sent and not yet answered, at most")
    group.add_argument(
        "--no-prefix-caching", dest="prefix_caching", action="store_false", default=True,
        help="compute every prompt whole",
    )  # fmt: skip
    group.add_argument(
        "--step-timeout", type=_patience, metavar="SECONDS", help="an executor without progress for so long is lost"
    )


def _add_process(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--grace-period", type=_seconds, metavar="SECONDS", help="on SIGTERM, time for running streams to finish"
    )
    group.add_argument(
        "--exit-on-executor-loss", action="store_true", help="exit with code 3 once the executor is gone"
    )
    group.add_argument("--exit-with-parent", action="store_true", help="stop when the parent process is gone")
    group.add_argument(
        "--otlp-endpoint",
        type=_endpoint,
        metavar="URL",
        help="send traces there by OTLP over gRPC, as http://collector:4317; absent: none",
    )
    group.add_argument(
        "--log-format", choices=LOG_FORMATS, help="one line for people or one JSON object for each event"
    )
    group.add_argument("--log-level", choices=LOG_LEVELS, help="least level that is logged")


def _targets(text: str) -> list[str]:
    targets = [target for target in text.split(",") if target]
    try:
        for target in targets:
            split_target(target)
    except BadTarget as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not targets:
        raise argparse.ArgumentTypeError("no target is given")
    return targets


def _weights(text: str) -> list[tuple[str, float]]:
    weights = []
    for given in text.split(","):
        name, _, number = given.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not name or not 0 < weight < math.inf:
            raise argparse.ArgumentTypeError(f"{given!r} is not NAME=W with a weight above 0")
        weights.append((name, weight))
    return weights


def _port(text: str) -> int:
    if not text.isdigit() or int(text) >= 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, which is a number below 65536")
    return int(text)


def _endpoint(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL; write it as http://collector:4317")
    return text


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    if int(text) > MAX_INT32:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_INT32}")
    return int(text)


def _bytes(text: str) -> int:
    """As executors take it, since `octavo serve` hands one value to both."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if unit not in UNITS or not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 16777216 or 16M")
    size = int(number) * UNITS[unit]
    if size > MAX_INT32:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_INT32} bytes, the most that gRPC takes")
    return size


def _patience(text: str) -> float:
    seconds = _seconds(text)
    if not seconds:
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return seconds


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds")
    return seconds
