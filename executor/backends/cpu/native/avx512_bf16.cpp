// AVX-512 with products of bfloat16 pairs: twice the products an instruction where the cache holds bfloat16.
#include "interface.h"

#ifdef __x86_64__
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#endif

#define OCTAVO_LEVEL avx512_bf16
#define OCTAVO_LANES 16
#define OCTAVO_PAIRS
#include "level.inc"

namespace octavo {
const Kernels& avx512_bf16_kernels() {
    static constexpr Kernels kernels = {
        avx512_bf16::attend, avx512_bf16::rope, avx512_bf16::norm, avx512_bf16::silu, avx512_bf16::largest,
        avx512_bf16::gather, avx512_bf16::multiply,
    };
    return kernels;
}
}  // namespace octavo

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
namespace octavo {
const Kernels& avx512_bf16_kernels() { return baseline_kernels(); }
}  // namespace octavo
#endif
