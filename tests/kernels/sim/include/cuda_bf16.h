// bfloat16 on a CPU: what the kernels use of NVIDIA's header, rounding to nearest even.
#pragma once
#include "cusim.h"

struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) {
        uint32_t u;
        memcpy(&u, &x, 4);
        bits = x != x ? 0x7fff : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    operator float() const {
        const uint32_t u = uint32_t(bits) << 16;
        float x;
        memcpy(&x, &u, 4);
        return x;
    }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
namespace cusim {
template <> struct NameOf<__nv_bfloat16> { static constexpr const char* value = "bf16"; };
}
