"""Any bytes that parse as a GenerateRequest: a proper stream or a proper status, and the server goes on."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo.v1 import generation_pb2 as pb

from tests.services.fake_engine import EOS, FakeEngine, answer, make_model, text_ids
from tests.services.harness import Running, finished_of, refusal_of, serving, text_of

VOCAB = make_model().vocab_size
EXPECTED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS}

ids = st.integers(0, VOCAB + 1) | st.integers(0, 2**32 - 1)
counts = st.integers(0, 10) | st.integers(0, 2**32 - 1)
floats = st.floats(width=32) | st.floats(0, 1, width=32)
texts = st.text(max_size=20)


def message(kind: type, **fields: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """A message with any of these fields set, and any absent."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: kind(**values))


sampling = message(
    pb.SamplingParams,
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), floats
    ),
    top_k=counts,
    logit_bias=st.dictionaries(ids, floats, max_size=3),
    allowed_token_ids=st.lists(ids, max_size=3),
    seed=st.integers(0, 2**64 - 1),
)
chat = message(
    pb.Chat,
    messages=st.lists(message(pb.ChatMessage, role=texts, content=texts), max_size=3),
    add_generation_prompt=st.booleans(),
)
prompts = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"text": texts}),
    st.fixed_dictionaries({"token_ids": st.lists(ids, max_size=5).map(lambda ids: pb.TokenIds(ids=ids))}),
    st.fixed_dictionaries({"chat": chat}),
)
requests = st.builds(
    lambda prompt, rest: pb.GenerateRequest(**prompt, **rest),
    prompts,
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("request_id", "tenant", "cache_salt"), texts),
            **dict.fromkeys(("n", "beam_width", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"), counts),
            **dict.fromkeys(("include_stop", "ignore_eos", "echo"), st.booleans()),
            "sampling": sampling,
            "stop": st.lists(texts, max_size=18),
            "stop_token_ids": st.lists(ids, max_size=3),
            "priority": st.integers(-(2**31), 2**31 - 1),
            "queue_timeout": st.builds(
                Duration, seconds=st.integers(-(2**63), 2**63 - 1), nanos=st.integers(-(2**31), 2**31 - 1)
            ),
        },
    ),
)


async def outcome(
    running: Running, request: pb.GenerateRequest
) -> tuple[list[pb.GenerateResponse], grpc.aio.AioRpcError | None]:
    messages = []
    try:
        async for message in running.stub.Generate(request):
            messages.append(message)
    except grpc.aio.AioRpcError as error:
        return messages, error
    return messages, None


async def check(running: Running, request: pb.GenerateRequest) -> None:
    """The request is answered properly, and a good one after it too."""
    messages, error = await outcome(running, request)
    if error is not None:
        assert error.code() in EXPECTED, error
        assert refusal_of(error).message
    else:
        n = request.n if request.HasField("n") else 1
        assert [m.WhichOneof("event") for m in messages].count("started") == 1
        assert sorted(finished_of(messages)) == list(range(n))
    assert text_of(await running.generate(text="Hello")) == "Hello world"


def test_any_request_is_answered_properly_and_the_server_goes_on() -> None:
    loop = asyncio.new_event_loop()
    served = serving(FakeEngine(script=answer(*text_ids("Hello world"), EOS)))
    running = loop.run_until_complete(served.__aenter__())

    @settings(max_examples=400, deadline=None)
    @given(requests)
    def fuzz(request: pb.GenerateRequest) -> None:
        loop.run_until_complete(check(running, request))

    try:
        fuzz()
    finally:
        loop.run_until_complete(served.__aexit__(None, None, None))
        loop.close()


async def test_bytes_that_are_no_message_are_a_status_and_the_server_goes_on() -> None:
    async with serving() as running:
        call = running.channel.unary_stream("/octavo.v1.Generation/Generate")
        for junk in (b"\xff" * 20, b"\x08", bytes(range(256))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(junk).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "/octavo.v1.Generation/Generate" in refusal_of(caught.value).message
        assert text_of(await running.generate(text="Hello")) == "Hello world"
