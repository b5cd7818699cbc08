// From the fused qkv row: q rotated into a tensor of its own, K rotated and V as it is into the paged cache.
//
// Problem: optional RMS norm of each q and k head (Qwen3), then the rotary embedding in its half-rotated layout: the
//   pair (x[i], x[i + HEAD_SIZE / 2]) turns by the angle whose cosine and sine stand at i of the position's row. An fp8
//   cache takes value / scale. fp32 inside, one rounding.
// Layout: qkv [num_tokens, row_stride] SCALAR: num_heads heads of q, num_kv_heads of k, then of v; q_out [num_tokens,
//   num_heads, HEAD_SIZE]; caches [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_SIZE] KV; cos_sin [max_positions,
//   HEAD_SIZE] fp32: cosines, then sines. slot_mapping [num_tokens] int64 = block * BLOCK_SIZE + offset; -1: nothing is
//   written to the cache for this token (padding of a graph; its q is rotated all the same).
// Grid: (tokens * heads) / (128 / GROUP) blocks of 128 threads; GROUP lanes a head, each with 8 elements of the first
//   half and the 8 that they pair with. At head sizes 80 and 96 the last lanes of a group idle. No shared memory.
// Bound by: memory; every element is read and written once.
#include "common.cuh"

constexpr int HALF = HEAD_SIZE / 2;
constexpr int WORKERS = HALF / 8;
constexpr int GROUP = WORKERS <= 1 ? 1 : WORKERS <= 2 ? 2 : WORKERS <= 4 ? 4 : WORKERS <= 8 ? 8 : 16;
constexpr int THREADS = 128;
static_assert(HEAD_SIZE % 16 == 0 && HEAD_SIZE <= 256, "two halves of whole vectors, within a warp");

__device__ __forceinline__ void load8(float (&to)[8], const float* __restrict__ from) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(from + i);
        to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
    }
}
template <class T>
__device__ __forceinline__ void load8(float (&to)[8], const T* __restrict__ from) {
    const Vec16<T> x = Vec16<T>::load(from);
#pragma unroll
    for (int i = 0; i < 8; i++) to[i] = to_float(x.v[i]);
}
__device__ __forceinline__ void store8(fp32* to, const float (&x)[8]) {
    store4(to, make_float4(x[0], x[1], x[2], x[3]));
    store4(to + 4, make_float4(x[4], x[5], x[6], x[7]));
}
__device__ __forceinline__ void store8(fp8* to, const float (&x)[8]) {
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) words[i / 4] |= uint32_t(from_float<fp8>(x[i]).bits) << (i % 4 * 8);
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
}
template <class T>
__device__ __forceinline__ void store8(T* to, const float (&x)[8]) {
    Vec16<T> packed;
#pragma unroll
    for (int i = 0; i < 8; i++) packed.v[i] = from_float<T>(x[i]);
    packed.store(to);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    rope_kv_write(SCALAR* __restrict__ q_out, KV* __restrict__ k_cache, KV* __restrict__ v_cache,
                  const SCALAR* __restrict__ qkv, const float* __restrict__ cos_sin,
                  const int64_t* __restrict__ positions,     // [num_tokens]
                  const int64_t* __restrict__ slot_mapping,  // [num_tokens]
                  const SCALAR* __restrict__ q_norm,         // [HEAD_SIZE], or null
                  const SCALAR* __restrict__ k_norm,         // [HEAD_SIZE], or null
                  int num_tokens, int num_heads, int num_kv_heads, int64_t row_stride, float norm_eps, float k_scale,
                  float v_scale) {
    const int heads = num_heads + 2 * num_kv_heads, worker = threadIdx.x % GROUP;
    const int64_t item = int64_t(blockIdx.x) * (THREADS / GROUP) + threadIdx.x / GROUP;
    // Everyone stays to the end: the norm's shuffles need whole warps.
    const bool active = item < int64_t(num_tokens) * heads && worker < WORKERS;
    const int64_t token = active ? item / heads : 0;
    const int head = active ? int(item % heads) : 0, column = worker * 8;
    const bool is_q = head < num_heads, is_v = head >= num_heads + num_kv_heads;

    float first[8] = {}, second[8] = {};
    if (active) {
        const SCALAR* from = qkv + token * row_stride + head * HEAD_SIZE + column;
        load8(first, from);
        load8(second, from + HALF);
    }
    if (q_norm != nullptr || k_norm != nullptr) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) squares += first[i] * first[i] + second[i] * second[i];
        squares = warp_sum<GROUP>(squares);
        const SCALAR* weight = is_v ? nullptr : is_q ? q_norm : k_norm;
        if (active && weight != nullptr) {
            const float scale = 1.0f / sqrtf(squares / float(HEAD_SIZE) + norm_eps);
            float first_weight[8], second_weight[8];
            load8(first_weight, weight + column);
            load8(second_weight, weight + column + HALF);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                first[i] *= scale * first_weight[i];
                second[i] *= scale * second_weight[i];
            }
        }
    }
    if (!active) return;
    if (!is_v) {
        const float* row = cos_sin + positions[token] * HEAD_SIZE + column;
        float cosines[8], sines[8];
        load8(cosines, row);
        load8(sines, row + HALF);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float x = first[i], y = second[i];
            first[i] = x * cosines[i] - y * sines[i];
            second[i] = y * cosines[i] + x * sines[i];
        }
    }
    if (is_q) {
        SCALAR* to = q_out + (token * num_heads + head) * HEAD_SIZE + column;
        store8(to, first);
        store8(to + HALF, second);
        return;
    }
    const int64_t slot = slot_mapping[token];
    if (slot < 0) return;
    if constexpr (is_same<KV, fp8>::value) {
        const float scale = is_v ? v_scale : k_scale;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            first[i] /= scale;
            second[i] /= scale;
        }
    }
    const int kv_head = is_v ? head - num_heads - num_kv_heads : head - num_heads;
    const int64_t row = (slot / BLOCK_SIZE * num_kv_heads + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE;
    KV* to = (is_v ? v_cache : k_cache) + row * HEAD_SIZE + column;
    store8(to, first);
    store8(to + HALF, second);
}
