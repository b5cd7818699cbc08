// Copies whole K/V blocks in all layers: what copy-on-write asks for before a step's writes.
//
// Problem: for each pair (source, destination) and each cache tensor (K and V of every layer), block_bytes bytes. No
//   block is in both columns, so that no order is needed.
// Layout: caches [num_caches] int64 addresses of tensors whose blocks are contiguous; pairs [num_pairs, 2] int32.
// Grid (num_pairs, num_caches); 256 threads of 16 bytes, looping. No shared memory.
// Bound by: memory.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    copy_blocks(const int64_t* __restrict__ caches, const int* __restrict__ pairs, int64_t block_bytes) {
    uint8_t* cache = reinterpret_cast<uint8_t*>(caches[blockIdx.y]);
    const uint8_t* from = cache + pairs[blockIdx.x * 2] * block_bytes;
    uint8_t* to = cache + pairs[blockIdx.x * 2 + 1] * block_bytes;
#pragma unroll 4
    for (int64_t i = int64_t(threadIdx.x) * 16; i < block_bytes; i += 256 * 16)
        *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
}
