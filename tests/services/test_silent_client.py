"""A client whose host is gone: its connection stays open and says nothing, and its request must not run on."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
from octavo.v1.generation_pb2_grpc import GenerationStub

from scheduler.config import SchedulerConfig
from scheduler.server import Keepalive, Server
from tests.executor.test_silent_scheduler import Wire
from tests.services.fake_engine import FakeEngine, hang
from tests.services.harness import make_request, until


async def test_a_request_of_a_client_that_is_silently_gone_is_aborted_within_the_keepalive() -> None:
    """gRPC waited a minute for the answer, whatever its keepalive_timeout said."""
    engine = FakeEngine(script=hang)
    server = Server(SchedulerConfig(executors=("fake:1",), port=0), engine, Keepalive(silence_ms=1000, patience_ms=500))
    await server.start()
    over = asyncio.create_task(server.run())
    with contextlib.closing(Wire(f"127.0.0.1:{server.port}")) as wire:
        async with grpc.aio.insecure_channel(wire.address) as channel:
            await GenerationStub(channel).Generate(make_request()).read()
            await asyncio.sleep(2)
            assert not engine.tickets[0].aborted  # it is silent, but answers
            wire.silence()
            async with asyncio.timeout(20):
                await until(lambda: engine.tickets[0].aborted)
    server.stop()
    await over
