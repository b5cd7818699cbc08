// The only place of inline PTX: ldmatrix, mma.m16n8k16, cp.async, ex2.
//
// On a GPU each wrapper is one instruction. Under CUSIM (the kernels' own source on a CPU, tests/kernels/sim) each has a
// body written from the fragment layouts of the PTX ISA, section 9.7.14 ("warp-level matrix instructions"): with
// g = lane / 4 and t = lane % 4,
//   A (16 x 16)  a[0]: (g, 2t) (g, 2t+1)   a[1]: (g+8, 2t) ..   a[2]: (g, 2t+8) ..   a[3]: (g+8, 2t+8) ..
//   B (16 x 8)   b0: (2t, g) (2t+1, g)     b1: (2t+8, g) (2t+9, g)
//   D (16 x 8)   d[0], d[1]: (g, 2t) (g, 2t+1)   d[2], d[3]: (g+8, 2t) (g+8, 2t+1)
// ldmatrix: matrix i takes its eight rows' addresses from lanes 8i .. 8i+7; lane l gets row l / 4, columns 2(l % 4), +1
// of each matrix (transposed: rows 2(l % 4), +1 of column l / 4).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using bf16 = __nv_bfloat16;
using fp16 = __half;

#ifdef CUSIM
#define DYN_SMEM(T, name) T* name = reinterpret_cast<T*>(::cusim::dynamic_shared())

namespace ptx {
struct LdmatrixArgs {
    const void* row;
    uint32_t* r;
};
template <int N, bool TRANS>
inline void ldmatrix_warp(void** lanes, uint32_t) {
    for (int i = 0; i < N; i++) {
        const uint16_t* rows[8];
        for (int r = 0; r < 8; r++) {
            const void* row = static_cast<LdmatrixArgs*>(lanes[8 * i + r])->row;
            cusim::check_shared(row, 16, 16, "ldmatrix");
            rows[r] = static_cast<const uint16_t*>(row);
        }
        cusim::count_bank_conflicts(reinterpret_cast<const void* const*>(rows));
        for (int l = 0; l < 32; l++) {
            const int r = l / 4, c = 2 * (l % 4);
            const uint16_t low = TRANS ? rows[c][r] : rows[r][c], high = TRANS ? rows[c + 1][r] : rows[r][c + 1];
            static_cast<LdmatrixArgs*>(lanes[l])->r[i] = low | uint32_t(high) << 16;
        }
    }
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    LdmatrixArgs a{row, r};
    cusim::warp_collective(~0u, "ldmatrix.x4", ldmatrix_warp<4, false>, &a);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    LdmatrixArgs a{row, r};
    cusim::warp_collective(~0u, "ldmatrix.x4.trans", ldmatrix_warp<4, true>, &a);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
    LdmatrixArgs a{row, r};
    cusim::warp_collective(~0u, "ldmatrix.x2", ldmatrix_warp<2, false>, &a);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
    LdmatrixArgs a{row, r};
    cusim::warp_collective(~0u, "ldmatrix.x2.trans", ldmatrix_warp<2, true>, &a);
}

struct MmaArgs {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
};
template <class T>
inline void mma_warp(void** lanes, uint32_t) {
    float A[16][16], B[16][8], D[16][8];
    const auto half_of = [](uint32_t word, int high) {
        const uint16_t bits = high ? uint16_t(word >> 16) : uint16_t(word);
        T value;
        memcpy(&value, &bits, 2);
        return float(value);
    };
    for (int l = 0; l < 32; l++) {
        const MmaArgs& x = *static_cast<MmaArgs*>(lanes[l]);
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < 8; i++)
            A[g + (i / 2 % 2 ? 8 : 0)][t * 2 + i % 2 + (i >= 4 ? 8 : 0)] = half_of(x.a[i / 2], i % 2);
        for (int i = 0; i < 4; i++) B[t * 2 + i % 2 + (i >= 2 ? 8 : 0)][g] = half_of(x.b[i / 2], i % 2);
        for (int i = 0; i < 4; i++) D[g + (i >= 2 ? 8 : 0)][t * 2 + i % 2] = x.d[i];
    }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) D[i][j] += A[i][k] * B[k][j];
    for (int l = 0; l < 32; l++) {
        const MmaArgs& x = *static_cast<MmaArgs*>(lanes[l]);
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < 4; i++) x.d[i] = D[g + (i >= 2 ? 8 : 0)][t * 2 + i % 2];
    }
}
template <class T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    MmaArgs x{d, a, {b0, b1}};
    cusim::warp_collective(~0u, sizeof(T) == 2 ? "mma.m16n8k16" : "?", mma_warp<T>, &x);
}

inline void cp_async16(void* dst, const void* src, bool valid = true) { cusim::copy_async16(dst, src, valid); }
inline void cp_async_commit() { cusim::copy_commit(); }
template <int N>
inline void cp_async_wait() {
    cusim::copy_wait(N);
}
inline float ex2(float x) { return exp2f(x); }
inline float lg2(float x) { return log2f(x); }
}  // namespace ptx

#else  // a GPU
#define DYN_SMEM(T, name)                                          \
    extern __shared__ __align__(128) unsigned char name##_bytes[]; \
    T* name = reinterpret_cast<T*>(name##_bytes)

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

namespace ptx {
__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<fp16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes from global to shared memory past the registers and L1; zeros where not valid (src is not read then).
__device__ __forceinline__ void cp_async16(void* dst, const void* src, bool valid = true) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16,%2;" ::"r"(shared_address(dst)), "l"(src), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's groups are under way.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// 2^x to two ulp; denormal results are zero.
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}
}  // namespace ptx
#endif
