// Matrix product c[M,N] = a[M,K] b[K,N], fp32, contiguous.
#include "klineage.h"

#include <immintrin.h>
#include <algorithm>
#include <cstdint>
#include <vector>

#ifndef KLINEAGE_ISA_CAP
#define KLINEAGE_ISA_CAP 2  // highest dispatch level compiled in: 2 = AVX-512, 1 = AVX2, 0 = portable (a test builds each)
#endif
#define AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma")))
#define AVX2 __attribute__((target("avx2,fma")))
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int64_t kDepth = 256;          // KC: depth of a packed block
constexpr int64_t kOuter = 4096;         // rows (columns) of a packed at once: bounds the scratch memory
constexpr int64_t kTaskColumns = 256;    // columns of c per task
constexpr int64_t kTaskTiles = 8;        // register tiles of rows per task: the block of A that stays in L2

// c[rows, cols] = (accumulate ? c : 0) + a panel times b panel. The a panel is [depth][mr], the b panel [depth][nr].
using MicroKernel = void (*)(int64_t depth, const float *a, const float *b, float *c, int64_t ldc, int64_t rows,
                             int64_t cols, bool accumulate);
struct Kernel {
    int64_t mr, nr;
    MicroKernel tile;
};

// ------------------------------------------------------------------------------------------------- micro-kernels

#ifndef MR512
#define MR512 8
#endif
constexpr int kRows512 = MR512;

AVX512 void tile_avx512(int64_t depth, const float *a, const float *b, float *c, int64_t ldc, int64_t rows, int64_t cols,
                        bool accumulate) {
    __m512 acc[kRows512][2];
#pragma GCC unroll 16
    for (int i = 0; i < kRows512; ++i) {
        acc[i][0] = acc[i][1] = _mm512_setzero_ps();
        if (i < rows) __builtin_prefetch(c + i * ldc, 1), __builtin_prefetch(c + i * ldc + 16, 1);
    }
    for (int64_t p = 0; p < depth; ++p, a += kRows512, b += 32) {
        const __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 16);
#pragma GCC unroll 16
        for (int i = 0; i < kRows512; ++i) {
            const __m512 x = _mm512_set1_ps(a[i]);
            acc[i][0] = _mm512_fmadd_ps(x, b0, acc[i][0]);
            acc[i][1] = _mm512_fmadd_ps(x, b1, acc[i][1]);
        }
    }
    const __mmask16 lo = static_cast<__mmask16>(cols >= 16 ? 0xffff : (1u << cols) - 1);
    const __mmask16 hi = static_cast<__mmask16>(cols >= 32 ? 0xffff : cols > 16 ? (1u << (cols - 16)) - 1 : 0);
#pragma GCC unroll 16
    for (int i = 0; i < kRows512; ++i) {
        if (i >= rows) break;
        float *row = c + i * ldc;
        if (accumulate) {
            acc[i][0] = _mm512_add_ps(acc[i][0], _mm512_maskz_loadu_ps(lo, row));
            acc[i][1] = _mm512_add_ps(acc[i][1], _mm512_maskz_loadu_ps(hi, row + 16));
        }
        _mm512_mask_storeu_ps(row, lo, acc[i][0]);
        _mm512_mask_storeu_ps(row + 16, hi, acc[i][1]);
    }
}

INLINE void store_tile(const float *tile, int64_t nr, float *c, int64_t ldc, int64_t rows, int64_t cols, bool accumulate) {
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < cols; ++j) c[i * ldc + j] = (accumulate ? c[i * ldc + j] : 0.0f) + tile[i * nr + j];
}

AVX2 void tile_avx2(int64_t depth, const float *a, const float *b, float *c, int64_t ldc, int64_t rows, int64_t cols,
                    bool accumulate) {
    __m256 acc[6][2];
#pragma GCC unroll 6
    for (int i = 0; i < 6; ++i) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    for (int64_t p = 0; p < depth; ++p, a += 6, b += 16) {
        const __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
#pragma GCC unroll 6
        for (int i = 0; i < 6; ++i) {
            const __m256 x = _mm256_broadcast_ss(a + i);
            acc[i][0] = _mm256_fmadd_ps(x, b0, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(x, b1, acc[i][1]);
        }
    }
    alignas(32) float tile[6 * 16];
#pragma GCC unroll 6
    for (int i = 0; i < 6; ++i) _mm256_store_ps(tile + 16 * i, acc[i][0]), _mm256_store_ps(tile + 16 * i + 8, acc[i][1]);
    store_tile(tile, 16, c, ldc, rows, cols, accumulate);
}

void tile_portable(int64_t depth, const float *a, const float *b, float *c, int64_t ldc, int64_t rows, int64_t cols,
                   bool accumulate) {
    float tile[4 * 8] = {0};
    for (int64_t p = 0; p < depth; ++p, a += 4, b += 8)
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 8; ++j) tile[8 * i + j] += a[i] * b[j];
    store_tile(tile, 8, c, ldc, rows, cols, accumulate);
}

Kernel choose_kernel() {
    __builtin_cpu_init();
    if (KLINEAGE_ISA_CAP >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return {kRows512, 32, tile_avx512};
    if (KLINEAGE_ISA_CAP >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {6, 16, tile_avx2};
    return {4, 8, tile_portable};
}

// ------------------------------------------------------------------------------------------------- packing

// One panel of a: rows x depth of row-major a, transposed to [depth][mr]; rows past the end become zeros.
void pack_a(const float *a, int64_t lda, int64_t rows, int64_t depth, int64_t mr, float *panel) {
    for (int64_t i = 0; i < mr; ++i) {
        if (i < rows)
            for (int64_t p = 0; p < depth; ++p) panel[p * mr + i] = a[i * lda + p];
        else
            for (int64_t p = 0; p < depth; ++p) panel[p * mr + i] = 0.0f;
    }
}

// One panel of b: depth x cols, rows of nr side by side; columns past the end become zeros.
void pack_b(const float *b, int64_t ldb, int64_t depth, int64_t cols, int64_t nr, float *panel) {
    for (int64_t p = 0; p < depth; ++p) {
        std::copy_n(b + p * ldb, cols, panel + p * nr);
        std::fill(panel + p * nr + cols, panel + (p + 1) * nr, 0.0f);
    }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Block {  // a block of the product: c[m,n] (+)= a[m,depth] b[depth,n]
    const float *a, *b;
    float *c;
    int64_t lda, ldb, ldc, m, n, depth;
    bool accumulate;
};

// Called by all threads of the team: pack both operands together, then share out the tasks.
void multiply_block(const Block &x, const Kernel &kernel, float *packed_a, float *packed_b) {
    const int64_t mr = kernel.mr, nr = kernel.nr, a_panels = ceil_div(x.m, mr), b_panels = ceil_div(x.n, nr);
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < a_panels; ++i)
        pack_a(x.a + i * mr * x.lda, x.lda, std::min(mr, x.m - i * mr), x.depth, mr, packed_a + i * mr * kDepth);
#pragma omp for schedule(static)
    for (int64_t j = 0; j < b_panels; ++j)
        pack_b(x.b + j * nr, x.ldb, x.depth, std::min(nr, x.n - j * nr), nr, packed_b + j * nr * kDepth);

    const int64_t tiles = kTaskTiles, columns = kTaskColumns / nr;
#pragma omp for schedule(static) collapse(2)
    for (int64_t i0 = 0; i0 < a_panels; i0 += tiles)
        for (int64_t j0 = 0; j0 < b_panels; j0 += columns)
            for (int64_t j = j0; j < std::min(j0 + columns, b_panels); ++j)
                for (int64_t i = i0; i < std::min(i0 + tiles, a_panels); ++i)
                    kernel.tile(x.depth, packed_a + i * mr * kDepth, packed_b + j * nr * kDepth, x.c + i * mr * x.ldc + j * nr,
                                x.ldc, std::min(mr, x.m - i * mr), std::min(nr, x.n - j * nr), x.accumulate);
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
    if (K == 0) std::fill_n(cp, M * N, 0.0f);

    const Kernel kernel = choose_kernel();
    thread_local std::vector<float> scratch_a, scratch_b;
    const size_t need_a = (std::min(M, kOuter) + kernel.mr) * kDepth, need_b = (std::min(N, kOuter) + kernel.nr) * kDepth;
    if (scratch_a.size() < need_a) scratch_a.resize(need_a);
    if (scratch_b.size() < need_b) scratch_b.resize(need_b);
    float *packed_a = scratch_a.data(), *packed_b = scratch_b.data();

#pragma omp parallel
    for (int64_t i = 0; i < M; i += kOuter)
        for (int64_t j = 0; j < N; j += kOuter)
            for (int64_t p = 0; p < K; p += kDepth)
                multiply_block({ap + i * K + p, bp + p * N + j, cp + i * N + j, K, N, N, std::min(kOuter, M - i),
                                std::min(kOuter, N - j), std::min(kDepth, K - p), p > 0}, kernel, packed_a, packed_b);
    return 0;
}
