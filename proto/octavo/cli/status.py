"""`octavo health` and `octavo load`: what a running server says of itself."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from octavo.cli.connection import connected
from octavo.cli.terminal import ExitCode, write
from octavo.client import ExecutorLoad, Load

_HEADINGS = ("EXECUTOR", "STATE", "RUNNING", "WAITING", "FREE BLOCKS", "PREFIX HITS", "PREEMPTIONS", "STEPS")


def show_health(options: Namespace) -> int:
    with connected(options.server, options.timeout) as client:
        serving = client.health()
    write("SERVING\n" if serving else "NOT_SERVING\n")
    return ExitCode.OK if serving else ExitCode.FAILURE


def show_load(options: Namespace) -> int:
    with connected(options.server, options.timeout) as client:
        load = client.load()
    write("\n".join(load_lines(load)) + "\n")
    return ExitCode.OK


def load_lines(load: Load) -> list[str]:
    """A table of executors, then the queue, then why what waits does."""
    lines = _aligned([_HEADINGS, *map(_row, load.executors)])
    lines += [f"{executor.target}: {executor.reason}" for executor in load.executors if executor.reason]
    lines.append(f"queue: {load.queue_length} of {load.queue_limit} requests, {load.queue_tokens} tokens")
    lines += [f"waiting: {number} ({reason})" for reason, number in load.waiting.items()]
    return [*lines, "draining: no new requests are taken"] if load.draining else lines


def _row(executor: ExecutorLoad) -> tuple[str, ...]:
    hits = f"{executor.prefix_hits / executor.prefix_queries:.0%}" if executor.prefix_queries else "-"
    return (
        executor.target,
        executor.state.name,
        str(executor.num_running),
        str(executor.num_waiting),
        f"{executor.num_free_blocks}/{executor.num_blocks}",
        hits,
        str(executor.num_preemptions),
        str(executor.steps),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
