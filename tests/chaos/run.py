"""A chaos run: the undisturbed answers first, then the same requests again and again under faults, compared.

Each client sends its request, checks the answer, and sends it again, until the time is up; what is in flight then still
ends. Nothing here asserts: the report says what happened.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.client import AsyncClient, GenerateOptions

from tests.chaos import streams
from tests.chaos.faults import Fault, Injector
from tests.chaos.processes import Farm, wait_serving
from tests.chaos.streams import Stream

LAST_WAIT = 120.0  # seconds for streams in flight when the faults are over
COMPLAINTS_SHOWN = 20


@dataclass(slots=True)
class Report:
    """What happened."""

    num_streams: int = 0  # requests answered to their end
    num_outputs: int = 0
    num_tokens: int = 0
    num_moved: int = 0  # streams that more than one executor computed
    seconds: float = 0.0
    faults: dict[Fault, int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    longest_gaps: list[float] = field(default_factory=list)  # one for each stream

    @property
    def ok(self) -> bool:
        return not self.complaints

    def count(self, kind: str) -> int:
        return sum(complaint.startswith(kind) for complaint in self.complaints)

    def take(self, stream: Stream, expected: Stream) -> None:
        complaints = streams.compare(stream, expected)
        self.complaints.extend(complaints)
        self.num_streams += 1
        self.num_outputs += len(stream.answers)
        self.num_tokens += sum(len(answer.token_ids) for answer in stream.answers.values())
        self.num_moved += len(stream.executors) > 1
        self.longest_gaps.append(stream.longest_gap())


async def undisturbed(client: AsyncClient, requests: Sequence[GenerateOptions]) -> list[Stream]:
    """The expected answers. Raises AssertionError where one fails even so."""
    expected = list(await asyncio.gather(*(streams.run(client, request) for request in requests)))
    complaints = [complaint for stream in expected for complaint in stream.complaints]
    assert not complaints, complaints
    return expected


async def chaos(
    farm: Farm,
    client: AsyncClient,
    expected: Sequence[Stream],
    injector: Injector,
    *,
    seconds: float,
    period: float,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    report = Report()
    began = time.monotonic()
    over = asyncio.Event()

    async def repeat(wanted: Stream) -> None:
        while not over.is_set():
            report.take(await streams.run(client, wanted.options), wanted)

    async def tell() -> None:
        while True:
            await asyncio.sleep(10)
            struck = sum(injector.counts.values())
            progress(
                f"{time.monotonic() - began:4.0f} s: {struck} faults, {report.num_streams} streams ended, "
                f"{report.num_moved} of them moved, {len(report.complaints)} complaints"
            )

    clients = [asyncio.create_task(repeat(wanted)) for wanted in expected]
    telling = asyncio.create_task(tell())
    await injector.run(seconds, period)
    over.set()
    _, late = await asyncio.wait(clients, timeout=LAST_WAIT)
    telling.cancel()
    for task in late:
        task.cancel()
        report.complaints.append(f"lost: a stream did not end within {LAST_WAIT:g} s after the last fault")
    for outcome in await asyncio.gather(*clients, return_exceptions=True):
        if isinstance(outcome, Exception):
            report.complaints.append(f"error: {outcome!r}")
    report.complaints.extend(f"error: {failure}" for failure in injector.failures)
    try:
        await wait_serving(client, len(farm.places))
    except TimeoutError:
        report.complaints.append("error: not all executors serve again")
    report.faults = dict(injector.counts)
    report.seconds = time.monotonic() - began
    return report


def print_report(report: Report) -> None:
    print(f"{'fault':<24}{'times':>6}")
    for fault in Fault:
        print(f"{fault.value:<24}{report.faults.get(fault, 0):>6}")
    gaps = sorted(report.longest_gaps) or [0.0]
    print(
        f"{report.num_streams} streams ended in {report.seconds:.0f} s ({report.num_outputs} outputs, "
        f"{report.num_tokens} tokens); {report.num_moved} went on with another executor"
    )
    print(
        f"longest wait of a stream for a token: p50 {gaps[len(gaps) // 2]:.2f} s, p99 "
        f"{gaps[int(len(gaps) * 0.99)]:.2f} s, longest {gaps[-1]:.2f} s"
    )
    kinds = ("lost", "doubled", "differs", "error")
    print("  ".join(f"{kind}: {report.count(kind)}" for kind in kinds))
    for complaint, times in Counter(report.complaints).most_common(COMPLAINTS_SHOWN):
        print(f"  {times} x {complaint}")
    print("verdict:", "every token as in the undisturbed run" if report.ok else "FAILED")
