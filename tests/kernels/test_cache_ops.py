"""Copies of blocks and gathers of rows move every byte and no other."""

from __future__ import annotations

import pytest
import torch

from executor.backends.cuda.cache_ops import CopyBlocks, GatherRows
from tests.kernels.schedules import identical_on_every_schedule
from tests.kernels.sim import SimulatorLauncher, guarded


def caches(dtype: torch.dtype, head_size: int = 64, count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [guarded(torch.randn(9, 2, 16, head_size, generator=generator).to(dtype)) for _ in range(count)]


def pairs(*values: tuple[int, int]) -> torch.Tensor:
    return guarded(torch.tensor(values, dtype=torch.int32).view(-1, 2))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_size", [16, 80, 128])
def test_blocks_are_copied_in_every_layer(dtype: torch.dtype, head_size: int) -> None:
    tensors = caches(dtype, head_size)
    before = [tensor.clone() for tensor in tensors]
    CopyBlocks(SimulatorLauncher(), tensors)(pairs((8, 1), (3, 2), (3, 5)))
    for tensor, old in zip(tensors, before, strict=True):
        wanted = raw(old).clone()
        wanted[[1, 2, 5]] = raw(old)[[8, 3, 3]]
        assert torch.equal(raw(tensor), wanted)


def test_no_pair_copies_nothing() -> None:
    tensors = caches(torch.bfloat16)
    before = [tensor.clone() for tensor in tensors]
    CopyBlocks(SimulatorLauncher(), tensors)(torch.zeros(0, 2, dtype=torch.int32))
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_copies_do_not_depend_on_who_runs_first() -> None:
    def run(launcher: SimulatorLauncher) -> list[torch.Tensor]:
        tensors = caches(torch.bfloat16)
        CopyBlocks(launcher, tensors)(pairs((8, 1), (3, 2)))
        return tensors

    identical_on_every_schedule(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [8, 576, 4104])
def test_rows_are_gathered_in_the_order_of_the_indices(dtype: torch.dtype, size: int) -> None:
    table = guarded(torch.randn(7, size, generator=torch.Generator().manual_seed(1)).to(dtype))
    indices = guarded(torch.tensor([6, 0, 6, 3]))
    out = guarded(torch.zeros(4, size, dtype=dtype))
    GatherRows(SimulatorLauncher())(table, indices, out)
    assert torch.equal(out, table[indices])


def test_an_index_below_0_is_that_of_a_draw() -> None:
    table = guarded(torch.randn(40, 64, generator=torch.Generator().manual_seed(1)))
    drawn = guarded(torch.tensor([39, 7, 0]))
    indices = guarded(torch.tensor([3, ~1, 0, ~0, ~2]))
    found = identical_on_every_schedule(lambda launcher: GatherRows(launcher)(table, indices, drawn=drawn))
    assert torch.equal(found, table[[3, 7, 0, 39, 0]])


def test_gathering_no_row_gives_none() -> None:
    table = guarded(torch.zeros(7, 8))
    assert GatherRows(SimulatorLauncher())(table, torch.zeros(0, dtype=torch.int64)).shape == (0, 8)
