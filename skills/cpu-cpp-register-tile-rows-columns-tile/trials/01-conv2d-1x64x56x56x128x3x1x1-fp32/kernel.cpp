// 2-d convolution y[N,F,P,Q] = x[N,C,H,W] * w[F,C,R,S] (cross-correlation, zero padding), fp32, layout nchw.
//
// Direct convolution: 16 output channels at a time; the lanes are channels. A register tile holds the sums of several
// neighbouring pixels of a row of output, so that each vector of weights is gathered once for all of them.
// Floor, x 1x64x56x56, w 128x64x3x3: 462 MFLOP = 2.1 ms on both cores; 2.7 MB = 0.1 ms. Bound by the FMA units.
//
//  1. SIMD micro-kernel: AVX-512, AVX2 or portable
//  2. threads: tiles of output shared out over the cores
//  3. register tile: pixels x channels, 28 x 16 (AVX-512), 12 x 8 (AVX2), 4 x 8 (portable)
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

// Full unrolling over the pixels of a tile: every sum is a variable of its own.
#define REPEAT_12(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7) M(8) M(9) M(10) M(11)
#define REPEAT_28(M)                                                                                             \
    REPEAT_12(M) M(12) M(13) M(14) M(15) M(16) M(17) M(18) M(19) M(20) M(21) M(22) M(23) M(24) M(25) M(26) M(27)

namespace {

constexpr int kPanel = 16;           // output channels (f), one for each lane
constexpr int kPixelsAvx512 = 28;    // 28 sums, 1 vector of weights, 1 of offsets, 1 broadcast: 31 of 32 registers
constexpr int kPixelsAvx2 = 12;      // 12 sums, 1 vector of weights, 1 of offsets, 1 mask or broadcast: 15 of 16 registers
constexpr int kPixelsPortable = 4;
constexpr int kMaxPixels = 32;       // no tile is larger; a multiple of 16

alignas(64) const float kZeros[kMaxPixels] = {};

struct Problem {
    int64_t N, C, H, W, F, R, S, P, Q, stride, pad;
    const float *x, *w;
    float *y;
};

// Element h, w of a plane of x; zero outside of it.
inline float at(const Problem &p, const float *x, int64_t h, int64_t w) {
    return h >= 0 && h < p.H && w >= 0 && w < p.W ? x[h * p.W + w] : 0.0f;
}

// total[pixels][16] = the sums of all taps of the output row, q, q + 1, ...: x points at the image, w at the weights of the
// panel's first filter; those of its filter j begin at w + filter[j]. Pixels past the end of the row are computed, too, from
// elements of x that exist or zeros.
using AddTaps = void (*)(const Problem &p, const float *x, int64_t row, int64_t q, const float *w, const int32_t *filter,
                         float *total);

struct Kernel {
    int64_t pixels;  // of a tile
    AddTaps add_taps;
};

// ------------------------------------------------------------------------------------------------- AVX-512

AVX512 void add_taps_avx512(const Problem &p, const float *x, int64_t row, int64_t q, const float *w, const int32_t *filter,
                            float *total) {
    const int64_t C = p.C, R = p.R, S = p.S, H = p.H, W = p.W, stride = p.stride;
    const int64_t first_h = row * stride - p.pad, first_w = q * stride - p.pad;
    alignas(64) float edge[kMaxPixels];
    alignas(64) int32_t offset[kMaxPixels];
    for (int i = 0; i < kMaxPixels; ++i) offset[i] = static_cast<int32_t>(i * stride);
    const __m512i f = _mm512_loadu_si512(filter);

#define ZERO(i) __m512 acc##i = _mm512_setzero_ps();
#define ADD(i) acc##i = _mm512_fmadd_ps(_mm512_set1_ps(src[i]), weights, acc##i);
#define STORE(i) _mm512_storeu_ps(total + i * kPanel, acc##i);
    REPEAT_28(ZERO)
    for (int64_t c = 0; c < C; ++c, x += H * W)
        for (int64_t r = 0; r < R; ++r) {
            const int64_t h = first_h + r;
            const bool inside = h >= 0 && h < H;
            const float *line = inside ? x + h * W : x;
            for (int64_t s = 0; s < S; ++s, ++w) {
                const int64_t w0 = first_w + s;
                const float *src;  // the pixels of the tile, side by side
                if (!inside) {
                    src = kZeros;
                } else if (stride == 1 && w0 >= 0 && w0 + kPixelsAvx512 <= W) {
                    src = line + w0;
                } else {
                    for (int half = 0; half < kMaxPixels; half += 16) {
                        const __m512i position = _mm512_add_epi32(_mm512_load_si512(offset + half),
                                                                  _mm512_set1_epi32(static_cast<int32_t>(w0)));
                        const __mmask16 exists =
                            _mm512_cmplt_epu32_mask(position, _mm512_set1_epi32(static_cast<int32_t>(W)));
                        if (stride == 1)
                            _mm512_store_ps(edge + half, _mm512_maskz_loadu_ps(exists, line + w0 + half));
                        else
                            _mm512_store_ps(edge + half,
                                            _mm512_mask_i32gather_ps(_mm512_setzero_ps(), exists, position, line, 4));
                    }
                    src = edge;
                }
                const __m512 weights = _mm512_i32gather_ps(f, w, 4);
                REPEAT_28(ADD)
            }
        }
    REPEAT_28(STORE)
#undef ZERO
#undef ADD
#undef STORE
}

// ------------------------------------------------------------------------------------------------- AVX2 and portable

AVX2 void add_taps_avx2(const Problem &p, const float *x0, int64_t row, int64_t q, const float *w0, const int32_t *filter,
                        float *total) {
    const int64_t first_h = row * p.stride - p.pad, first_w = q * p.stride - p.pad;
    alignas(64) float edge[kMaxPixels];
#define ZERO(i) __m256 acc##i = _mm256_setzero_ps();
#define ADD(i) acc##i = _mm256_fmadd_ps(_mm256_set1_ps(src[i]), weights, acc##i);
#define STORE(i) _mm256_storeu_ps(total + i * kPanel + j0, acc##i);
    for (int j0 = 0; j0 < kPanel; j0 += 8) {
        const __m256i f = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(filter + j0));
        const float *x = x0, *w = w0;
        REPEAT_12(ZERO)
        for (int64_t c = 0; c < p.C; ++c, x += p.H * p.W)
            for (int64_t r = 0; r < p.R; ++r) {
                const int64_t h = first_h + r;
                const bool inside = h >= 0 && h < p.H;
                for (int64_t s = 0; s < p.S; ++s, ++w) {
                    const int64_t first = first_w + s;
                    const float *src;  // the pixels of the tile, side by side
                    if (!inside) {
                        src = kZeros;
                    } else if (p.stride == 1 && first >= 0 && first + kPixelsAvx2 <= p.W) {
                        src = x + h * p.W + first;
                    } else {
                        for (int i = 0; i < kPixelsAvx2; ++i) edge[i] = at(p, x, h, first + i * p.stride);
                        src = edge;
                    }
                    const __m256 weights = _mm256_i32gather_ps(w, f, 4);
                    REPEAT_12(ADD)
                }
            }
        REPEAT_12(STORE)
    }
#undef ZERO
#undef ADD
#undef STORE
}

void add_taps_portable(const Problem &p, const float *x0, int64_t row, int64_t q, const float *w0, const int32_t *filter,
                       float *total) {
    constexpr int kColumns = 8;
    for (int j0 = 0; j0 < kPanel; j0 += kColumns) {
        const float *x = x0, *w = w0;
        float sum[kPixelsPortable][kColumns] = {};
        for (int64_t c = 0; c < p.C; ++c, x += p.H * p.W)
            for (int64_t r = 0; r < p.R; ++r)
                for (int64_t s = 0; s < p.S; ++s, ++w) {
                    float weights[kColumns];
                    for (int j = 0; j < kColumns; ++j) weights[j] = w[filter[j0 + j]];
                    for (int i = 0; i < kPixelsPortable; ++i) {
                        const float v = at(p, x, row * p.stride + r - p.pad, (q + i) * p.stride + s - p.pad);
                        for (int j = 0; j < kColumns; ++j) sum[i][j] += v * weights[j];
                    }
                }
        for (int i = 0; i < kPixelsPortable; ++i)
            for (int j = 0; j < kColumns; ++j) total[i * kPanel + j0 + j] = sum[i][j];
    }
}

Kernel choose_kernel() {
    __builtin_cpu_init();
    if (KLINEAGE_ISA_CAP >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return {kPixelsAvx512, add_taps_avx512};
    if (KLINEAGE_ISA_CAP >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return {kPixelsAvx2, add_taps_avx2};
    return {kPixelsPortable, add_taps_portable};
}

// ------------------------------------------------------------------------------------------------- the algorithm

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One tile: neighbouring pixels of a row of output of 16 filters; past the end the last filter is taken again. Results past
// the last filter or the last pixel are not stored.
void convolve_tile(const Problem &p, const Kernel &kernel, int64_t n, int64_t panel, int64_t row, int64_t tile) {
    const int64_t taps = p.C * p.R * p.S, f0 = panel * kPanel, filters = std::min<int64_t>(kPanel, p.F - f0);
    const int64_t q0 = tile * kernel.pixels, pixels = std::min<int64_t>(kernel.pixels, p.Q - q0);
    int32_t filter[kPanel];
    for (int64_t j = 0; j < kPanel; ++j) filter[j] = static_cast<int32_t>(std::min(j, filters - 1) * taps);
    alignas(64) float total[kMaxPixels * kPanel];
    kernel.add_taps(p, p.x + n * p.C * p.H * p.W, row, q0, p.w + f0 * taps, filter, total);
    for (int64_t f = 0; f < filters; ++f) {
        float *y = p.y + ((n * p.F + f0 + f) * p.P + row) * p.Q + q0;
        for (int64_t i = 0; i < pixels; ++i) y[i] = total[i * kPanel + f];
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
    KLINEAGE_REQUIRE(call, p.W + 2 * p.pad + p.S + kMaxPixels * p.stride < INT32_MAX,
                     "conv2d: positions in a row must fit into 32 bits");

    const Kernel kernel = choose_kernel();
    const int64_t panels = ceil_div(p.F, kPanel), tiles = ceil_div(p.Q, kernel.pixels);

#pragma omp parallel for schedule(static) collapse(4)
    for (int64_t n = 0; n < p.N; ++n)
        for (int64_t panel = 0; panel < panels; ++panel)
            for (int64_t row = 0; row < p.P; ++row)
                for (int64_t tile = 0; tile < tiles; ++tile) convolve_tile(p, kernel, n, panel, row, tile);
    return 0;
}
