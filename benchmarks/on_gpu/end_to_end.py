"""The executor with a whole model on the device: decode, prefill and mixed steps, and the same prompts as the peer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.on_gpu.model import RandomWeights
from benchmarks.on_gpu.steps import Measured, Session
from benchmarks.on_gpu.table import ModelLine
from executor.backends.base import KVCacheSpec
from executor.backends.cuda.backend import CudaBackend
from executor.backends.cuda.graphs import Capture, StagedDecoder
from executor.model.config import model_config
from executor.model.decoder import Decoder
from executor.plan import BatchPlan, Limits, NewSequence, Sampling
from executor.runner import Runner

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Load:
    """What is run. The defaults are the benchmark's."""

    batches: Sequence[int] = (1, 32, 128, 256)
    context: int = 1024
    decode_steps: int = 32
    prompts: Sequence[int] = (8192, 2048, 2048, 2048, 2048)
    budget: int = 8192
    mixed_batch: int = 64
    mixed_chunk: int = 512
    mixed_steps: int = 8
    peer_prompts: int = 64
    peer_prompt_tokens: int = 512
    peer_new_tokens: int = 128

    @property
    def num_blocks(self) -> int:
        """Each run has the cache for itself."""
        longest_decode = max(self.batches) * (self.context + self.decode_steps + 8 + BLOCK)
        prefill = sum(self.prompts) + len(self.prompts) * 2 * BLOCK
        mixed = self.mixed_batch * (self.context + self.mixed_steps + 2 * BLOCK) + self.mixed_chunk * self.mixed_steps
        peer = self.peer_prompts * (self.peer_prompt_tokens + self.peer_new_tokens + 2 * BLOCK)
        return -(-max(longest_decode, prefill, mixed + 2 * BLOCK, peer) // BLOCK) + 8

    @property
    def max_model_len(self) -> int:
        lengths = (
            self.context + self.decode_steps + 8,
            max(self.prompts) + 1,
            self.mixed_chunk * self.mixed_steps + 1,
            self.context + self.mixed_steps + 2,
            self.peer_prompt_tokens + self.peer_new_tokens,
        )
        return max(lengths)

    def peer_input(self, vocab: int) -> list[list[int]]:
        r = random.Random(0)
        return [[r.randrange(vocab) for _ in range(self.peer_prompt_tokens)] for _ in range(self.peer_prompts)]


def build(config: Mapping[str, object], weights: RandomWeights, backend: CudaBackend, load: Load) -> Decoder:
    """The model on the device, and its cache taken."""
    parsed = model_config(config)
    decoder = Decoder(parsed, weights, backend, load.max_model_len)  # type: ignore[arg-type]
    backend.allocate_kv_cache(
        KVCacheSpec(parsed.num_layers, load.num_blocks, parsed.num_kv_heads, BLOCK, parsed.head_size, backend.dtype)
    )
    backend.use_heads(parsed.num_heads)
    return decoder


def runner_over(decoder: Decoder, backend: CudaBackend, load: Load, capture: Capture) -> Runner:
    """A runner whose decode steps are captured, or run again, by `capture`."""
    max_num_seqs = max(*load.batches, load.mixed_batch + 1, load.peer_prompts)
    max_blocks = -(-load.max_model_len // BLOCK)
    staged = StagedDecoder(decoder, backend, [None], max_blocks, capture, max_num_seqs)
    staged.capture_all()
    budget = max(load.budget, load.mixed_batch + load.mixed_chunk, max_num_seqs)
    vocab = decoder.config.vocab_size
    limits = Limits(vocab, BLOCK, load.num_blocks, max_num_seqs, budget, load.max_model_len)
    return Runner(staged, backend, limits)


def lines(runner: Runner, load: Load) -> Iterator[ModelLine]:
    """Every run, in the order of the table."""
    for batch in load.batches:
        measured = Session(runner).decode(batch, load.context, load.decode_steps)
        yield _line("decode", f"batch {batch} at {load.context}", measured)
    Session(runner).prefill(load.prompts[:1], load.budget)  # the library's choices for these sizes
    for length in dict.fromkeys(load.prompts):
        prompts = [prompt for prompt in load.prompts if prompt == length]
        yield _line("prefill", f"{len(prompts)} x {length}", Session(runner).prefill(prompts, load.budget))
    mixed = (load.mixed_batch, load.context, load.mixed_chunk, load.mixed_steps)
    Session(runner).mixed(*mixed)
    size = f"{load.mixed_batch} at {load.context} + chunk {load.mixed_chunk}"
    yield _line("mixed", size, Session(runner).mixed(*mixed))


def whole_answers(runner: Runner, load: Load) -> Measured:
    """What the peer is asked for too; once before, as the peer is."""
    prompts = load.peer_input(runner.limits.vocab_size)
    Session(runner).answer(prompts, load.peer_new_tokens, load.budget)
    return Session(runner).answer(prompts, load.peer_new_tokens, load.budget)


def replay_differs(graphs: Runner, reruns: Runner, num_replays: int = 100) -> str | None:
    """Runs both over the same decode steps, of changing batch and lengths; None if every token and log probability is
    the same. `reruns` computes in the same shapes without graphs."""
    r = random.Random(1)
    for step in range(num_replays):
        batch = r.randint(1, min(graphs.limits.max_num_seqs, 64))
        new = []
        block = 1
        for number in range(batch):
            length = r.randint(1, min(600, graphs.limits.max_model_len - 1))
            blocks = -(-length // BLOCK)
            if block + blocks > graphs.limits.num_blocks:
                break
            new.append(
                NewSequence(
                    number,
                    [5] * length,
                    length,
                    length - 1,
                    list(range(block, block + blocks)),
                    0,
                    Sampling(logprobs=0),
                )
            )
            block += blocks
        plan = BatchPlan(1, new=new, row_sequences=[one.sequence_id for one in new], row_tokens=[1] * len(new))
        answers = []
        for runner in (graphs, reruns):
            runner.reset()
            result = runner.run(plan)
            answers.append((list(result.token_ids), dict(result.logprobs), dict(result.errors)))
        if answers[0] != answers[1]:
            return f"replay {step}, {len(new)} rows: {answers[0]} from the graph, {answers[1]} without it"
    return None


def _line(name: str, size: str, measured: Measured) -> ModelLine:
    return ModelLine(name, size, measured.tokens_per_second, measured.milliseconds_per_step)
