"""Mistakes in the decode kernels, in what they share with others, and in the joining of partitions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.kernels.decode import check_decode
from tests.kernels.factories import DecodeCase, cache_beyond_31_bits, decode_case, decode_inputs
from tests.kernels.planted import PlantedBug
from tests.kernels.sim import SimulatorBuild

FP8 = torch.float8_e4m3fn
SPLIT = 1000


def case(**overrides: object) -> Callable[[SimulatorBuild], object]:
    """A check of one decode case."""
    built: DecodeCase = decode_case(**{"seq_lens": (1, 40, 400), "num_ctas": 1, **overrides})
    return lambda build: check_decode(built, build)


def far_case(build: SimulatorBuild) -> object:
    built = decode_case(seq_lens=(20, 40), num_ctas=1)
    return check_decode(built, build, inputs=cache_beyond_31_bits(decode_inputs(built)))


BUGS = (
    PlantedBug(
        "warps join before all are done with q and the stages",
        "decode.cu",
        "    __syncthreads();  // q and the stages are no longer read\n",
        "",
        case(),
    ),
    PlantedBug(
        "the parts are summed before all are written",
        "decode.cu",
        "    __syncthreads();\n    for (int i = threadIdx.x; i < heads * (HEAD_SIZE / 4)",
        "    for (int i = threadIdx.x; i < heads * (HEAD_SIZE / 4)",
        case(),
    ),
    PlantedBug(
        "q is used before all of it is loaded",
        "decode.cu",
        "HEAD_SIZE, heads);\n    __syncthreads();\n",
        "HEAD_SIZE, heads);\n",
        case(),
    ),
    PlantedBug(
        "a prefetch into the stage in use",
        "decode.cu",
        "issue(tile + STAGES - 1, free_stage);",
        "issue(tile + STAGES - 1, stage);",
        case(),
    ),
    PlantedBug(
        "a wait for one group too few",
        "decode.cu",
        "ptx::cp_async_wait<STAGES - 2>();",
        "ptx::cp_async_wait<STAGES - 1>();",
        case(),
    ),
    PlantedBug(
        "ldmatrix at a row that starts at 8 bytes",
        "decode.cu",
        "ptx::ldmatrix_x4(a, q + (lane % 16) * Q_PITCH + step * 2 + lane / 16);",
        "ptx::ldmatrix_x4(a, reinterpret_cast<const char*>(q + (lane % 16) * Q_PITCH + step * 2 + lane / 16) + 8);",
        case(),
    ),
    PlantedBug(
        "rows of K and V that share their banks",
        "decode.cu",
        "PITCH = CHUNKS | 1;",
        "PITCH = CHUNKS;",
        case(),
    ),
    PlantedBug(
        "stale rows of V are not zeroed",
        "decode.cu",
        "ptx::cp_async16(s_v(stage) + to, v + i * CHUNK_ELEMENTS, visible);",
        "ptx::cp_async16(s_v(stage) + to, v + i * CHUNK_ELEMENTS, true);",
        case(),
    ),
    PlantedBug(
        "the block table is read past its end",
        "decode.cu",
        "return first_key(tile) < end ? table[first_key(tile) / BLOCK_SIZE] : 0;",
        "return table[first_key(tile) / BLOCK_SIZE];",
        case(),
    ),
    PlantedBug(
        "a window of one token too many",
        "decode.cu",
        "max(begin, seq_lens[row] - window)",
        "max(begin, seq_lens[row] - window - 1)",
        case(window=17),
    ),
    PlantedBug(
        "the window hides nothing of its first tile",
        "decode.cu",
        "s[i][e] = at >= lowest && at < end ?",
        "s[i][e] = at < end ?",
        case(window=17),
    ),
    PlantedBug(
        "one key behind the end is visible",
        "decode.cu",
        "s[i][e] = at >= lowest && at < end ?",
        "s[i][e] = at >= lowest && at <= end ?",
        case(),
    ),
    PlantedBug(
        "the operand's two registers swapped",
        "decode.cu",
        "ptx::mma_m16n8k16<MMA>(s[0], a, b[0], b[1]);",
        "ptx::mma_m16n8k16<MMA>(s[0], a, b[1], b[0]);",
        case(),
    ),
    PlantedBug(
        "half a warp in the mask of a vote",
        "decode.cu",
        "__any_sync(FULL_WARP,",
        "__any_sync(0x0000ffffu,",
        case(),
    ),
    PlantedBug(
        "a shuffle behind a branch that lanes leave",
        "decode.cu",
        "        state[r].sum = warp_sum<4>(state[r].sum);\n"
        "        const int head = g + 8 * r;\n"
        "        if (head >= heads) continue;\n",
        "        const int head = g + 8 * r;\n"
        "        if (head >= heads) continue;\n"
        "        state[r].sum = warp_sum<4>(state[r].sum);\n",
        case(),
    ),
    PlantedBug(
        "heads dealt to K/V heads in turn",
        "decode.cu",
        "const int first_head = kv_head * per_kv_head + first_of_group;",
        "const int first_head = kv_head + first_of_group * num_kv_heads;",
        case(),
    ),
    PlantedBug(
        "a second group of heads that starts at the first",
        "decode.cu",
        "/ num_kv_heads * ROWS;",
        "/ num_kv_heads * 0;",
        case(num_heads=20, num_kv_heads=1),
    ),
    PlantedBug(
        "the output is not rescaled for a new maximum",
        "decode.cu",
        "o[i][e] *= factor[e / 2];",
        "o[i][e] *= factor[e / 2] > 0.0f ? 1.0f : 0.0f;",
        case(q_magnitude=8.0),
    ),
    PlantedBug(
        "the output is rescaled by the other head's factor",
        "decode.cu",
        "o[i][e] *= factor[e / 2];",
        "o[i][e] *= factor[e % 2];",
        case(num_heads=32, q_magnitude=8.0),
    ),
    PlantedBug(
        "offsets of blocks in 32 bits",
        "decode.cu",
        "const int64_t rows = (int64_t(block) * num_kv_heads + kv_head)",
        "const int rows = (block * num_kv_heads + kv_head)",
        far_case,
    ),
    PlantedBug(
        "items that do not count are run",
        "decode.cu",
        "    if (int(blockIdx.x) >= *num_items) return;\n",
        "",
        case(),
    ),
    PlantedBug(
        "rows are taken for tokens",
        "decode.cu",
        "const int64_t token = token_rows == nullptr ? row : token_rows[row];",
        "const int64_t token = row;",
        case(token_rows=True),
    ),
    PlantedBug(
        "q in the order of an unpacked cache",
        "decode.cu",
        "return FP8 ? d / 16 * 16 + d % 2 * 8 + d % 16 / 4 * 2 + d % 4 / 2 : d;",
        "return d;",
        case(kv_dtype=FP8),
    ),
    PlantedBug(
        "even and odd dims of V exchanged",
        "decode.cu",
        "make_float4(even[0], odd[0], even[1], odd[1])",
        "make_float4(odd[0], even[0], odd[1], even[1])",
        case(kv_dtype=FP8),
    ),
    PlantedBug(
        "the scale of V forgotten",
        "decode.cu",
        "joint.normalizer() * v_scale * FP8_BIAS",
        "joint.normalizer() * FP8_BIAS",
        case(kv_dtype=FP8, v_scale=0.25),
    ),
    PlantedBug(
        "the sum of weights is not rescaled for a new maximum",
        "common.cuh",
        "        sum *= factor;\n",
        "",
        case(q_magnitude=8.0),
    ),
    PlantedBug(
        "states merge without their maxima",
        "common.cuh",
        "const float mine = ptx::ex2(max - from), theirs = ptx::ex2(other.max - from);",
        "const float mine = 1.0f, theirs = 1.0f;",
        case(),
    ),
    PlantedBug(
        "an empty state's maximum is subtracted from itself",
        "common.cuh",
        "const float from = joint == negative_infinity() ? 0.0f : joint;",
        "const float from = joint;",
        case(window=17, seq_lens=(65, 300)),
    ),
    PlantedBug(
        "partitions joined without their largest logit",
        "merge_states.cu",
        "ptx::ex2((partial_lse[part] - from) * LOG2E)",
        "ptx::ex2(partial_lse[part] * LOG2E)",
        case(q_magnitude=1e4, num_ctas=SPLIT),
    ),
    PlantedBug(
        "the sum of the partitions without its last",
        "merge_states.cu",
        "    float weights = 0.0f;\n    for (int slot = first; slot < end; slot++) {",
        "    float weights = 0.0f;\n    for (int slot = first; slot < end - 1; slot++) {",
        case(num_ctas=SPLIT),
    ),
    PlantedBug(
        "teams of a warp joined but for the last step",
        "decode_simt.cu",
        "offset < 32; offset <<= 1",
        "offset < 16; offset <<= 1",
        case(num_heads=2),
    ),
    PlantedBug(
        "keys behind the end are read",
        "decode_simt.cu",
        "visible[u] = key >= lowest && key < end;",
        "visible[u] = key >= lowest && key < (end + 15) / 16 * 16;",
        case(num_heads=2),
    ),
    PlantedBug(
        "the logits of one team's keys in the maximum alone",
        "decode_simt.cu",
        "state[h].sum += weight;",
        "state[h].sum += u == 0 ? weight : 0.0f;",
        case(num_heads=4),
    ),
    PlantedBug(
        "chunks behind a head of 80 are read as its own",
        "decode_simt.cu",
        "            if (d >= HEAD_SIZE) continue;\n",
        "",
        case(num_heads=2, head_size=80),
    ),
)
