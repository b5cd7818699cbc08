"""Drives the cores: requests in, plans out, tokens back to their tickets.

It owns the one queue and what is known of each request in flight, on one event loop and never across an await, so no
lock is needed. A core decides what a step of its executor does, the router which executor a request goes to, the fleet
which executors there are, the service what a client hears. When an executor is lost, its requests go back to the queue
with the tokens they have, and go on with another one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from scheduler.admission import AdmissionQueue
from scheduler.core.block_hash import hash_chain
from scheduler.core.block_map import Holder
from scheduler.core.plan import BatchPlan, StepResult, TokenEvent
from scheduler.core.request import DoesNotFit as CoreDoesNotFit
from scheduler.core.request import Request
from scheduler.core.scheduler import Drained
from scheduler.fleet import Fleet, FleetConfig, Member
from scheduler.inspection import ExecutorView, Inspection, Owner
from scheduler.metrics import Metrics
from scheduler.outputs import (
    DoesNotFit,
    Draining,
    EndReason,
    ExecutorLoad,
    ExecutorLost,
    Load,
    ModelInfo,
    NoExecutor,
    Submission,
    UnknownExecutor,
    WaitingRequests,
)
from scheduler.router import choose, seen_by
from scheduler.ticket import Output, Ticket

MAX_SUSPICIONS = 2  # plans in flight at a death, without a token since: from then on it runs in plans of its own
MAX_DEATHS_ALONE = 2  # executors that died at one place of it while it was alone: it is what kills them


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine can be told; see the command line for the meaning of each."""

    fleet: FleetConfig
    max_queue_requests: int = 1024
    max_queue_tokens: int = 4_000_000
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # of tenants named; 1 of all others
    begun_timeout: float = 300.0  # seconds that a stream already begun waits for another executor
    stall_seconds: float = 60.0  # without any answer while work waits
    exit_on_executor_loss: bool = False


@dataclass(slots=True, eq=False)
class _Job:
    """A request on its way to a core, first or again."""

    request: Request
    outputs: list[Output]  # in the order of request.sequence_ids
    fingerprint: str  # of the model whose tokens it is made of

    @property
    def ticket(self) -> Ticket:
        return self.outputs[0].ticket


class Engine:
    """See the module. `run` drives it; all other methods are synchronous."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._queue: AdmissionQueue[_Job] = AdmissionQueue(
            config.max_queue_requests, config.max_queue_tokens, config.tenant_weights
        )
        self._ids = itertools.count(1)  # of sequences: never used twice, in whatever core
        self._arrivals = itertools.count(1)
        self.metrics = Metrics()
        self._fleet = Fleet(config.fleet, self, self._ids.__next__, self.metrics)
        self._outputs: dict[int, Output] = {}  # by the sequence id that computes it now
        self._jobs: dict[int, _Job] = {}  # likewise, while the job waits in the queue
        self._places: dict[int, Member] = {}  # likewise, while a core has it
        self._draining = False
        self._changed = asyncio.Event()
        self._pump_due = False
        self._refused: _Job | None = None  # the head of the queue, when nobody could take it
        self._last_admission = 0.0  # when a request went from the queue to a core
        self._log = structlog.get_logger("engine")

    # What the service asks and says (scheduler/outputs.py, ServingEngine).

    @property
    def model(self) -> ModelInfo | None:
        return self._fleet.model

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        return self._fleet.tokenizer_files

    @property
    def ready(self) -> bool:
        return bool(self._fleet.accepting)

    @property
    def members(self) -> Mapping[str, Member]:
        """Executors that have joined, by incarnation: to read."""
        return self._fleet.members

    def submit(self, submission: Submission) -> Ticket:
        """Raises QueueFull, NoExecutor, Draining or DoesNotFit."""
        if self._draining:
            raise Draining
        model = self._fleet.model
        if model is None:
            raise NoExecutor(self._fleet.why_none())
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
            prompt_hashes=hash_chain(submission.prompt_token_ids, model.block_size, submission.cache_salt),
            traceparent=submission.traceparent,
        )
        if self._fleet.members:
            self._check_fits(request)
        job = _Job(request, ticket.outputs, model.fingerprint)
        self._queue.push(
            job,
            tokens=_demand(request),
            priority=request.priority,
            arrival=request.arrival,
            deadline=now + submission.queue_timeout,
            now=now,
            tenant=submission.tenant,
        )
        self._note_waiting(job)
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

    def drain_executor(self, name: str) -> str:
        """Raises UnknownExecutor."""
        for member in self._fleet.members.values():
            if name in (member.incarnation, member.address):
                self._fleet.ask_to_stop(member)
                return member.incarnation
        raise UnknownExecutor(name, [member.address for member in self._fleet.members.values()])

    def load(self) -> Load:
        return Load(
            executors=tuple(_with_counters(load, member) for load, member in self._fleet.describe()),
            queue_length=len(self._queue),
            queue_tokens=self._queue.num_tokens,
            queue_limit=self._queue.max_requests,
            waiting=tuple(self._waiting()),
            draining=self._draining,
        )

    def inspect(self) -> Inspection:
        members = sorted(self._fleet.members.values(), key=lambda member: member.address)
        model = self._fleet.model
        return Inspection(time.monotonic(), model.name if model else "", self.load(), tuple(map(self._view, members)))

    def _view(self, member: Member) -> ExecutorView:
        block_map = member.core.block_map()
        return ExecutorView(
            target=member.address,
            block_map=block_map,
            owners=tuple(map(self._owner, block_map.holders)),
            max_num_seqs=member.core.config.max_num_seqs,
            max_num_batched_tokens=member.core.config.max_num_batched_tokens,
            num_sampled_tokens=member.steps.num_sampled_tokens,
            steps=member.steps.records(),
        )

    def _owner(self, holder: Holder) -> Owner | None:
        """A hypothesis of a beam search belongs to no output alone: it is shown with the first of its request."""
        for sequence_id in (holder.sequence_id, *holder.output_ids):
            output = self._outputs.get(sequence_id)
            if output is not None:
                submission = output.ticket.submission
                return Owner(submission.request_id, submission.tenant, output.index)
        return None

    def stalled(self) -> str | None:
        """Why nothing is planned although work waits; None while all is well."""
        now = time.monotonic()
        for member in self._fleet.members.values():
            idle = now - member.last_answer
            if member.core.has_work and idle > self._config.stall_seconds:
                return (
                    f"executor {member.address} answered no step for {idle:.0f} s; {member.core.num_running} sequences "
                    f"run, {member.core.num_waiting} wait, {member.core.num_in_flight} plans are in flight"
                )
        head, accepting = self._queue.peek(), self._fleet.accepting
        if head is not None and accepting and not any(member.core.has_work for member in accepting):
            idle = now - max(self._last_admission, *(member.last_answer for member in accepting))
            if idle > self._config.stall_seconds:
                return f"{len(self._queue)} requests wait and nothing runs for {idle:.0f} s: {self._why_waiting(head)}"
        return None

    async def wait_change(self) -> None:
        """Returns once the state of an executor, `model` or a drain may have changed."""
        await self._changed.wait()

    async def run(self) -> None:
        """Serves until cancelled. Raises ExecutorLost where the configuration says to stop then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._fleet.run(), name="fleet")
                tasks.create_task(self._expire(), name="queue-expiry")
        except BaseExceptionGroup as group:
            lost: BaseException | None = group.subgroup(ExecutorLost)
            if lost is None:
                raise
            while isinstance(lost, BaseExceptionGroup):
                lost = lost.exceptions[0]
            raise lost from None

    # What the fleet tells (scheduler/fleet.py, Handler).

    def joined(self, member: Member) -> None:
        self._drop_hopeless()
        self._pump_soon()

    def answered(self, member: Member, result: StepResult) -> Sequence[TokenEvent]:
        events = member.core.update(result)
        member.steps.answered(result, time.monotonic())
        self._hand_over(member)
        self._plan(member)
        return events

    def tell(self, events: Sequence[TokenEvent]) -> None:
        now = time.monotonic()
        for event in events:
            self._tell(event, now)

    def drains(self, member: Member) -> None:
        self._plan(member)
        self._drop_hopeless()
        self._pump_soon()

    def left(self, member: Member, reason: str) -> None:
        drained = member.core.drain_all()
        last = not self._fleet.members and not member.draining
        self.metrics.lost.inc(not member.draining)
        if self._config.exit_on_executor_loss and last:
            lost = ExecutorLost(reason)
            for output in list(self._outputs.values()):
                self._end_output(output, EndReason.ERROR, str(lost))
            raise lost
        for one in drained:
            # One that was told to stop died of that, and of no request.
            self._requeue(one, reason, suspect=bool(one.in_flight) and not member.draining)
        for sequence_id in [i for i, place in self._places.items() if place is member]:
            # The core had ended it, and a fault kept the end from being told.
            self._end_output(self._outputs[sequence_id], EndReason.ERROR, f"the executor was lost: {reason}")
        self._drop_hopeless()
        self._pump_soon()

    def changed(self) -> None:
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # From the queue to a core.

    def _pump_soon(self) -> None:
        """Plans at the end of this turn of the loop, so that requests that come together are planned together."""
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Hands over what the cores can admit, and sends what they plan."""
        self._pump_due = False
        self._hand_over()
        for member in self._fleet.members.values():
            try:
                self._plan(member)
            except Exception as error:  # nobody above would hear of it: the executor's own task is not running now
                self._fleet.give_up(member, error)

    def _hand_over(self, answering: Member | None = None) -> None:
        """Gives the head of the queue to the best of the members, as long as one can admit it. Nobody overtakes the
        head: what is large would never run. A head that all have refused is offered to the one that answers alone:
        only that can have room since."""
        while (job := self._queue.peek()) is not None:
            alone = answering is not None and job is self._refused
            asked = [m for m in self._fleet.accepting if m is answering or not alone]
            try:
                member = self._admit(job, asked)
            except Exception as error:  # a fault of ours with one request must not stop the queue, nor cost an executor
                self._log.error("admission failed", arrival=job.request.arrival, exc_info=error)
                self._end_job(job, EndReason.ERROR, f"admitting it failed: {error!r}")
                continue
            if member is None:
                self._refused = job
                return
            self._last_admission = time.monotonic()
            if answering is not None and member is not answering:
                self._pump_soon()  # it is planned for then

    def _admit(self, job: _Job, asked: Sequence[Member]) -> Member | None:
        """Gives the job to the best of those asked; None where none can admit it now."""
        request = job.request
        candidates = [seen_by(request, member.core) for member in asked]
        choice = choose(_known_tokens(request), candidates)
        if choice is None:
            return None
        member = asked[choice.candidate]
        if not member.core.has_work:
            member.last_answer = time.monotonic()
        member.core.add(request)
        self._queue.remove(job)
        if job.ticket.first_step_at is None:  # what a lost executor makes us compute again is not the tenant's
            cached_tokens = candidates[choice.candidate].cached_tokens
            self._queue.charge(job.ticket.submission.tenant, _known_tokens(request) - cached_tokens)
        for sequence_id in request.sequence_ids:
            del self._jobs[sequence_id]
            self._places[sequence_id] = member
        self._log.debug("routed", address=member.address, arrival=request.arrival, reason=choice.reason)
        return member

    def _plan(self, member: Member) -> None:
        while (plan := member.core.schedule()) is not None:
            self._note_plan(plan, member)
            member.session.send(plan)
            member.steps.sent(plan, time.monotonic())
        if member.draining and not member.core.has_work and not member.told_to_finish:
            member.told_to_finish = True
            member.session.finish()

    def _note_plan(self, plan: BatchPlan, member: Member) -> None:
        """Who runs for the first time here, or was set back: what their timings and usage tell."""
        for new in plan.new:
            for output in self._outputs_of(new.sequence_id, member):
                ticket = output.ticket
                if ticket.first_step_at is None:
                    sequence = member.core.sequence(new.sequence_id)
                    assert sequence is not None
                    ticket.first_step_at = time.monotonic()
                    self.metrics.queue_time.observe(ticket.first_step_at - ticket.submitted_at)
                    ticket.num_cached_tokens = sequence.num_cached_tokens
                if member.incarnation not in ticket.executors:
                    ticket.executors.append(member.incarnation)
        for sequence_id in plan.preempted:
            for output in self._outputs_of(sequence_id, member):
                output.num_preemptions += 1

    def _outputs_of(self, sequence_id: int, member: Member) -> list[Output]:
        """The outputs that a sequence stands for: one, or for a hypothesis of a beam search all of its request."""
        if sequence_id in self._outputs:
            return [self._outputs[sequence_id]]
        sequence = member.core.sequence(sequence_id)
        ids = sequence.request.sequence_ids if sequence is not None and sequence.beam is not None else ()
        return [self._outputs[i] for i in ids]

    def _tell(self, event: TokenEvent, now: float) -> None:
        output = self._outputs.get(event.sequence_id)
        if output is None:
            return  # ended by the service since
        if event.token_ids:
            if output.suspicions:
                output.suspicions = output.deaths_alone = 0
                self._places[event.sequence_id].core.acquit(event.sequence_id)
            submission = output.ticket.submission
            hypotheses = (submission.beam_width or submission.n) // submission.n  # computed for each output told
            self._queue.charge(submission.tenant, len(event.token_ids) * hypotheses)
        if event.finish_reason is not None:
            self._forget(output)
            self._queue.record_served(_demand_of_one(output.ticket.submission), now)
            if event.error is not None:
                self._log.warning("sequence failed", sequence_id=event.sequence_id, reason=event.error)
        output.ticket.tell(output, event, now)

    # From a lost executor back to the queue.

    def _requeue(self, drained: Drained, reason: str, *, suspect: bool) -> None:
        """Under fresh ids: the old ones belong to a core that is gone."""
        self.metrics.moved.inc()
        request = drained.request
        outputs = [self._outputs[sequence_id] for sequence_id in request.sequence_ids]
        for output in outputs:
            self._forget(output)
            if suspect:
                output.suspicions += 1
                if request.alone:
                    # What kills does so at the same place; two accidents rarely come to the same one.
                    again = _overlap(output.died_at, drained.in_flight)
                    output.deaths_alone = output.deaths_alone + 1 if again else 1
                    output.died_at = drained.in_flight
        assert self._fleet.model is not None
        fresh = replace(
            request,
            sequence_ids=tuple(next(self._ids) for _ in outputs),
            # What a fault kept from being told is computed again: only what was told is final.
            output_token_ids=request.output_token_ids[: outputs[0].num_tokens],
            alone=any(output.suspicions >= MAX_SUSPICIONS for output in outputs),
        )
        job = _Job(fresh, outputs, self._fleet.model.fingerprint)
        ticket = job.ticket
        wait = self._config.begun_timeout if ticket.begun else ticket.submission.queue_timeout
        self._queue.put_back(
            job,
            tokens=_demand(fresh),
            priority=fresh.priority,
            arrival=fresh.arrival,
            deadline=time.monotonic() + wait,
            tenant=ticket.submission.tenant,
        )
        self._note_waiting(job)
        if any(output.deaths_alone >= MAX_DEATHS_ALONE for output in outputs):
            sentence = f"{MAX_DEATHS_ALONE} executors died while they ran this request alone, the last: {reason}"
            self._end_job(job, EndReason.ERROR, sentence)

    def _note_waiting(self, job: _Job) -> None:
        for sequence_id, output in zip(job.request.sequence_ids, job.outputs, strict=True):
            output.sequence_id = sequence_id
            self._outputs[sequence_id] = output
            self._jobs[sequence_id] = job

    def _drop_hopeless(self) -> None:
        """Which executors there are has changed. At the head of the queue, what fits none of them would stop all."""
        for job in list(self._queue):
            self._drop_if_hopeless(job)

    def _drop_if_hopeless(self, job: _Job) -> None:
        """Ends a job that no executor there is could run to its end."""
        model = self._fleet.model
        if not self._fleet.members or model is None:
            return
        if job.fingerprint != model.fingerprint:
            self._end_job(job, EndReason.ERROR, f"the model changed from {job.fingerprint} to {model.fingerprint}")
            return
        try:
            self._check_fits(job.request)
        except DoesNotFit as error:
            self._end_job(job, EndReason.ERROR, str(error))

    def _check_fits(self, request: Request) -> None:
        """Raises DoesNotFit, in the words of the roomiest executor, where it fits none that takes requests; while none
        does, those that drain stand for what will come."""
        refusal: CoreDoesNotFit | None = None
        members = self._fleet.accepting or self._fleet.members.values()
        for member in sorted(members, key=lambda m: -m.core.capacity):
            try:
                member.core.check_fits(request)
            except CoreDoesNotFit as error:
                refusal = refusal or error
            else:
                return
        raise DoesNotFit(str(refusal))

    def _waiting(self) -> Iterator[WaitingRequests]:
        """Nobody overtakes the head of the queue, so only that has a reason of its own. No reason names a tenant: who
        may read them is not who may read names."""
        ahead: int | None = None  # a priority
        for tenant, priority, num_requests, head in self._queue.classes():
            if ahead is None:
                reason = self._why_waiting(head)
            elif priority != ahead:
                reason = f"requests of priority {ahead} come first"
            else:
                reason = "another tenant was served less for its weight, or came earlier"
            ahead = priority
            yield WaitingRequests(tenant, priority, num_requests, reason)

    def _why_waiting(self, job: _Job) -> str:
        accepting = self._fleet.accepting
        if not accepting:
            return f"no executor takes requests: {self._fleet.why_none()}"
        obstacles = {member.address: member.core.obstacle(job.request) for member in accepting}
        if any(obstacle is None for obstacle in obstacles.values()):
            return "about to be planned"
        return "; ".join(f"{address}: {obstacle}" for address, obstacle in obstacles.items())

    # Ends that no core decides.

    def _end_output(
        self, output: Output, reason: EndReason, error: str | None = None, num_output_tokens: int | None = None
    ) -> None:
        """Nobody computes the output any more; its blocks are free when this returns."""
        if output.ended:
            return
        sequence_id = output.sequence_id
        job, member = self._jobs.get(sequence_id), self._places.get(sequence_id)
        self._forget(output)
        if job is not None:
            self._queue.remove(job)  # its other outputs end with this one, or have ended
        elif member is not None:
            self._queue.record_served(_demand_of_one(output.ticket.submission), time.monotonic())
            if num_output_tokens is None:
                member.core.abort(sequence_id)
            else:
                member.core.finish(sequence_id, num_output_tokens)
        self._pump_soon()
        output.ticket.end(output, reason, time.monotonic(), error, num_output_tokens)

    def _forget(self, output: Output) -> None:
        del self._outputs[output.sequence_id]
        self._jobs.pop(output.sequence_id, None)
        self._places.pop(output.sequence_id, None)

    def _end_job(self, job: _Job, reason: EndReason, error: str) -> None:
        for output in job.outputs:
            self._end_output(output, reason, error)

    async def _expire(self) -> None:
        """Ends what has waited too long."""
        while True:
            await asyncio.sleep(0.1)
            for job in self._queue.expire(time.monotonic()):
                reason = EndReason.ERROR if job.ticket.begun else EndReason.TIMEOUT
                self._end_job(job, reason, f"waited too long to be computed: {self._why_waiting(job)}")


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _known_tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + len(request.output_token_ids)


def _demand(request: Request) -> int:
    """Tokens of KV that the request may come to hold."""
    return (len(request.prompt_token_ids) + request.max_tokens) * (request.beam_width or len(request.sequence_ids))


def _demand_of_one(submission: Submission) -> int:
    """The part of it that ends with one output."""
    demand = len(submission.prompt_token_ids) + submission.max_tokens
    return demand * (submission.beam_width or submission.n) // submission.n


def _with_counters(load: ExecutorLoad, member: Member | None) -> ExecutorLoad:
    if member is None:
        return load
    core, counters = member.core, member.core.counters
    return replace(
        load,
        num_running=core.num_running,
        num_waiting=core.num_waiting,
        num_blocks=core.num_blocks,
        num_free_blocks=core.num_free_blocks,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
        num_preemptions=counters.preemptions,
        plans_in_flight=core.num_in_flight,
        steps=counters.steps,
    )
