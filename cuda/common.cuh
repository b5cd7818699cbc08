// What the kernels share: number formats, 16-byte vectors, the online softmax, the reduction over a warp.
//
// Formats are named bf16, fp16, fp32, fp8; a source takes them as -D constants (SCALAR: activations, KV: the cache).
// Arithmetic goes through float. fp8 is e4m3 (OCP, finite: largest 448), stored as value / scale; the cache's writer
// saturates and there are no infinities, so its two NaN codes carry no meaning and decode to +-480.
#pragma once
#include "ptx.cuh"

using fp32 = float;
struct fp8 {
    uint8_t bits;
};
#ifdef CUSIM
template <>
struct cusim::NameOf<fp8> {
    static constexpr const char* value = "fp8";
};
#endif

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float FP8_MAX = 448.0f;
__device__ __forceinline__ float negative_infinity() { return __int_as_float(int(0xff800000u)); }

template <class A, class B>
struct is_same {
    static constexpr bool value = false;
};
template <class A>
struct is_same<A, A> {
    static constexpr bool value = true;
};

// ---- formats

__device__ __forceinline__ float to_float(fp32 x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }
// e4m3's exponent and mantissa are the top bits of a half's, 8 binades lower.
__device__ __forceinline__ float to_float(fp8 x) {
    const uint32_t magnitude = (x.bits & 0x7fu) << 20;  // as fp32, 2^120 too small
    return __int_as_float(int(magnitude | uint32_t(x.bits & 0x80u) << 24)) * 1.329227995784916e36f;
}

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ fp32 from_float<fp32>(float x) { return x; }
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) { return __float2half_rn(x); }
// To nearest, ties to even, saturating; the same bits on every architecture.
template <>
__device__ __forceinline__ fp8 from_float<fp8>(float x) {
    const uint32_t bits = uint32_t(__float_as_int(x)), sign = bits >> 24 & 0x80u;
    const float magnitude = fminf(fabsf(x), FP8_MAX);  // a NaN becomes 448
    uint32_t code;
    if (magnitude < 0.015625f) {  // below 2^-6: multiples of 2^-9
        code = uint32_t(__float2int_rn(magnitude * 512.0f));
    } else {
        uint32_t u = uint32_t(__float_as_int(magnitude));
        u += 0x7ffffu + (u >> 20 & 1u);
        code = (u >> 20) - ((127u - 7u) << 3);
    }
    fp8 result;
    result.bits = uint8_t(sign | code);
    return result;
}

// Two values in one 32-bit word, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<bf16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, 4);
    return word;
}
template <>
__device__ __forceinline__ uint32_t pack<fp16>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, 4);
    return word;
}

// ---- 16 bytes at once

template <class T>
struct alignas(16) Vec16 {
    static constexpr int SIZE = 16 / int(sizeof(T));
    T v[SIZE];
    __device__ __forceinline__ static Vec16 load(const T* p) {
        Vec16 result;
        const uint4 raw = *reinterpret_cast<const uint4*>(p);
        memcpy(&result, &raw, 16);
        return result;
    }
    __device__ __forceinline__ static Vec16 zero() {
        Vec16 result;
        const uint4 raw = make_uint4(0, 0, 0, 0);
        memcpy(&result, &raw, 16);
        return result;
    }
    __device__ __forceinline__ void store(T* p) const {
        uint4 raw;
        memcpy(&raw, this, 16);
        *reinterpret_cast<uint4*>(p) = raw;
    }
};

// Four values in a row, from fp32.
__device__ __forceinline__ void store4(fp32* p, const float4& x) { *reinterpret_cast<float4*>(p) = x; }
template <class T>
__device__ __forceinline__ void store4(T* p, const float4& x) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack<T>(x.x, x.y), pack<T>(x.z, x.w));
}

// ---- warps

constexpr uint32_t FULL_WARP = 0xffffffffu;

template <int WIDTH = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = WIDTH / 2; offset > 0; offset >>= 1) x += __shfl_xor_sync(FULL_WARP, x, offset);
    return x;
}
template <int WIDTH = 32>
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = WIDTH / 2; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, offset));
    return x;
}

// ---- the online softmax (Milakov and Gimelshein, arXiv 1805.02867), in base 2: logits come multiplied by log2(e)

struct OnlineSoftmax {
    float max;  // of the logits seen; -inf before the first
    float sum;  // of 2^(logit - max)

    __device__ __forceinline__ void init() {
        max = negative_infinity();
        sum = 0.0f;
    }
    // What logits are measured from: finite even where nothing was seen, so that -inf minus it stays -inf.
    __device__ __forceinline__ float base() const { return max == negative_infinity() ? 0.0f : max; }
    // Takes the largest of new logits in; returns the factor for everything summed so far.
    __device__ __forceinline__ float raise(float new_max) {
        const float old = max;
        max = fmaxf(max, new_max);
        const float factor = ptx::ex2(old - base());
        sum *= factor;
        return factor;
    }
    __device__ __forceinline__ float weight(float logit) const { return ptx::ex2(logit - base()); }
    // Joins another part's state; the factors for this part's and the other's accumulators.
    __device__ __forceinline__ float2 merge(const OnlineSoftmax& other) {
        const float joint = fmaxf(max, other.max);
        const float from = joint == negative_infinity() ? 0.0f : joint;
        const float mine = ptx::ex2(max - from), theirs = ptx::ex2(other.max - from);
        max = joint;
        sum = sum * mine + other.sum * theirs;
        return make_float2(mine, theirs);
    }
    // 1 / sum; zero where nothing was seen, so that an empty row comes out as zeros.
    __device__ __forceinline__ float normalizer() const { return sum > 0.0f ? 1.0f / sum : 0.0f; }
    // Natural logarithm of the sum of e^logit; -inf where nothing was seen.
    __device__ __forceinline__ float lse() const {
        return sum > 0.0f ? (max + log2f(sum)) * LN2 : negative_infinity();
    }
};

// cap * tanh(x / cap) to 1e-7 of cap, where tanh.approx is off by 2^-11.
__device__ __forceinline__ float soft_cap(float x, float cap) {
    return cap * (1.0f - 2.0f / (ptx::ex2(x * (2.0f * LOG2E / cap)) + 1.0f));
}
