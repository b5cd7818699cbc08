"""`octavo bench`: what a running server achieves on a workload, as a table, as JSON, and as a picture.

Progress goes to stderr, the result to stdout. Ctrl-C ends the run, and what there is by then is the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from octavo.bench import plot
from octavo.bench.measures import Objective, summarize
from octavo.bench.pool import PoolWatch
from octavo.bench.report import Setting, as_json, as_lines
from octavo.bench.traffic import Pace, Traffic, warm_up, watch_pool
from octavo.bench.workloads import WORKLOADS, BadLine, Work, drawn_from, fixed, read_prompts
from octavo.cli.connection import access_of, failure
from octavo.cli.terminal import ExitCode, Failure, say, write
from octavo.client import AsyncClient, BadTLSFiles, Model, OctavoError

_PROMPT_TOKENS, _OUTPUT_TOKENS = 128, 128  # where only one of the two is given, and for a file of prompts
_NUM_REQUESTS, _CONCURRENCY = 64, 16  # of a workload that names none
_BAR = 24  # characters


class Plan(NamedTuple):
    """What to send and how."""

    name: str
    works: Iterator[Work]
    pace: Pace
    ignore_eos: bool


def bench(options: Namespace) -> int:
    if options.plot is not None and not plot.is_possible():
        raise Failure("--plot needs matplotlib: pip install -e '.[bench]' in the checkout", ExitCode.USAGE)
    return asyncio.run(measure(options))


async def measure(options: Namespace) -> int:
    """Raises Failure."""
    try:
        async with AsyncClient(options.server, **access_of(options)) as client:
            return await _measure(options, client)
    except OctavoError as error:
        raise failure(error, options.server) from None
    except BadTLSFiles as error:
        raise Failure(str(error), ExitCode.USAGE) from None


async def _measure(options: Namespace, client: AsyncClient) -> int:
    model = await client.model(timeout=options.timeout)
    plan = plan_of(options, model)
    if options.warmup:
        await warm_up(client, drawn_from(model.vocab_size), options.warmup)
    pool = PoolWatch(await client.load(), model.block_size)
    traffic = Traffic(client, plan.works, plan.pace, plan.ignore_eos, options.timeout)
    stop = asyncio.Event()
    with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: nobody sends it signals
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    asides = [asyncio.create_task(watch_pool(traffic, pool)), asyncio.create_task(_show(traffic))]
    try:
        await traffic.run(stop)
    finally:
        for aside in asides:
            aside.cancel()
        await asyncio.gather(*asides, return_exceptions=True)
    with contextlib.suppress(OctavoError):
        pool.count(await client.load(timeout=5))

    objective = None
    if options.slo_ttft_ms is not None or options.slo_itl_ms is not None:
        objective = Objective(options.slo_ttft_ms, options.slo_itl_ms)
    setting = Setting(options.server, f"{model.name} ({model.dtype})", plan.name, told(plan.pace), plan.pace.seed)
    summary, use = summarize(traffic.records, traffic.seconds, objective), pool.use()
    if options.json:
        write(json.dumps(as_json(setting, summary, use, objective), ensure_ascii=False) + "\n")
    else:
        write("\n".join(as_lines(setting, summary, use, objective)) + "\n")
    if options.plot is not None:
        title, end = f"{setting.workload}, {setting.pace}", traffic.began + traffic.seconds
        _draw(Path(options.plot), title, traffic, pool, end)
    if stop.is_set():
        return ExitCode.INTERRUPTED
    return ExitCode.FAILURE if summary.num_errors and not summary.num_done else ExitCode.OK


def plan_of(options: Namespace, model: Model) -> Plan:
    """Raises Failure for what the model could not run."""
    if options.workload is not None and options.output_tokens is not None:
        raise Failure("--output-tokens: a workload has its own", ExitCode.USAGE)
    ids = drawn_from(model.vocab_size)
    num_requests, concurrency = _NUM_REQUESTS, _CONCURRENCY
    ignore_eos = True
    if options.prompts is not None:
        prompts = _read(options.prompts, options.output_tokens or _OUTPUT_TOKENS)
        name, num_requests = f"prompts of {options.prompts}", len(prompts)
        works: Iterator[Work] = itertools.cycle(prompts)
        ignore_eos = options.ignore_eos
    elif options.prompt_tokens is not None or options.output_tokens is not None:
        sizes = (options.prompt_tokens or _PROMPT_TOKENS, options.output_tokens or _OUTPUT_TOKENS)
        name = f"{sizes[0]} tokens in, {sizes[1]} out"
        works = fixed(ids, options.seed, *sizes)
    else:
        name = options.workload or "chat"
        workload = WORKLOADS[name]
        works, num_requests, concurrency = (
            workload.stream(ids, options.seed),
            workload.num_requests,
            workload.concurrency,
        )
    if options.seconds is not None or options.requests is not None:
        num_requests = options.requests
    if options.rate is None:
        concurrency = options.concurrency or concurrency
    pace = Pace(
        concurrency=None if options.rate is not None else concurrency,
        rate=options.rate,
        num_requests=num_requests,
        seconds=options.seconds,
        seed=options.seed,
    )
    works, look = itertools.tee(works)
    _check_lengths(itertools.islice(look, min(num_requests or _NUM_REQUESTS, _NUM_REQUESTS)), model)
    return Plan(name, works, pace, ignore_eos)


def told(pace: Pace) -> str:
    """In words."""
    count = [] if pace.num_requests is None else [f"{pace.num_requests} requests"]
    time_ = [] if pace.seconds is None else [f"{pace.seconds:g} s"]
    how = f"{pace.rate:g}/s at random" if pace.rate is not None else f"{pace.concurrency} at once"
    return ", ".join([*count, *time_, how])


def _check_lengths(works: Iterator[Work], model: Model) -> None:
    longest = max((w.num_prompt_tokens or 1) + w.num_output_tokens for w in works)
    if longest > model.max_model_len:
        raise Failure(
            f"the workload has requests of {longest} tokens, and the server takes {model.max_model_len} at most",
            ExitCode.USAGE,
        )


def _read(path: str, num_output_tokens: int) -> list[Work]:
    try:
        return read_prompts(Path(path).read_text(encoding="utf-8").splitlines(), num_output_tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"the prompts in {path} cannot be read: {error}", ExitCode.USAGE) from None
    except BadLine as error:
        raise Failure(f"{path}: {error}", ExitCode.USAGE) from None


def _draw(path: Path, title: str, traffic: Traffic, pool: PoolWatch, end: float) -> None:
    try:
        plot.draw(path, title, traffic.records, pool.samples, traffic.began, end)
    except (OSError, ValueError) as error:
        raise Failure(f"the picture cannot be written to {path}: {error}") from None
    say(f"picture in {path}")


async def _show(traffic: Traffic) -> None:
    """A line that is written over and over where stderr is a terminal, and one every ten seconds where it is not."""
    terminal = sys.stderr.isatty()
    try:
        while True:
            await asyncio.sleep(0.2 if terminal else 10)
            line = progress(traffic, time.perf_counter())
            print(f"\r\x1b[K{line}" if terminal else f"octavo: {line}", end="" if terminal else "\n", file=sys.stderr)
            sys.stderr.flush()
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def progress(traffic: Traffic, now: float) -> str:
    """How far the run is, by whichever of its bounds is nearer, and what it gives so far."""
    pace, elapsed = traffic.pace, now - traffic.began
    ended = sum(record.end is not None for record in traffic.records)
    shares = [ended / pace.num_requests] if pace.num_requests else []
    shares += [elapsed / pace.seconds] if pace.seconds else []
    filled = round(_BAR * min(1.0, max(shares, default=0.0)))
    tokens = sum(record.num_output_tokens for record in traffic.records)
    count = f"{ended}/{pace.num_requests}" if pace.num_requests else str(ended)
    rate = tokens / elapsed if elapsed > 0 else 0.0
    failed = sum(record.error is not None for record in traffic.records)
    errors = f", {failed} failed" if failed else ""
    return f"[{'#' * filled}{'.' * (_BAR - filled)}] {count} requests, {elapsed:.0f} s, {rate:.0f} tokens/s{errors}"
