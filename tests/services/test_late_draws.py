"""A whole executor whose draws are known late, as on a GPU: every stream is that of one that knows them at once."""

from __future__ import annotations

import asyncio
import random

import pytest

from scheduler.core.request import SamplingParams
from scheduler.outputs import EndReason, Submission
from tests.executor.factories import POISON, FakeModel, LateModel
from tests.services.executors import LocalExecutor, fleet, read, submission, until


def workload(seed: int) -> list[Submission]:
    r = random.Random(seed)

    def one(number: int) -> Submission:
        prompt = [r.randrange(40) for _ in range(r.randint(1, 9))]
        if number % 9 == 4:
            prompt[-1] = POISON
        sampling = SamplingParams(
            temperature=r.choice([0.0, 1.0]),
            seed=r.randrange(1000),
            repetition_penalty=r.choice([1.0, 1.0, 1.3]),
            logprobs=r.choice([None, None, 1]),
            prompt_logprobs=1 if number % 7 == 3 else None,
            stop_token_ids=frozenset([r.randrange(40)]),
        )
        return submission(prompt, r.randint(1, 12), sampling=sampling, n=r.choice([1, 1, 2]), priority=r.randint(0, 2))

    return [one(number) for number in range(24)]


async def outcomes(model: type[FakeModel], depth: int, seed: int) -> tuple[list[object], LocalExecutor]:
    """Of each output the tokens and why it ended; a pool so small that sequences give way to each other."""
    executor = LocalExecutor(model=model, num_blocks=16, max_num_seqs=6, max_num_batched_tokens=16)
    async with fleet(executor, fleet_settings={"pipeline_depth": depth}) as running:
        tickets = [running.engine.submit(one) for one in workload(seed)]
        heard = await asyncio.gather(*(read(ticket) for ticket in tickets))
        core = running.core(executor)
        await until(lambda: not core.has_work and len(executor.runner.sequences) == 0)
        assert core.num_free_blocks == core.num_blocks
    found: list[object] = []
    for outputs in heard:
        for output in outputs:
            assert output.finish is not None
            found.append((output.token_ids, output.finish.reason, output.finish.error))
    return found, executor


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
async def test_every_stream_is_the_same(depth: int, seed: int) -> None:
    late, executor = await outcomes(LateModel, depth, seed)
    plain, _ = await outcomes(FakeModel, 1, seed)
    assert late == plain
    assert {reason for _, reason, _ in plain} >= {EndReason.ERROR, EndReason.LENGTH}  # type: ignore[misc]
    assert isinstance(executor.model, LateModel)
    assert (executor.model.num_fed > 0) is (depth > 1)


async def test_aborts_at_any_moment_leave_nothing_behind() -> None:
    executor = LocalExecutor(model=LateModel, num_blocks=16, max_num_seqs=6, max_num_batched_tokens=16)
    r = random.Random(5)
    async with fleet(executor, fleet_settings={"pipeline_depth": 2}) as running:
        for _ in range(4):
            tickets = [running.engine.submit(one) for one in workload(r.randrange(99))]
            for _ in tickets:
                await asyncio.sleep(r.choice([0, 0, 0.002]))
                running.engine.abort(r.choice(tickets))
            for ticket in tickets:
                running.engine.abort(ticket)
        core = running.core(executor)
        await until(lambda: not core.has_work and len(executor.runner.sequences) == 0)
        assert core.num_free_blocks == core.num_blocks
