"""Small plans, and a model small enough to know all its answers by heart."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from executor.backends.base import AttentionMetadata, HostMark
from executor.plan import BatchPlan, Limits, NewSequence, Sampling
from executor.runner import Runner
from executor.sampler import SamplerOutput, SamplingBatch, sample

VOCAB = 50
POISON = 49  # a sequence that has seen this token gets NaN


def create_limits(**overrides: int) -> Limits:
    values = {
        "vocab_size": VOCAB,
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 40,
    }
    return Limits(**{**values, **overrides})


def create_new(
    sequence_id: int,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    *,
    num_prompt_tokens: int | None = None,
    num_computed_tokens: int = 0,
    sample_index: int = 0,
    **sampling: object,
) -> NewSequence:
    return NewSequence(
        sequence_id=sequence_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=block_ids,
        sample_index=sample_index,
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
    )


def rows(step_id: int, row_tokens: dict[int, int], **columns: object) -> BatchPlan:
    """A plan that runs so many tokens of each sequence."""
    return BatchPlan(
        step_id,
        row_sequences=list(row_tokens),
        row_tokens=list(row_tokens.values()),
        **columns,  # type: ignore[arg-type]
    )


def logits_after(tokens: Sequence[int]) -> np.ndarray:
    """What the fake model says once it has seen these tokens: any history has its own answer."""
    if POISON in tokens:
        return np.full(VOCAB, np.nan, np.float32)
    generator = np.random.default_rng(zlib.crc32(np.asarray(tokens, np.int64).tobytes()))
    logits = generator.standard_normal(VOCAB).astype(np.float32)
    logits[POISON] = -10
    return logits


def greedy(tokens: Sequence[int], count: int) -> list[int]:
    """The fake model's greedy continuation."""
    known = list(tokens)
    for _ in range(count):
        known.append(int(logits_after(known).argmax()))
    return known[len(tokens) :]


class FakeModel:
    """Decoder and cache. The K/V of a token is its id, so what a row sees is what its block table leads to."""

    def __init__(self, limits: Limits) -> None:
        self._block_size = limits.block_size
        self.cache = np.full((limits.num_blocks, limits.block_size), POISON, np.int64)
        self.gate = threading.Event()  # a step waits here
        self.gate.set()
        self.entered = threading.Event()
        self.fails_with: Exception | None = None
        self.num_forwards = 0

    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        progress: Callable[[], None],
    ) -> torch.Tensor:
        self.num_forwards += 1
        progress()
        self.entered.set()
        self.gate.wait(30)
        if self.fails_with is not None:
            raise self.fails_with
        self.cache.reshape(-1)[metadata.slot_mapping.numpy()] = token_ids.numpy()
        progress()
        logits = [self._logits(metadata, index) for index in logits_indices.tolist()]
        return torch.from_numpy(np.stack(logits)) if logits else torch.zeros(0, VOCAB)

    def _logits(self, metadata: AttentionMetadata, index: int) -> np.ndarray:
        row = int(np.searchsorted(metadata.query_start_loc.numpy(), index, side="right")) - 1
        length = int(metadata.positions[index]) + 1
        seen = self.cache[metadata.block_tables[row].numpy()].reshape(-1)[:length]
        return logits_after(seen.tolist())

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self.cache[list(destinations)] = self.cache[list(sources)]

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SamplerOutput:
        return sample(logits, batch)

    def mark(self) -> HostMark:
        return HostMark()


class LateDraws:
    """Known to the host once it has looked often enough, or collects."""

    def __init__(self, output: SamplerOutput, looks: int) -> None:
        self.collected = False
        self._output = output
        self._looks = looks

    def is_ready(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def collect(self) -> SamplerOutput:
        self.collected = True
        return self._output


class LateModel(FakeModel):
    """As on a device: the next step is fed what was drawn before the host knows it."""

    def __init__(self, limits: Limits, looks: int = 3) -> None:
        super().__init__(limits)
        self.looks = looks
        self.draws: list[LateDraws] = []
        self.num_fed = 0  # tokens that the host did not know yet
        self._drawn = np.zeros(0, np.int64)

    def forward(
        self,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        progress: Callable[[], None],
    ) -> torch.Tensor:
        ids = token_ids.numpy().copy()
        late = ids < 0
        ids[late] = self._drawn[~ids[late]]
        self.num_fed += int(late.sum())
        return super().forward(torch.from_numpy(ids), metadata, logits_indices, progress)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> LateDraws:  # type: ignore[override]
        assert sum(not draws.collected for draws in self.draws) < 2, "two steps are not collected"
        output = super().sample(logits, batch)
        self._drawn = output.token_ids.copy()
        self.draws.append(LateDraws(output, self.looks))
        return self.draws[-1]


def create_runner(model: type[FakeModel] = FakeModel, **overrides: int) -> tuple[Runner, FakeModel]:
    limits = create_limits(**overrides)
    made = model(limits)
    return Runner(made, made, limits), made
