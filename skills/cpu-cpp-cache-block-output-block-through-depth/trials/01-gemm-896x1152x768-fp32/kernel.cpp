// Matrix product c[M,N] = a[M,K] b[K,N], fp32, contiguous.
//
// Floor, M = N = K = 1024: 2.15 GFLOP = 9.8 ms on both cores; 12 MB = 0.4 ms. Bound by the FMA units.
//
// Gains: time without the technique over time with it, all else equal, on one core of a 2-core EPYC Zen 4 (3.65 GHz, both
// cores together 220 GFLOPS of fp32 FMA and 30 GB/s of reads) with the last-level cache flushed before every call.
//  1. register tile: 8 x 32 of c in 16 accumulators, one broadcast of a for two FMAs                     2.0 over 1 x 32
//  2. SIMD micro-kernel: AVX-512 1.1 over AVX2 (6 x 16), 3.5 over what the compiler makes of 4 x 8 loops for SSE2
//  3. threads: c tiles shared out over the cores, both operands packed together                          2.0 (two cores)
//  4. pack b into panels of 32 columns: contiguous loads instead of one 4 KB row, one page, per step     1.2 to 1.3
// Two costs are paid on purpose: sums of at most 256 products in one accumulator (4 per cent; they halve the rounding error of
// long sums), and the packing of a at all (3 to 5 per cent at this shape; it makes tails and any row stride the same case).
//
// Preconditions: contiguous row-major operands. Tails are zeros in the panels and masks (AVX-512) or a copy (else) in c.
#include "klineage.h"

#include <immintrin.h>
#include <omp.h>
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

constexpr int64_t kDepth = 256;         // products summed in one accumulator before they join c
// One task: a block of c, through the whole depth. In the private cache of a core (fp32): 172 KB of c through the task, 229 KB
// of a through one slice of the depth, and one slice panel of b, 32 KB, at a time.
constexpr int64_t kTaskRows = 224, kTaskCols = 192;

// c[rows, cols] = (accumulate ? c : 0) + a panel times b panel. The a panel is [depth][mr], the b panel [depth][nr].
using MicroKernel = void (*)(int64_t depth, const float *a, const float *b, float *c, int64_t ldc, int64_t rows,
                             int64_t cols, bool accumulate);
struct Kernel {
    int64_t mr, nr;
    MicroKernel tile;
};

// ------------------------------------------------------------------------------------------------- micro-kernels

constexpr int kRows512 = 8;  // 8 x 32: 16 accumulators, four times what the latency of the FMA needs

AVX512 void tile_avx512(int64_t depth, const float *a, const float *b, float *c, int64_t ldc, int64_t rows, int64_t cols,
                        bool accumulate) {
    __m512 acc[kRows512][2];
#pragma GCC unroll 16
    for (int i = 0; i < kRows512; ++i) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
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

// ------------------------------------------------------------------------------------------------- packing

// One panel of a: rows x depth of row-major a, transposed to [depth][mr]; rows past the end become zeros.
void pack_a(const float *a, int64_t lda, int64_t rows, int64_t depth, int64_t mr, float *panel) {
    for (int64_t i = 0; i < mr; ++i)
        for (int64_t p = 0; p < depth; ++p) panel[p * mr + i] = i < rows ? a[i * lda + p] : 0.0f;
}

// One panel of b: depth x cols, rows of nr side by side; columns past the end become zeros.
void pack_b(const float *b, int64_t ldb, int64_t depth, int64_t cols, int64_t nr, float *panel) {
    for (int64_t p = 0; p < depth; ++p) {
        std::copy_n(b + p * ldb, cols, panel + p * nr);
        std::fill(panel + p * nr + cols, panel + (p + 1) * nr, 0.0f);
    }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Kernel choose_kernel() {
    __builtin_cpu_init();
    if (KLINEAGE_ISA_CAP >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return {kRows512, 32, tile_avx512};
    if (KLINEAGE_ISA_CAP >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return {6, 16, tile_avx2};
    return {4, 8, tile_portable};
}

// ------------------------------------------------------------------------------------------------- blocking

struct Block {  // the product: c[m,n] = a[m,depth] b[depth,n]
    const float *a, *b;
    float *c;
    int64_t m, n, depth;
};

// One task, by one thread: panels [i0, i1) of a by panels [j0, j1) of b through the whole depth. The block of c and the slice
// of a stay in the private cache; the slices of an element come in ascending order, the first one overwrites.
void multiply_task(const Block &x, const Kernel &kernel, const float *packed_a, const float *packed_b, int64_t i0, int64_t i1,
                   int64_t j0, int64_t j1) {
    const int64_t mr = kernel.mr, nr = kernel.nr;
    for (int64_t p = 0; p < x.depth; p += kDepth)
        for (int64_t j = j0; j < j1; ++j)
            for (int64_t i = i0; i < i1; ++i)
                kernel.tile(std::min(kDepth, x.depth - p), packed_a + (i * x.depth + p) * mr, packed_b + (j * x.depth + p) * nr,
                            x.c + i * mr * x.n + j * nr, x.n, std::min(mr, x.m - i * mr), std::min(nr, x.n - j * nr), p > 0);
}

// Called by all threads of the team: pack both operands together, then share out the tasks.
void multiply_block(const Block &x, const Kernel &kernel, float *packed_a, float *packed_b) {
    const int64_t mr = kernel.mr, nr = kernel.nr, a_panels = ceil_div(x.m, mr), b_panels = ceil_div(x.n, nr);
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < a_panels; ++i)
        pack_a(x.a + i * mr * x.depth, x.depth, std::min(mr, x.m - i * mr), x.depth, mr, packed_a + i * mr * x.depth);
#pragma omp for schedule(static)
    for (int64_t j = 0; j < b_panels; ++j)
        pack_b(x.b + j * nr, x.n, x.depth, std::min(nr, x.n - j * nr), nr, packed_b + j * nr * x.depth);

    // Whole panels per task, at least one; the same numbers in every thread. Small outputs get smaller tasks, and the tasks
    // of a direction are made equally large.
    int64_t task_a = std::max<int64_t>(1, kTaskRows / mr), task_b = std::max<int64_t>(1, kTaskCols / nr);
    const int64_t wanted = 4 * static_cast<int64_t>(omp_get_num_threads());
    while ((task_a > 1 || task_b > 1) && ceil_div(a_panels, task_a) * ceil_div(b_panels, task_b) < wanted) {
        if (task_b == 1 || (task_a > 1 && task_a * mr >= task_b * nr))
            task_a = ceil_div(task_a, 2);
        else
            task_b = ceil_div(task_b, 2);
    }
    task_a = ceil_div(a_panels, ceil_div(a_panels, task_a));
    task_b = ceil_div(b_panels, ceil_div(b_panels, task_b));

    // Row blocks outside: a thread keeps its rows of a and goes on to the next columns. No barrier between slices.
#pragma omp for schedule(static) collapse(2)
    for (int64_t i = 0; i < a_panels; i += task_a)
        for (int64_t j = 0; j < b_panels; j += task_b)
            multiply_task(x, kernel, packed_a, packed_b, i, std::min(i + task_a, a_panels), j, std::min(j + task_b, b_panels));
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
    const size_t need_a = (M + kernel.mr) * K, need_b = (N + kernel.nr) * K;
    if (scratch_a.size() < need_a) scratch_a.resize(need_a);
    if (scratch_b.size() < need_b) scratch_b.resize(need_b);
    float *packed_a = scratch_a.data(), *packed_b = scratch_b.data();

#pragma omp parallel
    multiply_block({ap, bp, cp, M, N, K}, kernel, packed_a, packed_b);
    return 0;
}
