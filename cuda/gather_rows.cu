// Gathers rows of a matrix: the embedding of token ids.
//
// Problem: out[i] = table[indices[i]], rows of row_bytes bytes whatever their format. An index below 0 is ~d: the token
// that draw d of the step before left in drawn[d], which the host need not know yet.
// Layout: out [num_rows, row_bytes], table [.., row_bytes] contiguous; indices [num_rows] int64; drawn [..] int64, null
// where no index is below 0.
// Grid (num_rows, pieces of 256 * 16 bytes); 256 threads of 16 bytes. No shared memory.
// Bound by: memory.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    gather_rows(uint8_t* __restrict__ out, const uint8_t* __restrict__ table, const int64_t* __restrict__ indices,
                const int64_t* __restrict__ drawn, int64_t row_bytes) {
    const int64_t column = (int64_t(blockIdx.y) * 256 + threadIdx.x) * 16;
    if (column >= row_bytes) return;
    int64_t index = indices[blockIdx.x];
    if (index < 0) index = drawn[~index];
    const uint4 piece = *reinterpret_cast<const uint4*>(table + index * row_bytes + column);
    *reinterpret_cast<uint4*>(out + blockIdx.x * row_bytes + column) = piece;
}
