// Paged attention of decode rows on tensor cores: one query token a row, G query heads on each K/V head.
//
// Problem: out = softmax(softcap(scale * q K^T)) V over the row's cached tokens. Each K/V byte is read once and used by
//   G heads, so the kernel is bound by reading the cache; mma.m16n8k16 takes the G <= 16 heads as the rows of one M tile
//   (the other rows are zeros), which keeps the arithmetic far below the memory time. More heads than 16 on a K/V head
//   go to further blocks in y.
// Work: the host cuts rows into items (executor/backends/cuda/plan.py): (row, kv_begin, kv_end, slot) int32, kv_begin a
//   multiple of 64. slot -1: the row's only item, written to out; else normalized partial and log-sum-exp go to that
//   slot, and merge_states joins them. num_items [1] says how many items of the fixed grid count.
// Layout: q, out [num_tokens, num_heads, HEAD_SIZE] SCALAR; q's rows lie q_stride elements apart (inside the fused qkv).
//   Row r is token token_rows[r] (int64), or token r where token_rows is null. K and V: [num_blocks, num_kv_heads,
//   BLOCK_SIZE, HEAD_SIZE] KV. block_tables [num_rows, max_blocks], seq_lens [num_rows] int32. window 0: none; else the
//   last `window` tokens are visible, the query's own counted.
// Grid (items, num_kv_heads * ceil(G / 16)); WARPS warps. Warp w owns keys 16 w .. 16 w + 15 of every tile of
//   16 * WARPS: it copies them (cp.async, STAGES deep, 16 neighbouring rows of one block: a contiguous piece of memory)
//   and computes with them alone, so that the main loop has no barrier of the block and warps drift apart freely.
// Shared memory: q [16][Q_PITCH], then per warp and stage K [16][PITCH] and V [16][PITCH], in chunks of 16 bytes. Pitches
//   are odd, so that the eight rows of an ldmatrix fall on different banks for every HEAD_SIZE. The joining of the warps
//   reuses the stages.
// fp8: bytes become halves by moving bits, 2^-8 too small, which the logits' scale and the final scale put right. Two
//   neighbouring bytes are one b16 to ldmatrix, so fragments come with even dims apart from odd ones: q's columns are
//   stored in that order, and the output's columns are written back from it.
// Bound by: memory. In flight per block: (STAGES - 1) * 16 * WARPS * 2 rows. The next tile's block id is read a tile
//   ahead, so that a table lookup never stands before a copy.
#include "common.cuh"

#ifndef WARPS
#define WARPS 4
#endif
static_assert(HEAD_SIZE % 16 == 0, "whole k-steps of mma");
static_assert(BLOCK_SIZE % 16 == 0, "a warp's 16 keys lie in one block");
static_assert(STAGES >= 2, "a stage to fill while another is used");

constexpr bool FP8 = is_same<KV, fp8>::value;
template <bool IS_FP8>
struct Operand {
    using type = SCALAR;
};
template <>
struct Operand<true> {
    using type = fp16;
};
using MMA = Operand<FP8>::type;  // what the tensor cores multiply

constexpr int KEYS = 16;  // of a warp, per tile
constexpr int TILE = KEYS * WARPS;
constexpr int ROWS = 16;  // query heads of a block at most
constexpr int STEPS = HEAD_SIZE / 16;
constexpr int CHUNKS = HEAD_SIZE * int(sizeof(KV)) / 16, PITCH = CHUNKS | 1;
constexpr int Q_CHUNKS = HEAD_SIZE * 2 / 16, Q_PITCH = Q_CHUNKS | 1;
constexpr int CHUNK_ELEMENTS = 16 / int(sizeof(KV));
constexpr int JOIN_PITCH = HEAD_SIZE + 8;  // floats; a warp's rows on different banks
constexpr float FP8_BIAS = FP8 ? 256.0f : 1.0f;

// Bytes 0 and 2 (even) or 1 and 3 (odd) of a word as two halves, 2^-8 too small.
__device__ __forceinline__ uint32_t halves(uint32_t high_bytes) {
    return (high_bytes & 0x80008000u) | (high_bytes & 0x7f007f00u) >> 1;
}
__device__ __forceinline__ uint32_t even_halves(uint32_t word) { return halves(word << 8); }
__device__ __forceinline__ uint32_t odd_halves(uint32_t word) { return halves(word); }

// The warp's logits: q [16 heads] times K [16 keys], as two accumulator tiles of 8 keys.
__device__ __forceinline__ void multiply_qk(float (&s)[2][4], const uint4* q, const uint4* k, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[i][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, q + (lane % 16) * Q_PITCH + step * 2 + lane / 16);
        if constexpr (FP8) {
            uint32_t b[2];
            ptx::ldmatrix_x2(b, k + (lane % 16) * PITCH + step);
            ptx::mma_m16n8k16<MMA>(s[0], a, even_halves(b[0]), odd_halves(b[0]));
            ptx::mma_m16n8k16<MMA>(s[1], a, even_halves(b[1]), odd_halves(b[1]));
        } else {
            uint32_t b[4];
            ptx::ldmatrix_x4(b, k + (lane % 8 + lane / 16 * 8) * PITCH + step * 2 + lane / 8 % 2);
            ptx::mma_m16n8k16<MMA>(s[0], a, b[0], b[1]);
            ptx::mma_m16n8k16<MMA>(s[1], a, b[2], b[3]);
        }
    }
}

// o += p [16 heads x 16 keys] times V [16 keys].
__device__ __forceinline__ void multiply_pv(float (&o)[2 * STEPS][4], const uint32_t (&p)[4], const uint4* v, int lane) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        if constexpr (FP8) {
            uint32_t b[2];
            ptx::ldmatrix_x2_trans(b, v + (lane % 16) * PITCH + step);
            ptx::mma_m16n8k16<MMA>(o[2 * step], p, even_halves(b[0]), even_halves(b[1]));
            ptx::mma_m16n8k16<MMA>(o[2 * step + 1], p, odd_halves(b[0]), odd_halves(b[1]));
        } else {
            uint32_t b[4];
            ptx::ldmatrix_x4_trans(b, v + (lane % 16) * PITCH + step * 2 + lane / 16);
            ptx::mma_m16n8k16<MMA>(o[2 * step], p, b[0], b[1]);
            ptx::mma_m16n8k16<MMA>(o[2 * step + 1], p, b[2], b[3]);
        }
    }
}

// Where column `d` of q lies in its row, so that it meets its own column of K.
__device__ __forceinline__ int q_column(int d) {
    return FP8 ? d / 16 * 16 + d % 2 * 8 + d % 16 / 4 * 2 + d % 4 / 2 : d;
}

// q's heads into shared memory, zeros in the rows without one. All threads of the block.
__device__ __forceinline__ void load_q(uint4* s_q, const SCALAR* q, int heads) {
    for (int i = threadIdx.x; i < ROWS * Q_CHUNKS; i += WARPS * 32) {
        const int row = i / Q_CHUNKS, chunk = i % Q_CHUNKS;
        const Vec16<SCALAR> x = row < heads ? Vec16<SCALAR>::load(q + row * HEAD_SIZE + chunk * 8) : Vec16<SCALAR>::zero();
        if constexpr (FP8) {
            MMA* to = reinterpret_cast<MMA*>(s_q + row * Q_PITCH);
#pragma unroll
            for (int e = 0; e < 8; e++)
                to[q_column(chunk * 8 + e)] = from_float<MMA>(fminf(fmaxf(to_float(x.v[e]), -65504.0f), 65504.0f));
        } else {
            x.store(reinterpret_cast<SCALAR*>(s_q + row * Q_PITCH + chunk));
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, HEAD_SIZE > 128 ? 1 : 2)
    decode(SCALAR* __restrict__ out, float* __restrict__ partial_out, float* __restrict__ partial_lse,
           const SCALAR* __restrict__ q, const KV* __restrict__ k_cache, const KV* __restrict__ v_cache,
           const int* __restrict__ block_tables, const int* __restrict__ seq_lens, const int* __restrict__ items,
           const int* __restrict__ num_items, const int64_t* __restrict__ token_rows, int64_t q_stride, int max_blocks,
           int num_heads, int num_kv_heads, float scale, float softcap, int window, float v_scale) {
    if (int(blockIdx.x) >= *num_items) return;
    const int4 item = *reinterpret_cast<const int4*>(items + int64_t(blockIdx.x) * 4);
    const int row = item.x, begin = item.y, end = item.z, slot = item.w;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    const int per_kv_head = num_heads / num_kv_heads;
    const int kv_head = blockIdx.y % num_kv_heads, first_of_group = int(blockIdx.y) / num_kv_heads * ROWS;
    const int heads = min(ROWS, per_kv_head - first_of_group);
    const int first_head = kv_head * per_kv_head + first_of_group;
    const int64_t token = token_rows == nullptr ? row : token_rows[row];
    const int lowest = window > 0 ? max(begin, seq_lens[row] - window) : begin;  // keys [lowest, end) are visible

    DYN_SMEM(uint4, s_q);
    uint4* s_kv = s_q + ROWS * Q_PITCH;
    const auto s_k = [&](int stage) { return s_kv + ((warp * STAGES + stage) * 2) * KEYS * PITCH; };
    const auto s_v = [&](int stage) { return s_k(stage) + KEYS * PITCH; };

    const int num_tiles = (end - begin + TILE - 1) / TILE;
    const int* table = block_tables + int64_t(row) * max_blocks;
    const auto first_key = [&](int tile) { return begin + tile * TILE + warp * KEYS; };
    const auto block_of = [&](int tile) { return first_key(tile) < end ? table[first_key(tile) / BLOCK_SIZE] : 0; };

    int block = block_of(0);
    // Copies the warp's keys of a tile; rows that are not visible become zeros (0 * NaN would be NaN in V).
    const auto issue = [&](int tile, int stage) {
        const int key = first_key(tile);
        if (key < end) {
            const int64_t rows = (int64_t(block) * num_kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE;
            const KV* k = k_cache + rows * HEAD_SIZE;
            const KV* v = v_cache + rows * HEAD_SIZE;
#pragma unroll
            for (int i = lane; i < KEYS * CHUNKS; i += 32) {
                const int r = i / CHUNKS, to = r * PITCH + i % CHUNKS;
                const bool visible = key + r >= lowest && key + r < end;
                ptx::cp_async16(s_k(stage) + to, k + i * CHUNK_ELEMENTS, visible);
                ptx::cp_async16(s_v(stage) + to, v + i * CHUNK_ELEMENTS, visible);
            }
        }
        ptx::cp_async_commit();
        block = block_of(tile + 1);
    };

#pragma unroll
    for (int tile = 0; tile < STAGES - 1; tile++) issue(tile, tile);
    load_q(s_q, q + token * q_stride + int64_t(first_head) * HEAD_SIZE, heads);
    __syncthreads();

    float o[2 * STEPS][4];  // heads g and g + 8, unnormalized
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
    OnlineSoftmax state[2];  // of heads g and g + 8; sums over this lane's keys alone until the end
    state[0].init();
    state[1].init();

    int stage = 0, free_stage = STAGES - 1;
    for (int tile = 0; tile < num_tiles; tile++) {
        ptx::cp_async_wait<STAGES - 2>();
        __syncwarp();  // this tile has landed for all lanes, and all are done with the one before, whose stage is free
        issue(tile + STAGES - 1, free_stage);
        const int key = first_key(tile);
        if (key < end && key + KEYS > lowest) {
            float s[2][4];
            multiply_qk(s, s_q, s_k(stage), lane);
            float largest[2] = {negative_infinity(), negative_infinity()};
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int at = key + i * 8 + t * 2 + e % 2;
                    float logit = s[i][e] * (scale * FP8_BIAS);
                    if (softcap > 0.0f) logit = soft_cap(logit, softcap);
                    s[i][e] = at >= lowest && at < end ? logit * LOG2E : negative_infinity();
                    largest[e / 2] = fmaxf(largest[e / 2], s[i][e]);
                }
            float factor[2];
#pragma unroll
            for (int r = 0; r < 2; r++) factor[r] = state[r].raise(warp_max<4>(largest[r]));
            if (__any_sync(FULL_WARP, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < 2 * STEPS; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) o[i][e] *= factor[e / 2];
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[i][e] = state[e / 2].weight(s[i][e]);
                    state[e / 2].sum += s[i][e];
                }
            const uint32_t p[4] = {pack<MMA>(s[0][0], s[0][1]), pack<MMA>(s[0][2], s[0][3]),
                                   pack<MMA>(s[1][0], s[1][1]), pack<MMA>(s[1][2], s[1][3])};
            multiply_pv(o, p, s_v(stage), lane);
        }
        free_stage = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    // Join the warps: each leaves its part in shared memory, then every thread sums four dims of a head. No copy is under
    // way: every tile was waited for.
    __syncthreads();  // q and the stages are no longer read
    float* s_out = reinterpret_cast<float*>(s_kv);                         // [WARPS][ROWS][JOIN_PITCH]
    OnlineSoftmax* s_state = reinterpret_cast<OnlineSoftmax*>(s_q);        // [WARPS][ROWS]
#pragma unroll
    for (int r = 0; r < 2; r++) {
        state[r].sum = warp_sum<4>(state[r].sum);
        const int head = g + 8 * r;
        if (head >= heads) continue;
        if (t == 0) s_state[warp * ROWS + head] = state[r];
        float* part = s_out + (warp * ROWS + head) * JOIN_PITCH;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const float *even = o[2 * step] + 2 * r, *odd = o[2 * step + 1] + 2 * r;
            if constexpr (FP8) {
                store4(part + step * 16 + t * 4, make_float4(even[0], odd[0], even[1], odd[1]));
            } else {
                *reinterpret_cast<float2*>(part + step * 16 + t * 2) = make_float2(even[0], even[1]);
                *reinterpret_cast<float2*>(part + step * 16 + 8 + t * 2) = make_float2(odd[0], odd[1]);
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * (HEAD_SIZE / 4); i += WARPS * 32) {
        const int head = i / (HEAD_SIZE / 4), d = i % (HEAD_SIZE / 4) * 4;
        OnlineSoftmax joint;
        joint.init();
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float2 factor = joint.merge(s_state[w * ROWS + head]);
            const float4 x = *reinterpret_cast<const float4*>(s_out + (w * ROWS + head) * JOIN_PITCH + d);
            sum.x = sum.x * factor.x + x.x * factor.y;
            sum.y = sum.y * factor.x + x.y * factor.y;
            sum.z = sum.z * factor.x + x.z * factor.y;
            sum.w = sum.w * factor.x + x.w * factor.y;
        }
        const float by = joint.normalizer() * v_scale * FP8_BIAS;
        const float4 result = make_float4(sum.x * by, sum.y * by, sum.z * by, sum.w * by);
        if (slot < 0) {
            store4(out + (token * num_heads + first_head + head) * HEAD_SIZE + d, result);
        } else {
            const int64_t part = int64_t(slot) * num_heads + first_head + head;
            store4(partial_out + part * HEAD_SIZE + d, result);
            if (d == 0) partial_lse[part] = joint.lse();
        }
    }
}
