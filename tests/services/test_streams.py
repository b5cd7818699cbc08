"""Streams over real gRPC: what a client gets, and what becomes of a request whose client leaves or lags."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any, NoReturn

import grpc
import pytest
from octavo.v1 import generation_pb2 as pb

from scheduler.core.plan import PromptLogprobs, TokenLogprobs
from scheduler.metrics import Metrics
from scheduler.outputs import EndReason
from scheduler.service import GenerationService
from scheduler.tokenizer import Tokenizer
from tests.services.fake_engine import EOS, FakeEngine, FakeTicket, answer, hang, make_model, text_ids
from tests.services.harness import finished_of, make_request, rest, serving, text_of, tokens_of, until
from tests.services.tokenizers_for_tests import llama_style


async def test_a_stream_is_started_then_deltas_then_finished() -> None:
    async with serving() as running:
        messages = await running.generate(text="Hello", request_id="r", sampling=pb.SamplingParams(seed=5))
    assert [message.WhichOneof("event") for message in messages] == ["started", "delta", "finished"]
    started = messages[0].started
    assert (started.request_id, started.num_prompt_tokens, started.seed) == ("r", 1, 5)
    assert text_of(messages) == "Hello world"
    end = finished_of(messages)[0]
    assert (end.reason, end.stop_token_id, end.seed) == (pb.FINISH_REASON_STOP, EOS, 5)
    assert (end.usage.num_prompt_tokens, end.usage.num_output_tokens) == (1, 3)


async def test_a_drawn_seed_and_id_are_reported() -> None:
    async with serving() as running:
        messages = await running.generate()
        submission = running.engine.tickets[0].submission
    assert messages[0].started.request_id
    assert messages[0].started.seed == finished_of(messages)[0].seed == submission.sampling.seed


async def test_every_output_has_its_own_text_and_one_finished() -> None:
    def script(ticket: FakeTicket) -> None:
        ticket.put(text_ids("Hello"), index=1)
        ticket.put(text_ids("Paris"), index=0, reason=EndReason.LENGTH)
        ticket.put(text_ids(" world"), index=1, reason=EndReason.LENGTH)
        ticket.put(index=2, reason=EndReason.ERROR, error="NaN logits")

    async with serving(FakeEngine(script=script)) as running:
        messages = await running.generate(n=3)
    assert (text_of(messages, 0), text_of(messages, 1), text_of(messages, 2)) == ("Paris", "Hello world", "")
    ends = finished_of(messages)
    assert sorted(ends) == [0, 1, 2]
    assert (ends[2].reason, ends[2].error) == (pb.FINISH_REASON_ERROR, "NaN logits")
    assert not ends[0].HasField("error")


async def test_news_of_one_read_are_one_delta_for_each_output() -> None:
    def script(ticket: FakeTicket) -> None:
        for _ in range(20):
            ticket.put(text_ids("G"), index=0)
            ticket.put(text_ids("J"), index=1)
        ticket.end_all(EndReason.LENGTH)

    async with serving(FakeEngine(script=script)) as running:
        messages = await running.generate(n=2)
    deltas = [message.delta for message in messages if message.HasField("delta")]
    assert [(delta.index, delta.text) for delta in deltas] == [(0, "G" * 20), (1, "J" * 20)]


async def test_a_stop_string_ends_the_output_and_the_engine_is_told_at_once() -> None:
    def script(ticket: FakeTicket) -> None:
        for word in ("a", "DEF", "G", "HI", "J", "world", "world"):
            ticket.put(text_ids(word))

    async with serving(FakeEngine(script=script)) as running:
        messages = await running.generate(stop=["x", "DEFGHIJ"])
        assert running.engine.tickets[0].finished == [(0, 5)]
    assert text_of(messages) == "a"
    assert len(tokens_of(messages)) == 5
    end = finished_of(messages)[0]
    assert (end.reason, end.stop, end.usage.num_output_tokens) == (pb.FINISH_REASON_STOP, "DEFGHIJ", 5)
    assert not end.HasField("stop_token_id")


async def test_echo_puts_the_prompt_before_every_output() -> None:
    async with serving(FakeEngine(script=answer(*text_ids(" world"), reason=EndReason.LENGTH))) as running:
        messages = await running.generate(text="Hello", echo=True, n=2)
    assert (text_of(messages, 0), text_of(messages, 1)) == ("Hello world", "Hello world")


async def test_prompt_log_probabilities_come_before_the_first_delta_with_the_prompts_tokens() -> None:
    def script(ticket: FakeTicket) -> None:
        ticket.put(prompt_logprobs=PromptLogprobs(1, (TokenLogprobs(-1.0, 2, ()),)))
        ticket.put(prompt_logprobs=PromptLogprobs(2, (TokenLogprobs(-2.0, 1, ()),)))
        ticket.put(text_ids("a"), reason=EndReason.LENGTH)

    async with serving(FakeEngine(script=script)) as running:
        messages = await running.generate(token_ids=pb.TokenIds(ids=[5, 6, 7]), prompt_logprobs=0, echo=True)
    assert [m.WhichOneof("event") for m in messages] == [
        "started",
        "prompt_logprobs",
        "prompt_logprobs",
        "delta",
        "finished",
    ]
    assert [(m.prompt_logprobs.first_position, m.prompt_logprobs.logprobs[0].token_id) for m in messages[1:3]] == [
        (1, 6),
        (2, 7),
    ]


async def test_a_wait_that_was_too_long_ends_with_timeout_and_what_it_waited_for() -> None:
    async with serving(FakeEngine(script=answer(reason=EndReason.TIMEOUT, error="all blocks are held"))) as running:
        finished = finished_of(await running.generate())[0]
    assert (finished.reason, finished.error) == (pb.FINISH_REASON_TIMEOUT, "all blocks are held")


async def test_a_cancelled_call_aborts_its_request() -> None:
    async with serving(FakeEngine(script=hang)) as running:
        call = running.stub.Generate(make_request())
        await call.read()
        call.cancel()
        await until(lambda: running.engine.tickets[0].aborted)


async def test_outputs_of_a_cancelled_call_are_counted_too() -> None:
    async with serving(FakeEngine(script=hang)) as running:
        registry = running.engine.metrics.registry
        call = running.stub.Generate(make_request(n=3))
        await call.read()
        call.cancel()
        await until(lambda: registry.get_sample_value("octavo_requests_total", {"reason": "cancelled"}) == 3)


async def test_a_closed_connection_aborts_its_requests() -> None:
    async with serving(FakeEngine(script=hang)) as running:
        await running.stub.Generate(make_request()).read()
        await running.channel.close()
        await until(lambda: running.engine.tickets[0].aborted)


async def test_a_passed_deadline_aborts_its_request() -> None:
    async with serving(FakeEngine(script=hang)) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in running.stub.Generate(make_request(), timeout=1):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: running.engine.tickets[0].aborted)


class GoneContext:
    """A call whose client is gone, as grpc.aio shows it until the cancellation arrives."""

    async def write(self, message: pb.GenerateResponse) -> None:
        raise grpc.aio.UsageError("RPC already finished.")

    async def abort(self, *status: object) -> NoReturn:
        raise AssertionError("a status for nobody")


async def test_a_write_to_a_client_that_is_gone_aborts_its_request_and_is_no_fault_of_ours(
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = FakeEngine(script=hang)
    await GenerationService(engine, Metrics()).Generate(make_request(), GoneContext())
    assert engine.tickets[0].aborted
    assert "internal_error" not in "".join(capfd.readouterr())


async def test_abort_ends_a_stream_of_the_same_tenant_alone() -> None:
    async with serving(FakeEngine(script=hang)) as running:
        call = running.stub.Generate(make_request(request_id="r", n=2))
        await call.read()
        other = await running.stub.Abort(pb.AbortRequest(request_id="r", tenant="other"))
        own = await running.stub.Abort(pb.AbortRequest(request_id="r"))
        ends = finished_of(await rest(call))
        assert (other.found, own.found) == (False, True)
        assert [end.reason for end in ends.values()] == [pb.FINISH_REASON_CANCELLED] * 2
        assert not (await running.stub.Abort(pb.AbortRequest(request_id="r"))).found


async def test_a_slow_clients_tokens_merge_and_none_is_lost() -> None:
    batches = 400
    engine = FakeEngine(script=hang, model=make_model(max_model_len=10**6, capacity_tokens=10**6))
    async with serving(engine) as running:
        call = running.stub.Generate(make_request())
        await call.read()
        for _ in range(batches):
            engine.tickets[0].put(text_ids("Paris") * 500)
            await asyncio.sleep(0)
        await until(lambda: engine.tickets[0].num_reads > batches // 2)
        engine.tickets[0].end_all(EndReason.LENGTH)
        messages = await rest(call)
    deltas = [message.delta for message in messages if message.HasField("delta")]
    assert len(deltas) < batches / 4
    assert text_of(messages) == "Paris" * 500 * batches
    assert [delta.first_position for delta in deltas] == [
        sum(len(d.token_ids) for d in deltas[:i]) for i in range(len(deltas))
    ]


async def test_a_slow_clients_stop_string_is_found_at_once() -> None:
    engine = FakeEngine(script=hang, model=make_model(max_model_len=10**6, capacity_tokens=10**6))
    async with serving(engine) as running:
        call = running.stub.Generate(make_request(stop=["DEF"]))
        await call.read()
        for _ in range(200):
            engine.tickets[0].put(text_ids("Paris") * 1000)
            await asyncio.sleep(0)
        engine.tickets[0].put(text_ids("DEF"))
        await until(lambda: engine.tickets[0].finished == [(0, 200_001)])
        call.cancel()


async def test_a_client_that_reads_nothing_has_its_request_aborted_and_its_stream_ended() -> None:
    engine = FakeEngine(script=hang, model=make_model(max_model_len=10**6, capacity_tokens=10**6))
    async with serving(engine, stall_timeout=0.2) as running:
        call = running.stub.Generate(make_request())
        await call.read()
        for _ in range(200):
            engine.tickets[0].put(text_ids("Paris") * 1000)
            await asyncio.sleep(0)
        await until(lambda: engine.tickets[0].aborted)
        # Its id is free again, and a drain would not wait for it.
        await asyncio.wait_for(running.server._service.wait_idle(), 5)
        messages = await rest(call)
    assert finished_of(messages)[0].reason == pb.FINISH_REASON_CANCELLED
    assert text_of(messages) == "Paris" * engine.tickets[0].num_tokens[0]


async def test_64_streams_with_cancellations_all_end() -> None:
    engine = FakeEngine(script=hang)
    async with serving(engine) as running:
        calls = [running.stub.Generate(make_request()) for _ in range(64)]
        for call in calls:
            await call.read()
        for call in calls[::3]:
            call.cancel()
        for ticket in engine.tickets:
            ticket.put(text_ids("Hello"), reason=EndReason.LENGTH)
        left = [call for i, call in enumerate(calls) if i % 3]
        results = await asyncio.gather(*[rest(call) for call in left])
        assert all(text_of(messages) == "Hello" and len(finished_of(messages)) == 1 for messages in results)
        await until(lambda: all(ticket.aborted or all(ticket.ended) for ticket in engine.tickets))
        await asyncio.wait_for(running.server._service.wait_idle(), 5)


async def test_an_engine_that_breaks_off_a_stream_is_an_internal_error_and_the_server_lives() -> None:
    def script(ticket: FakeTicket) -> None:
        ticket.num_tokens[0] = 7  # its first event would begin at position 7
        ticket.put(text_ids("a"))

    async with serving(FakeEngine(script=script)) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.generate()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert running.engine.tickets[0].aborted
        running.engine.script = answer(EOS)
        assert len(finished_of(await running.generate())) == 1


async def test_the_log_has_one_summary_for_each_request_and_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    timings = {"queue_seconds": 0.25, "prefill_seconds": 0.5, "decode_seconds": 1.5}
    script = answer(*text_ids("Hello world"), num_cached_tokens=1, num_preemptions=2, executors=("i1", "i2"), **timings)
    async with serving(FakeEngine(script=script)) as running:
        await running.generate(text="Hello secret", request_id="r9", tenant="t")
    out, err = capfd.readouterr()
    lines = [line for line in (out + err).splitlines() if "r9" in line]
    assert len(lines) == 1
    parts = [f"{name}={seconds}" for name, seconds in timings.items()]
    parts += ["num_output_tokens=2", "num_cached_tokens=1", "num_preemptions=2", "executors=['i1', 'i2']"]
    parts += ["request_id=r9", "tenant=t", "reasons=['stop']", "errors=None"]
    assert [part for part in parts if part not in lines[0]] == []
    assert re.search(r"num_prompt_tokens=\d+ .*\bseconds=\d", lines[0])
    assert "secret" not in out + err


async def test_a_text_is_tokenized_again_for_a_model_that_came_meanwhile() -> None:
    """Ids of the old model's tokenizer went to the new one."""
    other = llama_style()
    async with serving(FakeEngine()) as running:
        service = running.server._service
        tokenize = service._tokenize

        async def tokenize_and_lose_the_model(*arguments: object, **options: object) -> list[int]:
            ids = await tokenize(*arguments, **options)  # type: ignore[arg-type]
            if running.engine.model == make_model():
                running.engine.change(model=make_model(fingerprint="f2"), tokenizer_files=other)
            return ids

        service._tokenize = tokenize_and_lose_the_model  # type: ignore[method-assign]
        await running.generate(text="Hello world")
    (ticket,) = running.engine.tickets
    expected = Tokenizer(other).encode("Hello world")
    assert list(ticket.submission.prompt_token_ids) == expected
    assert expected != text_ids("Hello world")


@pytest.mark.parametrize(("num_turns", "beside"), [(2, False), (100, True)])
async def test_many_turns_are_rendered_beside_the_loop_however_short_they_are(
    monkeypatch: pytest.MonkeyPatch, num_turns: int, beside: bool
) -> None:
    """Empty ones counted for nothing, so a message full of them held up everybody."""
    threads: list[str] = []
    encode_chat = Tokenizer.encode_chat

    def noting(self: Tokenizer, *arguments: Any, **options: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode_chat(self, *arguments, **options)[:10]

    monkeypatch.setattr(Tokenizer, "encode_chat", noting)
    turns = [pb.ChatMessage(role="user", content="")] * num_turns
    async with serving(FakeEngine()) as running:
        await running.generate(chat=pb.Chat(messages=turns))
    assert [name.startswith("tokenize") for name in threads] == [beside]
