// Root mean square norm, with the residual added first where there is one.
//
// Problem: total = x + residual, rounded to SCALAR (it is the next residual, and what is normalized is what is kept);
//   out = total / sqrt(mean(total^2) + eps) * weight, fp32 inside (fp64 where SCALAR is fp32).
// Layout: all [num_rows, hidden] SCALAR, contiguous; weight [hidden] SCALAR. out and total may be x or residual: every
//   element is read before it is written, by the thread that writes it.
// Grid: one block a row, hidden / (16 bytes * ITEMS) threads, rounded up to warps. A row stays in registers: ITEMS
//   vectors of 16 bytes a thread. Shared memory: one float a warp.
// Bound by: memory; x and residual are read once, out and total written once.
#include "common.cuh"

#ifndef ITEMS
#define ITEMS 1
#endif
constexpr int VEC = Vec16<SCALAR>::SIZE;

// What the scale is applied in: fp32 would lose more to its three roundings than the two ulps that are allowed.
template <class T>
struct Wide {
    using type = float;
};
template <>
struct Wide<fp32> {
    using type = double;
};
using wide = Wide<SCALAR>::type;

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm(SCALAR* out, SCALAR* total, const SCALAR* x, const SCALAR* residual,  // null: no residual, total unwritten
             const SCALAR* __restrict__ weight, int hidden, float eps) {
    __shared__ float warp_squares[32];
    const int64_t row = int64_t(blockIdx.x) * hidden;
    float values[ITEMS][VEC];
    float squares = 0.0f;
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
        const int column = (item * int(blockDim.x) + int(threadIdx.x)) * VEC;
        if (column >= hidden) continue;
        Vec16<SCALAR> sum = Vec16<SCALAR>::load(x + row + column);
        if (residual != nullptr) {
            const Vec16<SCALAR> old = Vec16<SCALAR>::load(residual + row + column);
#pragma unroll
            for (int i = 0; i < VEC; i++) sum.v[i] = from_float<SCALAR>(to_float(sum.v[i]) + to_float(old.v[i]));
            sum.store(total + row + column);
        }
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            values[item][i] = to_float(sum.v[i]);
            squares += values[item][i] * values[item][i];
        }
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) warp_squares[threadIdx.x / 32] = squares;
    __syncthreads();
    wide sum_of_squares = 0;
    for (int warp = 0; warp < int(blockDim.x) / 32; warp++) sum_of_squares += wide(warp_squares[warp]);
    const wide scale = wide(1) / sqrt(sum_of_squares / wide(hidden) + wide(eps));
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
        const int column = (item * int(blockDim.x) + int(threadIdx.x)) * VEC;
        if (column >= hidden) continue;
        const Vec16<SCALAR> factor = Vec16<SCALAR>::load(weight + column);
        Vec16<SCALAR> result;
#pragma unroll
        for (int i = 0; i < VEC; i++)
            result.v[i] = from_float<SCALAR>(float(wide(values[item][i]) * scale * wide(to_float(factor.v[i]))));
        result.store(out + row + column);
    }
}
