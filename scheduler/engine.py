"""Drives the core: requests in, plans out, tokens back to their tickets.

It owns the queue, one core and the session with its executor, all on one event loop and never across an await, so no
lock is needed. The core decides what a step does, the executor client whether the executor lives, the service what a
client hears. When an executor is lost, its requests go back to the queue with the tokens they have and go on with the
next one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import structlog

from scheduler.admission import AdmissionQueue
from scheduler.core.block_hash import hash_chain
from scheduler.core.plan import BatchPlan, StepResult, TokenEvent
from scheduler.core.request import DoesNotFit as CoreDoesNotFit
from scheduler.core.request import Request
from scheduler.core.scheduler import CoreConfig, ProtocolError, Scheduler
from scheduler.executor_client import (
    ClientOptions,
    Description,
    ExecutorClient,
    ExecutorGone,
    ExecutorRefused,
    ExecutorSession,
    ExecutorUnreachable,
)
from scheduler.outputs import (
    DoesNotFit,
    Draining,
    EndReason,
    ExecutorLoad,
    ExecutorLost,
    ExecutorState,
    Load,
    ModelInfo,
    NoExecutor,
    Submission,
)
from scheduler.ticket import Output, Ticket


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine can be told; see the command line for the meaning of each."""

    executor: str  # target, host:port
    pipeline_depth: int = 2
    prefix_caching: bool = True
    max_queue_requests: int = 1024
    max_queue_tokens: int = 4_000_000
    begun_timeout: float = 300.0  # seconds that a stream already begun waits for another executor
    stall_seconds: float = 60.0  # without any answer while work waits
    exit_on_executor_loss: bool = False
    client: ClientOptions = field(default_factory=ClientOptions)


@dataclass(slots=True, eq=False)
class _Job:
    """A request on its way to a core, first or again."""

    request: Request
    outputs: list[Output]  # in the order of request.sequence_ids

    @property
    def ticket(self) -> Ticket:
        return self.outputs[0].ticket


@dataclass(slots=True)
class _Executor:
    """The executor that has joined."""

    description: Description
    session: ExecutorSession
    core: Scheduler
    draining: bool = False
    finished: bool = False  # it was told that no plan follows


class Engine:
    """See the module. `run` drives it; all other methods are synchronous."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._client = ExecutorClient(config.executor, config.client)
        self._scheduler_id = f"scheduler-{uuid.uuid4().hex[:12]}"
        self._queue: AdmissionQueue[_Job] = AdmissionQueue(config.max_queue_requests, config.max_queue_tokens)
        self._ids = itertools.count(1)  # of sequences: never used twice, in whatever core
        self._arrivals = itertools.count(1)
        self._outputs: dict[int, Output] = {}  # by the sequence id that computes it now
        self._jobs: dict[int, _Job] = {}  # likewise, while the job waits in the queue
        self._executor: _Executor | None = None
        self._state = (ExecutorState.CONNECTING, "not reached yet")
        self._model: ModelInfo | None = None
        self._tokenizer_files: Mapping[str, bytes] = {}
        self._draining = False
        self._changed = asyncio.Event()
        self._pump_due = False
        self._last_answer = time.monotonic()
        self._log = structlog.get_logger("engine")

    # What the service asks and says (scheduler/outputs.py, ServingEngine).

    @property
    def model(self) -> ModelInfo | None:
        return self._model

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        return self._tokenizer_files

    @property
    def ready(self) -> bool:
        return self._executor is not None and not self._executor.draining

    def submit(self, submission: Submission) -> Ticket:
        """Raises QueueFull, NoExecutor, Draining or DoesNotFit."""
        if self._draining:
            raise Draining
        if self._model is None:
            raise NoExecutor(self._state[1])
        now = time.monotonic()
        ticket = Ticket(submission, now)
        request = Request(
            sequence_ids=tuple(next(self._ids) for _ in range(submission.n)),
            prompt_token_ids=submission.prompt_token_ids,
            max_tokens=submission.max_tokens,
            sampling=submission.sampling,
            beam_width=submission.beam_width,
            priority=submission.priority,
            arrival=next(self._arrivals),
            cache_salt=submission.cache_salt,
            prompt_hashes=hash_chain(submission.prompt_token_ids, self._model.block_size, submission.cache_salt),
        )
        self._check_fits(request)
        job = _Job(request, ticket.outputs)
        self._queue.push(
            job,
            tokens=self._demand(request),
            priority=request.priority,
            arrival=request.arrival,
            deadline=now + submission.queue_timeout,
            now=now,
        )
        self._note_job(job)
        if self._executor is not None and not self._executor.core.has_work:
            self._last_answer = now
        self._pump_soon()
        return ticket

    def finish(self, ticket: Ticket, index: int, num_output_tokens: int) -> None:
        """The output ends with STOP after its first `num_output_tokens` tokens."""
        self._end_output(ticket.outputs[index], EndReason.STOP, num_output_tokens=num_output_tokens)

    def abort(self, ticket: Ticket) -> None:
        """Ends what has not ended, with CANCELLED; its blocks are free when this returns."""
        for output in ticket.outputs:
            self._end_output(output, EndReason.CANCELLED)

    def drain(self) -> None:
        """Takes no new submission from now on."""
        self._draining = True
        self._notify()

    def load(self) -> Load:
        executor = self._executor
        state, reason = self._state
        loads = ExecutorLoad(target=self._config.executor, incarnation="", state=state, reason=reason)
        if executor is not None:
            core = executor.core
            loads = replace(
                loads,
                incarnation=executor.description.incarnation,
                num_running=core.num_running,
                num_waiting=core.num_waiting,
                num_blocks=core.num_blocks,
                num_free_blocks=core.num_free_blocks,
                prefix_queries=core.counters.prefix_queries,
                prefix_hits=core.counters.prefix_hits,
                num_preemptions=core.counters.preemptions,
                plans_in_flight=core.num_in_flight,
                steps=core.counters.steps,
            )
        head = self._queue.peek()
        return Load(
            executors=(loads,),
            queue_length=len(self._queue),
            queue_tokens=self._queue.num_tokens,
            queue_limit=self._queue.max_requests,
            waiting={self._obstacle(head.request) or "about to be planned": len(self._queue)} if head else {},
            draining=self._draining,
        )

    def stalled(self) -> str | None:
        """Why nothing is planned although work waits; None while all is well."""
        executor = self._executor
        if executor is None or not (executor.core.has_work or len(self._queue)):
            return None
        idle = time.monotonic() - self._last_answer
        if idle < self._config.stall_seconds:
            return None
        return (
            f"no step was answered for {idle:.0f} s; {executor.core.num_running} sequences run, "
            f"{executor.core.num_waiting + len(self._queue)} wait, {executor.core.num_in_flight} plans are in flight"
        )

    async def wait_change(self) -> None:
        """Returns once `ready` or `model` may have changed."""
        await self._changed.wait()

    # The life of a session.

    async def run(self) -> None:
        """Serves until cancelled. Raises ExecutorLost where the configuration says to stop then."""
        expiry = asyncio.create_task(self._expire(), name="queue-expiry")
        try:
            while True:
                await self._join()
                assert self._executor is not None
                try:
                    async for answer in self._executor.session.receive():
                        if isinstance(answer, StepResult):
                            self._take(answer)
                        else:
                            self._note_draining(answer.grace_seconds)
                except (ExecutorGone, ProtocolError) as error:
                    await self._lose(str(error))
        finally:
            expiry.cancel()
            if self._executor is not None:
                await self._executor.session.close()
            await self._client.close()

    async def _join(self) -> None:
        """Tries until an executor has joined."""
        while True:
            try:
                description = await self._client.describe()
                files = await self._client.tokenizer_files()
                session = await self._client.open_session(self._scheduler_id, time.time_ns(), description.incarnation)
            except ExecutorUnreachable as error:
                self._set_state(ExecutorState.CONNECTING, str(error))
                await asyncio.sleep(0.2)
            except ExecutorRefused as error:
                self._set_state(ExecutorState.REFUSED, str(error))
                await asyncio.sleep(1.0)
            else:
                break
        model = description.model
        core = Scheduler(
            CoreConfig(
                num_blocks=description.num_blocks,
                block_size=model.block_size,
                max_num_seqs=model.max_num_seqs,
                max_num_batched_tokens=description.max_num_batched_tokens,
                max_model_len=model.max_model_len,
                pipeline_depth=self._config.pipeline_depth,
                prefix_caching=self._config.prefix_caching,
            ),
            self._ids.__next__,
        )
        self._executor = _Executor(description, session, core)
        self._model, self._tokenizer_files = model, files
        self._last_answer = time.monotonic()
        self._set_state(ExecutorState.READY, "")
        self._drop_what_cannot_fit()
        self._pump()

    async def _lose(self, reason: str) -> None:
        """The executor is gone: what it computed goes on elsewhere, with the tokens it has."""
        executor, self._executor = self._executor, None
        assert executor is not None
        drained = executor.core.drain_all()
        self._set_state(ExecutorState.LOST, reason)
        await executor.session.close()
        if self._config.exit_on_executor_loss and not executor.draining:
            for output in list(self._outputs.values()):
                self._end_output(output, EndReason.ERROR, str(ExecutorLost(reason)))
            raise ExecutorLost(reason)
        for request, _ in drained:
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Under fresh ids: the old ones belong to a core that is gone."""
        outputs = [self._outputs.pop(sequence_id) for sequence_id in request.sequence_ids]
        fresh = replace(request, sequence_ids=tuple(next(self._ids) for _ in outputs))
        ticket = outputs[0].ticket
        wait = self._config.begun_timeout if ticket.begun else ticket.submission.queue_timeout
        job = _Job(fresh, outputs)
        self._queue.put_back(
            job,
            tokens=self._demand(fresh),
            priority=fresh.priority,
            arrival=fresh.arrival,
            deadline=time.monotonic() + wait,
        )
        self._note_job(job)

    def _note_job(self, job: _Job) -> None:
        for sequence_id, output in zip(job.request.sequence_ids, job.outputs, strict=True):
            output.sequence_id = sequence_id
            self._outputs[sequence_id] = output
            self._jobs[sequence_id] = job

    def _demand(self, request: Request) -> int:
        """Tokens of KV that the request may come to hold."""
        longest = len(request.prompt_token_ids) + request.max_tokens
        return longest * (request.beam_width or len(request.sequence_ids))

    def _check_fits(self, request: Request) -> None:
        if self._executor is not None:
            try:
                self._executor.core.check_fits(request)
            except CoreDoesNotFit as error:
                raise DoesNotFit(str(error)) from None

    def _drop_what_cannot_fit(self) -> None:
        """An executor joined that may be smaller than the one before."""
        for job in list(self._queue):
            try:
                self._check_fits(job.request)
            except DoesNotFit as error:
                self._end_job(job, EndReason.ERROR, str(error))

    def _obstacle(self, request: Request) -> str | None:
        if self._executor is None:
            return f"no executor: {self._state[1]}"
        if self._executor.draining:
            return "the executor is draining"
        return self._executor.core.obstacle(request)

    def _note_draining(self, grace_seconds: float) -> None:
        assert self._executor is not None
        self._executor.draining = True
        self._set_state(ExecutorState.DRAINING, f"it stops within {grace_seconds:g} s")
        self._pump()

    def _set_state(self, state: ExecutorState, reason: str) -> None:
        if (state, reason) != self._state:
            log = self._log.warning if state in (ExecutorState.LOST, ExecutorState.REFUSED) else self._log.info
            log(f"executor {state.value}", target=self._config.executor, reason=reason or None)
        self._state = (state, reason)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # Steps.

    def _pump_soon(self) -> None:
        """Plans at the end of this turn of the loop, so that requests that come together are planned together."""
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Hands over what the core can admit, and sends what it plans."""
        self._pump_due = False
        executor = self._executor
        if executor is None:
            return
        if not executor.draining:
            self._hand_over(executor.core)
        while (plan := executor.core.schedule()) is not None:
            self._note_plan(plan, executor)
            executor.session.send(plan)
        if executor.draining and not executor.core.has_work and not executor.finished:
            executor.finished = True
            executor.session.finish()

    def _hand_over(self, core: Scheduler) -> None:
        while (job := self._queue.peek()) is not None and core.obstacle(job.request) is None:
            self._queue.remove(job)
            for sequence_id in job.request.sequence_ids:
                del self._jobs[sequence_id]
            core.add(job.request)

    def _note_plan(self, plan: BatchPlan, executor: _Executor) -> None:
        """Who runs for the first time, or was set back: what their timings and usage tell."""
        if executor.core.num_in_flight == 1:
            self._last_answer = time.monotonic()
        for new in plan.new:
            for output in self._outputs_of(new.sequence_id, executor.core):
                ticket = output.ticket
                if ticket.first_step_at is None:
                    ticket.first_step_at = time.monotonic()
                    sequence = executor.core.sequence(new.sequence_id)
                    assert sequence is not None
                    ticket.num_cached_tokens = sequence.num_cached_tokens
                if executor.description.incarnation not in ticket.executors:
                    ticket.executors.append(executor.description.incarnation)
        for sequence_id in plan.preempted:
            for output in self._outputs_of(sequence_id, executor.core):
                output.num_preemptions += 1

    def _outputs_of(self, sequence_id: int, core: Scheduler) -> list[Output]:
        """The outputs that a sequence stands for: hypotheses of beams for all of their request."""
        if sequence_id in self._outputs:
            return [self._outputs[sequence_id]]
        sequence = core.sequence(sequence_id)
        ids = sequence.request.sequence_ids if sequence is not None and sequence.beam is not None else ()
        return [self._outputs[i] for i in ids]

    def _take(self, result: StepResult) -> None:
        executor = self._executor
        assert executor is not None
        self._last_answer = now = time.monotonic()
        events = executor.core.update(result)
        self._pump()  # first: the executor must not wait for what clients are told
        for event in events:
            self._tell(event, now)
        if events:
            self._queue.record_served(len(events), now)

    def _tell(self, event: TokenEvent, now: float) -> None:
        output = self._outputs.get(event.sequence_id)
        if output is None:
            return  # ended by the service since
        if event.finish_reason is not None:
            del self._outputs[event.sequence_id]
            if event.error is not None:
                self._log.warning("sequence failed", sequence_id=event.sequence_id, reason=event.error)
        output.ticket.tell(output, event, now)

    # Ends that the core does not decide.

    def _end_output(
        self, output: Output, reason: EndReason, error: str | None = None, num_output_tokens: int | None = None
    ) -> None:
        """Nobody computes the output any more; its blocks are free when this returns."""
        if output.ended:
            return
        sequence_id = output.sequence_id
        del self._outputs[sequence_id]
        job = self._jobs.pop(sequence_id, None)
        if job is not None:
            self._queue.remove(job)  # its other outputs end with this one, or have ended
        elif self._executor is not None:
            if num_output_tokens is None:
                self._executor.core.abort(sequence_id)
            else:
                self._executor.core.finish(sequence_id, num_output_tokens)
            self._pump_soon()
        output.ticket.end(output, reason, error, num_output_tokens)

    def _end_job(self, job: _Job, reason: EndReason, error: str) -> None:
        for output in job.outputs:
            self._end_output(output, reason, error)

    async def _expire(self) -> None:
        """Ends what has waited too long."""
        while True:
            await asyncio.sleep(0.1)
            for job in self._queue.expire(time.monotonic()):
                obstacle = self._obstacle(job.request) or "it was about to be planned"
                reason = EndReason.ERROR if job.ticket.begun else EndReason.TIMEOUT
                self._end_job(job, reason, f"waited too long to be computed: {obstacle}")
