"""The process around the service: health, reflection, metrics, drain, and what ends it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from octavo.v1 import generation_pb2 as pb

from scheduler.config import SchedulerConfig
from scheduler.outputs import EndReason, ExecutorLost
from scheduler.server import CannotListen, ExitCode, Server
from tests.services.fake_engine import FakeEngine, hang, make_model, text_ids
from tests.services.harness import Running, finished_of, make_request, refusal_of, rest, serving, text_of, until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("", "octavo.v1.Generation")


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Running]:
    async with serving(FakeEngine(script=hang)) as running:
        yield running


async def health(running: Running, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(running.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def wait_for_health(running: Running, status: int, name: str = "") -> None:
    call = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest(service=name))
    async for response in call:
        if response.status == status:
            call.cancel()
            return


async def test_ready_and_overall_health_are_equal_once_an_executor_is_ready(running: Running) -> None:
    await wait_for_health(running, SERVING)
    assert [await health(running, name) for name in NAMES] == [SERVING, SERVING]


async def test_without_an_executor_the_server_lives_and_is_not_ready() -> None:
    async with serving(FakeEngine(model=None, ready=False)) as running:
        await wait_for_health(running, SERVING, "liveness")
        assert [await health(running, name) for name in NAMES] == [NOT_SERVING, NOT_SERVING]
        running.engine.change(model=make_model(), ready=True)
        await wait_for_health(running, SERVING)
        running.engine.change(ready=False)
        await wait_for_health(running, NOT_SERVING)
        assert await health(running, "liveness") == SERVING


async def test_a_tokenizer_that_cannot_be_loaded_keeps_it_not_ready() -> None:
    async with serving(FakeEngine(tokenizer_files={})) as running:
        await wait_for_health(running, SERVING, "liveness")
        assert await health(running, "") == NOT_SERVING


async def test_work_that_waits_while_nothing_is_planned_makes_it_not_ready_with_the_reason(
    running: Running, capfd: pytest.CaptureFixture[str]
) -> None:
    await wait_for_health(running, SERVING)
    running.engine.change(why_stalled="3 requests wait and nothing runs")
    await wait_for_health(running, NOT_SERVING)
    assert await health(running, "liveness") == SERVING
    out, err = capfd.readouterr()
    assert "3 requests wait and nothing runs" in out + err
    running.engine.change(why_stalled=None)
    await wait_for_health(running, SERVING)


async def test_an_unknown_health_name_is_not_found(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(running, "nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(running: Running) -> None:
    call = ServerReflectionStub(running.channel).ServerReflectionInfo(
        iter([ServerReflectionRequest(list_services="")]),
    )
    response = await call.read()
    names = {service.name for service in response.list_services_response.service}
    assert {"octavo.v1.Generation", "grpc.health.v1.Health"} <= names


async def test_reflection_can_be_off() -> None:
    async with serving(reflection=False) as running:
        call = ServerReflectionStub(running.channel).ServerReflectionInfo(
            iter([ServerReflectionRequest(list_services="")]),
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_drain_lets_streams_finish_and_refuses_new_requests(running: Running) -> None:
    await wait_for_health(running, SERVING)
    call = running.stub.Generate(make_request())
    await call.read()
    running.server.stop()
    await wait_for_health(running, NOT_SERVING)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.generate()
    assert (refusal_of(caught.value).code, refusal_of(caught.value).reason) == (
        grpc.StatusCode.UNAVAILABLE,
        "DRAINING",
    )
    assert (await running.stub.GetLoad(pb.GetLoadRequest())).draining
    assert await health(running, "liveness") == SERVING
    running.engine.tickets[0].put(text_ids("Hello"), reason=EndReason.LENGTH)
    assert text_of(await rest(call)) == "Hello"
    assert await running.over is ExitCode.OK


async def test_after_the_grace_period_streams_are_cancelled_and_the_exit_is_clean() -> None:
    async with serving(FakeEngine(script=hang), grace_period=0.1) as running:
        call = running.stub.Generate(make_request())
        await call.read()
        running.server.stop()
        assert finished_of(await rest(call))[0].reason == pb.FINISH_REASON_CANCELLED
        assert await running.over is ExitCode.OK


async def test_the_loss_of_the_only_executor_ends_streams_with_the_reason_and_the_process_with_3(
    running: Running,
) -> None:
    call = running.stub.Generate(make_request())
    await call.read()
    await until(lambda: running.engine.failure is not None)
    running.engine.fail(ExecutorLost("no heartbeat for 2 s"))
    end = finished_of(await rest(call))[0]
    assert end.reason == pb.FINISH_REASON_ERROR
    assert "no heartbeat for 2 s" in end.error
    assert await running.over is ExitCode.EXECUTOR_LOST


async def test_a_loss_while_it_drains_is_told_all_the_same(running: Running) -> None:
    call = running.stub.Generate(make_request())
    await call.read()
    await until(lambda: running.engine.failure is not None)
    running.server.stop()
    await wait_for_health(running, NOT_SERVING)
    running.engine.fail(ExecutorLost("no heartbeat for 2 s"))
    assert "no heartbeat for 2 s" in finished_of(await rest(call))[0].error
    assert await running.over is ExitCode.EXECUTOR_LOST


async def test_a_port_that_is_taken_is_one_sentence(running: Running) -> None:
    other = Server(SchedulerConfig(executors=("fake:1",), port=running.server.port), FakeEngine())
    with pytest.raises(CannotListen, match=rf"cannot listen on 127.0.0.1:{running.server.port}: the port is taken"):
        await other.start()
