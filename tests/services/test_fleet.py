"""Who joins, who is refused and why, and who is dropped: a fleet and executors in this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest

from scheduler.core.plan import StepResult, TokenEvent
from scheduler.executor_client import Description, ExecutorClient
from scheduler.fleet import Fleet, FleetConfig, Member
from scheduler.metrics import Metrics
from scheduler.outputs import ExecutorState
from tests.services.executors import LocalExecutor, client_options, until


class Addresses:
    """Stands in for discovery: the test says what is found."""

    def __init__(self, *addresses: str) -> None:
        self._found = frozenset(addresses)
        self._changed = asyncio.Event()
        self._changed.set()

    def set(self, *addresses: str) -> None:
        self._found = frozenset(addresses)
        self._changed.set()

    async def changes(self) -> AsyncGenerator[frozenset[str], None]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield self._found


@dataclass
class Diary:
    """A handler that remembers."""

    entries: list[tuple[str, str]] = field(default_factory=list)  # what happened, and to which incarnation
    reasons: list[str] = field(default_factory=list)

    def joined(self, member: Member) -> None:
        self.entries.append(("joined", member.incarnation))

    def answered(self, member: Member, result: StepResult) -> Sequence[TokenEvent]:
        raise AssertionError("nobody sent a plan")

    def tell(self, events: Sequence[TokenEvent]) -> None:
        raise AssertionError("nobody sent a plan")

    def drains(self, member: Member) -> None:
        self.entries.append(("drains", member.incarnation))

    def left(self, member: Member, reason: str) -> None:
        self.entries.append(("left", member.incarnation))
        self.reasons.append(reason)

    def changed(self) -> None: ...


@dataclass
class Running:
    fleet: Fleet
    diary: Diary
    addresses: Addresses

    def state(self, address: str) -> tuple[ExecutorState, str] | None:
        for load, _ in self.fleet.describe():
            if load.target == address:
                return load.state, load.reason
        return None

    def is_refused(self, address: str) -> bool:
        state = self.state(address)
        return state is not None and state[0] is ExecutorState.REFUSED


@contextlib.asynccontextmanager
async def following(*executors: LocalExecutor, wait: bool = True, **config: object) -> AsyncIterator[Running]:
    """Starts the executors, and a fleet that is told of all of them."""
    for executor in executors:
        await executor.start()
    addresses = Addresses(*(executor.address for executor in executors))
    diary = Diary()
    settings = FleetConfig(("somewhere:1",), client=client_options(), **config)  # type: ignore[arg-type]
    fleet = Fleet(settings, diary, itertools.count(1).__next__, Metrics(), addresses)  # type: ignore[arg-type]
    task = asyncio.create_task(fleet.run())
    running = Running(fleet, diary, addresses)
    try:
        if wait:
            await until(lambda: len(fleet.members) == len(executors))
        yield running
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        for executor in executors:
            await executor.kill()


def other_name(executor: LocalExecutor) -> str:
    """The whole of 127.0.0.0/8 is this machine, but a listener has one address: gRPC resolves this name to it."""
    return f"localhost:{executor.port}"


async def test_an_executor_that_appears_joins_without_a_restart() -> None:
    first, second = LocalExecutor(), LocalExecutor()
    async with following(first) as running:
        await second.start()
        running.addresses.set(first.address, second.address)
        await until(lambda: len(running.fleet.members) == 2)
        assert running.diary.entries == [("joined", first.incarnation), ("joined", second.incarnation)]
        await second.kill()


async def test_one_that_is_not_there_yet_is_joined_when_it_is() -> None:
    gone = LocalExecutor()
    await gone.start()
    await gone.kill()
    late = LocalExecutor()
    async with following() as running:
        running.addresses.set(gone.address)
        await until(lambda: (running.state(gone.address) or ("", ""))[1] == "connection refused")
        await late.start(gone.port)
        await until(lambda: list(running.fleet.members) == [late.incarnation])
        await late.kill()


async def test_an_address_that_vanishes_is_kept_while_its_stream_lives_and_dropped_when_it_ends() -> None:
    staying, leaving = LocalExecutor(), LocalExecutor()
    async with following(staying, leaving) as running:
        running.addresses.set(staying.address)
        await asyncio.sleep(0.05)
        assert running.state(leaving.address) == (ExecutorState.READY, "")
        await leaving.kill()
        await until(lambda: running.state(leaving.address) is None)
        assert list(running.fleet.members) == [staying.incarnation]


async def test_an_executor_at_a_vanished_address_is_not_joined_again() -> None:
    leaving = LocalExecutor()
    async with following(leaving) as running:
        running.addresses.set()
        await asyncio.sleep(0.05)
        leaving._service.end_session("enough")
        await until(lambda: running.state(leaving.address) is None)
        assert running.diary.entries == [("joined", leaving.incarnation), ("left", leaving.incarnation)]


async def test_an_address_that_was_dropped_may_come_back() -> None:
    executor = LocalExecutor()
    async with following(executor) as running:
        running.addresses.set()
        await asyncio.sleep(0.05)
        executor._service.end_session("enough")
        await until(lambda: running.state(executor.address) is None)
        running.addresses.set(executor.address)
        await until(lambda: executor.incarnation in running.fleet.members)


async def test_two_names_of_one_executor_join_once_and_the_other_one_says_so() -> None:
    """Both are found at the same moment, as the two addresses of localhost are."""
    executor = LocalExecutor()
    async with following(executor, wait=False) as running:
        names = {executor.address, other_name(executor)}
        running.addresses.set(*names)
        await until(lambda: len(running.fleet.members) == 1)
        await until(lambda: any("the same executor as" in (running.state(name) or ("", ""))[1] for name in names))
        await asyncio.sleep(0.5)
        assert running.diary.entries == [("joined", executor.incarnation)]


async def test_when_one_of_two_names_ends_the_other_may_take_over() -> None:
    executor = LocalExecutor()
    async with following(executor) as running:
        running.addresses.set(other_name(executor))
        await asyncio.sleep(0.05)
        executor._service.end_session("enough")
        await until(
            lambda: (
                executor.incarnation in running.fleet.members
                and running.fleet.members[executor.incarnation].address == other_name(executor)
            )
        )
        await until(lambda: running.state(executor.address) is None)


async def test_ipv6_executors_join_by_their_address_in_brackets() -> None:
    executor = LocalExecutor()
    port = executor._server.add_insecure_port("[::1]:0")
    async with following(executor, wait=False) as running:
        name = f"[::1]:{port}"
        running.addresses.set(name)
        await until(lambda: running.state(name) == (ExecutorState.READY, ""))


async def test_a_recycled_address_is_another_executor() -> None:
    old, new = LocalExecutor(), LocalExecutor()
    async with following(old) as running:
        await old.kill()
        await new.start(old.port)
        await until(lambda: list(running.fleet.members) == [new.incarnation])
        assert running.diary.entries == [
            ("joined", old.incarnation),
            ("left", old.incarnation),
            ("joined", new.incarnation),
        ]
        await new.kill()


async def test_another_fingerprint_is_refused_and_both_are_told_and_logged(capfd: pytest.CaptureFixture[str]) -> None:
    reference, other = LocalExecutor(fingerprint="model-a"), LocalExecutor(fingerprint="model-b")
    async with following(reference) as running:
        await other.start()
        running.addresses.set(reference.address, other.address)
        sentence = "its fingerprint is model-b, expected model-a"
        await until(lambda: running.state(other.address) == (ExecutorState.REFUSED, sentence))
        assert list(running.fleet.members) == [reference.incarnation]
        out, err = capfd.readouterr()
        assert (out + err).count(sentence) == 1
        await other.kill()


async def test_an_answer_that_nobody_foresaw_is_a_refusal_and_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    describe = ExecutorClient.describe

    async def describe_nothing(self: ExecutorClient) -> Description:
        raise AttributeError("no such field")

    monkeypatch.setattr(ExecutorClient, "describe", describe_nothing)
    executor = LocalExecutor()
    async with following(executor, wait=False) as running:
        await until(lambda: running.is_refused(executor.address))
        assert running.state(executor.address) == (
            ExecutorState.REFUSED,
            "joining it failed: AttributeError('no such field')",
        )
        monkeypatch.setattr(ExecutorClient, "describe", describe)
        await until(lambda: len(running.fleet.members) == 1)


async def test_another_block_size_is_refused_and_both_are_told() -> None:
    good, other = LocalExecutor(), LocalExecutor(fingerprint="model-b", block_size=8)
    async with following(good) as running:
        await other.start()
        running.addresses.set(good.address, other.address)
        await until(lambda: running.is_refused(other.address))
        assert running.state(other.address) == (ExecutorState.REFUSED, "its block size is 8, expected 4")
        await other.kill()


async def test_two_that_differ_and_come_at_once_do_not_both_join() -> None:
    one, other = LocalExecutor(fingerprint="model-a"), LocalExecutor(fingerprint="model-b")
    async with following(one, other, wait=False) as running:
        await until(lambda: any(running.is_refused(executor.address) for executor in (one, other)))
        assert len(running.fleet.members) == 1


async def test_a_reference_by_flag_refuses_even_the_first() -> None:
    async with following(LocalExecutor(fingerprint="model-a"), wait=False, fingerprint="model-b") as running:
        await until(lambda: bool(running.fleet.describe()))
        address = running.fleet.describe()[0][0].target
        await until(
            lambda: running.state(address) == (ExecutorState.REFUSED, "its fingerprint is model-a, expected model-b")
        )
        assert running.fleet.why_none() == f"{address} refused: its fingerprint is model-a, expected model-b"


async def test_the_reference_is_forgotten_when_none_is_left() -> None:
    old, new = LocalExecutor(fingerprint="model-a"), LocalExecutor(fingerprint="model-b")
    async with following(old) as running:
        await new.start()
        running.addresses.set(old.address, new.address)
        await until(lambda: running.is_refused(new.address))
        await old.kill()
        await until(lambda: list(running.fleet.members) == [new.incarnation])
        assert running.fleet.model is not None
        assert running.fleet.model.fingerprint == "model-b"
        await new.kill()


async def test_another_protocol_version_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.service.PROTOCOL_VERSION", 7)
    executor = LocalExecutor()
    async with following(executor, wait=False) as running:
        await until(
            lambda: (
                running.state(executor.address)
                == (ExecutorState.REFUSED, "it speaks protocol version 7, this scheduler 1")
            )
        )


async def test_an_executor_of_another_scheduler_is_refused_and_its_owner_named() -> None:
    executor = LocalExecutor()
    async with following(executor, scheduler_id="first"), following(wait=False, scheduler_id="second") as second:
        second.addresses.set(executor.address)
        await until(lambda: second.is_refused(executor.address))
        assert "owned by scheduler 'first'" in str(second.state(executor.address))


async def test_a_draining_executor_is_kept_and_says_for_how_long() -> None:
    leaving = LocalExecutor()
    async with following(leaving) as running:
        draining = asyncio.create_task(leaving.drain(0.3))
        await until(lambda: running.state(leaving.address) == (ExecutorState.DRAINING, "it stops within 0.3 s"))
        assert running.fleet.accepting == []
        assert len(running.fleet.members) == 1
        await draining
        await until(lambda: len(running.diary.entries) == 3)
        assert running.diary.entries[1:] == [("drains", leaving.incarnation), ("left", leaving.incarnation)]


async def test_a_member_asked_to_stop_is_told_so() -> None:
    executor = LocalExecutor()
    async with following(executor) as running:
        running.fleet.ask_to_stop(running.fleet.members[executor.incarnation])
        assert running.state(executor.address) == (ExecutorState.DRAINING, "a client asked for it")
        await asyncio.wait_for(executor._service.drain_requested.wait(), 10)
