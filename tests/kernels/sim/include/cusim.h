// The CUDA language as g++ compiles it: keywords, vector types, intrinsics and warp collectives of a simulated block.
//
// Included before a kernel's source by the build. It declares what runtime.cpp owns (fibers, rendezvous, barriers,
// copies, faults) and defines what needs types. A block runs at a time, on one OS thread; shared memory is one section
// of the library, so that the runtime can poison it before every block.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>

#define CUSIM 1

// ---- the C library's mathematics, declared here: <math.h> would make up half of a kernel's compile time
#define CUSIM_MATH1(name)                                                              \
    extern "C" float name##f(float) noexcept;                                          \
    extern "C" double name(double) noexcept;                                           \
    inline float name(float x) { return name##f(x); }
#define CUSIM_MATH2(name)                                                              \
    extern "C" float name##f(float, float) noexcept;                                   \
    extern "C" double name(double, double) noexcept;                                   \
    inline float name(float x, float y) { return name##f(x, y); }
CUSIM_MATH1(exp) CUSIM_MATH1(exp2) CUSIM_MATH1(expm1) CUSIM_MATH1(log) CUSIM_MATH1(log2) CUSIM_MATH1(log1p)
CUSIM_MATH1(sqrt) CUSIM_MATH1(sin) CUSIM_MATH1(cos) CUSIM_MATH1(tanh) CUSIM_MATH1(fabs) CUSIM_MATH1(floor)
CUSIM_MATH1(ceil) CUSIM_MATH1(rint) CUSIM_MATH1(round) CUSIM_MATH1(trunc)
CUSIM_MATH2(fmax) CUSIM_MATH2(fmin) CUSIM_MATH2(fmod) CUSIM_MATH2(pow) CUSIM_MATH2(copysign)
extern "C" float fmaf(float, float, float) noexcept;
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
constexpr float INFINITY = __builtin_inff();

// ---- keywords
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ static
#define __shared__ static __attribute__((section("cusim_shared")))
#define __align__(n) __attribute__((aligned(n)))

// ---- vector types
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct int3 { int x, y, z; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) longlong2 { long long x, y; };
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
inline float2 make_float2(float a, float b) { return {a, b}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline int2 make_int2(int a, int b) { return {a, b}; }
inline int4 make_int4(int a, int b, int c, int d) { return {a, b, c, d}; }
inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }

// ---- what the runtime owns
namespace cusim {
struct Position {  // of the thread that runs
    uint3 thread, block;
    dim3 block_dim, grid_dim;
};
extern Position position;

// Ends the launch with a fault at the calling thread: kernel, block, thread and the operation are put before `why`.
[[noreturn]] void fail(const char* why);
// `bytes` at `p` lie in the block's shared memory, aligned.
void check_shared(const void* p, size_t bytes, size_t alignment, const char* operation);
void* dynamic_shared();
// Counts rows of 16 bytes that one access of eight lanes finds on banks already taken by another row.
void count_bank_conflicts(const void* const* rows);

using WarpOperation = void (*)(void** lane_arguments, uint32_t mask);
// A rendezvous of the lanes in mask: the last to arrive runs `operation` over all their arguments.
void warp_collective(uint32_t mask, const char* name, WarpOperation operation, void* arguments);
void block_barrier(const char* site);
int block_reduce(const char* site, int predicate, int mode);  // mode 0: and, 1: or, 2: count

void copy_async16(void* dst, const void* src, bool valid);
void copy_commit();
void copy_wait(int groups);

struct Launch {
    const char* kernel;
    dim3 grid, block;
    size_t shared_bytes;
    int order;      // 0 forward, 1 reverse, 2 random
    int eager;      // copies land when issued, not when waited for
    uint64_t seed;
    void** arguments;
    char* error;
    size_t error_size;
    uintptr_t* fault_address;
    uint64_t* bank_conflicts;  // of ldmatrix, over the launch
};
int run(const Launch& launch, void (*entry)(void*), void* closure, char* shared_begin, char* shared_end);

// How a kernel's signature is told to Python: one name a parameter.
template <class T> struct NameOf { static constexpr const char* value = "?"; };
#define CUSIM_NAME(T) template <> struct NameOf<T> { static constexpr const char* value = #T; };
CUSIM_NAME(float) CUSIM_NAME(int) CUSIM_NAME(unsigned) CUSIM_NAME(long long) CUSIM_NAME(unsigned long long)
CUSIM_NAME(unsigned char) CUSIM_NAME(double) CUSIM_NAME(bool) CUSIM_NAME(long)
template <class T>
constexpr const char* name_of() {
    return NameOf<std::remove_cv_t<std::remove_pointer_t<T>>>::value;
}
template <class... A>
int describe(void (*)(A...), const char** names, int* pointers, int limit) {
    int n = 0;
    (((n < limit ? (names[n] = name_of<A>(), pointers[n] = std::is_pointer_v<A>) : 0), n++), ...);
    return n;
}
template <class... A>
int launch(void (*kernel)(A...), const Launch& what, char* shared_begin, char* shared_end) {
    struct Closure {
        void (*kernel)(A...);
        void** arguments;
    } closure{kernel, what.arguments};
    const auto entry = [](void* p) {
        const Closure& c = *static_cast<Closure*>(p);
        [&]<size_t... I>(std::index_sequence<I...>) {
            c.kernel(*static_cast<std::remove_cv_t<A>*>(c.arguments[I])...);
        }(std::index_sequence_for<A...>{});
    };
    return run(what, entry, &closure, shared_begin, shared_end);
}

enum ShuffleMode { INDEX, UP, DOWN, XOR };
template <class T>
struct Shuffle {
    T value, result;
    int operand, width;
};
template <class T, int MODE>
void shuffle_warp(void** lanes, uint32_t) {
    for (int lane = 0; lane < 32; lane++) {
        if (lanes[lane] == nullptr) continue;
        Shuffle<T>& x = *static_cast<Shuffle<T>*>(lanes[lane]);
        const int base = lane & ~(x.width - 1), end = base + x.width;
        int source = lane;
        if (MODE == INDEX) source = base + (x.operand & (x.width - 1));
        if (MODE == UP && lane - x.operand >= base) source = lane - x.operand;
        if (MODE == DOWN && lane + x.operand < end) source = lane + x.operand;
        if (MODE == XOR && (lane ^ x.operand) < end) source = lane ^ x.operand;
        if (lanes[source] == nullptr) fail("shuffle reads a lane outside its mask");
        x.result = static_cast<Shuffle<T>*>(lanes[source])->value;
    }
}
template <class T, int MODE>
T shuffle(uint32_t mask, T value, int operand, int width, const char* name) {
    Shuffle<T> x{value, value, operand, width};
    warp_collective(mask, name, shuffle_warp<T, MODE>, &x);
    return x.result;
}
struct Vote {
    int predicate;
    unsigned result;
};
inline unsigned ballot(uint32_t mask, int predicate, const char* name) {
    Vote vote{predicate, 0};
    warp_collective(
        mask, name,
        [](void** lanes, uint32_t) {
            unsigned result = 0;
            for (int l = 0; l < 32; l++)
                if (lanes[l] != nullptr && static_cast<Vote*>(lanes[l])->predicate) result |= 1u << l;
            for (int l = 0; l < 32; l++)
                if (lanes[l] != nullptr) static_cast<Vote*>(lanes[l])->result = result;
        },
        &vote);
    return vote.result;
}
}  // namespace cusim

#define threadIdx (::cusim::position.thread)
#define blockIdx (::cusim::position.block)
#define blockDim (::cusim::position.block_dim)
#define gridDim (::cusim::position.grid_dim)

// ---- synchronization
#define CUSIM_TEXT2(x) #x
#define CUSIM_TEXT(x) CUSIM_TEXT2(x)
#define __syncthreads() ::cusim::block_barrier("__syncthreads at " __FILE__ ":" CUSIM_TEXT(__LINE__))
#define __syncthreads_and(p) ::cusim::block_reduce("__syncthreads_and at " __FILE__ ":" CUSIM_TEXT(__LINE__), p, 0)
#define __syncthreads_or(p) ::cusim::block_reduce("__syncthreads_or at " __FILE__ ":" CUSIM_TEXT(__LINE__), p, 1)
#define __syncthreads_count(p) ::cusim::block_reduce("__syncthreads_count at " __FILE__ ":" CUSIM_TEXT(__LINE__), p, 2)
inline void __syncwarp(uint32_t mask = ~0u) { ::cusim::warp_collective(mask, "__syncwarp", nullptr, nullptr); }
inline void __threadfence() {}
inline void __threadfence_block() {}
template <class T> T __shfl_sync(uint32_t m, T v, int a, int w = 32) { return cusim::shuffle<T, cusim::INDEX>(m, v, a, w, "__shfl_sync"); }
template <class T> T __shfl_up_sync(uint32_t m, T v, int a, int w = 32) { return cusim::shuffle<T, cusim::UP>(m, v, a, w, "__shfl_up_sync"); }
template <class T> T __shfl_down_sync(uint32_t m, T v, int a, int w = 32) { return cusim::shuffle<T, cusim::DOWN>(m, v, a, w, "__shfl_down_sync"); }
template <class T> T __shfl_xor_sync(uint32_t m, T v, int a, int w = 32) { return cusim::shuffle<T, cusim::XOR>(m, v, a, w, "__shfl_xor_sync"); }
inline unsigned __ballot_sync(uint32_t m, int p) { return cusim::ballot(m, p, "__ballot_sync"); }
inline int __any_sync(uint32_t m, int p) { return cusim::ballot(m, p, "__any_sync") != 0; }
inline int __all_sync(uint32_t m, int p) { return cusim::ballot(m, !p, "__all_sync") == 0; }

// ---- atomics: one OS thread runs all
template <class T> T atomicAdd(T* p, std::type_identity_t<T> v) { T old = *p; *p = old + v; return old; }
template <class T> T atomicMax(T* p, std::type_identity_t<T> v) { T old = *p; if (old < v) *p = v; return old; }
template <class T> T atomicMin(T* p, std::type_identity_t<T> v) { T old = *p; if (v < old) *p = v; return old; }
template <class T> T atomicOr(T* p, std::type_identity_t<T> v) { T old = *p; *p = old | v; return old; }
template <class T> T atomicExch(T* p, std::type_identity_t<T> v) { T old = *p; *p = v; return old; }
template <class T> T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) { T old = *p; if (old == expected) *p = v; return old; }

// ---- arithmetic
inline float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }
inline int __float_as_int(float x) { int i; memcpy(&i, &x, 4); return i; }
inline float __uint_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline unsigned __float2uint_rn(float x) { return unsigned(rintf(x)); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
    return result;
}
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcs(T* p, std::type_identity_t<T> v) { *p = v; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

// ---- put after a kernel's source by the build
extern "C" char __start_cusim_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_cusim_shared[] __attribute__((weak, visibility("hidden")));
#define CUSIM_EXPORT(function)                                                                           \
    extern "C" int cusim_launch(const ::cusim::Launch* what) {                                           \
        return ::cusim::launch(function, *what, __start_cusim_shared, __stop_cusim_shared);              \
    }                                                                                                    \
    extern "C" int cusim_describe(const char** names, int* pointers, int limit) {                        \
        return ::cusim::describe(function, names, pointers, limit);                                      \
    }
