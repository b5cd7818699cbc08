"""The Execute stream over real gRPC on loopback, with the fake model behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc as pb_grpc

from executor.runner import Runner
from executor.served import GenerationDefaults, ServedModel
from executor.service import PROTOCOL_VERSION, ExecutorService, ServiceOptions
from executor.step_thread import StepThread
from tests.executor.factories import FakeModel, create_limits, greedy

INCARNATION = "this-lifetime"
PROMPT = [3, 1, 4, 1, 5, 9]
LIMIT = 20.0  # seconds for anything that must come

TOKENIZER = {"tokenizer.json": b"x" * (2 * 2**20 + 5), "chat_template.jinja": b"{{ messages }}"}


def served_model() -> ServedModel:
    return ServedModel(
        name="fake",
        fingerprint="f00d",
        limits=create_limits(),
        dtype="float32",
        kv_dtype="float32",
        eos_token_ids=(2, 3),
        defaults=GenerationDefaults(temperature=0.5),
        deterministic=True,
        device="cpu (fake)",
        tokenizer_files=TOKENIZER,
    )


class Executor:
    """A served fake model and a client of it."""

    def __init__(self, service: ExecutorService, steps: StepThread, model: FakeModel, address: str) -> None:
        self.service = service
        self.steps = steps
        self.model = model
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = pb_grpc.ExecutorStub(self.channel)  # type: ignore[no-untyped-call]

    def stream(self) -> Stream:
        return Stream(self.stub.Execute())

    async def open(self, **hello: object) -> Stream:
        stream = self.stream()
        await stream.hello(**hello)
        assert (await stream.read()).WhichOneof("message") == "ready"
        return stream

    async def describe(self) -> pb.DescribeResponse:
        return await self.stub.Describe(pb.DescribeRequest(), timeout=LIMIT)


class Stream:
    """The scheduler's side of one Execute call."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.call = call

    async def hello(self, **fields: object) -> None:
        values = {
            "scheduler_id": "one",
            "session": 1,
            "incarnation": INCARNATION,
            "protocol_version": PROTOCOL_VERSION,
            **fields,
        }
        await self.call.write(pb.ToExecutor(hello=pb.Hello(**values)))

    async def plan(self, **columns: object) -> None:
        await self.call.write(pb.ToExecutor(plan=pb.BatchPlan(**columns)))

    async def read(self, skip_heartbeats: bool = True) -> pb.FromExecutor:
        while True:
            message = await asyncio.wait_for(self.call.read(), LIMIT)
            assert message is not grpc.aio.EOF, await self.call.details()
            if not (skip_heartbeats and message.WhichOneof("message") == "heartbeat"):
                return message

    async def result(self) -> pb.StepResult:
        message = await self.read()
        assert message.WhichOneof("message") == "result"
        return message.result

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ended, once everything before has been read."""
        while await asyncio.wait_for(self.read_or_end(), LIMIT):
            pass
        return await self.call.code(), await self.call.details()

    async def read_or_end(self) -> bool:
        try:
            return await self.call.read() is not grpc.aio.EOF
        except grpc.aio.AioRpcError:
            return False


def new(sequence_id: int = 1, token_ids: list[int] | None = None, block_ids: list[int] | None = None) -> pb.NewSequence:
    tokens = PROMPT if token_ids is None else token_ids
    return pb.NewSequence(
        sequence_id=sequence_id, token_ids=tokens, num_prompt_tokens=len(tokens), block_ids=block_ids or [5, 9]
    )


@asynccontextmanager
async def serving(loaded: bool = True, **options: float) -> AsyncIterator[Executor]:
    limits = create_limits()
    model = FakeModel(limits)
    steps = StepThread(Runner(model, model, limits))
    steps.start()
    service = ExecutorService(ServiceOptions("fake", "cpu (fake)", INCARNATION, **options))
    if loaded:
        service.serve(served_model(), steps)
    server = grpc.aio.server()
    pb_grpc.add_ExecutorServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    health_servicer = health.aio.HealthServicer()
    await health_servicer.set("liveness", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    executor = Executor(service, steps, model, f"127.0.0.1:{port}")
    try:
        yield executor
    finally:
        model.gate.set()
        await executor.channel.close()
        await server.stop(0)
        assert steps.stop(LIMIT)


async def eventually(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT):
        while True:
            outcome = holds()
            if await outcome if asyncio.iscoroutine(outcome) else outcome:
                return
            await asyncio.sleep(0.01)


async def test_a_session_from_hello_to_its_end() -> None:
    async with serving() as executor:
        stream = executor.stream()
        await stream.hello(session=7)
        ready = (await stream.read()).ready
        assert ready == pb.Ready(session=7, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
        await stream.plan(step_id=1, new=[new()], row_sequences=[1], row_tokens=[6])
        await stream.plan(step_id=2, row_sequences=[1], row_tokens=[1])
        results = [await stream.result(), await stream.result()]
        assert [list(result.token_ids) for result in results] == [[token] for token in greedy(PROMPT, 2)]
        assert [result.step_id for result in results] == [1, 2]
        assert results[0].timings.forward_ns > 0
        await stream.call.done_writing()
        assert await stream.status() == (grpc.StatusCode.OK, "")


async def test_plans_in_flight_are_answered_before_a_closed_stream_ends() -> None:
    async with serving() as executor:
        stream = await executor.open()
        await stream.plan(step_id=1, new=[new()], row_sequences=[1], row_tokens=[6])
        await stream.call.done_writing()
        assert list((await stream.result()).token_ids) == greedy(PROMPT, 1)


async def test_describe_tells_the_model_and_the_owner() -> None:
    async with serving() as executor:
        await executor.open(scheduler_id="me")
        described = await executor.describe()
        assert (described.ready, described.owner, described.incarnation) == (True, "me", INCARNATION)
        assert (described.fingerprint, described.vocab_size, described.num_blocks) == ("f00d", 50, 64)
        assert (list(described.eos_token_ids), described.deterministic) == ([2, 3], True)
        assert described.defaults.temperature == 0.5
        assert not described.defaults.HasField("top_p")


async def test_describe_before_the_model_is_there() -> None:
    async with serving(loaded=False) as executor:
        described = await executor.describe()
        assert (described.ready, described.model_name, described.protocol_version) == (False, "fake", PROTOCOL_VERSION)
        stream = executor.stream()
        await stream.hello()
        assert await stream.status() == (grpc.StatusCode.UNAVAILABLE, "the model is loading")
        with pytest.raises(grpc.aio.AioRpcError, match="the model is loading"):
            [chunk async for chunk in executor.stub.GetTokenizer(pb.GetTokenizerRequest())]


async def test_tokenizer_files_come_in_chunks_of_at_most_a_mebibyte() -> None:
    async with serving() as executor:
        chunks = [chunk async for chunk in executor.stub.GetTokenizer(pb.GetTokenizerRequest())]
        assert [(chunk.file, len(chunk.data)) for chunk in chunks] == [
            ("tokenizer.json", 2**20),
            ("tokenizer.json", 2**20),
            ("tokenizer.json", 5),
            ("chat_template.jinja", 14),
        ]


async def test_a_wrong_incarnation_is_refused_naming_both() -> None:
    async with serving() as executor:
        stream = executor.stream()
        await stream.hello(incarnation="another")
        assert await stream.status() == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "incarnation 'another' was expected, this is 'this-lifetime'",
        )


async def test_a_wrong_protocol_version_is_refused_naming_both() -> None:
    async with serving() as executor:
        stream = executor.stream()
        await stream.hello(protocol_version=9)
        assert await stream.status() == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "protocol version 9 was asked for, this executor speaks 1",
        )


@pytest.mark.parametrize("scheduler_id", ["", "x" * 129, "a\nb", "\x1b[2J"])
async def test_a_scheduler_must_have_an_id_that_can_be_logged(scheduler_id: str) -> None:
    """An empty id owned the lease and Describe said that nobody did; a long one came back in every refusal."""
    async with serving() as executor:
        stream = executor.stream()
        await stream.hello(scheduler_id=scheduler_id)
        assert await stream.status() == (
            grpc.StatusCode.INVALID_ARGUMENT,
            f"scheduler_id has {len(scheduler_id)} characters: 1 to 128 printable ones are needed",
        )
        assert (await executor.describe()).owner == ""


async def test_a_scheduler_id_of_128_characters_is_taken() -> None:
    async with serving() as executor:
        await executor.open(scheduler_id="é" * 128)
        assert (await executor.describe()).owner == "é" * 128


async def test_a_plan_with_more_than_any_scheduler_sends_ends_the_stream_naming_both_numbers() -> None:
    async with serving() as executor:
        stream = await executor.open()
        await stream.plan(step_id=1, new=[new(i) for i in range(1, 10)])
        assert await stream.status() == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "9 new sequences exceed max_num_seqs 8",
        )


async def test_another_scheduler_is_refused_naming_the_owner_until_the_owner_leaves() -> None:
    async with serving() as executor:
        owner = await executor.open(scheduler_id="owner")
        other = executor.stream()
        await other.hello(scheduler_id="other", session=9)
        assert await other.status() == (
            grpc.StatusCode.ALREADY_EXISTS,
            "this executor is owned by scheduler 'owner'",
        )
        owner.call.cancel()
        await eventually(lambda: described_owner(executor, ""))
        await executor.open(scheduler_id="other")


async def described_owner(executor: Executor, owner: str) -> bool:
    return (await executor.describe()).owner == owner


async def test_a_higher_session_takes_over_and_the_old_stream_says_so() -> None:
    async with serving() as executor:
        old = await executor.open(session=1)
        await old.plan(step_id=1, new=[new()], row_sequences=[1], row_tokens=[6])
        await old.result()
        fresh = await executor.open(session=2)
        assert await old.status() == (grpc.StatusCode.ABORTED, "session 2 of the same scheduler took over")
        await fresh.plan(step_id=1, row_sequences=[1], row_tokens=[1])
        assert await fresh.status() == (grpc.StatusCode.INVALID_ARGUMENT, "sequence 1 is not known")


@pytest.mark.parametrize("session", [1, 2])
async def test_a_session_that_is_not_higher_is_refused(session: int) -> None:
    async with serving() as executor:
        await executor.open(session=2)
        stale = executor.stream()
        await stale.hello(session=session)
        code, details = await stale.status()
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert f"session {session} of scheduler 'one' is not higher than session 2" in details


async def test_a_session_opens_only_when_the_old_ones_step_is_over() -> None:
    async with serving() as executor:
        executor.model.gate.clear()
        old = await executor.open(session=1)
        await old.plan(step_id=1, new=[new()], row_sequences=[1], row_tokens=[6])
        await eventually(executor.model.entered.is_set)
        fresh = executor.stream()
        await fresh.hello(session=2)
        assert await old.status() == (grpc.StatusCode.ABORTED, "session 2 of the same scheduler took over")
        reading = asyncio.create_task(fresh.read())
        done, _ = await asyncio.wait({reading}, timeout=0.3)
        assert not done
        executor.model.gate.set()
        assert (await reading).ready.session == 2
        assert (await executor.describe()).debug == pb.DebugState()


async def test_heartbeats_tell_the_running_step_and_its_progress() -> None:
    async with serving(heartbeat_seconds=0.02) as executor:
        executor.model.gate.clear()
        stream = await executor.open()
        await stream.plan(step_id=1, new=[new()], row_sequences=[1], row_tokens=[6])
        await eventually(executor.model.entered.is_set)
        beats = [(await stream.read(skip_heartbeats=False)).heartbeat for _ in range(5)]
        assert beats[-1] == pb.Heartbeat(step_id=1, progress=1)
        executor.model.gate.set()
        await stream.result()
        beats = [(await stream.read(skip_heartbeats=False)).heartbeat for _ in range(2)]
        assert beats[-1] == pb.Heartbeat(step_id=0, progress=2)


async def test_health_and_describe_answer_while_a_step_runs() -> None:
    async with serving() as executor:
        executor.model.gate.clear()
        stream = await executor.open()
        await stream.plan(step_id=1, new=[new()], row_sequences=[1], row_tokens=[6])
        await eventually(executor.model.entered.is_set)
        stub = health_pb2_grpc.HealthStub(executor.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=LIMIT)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert (await executor.describe()).debug.num_pending_plans == 1
        executor.model.gate.set()
        await stream.result()


async def test_nothing_is_left_after_the_last_finish() -> None:
    async with serving() as executor:
        stream = await executor.open()
        await stream.plan(step_id=1, new=[new(1), new(2, [1], [3])], row_sequences=[1, 2], row_tokens=[6, 1])
        await stream.result()
        assert (await executor.describe()).debug == pb.DebugState(num_sequences=2)
        await stream.plan(step_id=2, finished=[1, 2])
        await stream.result()
        assert (await executor.describe()).debug == pb.DebugState()


async def test_a_stream_that_ends_leaves_no_sequence() -> None:
    async with serving() as executor:
        stream = await executor.open()
        await stream.plan(step_id=1, new=[new()], row_sequences=[1], row_tokens=[6])
        await stream.result()
        stream.call.cancel()

        async def empty() -> bool:
            return (await executor.describe()).debug == pb.DebugState()

        await eventually(empty)


async def test_a_step_that_raises_ends_the_stream_and_the_next_session_is_well() -> None:
    async with serving() as executor:
        executor.model.fails_with = RuntimeError("out of luck")
        stream = await executor.open(session=1)
        await stream.plan(step_id=1, new=[new()], row_sequences=[1], row_tokens=[6])
        assert await stream.status() == (grpc.StatusCode.INTERNAL, "a step failed: RuntimeError: out of luck")
        executor.model.fails_with = None
        stream = await executor.open(session=2)
        await stream.plan(step_id=1, new=[new()], row_sequences=[1], row_tokens=[6])
        assert list((await stream.result()).token_ids) == greedy(PROMPT, 1)


async def test_a_malformed_plan_ends_the_stream_with_its_reason() -> None:
    async with serving() as executor:
        stream = await executor.open()
        await stream.plan(step_id=1, row_sequences=[1])
        assert await stream.status() == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "columns differ in length: row_sequences 1, row_tokens 0",
        )


async def test_steps_that_do_not_count_up_are_refused() -> None:
    async with serving() as executor:
        stream = await executor.open()
        await stream.plan(step_id=1)
        await stream.plan(step_id=3)
        assert await stream.status() == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "step_id 3 follows 1: steps count from 1, one by one",
        )


async def test_a_stream_must_begin_with_hello() -> None:
    async with serving() as executor:
        stream = executor.stream()
        await stream.plan(step_id=1)
        assert await stream.status() == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "the first message of a stream must be Hello",
        )


async def test_bytes_that_are_no_message_are_refused_as_such() -> None:
    """They were UNKNOWN, and an error with its trace in the log."""
    async with serving() as executor:
        stream = executor.channel.stream_stream("/octavo.v1.Executor/Execute")()
        await stream.write(b"\xff\xff")
        assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await stream.details()).startswith("the first message of a stream cannot be read: Error parsing")


async def test_a_stream_that_says_nothing_is_ended() -> None:
    async with serving(hello_seconds=0.05) as executor:
        assert await executor.stream().status() == (grpc.StatusCode.DEADLINE_EXCEEDED, "no Hello within 0.05 s")


async def test_a_second_hello_is_refused() -> None:
    async with serving() as executor:
        stream = await executor.open()
        await stream.hello()
        assert await stream.status() == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "a stream holds plans after its Hello, not hello",
        )


async def test_a_drain_tells_the_scheduler_lets_it_finish_and_refuses_the_next() -> None:
    async with serving() as executor:
        stream = await executor.open()
        executor.service.refuse_sessions()
        executor.service.notify_drain(12.5)
        assert (await stream.read()).draining.grace_seconds == 12.5
        await stream.plan(step_id=1, new=[new()], row_sequences=[1], row_tokens=[6])
        assert list((await stream.result()).token_ids) == greedy(PROMPT, 1)
        late = executor.stream()
        await late.hello(session=2)
        assert await late.status() == (grpc.StatusCode.UNAVAILABLE, "this executor is draining")
        await stream.call.done_writing()
        await asyncio.wait_for(executor.service.session_ended(), LIMIT)


async def test_a_scheduler_can_ask_for_the_drain() -> None:
    async with serving() as executor:
        stream = await executor.open()
        await stream.call.write(pb.ToExecutor(drain=pb.Drain()))
        await asyncio.wait_for(executor.service.drain_requested.wait(), LIMIT)
        await stream.plan(step_id=1)
        assert (await stream.result()).step_id == 1


async def test_a_session_that_outlives_the_grace_period_is_ended() -> None:
    async with serving() as executor:
        stream = await executor.open()
        executor.service.end_session("time is up")
        assert await stream.status() == (grpc.StatusCode.UNAVAILABLE, "time is up")
