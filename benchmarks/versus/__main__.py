"""Octavo beside its peers: `python -m benchmarks.versus --peer-venv DIR --model DIR [--json] [--repeats N]`.

Every system gets the same requests, greedy, all cores, and its turn; figures are medians over the rounds, each of which
has draws of its own. Octavo runs as `octavo serve` starts it, and this process is its client. The peers run in an
environment of theirs: vLLM's CPU build and transformers, and llama.cpp where --llama-cpp names a GGUF file. What cannot
be started is skipped, and the exit code is 1 then. docs/performance.md says what came of it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from benchmarks.versus.comparisons import (
    COMPARISONS,
    LLAMA_CPP,
    MEMORY,
    OCTAVO,
    TRANSFORMERS,
    VLLM,
    WHOLE_PROMPTS,
    Comparison,
    Row,
    as_json,
    compare,
    table,
)
from benchmarks.versus.memory import MemoryReader, weights_bytes
from benchmarks.versus.octavo_server import octavo_server
from benchmarks.versus.peer_process import PeerFailed, peer_process
from benchmarks.versus.system import Incomplete, System, Task, play, task_of
from benchmarks.workloads import WORKLOADS

WHOLE_PROMPT_TOKENS = 8192  # in one step: what chunking would part
PEERS = (VLLM, TRANSFORMERS, WHOLE_PROMPTS, MEMORY)

Opener = Callable[[str], AbstractContextManager[System]]


def main(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    say(f"load before: {os.getloadavg()[0]:.1f}")
    wanted = wanted_comparisons(options)
    try:
        rows = run(wanted, options.workloads, tasks_of(options), lambda name: open_system(name, options))
    except (PeerFailed, Incomplete) as failure:
        say(f"failed: {failure}")
        return 1
    say(f"load after, this run included: {os.getloadavg()[0]:.1f}")
    print(as_json(rows) if options.json else table(rows))
    return 0 if len(rows) == len(wanted) else 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.versus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-venv", type=Path, required=True, metavar="DIR", help="the peers' environment")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a Hugging Face directory, for all")
    parser.add_argument("--workloads", type=_names(WORKLOADS), default=tuple(WORKLOADS), metavar="NAMES")
    parser.add_argument(
        "--peers", type=_names(PEERS), default=PEERS, metavar="NAMES", help=f"of {','.join(PEERS)}; default all"
    )
    parser.add_argument("--llama-cpp", type=Path, metavar="GGUF", help="llama.cpp as well, on this file of the model")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds; default 3")
    parser.add_argument("--seed", type=int, default=10, metavar="N", help="of the first round's requests; default 10")
    parser.add_argument(
        "--requests", type=int, metavar="N", help="so many instead of a workload's own number; for a try"
    )
    parser.add_argument(
        "--octavo-flags", type=shlex.split, default=[], metavar="FLAGS", help="of `octavo serve`, in one argument"
    )
    parser.add_argument(
        "--vllm-batched-tokens",
        metavar="N",
        dest="vllm_flags",
        type=lambda text: [text],
        default=[],
        help="vLLM's max_num_batched_tokens; default its own",
    )
    parser.add_argument("--json", action="store_true", help="a list of rows instead of the table")
    return parser


def _names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def wanted_comparisons(options: argparse.Namespace) -> list[Comparison]:
    peers = {*options.peers, *([LLAMA_CPP] if options.llama_cpp else [])}
    if MEMORY in peers and "--quantization" in " ".join(options.octavo_flags):
        say(f"skipped: {MEMORY}, since Octavo is told to read fewer bytes than the model's files hold")
        peers.remove(MEMORY)
    return [one for one in COMPARISONS if one.workload in options.workloads and one.peer in peers]


def tasks_of(options: argparse.Namespace) -> Callable[[str], list[Task]]:
    """Of a workload, one for each round."""
    seeds = range(options.seed, options.seed + options.repeats)
    return lambda workload: [task_of(workload, seed, options.requests) for seed in seeds]


def run(
    wanted: Sequence[Comparison], workloads: Sequence[str], tasks: Callable[[str], list[Task]], open_: Opener
) -> list[Row]:
    """A system is opened for the first workload that it takes part in, and stays to the end: one of them takes minutes.
    One that cannot be opened is left out, and said to be."""
    rows: list[Row] = []
    systems: dict[str, System | None] = {}
    with ExitStack() as stack:
        for workload in workloads:
            comparisons = [one for one in wanted if one.workload == workload]
            names = [OCTAVO, *(one.peer for one in comparisons)] if comparisons else []
            for name in names:
                if name not in systems:
                    systems[name] = _open(stack, name, open_)
            outcomes = play([system for name in names if (system := systems[name])], tasks(workload))
            rows += [compare(one, outcomes) for one in comparisons if one.peer in outcomes]
    return rows


def _open(stack: ExitStack, name: str, open_: Opener) -> System | None:
    say(f"starting {name}")
    try:
        return stack.enter_context(open_(name))
    except PeerFailed as failure:
        say(f"skipped: {name}: {failure}")
        return None


def open_system(name: str, options: argparse.Namespace) -> AbstractContextManager[System]:
    """Raises PeerFailed, on entry."""
    python, model = options.peer_venv / "bin" / "python", str(options.model.resolve())
    octavo_flags = [f"--model={model}", "--dtype=bfloat16", *options.octavo_flags]
    if name == VLLM:
        return peer_process(python, "vllm_cpu.py", model, *(options.vllm_flags))
    if name == TRANSFORMERS:
        return peer_process(python, "static_batches.py", model)
    if name == LLAMA_CPP:
        return peer_process(python, "llamacpp.py", str(options.llama_cpp.resolve()))
    if name == MEMORY:
        return nullcontext(MemoryReader(weights_bytes(options.model)))
    if name == WHOLE_PROMPTS:
        return octavo_server(name, [*octavo_flags, f"--max-num-batched-tokens={WHOLE_PROMPT_TOKENS}"])
    return octavo_server(name, octavo_flags)


def say(text: str) -> None:
    print(f"versus: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # no peer stays behind, stopped for ever
    sys.exit(main(sys.argv[1:]))
