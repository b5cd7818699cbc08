// Attention of prompt chunks over the paged cache without tensor cores: for fp32, which they would round.
//
// Problem, tiles and arguments: as prefill.cu; here a tile has ROWS packed rows, and all products are fp32.
// Layout: as prefill.cu, whatever SCALAR and KV are.
// Grid (num_tiles, num_kv_heads); 128 threads, eight a row: each scores every eighth key of a tile, then sums every
//   eighth group of four columns of V.
// Shared memory: Q [ROWS], K [KEYS], V [KEYS] rows of HEAD_SIZE + 4 floats, weights [ROWS, KEYS + 1].
// Bound by: shared memory; it is the exact one, not the fast one.
#include "common.cuh"

constexpr int ROWS = 16;
constexpr int KEYS = 32;
constexpr int THREADS = 128;
constexpr int LANES = THREADS / ROWS;  // threads of a row, neighbours in a warp
constexpr int PITCH = HEAD_SIZE + 4;
constexpr int COLUMNS = (HEAD_SIZE / 4 + LANES - 1) / LANES;  // groups of four columns a thread
static_assert(HEAD_SIZE % 16 == 0, "whole vectors of the narrowest format");

// Reads rows of HEAD_SIZE elements into shared memory as fp32; row_address(row) is null for a row of zeros.
template <class T, class RowAddress>
__device__ __forceinline__ void load_rows(float* to, int rows, RowAddress row_address) {
    constexpr int VEC = Vec16<T>::SIZE, PIECES = HEAD_SIZE / VEC;
    for (int i = threadIdx.x; i < rows * PIECES; i += THREADS) {
        const int row = i / PIECES, column = i % PIECES * VEC;
        const T* from = row_address(row);
        const Vec16<T> piece = from == nullptr ? Vec16<T>::zero() : Vec16<T>::load(from + column);
#pragma unroll
        for (int e = 0; e < VEC; e++) to[row * PITCH + column + e] = to_float(piece.v[e]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_simt(SCALAR* __restrict__ out, const SCALAR* __restrict__ q, const KV* __restrict__ k_cache,
                 const KV* __restrict__ v_cache, const int* __restrict__ tiles,
                 const int* __restrict__ query_start_loc,  // [num_seqs + 1]
                 const int* __restrict__ seq_lens,         // [num_seqs]
                 const int* __restrict__ block_tables,     // [num_seqs, max_blocks]
                 int max_blocks, int num_heads, int64_t q_stride, float score_scale, int window, float softcap,
                 float v_scale) {
    const int seq = tiles[blockIdx.x * 2], first_token = tiles[blockIdx.x * 2 + 1];
    const int kv_head = blockIdx.y, num_kv_heads = gridDim.y, group = num_heads / num_kv_heads;
    const int query_start = query_start_loc[seq], num_queries = query_start_loc[seq + 1] - query_start;
    const int num_tokens = min(ROWS / group, num_queries - first_token), num_rows = num_tokens * group;
    const int first_position = seq_lens[seq] - num_queries + first_token, end = first_position + num_tokens;
    const int* table = block_tables + int64_t(seq) * max_blocks;

    DYN_SMEM(float, shared_q);
    float* shared_k = shared_q + ROWS * PITCH;
    float* shared_v = shared_k + KEYS * PITCH;
    float* weights = shared_v + KEYS * PITCH;
    load_rows<SCALAR>(shared_q, ROWS, [&](int row) -> const SCALAR* {
        if (row >= num_rows) return nullptr;
        const int64_t token = query_start + first_token + row / group;
        return q + token * q_stride + (kv_head * group + row % group) * HEAD_SIZE;
    });

    const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int position = first_position + min(row, num_rows - 1) / group;  // rows past the end do as the last one
    const float* own_q = shared_q + row * PITCH;
    float* own_weights = weights + row * (KEYS + 1);
    OnlineSoftmax softmax;
    softmax.init();
    float acc[COLUMNS][4] = {};

    const int begin = window > 0 ? max(first_position - window + 1, 0) : 0;
    for (int first_key = begin / KEYS * KEYS; first_key < end; first_key += KEYS) {
        const auto key_offset = [&](int key) {
            return (int64_t(table[key / BLOCK_SIZE]) * num_kv_heads + kv_head) * (BLOCK_SIZE * HEAD_SIZE) +
                   key % BLOCK_SIZE * HEAD_SIZE;
        };
        __syncthreads();  // all are done with the last tile
        load_rows<KV>(shared_k, KEYS, [&](int i) -> const KV* {
            return first_key + i < end ? k_cache + key_offset(first_key + i) : nullptr;
        });
        load_rows<KV>(shared_v, KEYS, [&](int i) -> const KV* {
            return first_key + i < end ? v_cache + key_offset(first_key + i) : nullptr;
        });
        __syncthreads();

        float scores[KEYS / LANES];
        float largest = negative_infinity();
#pragma unroll
        for (int j = 0; j < KEYS / LANES; j++) {
            const int key = first_key + j * LANES + lane;
            const float* k = shared_k + (j * LANES + lane) * PITCH;
            float score = 0.0f;
            for (int d = 0; d < HEAD_SIZE; d += 4) {
                const float4 a = *reinterpret_cast<const float4*>(own_q + d);
                const float4 b = *reinterpret_cast<const float4*>(k + d);
                score += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
            }
            score *= score_scale;
            if (softcap > 0.0f) score = soft_cap(score, softcap);
            const bool seen = key <= position && (window == 0 || key > position - window);
            scores[j] = seen ? score * LOG2E : negative_infinity();
            largest = fmaxf(largest, scores[j]);
        }
        const float factor = softmax.raise(warp_max<LANES>(largest));
#pragma unroll
        for (int j = 0; j < KEYS / LANES; j++) {
            const float weight = softmax.weight(scores[j]);
            softmax.sum += weight;
            own_weights[j * LANES + lane] = weight;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < COLUMNS; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[i][e] *= factor;
        for (int key = 0; key < KEYS; key++) {
            const float weight = own_weights[key];
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                const int column = (i * LANES + lane) * 4;
                if (column >= HEAD_SIZE) continue;
                const float4 v = *reinterpret_cast<const float4*>(shared_v + key * PITCH + column);
                acc[i][0] += weight * v.x;
                acc[i][1] += weight * v.y;
                acc[i][2] += weight * v.z;
                acc[i][3] += weight * v.w;
            }
        }
    }

    softmax.sum = warp_sum<LANES>(softmax.sum);
    if (row >= num_rows) return;
    const float scale = softmax.normalizer() * v_scale;
    const int64_t token = query_start + first_token + row / group;
    SCALAR* to = out + (token * num_heads + kv_head * group + row % group) * HEAD_SIZE;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        const int column = (i * LANES + lane) * 4;
        if (column >= HEAD_SIZE) continue;
        store4(to + column, make_float4(acc[i][0] * scale, acc[i][1] * scale, acc[i][2] * scale, acc[i][3] * scale));
    }
}
