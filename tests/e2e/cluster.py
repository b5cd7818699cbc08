"""An executor's service and a scheduler in this process, over a real gRPC stream on loopback.

Weights are loaded once and shared; each cluster has limits, KV cache and step thread of its own, so that one model can
be run with many budgets, pools and pipeline depths.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import torch
from octavo.v1 import executor_pb2_grpc

from executor.backends.cpu.backend import CpuBackend
from executor.model.loader import LoadedModel, load_model
from executor.plan import Limits
from executor.runner import Runner
from executor.served import GenerationDefaults, ServedModel
from executor.service import ExecutorService, ServiceOptions
from executor.step_thread import StepThread
from scheduler.config import SchedulerConfig
from scheduler.core.request import SamplingParams
from scheduler.core.scheduler import Scheduler
from scheduler.engine import Engine, EngineConfig
from scheduler.fleet import FleetConfig
from scheduler.outputs import OutputFinish, Submission
from scheduler.server import Server

CACHE = Path("~/.cache/octavo").expanduser()


@dataclass(frozen=True, slots=True)
class Weights:
    """A model in the CPU backend's memory."""

    model: LoadedModel
    backend: CpuBackend


def load_weights(directory: Path, dtype: torch.dtype = torch.float32, *, deterministic: bool = False) -> Weights:
    backend = CpuBackend(dtype, deterministic=deterministic)
    return Weights(load_model(directory, backend, CACHE, None, lambda line: None), backend)


@dataclass(slots=True)
class Cluster:
    engine: Engine
    runner: Runner
    service: ExecutorService
    address: str  # of the scheduler's service

    @property
    def core(self) -> Scheduler:
        (member,) = self.engine.members.values()
        return member.core

    async def idle(self) -> None:
        """Until nothing runs and the executor was told of every end."""
        async with asyncio.timeout(10):
            while self.core.has_work:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(
    weights: Weights, *, pipeline_depth: int = 2, prefix_caching: bool = True, **limits: int
) -> AsyncIterator[Cluster]:
    """`limits` are overrides of executor.plan.Limits."""
    model = weights.model
    settings = {
        "vocab_size": model.config.vocab_size,
        "block_size": 16,
        "num_blocks": 256,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "max_model_len": model.max_model_len,
    }
    chosen = Limits(**{**settings, **limits})
    weights.backend.allocate_kv_cache(model.kv_cache_spec(chosen.num_blocks, chosen.block_size, model.dtype))
    runner = Runner(model.decoder, weights.backend, chosen)
    service = ExecutorService(ServiceOptions("test", "cpu", "incarnation-1"))
    steps = StepThread(runner)
    steps.start()
    served = ServedModel(
        name="test",
        fingerprint="fingerprint",
        limits=chosen,
        dtype="float32",
        kv_dtype="float32",
        eos_token_ids=model.eos_token_ids,
        defaults=GenerationDefaults(),
        deterministic=False,
        device="cpu",
        tokenizer_files=model.tokenizer_files,
    )
    service.serve(served, steps)
    server = grpc.aio.server()
    executor_pb2_grpc.add_ExecutorServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    fleet = FleetConfig((f"127.0.0.1:{port}",), pipeline_depth=pipeline_depth, prefix_caching=prefix_caching)
    engine = Engine(EngineConfig(fleet))
    front = Server(SchedulerConfig(executors=fleet.executors, port=0), engine)
    await front.start()
    task = asyncio.create_task(front.run())
    try:
        while not engine.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield Cluster(engine, runner, service, f"127.0.0.1:{front.port}")
    finally:
        front.stop()
        await task
        await server.stop(0)
        steps.stop(5)


@dataclass(slots=True)
class Answer:
    """One output, whole."""

    token_ids: list[int] = field(default_factory=list)
    finish: OutputFinish | None = None


def submission(
    prompt: Sequence[int], max_tokens: int, n: int = 1, beam_width: int | None = None, **sampling: object
) -> Submission:
    """Greedy unless told otherwise."""
    params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return Submission(tuple(prompt), n, beam_width, max_tokens, params, 0, "", 60.0, "default")


async def generate(engine: Engine, wanted: Submission) -> list[Answer]:
    """All outputs of a submission, checked to come without gap or repetition."""
    answers = [Answer() for _ in range(wanted.n)]
    async for news in engine.submit(wanted):
        for event in news:
            answer = answers[event.index]
            assert answer.finish is None
            assert event.first_position == len(answer.token_ids)
            answer.token_ids.extend(event.token_ids)
            answer.finish = event.finish
    assert all(answer.finish is not None for answer in answers)
    return answers


async def generate_all(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy outputs of all prompts, sent at once."""
    answers = await asyncio.gather(*(generate(engine, submission(prompt, max_tokens)) for prompt in prompts))
    return [answer[0].token_ids for answer in answers]
