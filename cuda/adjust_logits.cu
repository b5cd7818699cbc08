// Changes the logits of the draws that ask for it, into rows of their own: the model's own stay as they are.
//
// Problem: logit bias, allowed ids, forbidden ids (stop ids below min_tokens) and penalties, in the order and with the
//   meaning of executor/sampler.py. Also tells whether the model's row was finite before a mask could hide that it was
//   not.
// Layout: adjusted [num_adjusted, vocab] fp32. Token lists are compressed rows: draw i owns [ptr[i], ptr[i + 1]) of
//   ids. counts [num_adjusted, vocab] int32 is scratch with any contents, used by the penalized draws.
// Grid: one block a row; THREADS. Shared memory: one float a warp.
// Bound by: one pass over the row, three where penalties count; few rows of a step come here.
#include "common.cuh"

#ifndef THREADS
#define THREADS 1024
#endif

constexpr int SEEN = 1 << 30;  // the token stands in the prompt; the bits below count it in the output

// What stays finite though it would overflow; -inf, a token that is forbidden, is never passed. A NaN stays.
__device__ __forceinline__ float finite(float value) {
    constexpr float LARGEST = 3.402823466e+38f;
    return value > LARGEST ? LARGEST : value < -LARGEST ? -LARGEST : value;
}

// Copies the row (or -inf throughout); returns whether its maximum is finite, a NaN counting as +inf.
__device__ __forceinline__ bool copy_row(float* own, const float* __restrict__ row, int vocab, bool only_allowed) {
    __shared__ float warp_largest[THREADS / 32];
    float largest = negative_infinity();
    for (int id = threadIdx.x; id < vocab; id += THREADS) {
        const float logit = row[id];
        largest = fmaxf(largest, logit != logit ? -negative_infinity() : logit);
        own[id] = only_allowed ? negative_infinity() : logit;
    }
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32] = largest;
    __syncthreads();  // the warps' largest are there, and so is the row
    for (int warp = 0; warp < THREADS / 32; warp++) largest = fmaxf(largest, warp_largest[warp]);
    return fabsf(largest) < -negative_infinity();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    adjust_logits(float* adjusted,                       // [num_adjusted, vocab]
                  int* __restrict__ was_finite,          // [num_adjusted] 1: the model's own row was
                  int* counts,                           // [num_adjusted, vocab]
                  const float* __restrict__ logits,      // [num_rows, vocab]
                  const int* __restrict__ source_rows,   // [num_adjusted] rows of logits
                  const int* __restrict__ list_ptrs,     // [5, num_adjusted + 1] bias, allowed, forbidden, prompt, output
                  const int* __restrict__ list_ids,      // token ids of all lists
                  const float* __restrict__ bias_values, // one for each id of the bias lists, which stand first
                  const int* __restrict__ restricted,    // [num_adjusted] 1: only the allowed ids may be drawn
                  const int* __restrict__ penalized,     // [num_adjusted] 1: penalties apply
                  const float* __restrict__ penalties,   // [3, num_adjusted]: presence, frequency, repetition
                  int vocab) {
    const int index = blockIdx.x, num = gridDim.x, thread = threadIdx.x;
    const float* __restrict__ row = logits + int64_t(source_rows[index]) * vocab;
    float* own = adjusted + int64_t(index) * vocab;
    const int *bias = list_ptrs + index, *allowed = bias + num + 1, *forbidden = allowed + num + 1,
              *prompt = forbidden + num + 1, *output = prompt + num + 1;

    const bool only_allowed = restricted[index] != 0;
    const bool was = copy_row(own, row, vocab, only_allowed);
    if (thread == 0) was_finite[index] = was ? 1 : 0;
    if (only_allowed) {
        for (int i = allowed[0] + thread; i < allowed[1]; i += THREADS) own[list_ids[i]] = row[list_ids[i]];
        __syncthreads();
    }
    // A bias after the mask does what one before it does: -inf stays. A draw biases each id once at most.
    for (int i = bias[0] + thread; i < bias[1]; i += THREADS) {
        const float value = own[list_ids[i]];
        if (value != negative_infinity()) own[list_ids[i]] = finite(value + bias_values[i]);
    }
    __syncthreads();
    for (int i = forbidden[0] + thread; i < forbidden[1]; i += THREADS) own[list_ids[i]] = negative_infinity();
    if (penalized[index] == 0) return;

    int* count = counts + int64_t(index) * vocab;
    for (int id = thread; id < vocab; id += THREADS) count[id] = 0;
    __syncthreads();
    for (int i = prompt[0] + thread; i < prompt[1]; i += THREADS) count[list_ids[i]] = SEEN;
    __syncthreads();
    for (int i = output[0] + thread; i < output[1]; i += THREADS) atomicAdd(&count[list_ids[i]], 1);
    __syncthreads();
    const float presence = penalties[index], frequency = penalties[num + index];
    const float repetition = penalties[2 * num + index];
    for (int id = thread; id < vocab; id += THREADS) {
        const int seen = count[id], times = seen & (SEEN - 1);
        if (seen == 0) continue;
        float value = own[id];
        if (value == negative_infinity()) continue;  // forbidden, and no penalty may meet it with an infinity
        value = finite(value > 0.0f ? value / repetition : value * repetition);
        value -= float(times) * frequency;
        own[id] = finite(times > 0 ? value - presence : value);
    }
}
