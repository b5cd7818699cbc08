"""What an onlooker sees: over gRPC, and as the engine makes it of executors that run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio
from octavo.client import AsyncClient, Client

from scheduler.inspection import FRESH_SECONDS, SHARE_OF_LOOP, Inspector, Owner
from tests.services.executors import LocalExecutor, fleet, read_one, submission
from tests.services.fake_engine import FakeEngine, hang
from tests.services.harness import Running, make_request, serving, until


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Running]:
    async with serving(FakeEngine(script=hang)) as running:
        yield running


async def test_a_watcher_sees_every_block_and_whose_it_is(running: Running) -> None:
    async with AsyncClient(running.address) as client:
        watch = client.watch_blocks()
        seen = await anext(watch)
        await watch.aclose()
    assert (seen.model, seen.load.queue_length) == ("tiny", 2)
    [blocks] = seen.executors
    assert (blocks.target, blocks.block_size, blocks.max_num_seqs, blocks.max_num_batched_tokens) == (
        "here:1",
        16,
        8,
        64,
    )
    assert blocks.holders == (0, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0)
    assert blocks.ref_counts == (0, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0)
    assert blocks.num_filled == (0, 16, 2, 2, 16, 0, 0, 0, 0, 0, 0)
    assert [(s.sequence_id, s.group, s.request_id, s.tenant, s.index) for s in blocks.sequences] == [
        (7, 7, "ask-1", "acme", 0),
        (8, 7, "ask-1", "acme", 1),
    ]
    assert [(s.num_prompt_tokens, s.num_tokens, s.num_computed_tokens) for s in blocks.sequences] == [(17, 19, 18)] * 2
    assert [(s.step_id, s.num_decodes, s.num_prefill_tokens, s.num_tokens, s.seconds) for s in blocks.steps] == [
        (1, 0, 17, 17, 0.25),
        (2, 2, 0, 2, None),
    ]
    assert blocks.num_sampled_tokens == 4


async def test_a_watch_goes_on_until_the_server_stops(running: Running) -> None:
    async with AsyncClient(running.address) as client:
        watch = client.watch_blocks(0.1)
        seen = [(await anext(watch)).seconds for _ in range(3)]
        assert seen == sorted(set(seen))
        running.server.stop()
        assert all([last.load.draining async for last in watch])


async def test_the_blocking_client_watches_too(running: Running) -> None:
    def first() -> int:
        with Client(running.address) as client:
            return len(next(client.watch_blocks()).executors)

    assert await asyncio.to_thread(first) == 1


async def test_request_ids_are_the_clients_own(running: Running) -> None:
    running.stub.Generate(make_request(request_id="mine"))
    await until(lambda: len(running.engine.tickets) == 1)
    assert running.engine.tickets[0].submission.request_id == "mine"


async def test_the_engine_shows_what_its_executors_hold() -> None:
    async with fleet(LocalExecutor(block_size=16, num_blocks=9)) as running:
        executor = running.executors[0]
        executor.model.gate.clear()
        ticket = running.engine.submit(submission(range(20), max_tokens=4, request_id="r", tenant="t"))
        await until(lambda: running.engine.inspect().executors[0].block_map.holders != ())
        [view] = running.engine.inspect().executors
        assert (view.target, view.owners) == (executor.address, (Owner("r", "t", 0),))
        assert sorted(view.block_map.ref_cnt) == [0] * 7 + [1, 1]
        assert sorted(view.block_map.num_filled) == [0] * 7 + [5, 16]  # two steps are under way
        assert [(s.num_prefill_tokens, s.num_decodes, s.num_admitted, s.seconds) for s in view.steps] == [
            (20, 0, 1, None),
            (0, 1, 0, None),
        ]
        executor.model.gate.set()
        assert len((await read_one(ticket)).token_ids) == 4
        await until(lambda: running.engine.inspect().executors[0].block_map.holders == ())
        [view] = running.engine.inspect().executors
        assert view.num_sampled_tokens >= 4
        assert [s.seconds is not None for s in view.steps[:4]] == [True] * 4
        assert sorted(view.block_map.num_filled) == [0] * 8 + [16]  # the prefix stays


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_who_looks_at_the_same_time_sees_the_same() -> None:
    engine, clock = FakeEngine(), Clock()
    inspector = Inspector(engine.inspect, clock)
    assert inspector.look() is inspector.look()
    clock.now += FRESH_SECONDS
    assert (inspector.look().seconds, engine.inspections) == (2.0, 2)


def test_looking_keeps_to_its_share_of_the_loop() -> None:
    clock = Clock()
    engine = FakeEngine()

    def slow():  # type: ignore[no-untyped-def]
        clock.now += 0.02
        return engine.inspect()

    inspector = Inspector(slow, clock)
    inspector.look()
    assert inspector.pause(0.25) == 0.02 / SHARE_OF_LOOP
    assert inspector.pause(60.0) == 60.0


def test_without_names_no_word_of_a_client_is_left() -> None:
    seen = FakeEngine().inspect()
    assert "acme" in repr(seen)
    assert "ask-1" in repr(seen)
    hidden = repr(seen.without_names())
    assert "acme" not in hidden
    assert "ask-1" not in hidden
    assert [o and o.index for o in seen.without_names().executors[0].owners] == [0, 1]
