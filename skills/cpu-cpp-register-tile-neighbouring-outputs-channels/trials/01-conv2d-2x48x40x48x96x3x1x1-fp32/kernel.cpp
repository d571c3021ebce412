// 2-d convolution y[N,F,P,Q] = x[N,C,H,W] * w[F,C,R,S] (cross-correlation, zero padding), fp32, layout nchw.
//
// Direct convolution: a register tile of 12 columns by 32 output channels at a time; the lanes are channels.
//
// Gains:
//  1. SIMD micro-kernel: AVX-512, AVX2 or portable
//  2. threads: rows of output shared out over the cores
//  3. register tile: one gather of the weights serves 12 columns, one broadcast serves 2 vectors of channels, and 24
//     independent accumulators hide the latency of the fma
//
// Preconditions: contiguous nchw tensors; any stride, padding, filter and tail.
#include "klineage.h"

#include <immintrin.h>
#include <algorithm>
#include <cstdint>

#ifndef KLINEAGE_ISA_CAP
#define KLINEAGE_ISA_CAP 2  // highest dispatch level compiled in: 2 = AVX-512, 1 = AVX2, 0 = portable (a test builds each)
#endif
#define AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma")))
#define AVX2 __attribute__((target("avx2,fma")))

// Full unrolling over the columns of a register tile, with constant indices.
#define COLUMNS_6(STEP) STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5)
#define COLUMNS_12(STEP) COLUMNS_6(STEP) STEP(6) STEP(7) STEP(8) STEP(9) STEP(10) STEP(11)

namespace {

constexpr int kPanel = 32;      // output channels (f) of a tile: 2 vectors of 16 lanes
constexpr int kTile = 12;       // neighbouring output columns (q) of a tile

struct Problem {
    int64_t N, C, H, W, F, R, S, P, Q, stride, pad;
    const float *x, *w;
    float *y;
};

// Element w of a line of x; zero outside of it. A line above or below the plane has width 0.
inline float at(const float *line, uint64_t width, int64_t w) {
    return static_cast<uint64_t>(w) < width ? line[w] : 0.0f;
}

// total[kTile][kPanel] = the sums of all taps of the output row, columns q .. q + kTile - 1: x points at the image, w at the
// weights of the panel's first filter; those of its filter j begin at w + filter[j].
using AddTaps = void (*)(const Problem &p, const float *x, int64_t row, int64_t q, const float *w, const int32_t *filter,
                         float *total);

// ------------------------------------------------------------------------------------------------- AVX-512

// 12 columns x 2 vectors of 16 channels: 24 accumulators, 2 vectors of weights, 1 broadcast.
AVX512 void add_taps_avx512(const Problem &p, const float *x, int64_t row, int64_t q, const float *w, const int32_t *filter,
                            float *total) {
    static_assert(kTile == 12 && kPanel == 32, "the tile is written out");
    const __m512i f0 = _mm512_loadu_si512(filter), f1 = _mm512_loadu_si512(filter + 16);
    const int64_t stride = p.stride, first = q * stride - p.pad;
    __m512 acc[12][2];
#define STEP(i) acc[i][0] = _mm512_setzero_ps(); acc[i][1] = _mm512_setzero_ps();
    COLUMNS_12(STEP)
#undef STEP
    for (int64_t c = 0; c < p.C; ++c, x += p.H * p.W)
        for (int64_t r = 0; r < p.R; ++r) {
            const int64_t h = row * stride + r - p.pad;
            const bool inside = h >= 0 && h < p.H;
            const float *line = x + (inside ? h * p.W : 0);
            const uint64_t width = inside ? static_cast<uint64_t>(p.W) : 0;
            for (int64_t s = 0; s < p.S; ++s, ++w) {
                const __m512 w0 = _mm512_i32gather_ps(f0, w, 4), w1 = _mm512_i32gather_ps(f1, w, 4);
                int64_t column = first + s;
#define STEP(i)                                                          \
    {                                                                    \
        const __m512 v = _mm512_set1_ps(at(line, width, column));        \
        acc[i][0] = _mm512_fmadd_ps(v, w0, acc[i][0]);                   \
        acc[i][1] = _mm512_fmadd_ps(v, w1, acc[i][1]);                   \
        column += stride;                                                \
    }
                COLUMNS_12(STEP)
#undef STEP
            }
        }
#define STEP(i)                                                \
    _mm512_storeu_ps(total + (i) * kPanel, acc[i][0]);         \
    _mm512_storeu_ps(total + (i) * kPanel + 16, acc[i][1]);
    COLUMNS_12(STEP)
#undef STEP
}

// ------------------------------------------------------------------------------------------------- AVX2 and portable

// Sub-tiles of 6 columns x 2 vectors of 8 channels: 12 accumulators, 2 vectors of weights, 1 broadcast.
AVX2 void add_taps_avx2(const Problem &p, const float *x0, int64_t row, int64_t q, const float *w0, const int32_t *filter,
                        float *total) {
    static_assert(kTile % 6 == 0 && kPanel % 16 == 0, "sub-tiles must cover the tile");
    const int64_t stride = p.stride;
    for (int i0 = 0; i0 < kTile; i0 += 6)
        for (int j0 = 0; j0 < kPanel; j0 += 16) {
            const __m256i f0 = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(filter + j0));
            const __m256i f1 = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(filter + j0 + 8));
            const int64_t first = (q + i0) * stride - p.pad;
            const float *x = x0, *w = w0;
            __m256 acc[6][2];
#define STEP(i) acc[i][0] = _mm256_setzero_ps(); acc[i][1] = _mm256_setzero_ps();
            COLUMNS_6(STEP)
#undef STEP
            for (int64_t c = 0; c < p.C; ++c, x += p.H * p.W)
                for (int64_t r = 0; r < p.R; ++r) {
                    const int64_t h = row * stride + r - p.pad;
                    const bool inside = h >= 0 && h < p.H;
                    const float *line = x + (inside ? h * p.W : 0);
                    const uint64_t width = inside ? static_cast<uint64_t>(p.W) : 0;
                    for (int64_t s = 0; s < p.S; ++s, ++w) {
                        const __m256 v0 = _mm256_i32gather_ps(w, f0, 4), v1 = _mm256_i32gather_ps(w, f1, 4);
                        int64_t column = first + s;
#define STEP(i)                                                          \
    {                                                                    \
        const __m256 v = _mm256_set1_ps(at(line, width, column));        \
        acc[i][0] = _mm256_fmadd_ps(v, v0, acc[i][0]);                   \
        acc[i][1] = _mm256_fmadd_ps(v, v1, acc[i][1]);                   \
        column += stride;                                                \
    }
                        COLUMNS_6(STEP)
#undef STEP
                    }
                }
#define STEP(i)                                                          \
    _mm256_storeu_ps(total + (i0 + (i)) * kPanel + j0, acc[i][0]);       \
    _mm256_storeu_ps(total + (i0 + (i)) * kPanel + j0 + 8, acc[i][1]);
            COLUMNS_6(STEP)
#undef STEP
        }
}

void add_taps_portable(const Problem &p, const float *x, int64_t row, int64_t q, const float *w, const int32_t *filter,
                       float *total) {
    const int64_t stride = p.stride, first = q * stride - p.pad;
    float acc[kTile][kPanel] = {};
    for (int64_t c = 0; c < p.C; ++c, x += p.H * p.W)
        for (int64_t r = 0; r < p.R; ++r) {
            const int64_t h = row * stride + r - p.pad;
            const bool inside = h >= 0 && h < p.H;
            const float *line = x + (inside ? h * p.W : 0);
            const uint64_t width = inside ? static_cast<uint64_t>(p.W) : 0;
            for (int64_t s = 0; s < p.S; ++s, ++w) {
                float weight[kPanel];
                for (int j = 0; j < kPanel; ++j) weight[j] = w[filter[j]];
                for (int i = 0; i < kTile; ++i) {
                    const float v = at(line, width, first + s + i * stride);
                    for (int j = 0; j < kPanel; ++j) acc[i][j] += v * weight[j];
                }
            }
        }
    for (int i = 0; i < kTile; ++i)
        for (int j = 0; j < kPanel; ++j) total[i * kPanel + j] = acc[i][j];
}

AddTaps choose_kernel() {
    __builtin_cpu_init();
    if (KLINEAGE_ISA_CAP >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return add_taps_avx512;
    if (KLINEAGE_ISA_CAP >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return add_taps_avx2;
    return add_taps_portable;
}

// ------------------------------------------------------------------------------------------------- the algorithm

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One row of output of 32 filters; past the end the last filter is taken again, and its results are not stored. Columns past
// the end are computed from zeros or valid elements, and not stored either.
void convolve_row(const Problem &p, AddTaps add_taps, int64_t n, int64_t panel, int64_t row) {
    const int64_t taps = p.C * p.R * p.S, f0 = panel * kPanel, filters = std::min<int64_t>(kPanel, p.F - f0);
    int32_t filter[kPanel];
    for (int64_t j = 0; j < kPanel; ++j) filter[j] = static_cast<int32_t>(std::min(j, filters - 1) * taps);
    alignas(64) float total[kTile * kPanel];
    for (int64_t q = 0; q < p.Q; q += kTile) {
        add_taps(p, p.x + n * p.C * p.H * p.W, row, q, p.w + f0 * taps, filter, total);
        const int64_t columns = std::min<int64_t>(kTile, p.Q - q);
        for (int64_t f = 0; f < filters; ++f) {
            float *y = p.y + ((n * p.F + f0 + f) * p.P + row) * p.Q + q;
            for (int64_t i = 0; i < columns; ++i) y[i] = total[i * kPanel + f];
        }
    }
}

bool is_contiguous(const klineage_tensor &t) {
    int64_t expected = 1;
    for (int d = t.num_dims - 1; d >= 0; expected *= t.shape[d--])
        if (t.shape[d] > 1 && t.stride[d] != expected) return false;
    return true;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 2 && call->num_outputs == 1, "conv2d: expects inputs x, w and output y");
    const klineage_tensor &x = call->inputs[0], &w = call->inputs[1], &y = call->outputs[0];
    KLINEAGE_REQUIRE(call, x.dtype == KLINEAGE_FLOAT32 && w.dtype == KLINEAGE_FLOAT32 && y.dtype == KLINEAGE_FLOAT32,
                     "conv2d: only fp32");
    KLINEAGE_REQUIRE(call, x.num_dims == 4 && w.num_dims == 4 && y.num_dims == 4, "conv2d: x, w and y must be 4-d");
    Problem p = {x.shape[0], x.shape[1], x.shape[2], x.shape[3], w.shape[0], w.shape[2], w.shape[3], y.shape[2], y.shape[3],
                 static_cast<int64_t>(klineage_scalar_value(call, "stride", 1)),
                 static_cast<int64_t>(klineage_scalar_value(call, "pad", 0)), static_cast<const float *>(x.data),
                 static_cast<const float *>(w.data), static_cast<float *>(y.data)};
    KLINEAGE_REQUIRE(call, p.stride >= 1 && p.pad >= 0, "conv2d: stride must be positive and pad non-negative");
    KLINEAGE_REQUIRE(call, w.shape[1] == p.C && y.shape[0] == p.N && y.shape[1] == p.F && p.H + 2 * p.pad >= p.R &&
                     p.W + 2 * p.pad >= p.S && p.P == (p.H + 2 * p.pad - p.R) / p.stride + 1 &&
                     p.Q == (p.W + 2 * p.pad - p.S) / p.stride + 1, "conv2d: shapes do not match");
    if (p.N * p.F * p.P * p.Q == 0) return 0;
    KLINEAGE_REQUIRE(call, is_contiguous(x) && is_contiguous(w) && is_contiguous(y),
                     "conv2d: only layout nchw (contiguous tensors)");
    KLINEAGE_REQUIRE(call, p.C * p.R * p.S <= INT32_MAX / kPanel, "conv2d: offsets of the filters of a panel exceed 32 bits");

    const AddTaps add_taps = choose_kernel();
    const int64_t panels = ceil_div(p.F, kPanel);

#pragma omp parallel for schedule(static) collapse(3)
    for (int64_t n = 0; n < p.N; ++n)
        for (int64_t panel = 0; panel < panels; ++panel)
            for (int64_t row = 0; row < p.P; ++row) convolve_row(p, add_taps, n, panel, row);
    return 0;
}
