"""Mistakes in norm, gate, rope with the write of K and V, copies and gathers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from executor.backends.cuda.cache_ops import CopyBlocks, GatherRows
from executor.backends.cuda.elementwise import RmsNorm, SiluMul
from tests.kernels.planted import PlantedBug
from tests.kernels.rope import check_rope, rope_case
from tests.kernels.schedules import identical_on_every_schedule
from tests.kernels.sim import SimulatorBuild, guarded
from tests.kernels.ulps import assert_within_ulps

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
EPS = 1e-5


def normal(*shape: int) -> torch.Tensor:
    return guarded(torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(BF16))


def rope(**overrides: object) -> Callable[[SimulatorBuild], object]:
    built = rope_case(**overrides)
    return lambda build: check_rope(built, build)


def norm(build: SimulatorBuild) -> None:
    x, weight = normal(2, 1000), normal(1000)
    out, total = identical_on_every_schedule(lambda launcher: RmsNorm(launcher, BF16)(x, weight, EPS, x), build)
    exact = total.double() / torch.sqrt(total.double().square().mean(-1, keepdim=True) + EPS) * weight.double()
    assert torch.equal(total, x + x)
    assert_within_ulps(out, exact, 2)


def gate(build: SimulatorBuild) -> None:
    x = normal(2, 4112)
    (out,) = identical_on_every_schedule(lambda launcher: [SiluMul(launcher, BF16)(x)], build)
    first, second = x.double().chunk(2, -1)
    assert_within_ulps(out, first * torch.sigmoid(first) * second, 1)


def copies(build: SimulatorBuild) -> None:
    pairs = guarded(torch.tensor([[3, 1], [2, 4]], dtype=torch.int32))
    before = normal(5, 2, 16, 80)

    def run(launcher: object) -> list[torch.Tensor]:
        caches = [guarded(before), guarded(before)]
        CopyBlocks(launcher, caches)(pairs)  # type: ignore[arg-type]
        return caches

    for cache in identical_on_every_schedule(run, build):
        assert torch.equal(cache, before[[0, 3, 2, 3, 2]])


def gather(build: SimulatorBuild) -> None:
    table, indices = normal(5, 4104), guarded(torch.tensor([4, 0, 4]))
    (out,) = identical_on_every_schedule(lambda launcher: [GatherRows(launcher)(table, indices)], build)
    assert torch.equal(out, table[indices])


def gather_of_draws(build: SimulatorBuild) -> None:
    table, indices, drawn = normal(5, 64), guarded(torch.tensor([4, ~1, ~0])), guarded(torch.tensor([3, 2]))
    (out,) = identical_on_every_schedule(lambda launcher: [GatherRows(launcher)(table, indices, drawn=drawn)], build)
    assert torch.equal(out, table[[4, 2, 3]])


BUGS = (
    PlantedBug(
        "the warps' squares are summed before all are there",
        "rms_norm.cu",
        "    __syncthreads();\n",
        "",
        norm,
    ),
    PlantedBug(
        "the mean over the block's threads",
        "rms_norm.cu",
        "sum_of_squares / wide(hidden)",
        "sum_of_squares / wide(int(blockDim.x) * VEC)",
        norm,
    ),
    PlantedBug(
        "padding is written to the null block",
        "rope_kv_write.cu",
        "    if (slot < 0) return;\n",
        "    if (slot < -1) return;\n",
        rope(slots=(16, 17, -1)),
    ),
    PlantedBug(
        "lanes leave before the norm's shuffles",
        "rope_kv_write.cu",
        "    float first[8] = {}, second[8] = {};\n",
        "    if (!active) return;\n    float first[8] = {}, second[8] = {};\n",
        rope(head_size=80, q_norm=True),
    ),
    PlantedBug(
        "blocks laid out as [block, offset, head]",
        "rope_kv_write.cu",
        "(slot / BLOCK_SIZE * num_kv_heads + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE;",
        "slot * num_kv_heads + kv_head;",
        rope(),
    ),
    PlantedBug(
        "fp8 is cut off, not rounded",
        "common.cuh",
        "        u += 0x7ffffu + (u >> 20 & 1u);\n",
        "",
        rope(kv_dtype=FP8),
    ),
    PlantedBug(
        "a block's last bytes are not copied",
        "copy_blocks.cu",
        "i < block_bytes; i += 256 * 16",
        "i < block_bytes - 1024; i += 256 * 16",
        copies,
    ),
)

# Caught as well; only the long run shows it.
MORE_BUGS = (
    PlantedBug(
        "the sum is not kept for the next residual",
        "rms_norm.cu",
        "            sum.store(total + row + column);\n",
        "",
        norm,
    ),
    PlantedBug(
        "a row's end is not looked at",
        "rms_norm.cu",
        "        if (column >= hidden) continue;\n        Vec16<SCALAR> sum",
        "        Vec16<SCALAR> sum",
        norm,
    ),
    PlantedBug(
        "the gate's halves exchanged",
        "silu_mul.cu",
        "gate_up + (row * 2 + 1) * size + column",
        "gate_up + row * 2 * size + column",
        gate,
    ),
    PlantedBug(
        "the gate writes past a row's end",
        "silu_mul.cu",
        "    if (column >= size) return;\n",
        "",
        gate,
    ),
    PlantedBug(
        "rope turns the other way",
        "rope_kv_write.cu",
        "first[i] = x * cosines[i] - y * sines[i];",
        "first[i] = x * cosines[i] + y * sines[i];",
        rope(),
    ),
    PlantedBug(
        "rope pairs neighbours",
        "rope_kv_write.cu",
        "load8(second, from + HALF);",
        "load8(second, from + 8);",
        rope(),
    ),
    PlantedBug(
        "V is rotated too",
        "rope_kv_write.cu",
        "    if (!is_v) {\n",
        "    {\n",
        rope(),
    ),
    PlantedBug(
        "K is normalized by the weights of q",
        "rope_kv_write.cu",
        "is_v ? nullptr : is_q ? q_norm : k_norm;",
        "is_v ? nullptr : q_norm;",
        rope(q_norm=True, k_norm=True),
    ),
    PlantedBug(
        "V is divided by the scale of K",
        "rope_kv_write.cu",
        "const float scale = is_v ? v_scale : k_scale;",
        "const float scale = k_scale;",
        rope(kv_dtype=FP8, v_scale=0.5),
    ),
    PlantedBug(
        "copies from the destination to the source",
        "copy_blocks.cu",
        "reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);",
        "reinterpret_cast<uint4*>(const_cast<uint8_t*>(from) + i) = *reinterpret_cast<const uint4*>(to + i);",
        copies,
    ),
    PlantedBug(
        "a gathered row's end is not looked at",
        "gather_rows.cu",
        "    if (column >= row_bytes) return;\n",
        "",
        gather,
    ),
    PlantedBug(
        "a draw is counted from the other end",
        "gather_rows.cu",
        "index = drawn[~index];",
        "index = drawn[2 + index];",
        gather_of_draws,
    ),
)
