"""What an operator asks of a server: its load as it changes, and a drain of it or of one executor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from octavo.client import AsyncClient, Client, ServerUnavailable, UnknownExecutor
from octavo.v1 import generation_pb2 as pb

from scheduler.outputs import EndReason, WaitingRequests
from scheduler.server import ExitCode
from tests.services.fake_engine import FakeEngine, hang
from tests.services.harness import Running, make_request, refusal_of, rest, serving, until

HOUR = pb.WatchLoadRequest(interval=Duration(seconds=3600))


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Running]:
    async with serving(FakeEngine(script=hang)) as running:
        yield running


async def test_a_watch_begins_with_the_load_and_goes_on_at_its_interval(running: Running) -> None:
    call = running.stub.WatchLoad(pb.WatchLoadRequest(interval=Duration(nanos=1)))
    loads = [await call.read() for _ in range(3)]
    assert [load.queue_length for load in loads] == [2, 2, 2]
    call.cancel()


async def test_a_change_is_told_at_once_whatever_the_interval(running: Running) -> None:
    call = running.stub.WatchLoad(HOUR)
    await call.read()
    running.engine.change(waiting=(WaitingRequests("a", 3, 7, "no room"),))
    assert [(w.tenant, w.priority, w.num_requests, w.reason) for w in (await call.read()).waiting] == [
        ("a", 3, 7, "no room")
    ]
    call.cancel()


async def test_changes_that_come_while_a_message_is_sent_are_told_too(running: Running) -> None:
    call = running.stub.WatchLoad(HOUR)
    await call.read()
    for priority in range(50):
        running.engine.change(waiting=(WaitingRequests("a", priority, 1, ""),))
        await asyncio.sleep(0)
    while (await call.read()).waiting[0].priority != 49:
        pass
    call.cancel()


@pytest.mark.parametrize("seconds", [-1, 10**6])
async def test_an_interval_out_of_range_is_refused(running: Running, seconds: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub.WatchLoad(pb.WatchLoadRequest(interval=Duration(seconds=seconds))).read()
    assert (refusal_of(caught.value).code, refusal_of(caught.value).field) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "interval",
    )


def num_watching() -> int:
    """Tasks of WatchLoad calls: each waits for the end of a drain."""
    return sum("_drained" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def test_a_watcher_that_leaves_leaves_nothing_behind(running: Running) -> None:
    call = running.stub.WatchLoad(HOUR)
    await call.read()
    assert num_watching() == 1
    call.cancel()
    await until(lambda: num_watching() == 0)


async def test_a_watcher_sees_the_drain_begin_and_its_stream_ends_with_the_last_request(running: Running) -> None:
    request = running.stub.Generate(make_request())
    await request.read()
    watch = running.stub.WatchLoad(HOUR)
    assert not (await watch.read()).draining
    await running.stub.Drain(pb.DrainRequest())
    assert (await watch.read()).draining
    running.engine.tickets[0].put(reason=EndReason.LENGTH)
    await rest(request)
    assert all(load.draining for load in await rest(watch))
    assert await running.over is ExitCode.OK


async def test_a_drain_of_the_scheduler_is_that_of_sigterm(running: Running) -> None:
    request = running.stub.Generate(make_request())
    await request.read()
    async with AsyncClient(running.address) as client:
        assert await client.drain() is None
        await until(lambda: running.engine.draining)
        with pytest.raises(ServerUnavailable, match="draining"):
            await client.complete(text="Hi")
        running.engine.tickets[0].put(reason=EndReason.LENGTH)
        await rest(request)
        assert await running.over is ExitCode.OK


async def test_a_drain_of_an_executor_names_its_incarnation(running: Running) -> None:
    async with AsyncClient(running.address) as client:
        assert await client.drain("here:1") == "i1"
    assert running.engine.drained_executors == ["here:1"]
    assert not running.engine.draining


async def test_an_executor_that_has_not_joined_is_not_found(running: Running) -> None:
    async with AsyncClient(running.address) as client:
        with pytest.raises(UnknownExecutor, match="no executor 'there:2' has joined; there are here:1"):
            await client.drain("there:2")


async def test_both_clients_watch(running: Running) -> None:
    def first() -> int:
        with Client(running.address) as client:
            return next(client.watch_load(60.0)).queue_length

    assert await asyncio.to_thread(first) == 2
    async with AsyncClient(running.address) as client:
        watch = client.watch_load()
        assert [(await anext(watch)).queue_length for _ in range(2)] == [2, 2]
        await watch.aclose()
