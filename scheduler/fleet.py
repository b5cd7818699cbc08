"""The executors there are: who has joined, who was refused and why, who is gone.

One task follows each address: describe, compare with the reference, open a session, hand over what comes, and begin
again when it ends. Executors are told apart by incarnation, so two names of one executor join once. It knows nothing of
requests; what members say goes to a `Handler`, in order.
Invariant: a member is in `members` from the handler's `joined` to its `left`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from scheduler.core.config import CoreConfig
from scheduler.core.plan import StepResult, TokenEvent
from scheduler.core.scheduler import ProtocolError, Scheduler
from scheduler.discovery import Discovery
from scheduler.executor_client import (
    ClientOptions,
    Description,
    ExecutorClient,
    ExecutorGone,
    ExecutorRefused,
    ExecutorSession,
    ExecutorUnreachable,
)
from scheduler.metrics import Metrics
from scheduler.outputs import ExecutorLoad, ExecutorState, ModelInfo
from scheduler.step_log import StepLog

RETRY_UNREACHABLE = 0.2  # seconds
RETRY_REFUSED = 1.0


@dataclass(frozen=True, slots=True)
class FleetConfig:
    executors: tuple[str, ...]  # targets
    scheduler_id: str = field(default_factory=lambda: f"scheduler-{uuid.uuid4().hex[:12]}")
    fingerprint: str | None = None  # None: that of the first one to join
    pipeline_depth: int = 2
    prefix_caching: bool = True
    client: ClientOptions = field(default_factory=ClientOptions)


@dataclass(slots=True, eq=False)
class Member:
    """An executor that has joined, and the core that plans for it."""

    address: str
    description: Description
    session: ExecutorSession
    core: Scheduler
    draining: bool = False  # it takes nothing new
    drain_reason: str = ""
    told_to_finish: bool = False  # it was told that no plan follows
    last_answer: float = field(default_factory=time.monotonic)
    steps: StepLog = field(default_factory=StepLog)

    @property
    def incarnation(self) -> str:
        return self.description.incarnation


class Handler(Protocol):
    """Whom the fleet tells. Nothing here waits."""

    def joined(self, member: Member) -> None: ...

    def answered(self, member: Member, result: StepResult) -> Sequence[TokenEvent]:
        """Plans what comes next, and returns what is to be told. Raises ProtocolError for a result that answers no
        plan: the member is lost then."""

    def tell(self, events: Sequence[TokenEvent]) -> None:
        """The plans are on their way: the executor does not wait for what clients are told."""

    def drains(self, member: Member) -> None: ...

    def left(self, member: Member, reason: str) -> None:
        """Its session is over; nothing of its pool is of use any more."""

    def changed(self) -> None:
        """Some address has another state."""


@dataclass(slots=True)
class _Link:
    """What is known of an address."""

    state: ExecutorState = ExecutorState.CONNECTING
    reason: str = "not reached yet"
    incarnation: str = ""


class Fleet:
    def __init__(
        self,
        config: FleetConfig,
        handler: Handler,
        next_sequence_id: Callable[[], int],
        metrics: Metrics,
        discovery: Discovery | None = None,
    ) -> None:
        self._config = config
        self._handler = handler
        self._next_sequence_id = next_sequence_id
        self._metrics = metrics
        self._discovery = discovery or Discovery(config.executors)
        self._addresses: frozenset[str] = frozenset()
        self._links: dict[str, _Link] = {}
        self._owners: dict[str, str] = {}  # incarnation -> the address by which it joins, or has joined
        self._session = time.time_ns()
        self._log = structlog.get_logger("fleet")
        self.members: dict[str, Member] = {}  # by incarnation
        self.model: ModelInfo | None = None  # of those that are here, or of the last that was
        self.tokenizer_files: Mapping[str, bytes] = {}

    @property
    def accepting(self) -> list[Member]:
        """Members that take new requests."""
        return [member for member in self.members.values() if not member.draining]

    async def run(self) -> None:
        """Follows all addresses until cancelled."""
        try:
            async with asyncio.TaskGroup() as links, contextlib.aclosing(self._discovery.changes()) as changes:
                async for addresses in changes:
                    for address in sorted(addresses - self._links.keys()):
                        self._links[address] = _Link()
                        links.create_task(self._follow(address), name=f"executor {address}")
                    self._addresses = addresses
                    self._handler.changed()
        finally:
            await asyncio.gather(*(member.session.close() for member in self.members.values()))

    def describe(self) -> list[tuple[ExecutorLoad, Member | None]]:
        """Every address with its state, and the member there; counters are the caller's to fill in."""
        by_address = {member.address: member for member in self.members.values()}
        return [
            (ExecutorLoad(address, link.incarnation, link.state, link.reason), by_address.get(address))
            for address, link in sorted(self._links.items())
        ]

    def why_none(self) -> str:
        """A sentence on why nobody takes new requests."""
        if not self._links:
            return f"{', '.join(self._config.executors)} has no address"
        return "; ".join(
            f"{address} {link.state.value}: {link.reason}" for address, link in sorted(self._links.items())
        )

    async def _follow(self, address: str) -> None:
        """One address, for as long as it is in the answers of DNS, or its session lives."""
        client = ExecutorClient(address, self._config.client)
        try:
            while address in self._addresses:
                if client.is_outdated:
                    await client.close()
                    client = ExecutorClient(address, self._config.client)
                member = await self._join(address, client)
                if member is not None:
                    await self._serve(member)
                refused = self._links[address].state is ExecutorState.REFUSED
                await asyncio.sleep(RETRY_REFUSED if refused else RETRY_UNREACHABLE)
        finally:
            del self._links[address]  # before anything waits: the address may come back meanwhile
            self._metrics.forget_executor(address)
            await client.close()

    async def _join(self, address: str, client: ExecutorClient) -> Member | None:
        """None: not now; the address' state says why."""
        try:
            description = await client.describe()
            owner = self._owners.setdefault(description.incarnation, address)
            if owner != address:  # two sessions of one executor would end each other
                self._set_state(address, ExecutorState.CONNECTING, f"the same executor as {owner}")
                return None
            member = None
            try:
                member = await self._open(address, client, description)
            finally:
                if member is None:
                    del self._owners[description.incarnation]
            return member
        except ExecutorUnreachable as error:
            self._set_state(address, ExecutorState.CONNECTING, str(error))
        except ExecutorRefused as error:
            self._set_state(address, ExecutorState.REFUSED, str(error))
        except Exception as error:  # whatever one address answers, the streams of all others go on
            self._log.debug("joining failed", address=address, exc_info=error)
            self._set_state(address, ExecutorState.REFUSED, f"joining it failed: {error!r}")
        return None

    async def _open(self, address: str, client: ExecutorClient, description: Description) -> Member:
        """Raises ExecutorUnreachable or ExecutorRefused."""
        self._check(description)
        core = self._core(description)
        files = self.tokenizer_files if self.members else await client.tokenizer_files()
        self._session += 1
        session = await client.open_session(
            self._config.scheduler_id, self._session, description.incarnation, self._metrics.executor(address)
        )
        try:
            self._check(description)  # another may have joined as the reference meanwhile
        except ExecutorRefused:
            await session.close()
            raise
        if not self.members:
            self.model, self.tokenizer_files = description.model, files
        return Member(address, description, session, core)

    def _check(self, description: Description) -> None:
        """Raises ExecutorRefused naming both values where the executor differs from the reference."""
        expected, found = self._config.fingerprint, description.model.fingerprint
        if self.members:
            assert self.model is not None
            expected = expected or self.model.fingerprint
            if description.model.block_size != self.model.block_size:  # the fingerprint covers it, but would not say so
                raise ExecutorRefused(
                    f"its block size is {description.model.block_size}, expected {self.model.block_size}"
                )
        if expected is not None and found != expected:
            raise ExecutorRefused(f"its fingerprint is {found}, expected {expected}")

    def _core(self, description: Description) -> Scheduler:
        """Raises ExecutorRefused for limits that nothing can be planned for."""
        model = description.model
        try:
            config = CoreConfig(
                num_blocks=description.num_blocks,
                block_size=model.block_size,
                max_num_seqs=model.max_num_seqs,
                max_num_batched_tokens=description.max_num_batched_tokens,
                max_model_len=model.max_model_len,
                pipeline_depth=self._config.pipeline_depth,
                prefix_caching=self._config.prefix_caching,
            )
            return Scheduler(config, self._next_sequence_id)
        except ValueError as error:
            raise ExecutorRefused(f"its limits cannot be used: {error}") from None

    def _note_limits(self) -> None:
        """Executors of one model may differ in size: what the largest takes is not refused at the door."""
        models = [member.description.model for member in self.members.values()]
        if self.model is not None and models:
            self.model = replace(
                self.model,
                max_model_len=max(model.max_model_len for model in models),
                capacity_tokens=max(model.capacity_tokens for model in models),
                max_num_seqs=max(model.max_num_seqs for model in models),
            )

    async def _serve(self, member: Member) -> None:
        """From `joined` to `left`."""
        self.members[member.incarnation] = member
        self._note_limits()
        self._set_state(member.address, ExecutorState.READY, "", member.incarnation)
        self._handler.joined(member)
        try:
            async for answer in member.session.receive():
                if isinstance(answer, StepResult):
                    member.last_answer = time.monotonic()
                    events = self._handler.answered(member, answer)
                    await asyncio.sleep(0)  # the session's writer has its turn
                    self._handler.tell(events)
                else:
                    self.drain(member, f"it stops within {answer.grace_seconds:g} s")
        except ExecutorGone as error:
            reason = str(error)
        except ProtocolError as error:
            reason = f"it broke the protocol: {error}"
        except Exception as error:  # a fault of ours with one executor must not end the streams of all others
            reason = self._tell_fault(member, error)
        else:
            raise AssertionError("a session ends with its reason")
        try:
            del self.members[member.incarnation], self._owners[member.incarnation]
            self._note_limits()
            self._set_state(member.address, ExecutorState.LOST, reason, member.incarnation)
            self._handler.left(member, reason)
        finally:
            await member.session.close()

    def give_up(self, member: Member, error: Exception) -> None:
        """A fault of ours outside of the handler's calls: its session ends, and `left` follows."""
        member.session.fail(self._tell_fault(member, error))

    def _tell_fault(self, member: Member, error: Exception) -> str:
        self._log.error("planning failed", address=member.address, incarnation=member.incarnation, exc_info=error)
        return f"planning for it failed: {error!r}"

    def ask_to_stop(self, member: Member) -> None:
        """The executor's process stops once what it runs is over, or its own grace period is."""
        member.session.drain()
        self.drain(member, "a client asked for it")

    def drain(self, member: Member, reason: str) -> None:
        """It takes nothing new from now on; what it runs may finish."""
        if not member.draining:
            member.draining = True
            member.drain_reason = reason
            self._set_state(member.address, ExecutorState.DRAINING, reason, member.incarnation)
            self._handler.drains(member)

    def _set_state(self, address: str, state: ExecutorState, reason: str, incarnation: str = "") -> None:
        link = self._links[address]
        if (state, reason) != (link.state, link.reason):
            log = self._log.warning if state in (ExecutorState.LOST, ExecutorState.REFUSED) else self._log.info
            log(f"executor {state.value}", address=address, incarnation=incarnation or None, reason=reason or None)
            link.state, link.reason, link.incarnation = state, reason, incarnation
            self._handler.changed()
