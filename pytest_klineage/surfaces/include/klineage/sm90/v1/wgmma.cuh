// Matrix products of a warpgroup on sm_90a: wgmma, its descriptors, and register budgets. Frozen: version 1.
//
// The 128 threads of four warps, the first one's index divisible by 4, issue together: wgmma_fence, products,
// wgmma_commit, wgmma_wait. Thread t (warp w = t / 32 % 4, lane l = t % 32) holds of d[64 x N] the row 16w + l / 4 in
// d[4j], d[4j + 1] and row + 8 in d[4j + 2], d[4j + 3], columns 8j + 2 (l % 4) and the next, j < N / 8.
#ifndef KLINEAGE_SM90_V1_WGMMA_CUH
#define KLINEAGE_SM90_V1_WGMMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace klineage {
namespace sm90 {
inline namespace v1 {

// Before the first product, and whenever ordinary code has written the registers d or a since.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of products.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending groups are not complete. Operands of a complete group may be overwritten, its d read (after pin).
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }
// Keeps the compiler from moving reads or writes of registers across this point: after the wait that completes them.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// All threads of a warpgroup, at the start of its role's branch: registers per thread, 24 to 256 in steps of 8. In all the
// CTA must not ask for more than 65,536. Needs __launch_bounds__(threads, 1), or the compiler ignores it (C7508).
template <int kRegisters>
__device__ __forceinline__ void registers_increase() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters>
__device__ __forceinline__ void registers_decrease() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

// How 16-byte chunks of a shared-memory tile are permuted; the tile is aligned to 8 rows of 128, 64 or 32 bytes.
enum class Swizzle : uint32_t { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

// Descriptor of an operand in shared memory, as TMA writes it in boxes of one swizzle row (128 bytes with k128).
// K-major (rows of K): 8-row groups stride_bytes apart (1024 with k128), leading_bytes unused; step along K by adding
// bytes / 16 to the descriptor. MN-major (rows of M or N, transposed by the product): blocks of one swizzle row
// leading_bytes apart, groups of 8 k stride_bytes apart (1024 with k128); step along K by 16 rows.
template <Swizzle kSwizzle = Swizzle::k128>
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading_bytes >> 4) << 16 | uint64_t(stride_bytes >> 4) << 32 |
           uint64_t(kSwizzle) << 62;
}

// Wgmma<T, N>: d[64 x N] = A[64 x K] B[K x N] (+ d if accumulate != 0), fp32 sums; K = 16 for __nv_bfloat16 and __half,
// 32 for __nv_fp8_e4m3; N a multiple of 8 from 8 to 256.
//   ss<kMajorA, kMajorB>(d, a, b, accumulate)   A and B in shared memory, by descriptor
//   rs<kMajorB>(d, a, b, accumulate)            A in registers: a[0..3] as mma's m16n8k16 holds A (rows of warp w: 16w..)
// Major: 0 = K-major, 1 = MN-major, which 8-bit types do not have.
template <class T, int N>
struct Wgmma;

#define KLINEAGE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KLINEAGE_REGS_8 "%0, %1, %2, %3"
#define KLINEAGE_D_8 KLINEAGE_D4(0)
#define KLINEAGE_REGS_16 KLINEAGE_REGS_8 ", %4, %5, %6, %7"
#define KLINEAGE_D_16 KLINEAGE_D_8, KLINEAGE_D4(4)
#define KLINEAGE_REGS_24 KLINEAGE_REGS_16 ", %8, %9, %10, %11"
#define KLINEAGE_D_24 KLINEAGE_D_16, KLINEAGE_D4(8)
#define KLINEAGE_REGS_32 KLINEAGE_REGS_24 ", %12, %13, %14, %15"
#define KLINEAGE_D_32 KLINEAGE_D_24, KLINEAGE_D4(12)
#define KLINEAGE_REGS_40 KLINEAGE_REGS_32 ", %16, %17, %18, %19"
#define KLINEAGE_D_40 KLINEAGE_D_32, KLINEAGE_D4(16)
#define KLINEAGE_REGS_48 KLINEAGE_REGS_40 ", %20, %21, %22, %23"
#define KLINEAGE_D_48 KLINEAGE_D_40, KLINEAGE_D4(20)
#define KLINEAGE_REGS_56 KLINEAGE_REGS_48 ", %24, %25, %26, %27"
#define KLINEAGE_D_56 KLINEAGE_D_48, KLINEAGE_D4(24)
#define KLINEAGE_REGS_64 KLINEAGE_REGS_56 ", %28, %29, %30, %31"
#define KLINEAGE_D_64 KLINEAGE_D_56, KLINEAGE_D4(28)
#define KLINEAGE_REGS_72 KLINEAGE_REGS_64 ", %32, %33, %34, %35"
#define KLINEAGE_D_72 KLINEAGE_D_64, KLINEAGE_D4(32)
#define KLINEAGE_REGS_80 KLINEAGE_REGS_72 ", %36, %37, %38, %39"
#define KLINEAGE_D_80 KLINEAGE_D_72, KLINEAGE_D4(36)
#define KLINEAGE_REGS_88 KLINEAGE_REGS_80 ", %40, %41, %42, %43"
#define KLINEAGE_D_88 KLINEAGE_D_80, KLINEAGE_D4(40)
#define KLINEAGE_REGS_96 KLINEAGE_REGS_88 ", %44, %45, %46, %47"
#define KLINEAGE_D_96 KLINEAGE_D_88, KLINEAGE_D4(44)
#define KLINEAGE_REGS_104 KLINEAGE_REGS_96 ", %48, %49, %50, %51"
#define KLINEAGE_D_104 KLINEAGE_D_96, KLINEAGE_D4(48)
#define KLINEAGE_REGS_112 KLINEAGE_REGS_104 ", %52, %53, %54, %55"
#define KLINEAGE_D_112 KLINEAGE_D_104, KLINEAGE_D4(52)
#define KLINEAGE_REGS_120 KLINEAGE_REGS_112 ", %56, %57, %58, %59"
#define KLINEAGE_D_120 KLINEAGE_D_112, KLINEAGE_D4(56)
#define KLINEAGE_REGS_128 KLINEAGE_REGS_120 ", %60, %61, %62, %63"
#define KLINEAGE_D_128 KLINEAGE_D_120, KLINEAGE_D4(60)
#define KLINEAGE_REGS_136 KLINEAGE_REGS_128 ", %64, %65, %66, %67"
#define KLINEAGE_D_136 KLINEAGE_D_128, KLINEAGE_D4(64)
#define KLINEAGE_REGS_144 KLINEAGE_REGS_136 ", %68, %69, %70, %71"
#define KLINEAGE_D_144 KLINEAGE_D_136, KLINEAGE_D4(68)
#define KLINEAGE_REGS_152 KLINEAGE_REGS_144 ", %72, %73, %74, %75"
#define KLINEAGE_D_152 KLINEAGE_D_144, KLINEAGE_D4(72)
#define KLINEAGE_REGS_160 KLINEAGE_REGS_152 ", %76, %77, %78, %79"
#define KLINEAGE_D_160 KLINEAGE_D_152, KLINEAGE_D4(76)
#define KLINEAGE_REGS_168 KLINEAGE_REGS_160 ", %80, %81, %82, %83"
#define KLINEAGE_D_168 KLINEAGE_D_160, KLINEAGE_D4(80)
#define KLINEAGE_REGS_176 KLINEAGE_REGS_168 ", %84, %85, %86, %87"
#define KLINEAGE_D_176 KLINEAGE_D_168, KLINEAGE_D4(84)
#define KLINEAGE_REGS_184 KLINEAGE_REGS_176 ", %88, %89, %90, %91"
#define KLINEAGE_D_184 KLINEAGE_D_176, KLINEAGE_D4(88)
#define KLINEAGE_REGS_192 KLINEAGE_REGS_184 ", %92, %93, %94, %95"
#define KLINEAGE_D_192 KLINEAGE_D_184, KLINEAGE_D4(92)
#define KLINEAGE_REGS_200 KLINEAGE_REGS_192 ", %96, %97, %98, %99"
#define KLINEAGE_D_200 KLINEAGE_D_192, KLINEAGE_D4(96)
#define KLINEAGE_REGS_208 KLINEAGE_REGS_200 ", %100, %101, %102, %103"
#define KLINEAGE_D_208 KLINEAGE_D_200, KLINEAGE_D4(100)
#define KLINEAGE_REGS_216 KLINEAGE_REGS_208 ", %104, %105, %106, %107"
#define KLINEAGE_D_216 KLINEAGE_D_208, KLINEAGE_D4(104)
#define KLINEAGE_REGS_224 KLINEAGE_REGS_216 ", %108, %109, %110, %111"
#define KLINEAGE_D_224 KLINEAGE_D_216, KLINEAGE_D4(108)
#define KLINEAGE_REGS_232 KLINEAGE_REGS_224 ", %112, %113, %114, %115"
#define KLINEAGE_D_232 KLINEAGE_D_224, KLINEAGE_D4(112)
#define KLINEAGE_REGS_240 KLINEAGE_REGS_232 ", %116, %117, %118, %119"
#define KLINEAGE_D_240 KLINEAGE_D_232, KLINEAGE_D4(116)
#define KLINEAGE_REGS_248 KLINEAGE_REGS_240 ", %120, %121, %122, %123"
#define KLINEAGE_D_248 KLINEAGE_D_240, KLINEAGE_D4(120)
#define KLINEAGE_REGS_256 KLINEAGE_REGS_248 ", %124, %125, %126, %127"
#define KLINEAGE_D_256 KLINEAGE_D_248, KLINEAGE_D4(124)

// Operands 0 to N/2 - 1 are d; R0 to R6 are the numbers of those that follow.
#define KLINEAGE_WGMMA_BF16(N, R0, R1, R2, R3, R4, R5, R6)                                                             \
    template <>                                                                                                        \
    struct Wgmma<__nv_bfloat16, N> {                                                                                   \
        template <int kMajorA, int kMajorB>                                                                            \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {         \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #R2 ", 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" KLINEAGE_REGS_##N "}, "          \
                         "%" #R0 ", %" #R1 ", p, 1, 1, %" #R3 ", %" #R4 "; }"                                          \
                         : KLINEAGE_D_##N : "l"(a), "l"(b), "r"(accumulate), "n"(kMajorA), "n"(kMajorB));              \
        }                                                                                                              \
        template <int kMajorB>                                                                                         \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {\
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #R5 ", 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" KLINEAGE_REGS_##N "}, "          \
                         "{%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}, %" #R4 ", p, 1, 1, %" #R6 "; }"                    \
                         : KLINEAGE_D_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kMajorB));\
        }                                                                                                              \
    };
#define KLINEAGE_WGMMA_FP16(N, R0, R1, R2, R3, R4, R5, R6)                                                             \
    template <>                                                                                                        \
    struct Wgmma<__half, N> {                                                                                          \
        template <int kMajorA, int kMajorB>                                                                            \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {         \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #R2 ", 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" KLINEAGE_REGS_##N "}, "            \
                         "%" #R0 ", %" #R1 ", p, 1, 1, %" #R3 ", %" #R4 "; }"                                          \
                         : KLINEAGE_D_##N : "l"(a), "l"(b), "r"(accumulate), "n"(kMajorA), "n"(kMajorB));              \
        }                                                                                                              \
        template <int kMajorB>                                                                                         \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {\
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #R5 ", 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" KLINEAGE_REGS_##N "}, "            \
                         "{%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}, %" #R4 ", p, 1, 1, %" #R6 "; }"                    \
                         : KLINEAGE_D_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kMajorB));\
        }                                                                                                              \
    };
#define KLINEAGE_WGMMA_E4M3(N, R0, R1, R2, R3, R4, R5, R6)                                                             \
    template <>                                                                                                        \
    struct Wgmma<__nv_fp8_e4m3, N> {                                                                                   \
        template <int kMajorA, int kMajorB>                                                                            \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {         \
            static_assert(kMajorA == 0 && kMajorB == 0, "8-bit operands are K-major");                                 \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #R2 ", 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" KLINEAGE_REGS_##N "}, "          \
                         "%" #R0 ", %" #R1 ", p, 1, 1; }"                                                              \
                         : KLINEAGE_D_##N : "l"(a), "l"(b), "r"(accumulate));                                          \
        }                                                                                                              \
        template <int kMajorB>                                                                                         \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {\
            static_assert(kMajorB == 0, "8-bit operands are K-major");                                                 \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #R5 ", 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" KLINEAGE_REGS_##N "}, "          \
                         "{%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}, %" #R4 ", p, 1, 1; }"                              \
                         : KLINEAGE_D_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));      \
        }                                                                                                              \
    };
#define KLINEAGE_WGMMA(N, R0, R1, R2, R3, R4, R5, R6)                                                                  \
    KLINEAGE_WGMMA_BF16(N, R0, R1, R2, R3, R4, R5, R6)                                                                 \
    KLINEAGE_WGMMA_FP16(N, R0, R1, R2, R3, R4, R5, R6)                                                                 \
    KLINEAGE_WGMMA_E4M3(N, R0, R1, R2, R3, R4, R5, R6)
KLINEAGE_WGMMA(8, 4, 5, 6, 7, 8, 9, 10)
KLINEAGE_WGMMA(16, 8, 9, 10, 11, 12, 13, 14)
KLINEAGE_WGMMA(24, 12, 13, 14, 15, 16, 17, 18)
KLINEAGE_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
KLINEAGE_WGMMA(40, 20, 21, 22, 23, 24, 25, 26)
KLINEAGE_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
KLINEAGE_WGMMA(56, 28, 29, 30, 31, 32, 33, 34)
KLINEAGE_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
KLINEAGE_WGMMA(72, 36, 37, 38, 39, 40, 41, 42)
KLINEAGE_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
KLINEAGE_WGMMA(88, 44, 45, 46, 47, 48, 49, 50)
KLINEAGE_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
KLINEAGE_WGMMA(104, 52, 53, 54, 55, 56, 57, 58)
KLINEAGE_WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
KLINEAGE_WGMMA(120, 60, 61, 62, 63, 64, 65, 66)
KLINEAGE_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
KLINEAGE_WGMMA(136, 68, 69, 70, 71, 72, 73, 74)
KLINEAGE_WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
KLINEAGE_WGMMA(152, 76, 77, 78, 79, 80, 81, 82)
KLINEAGE_WGMMA(160, 80, 81, 82, 83, 84, 85, 86)
KLINEAGE_WGMMA(168, 84, 85, 86, 87, 88, 89, 90)
KLINEAGE_WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
KLINEAGE_WGMMA(184, 92, 93, 94, 95, 96, 97, 98)
KLINEAGE_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
KLINEAGE_WGMMA(200, 100, 101, 102, 103, 104, 105, 106)
KLINEAGE_WGMMA(208, 104, 105, 106, 107, 108, 109, 110)
KLINEAGE_WGMMA(216, 108, 109, 110, 111, 112, 113, 114)
KLINEAGE_WGMMA(224, 112, 113, 114, 115, 116, 117, 118)
KLINEAGE_WGMMA(232, 116, 117, 118, 119, 120, 121, 122)
KLINEAGE_WGMMA(240, 120, 121, 122, 123, 124, 125, 126)
KLINEAGE_WGMMA(248, 124, 125, 126, 127, 128, 129, 130)
KLINEAGE_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)

#undef KLINEAGE_WGMMA
#undef KLINEAGE_WGMMA_BF16
#undef KLINEAGE_WGMMA_FP16
#undef KLINEAGE_WGMMA_E4M3
}  // namespace v1
}  // namespace sm90
}  // namespace klineage
#endif
