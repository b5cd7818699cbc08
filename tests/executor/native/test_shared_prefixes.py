"""Decode rows whose block tables begin alike read those blocks once: the dense oracle, and all shapes of sharing.

With one thread nothing but a shared prefix changes the order in which a row's keys are summed, so bits that differ from
those of the deterministic mode tell that a step shared, and equal ones that it did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from executor.backends.base import AttentionMetadata
from executor.backends.cpu.native.library import Level
from tests.executor.native.factories import LEVELS, Shape, Span, Step

# Blocks of 16; a span's `shares` counts from the sequence before it.
PAIR = [Span(300), Span(290, shares=16)]
GROUPS = [*PAIR, Span(70), Span(400), *[Span(259 + i, shares=16) for i in range(5)], Span(1), Span(300)]
TREE = [Span(700), *[Span(530 + 16 * i, shares=32) for i in range(3)], *[Span(257 + i, shares=16) for i in range(4)]]
CHAIN = [Span(1300), Span(1100, shares=64), Span(900, shares=48), Span(700, shares=32), Span(500, shares=16)]
MANY = [Span(400), *[Span(260 + i, shares=16) for i in range(39)]]  # more rows than one item holds
MIXED = [Span(64, 64), *PAIR, Span(330, 41, shares=16), Span(300, shares=16), Span(277, shares=16), Span(30, 2)]

every_level = pytest.mark.parametrize("level", LEVELS)
both_formats = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
every_sharing = pytest.mark.parametrize(
    "spans", [PAIR, GROUPS, TREE, CHAIN, MANY, MIXED], ids=["pair", "groups", "tree", "chain", "many", "mixed"]
)


def shares(step: Step, level: Level, window: int | None = None) -> bool:
    step = Step(step.spans, replace(step.shape, dtype=torch.float32))  # bfloat16 rounds most such differences away
    fast, fixed = (step.attention(step.backend(level, deterministic), window) for deterministic in (False, True))
    return not torch.equal(fast, fixed)


@every_level
@both_formats
@every_sharing
def test_sequences_that_begin_alike(level: Level, dtype: torch.dtype, spans: Sequence[Span]) -> None:
    step = Step(spans, Shape(dtype=dtype))
    assert shares(step, level)
    step.assert_right(step.backend(level))
    step.assert_right(step.backend(level), softcap=2.0)


@every_level
@every_sharing
def test_two_threads(level: Level, spans: Sequence[Span], two_threads: None) -> None:
    step = Step(spans)
    step.assert_right(step.backend(level))


@every_level
def test_two_threads_split_what_is_shared_and_what_is_not(level: Level, two_threads: None) -> None:
    step = Step([Span(5000), Span(2500, shares=150), Span(2410, shares=150)], Shape(num_kv_heads=1))
    step.assert_right(step.backend(level))


@every_level
@both_formats
@pytest.mark.parametrize("group", [1, 8, 24])
@pytest.mark.parametrize("head_size", [24, 80, 128])
def test_shapes(level: Level, dtype: torch.dtype, group: int, head_size: int) -> None:
    step = Step(TREE, Shape(group=group, head_size=head_size, dtype=dtype, num_kv_heads=1))
    assert shares(step, level)
    step.assert_right(step.backend(level))


@every_level
@both_formats
def test_blocks_of_32(level: Level, dtype: torch.dtype) -> None:
    spans = [span if not span.shares else Span(span.seq_len, shares=span.shares // 2) for span in TREE]
    step = Step(spans, Shape(dtype=dtype, block_size=32))
    assert shares(step, level)
    step.assert_right(step.backend(level))


@every_level
@both_formats
def test_a_window_that_cuts_a_sequence_leaves_it_to_itself(level: Level, dtype: torch.dtype) -> None:
    step = Step(GROUPS, Shape(dtype=dtype))
    for window in (1, 70, 258):
        assert not shares(step, level, window)
        step.assert_right(step.backend(level), window)
    for window in (262, 1000):  # 262 cuts one of the group of five
        assert shares(step, level, window)
        step.assert_right(step.backend(level), window)


@every_level
def test_nothing_is_shared_where_little_could_be(level: Level) -> None:
    for step in (
        Step([Span(100), Span(90, shares=4)]),  # a short prefix
        Step([Span(256), Span(300), Span(300)]),
        Step([Span(300, 30), Span(300, 30, shares=16)]),  # chunks of prompts
        Step(PAIR, Shape(group=48, num_kv_heads=1)),  # rows that fill an item
    ):
        assert not shares(step, level)


@every_level
def test_a_sequence_of_nan_spoils_itself_alone(level: Level) -> None:
    step = Step(GROUPS)
    backend = step.backend(level)
    clean = step.attention(backend)
    step.q[1] = torch.nan
    out = step.attention(backend)
    assert out[1].isnan().all()
    assert torch.equal(torch.cat((out[:1], out[2:])), torch.cat((clean[:1], clean[2:])))


@every_level
@both_formats
def test_in_the_deterministic_mode_a_neighbour_that_shares_changes_no_bit(level: Level, dtype: torch.dtype) -> None:
    step = Step(TREE, Shape(dtype=dtype))
    backend = step.backend(level, deterministic=True)
    beside_others = step.attention(backend)
    for row, span in enumerate(step.spans):
        alone = AttentionMetadata(
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=step.metadata.seq_lens[row : row + 1].clone(),
            block_tables=step.metadata.block_tables[row : row + 1].clone(),
            slot_mapping=torch.zeros(1, dtype=torch.int64),
            positions=step.metadata.positions[row : row + 1].clone(),
            max_query_len=1,
            max_seq_len=span.seq_len,
        )
        out = backend.paged_attention(0, step.q[row : row + 1].clone(), alone, step.scale)
        assert torch.equal(out[0], beside_others[row])
