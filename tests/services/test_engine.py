"""The engine with one executor: what goes in, what comes out, and that nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from scheduler import engine
from scheduler.core.request import Request, SamplingParams
from scheduler.core.scheduler import Scheduler
from scheduler.outputs import DoesNotFit, Draining, EndReason, ExecutorLost, ExecutorState, NoExecutor, QueueFull
from scheduler.router import Candidate, seen_by
from tests.executor.factories import POISON, greedy
from tests.services.executors import Fleet, LocalExecutor, client_options, fleet, read, read_one, submission, until


def is_idle(running: Fleet) -> bool:
    """Nothing is left in the core, nor in the executor."""
    (executor,) = running.executors
    core = running.core(executor)
    return not core.has_work and core.num_free_blocks == core.num_blocks and len(executor.runner.sequences) == 0


async def test_tokens_stream_in_order_and_the_end_tells_usage() -> None:
    async with fleet(LocalExecutor()) as running:
        ticket = running.engine.submit(submission((5, 6, 7), 9))
        heard = await read_one(ticket)
        assert heard.token_ids == greedy((5, 6, 7), 9)
        assert heard.finish is not None
        assert heard.finish.reason is EndReason.LENGTH
        assert heard.finish.num_output_tokens == 9
        assert heard.finish.executors == (running.executors[0].incarnation,)
        assert heard.finish.prefill_seconds > 0
        await until(lambda: is_idle(running))


async def test_requests_at_once_do_not_disturb_each_other() -> None:
    prompts = [(1, number, 3) for number in range(20)]
    async with fleet(LocalExecutor()) as running:
        heard = await asyncio.gather(*(read_one(running.engine.submit(submission(prompt, 12))) for prompt in prompts))
        assert [one.token_ids for one in heard] == [greedy(prompt, 12) for prompt in prompts]
        await until(lambda: is_idle(running))


async def test_a_prefix_hit_is_told_as_cached_tokens() -> None:
    prompt = tuple(range(1, 11))
    async with fleet(LocalExecutor()) as running:
        await read_one(running.engine.submit(submission(prompt, 2)))
        heard = await read_one(running.engine.submit(submission(prompt, 2)))
        assert heard.finish is not None
        assert heard.finish.num_cached_tokens == 8


async def test_an_end_by_the_service_frees_the_blocks_at_once_and_truncates_usage() -> None:
    async with fleet(LocalExecutor()) as running:
        ticket = running.engine.submit(submission((1, 2), 30))
        await until(lambda: ticket.outputs[0].num_tokens >= 5)
        running.engine.finish(ticket, 0, 3)
        assert running.core(running.executors[0]).num_running == 0
        heard = await read_one(ticket)
        assert heard.finish is not None
        assert (heard.finish.reason, heard.finish.num_output_tokens) == (EndReason.STOP, 3)
        await until(lambda: is_idle(running))


async def test_abort_ends_every_output_once_and_is_idempotent() -> None:
    async with fleet(LocalExecutor()) as running:
        ticket = running.engine.submit(submission((1, 2), 30, n=3, sampling=SamplingParams(seed=4)))
        await until(lambda: ticket.outputs[2].num_tokens >= 2)
        running.engine.abort(ticket)
        running.engine.abort(ticket)
        heard = await read(ticket)
        assert [one.finish.reason for one in heard if one.finish] == [EndReason.CANCELLED] * 3
        await until(lambda: is_idle(running))


async def test_one_that_was_never_planned_can_be_aborted() -> None:
    async with fleet(LocalExecutor()) as running:
        ticket = running.engine.submit(submission(n=2))
        running.engine.abort(ticket)
        assert [one.finish.reason for one in await read(ticket) if one.finish] == [EndReason.CANCELLED] * 2
        assert running.engine.load().queue_length == 0


async def test_non_finite_logits_end_that_request_alone() -> None:
    async with fleet(LocalExecutor()) as running:
        good = running.engine.submit(submission((1, 2), 10))
        bad = await read_one(running.engine.submit(submission((1, POISON), 10)))
        assert bad.finish is not None
        assert (bad.finish.reason, bad.finish.error) == (EndReason.ERROR, "non-finite logits")
        assert (await read_one(good)).token_ids == greedy((1, 2), 10)
        await until(lambda: is_idle(running))


async def test_what_never_fits_is_refused_at_once_naming_both_numbers() -> None:
    async with fleet(LocalExecutor(num_blocks=6, max_model_len=400)) as running:
        with pytest.raises(DoesNotFit, match=r"25 tokens .* KV cache of 20 tokens"):
            running.engine.submit(submission(range(25)))
        assert (await read_one(running.engine.submit(submission((1, 2), 5)))).token_ids == greedy((1, 2), 5)


async def test_the_queue_is_bounded_and_says_when_to_come_again() -> None:
    executor = LocalExecutor(max_num_seqs=1)
    async with fleet(executor, max_queue_requests=2) as running:
        executor.model.gate.clear()
        first = running.engine.submit(submission())
        await until(executor.model.entered.is_set)
        waiting = [running.engine.submit(submission()) for _ in range(2)]
        with pytest.raises(QueueFull) as full:
            running.engine.submit(submission())
        assert full.value.retry_after_seconds > 0
        executor.model.gate.set()
        for ticket in (first, *waiting):
            assert (await read_one(ticket)).token_ids == greedy((1, 2, 3), 8)


async def test_a_fault_in_admitting_one_request_ends_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(request: Request, core: Scheduler) -> Candidate:
        if request.prompt_token_ids[0] == 9:
            raise ArithmeticError("planted")
        return seen_by(request, core)

    monkeypatch.setattr(engine, "seen_by", seen)
    async with fleet(LocalExecutor()) as running:
        broken, well = running.engine.submit(submission((9, 9))), running.engine.submit(submission((1, 2)))
        heard = await read_one(broken)
        assert heard.finish is not None
        assert heard.finish.reason is EndReason.ERROR
        assert heard.finish.error == "admitting it failed: ArithmeticError('planted')"
        assert (await read_one(well)).token_ids == greedy((1, 2), 8)
        assert len(running.engine.members) == 1


async def test_a_queue_that_nobody_takes_from_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(LocalExecutor(), stall_seconds=0.1) as running:
        monkeypatch.setattr(engine, "choose", lambda *_: None)
        running.engine.submit(submission())
        await until(lambda: running.engine.stalled() is not None)
        assert "1 requests wait and nothing runs for 0 s: about to be planned" in str(running.engine.stalled())


async def test_waiting_longer_than_the_queue_timeout_ends_with_the_reason() -> None:
    executor = LocalExecutor(max_num_seqs=1)
    async with fleet(executor) as running:
        executor.model.gate.clear()
        running.engine.submit(submission())
        await until(executor.model.entered.is_set)
        late = await read_one(running.engine.submit(submission(queue_timeout=0.1)))
        assert late.finish is not None
        assert late.finish.reason is EndReason.TIMEOUT
        assert late.finish.queue_seconds >= 0.1  # though it never ran
        assert "1 of 1 sequences run" in str(late.finish.error)


async def test_before_the_first_executor_nothing_is_taken() -> None:
    async with fleet(targets=["127.0.0.1:1"], wait=False) as running:
        await until(lambda: any(e.reason == "connection refused" for e in running.engine.load().executors))
        with pytest.raises(NoExecutor, match=r"127\.0\.0\.1:1 connecting: connection refused"):
            running.engine.submit(submission())
        assert not running.engine.ready


async def test_a_draining_engine_takes_nothing_new_and_finishes_what_runs() -> None:
    async with fleet(LocalExecutor()) as running:
        ticket = running.engine.submit(submission((1, 2), 20))
        running.engine.drain()
        with pytest.raises(Draining):
            running.engine.submit(submission())
        assert (await read_one(ticket)).token_ids == greedy((1, 2), 20)


async def test_the_loss_of_the_only_executor_can_stop_the_engine() -> None:
    executor = LocalExecutor()
    async with fleet(executor, may_end=True, exit_on_executor_loss=True) as running:
        ticket = running.engine.submit(submission((1, 2), 30))
        await until(lambda: ticket.outputs[0].num_tokens >= 2)
        executor.model.fails_with = RuntimeError("out of thin air")
        heard = await read_one(ticket)
        assert heard.finish is not None
        assert heard.finish.reason is EndReason.ERROR
        assert "RuntimeError: out of thin air" in str(heard.finish.error)
        assert heard.token_ids == greedy((1, 2), len(heard.token_ids))
        with pytest.raises(ExecutorLost, match="out of thin air"):
            await running.task


async def test_an_executor_with_another_fingerprint_is_refused_and_both_are_named() -> None:
    executor = LocalExecutor(fingerprint="model-b")
    async with fleet(executor, wait=False, fleet_settings={"fingerprint": "model-a"}) as running:
        await until(lambda: any(e.state is ExecutorState.REFUSED for e in running.engine.load().executors))
        (load,) = running.engine.load().executors
        assert load.reason == "its fingerprint is model-b, expected model-a"


async def test_a_step_without_progress_is_a_dead_executor() -> None:
    executor = LocalExecutor()
    async with fleet(executor, client=client_options(step_timeout=0.3)) as running:
        ticket = running.engine.submit(submission((1, 2), 35))
        await until(lambda: ticket.outputs[0].num_tokens >= 1)
        executor.model.gate.clear()
        await until(lambda: not running.engine.members)
        assert "no progress in step" in running.engine.load().executors[0].reason
        executor.model.gate.set()
        assert (await read_one(ticket)).token_ids == greedy((1, 2), 35)
