"""Every field that can be wrong: its status, the field's name and the value, and the server goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from octavo.v1 import generation_pb2 as pb

from scheduler.outputs import DoesNotFit, ExecutorLost, NoExecutor, QueueFull
from tests.services.fake_engine import EOS, FakeEngine, answer, hang, make_model
from tests.services.harness import Refusal, Running, make_request, refusal_of, serving

VOCAB = make_model().vocab_size
NAN, INF = float("nan"), float("inf")


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Running]:
    async with serving() as running:
        yield running


async def refusal(running: Running, request: pb.GenerateRequest) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in running.stub.Generate(request):
            pass
    return refusal_of(caught.value)


def sampling(**fields: object) -> dict[str, object]:
    return {"sampling": pb.SamplingParams(**fields)}  # type: ignore[arg-type]


def ids(*token_ids: int) -> dict[str, object]:
    return {"token_ids": pb.TokenIds(ids=token_ids)}


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"text": ""}, "text", "the prompt has no tokens"),
        ({"text": "x" * 10**6}, "text", "'1000000 bytes': no text of more than"),
        (
            {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * 10**6)])},
            "chat",
            "no text of more than",
        ),
        (
            {"n": 2, "beam_width": 4, **sampling(allowed_token_ids=[7, 7], temperature=0)},
            "sampling.allowed_token_ids",
            "= [7]: fewer than the 2 outputs of the search",
        ),
        (ids(), "token_ids.ids", "the prompt has no tokens"),
        (ids(1, VOCAB), "token_ids.ids[1]", f"= {VOCAB}: not in the vocabulary"),
        (ids(2**32 - 1), "token_ids.ids[0]", "= 4294967295: not in the vocabulary"),
        (ids(*[1] * 256), "token_ids.ids", "'256 tokens': no room for an output: max_model_len is 256, and the KV"),
        ({"chat": pb.Chat()}, "chat.messages", "at least one message"),
        ({"chat": pb.Chat(messages=[pb.ChatMessage(content="x")])}, "chat.messages[0].role", "1 to 128 characters"),
        (
            {"chat": pb.Chat(messages=[pb.ChatMessage(role="x" * 129)])},
            "chat.messages[0].role",
            "must have 1 to 128 characters",
        ),
        (
            {"chat": pb.Chat(messages=[pb.ChatMessage(role="user")] * 257)},
            "chat.messages",
            "'257 messages': more than the 256 tokens of max_model_len",
        ),
        (sampling(temperature=-0.5), "sampling.temperature", "= -0.5: must be in [0, 100]"),
        (sampling(temperature=101), "sampling.temperature", "= 101.0: must be in [0, 100]"),
        (sampling(temperature=NAN), "sampling.temperature", "= nan: must be"),
        (sampling(temperature=INF), "sampling.temperature", "= inf: must be"),
        (sampling(top_p=0), "sampling.top_p", "= 0.0: must be in (0, 1]"),
        (sampling(top_p=1.5), "sampling.top_p", "= 1.5: must be in (0, 1]"),
        (sampling(top_p=NAN), "sampling.top_p", "= nan: must be"),
        (sampling(min_p=-1), "sampling.min_p", "= -1.0: must be in [0, 1]"),
        (sampling(min_p=2), "sampling.min_p", "= 2.0: must be in [0, 1]"),
        (sampling(presence_penalty=3), "sampling.presence_penalty", "= 3.0: must be in [-2, 2]"),
        (sampling(frequency_penalty=-INF), "sampling.frequency_penalty", "= -inf: must be in [-2, 2]"),
        (sampling(repetition_penalty=0), "sampling.repetition_penalty", "= 0.0: must be in (0, 10]"),
        (sampling(repetition_penalty=11), "sampling.repetition_penalty", "= 11.0: must be in (0, 10]"),
        (sampling(logit_bias={VOCAB: 1.0}), f"sampling.logit_bias[{VOCAB}]", "is not in the vocabulary"),
        (sampling(logit_bias={1: 101.0}), "sampling.logit_bias[1]", "= 101.0: must be in [-100, 100]"),
        (sampling(logit_bias={1: NAN}), "sampling.logit_bias[1]", "= nan: must be"),
        (sampling(logit_bias=dict.fromkeys(range(1025), 0.0)), "sampling.logit_bias", "1025 entries"),
        (sampling(allowed_token_ids=[1, VOCAB]), "sampling.allowed_token_ids[1]", "not in the vocabulary"),
        ({"n": 0}, "n", "= 0: must be in [1, 8]"),
        ({"n": 9}, "n", "= 9: must be in [1, 8]"),
        ({"beam_width": 0}, "beam_width", "= 0: must be in [n, 8], and n is 1"),
        ({"n": 3, "beam_width": 2}, "beam_width", "= 2: must be in [n, 8], and n is 3"),
        ({"beam_width": 9}, "beam_width", "= 9: must be in [n, 8]"),
        ({"beam_width": 2, **sampling(temperature=1)}, "sampling.temperature", "no meaning with beam_width"),
        ({"beam_width": 2, **sampling(top_k=5)}, "sampling.top_k", "no meaning with beam_width"),
        ({"beam_width": 2, **sampling(seed=1)}, "sampling.seed", "no meaning with beam_width"),
        ({"beam_width": 2, "stop": ["x"]}, "stop", "not offered with beam_width"),
        ({"beam_width": 2, "logprobs": 1}, "logprobs", "not offered with beam_width"),
        ({"max_tokens": 0}, "max_tokens", "= 0: must be at least 1"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "= 6: more than the 5 tokens that are possible"),
        ({"min_tokens": 1, **sampling(allowed_token_ids=[EOS])}, "min_tokens", "leaves stop tokens alone"),
        ({"stop": [""]}, "stop[0]", "1 to 256 characters"),
        ({"stop": ["a", "x" * 257]}, "stop[1]", "1 to 256 characters"),
        ({"stop": list("abcdefghijklmnopq")}, "stop", "'17 strings': at most 16"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids[0]", f"= {VOCAB}: not in the vocabulary"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids", "'129 tokens': at most 128"),
        ({"logprobs": 21}, "logprobs", "= 21: must be in [0, 20]"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "= 21: must be in [0, 20]"),
        ({"cache_salt": "x" * 257}, "cache_salt", "at most 256 characters"),
        ({"request_id": ""}, "request_id", "1 to 128 printable characters"),
        ({"request_id": "a\nb"}, "request_id", "1 to 128 printable characters"),
        ({"tenant": "x" * 129}, "tenant", "1 to 128 printable characters"),
        ({"queue_timeout": Duration(seconds=-1)}, "queue_timeout", "'-1 s': must be in (0 s"),
        ({"queue_timeout": Duration(seconds=10**11)}, "queue_timeout", "must be in (0 s, 86400 s]"),
    ],
)
async def test_a_wrong_field_is_named_with_its_value(
    running: Running, fields: dict[str, object], field: str, message: str
) -> None:
    refused = await refusal(running, make_request(**fields))
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.field, refused.metadata["field"]) == (field, field)
    assert message in refused.message
    assert not running.engine.tickets


async def test_a_request_without_a_prompt_is_told_so(running: Running) -> None:
    refused = await refusal(running, pb.GenerateRequest())
    assert (refused.code, refused.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")


async def test_a_prompt_larger_than_the_kv_cache_is_refused_at_once_naming_both_numbers() -> None:
    async with serving(FakeEngine(model=make_model(max_model_len=4096, capacity_tokens=112))) as running:
        refused = await refusal(running, make_request(**ids(*[1] * 200)))
        assert "200 tokens" in refused.message
        assert "max_model_len is 4096, and the KV cache holds 112 tokens" in refused.message
        assert len(await running.generate()) > 0


async def test_a_conversation_that_the_template_refuses_is_an_invalid_argument() -> None:
    from tests.services.tokenizers_for_tests import byte_level

    files = byte_level("{{ raise_exception('roles must alternate') }}")
    async with serving(FakeEngine(tokenizer_files=files)) as running:
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")])
        refused = await refusal(running, make_request(chat=chat))
        assert (refused.code, refused.field) == (grpc.StatusCode.INVALID_ARGUMENT, "chat")
        assert "roles must alternate" in refused.message


@pytest.mark.parametrize(
    ("error", "code", "reason", "message"),
    [
        (NoExecutor("refused"), grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR", "no executor: refused"),
        (DoesNotFit("9 > 8"), grpc.StatusCode.INVALID_ARGUMENT, "DOES_NOT_FIT", "9 > 8"),
        (ExecutorLost("it died"), grpc.StatusCode.UNAVAILABLE, "EXECUTOR_LOST", "the executor was lost: it died"),
    ],
)
async def test_what_the_engine_refuses_has_its_status(
    error: Exception, code: grpc.StatusCode, reason: str, message: str
) -> None:
    async with serving(FakeEngine(refusal=error)) as running:
        refused = await refusal(running, make_request())
        assert (refused.code, refused.reason, refused.message) == (code, reason, message)


async def test_a_full_queue_says_when_to_come_back() -> None:
    async with serving(FakeEngine(refusal=QueueFull("9 requests wait", 2.5))) as running:
        refused = await refusal(running, make_request())
        assert (refused.code, refused.retry_seconds) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 2.5)
        assert refused.message == "the queue is full (9 requests wait)"


async def test_before_the_first_executor_calls_are_unavailable() -> None:
    async with serving(FakeEngine(model=None, ready=False)) as running:
        refused = await refusal(running, make_request())
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.GetModel(pb.GetModelRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_tokenizer_that_cannot_be_read_makes_calls_unavailable_with_the_reason() -> None:
    async with serving(FakeEngine(tokenizer_files={})) as running:
        refused = await refusal(running, make_request())
        assert refused.message == "no executor: the executor sent no tokenizer.json"


async def test_a_fault_of_ours_is_internal_with_the_requests_id_and_the_server_lives(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    running.engine.refusal = ZeroDivisionError("secret")
    refused = await refusal(running, make_request(request_id="r7"))
    assert (refused.code, refused.metadata) == (grpc.StatusCode.INTERNAL, {"request_id": "r7"})
    assert "secret" not in refused.message
    running.engine.refusal = None
    assert len(await running.generate(request_id="r7")) > 0


async def test_a_request_id_in_flight_is_taken_for_its_tenant_alone() -> None:
    async with serving(FakeEngine(script=hang)) as running:
        first = running.stub.Generate(make_request(request_id="r"))
        await first.read()
        refused = await refusal(running, make_request(request_id="r"))
        assert refused.code is grpc.StatusCode.ALREADY_EXISTS
        assert refused.metadata == {"tenant": "default", "request_id": "r"}
        other = running.stub.Generate(make_request(request_id="r", tenant="other"))
        assert (await other.read()).started.request_id == "r"
        first.cancel()
        other.cancel()


async def test_a_request_id_is_free_again_after_its_request(running: Running) -> None:
    running.engine.script = answer(1)
    await running.generate(request_id="r")
    assert len(await running.generate(request_id="r")) > 0


async def test_a_message_past_the_bound_is_resource_exhausted_with_both_sizes() -> None:
    async with serving(max_message_bytes=1000) as running:
        with pytest.raises(grpc.aio.AioRpcError, match=r"larger than max \(\d+ vs. 1000\)") as caught:
            async for _ in running.stub.Generate(make_request(text="x" * 2000)):
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("method", "request_message", "field"),
    [
        ("Tokenize", pb.TokenizeRequest(), "prompt"),
        ("Tokenize", pb.TokenizeRequest(chat=pb.Chat()), "chat.messages"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[VOCAB]), "token_ids[0]"),
        ("Abort", pb.AbortRequest(), "request_id"),
    ],
)
async def test_the_other_calls_name_a_wrong_field_too(
    running: Running, method: str, request_message: object, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(running.stub, method)(request_message)
    assert refusal_of(caught.value).field == field
