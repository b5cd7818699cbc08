// AVX-512 as every server CPU that has it: F, BW, VL, DQ; sixteen lanes.
#include "interface.h"

#ifdef __x86_64__
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#endif

#define OCTAVO_LEVEL avx512
#define OCTAVO_LANES 16
#include "level.inc"

namespace octavo {
const Kernels& avx512_kernels() {
    static constexpr Kernels kernels = {
        avx512::attend, avx512::rope, avx512::norm, avx512::silu, avx512::largest,
        avx512::gather, avx512::multiply,
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
const Kernels& avx512_kernels() { return baseline_kernels(); }
}  // namespace octavo
#endif
