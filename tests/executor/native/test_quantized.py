"""Products over quantized weights, against float64 ones over their values as another library dequantizes them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from executor.backends.base import BlockWeight
from executor.backends.cpu import quantized
from executor.backends.cpu.backend import CpuBackend
from executor.backends.cpu.native.library import Level
from executor.backends.cpu.quantized import Kind
from tests.executor.native.factories import LEVELS

SIZES = [(1, 32), (16, 64), (77, 96), (200, 576)]  # outputs by inputs
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 65, 130]

every_level = pytest.mark.parametrize("level", LEVELS)
every_kind = pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
both_formats = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def blocks_of(kind: Kind, out_features: int, in_features: int) -> tuple[BlockWeight, torch.Tensor]:
    """Random weights as blocks, and what the blocks say, float64."""
    ggml = gguf.GGMLQuantizationType[kind.name]
    blocks = gguf.quantize(random(out_features, in_features).numpy(), ggml)
    values = torch.from_numpy(gguf.dequantize(blocks, ggml).astype(np.float64))
    return BlockWeight(kind.name, torch.from_numpy(blocks), in_features), values


def backend_of(dtype: torch.dtype, level: Level | None = None, native: bool = True, **mode: bool) -> CpuBackend:
    return CpuBackend(dtype, native=native, level=level, quantization="gguf", **mode)


def assert_right(actual: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> None:
    """As near as sums in fp32 come, and one rounding to the format."""
    x, magnitude = x.double(), x.double().abs() @ weights.abs().T
    expected = x @ weights.T + (0 if bias is None else bias.double())
    bound = 4e-6 * magnitude + (expected.abs() * 2**-8 if actual.dtype == torch.bfloat16 else 0)
    assert ((actual.double() - expected).abs() <= bound).all()


@every_level
@every_kind
@both_formats
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_products_are_those_of_the_weights(
    level: Level, kind: Kind, dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    weight, values = blocks_of(kind, out_features, in_features)
    bias = random(out_features, seed=2).to(dtype)
    backend = backend_of(dtype, level)
    plain, biased = backend.prepare_linear(weight, None), backend.prepare_linear(weight, bias)
    for rows in ROWS:
        x = random(rows, in_features, seed=1).to(dtype)
        assert_right(backend.linear(x, plain), x, values, None)
        assert_right(backend.linear(x, biased), x, values, bias)


@every_level
@every_kind
@both_formats
def test_a_row_has_the_same_bits_whatever_is_beside_it(level: Level, kind: Kind, dtype: torch.dtype) -> None:
    weight, _ = blocks_of(kind, 77, 576)
    backend = backend_of(dtype, level)
    linear = backend.prepare_linear(weight, None)
    x = random(130, 576).to(dtype)
    together = backend.linear(x, linear)
    x[5] = torch.nan
    for first, last in [(0, 1), (129, 130), (63, 65), (7, 10), (20, 24), (30, 35), (1, 8), (40, 48), (50, 114)]:
        rows = slice(first, last)
        kept = torch.arange(first, last) != 5
        assert torch.equal(backend.linear(x[rows], linear)[kept], together[rows][kept]), (first, last)
    assert backend.linear(x[4:7], linear).isnan().all(-1).tolist() == [False, True, False]


@every_level
@every_kind
def test_two_threads_give_the_bits_of_one(level: Level, kind: Kind, two_threads: None) -> None:
    weight, _ = blocks_of(kind, 300, 576)
    backend = backend_of(torch.bfloat16, level)
    linear = backend.prepare_linear(weight, None)
    x = random(70, 576).bfloat16()
    for rows in (1, 70):
        shared = backend.linear(x[:rows], linear)
        torch.set_num_threads(1)
        assert torch.equal(backend.linear(x[:rows], linear), shared)
        torch.set_num_threads(2)


@every_kind
@both_formats
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_without_the_library_plain_torch_gives_the_same(kind: Kind, dtype: torch.dtype, deterministic: bool) -> None:
    weight, values = blocks_of(kind, 77, 96)
    x, bias = random(9, 96, seed=1).to(dtype), random(77, seed=2).to(dtype)
    results = []
    for native in (False, True):
        backend = backend_of(dtype, native=native, deterministic=deterministic)
        results.append(backend.linear(x, backend.prepare_linear(weight, bias)).double())
    error = 4e-6 if dtype == torch.float32 else 2**-7  # here the weights are rounded to the format
    assert ((results[0] - results[1]).abs() <= error * (x.double().abs() @ values.abs().T + 1)).all()


@every_kind
def test_packing_rounds_nothing(kind: Kind) -> None:
    weight, values = blocks_of(kind, 50, 96)
    linear = quantized.pack(weight, None)
    assert torch.equal(quantized.dequantize(linear).double(), values)
    assert linear.tiles.nbytes == 64 * 3 * kind.block_bytes  # 50 outputs in four panels of 16


@both_formats
@pytest.mark.parametrize("in_features", [1, 33, 96, 100])
def test_int8_takes_any_weights_and_is_off_by_half_a_step(dtype: torch.dtype, in_features: int) -> None:
    original = random(20, in_features) * torch.logspace(-6, 2, 20)[:, None]
    original[3] = 0
    backend = CpuBackend(dtype, quantization="int8")
    linear = backend.prepare_linear(original, None)
    values = quantized.dequantize(linear)
    largest = torch.nn.functional.pad(original.abs(), (0, -in_features % 32)).view(20, -1, 32).amax(-1)
    steps = (largest / 127).repeat_interleave(32, dim=1)[:, :in_features]
    # The scale itself is rounded to half precision, at 127 steps by up to 127 * 2^-12 of them; subnormal ones to 2^-25.
    assert ((values - original).abs() <= steps * (0.5 + 127 * 2**-11) + 127 * 2**-25).all()
    assert not values[3].any()
    x = random(3, in_features, seed=1).to(dtype)
    assert_right(backend.linear(x, linear), x, values.double(), None)


def test_int8_of_what_was_8_bits_is_exact() -> None:
    """The embedding of a GGUF file is often Q8_0, and is the last product's weight as well."""
    _, values = blocks_of(Kind.Q8_0, 64, 96)
    again = quantized.quantize(values.float())
    assert torch.equal(quantized.dequantize(quantized.pack(again, None)).double(), values)


@every_level
def test_scales_of_every_size_are_read_exactly(level: Level) -> None:
    """Subnormal ones, negative ones and the largest."""
    scales = torch.tensor([2.0**-24, -(2.0**-24), 6e-5, -3e-8, 1.0, -65504.0, 0.0, 2.0**-14]).half()
    numbers = torch.ones(len(scales), 32, dtype=torch.int8)
    blocks = torch.cat((scales[:, None].view(torch.uint8), numbers.view(torch.uint8)), dim=-1)
    backend = backend_of(torch.float32, level)
    linear = backend.prepare_linear(BlockWeight("Q8_0", blocks, 32), None)
    x = torch.zeros(1, 32)
    x[0, 7] = 1
    assert torch.equal(backend.linear(x, linear)[0], scales.float())
