// AVX2 and FMA: eight lanes.
#include "interface.h"

#ifdef __x86_64__
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define OCTAVO_LEVEL avx2
#define OCTAVO_LANES 8
#include "level.inc"

namespace octavo {
const Kernels& avx2_kernels() {
    static constexpr Kernels kernels = {
        avx2::attend, avx2::rope, avx2::norm, avx2::silu, avx2::largest, avx2::gather, avx2::multiply,
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
const Kernels& avx2_kernels() { return baseline_kernels(); }
}  // namespace octavo
#endif
