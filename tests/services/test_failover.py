"""Executors die, come back and differ; streams go on with exactly the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio

from scheduler.core.plan import BatchPlan, StepResult, TokenEvent
from scheduler.core.request import SamplingParams
from scheduler.outputs import EndReason
from tests.executor.factories import greedy
from tests.services.executors import LocalExecutor, client_options, fleet, read, read_one, submission, until


def prompts(count: int) -> list[tuple[int, ...]]:
    return [(number % 40, 7, number // 40, 3) for number in range(count)]


async def test_streams_go_on_elsewhere_without_a_gap() -> None:
    async with fleet(LocalExecutor(), LocalExecutor()) as running:
        tickets = [running.engine.submit(submission(prompt, 24)) for prompt in prompts(8)]
        await until(lambda: all(ticket.outputs[0].num_tokens >= 3 for ticket in tickets))
        victim = running.executors[0]
        moved = [ticket for ticket in tickets if ticket.executors == [victim.incarnation]]
        assert 0 < len(moved) < 8
        await victim.kill()
        heard = [await read_one(ticket) for ticket in tickets]
        assert [one.token_ids for one in heard] == [greedy(prompt, 24) for prompt in prompts(8)]
        assert all(len(ticket.executors) == 2 for ticket in moved if ticket.outputs[0].num_tokens == 24)


async def test_every_output_of_one_request_moves() -> None:
    sampling = SamplingParams(temperature=1.0, seed=11)
    async with fleet(LocalExecutor()) as running:
        undisturbed = await read(running.engine.submit(submission((1, 2, 3), 20, n=3, sampling=sampling)))
    async with fleet(LocalExecutor(), LocalExecutor()) as running:
        ticket = running.engine.submit(submission((1, 2, 3), 20, n=3, sampling=sampling))
        await until(lambda: all(output.num_tokens >= 4 for output in ticket.outputs))
        await running.executor_of(ticket).kill()
        disturbed = await read(ticket)
    assert [one.token_ids for one in disturbed] == [one.token_ids for one in undisturbed]
    assert len({tuple(one.token_ids) for one in disturbed}) == 3


async def test_beams_begin_anew_and_end_the_same() -> None:
    async with fleet(LocalExecutor()) as running:
        undisturbed = await read(running.engine.submit(submission((1, 2, 3), 12, n=2, beam_width=3)))
    async with fleet(LocalExecutor(), LocalExecutor()) as running:
        ticket = running.engine.submit(submission((1, 2, 3), 12, n=2, beam_width=3))
        await until(lambda: bool(ticket.executors))
        await running.executor_of(ticket).kill()
        assert [one.token_ids for one in await read(ticket)] == [one.token_ids for one in undisturbed]


async def test_with_no_executor_left_a_stream_waits_for_the_next_one() -> None:
    first = LocalExecutor()
    async with fleet(first) as running:
        ticket = running.engine.submit(submission((4, 4), 30))
        await until(lambda: ticket.outputs[0].num_tokens >= 3)
        await first.kill()
        await until(lambda: not running.engine.members)
        late = running.engine.submit(submission((5, 5), 6))  # accepted: the model is known
        running.executors.append(await LocalExecutor().start(first.port))
        assert (await read_one(ticket)).token_ids == greedy((4, 4), 30)
        assert (await read_one(late)).token_ids == greedy((5, 5), 6)
        assert [e.incarnation for e in running.executors] == ticket.executors


async def test_a_stream_that_waits_too_long_ends_with_what_it_has_and_the_reason() -> None:
    executor = LocalExecutor()
    async with fleet(executor, begun_timeout=0.3) as running:
        ticket = running.engine.submit(submission((4, 4), 30))
        await until(lambda: ticket.outputs[0].num_tokens >= 3)
        await executor.kill()
        heard = await read_one(ticket)
        assert heard.finish is not None
        assert heard.finish.reason is EndReason.ERROR
        assert "waited too long to be computed: no executor takes requests" in str(heard.finish.error)
        assert heard.token_ids == greedy((4, 4), len(heard.token_ids))


async def test_an_executor_that_says_nothing_is_dead_after_the_heartbeat_timeout() -> None:
    silent, good = LocalExecutor(heartbeat_seconds=3600), LocalExecutor()
    async with fleet(silent, good, client=client_options(heartbeat_timeout=0.4)) as running:
        silent.model.gate.clear()
        tickets = [running.engine.submit(submission(prompt, 8)) for prompt in prompts(6)]
        assert [(await read_one(t)).token_ids for t in tickets] == [greedy(p, 8) for p in prompts(6)]
        assert any("no heartbeat for 0.4 s" in e.reason for e in running.engine.load().executors) or (
            silent.incarnation not in running.engine.members
        )


async def test_a_step_that_raises_ends_the_session_and_the_executor_is_used_again() -> None:
    executor = LocalExecutor()
    async with fleet(executor) as running:
        ticket = running.engine.submit(submission((4, 4), 30))
        await until(lambda: ticket.outputs[0].num_tokens >= 3)
        executor.model.fails_with = RuntimeError("a bad moment")
        await until(lambda: not running.engine.members)
        executor.model.fails_with = None
        assert (await read_one(ticket)).token_ids == greedy((4, 4), 30)


async def test_executors_all_too_small_end_the_stream_naming_both_numbers() -> None:
    big = LocalExecutor(num_blocks=20)
    async with fleet(big) as running:
        ticket = running.engine.submit(submission(range(24), 12))
        await until(lambda: ticket.outputs[0].num_tokens >= 2)
        running.executors.append(await LocalExecutor(num_blocks=5).start())
        await big.kill()
        await until(lambda: not running.engine.members)
        small = await LocalExecutor(num_blocks=5).start(big.port)
        running.executors.append(small)
        heard = await read_one(ticket)
        assert heard.finish is not None
        assert heard.finish.reason is EndReason.ERROR
        assert "KV cache of 16 tokens" in str(heard.finish.error)


async def test_another_model_does_not_go_on_with_the_tokens_of_the_first() -> None:
    first = LocalExecutor(fingerprint="model-a")
    async with fleet(first) as running:
        ticket = running.engine.submit(submission((4, 4), 30))
        await until(lambda: ticket.outputs[0].num_tokens >= 3)
        await first.kill()
        running.executors.append(await LocalExecutor(fingerprint="model-b").start(first.port))
        heard = await read_one(ticket)
        assert heard.finish is not None
        assert heard.finish.error == "the model changed from model-a to model-b"


async def test_a_request_that_kills_its_executors_fails_and_the_others_go_on() -> None:
    """Whoever computes token 13 dies. It is suspected twice, then twice dies alone."""
    deadly = 13

    class Mortal(LocalExecutor):
        def __init__(self) -> None:
            super().__init__()
            forward = self.model.forward

            def check(token_ids, metadata, logits_indices, progress):  # type: ignore[no-untyped-def]
                if deadly in token_ids.tolist():
                    raise RuntimeError("killed by a token")
                return forward(token_ids, metadata, logits_indices, progress)

            self.model.forward = check  # type: ignore[method-assign]

    harmless = [prompt for prompt in prompts(30) if deadly not in prompt and deadly not in greedy(prompt, 40)][:8]
    async with fleet(Mortal(), Mortal()) as running:
        tickets = [running.engine.submit(submission(prompt, 30)) for prompt in harmless]
        poison = running.engine.submit(submission((deadly, 1), 5))
        heard = await read_one(poison)
        assert heard.finish is not None
        assert heard.finish.reason is EndReason.ERROR
        assert "2 executors died while they ran this request alone" in str(heard.finish.error)
        assert "killed by a token" in str(heard.finish.error)
        assert [(await read_one(t)).token_ids for t in tickets] == [greedy(p, 30) for p in harmless]


async def test_a_draining_executor_finishes_what_it_runs_and_gets_nothing_new() -> None:
    leaving, staying = LocalExecutor(), LocalExecutor()
    async with fleet(leaving, staying) as running:
        tickets = [running.engine.submit(submission(prompt, 30)) for prompt in prompts(6)]
        await until(lambda: all(ticket.outputs[0].num_tokens >= 2 for ticket in tickets))
        draining = asyncio.create_task(leaving.drain(10.0))
        await until(
            lambda: (
                len(running.engine.load().executors) == 2
                and not all(not m.draining for m in running.engine.members.values())
            )
        )
        late = [running.engine.submit(submission(prompt, 5)) for prompt in prompts(4)]
        assert [(await read_one(t)).token_ids for t in tickets] == [greedy(p, 30) for p in prompts(6)]
        assert [(await read_one(t)).token_ids for t in late] == [greedy(p, 5) for p in prompts(4)]
        assert all(t.executors == [staying.incarnation] for t in late)
        assert all(len(t.executors) == 1 for t in tickets)
        await draining


async def test_what_a_draining_executor_cannot_finish_in_time_moves() -> None:
    leaving = LocalExecutor()
    async with fleet(leaving) as running:
        ticket = running.engine.submit(submission((4, 4), 30))
        await until(lambda: ticket.outputs[0].num_tokens >= 2)
        leaving.model.gate.clear()
        draining = asyncio.create_task(leaving.drain(0.2))
        await draining
        running.executors.append(await LocalExecutor().start(leaving.port))
        assert (await read_one(ticket)).token_ids == greedy((4, 4), 30)
        assert len(ticket.executors) == 2


async def test_rolling_restarts_under_load_lose_nothing() -> None:
    executors = [LocalExecutor(), LocalExecutor()]
    async with fleet(*executors) as running:
        tickets = [running.engine.submit(submission(prompt, 35)) for prompt in prompts(24)]
        for old in executors:
            await asyncio.sleep(0.05)
            await old.drain(5.0)
            running.executors.append(await LocalExecutor().start(old.port))
            await until(lambda: len(running.engine.members) == 2)
        assert [(await read_one(t)).token_ids for t in tickets] == [greedy(p, 35) for p in prompts(24)]


async def test_a_begun_request_is_served_before_later_ones_of_its_priority() -> None:
    first = LocalExecutor()
    async with fleet(first) as running:
        ticket = running.engine.submit(submission((4, 4), 30))
        await until(lambda: ticket.outputs[0].num_tokens >= 3)
        await first.kill()
        await until(lambda: not running.engine.members)
        late = running.engine.submit(submission((5, 5), 30))
        running.executors.append(await LocalExecutor(max_num_seqs=1).start(first.port))
        await until(lambda: late.first_step_at is not None)
        assert ticket.outputs[0].ended
        assert (await read_one(late)).token_ids == greedy((5, 5), 30)


async def test_a_fault_in_planning_for_one_executor_ends_neither_the_engine_nor_a_stream() -> None:
    """A core that raised once ended the scheduler, and with it the streams of all executors."""
    async with fleet(LocalExecutor(), LocalExecutor()) as running:
        tickets = [running.engine.submit(submission(prompt, 24)) for prompt in prompts(8)]
        await until(lambda: all(ticket.outputs[0].num_tokens >= 3 for ticket in tickets))
        core = running.core(running.executors[0])
        update = core.update

        def update_and_raise(result: StepResult) -> list[TokenEvent]:
            update(result)  # what it brought is never told
            raise ValueError("a fault of ours")

        core.update = update_and_raise  # type: ignore[method-assign]
        heard = [await read_one(ticket) for ticket in tickets]
        assert [one.token_ids for one in heard] == [greedy(prompt, 24) for prompt in prompts(8)]
        await until(lambda: len(running.engine.members) == 2)


async def test_a_fault_in_the_first_plan_for_an_idle_executor_ends_no_stream() -> None:
    """Outside of an answer nobody heard of it, and the stream waited for ever."""
    executor = LocalExecutor()
    async with fleet(executor) as running, asyncio.timeout(10):

        def schedule() -> BatchPlan | None:
            raise ValueError("a fault of ours")

        running.core(executor).schedule = schedule  # type: ignore[method-assign]
        ticket = running.engine.submit(submission((1, 2), 6))
        assert (await read_one(ticket)).token_ids == greedy((1, 2), 6)


async def test_an_end_that_a_fault_kept_from_being_told_is_an_error_and_no_silence() -> None:
    async with fleet(LocalExecutor()) as running:
        ticket = running.engine.submit(submission((1, 2), 30))
        await until(lambda: ticket.outputs[0].num_tokens >= 3)
        core = running.core(running.executors[0])

        def end_and_raise(result: StepResult) -> list[TokenEvent]:
            core.abort(ticket.outputs[0].sequence_id)
            raise ValueError("a fault of ours")

        core.update = end_and_raise  # type: ignore[method-assign]
        heard = await read_one(ticket)
        assert heard.finish is not None
        assert heard.finish.reason is EndReason.ERROR
        assert "ValueError('a fault of ours')" in str(heard.finish.error)
