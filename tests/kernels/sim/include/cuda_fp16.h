// float16 on a CPU: what the kernels use of NVIDIA's header, rounding to nearest even.
#pragma once
#include "cusim.h"

struct __half {
    _Float16 value;
    __half() = default;
    __half(float x) : value(_Float16(x)) {}
    operator float() const { return float(value); }
};
struct alignas(4) __half2 {
    __half x, y;
};
inline float __half2float(__half x) { return x; }
inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline __half2 __floats2half2_rn(float a, float b) { return {a, b}; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
namespace cusim {
template <> struct NameOf<__half> { static constexpr const char* value = "fp16"; };
}
