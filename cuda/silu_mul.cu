// The gate of a feed-forward block: silu(gate) * up, where silu(x) = x / (1 + e^-x).
//
// Problem: gate_up [num_rows, 2 * size] SCALAR holds gate, then up, of each row -> out [num_rows, size]; fp32 inside,
//   one rounding.
// Grid (num_rows, pieces of 256 * 16 bytes); 256 threads of 16 bytes each. No shared memory.
// Bound by: memory; everything is read and written once.
#include "common.cuh"

constexpr int VEC = Vec16<SCALAR>::SIZE;

extern "C" __global__ void __launch_bounds__(256)
    silu_mul(SCALAR* __restrict__ out, const SCALAR* __restrict__ gate_up, int size) {
    const int column = (int(blockIdx.y) * 256 + int(threadIdx.x)) * VEC;
    if (column >= size) return;
    const int64_t row = blockIdx.x;
    const Vec16<SCALAR> gate = Vec16<SCALAR>::load(gate_up + row * 2 * size + column);
    const Vec16<SCALAR> up = Vec16<SCALAR>::load(gate_up + (row * 2 + 1) * size + column);
    Vec16<SCALAR> result;
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        const float x = to_float(gate.v[i]);
        // e^-x overflows to infinity below -88, and x / inf is the zero it should be.
        result.v[i] = from_float<SCALAR>(x / (1.0f + expf(-x)) * to_float(up.v[i]));
    }
    result.store(out + row * size + column);
}
