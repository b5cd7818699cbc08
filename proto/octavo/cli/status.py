"""`octavo health`, `octavo load` and `octavo drain`: what a running server says of itself, and its orderly end."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from octavo.cli.connection import connected
from octavo.cli.terminal import ExitCode, write
from octavo.client import ExecutorLoad, Load

_CLEAR = "\x1b[H\x1b[2J"  # of a terminal: cursor home, erase all
_HEADINGS = ("EXECUTOR", "STATE", "RUNNING", "WAITING", "FREE BLOCKS", "PREFIX HITS", "PREEMPTIONS", "STEPS")


def show_health(options: Namespace) -> int:
    with connected(options) as client:
        serving = client.health("")  # the readiness of either process, whatever its service's name
    write("SERVING\n" if serving else "NOT_SERVING\n")
    return ExitCode.OK if serving else ExitCode.FAILURE


def show_load(options: Namespace) -> int:
    with connected(options) as client:
        if options.watch is None:
            write(_page(client.load()))
        else:
            before = _CLEAR if sys.stdout.isatty() else "\n"
            for number, load in enumerate(client.watch_load(options.watch)):
                write((before if number or before == _CLEAR else "") + _page(load))
    return ExitCode.OK


def drain(options: Namespace) -> int:
    with connected(options) as client:
        incarnation = client.drain(options.executor)
    write("the scheduler drains\n" if incarnation is None else f"executor {options.executor} drains\n")
    return ExitCode.OK


def _page(load: Load) -> str:
    return "\n".join(load_lines(load)) + "\n"


def load_lines(load: Load) -> list[str]:
    """A table of executors, then the queue, then why what waits does."""
    lines = _aligned([_HEADINGS, *map(_row, load.executors)])
    lines += [f"{executor.target}: {executor.reason}" for executor in load.executors if executor.reason]
    lines.append(f"queue: {load.queue_length} of {load.queue_limit} requests, {load.queue_tokens} tokens")
    lines += [f"waiting: {w.num_requests} of {w.tenant} at priority {w.priority} ({w.reason})" for w in load.waiting]
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
