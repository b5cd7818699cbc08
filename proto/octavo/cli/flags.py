"""The flags of the two processes, as far as the front door must know them: names, defaults, one line each.

This is the one table of them. `octavo serve` and `octavo demo` accept those with `serve` and pass them on to each
process that has them; README.md prints the table; tests/test_flags.py compares it with the --help of both processes.
Values are checked by the process that gets them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    metavar: str | None  # None: a switch
    default: str | None  # as the process prints it; None: absent means something of its own, or off
    help: str
    serve: bool = True  # `octavo serve` passes it on

    @property
    def key(self) -> str:
        """Its name among parsed values."""
        return self.name.removeprefix("--").replace("-", "_")


_MODEL = "`smollm2` (the demo model), a Hugging Face directory, a .gguf file or a hub id"
_KV_MEMORY = "of the KV cache, as 512M; absent: a quarter of what is free, up to 2G; on a GPU, all"
_QUANTIZATION = "of weights: int8, gguf (a file's own 4- or 8-bit blocks) or none; not on a GPU"
_OTLP = "send traces there by OTLP over gRPC, as http://collector:4317; absent: none"

EXECUTOR: tuple[Flag, ...] = (
    Flag("--model", "MODEL", "smollm2", _MODEL),
    Flag("--device", "DEVICE", "cpu", "where the model runs: cpu or cuda"),
    Flag("--dtype", "DTYPE", "auto", "of weights and KV cache: float32, bfloat16, float16 or auto (the device's best)"),
    Flag("--quantization", "FORM", "none", _QUANTIZATION),
    Flag("--deterministic", None, None, "every result is independent of what else runs in the same step; slower"),
    Flag("--simulate-step-ms", "MS", None, "compute no model: each step takes so long; for tests of scale"),
    Flag("--threads", "N", None, "threads of the model; absent: one for each core"),
    Flag("--cache-dir", "DIR", None, "where fetched and converted models are kept; absent: ~/.cache/octavo"),
    Flag("--block-size", "N", "16", "tokens of one KV block, 16 or 32"),
    Flag("--kv-cache-memory", "BYTES", None, _KV_MEMORY),
    Flag("--num-blocks", "N", None, "size of the KV cache in blocks, instead of --kv-cache-memory"),
    Flag("--gpu-memory-share", "FRACTION", "0.9", "of a GPU's memory, for weights, activations and KV cache together"),
    Flag("--max-num-seqs", "N", "64", "most sequences that run in one step"),
    Flag("--max-num-batched-tokens", "N", "512", "most tokens computed in one step; longer prompts come in chunks"),
    Flag("--max-model-len", "N", None, "longest sequence, prompt and output together; absent: the model's own"),
    Flag("--host", "HOST", "127.0.0.1", "address to listen on", serve=False),
    Flag("--port", "PORT", "50052", "port to listen on; 0 takes a free one", serve=False),
    Flag("--grace-period", "SECONDS", "30", "time for running requests to finish after SIGTERM"),
    Flag("--max-message-bytes", "BYTES", "64M", "largest gRPC message, both ways"),
    Flag("--tls-cert", "FILE", None, "PEM certificate shown to the scheduler; absent: no TLS", serve=False),
    Flag("--tls-key", "FILE", None, "PEM key of it", serve=False),
    Flag("--tls-client-ca", "FILE", None, "callers must show a certificate of this root", serve=False),
    Flag("--scheduler-name", "NAME", None, "that the caller's certificate must hold", serve=False),
    Flag("--health-port", "PORT", None, "answer health there, without TLS, and nothing else", serve=False),
    Flag("--otlp-endpoint", "URL", None, _OTLP),
    Flag("--log-format", "FORM", "console", "console or json, on stderr"),
    Flag("--log-level", "LEVEL", "info", "debug, info, warning or error"),
    Flag("--exit-with-parent", None, None, "end when the process that started this one ends", serve=False),
)  # fmt: skip

SCHEDULER: tuple[Flag, ...] = (
    Flag("--executors", "HOST:PORT[,…]", None, "where executors listen; names are resolved every second", serve=False),
    Flag("--fingerprint", "HASH", None, "serve this model only; absent: the first executor's", serve=False),
    Flag("--host", "HOST", "127.0.0.1", "address to listen on"),
    Flag("--port", "PORT", "50051", "port to listen on; 0 takes a free one"),
    Flag("--max-message-bytes", "BYTES", "16M", "largest gRPC message, both ways"),
    Flag("--tls-cert", "FILE", None, "PEM certificate shown to clients; absent: no TLS"),
    Flag("--tls-key", "FILE", None, "PEM key of it"),
    Flag("--tls-client-ca", "FILE", None, "clients must show a certificate of this root"),
    Flag("--tokens-file", "FILE", None, "clients must show a token of it: lines of `TENANT TOKEN [admin]`"),
    Flag("--health-port", "PORT", None, "answer health there, without TLS and tokens, and nothing else"),
    Flag("--max-tenant-requests", "N", None, "most requests of one tenant at once; absent: any"),
    Flag("--share-prefixes", None, None, "tenants find each other's cached prefixes, and can tell by time"),
    Flag("--executor-tls-ca", "FILE", None, "PEM roots of executors' certificates; absent: no TLS", serve=False),
    Flag("--executor-tls-cert", "FILE", None, "PEM certificate shown to executors", serve=False),
    Flag("--executor-tls-key", "FILE", None, "PEM key of it", serve=False),
    Flag("--executor-tls-name", "NAME", None, "that executors' certificates hold; absent: their address", serve=False),
    Flag("--no-reflection", None, None, "do not describe the services to whoever asks"),
    Flag("--http-port", "PORT", None, "serve a page and /metrics there; 0: a free one; absent: off"),
    Flag("--http-names", None, None, "show request ids and tenants on the page"),
    Flag("--max-queue-requests", "N", "1024", "most requests that may wait"),
    Flag("--max-queue-tokens", "N", "4000000", "most tokens of KV demand that may wait"),
    Flag("--tenant-weight", "NAME=W[,…]", None, "share of a tenant while others wait too; absent: 1 for each"),
    Flag("--queue-timeout", "SECONDS", "60", "longest wait of a request that names none itself"),
    Flag("--stall-timeout", "SECONDS", "60", "a client that reads nothing for so long is given up"),
    Flag("--pipeline-depth", "N", "2", "most plans sent and not yet answered: 1, 2 or 3"),
    Flag("--no-prefix-caching", None, None, "compute every prompt whole"),
    Flag("--step-timeout", "SECONDS", "30", "an executor without progress for so long is lost"),
    Flag("--grace-period", "SECONDS", "30", "time for running streams to finish after SIGTERM"),
    Flag("--exit-on-executor-loss", None, None, "exit with code 3 once the executor is gone", serve=False),
    Flag("--exit-with-parent", None, None, "end when the process that started this one ends", serve=False),
    Flag("--otlp-endpoint", "URL", None, _OTLP),
    Flag("--log-format", "FORM", "console", "console or json, on stderr"),
    Flag("--log-level", "LEVEL", "info", "debug, info, warning or error"),
)  # fmt: skip


# Who may call, and how: of no use to a server that asks itself one question.
ACCESS = ("--tls-cert", "--tls-key", "--tls-client-ca", "--tokens-file", "--health-port")


def served(leave_out: Sequence[str] = ()) -> list[Flag]:
    """What `octavo serve` takes; a flag that both processes have stands there once, as the scheduler has it."""
    flags = {flag.name: flag for flag in (*EXECUTOR, *SCHEDULER) if flag.serve and flag.name not in leave_out}
    return list(flags.values())


def given(flags: Sequence[Flag], values: Namespace) -> list[str]:
    """The arguments that say to a process what the user said to us."""
    arguments: list[str] = []
    for flag in flags:
        value = getattr(values, flag.key, None) if flag.serve else None
        if value is True:
            arguments.append(flag.name)
        elif value is not None and value is not False:
            arguments.append(f"{flag.name}={value}")
    return arguments


def table(flags: Sequence[Flag]) -> str:
    """The table as README.md has it."""
    rows = [
        f"| `{flag.name}{f' {flag.metavar}' if flag.metavar else ''}` | {flag.default or ''} | {flag.help} |"
        for flag in flags
    ]
    return "\n".join(["| flag | default | what it says |", "|---|---|---|", *rows])
