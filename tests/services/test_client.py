"""The client library, both kinds, against a real server around a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeVar

import pytest
import pytest_asyncio
from octavo.client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    Delta,
    ExecutorState,
    Finished,
    FinishReason,
    InvalidRequest,
    MessageTooLarge,
    OctavoError,
    QueueFull,
    RequestExists,
    RequestFailed,
    ServerFault,
    ServerUnavailable,
    Started,
    WaitingRequests,
)
from octavo.results import event_of, load_of
from octavo.v1 import generation_pb2 as pb

from scheduler.core.plan import PromptLogprobs, TokenLogprobs
from scheduler.outputs import Draining, EndReason
from scheduler.outputs import QueueFull as EngineQueueFull
from tests.services.fake_engine import EOS, FakeTicket, answer, hang, text_ids
from tests.services.harness import Running, serving, until

ResultT = TypeVar("ResultT")


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Running]:
    async with serving() as running:
        yield running


@pytest_asyncio.fixture
async def client(running: Running) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(running.address) as client:
        yield client


async def blocking(running: Running, use: Callable[[Client], ResultT]) -> ResultT:
    """Uses a blocking client beside the event loop that serves it."""

    def run() -> ResultT:
        with Client(running.address) as client:
            return use(client)

    return await asyncio.to_thread(run)


async def test_events_of_a_stream_are_typed(client: AsyncClient) -> None:
    events = [event async for event in client.generate(chat="Hi", seed=7, max_tokens=5)]
    assert isinstance(events[0], Started)
    assert events[0].seed == 7
    assert "".join(event.text for event in events if isinstance(event, Delta)) == "Hello world"
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.stop_token_id, end.stop) == (FinishReason.STOP, EOS, None)


async def test_the_blocking_client_sees_the_same_events(running: Running, client: AsyncClient) -> None:
    theirs = await blocking(running, lambda client: list(client.generate(text="Hi", seed=7, request_id="r")))
    assert theirs == [event async for event in client.generate(text="Hi", seed=7, request_id="r")]


@pytest.mark.parametrize("kind", ["async", "blocking"])
async def test_a_completion_gathers_everything(running: Running, client: AsyncClient, kind: str) -> None:
    running.engine.script = answer(*text_ids("Hello"), reason=EndReason.LENGTH, num_cached_tokens=3, queue_seconds=0.5)
    if kind == "async":
        completion = await client.complete(text="a a", n=2, request_id="r")
    else:
        completion = await blocking(running, lambda client: client.complete(text="a a", n=2, request_id="r"))
    assert (completion.request_id, completion.text, len(completion.outputs)) == ("r", "Hello", 2)
    assert completion.token_ids == tuple(text_ids("Hello"))
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.usage.num_cached_tokens == 3
    assert completion.timings.queue == 0.5


async def test_log_probabilities_have_texts(running: Running, client: AsyncClient) -> None:
    hello, world = text_ids("Hello")[0], text_ids(" world")[0]

    def script(ticket: FakeTicket) -> None:
        entry = TokenLogprobs(-0.5, 1, ((hello, -0.5), (world, -1.0)))
        ticket.put(prompt_logprobs=PromptLogprobs(1, (TokenLogprobs(-2.0, 3, ()),)))
        ticket.put([hello], logprobs=[entry], reason=EndReason.LENGTH)

    running.engine.script = script
    completion = await client.complete(token_ids=[hello, world], logprobs=2, prompt_logprobs=0)
    (entry,) = completion.outputs[0].logprobs
    assert (entry.token_id, entry.text, entry.rank, entry.logprob) == (hello, "Hello", 1, -0.5)
    assert [(top.text, top.logprob) for top in entry.top] == [("Hello", -0.5), (" world", -1.0)]
    (prompt,) = completion.prompt_logprobs
    assert (prompt.token_id, prompt.text, prompt.rank) == (world, " world", 3)


async def test_all_arguments_reach_the_engine(running: Running, client: AsyncClient) -> None:
    await client.complete(
        token_ids=[1, 2], temperature=0.5, top_k=4, top_p=0.5, min_p=0.25, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=2, logit_bias={3: 1.5}, allowed_token_ids=[5, 4, 4], seed=9, n=2, max_tokens=7, min_tokens=1,
        stop_token_ids=[8], ignore_eos=True, logprobs=1, prompt_logprobs=2, priority=-3, cache_salt="s",
        queue_timeout=1.5, tenant="t",
    )  # fmt: skip
    submission = running.engine.tickets[0].submission
    sampling = submission.sampling
    assert submission.prompt_token_ids == (1, 2)
    assert (submission.n, submission.max_tokens, submission.priority) == (2, 7, -3)
    assert (submission.cache_salt, submission.queue_timeout, submission.tenant) == ("1:t:s", 1.5, "t")
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 4, 0.5, 0.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 2)
    assert (sampling.logit_bias, sampling.allowed_token_ids, sampling.seed) == ({3: 1.5}, (4, 5), 9)
    assert (sampling.min_tokens, sampling.stop_token_ids) == (1, frozenset({8}))
    assert (sampling.logprobs, sampling.prompt_logprobs) == (1, 2)


async def test_absent_arguments_take_the_models_defaults(running: Running, client: AsyncClient) -> None:
    await client.complete(token_ids=[1, 2], temperature=None, seed=None)
    submission = running.engine.tickets[0].submission
    assert submission.sampling.temperature == 0.2
    assert submission.sampling.top_p == 0.9
    assert submission.sampling.stop_token_ids == frozenset({EOS})
    assert (submission.n, submission.max_tokens, submission.queue_timeout) == (1, 254, 60.0)


@pytest.mark.parametrize("kind", ["async", "blocking"])
async def test_the_other_calls(running: Running, client: AsyncClient, kind: str) -> None:
    if kind == "async":
        ids = await client.tokenize("Hello world")
        chat = await client.tokenize(chat=[("user", "a"), {"role": "assistant", "content": "G"}])
        text, model, load = await client.detokenize(ids), await client.model(), await client.load()
        found, healthy = await client.abort("unknown"), await client.health()
    else:
        ids = await blocking(running, lambda client: client.tokenize("Hello world"))
        chat = await blocking(
            running, lambda client: client.tokenize(chat=[("user", "a"), {"role": "assistant", "content": "G"}])
        )
        text = await blocking(running, lambda client: client.detokenize(ids))
        model = await blocking(running, lambda client: client.model())
        load = await blocking(running, lambda client: client.load())
        found = await blocking(running, lambda client: client.abort("unknown"))
        healthy = await blocking(running, lambda client: client.health())
    assert ids == text_ids("Hello world")
    assert chat == text_ids("<|user|>a<|end|><|assistant|>G<|end|><|assistant|>")
    assert text == "Hello world"
    assert (model.name, model.max_model_len, model.has_chat_template) == ("tiny", 256, True)
    assert (model.default_sampling.temperature, model.default_sampling.top_k) == (pytest.approx(0.2), 0)
    assert (load.executors[0].state, load.executors[0].num_free_blocks) == (ExecutorState.READY, 4)
    assert (load.queue_length, load.waiting, load.draining) == (
        2,
        (WaitingRequests("default", 0, 2, "no free block"),),
        False,
    )
    assert (found, healthy) == (False, True)


async def test_a_bad_value_names_field_and_value(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling.top_p = 2.0: must be in \(0, 1\]") as caught:
        await client.complete(text="Hi", top_p=2)
    assert (caught.value.field, caught.value.value) == ("sampling.top_p", "2.0")


@pytest.mark.parametrize(
    ("refusal", "kind", "sentence"),
    [
        (EngineQueueFull("1 requests wait", 1.5), QueueFull, "the queue is full (1 requests wait)"),
        (Draining(), ServerUnavailable, "the scheduler is draining and takes no new request"),
        (ZeroDivisionError(), ServerFault, "INTERNAL: internal error in request 'r'; the scheduler's log has more"),
    ],
)
async def test_refusals_are_typed(
    running: Running, client: AsyncClient, refusal: Exception, kind: type[OctavoError], sentence: str
) -> None:
    running.engine.refusal = refusal
    with pytest.raises(kind) as caught:
        await client.complete(text="Hi", request_id="r")
    assert str(caught.value) == sentence
    assert getattr(caught.value, "retry_after", 1.5) == 1.5
    with pytest.raises(kind):
        await blocking(running, lambda client: client.complete(text="Hi", request_id="r"))


async def test_a_health_name_that_nobody_knows_is_no_unknown_executor(client: AsyncClient) -> None:
    with pytest.raises(ServerFault, match="NOT_FOUND"):
        await client.health("somebody")


async def test_a_request_id_in_flight_is_taken(running: Running, client: AsyncClient) -> None:
    running.engine.script = hang
    async with aclosing(client.generate(text="Hi", request_id="r")) as stream:
        await anext(stream)
        with pytest.raises(RequestExists, match="'r' in flight"):
            await client.complete(text="Hi", request_id="r")


async def test_a_passed_deadline_is_named_and_aborts(running: Running, client: AsyncClient) -> None:
    running.engine.script = hang
    with pytest.raises(DeadlineExceeded, match=r"not done within 1 s"):
        await client.complete(text="Hi", timeout=1)
    await until(lambda: running.engine.tickets[0].aborted)


async def test_closing_the_iterator_cancels_the_request(running: Running, client: AsyncClient) -> None:
    running.engine.script = hang
    async with aclosing(client.generate(text="Hi")) as stream:
        await anext(stream)
    await until(lambda: running.engine.tickets[0].aborted)


async def test_leaving_the_blocking_iterator_cancels_the_request(running: Running) -> None:
    running.engine.script = hang

    def leave(client: Client) -> None:
        for _ in client.generate(text="Hi"):
            break

    await blocking(running, leave)
    await until(lambda: running.engine.tickets[0].aborted)


async def test_abort_ends_the_stream_with_cancelled(running: Running, client: AsyncClient) -> None:
    running.engine.script = hang
    stream = client.generate(text="Hi", request_id="r")
    await anext(stream)
    assert await client.abort("r")
    end = await anext(stream)
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.CANCELLED


async def test_a_failed_output_fails_the_completion_and_keeps_its_text(running: Running, client: AsyncClient) -> None:
    running.engine.script = answer(*text_ids("Hello"), reason=EndReason.ERROR, error="NaN logits")
    with pytest.raises(RequestFailed, match="output 0 ended with ERROR: NaN logits") as caught:
        await client.complete(text="Hi")
    assert caught.value.completion.text == "Hello"


def test_what_a_newer_server_says_is_no_fault() -> None:
    finished = pb.GenerateResponse(finished=pb.Finished(reason=99))  # type: ignore[arg-type]
    event = event_of(finished)
    assert isinstance(event, Finished)
    assert event.reason is FinishReason.UNKNOWN
    load = load_of(pb.GetLoadResponse(executors=[pb.ExecutorLoad(state=99)]))  # type: ignore[arg-type]
    assert load.executors[0].state is ExecutorState.UNSPECIFIED
    assert event_of(pb.GenerateResponse()) is None


async def test_nobody_at_the_address_is_a_sentence() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ServerUnavailable, match=r"no server can be reached at 127.0.0.1:1"):
            await client.model()


async def test_a_message_past_the_bound_is_named() -> None:
    async with serving(max_message_bytes=1000) as running, AsyncClient(running.address) as client:
        with pytest.raises(MessageTooLarge, match="larger than max"):
            await client.complete(text="x" * 2000)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "exactly one of text=, token_ids= and chat= is needed; given: none"),
        ({"text": "a", "chat": "b"}, ValueError, r"given: \['chat', 'text'\]"),
        ({"chat": [("user", "\udcff")]}, ValueError, r"the message \('user', '.*udcff'\) cannot be sent"),
        ({"text": "a", "max_tokens": -1}, ValueError, "max_tokens=-1 cannot be sent"),
        ({"text": "a", "temperature": "hot"}, ValueError, "temperature='hot' cannot be sent"),
        ({"text": "a", "tempurature": 1}, TypeError, "unknown argument 'tempurature'"),
    ],
)
def test_arguments_that_cannot_be_sent_fail_at_once(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(error, match=message):
        client.generate(**arguments)  # type: ignore[arg-type]
