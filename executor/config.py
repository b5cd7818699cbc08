"""What the executor can be told: one frozen `ExecutorConfig`, and the command line it is read from.

Imports nothing heavy: `--help` and a wrong flag answer at once, and the process can set its environment before torch is
loaded. The help texts here are the flags' documentation.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

DEFAULT_PORT = 50052
DEFAULT_MODEL = "smollm2"
SIMULATED_MODEL = "simulated"  # the built-in one
DEFAULT_MESSAGE_BYTES = 64 << 20
MAX_INT32 = (1 << 31) - 1  # of block ids, token counts, and gRPC's bounds of messages
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class StartupError(Exception):
    """The executor cannot start; the message is a sentence for its user."""


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """All settings of one executor process."""

    model: str = DEFAULT_MODEL
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # 0 takes a free one
    device: str = "cpu"
    dtype: str = "auto"  # "auto", "float32", "bfloat16", "float16"
    quantization: str = "none"  # "none", "int8", "gguf"
    block_size: int = 16
    kv_cache_memory: int | None = None  # bytes
    num_blocks: int | None = None  # null block included
    gpu_memory_share: float = 0.9  # of a GPU's memory, for everything this process does there
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None  # None: the model's
    deterministic: bool = False
    simulate_step_ms: float | None = None  # a step takes so long, and no weights are computed
    threads: int | None = None  # None: one for each core this process may use
    cache_dir: Path = Path("~/.cache/octavo")
    grace_period: float = 30.0  # seconds
    max_message_bytes: int = DEFAULT_MESSAGE_BYTES
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    scheduler_name: str | None = None  # in the caller's certificate; None: anybody's
    health_port: int | None = None
    otlp_endpoint: str | None = None  # URL; None: no traces
    log_format: str = "console"  # "console", "json"
    log_level: str = "info"
    exit_with_parent: bool = False

    @property
    def address(self) -> str:
        """What to listen on."""
        return format_address(self.host, self.port)

    @property
    def num_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))


def format_address(host: str, port: int) -> str:
    """IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def parse_arguments(arguments: Sequence[str], environment: Mapping[str, str]) -> ExecutorConfig:
    """Exits with code 2 and a sentence on stderr if an argument is wrong. The environment names the cache directory."""
    parser = build_parser()
    values = parser.parse_args(arguments)
    if values.model is None:
        values.model = DEFAULT_MODEL if values.simulate_step_ms is None else SIMULATED_MODEL
    values.cache_dir = (values.cache_dir or default_cache_dir(environment)).expanduser()
    config = ExecutorConfig(**{field.name: getattr(values, field.name) for field in fields(ExecutorConfig)})
    problem = _problem(config)
    if problem is not None:
        parser.error(problem)
    return config


def build_parser() -> argparse.ArgumentParser:
    defaults = ExecutorConfig()
    parser = argparse.ArgumentParser(
        prog="octavo executor",
        usage="octavo executor [FLAG …]",
        description="Holds a model's weights and its KV cache, and runs the batch plans of one scheduler.",
        allow_abbrev=False,
    )
    _add_model_flags(parser, defaults)
    _add_size_flags(parser, defaults)
    _add_process_flags(parser, defaults)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser, defaults: ExecutorConfig) -> None:
    parser.add_argument(
        "--model",
        metavar="MODEL",
        default=None,
        help="smollm2 (the demo model), a Hugging Face directory, a .gguf file or a hub id; default smollm2",
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default=defaults.device, help="where the model runs; default cpu"
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default=defaults.dtype,
        help="format of weights and KV cache; auto is bfloat16 on a GPU and on a CPU that multiplies it, else float32; "
        "float16 on a GPU only; default auto",
    )
    parser.add_argument(
        "--quantization",
        choices=["none", "int8", "gguf"],
        default=defaults.quantization,
        help="of the weights of matrix products, on a CPU only: int8 rounds any weights to 8 bits and a scale for each "
        "32, gguf computes with the Q4_0, Q4_1 and Q8_0 blocks of a .gguf file as they are; activations and KV cache "
        "stay in --dtype; default none",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="make every result independent of what else runs in the same step; slower",
    )
    parser.add_argument(
        "--simulate-step-ms",
        metavar="MS",
        type=float,
        default=None,
        help="compute no model: each step takes so long, and tokens follow from the sequence's own; --model gives the "
        "tokenizer and the sizes, absent: a tiny built-in one",
    )
    parser.add_argument(
        "--threads", metavar="N", type=int, default=None, help="threads of the model; default one for each core"
    )
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        type=Path,
        default=None,
        help="where fetched and converted models are kept; default $XDG_CACHE_HOME/octavo or ~/.cache/octavo",
    )


def _add_size_flags(parser: argparse.ArgumentParser, defaults: ExecutorConfig) -> None:
    parser.add_argument(
        "--block-size",
        metavar="N",
        type=int,
        choices=[16, 32],
        default=defaults.block_size,
        help="tokens of one KV block, 16 or 32; default 16",
    )
    parser.add_argument(
        "--kv-cache-memory",
        metavar="BYTES",
        type=_bytes,
        default=None,
        help="size of the KV cache, as 512M or 4G; default on a CPU a quarter of the memory that is free, 2G at most, "
        "on a GPU what --gpu-memory-share leaves",
    )
    parser.add_argument(
        "--num-blocks",
        metavar="N",
        type=int,
        default=None,
        help="size of the KV cache in blocks, instead of --kv-cache-memory",
    )
    parser.add_argument(
        "--gpu-memory-share",
        metavar="FRACTION",
        type=float,
        default=defaults.gpu_memory_share,
        help="share of the GPU's memory for weights, activations and KV cache together; default 0.9",
    )
    parser.add_argument(
        "--max-num-seqs",
        metavar="N",
        type=int,
        default=defaults.max_num_seqs,
        help="most sequences that run in one step; default 64",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        metavar="N",
        type=int,
        default=defaults.max_num_batched_tokens,
        help="most tokens computed in one step; a longer prompt is computed in chunks; default 512",
    )
    parser.add_argument(
        "--max-model-len",
        metavar="N",
        type=int,
        default=None,
        help="longest sequence, prompt and output together; default the model's own",
    )


def _add_process_flags(parser: argparse.ArgumentParser, defaults: ExecutorConfig) -> None:
    parser.add_argument("--host", metavar="HOST", default=defaults.host, help="address to listen on; default 127.0.0.1")
    parser.add_argument(
        "--port",
        metavar="PORT",
        type=int,
        default=defaults.port,
        help=f"port to listen on, 0 takes a free one; default {DEFAULT_PORT}",
    )
    parser.add_argument(
        "--grace-period",
        metavar="SECONDS",
        type=float,
        default=defaults.grace_period,
        help="time for running requests to finish after SIGTERM; a second SIGTERM does not wait; default 30",
    )
    parser.add_argument(
        "--max-message-bytes",
        metavar="BYTES",
        type=_bytes,
        default=defaults.max_message_bytes,
        help="largest gRPC message, both ways; default 64M",
    )
    parser.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="PEM certificate shown to the scheduler; absent: no TLS"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM key of it")
    parser.add_argument(
        "--tls-client-ca", type=Path, metavar="FILE", help="callers must show a certificate of this root"
    )
    parser.add_argument("--scheduler-name", metavar="NAME", help="that the caller's certificate must hold")
    parser.add_argument(
        "--health-port", type=int, metavar="PORT", help="answer health there, without TLS, and nothing else"
    )
    parser.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        default=defaults.otlp_endpoint,
        help="send traces there by OTLP over gRPC, as http://collector:4317; absent: none",
    )
    parser.add_argument(
        "--log-format",
        choices=["console", "json"],
        default=defaults.log_format,
        help="form of the log on stderr; default console",
    )
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default=defaults.log_level,
        help="least severe entries to log; default info",
    )
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="end at once when the process that started this one ends"
    )


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_CACHE_HOME")
    return Path(base) / "octavo" if base else Path("~/.cache/octavo")


def _bytes(text: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if unit not in _UNITS or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 1073741824, 512M or 4G")
    return int(number) * _UNITS[unit]


def _problem(config: ExecutorConfig) -> str | None:
    """What is wrong with the values, in a sentence."""
    for name in ("port", "health_port"):
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 65535:
            return f"--{name.replace('_', '-')} {value} is not in [0, 65535]"
    if (config.tls_cert is None) != (config.tls_key is None):
        return "--tls-cert and --tls-key go together"
    if config.tls_client_ca is not None and config.tls_cert is None:
        return "--tls-client-ca needs --tls-cert and --tls-key"
    if config.scheduler_name is not None and config.tls_client_ca is None:
        return "--scheduler-name needs --tls-client-ca: without it nobody's name is known"
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "threads", "kv_cache_memory"):
        value = getattr(config, name)
        if value is not None and value < 1:
            return f"--{name.replace('_', '-')} {value} is less than 1"
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "threads", "num_blocks"):
        value = getattr(config, name)
        if value is not None and value > MAX_INT32:
            return f"--{name.replace('_', '-')} {value} is more than {MAX_INT32}"
    if config.max_model_len == 1:
        return "--max-model-len 1 is less than 2: a prompt and an output take a token each"
    if config.num_blocks is not None and config.num_blocks < 2:
        return f"--num-blocks {config.num_blocks} is less than 2: block 0 is never used"
    if config.num_blocks is not None and config.kv_cache_memory is not None:
        return "--num-blocks and --kv-cache-memory both give the size of the KV cache; give one of them"
    if not 0 < config.gpu_memory_share <= 1:
        return f"--gpu-memory-share {config.gpu_memory_share:g} is not in (0, 1]"
    if config.max_num_batched_tokens < config.max_num_seqs:
        return (
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is less than --max-num-seqs "
            f"{config.max_num_seqs}: a step could not give each sequence a token"
        )
    if config.simulate_step_ms is not None and not 0 <= config.simulate_step_ms < 60_000:
        return f"--simulate-step-ms {config.simulate_step_ms:g} is not in [0, 60000)"
    if not config.grace_period >= 0:
        return f"--grace-period {config.grace_period} is less than 0"
    if config.otlp_endpoint is not None and not config.otlp_endpoint.startswith(("http://", "https://")):
        return f"--otlp-endpoint {config.otlp_endpoint!r} is no URL; write it as http://collector:4317"
    if config.max_message_bytes < 1 << 20:
        return f"--max-message-bytes {config.max_message_bytes} is less than 1M"
    if config.max_message_bytes > MAX_INT32:
        return f"--max-message-bytes {config.max_message_bytes} is more than {MAX_INT32}, the most that gRPC takes"
    return None
