"""Steps on a device: staged in one copy, decode steps in buckets. A replayed bucket says what an eager step says, and
the deterministic mode says the same of a position however it came.

The graphs here are `Rerun`s: the same shapes, padding, buffers and fixed grids as a captured graph, on the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from executor.backends.base import AttentionMetadata
from executor.backends.cuda.graphs import Rerun, StagedDecoder, buckets
from executor.backends.cuda.staging import Staging, staged_bytes
from executor.model.loader import LoadedModel, load_model
from executor.plan import BatchPlan, Limits, NewSequence, Sampling
from executor.runner import Runner
from tests.executor.model.factories import create_tiny_model, random_tokens
from tests.executor.simulated import SimulatedBackend

torch.set_num_threads(1)

BLOCK = 16
MAX_BLOCKS = 6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 with windows in some layers; a head size that the kernels are made for."""
    return create_tiny_model(
        tmp_path_factory.mktemp("tiny"), "qwen2-windows", head_dim=64, num_key_value_heads=1, num_hidden_layers=2
    ).directory


class Steps:
    """Drives a decoder with sequences whose blocks are interleaved."""

    def __init__(self, model: LoadedModel, backend: SimulatedBackend, graphs: bool, max_bucket: int = 8) -> None:
        backend.allocate_kv_cache(model.kv_cache_spec(64, BLOCK, backend.dtype))
        for cache in (*backend.keys, *backend.values):
            cache.fill_(torch.nan)
        backend.use_heads(model.config.num_heads)
        windows = tuple(dict.fromkeys(model.config.sliding_windows))
        self.decoder = StagedDecoder(
            model.decoder, backend, windows, MAX_BLOCKS, Rerun() if graphs else None, max_bucket
        )
        self.decoder.capture_all()
        self.backend = backend
        self._lengths: dict[int, int] = {}
        self.layers_seen = 0

    def run(self, rows: dict[int, Sequence[int]], logits_of: Sequence[int] | None = None) -> torch.Tensor:
        """Logits of the last token of each row, or of those rows that `logits_of` names."""
        counts = [len(tokens) for tokens in rows.values()]
        starts = np.concatenate([[0], np.cumsum(counts)])
        ends = [self._lengths.get(number, 0) + count for number, count in zip(rows, counts, strict=True)]
        self._lengths.update(zip(rows, ends, strict=True))
        places = [
            (number, end - count + i)
            for number, end, count in zip(rows, ends, counts, strict=True)
            for i in range(count)
        ]
        width = -(-max(ends) // BLOCK)
        last = torch.tensor(starts[1:] - 1)
        logits = self.decoder.forward(
            torch.tensor([token for tokens in rows.values() for token in tokens]),
            AttentionMetadata(
                query_start_loc=torch.tensor(starts, dtype=torch.int32),
                seq_lens=torch.tensor(ends, dtype=torch.int32),
                block_tables=torch.tensor(
                    [
                        [self._block(number, i) if i * BLOCK < end else 0 for i in range(width)]
                        for number, end in zip(rows, ends, strict=True)
                    ],
                    dtype=torch.int32,
                ),
                slot_mapping=torch.tensor(
                    [self._block(number, i // BLOCK) * BLOCK + i % BLOCK for number, i in places]
                ),
                positions=torch.tensor([i for _, i in places]),
                max_query_len=max(counts),
                max_seq_len=max(ends),
            ),
            last if logits_of is None else last[list(logits_of)],
            self._advance,
        )
        return logits.clone()

    def _block(self, number: int, index: int) -> int:
        return 1 + number + 9 * index

    def _advance(self) -> None:
        self.layers_seen += 1


def steps(directory: Path, graphs: bool, **options: object) -> Steps:
    backend = SimulatedBackend(torch.float32, **options)  # type: ignore[arg-type]
    return Steps(load_model(directory, backend, directory), backend, graphs)


def test_a_replayed_step_says_what_an_eager_one_says(directory: Path) -> None:
    eager, graphs = steps(directory, False), steps(directory, True)
    prompts = {number: random_tokens(20 + 9 * number, seed=number) for number in range(3)}
    torch.testing.assert_close(graphs.run(prompts), eager.run(prompts), rtol=0, atol=0)
    for step in range(20):
        rows = {number: [random_tokens(1, seed=100 + step)[0]] for number in range(1 + step % 3)}
        torch.testing.assert_close(graphs.run(rows), eager.run(rows), rtol=1e-4, atol=1e-4)


def plan(step_id: int, row_tokens: dict[int, int], **columns: object) -> BatchPlan:
    return BatchPlan(step_id, row_sequences=list(row_tokens), row_tokens=list(row_tokens.values()), **columns)  # type: ignore[arg-type]


def plans() -> list[BatchPlan]:
    """Three sequences, greedy and drawn, that decode together; one ends, and another takes its slot."""
    samplings = (Sampling(temperature=0), Sampling(temperature=1, seed=7), Sampling(temperature=0.7, top_k=20, seed=3))
    new = [
        NewSequence(i + 1, random_tokens(9 + i, seed=i), 9 + i, 0, [1 + 2 * i, 2 + 2 * i], 0, sampling)
        for i, sampling in enumerate(samplings)
    ]
    fourth = NewSequence(4, random_tokens(5, seed=9), 5, 0, [9], 0, Sampling(temperature=1, seed=11))
    begun = plan(1, {1: 9, 2: 10, 3: 11}, new=new)
    decodes = [plan(step, {1: 1, 2: 1, 3: 1}) for step in range(2, 6)]
    return [begun, *decodes, plan(6, {4: 5, 1: 1, 3: 1}, finished=[2], new=[fourth]), plan(7, {3: 1, 4: 1, 1: 1})]


def runner_of(directory: Path, graphs: bool) -> Runner:
    made = steps(directory, graphs)
    return Runner(made.decoder, made.backend, Limits(128, BLOCK, 64, 8, 64, MAX_BLOCKS * BLOCK))


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_launched_behind_another_is_fed_its_draws_on_the_device(directory: Path, graphs: bool) -> None:
    one_by_one, ahead = runner_of(directory, graphs), runner_of(directory, graphs)
    expected = [one_by_one.run(each) for each in plans()]
    found, running = [], None
    for each in plans():
        assert ahead.can_follow(each)
        launched = ahead.launch(each)
        if running is not None:
            assert (ahead.sequences.token_ids < 0).any(), "nobody knows its draws yet"
            found.append(running.collect())
        running = launched
    assert running is not None
    found.append(running.collect())
    assert [(r.sequence_ids, r.token_ids, r.errors) for r in found] == [
        (r.sequence_ids, r.token_ids, r.errors) for r in expected
    ]
    for sequence_id in (1, 3, 4):
        known = [runner.sequences.tokens(runner.sequences.slot(sequence_id)) for runner in (ahead, one_by_one)]
        assert known[0].tolist() == known[1].tolist(), "all draws have been filled in"


def test_rows_that_do_not_sample_have_no_logits(directory: Path) -> None:
    whole, part = steps(directory, True), steps(directory, True)
    rows = {0: [5], 1: [6], 2: [7]}
    assert torch.equal(part.run(rows, logits_of=[0, 2]), whole.run(rows)[[0, 2]])


def test_logits_come_in_the_order_that_is_asked_for(directory: Path) -> None:
    """A prompt's chunk of one token before decode rows: its logits, for log probabilities, come behind theirs. As many
    rows as logits were taken for all rows in order, and each sequence drew from its neighbour's."""
    whole, part = steps(directory, True), steps(directory, True)
    rows = {0: [5], 1: [6], 2: [7]}
    assert torch.equal(part.run(rows, logits_of=[1, 2, 0]), whole.run(rows)[[1, 2, 0]])


def test_padding_writes_nothing_and_disturbs_nobody(directory: Path) -> None:
    """Five rows in a bucket of eight; then what an earlier, fuller step left in the buffers must not show."""
    fresh, used = steps(directory, True), steps(directory, True)
    used.run({number: [9] for number in range(8)})
    rows = {number: [3 + number] for number in range(5)}
    for number in rows:
        used._lengths[number] = 0
    assert torch.equal(used.run(rows), fresh.run(rows))
    null_block = used.decoder._backend.keys[0][0]  # type: ignore[attr-defined]
    assert null_block.isnan().all()


def test_more_rows_than_the_largest_bucket_run_eagerly(directory: Path) -> None:
    graphs = steps(directory, True)
    assert graphs.run({number: [4] for number in range(9)}).shape == (9, 128)


def test_progress_is_told_for_each_layer_of_a_replay(directory: Path) -> None:
    graphs = steps(directory, True)
    graphs.run({0: [5]})
    assert graphs.layers_seen == 2


def test_a_deterministic_position_has_the_same_bits_however_it_came(directory: Path) -> None:
    tokens = random_tokens(70)
    whole = steps(directory, True, deterministic=True)
    assert whole.decoder.num_graphs == 0
    expected = whole.run({0: tokens})
    for chunk in (1, 7, 33):
        chunked = steps(directory, True, deterministic=True)
        for start in range(0, len(tokens), chunk):
            others = {number: random_tokens(3, seed=start + number) for number in (1, 2)} if start < 30 else {}
            last = chunked.run({0: tokens[start : start + chunk], **others})[:1]
        assert torch.equal(last, expected), chunk


def test_buckets_end_with_the_most_rows() -> None:
    assert buckets(1) == [1]
    assert buckets(3) == [1, 2, 3]
    assert buckets(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert buckets(100)[-4:] == [64, 80, 96, 100]


def test_staging_keeps_addresses_for_the_same_shapes() -> None:
    staging = Staging(torch.device("cpu"), 256)
    first = staging.upload({"a": np.arange(3, dtype=np.int64), "b": np.ones((2, 2), np.float32)})
    addresses = {name: tensor.data_ptr() for name, tensor in first.items()}
    second = staging.upload({"a": np.arange(3, 6, dtype=np.int64), "b": np.zeros((2, 2), np.float32)})
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == addresses
    assert second["a"].tolist() == [3, 4, 5]
    assert first["b"].tolist() == [[0, 0], [0, 0]]  # views of the one device buffer


def test_staging_grows_where_it_may() -> None:
    staging = Staging(torch.device("cpu"), 16)
    assert staging.upload({"a": np.arange(100, dtype=np.int32)})["a"].tolist() == list(range(100))


def test_staging_for_graphs_never_moves() -> None:
    staging = Staging(torch.device("cpu"), 16, may_grow=False)
    with pytest.raises(AssertionError, match="400 bytes in a staging buffer of 16"):
        staging.upload({"a": np.arange(100, dtype=np.int32)})


def test_what_is_staged_is_aligned_for_the_widest_load() -> None:
    arrays = {"a": np.zeros(1, np.int32), "b": np.zeros(0, np.int32), "c": np.zeros(5, np.int32)}
    tensors = Staging(torch.device("cpu"), 256).upload(arrays)
    assert staged_bytes(arrays) == 48
    assert (tensors["c"].data_ptr() - tensors["a"].data_ptr()) == 16
    assert tensors["b"].shape == (0,)
