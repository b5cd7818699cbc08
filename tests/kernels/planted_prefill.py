"""Mistakes in the prefill kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.kernels.planted import PlantedBug
from tests.kernels.prefill import FAR_CASE, beyond_31_bits, check_prefill, prefill_case, prefill_inputs
from tests.kernels.sim import SimulatorBuild

FP8, FP32 = torch.float8_e4m3fn, torch.float32


def case(**overrides: object) -> Callable[[SimulatorBuild], object]:
    """A check of one prefill case."""
    built = prefill_case(**{"query_lens": (3, 70), "seq_lens": (3, 150), **overrides})
    return lambda build: check_prefill(built, build)


def far_case(build: SimulatorBuild) -> object:
    return check_prefill(FAR_CASE, build, beyond_31_bits(prefill_inputs(FAR_CASE)))


BUGS = (
    PlantedBug(
        "prefill: K is used before all of it has come",
        "prefill.cu",
        "        __syncthreads();  // K is there, and all are done with the last V\n",
        "",
        case(),
    ),
    PlantedBug(
        "prefill: no wait for V",
        "prefill.cu",
        "        ptx::cp_async_wait<0>();\n        if constexpr (WIDENS) widen_tile(shared_v, raw_v);\n",
        "        ptx::cp_async_wait<1>();\n        if constexpr (WIDENS) widen_tile(shared_v, raw_v);\n",
        case(),
    ),
    PlantedBug(
        "prefill: stale rows are not zeroed",
        "prefill.cu",
        "ptx::cp_async16(to, from, valid);",
        "ptx::cp_async16(to, from, true);",
        case(),
    ),
    PlantedBug(
        "prefill: the block table is read past its end",
        "prefill.cu",
        "const int block = valid ? blocks[block_index] : 0;",
        "const int block = blocks[block_index];",
        case(),
    ),
    PlantedBug(
        "prefill: offsets of blocks in 32 bits",
        "prefill.cu",
        "const int64_t block_row = int64_t(block) * (int(gridDim.y) * BLOCK_SIZE);\n        const int offset = ",
        "const int block_row = block * (int(gridDim.y) * BLOCK_SIZE);\n        const int offset = ",
        far_case,
    ),
    PlantedBug(
        "prefill: a query sees one key too many",
        "prefill.cu",
        "const bool seen = key <= position &&",
        "const bool seen = key <= position + 1 &&",
        case(),
    ),
    PlantedBug(
        "prefill: tiles that a window cuts are not masked",
        "prefill.cu",
        "const bool partly = first_key < place.inner_begin || first_key + KEYS > place.inner_end;",
        "const bool partly = first_key + KEYS > place.inner_end;",
        case(window=40),
    ),
    PlantedBug(
        "prefill: the accumulators are not rescaled for a new maximum",
        "prefill.cu",
        "                    acc[band][d][2 * r] *= factor;\n",
        "",
        case(q_magnitude=8.0),
    ),
    PlantedBug(
        "prefill: K widened before its bytes are there",
        "prefill.cu",
        "        ptx::cp_async_wait<0>();\n        if constexpr (WIDENS) widen_tile(shared_k, raw_k);\n",
        "        if constexpr (WIDENS) widen_tile(shared_k, raw_k);\n        ptx::cp_async_wait<0>();\n",
        case(kv_dtype=FP8),
    ),
    PlantedBug(
        "prefill in fp32: weights are read before the row's other threads wrote them",
        "prefill_simt.cu",
        "        __syncwarp();\n",
        "",
        case(dtype=FP32, query_lens=(20,), seq_lens=(100,)),
    ),
)

# Caught as well; only the long run shows it.
MORE_BUGS = (
    PlantedBug(
        "prefill: V is used before all of it has come",
        "prefill.cu",
        "        __syncthreads();  // V is there, and all are done with K\n",
        "",
        case(),
    ),
    PlantedBug(
        "prefill: the next K is copied over the one in use",
        "prefill.cu",
        "        copy_tile(shared_v, raw_v, v_cache, pages, tile);\n",
        "        copy_tile(shared_v, raw_v, v_cache, pages, tile);\n"
        "        if (tile < last_tile) copy_tile(shared_k, raw_k, k_cache, pages, tile + 1);\n",
        case(),
    ),
    PlantedBug(
        "prefill: a query does not see itself",
        "prefill.cu",
        "const bool seen = key <= position &&",
        "const bool seen = key < position &&",
        case(),
    ),
    PlantedBug(
        "prefill: a window of one key too many",
        "prefill.cu",
        "key > position - window);",
        "key >= position - window);",
        case(window=17),
    ),
    PlantedBug(
        "prefill: the first tile of a window skipped",
        "prefill.cu",
        "const int first_tile = begin / KEYS,",
        "const int first_tile = (begin + KEYS - 1) / KEYS,",
        case(window=40),
    ),
    PlantedBug(
        "prefill: the last tile is not masked",
        "prefill.cu",
        "first_key + KEYS > place.inner_end;",
        "first_key + KEYS > place.inner_end + KEYS;",
        case(),
    ),
    PlantedBug(
        "prefill: rows of a group are taken for tokens",
        "prefill.cu",
        "const int position = place.first_position + row / place.group;",
        "const int position = place.first_position + row;",
        case(),
    ),
    PlantedBug(
        "prefill: chunks start at position zero",
        "prefill.cu",
        "offset = seq_len - num_queries;",
        "offset = 0;",
        case(),
    ),
    PlantedBug(
        "prefill: heads dealt to K/V heads in turn",
        "prefill.cu",
        "const int head = kv_head * group + (valid ? row % group : 0);",
        "const int head = kv_head + (valid ? row % group : 0) * num_kv_heads;",
        case(num_heads=6, num_kv_heads=2),
    ),
    PlantedBug(
        "prefill: rows past the end are written",
        "prefill.cu",
        "        if (row >= place.num_rows) break;\n",
        "",
        case(),
    ),
    PlantedBug(
        "prefill: K in the order of V",
        "prefill.cu",
        "ptx::mma_m16n8k16<SCALAR>(scores[band][2 * pair + 1], a[band], b[2], b[3]);",
        "ptx::mma_m16n8k16<SCALAR>(scores[band][2 * pair + 1], a[band], b[1], b[3]);",
        case(),
    ),
    PlantedBug(
        "prefill: the second band takes the first one's weights",
        "prefill.cu",
        "acc[band][2 * d + 1], weights[band][step], b[2], b[3]",
        "acc[band][2 * d + 1], weights[0][step], b[2], b[3]",
        case(),
    ),
    PlantedBug(
        "prefill: V read without transposing",
        "prefill.cu",
        "ptx::ldmatrix_x4_trans(b, shared_v",
        "ptx::ldmatrix_x4(b, shared_v",
        case(),
    ),
    PlantedBug(
        "prefill: softcap after the conversion to base 2",
        "prefill.cu",
        "soft_cap(scores[band][j][e] * score_scale, softcap)",
        "soft_cap(scores[band][j][e] * score_scale * LOG2E, softcap) / LOG2E",
        case(softcap=5.0, q_magnitude=4.0),
    ),
    PlantedBug(
        "prefill: the scale of V forgotten",
        "prefill.cu",
        "softmax[band][r].normalizer() * v_scale",
        "softmax[band][r].normalizer()",
        case(kv_dtype=FP8, v_scale=0.25),
    ),
    PlantedBug(
        "prefill: results leave before the warp has put them down",
        "prefill.cu",
        "        }\n    __syncwarp();\n    for (int i = lane;",
        "        }\n    for (int i = lane;",
        case(),
    ),
    PlantedBug(
        "prefill in fp32: the last tile is overwritten while in use",
        "prefill_simt.cu",
        "        __syncthreads();  // all are done with the last tile\n",
        "",
        case(dtype=FP32, query_lens=(20,), seq_lens=(100,)),
    ),
    PlantedBug(
        "prefill in fp32: stale keys are read",
        "prefill_simt.cu",
        "return first_key + i < end ? v_cache",
        "return first_key + i < (end + 15) / 16 * 16 ? v_cache",
        case(dtype=FP32, query_lens=(20,), seq_lens=(100,)),
    ),
)
