// Matrix product c[M,N] = a[M,K] b[K,N], fp32, contiguous.
//
// Floor, M = N = K = 1024: 2.15 GFLOP = 9.8 ms on both cores; 12 MB = 0.4 ms.
//
// Techniques, on a 2-core EPYC Zen 4 (3.65 GHz, both cores together 220 GFLOPS of fp32 FMA and 30 GB/s of reads):
//  1. SIMD: vectors of c, AVX-512 or AVX2; single elements in portable code
//  2. threads: tiles of c shared out over the cores
//  3. register tiles: several rows by two vectors of c at a time; a vector of b is loaded once for all rows of the tile,
//     and the accumulators are independent FMA chains
//
// Preconditions: contiguous row-major operands. Tails of columns are masks in b and in c; tails of rows repeat the last
// row of a and do not store.
#include "klineage.h"

#include <immintrin.h>
#include <algorithm>
#include <cstdint>

#ifndef KLINEAGE_ISA_CAP
#define KLINEAGE_ISA_CAP 2  // highest dispatch level compiled in: 2 = AVX-512, 1 = AVX2, 0 = portable (a test builds each)
#endif
#define AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma")))
#define AVX2 __attribute__((target("avx2,fma")))

// The rows of a tile, spelled out: every accumulator is a variable of its own and lives in a register.
#define EACH_OF_4(X) X(0) X(1) X(2) X(3)
#define EACH_OF_6(X) EACH_OF_4(X) X(4) X(5)
#define EACH_OF_8(X) EACH_OF_6(X) X(6) X(7)

namespace {

// c[rows,cols] = rows of a times columns of b; rows is 1 to mr, cols is 1 to nr.
using MicroKernel = void (*)(int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc,
                             int64_t rows, int64_t cols);
struct Kernel {
    int64_t mr, nr;
    MicroKernel tile;
};

// ------------------------------------------------------------------------------------------------- micro-kernels

// Row i of the tile in a; rows past the last one repeat it.
#define ROW_OF_A(i) const float *const r##i = a + (i < last ? i : last) * lda;

inline __mmask16 mask_of(int64_t cols) {
    return static_cast<__mmask16>(cols >= 16 ? 0xffffu : cols <= 0 ? 0u : (1u << cols) - 1u);
}

// 8 rows by 2 vectors: 16 accumulators, 2 vectors of b, 1 broadcast of 32 registers. FULL: all 32 columns exist.
template <bool FULL>
AVX512 void tile_avx512_8x2(int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc,
                            int64_t rows, int64_t cols) {
    const __mmask16 m0 = mask_of(cols), m1 = mask_of(cols - 16);
    const int64_t last = rows - 1;
    EACH_OF_8(ROW_OF_A)
#define TILE_ZERO(i) __m512 s##i = _mm512_setzero_ps(), t##i = _mm512_setzero_ps();
    EACH_OF_8(TILE_ZERO)
#undef TILE_ZERO
    for (int64_t p = 0; p < depth; ++p, b += ldb) {
        __m512 y0, y1;
        if (FULL) {
            y0 = _mm512_loadu_ps(b);
            y1 = _mm512_loadu_ps(b + 16);
        } else {
            y0 = _mm512_maskz_loadu_ps(m0, b);
            y1 = _mm512_maskz_loadu_ps(m1, b + 16);
        }
#define TILE_FMA(i)                               \
    {                                             \
        const __m512 x = _mm512_set1_ps(r##i[p]); \
        s##i = _mm512_fmadd_ps(x, y0, s##i);      \
        t##i = _mm512_fmadd_ps(x, y1, t##i);      \
    }
        EACH_OF_8(TILE_FMA)
#undef TILE_FMA
    }
#define TILE_STORE(i)                                             \
    if (i <= last) {                                              \
        if (FULL) {                                               \
            _mm512_storeu_ps(c + i * ldc, s##i);                  \
            _mm512_storeu_ps(c + i * ldc + 16, t##i);             \
        } else {                                                  \
            _mm512_mask_storeu_ps(c + i * ldc, m0, s##i);         \
            _mm512_mask_storeu_ps(c + i * ldc + 16, m1, t##i);    \
        }                                                         \
    }
    EACH_OF_8(TILE_STORE)
#undef TILE_STORE
}

AVX512 void tile_avx512(int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc,
                        int64_t rows, int64_t cols) {
    if (cols >= 32)
        tile_avx512_8x2<true>(depth, a, lda, b, ldb, c, ldc, rows, cols);
    else
        tile_avx512_8x2<false>(depth, a, lda, b, ldb, c, ldc, rows, cols);
}

// 6 rows by 2 vectors: 12 accumulators, 2 vectors of b, 1 broadcast of 16 registers. FULL: all 16 columns exist.
template <bool FULL>
AVX2 void tile_avx2_6x2(int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc,
                        int64_t rows, int64_t cols) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i m0 = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(cols)), lane);
    const __m256i m1 = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(cols) - 8), lane);
    const int64_t last = rows - 1;
    EACH_OF_6(ROW_OF_A)
#define TILE_ZERO(i) __m256 s##i = _mm256_setzero_ps(), t##i = _mm256_setzero_ps();
    EACH_OF_6(TILE_ZERO)
#undef TILE_ZERO
    for (int64_t p = 0; p < depth; ++p, b += ldb) {
        __m256 y0, y1;
        if (FULL) {
            y0 = _mm256_loadu_ps(b);
            y1 = _mm256_loadu_ps(b + 8);
        } else {
            y0 = _mm256_maskload_ps(b, m0);
            y1 = _mm256_maskload_ps(b + 8, m1);
        }
#define TILE_FMA(i)                                     \
    {                                                   \
        const __m256 x = _mm256_broadcast_ss(r##i + p); \
        s##i = _mm256_fmadd_ps(x, y0, s##i);            \
        t##i = _mm256_fmadd_ps(x, y1, t##i);            \
    }
        EACH_OF_6(TILE_FMA)
#undef TILE_FMA
    }
#define TILE_STORE(i)                                           \
    if (i <= last) {                                            \
        if (FULL) {                                             \
            _mm256_storeu_ps(c + i * ldc, s##i);                \
            _mm256_storeu_ps(c + i * ldc + 8, t##i);            \
        } else {                                                \
            _mm256_maskstore_ps(c + i * ldc, m0, s##i);         \
            _mm256_maskstore_ps(c + i * ldc + 8, m1, t##i);     \
        }                                                       \
    }
    EACH_OF_6(TILE_STORE)
#undef TILE_STORE
}

AVX2 void tile_avx2(int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc,
                    int64_t rows, int64_t cols) {
    if (cols >= 16)
        tile_avx2_6x2<true>(depth, a, lda, b, ldb, c, ldc, rows, cols);
    else
        tile_avx2_6x2<false>(depth, a, lda, b, ldb, c, ldc, rows, cols);
}

// 4 rows by 2 elements; a missing second column repeats the first and is not stored.
void tile_portable(int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc,
                   int64_t rows, int64_t cols) {
    const int64_t last = rows - 1, second = cols > 1 ? 1 : 0;
    EACH_OF_4(ROW_OF_A)
#define TILE_ZERO(i) float s##i = 0.0f, t##i = 0.0f;
    EACH_OF_4(TILE_ZERO)
#undef TILE_ZERO
    for (int64_t p = 0; p < depth; ++p, b += ldb) {
        const float y0 = b[0], y1 = b[second];
#define TILE_FMA(i)              \
    {                            \
        const float x = r##i[p]; \
        s##i += x * y0;          \
        t##i += x * y1;          \
    }
        EACH_OF_4(TILE_FMA)
#undef TILE_FMA
    }
#define TILE_STORE(i)                           \
    if (i <= last) {                            \
        c[i * ldc] = s##i;                      \
        if (second) c[i * ldc + 1] = t##i;      \
    }
    EACH_OF_4(TILE_STORE)
#undef TILE_STORE
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Kernel choose_kernel() {
    __builtin_cpu_init();
    if (KLINEAGE_ISA_CAP >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return {8, 32, tile_avx512};
    if (KLINEAGE_ISA_CAP >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return {6, 16, tile_avx2};
    return {4, 2, tile_portable};
}

// ------------------------------------------------------------------------------------------------- product

struct Block {  // the product: c[m,n] = a[m,depth] b[depth,n]
    const float *a, *b;
    float *c;
    int64_t m, n, depth;
};

// Called by all threads of the team: share out the tiles of c, panels of columns outside, tiles of rows inside.
void multiply_block(const Block &x, const Kernel &kernel) {
    const int64_t mr = kernel.mr, nr = kernel.nr, tiles = ceil_div(x.m, mr), panels = ceil_div(x.n, nr);
#pragma omp for schedule(static) collapse(2)
    for (int64_t j = 0; j < panels; ++j)
        for (int64_t i = 0; i < tiles; ++i)
            kernel.tile(x.depth, x.a + i * mr * x.depth, x.depth, x.b + j * nr, x.n, x.c + i * mr * x.n + j * nr, x.n,
                        std::min(mr, x.m - i * mr), std::min(nr, x.n - j * nr));
}

bool is_contiguous(const klineage_tensor &t) {
    int64_t expected = 1;
    for (int d = t.num_dims - 1; d >= 0; expected *= t.shape[d--])
        if (t.shape[d] > 1 && t.stride[d] != expected) return false;
    return true;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 2 && call->num_outputs == 1, "gemm: expects inputs a, b and output c");
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    KLINEAGE_REQUIRE(call, a.dtype == KLINEAGE_FLOAT32 && b.dtype == KLINEAGE_FLOAT32 && c.dtype == KLINEAGE_FLOAT32,
                     "gemm: only fp32");
    KLINEAGE_REQUIRE(call, a.num_dims == 2 && b.num_dims == 2 && c.num_dims == 2, "gemm: a, b and c must be matrices");
    const int64_t M = c.shape[0], N = c.shape[1], K = a.shape[1];
    KLINEAGE_REQUIRE(call, a.shape[0] == M && b.shape[0] == K && b.shape[1] == N, "gemm: shapes do not match");
    if (M == 0 || N == 0) return 0;
    KLINEAGE_REQUIRE(call, is_contiguous(c) && (K == 0 || (is_contiguous(a) && is_contiguous(b))),
                     "gemm: a, b and c must be contiguous");
    const float *ap = static_cast<const float *>(a.data), *bp = static_cast<const float *>(b.data);
    float *cp = static_cast<float *>(c.data);

    const Kernel kernel = choose_kernel();
#pragma omp parallel
    multiply_block({ap, bp, cp, M, N, K}, kernel);
    return 0;
}
