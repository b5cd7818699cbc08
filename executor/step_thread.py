"""One dedicated thread that runs plans in the order they come, so that the event loop answers while a step runs.

Owns the queue between loop and runner. A step whose launch leaves it running on a device is waited for together with
the next plan: a plan that comes first is launched behind it, so that the device goes from one step to the next without
the host. At most two steps are launched and not collected, and results are told in order. Every job belongs to a
session; once a session is closed its waiting plans are dropped, and one whose plan raised takes no more. Jobs answer on
the step thread: callers that live on an event loop hand over with call_soon_threadsafe.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Protocol

from executor.launched import Launched
from executor.plan import BatchPlan, InvalidPlan, StepResult

_POLL_SECONDS = 1e-4  # between two looks whether the device is done, while no plan has come


class StepRunner(Protocol):
    """What runs plans, one after another and in order."""

    progress: int  # layers computed since the start of the process; other threads read it

    @property
    def sequences(self) -> Sized:
        """Those of the session."""

    def reset(self) -> None:
        """Forgets every sequence."""

    def can_follow(self, plan: BatchPlan) -> bool:
        """Whether the plan may be launched before the step launched last is collected."""

    def launch(self, plan: BatchPlan, queued_ns: int = 0) -> Launched:
        """Raises InvalidPlan, or what the model raises."""


class Ticket:
    """A session, as far as the step thread knows it."""

    def __init__(self) -> None:
        self.closed = False  # set by the loop when the session ends, by the step thread when a step raised


@dataclass(frozen=True, slots=True)
class _Step:
    ticket: Ticket
    plan: BatchPlan
    received_ns: int
    answer: Callable[[StepResult | Exception], None]


@dataclass(frozen=True, slots=True)
class _Running:
    job: _Step
    step: Launched


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[], None]


class StepThread:
    """Runs a `StepRunner`."""

    def __init__(self, runner: StepRunner, failed: Callable[[Exception], None] = lambda error: None) -> None:
        """`failed` is told on the step thread of a step that raised, a plan that was wrong excepted."""
        self.runner = runner
        self._failed = failed
        self._running: _Running | None = None  # launched, not collected
        self._running_step = 0
        self._jobs: queue.SimpleQueue[_Step | _Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)

    @property
    def running_step(self) -> int:
        """The step that runs, 0 if none does."""
        return self._running_step

    @property
    def progress(self) -> int:
        """Layers computed since the start of the process."""
        return self.runner.progress

    @property
    def num_sequences(self) -> int:
        return len(self.runner.sequences)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Asks the thread to end behind the jobs it has; True if it did in time."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, ticket: Ticket, plan: BatchPlan, answer: Callable[[StepResult | Exception], None]) -> None:
        """`answer` is called on the step thread, with what the runner returned or raised; never for a dropped plan."""
        self._jobs.put(_Step(ticket, plan, time.monotonic_ns(), answer))

    def call(self, function: Callable[[], None]) -> None:
        """Runs a function between steps, behind everything submitted before."""
        self._jobs.put(_Call(function))

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if isinstance(job, _Call):
                self._collect()
                job.function()
            elif not job.ticket.closed:
                self._launch(job)
        self._collect()

    def _next(self) -> _Step | _Call | None:
        """The next job. While there is none, a step that runs on the device is collected as soon as it is over."""
        while self._running is not None:
            try:
                return self._jobs.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._running.step.is_ready():
                    self._collect()
        return self._jobs.get()

    def _launch(self, job: _Step) -> None:
        if self._running is not None and not self.runner.can_follow(job.plan):
            self._collect()
            if job.ticket.closed:
                return
        if self._running is None:
            self._running_step = job.plan.step_id
        try:
            step = self.runner.launch(job.plan, time.monotonic_ns() - job.received_ns)
        except Exception as error:
            self._collect()  # what ran before is still told
            self._fail(job, error)
            return
        if self._running is not None:
            self._collect()
            if job.ticket.closed:
                return  # most likely the step before has failed on the device; nobody hears of this one
            self._running_step = job.plan.step_id
        self._running = _Running(job, step)
        if step.is_ready():
            self._collect()

    def _collect(self) -> None:
        """Waits for the step that runs, if one does, and answers."""
        if self._running is None:
            return
        job, step = self._running.job, self._running.step
        self._running = None
        try:
            result = step.collect()
        except Exception as error:
            self._fail(job, error)
            return
        self._running_step = 0
        job.answer(result)

    def _fail(self, job: _Step, error: Exception) -> None:
        job.ticket.closed = True
        self._running_step = 0
        job.answer(error)
        if not isinstance(error, InvalidPlan):
            self._failed(error)
