// Joins the partitions of split attention rows into the final output.
//
// Problem: a row's K/V was cut into partitions (split-KV); each left its normalized output and its log-sum-exp in one
//   slot. The row is sum_i w_i * out_i with w_i = e^(lse_i - max) / sum_j e^(lse_j - max): two passes over a handful of
//   slots, the first for the maximum, so that no exponent overflows whatever the logits.
// Layout: partial_out [num_slots, num_heads, HEAD_SIZE] fp32, partial_lse [num_slots, num_heads] fp32 (natural log),
//   out [num_tokens, num_heads, HEAD_SIZE] SCALAR. Row r owns slots [slot_ptr[r], slot_ptr[r + 1]) and is token
//   token_rows[r] (int64), or token r where that is null. A row without slots was not split, and is left as it is.
// Grid (num_rows, num_heads); HEAD_SIZE / 4 threads, four elements each. No shared memory.
// Bound by: launch and two dependent reads; the bytes are few and lie in L2.
#include "common.cuh"

static_assert(HEAD_SIZE % 4 == 0, "four elements a thread");

extern "C" __global__ void __launch_bounds__(HEAD_SIZE / 4)
    merge_states(SCALAR* __restrict__ out, const float* __restrict__ partial_out, const float* __restrict__ partial_lse,
                 const int* __restrict__ slot_ptr, const int64_t* __restrict__ token_rows) {
    const int row = blockIdx.x, first = slot_ptr[row], end = slot_ptr[row + 1];
    if (first == end) return;
    const int head = blockIdx.y, num_heads = gridDim.y, d = threadIdx.x * 4;

    float largest = negative_infinity();
    for (int slot = first; slot < end; slot++) largest = fmaxf(largest, partial_lse[int64_t(slot) * num_heads + head]);
    const float from = largest == negative_infinity() ? 0.0f : largest;

    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float weights = 0.0f;
    for (int slot = first; slot < end; slot++) {
        const int64_t part = int64_t(slot) * num_heads + head;
        const float weight = ptx::ex2((partial_lse[part] - from) * LOG2E);
        const float4 x = *reinterpret_cast<const float4*>(partial_out + part * HEAD_SIZE + d);
        weights += weight;
        sum.x += weight * x.x;
        sum.y += weight * x.y;
        sum.z += weight * x.z;
        sum.w += weight * x.w;
    }
    const float scale = weights > 0.0f ? 1.0f / weights : 0.0f;
    const int64_t token = token_rows == nullptr ? row : token_rows[row];
    store4(out + (token * num_heads + head) * HEAD_SIZE + d,
           make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale));
}
