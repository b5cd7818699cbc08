// Paged attention of decode rows on the ordinary cores: for one or two query heads on a K/V head, and for fp32 caches.
//
// Problem: as decode.cu, where an M tile of 16 rows would be nearly empty, or where the cache's format has no mma. A
//   block takes GROUP heads of one K/V head; where a K/V head has more, further blocks in y read it again (from L2).
// Work, layout: as decode.cu; the same arguments, so that the host launches either.
// Grid (items, num_kv_heads * ceil(G / GROUP)); 4 warps. LANES lanes read one key's row, 16 bytes each, so a warp reads
//   32 / LANES keys at once, UNROLL times in a row before it uses them: that many 16-byte loads a lane are in flight,
//   for K and for V. Each team of LANES has its own softmax, joined by shuffles at the end; warps join in shared memory.
// Shared memory: parts [4][GROUP][HEAD_SIZE] and states, static.
// Bound by: memory; one multiply-add for each element and head beside it.
#include "common.cuh"

constexpr int WARPS = 4;
constexpr int VEC = 16 / int(sizeof(KV));
constexpr int CHUNKS = HEAD_SIZE / VEC;
constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }
constexpr int LANES = CHUNKS >= 32 ? 32 : power_of_two_from(CHUNKS);
constexpr int PER_LANE = (CHUNKS + LANES - 1) / LANES;
constexpr int TEAMS = 32 / LANES;  // keys that a warp reads at once
constexpr int UNROLL = PER_LANE > 1 || VEC > 8 ? 2 : 4;
constexpr int STEP = TEAMS * UNROLL;  // keys of a warp, per turn
constexpr int MIN_BLOCKS = GROUP == 1 && VEC <= 8 ? 4 : 3;  // so many registers that nothing spills
static_assert(HEAD_SIZE % VEC == 0, "whole 16-byte chunks");

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
    decode_simt(SCALAR* __restrict__ out, float* __restrict__ partial_out, float* __restrict__ partial_lse,
                const SCALAR* __restrict__ q, const KV* __restrict__ k_cache, const KV* __restrict__ v_cache,
                const int* __restrict__ block_tables, const int* __restrict__ seq_lens, const int* __restrict__ items,
                const int* __restrict__ num_items, const int64_t* __restrict__ token_rows, int64_t q_stride,
                int max_blocks, int num_heads, int num_kv_heads, float scale, float softcap, int window, float v_scale) {
    __shared__ __align__(16) float s_out[WARPS][GROUP][HEAD_SIZE];
    __shared__ OnlineSoftmax s_state[WARPS][GROUP];
    if (int(blockIdx.x) >= *num_items) return;
    const int4 item = *reinterpret_cast<const int4*>(items + int64_t(blockIdx.x) * 4);
    const int row = item.x, begin = item.y, end = item.z, slot = item.w;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = lane / LANES, part = lane % LANES;

    const int per_kv_head = num_heads / num_kv_heads;
    const int kv_head = blockIdx.y % num_kv_heads, first_of_group = int(blockIdx.y) / num_kv_heads * GROUP;
    const int heads = min(GROUP, per_kv_head - first_of_group);
    const int first_head = kv_head * per_kv_head + first_of_group;
    const int64_t token = token_rows == nullptr ? row : token_rows[row];
    const int lowest = window > 0 ? max(begin, seq_lens[row] - window) : begin;  // keys [lowest, end) are visible
    const int* table = block_tables + int64_t(row) * max_blocks;

    float my_q[GROUP][PER_LANE][VEC], sum[GROUP][PER_LANE][VEC];
    OnlineSoftmax state[GROUP];
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        state[h].init();
#pragma unroll
        for (int c = 0; c < PER_LANE; c++) {
            const int d = (part + c * LANES) * VEC;
#pragma unroll
            for (int e = 0; e < VEC; e++) {
                const bool real = h < heads && d < HEAD_SIZE;
                my_q[h][c][e] = real ? to_float(q[token * q_stride + int64_t(first_head + h) * HEAD_SIZE + d + e]) : 0.0f;
                sum[h][c][e] = 0.0f;
            }
        }
    }

    // Turns are counted from `begin`, not from `lowest`: a key's place does not depend on the window.
    for (int first = begin + warp * STEP; first < end; first += WARPS * STEP) {
        if (first + STEP <= lowest) continue;
        Vec16<KV> k[UNROLL][PER_LANE], v[UNROLL][PER_LANE];
        bool visible[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int key = first + u * TEAMS + team;
            visible[u] = key >= lowest && key < end;
            const int block = visible[u] ? table[key / BLOCK_SIZE] : 0;
            const int64_t at = ((int64_t(block) * num_kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_SIZE;
#pragma unroll
            for (int c = 0; c < PER_LANE; c++) {
                const int d = (part + c * LANES) * VEC;
                const bool real = visible[u] && d < HEAD_SIZE;
                k[u][c] = real ? Vec16<KV>::load(k_cache + at + d) : Vec16<KV>::zero();
                v[u][c] = real ? Vec16<KV>::load(v_cache + at + d) : Vec16<KV>::zero();
            }
        }
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            float logit[UNROLL], largest = negative_infinity();
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                float dot = 0.0f;
#pragma unroll
                for (int c = 0; c < PER_LANE; c++)
#pragma unroll
                    for (int e = 0; e < VEC; e++) dot += my_q[h][c][e] * to_float(k[u][c].v[e]);
                float x = warp_sum<LANES>(dot) * scale;
                if (softcap > 0.0f) x = soft_cap(x, softcap);
                logit[u] = visible[u] ? x * LOG2E : negative_infinity();
                largest = fmaxf(largest, logit[u]);
            }
            const float factor = state[h].raise(largest);
#pragma unroll
            for (int c = 0; c < PER_LANE; c++)
#pragma unroll
                for (int e = 0; e < VEC; e++) sum[h][c][e] *= factor;
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                const float weight = state[h].weight(logit[u]);
                state[h].sum += weight;
#pragma unroll
                for (int c = 0; c < PER_LANE; c++)
#pragma unroll
                    for (int e = 0; e < VEC; e++) sum[h][c][e] += weight * to_float(v[u][c].v[e]);
            }
        }
    }

    // Join the warp's teams, then the warps.
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
#pragma unroll
        for (int offset = LANES; offset < 32; offset <<= 1) {
            OnlineSoftmax other;
            other.max = __shfl_xor_sync(FULL_WARP, state[h].max, offset);
            other.sum = __shfl_xor_sync(FULL_WARP, state[h].sum, offset);
            const float2 factor = state[h].merge(other);
#pragma unroll
            for (int c = 0; c < PER_LANE; c++)
#pragma unroll
                for (int e = 0; e < VEC; e++)
                    sum[h][c][e] = sum[h][c][e] * factor.x + __shfl_xor_sync(FULL_WARP, sum[h][c][e], offset) * factor.y;
        }
        if (team != 0) continue;
        if (part == 0) s_state[warp][h] = state[h];
#pragma unroll
        for (int c = 0; c < PER_LANE; c++) {
            const int d = (part + c * LANES) * VEC;
            if (d >= HEAD_SIZE) continue;
#pragma unroll
            for (int e = 0; e < VEC; e += 4)
                store4(&s_out[warp][h][d + e],
                       make_float4(sum[h][c][e], sum[h][c][e + 1], sum[h][c][e + 2], sum[h][c][e + 3]));
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * (HEAD_SIZE / 4); i += WARPS * 32) {
        const int head = i / (HEAD_SIZE / 4), d = i % (HEAD_SIZE / 4) * 4;
        OnlineSoftmax joint;
        joint.init();
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float2 factor = joint.merge(s_state[w][head]);
            const float4 x = *reinterpret_cast<const float4*>(&s_out[w][head][d]);
            total.x = total.x * factor.x + x.x * factor.y;
            total.y = total.y * factor.x + x.y * factor.y;
            total.z = total.z * factor.x + x.z * factor.y;
            total.w = total.w * factor.x + x.w * factor.y;
        }
        const float by = joint.normalizer() * v_scale;
        const float4 result = make_float4(total.x * by, total.y * by, total.z * by, total.w * by);
        if (slot < 0) {
            store4(out + (token * num_heads + first_head + head) * HEAD_SIZE + d, result);
        } else {
            const int64_t at = int64_t(slot) * num_heads + first_head + head;
            store4(partial_out + at * HEAD_SIZE + d, result);
            if (d == 0) partial_lse[at] = joint.lse();
        }
    }
}
