// Gated delta rule, fp32, contiguous. Per value head with state S [D_key, D_value], per token:
//   S <- exp(g) S ; u = beta (v - S^T k) ; S <- S + k u^T ; o = scale S^T q
//
// Chunk form: with G_i the sum of the gates of a chunk's tokens up to i, the rows u_i of a chunk solve
//   u_i + sum_{j<i} beta_i exp(G_i - G_j) (k_i.k_j) u_j = beta_i (v_i - exp(G_i) S^T k_i),
// then o_i = scale (exp(G_i) S^T q_i + sum_{j<=i} exp(G_i - G_j) (q_i.k_j) u_j) and
//      S <- exp(G_last) S + sum_j exp(G_last - G_j) k_j u_j^T: products of small matrices, the state touched once a chunk.
// Floor, T 512, HQK 4, HV 12, D 64: 175 MFLOP = 0.8 ms on both cores; 4.4 MB = 0.15 ms. Bound by the FMA units.
//
// Gains: time without the technique over time with it, all else equal, on one core of a 2-core EPYC Zen 4 (3.65 GHz, both
// cores together 220 GFLOPS of fp32 FMA and 30 GB/s of reads) with the last-level cache flushed before every call.
//  1. chunk form, AVX-512: over the token-by-token recurrence compiled for AVX2 (the next level)         2.2
//     (and 3.9 over the recurrence compiled for SSE2, 3.5 over the recurrence compiled for AVX-512)
//  2. threads: heads shared out over the cores                                                           1.9 (two cores)
// A chunk of 16 keeps the part of the work that grows with the chunk at a tenth.
//
// Preconditions: contiguous tensors, gates <= 0. Gates between two tokens are summed, never subtracted, and exp(-inf) is 0, so
// strong gates give zeros.
#include "klineage.h"

#include <immintrin.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#ifndef KLINEAGE_ISA_CAP
#define KLINEAGE_ISA_CAP 2  // highest dispatch level compiled in: 2 = AVX-512, 1 = AVX2, 0 = portable (a test builds each)
#endif
#define AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma")))
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int kChunk = 16;  // tokens per chunk
constexpr int kLanes = 16;  // value columns per vector
constexpr int kRows = 8;    // rows of a register tile; divides kChunk
constexpr int kVectors = 2; // vectors of a register tile
constexpr int kPanel = kVectors * kLanes;  // value columns of a register tile
constexpr int kDepth = 64;  // columns of k kept for the products of a chunk

struct Problem {
    int64_t T, HQK, HV, D, chunks;
    float scale;
    const float *q, *k, *v, *g, *beta, *state0;  // state0 may be null
    float *o, *state;
};

// The gates and products of a chunk of one value head. G_i is the sum of the gates of tokens 0..i.
struct GateChunk {
    float solve[kChunk][kChunk];   // beta_i exp(G_i - G_j) k_i.k_j for j < i, else 0
    float attend[kChunk][kChunk];  // exp(G_i - G_j) q_i.k_j for j <= i, else 0
    float decay[kChunk];           // exp(G_i): from the state before the chunk to token i
    float remain[kChunk];          // exp(G_last - G_i): from token i to the end of the chunk
    float beta[kChunk];
};

// ------------------------------------------------------------------------------------------------- AVX-512

AVX512 INLINE __m512 exp16(__m512 x) {
    float lanes[16];
    _mm512_storeu_ps(lanes, x);
    for (float &lane : lanes) lane = std::exp(lane);
    return _mm512_loadu_ps(lanes);
}

// kk[i][j] = k_i . k_j and qk[i][j] = q_i . k_j for rows of a chunk (rows past the last repeat it); the lanes are j. A tile
// is 8 rows of k and 8 rows of q by one vector: each column of k is gathered once for all of them.
AVX512 INLINE void chunk_dots(const float *k, const float *q, int64_t stride, int64_t last, int64_t D, __m512 (&kk)[kChunk],
                              __m512 (&qk)[kChunk]) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i rows = _mm512_min_epi32(lanes, _mm512_set1_epi32(static_cast<int>(last)));
    const __m512i offsets = _mm512_mullo_epi32(rows, _mm512_set1_epi32(static_cast<int>(stride)));
    alignas(64) float columns[kDepth * kLanes];
    for (int i = 0; i < kChunk; ++i) kk[i] = qk[i] = _mm512_setzero_ps();
    for (int64_t begin = 0; begin < D; begin += kDepth) {
        const int64_t depth = std::min<int64_t>(kDepth, D - begin);
        for (int64_t d = 0; d < depth; ++d)
            _mm512_store_ps(columns + d * kLanes, _mm512_i32gather_ps(offsets, k + begin + d, 4));
        for (int r = 0; r < kChunk; r += kRows) {
            const float *a = k + begin, *b = q + begin;
            __m512 x[kRows], y[kRows];
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
                x[i] = kk[r + i];
                y[i] = qk[r + i];
            }
            for (int64_t d = 0; d < depth; ++d) {
                const __m512 column = _mm512_load_ps(columns + d * kLanes);
#pragma GCC unroll 8
                for (int i = 0; i < kRows; ++i) {
                    const int64_t row = (r + i < last ? r + i : last) * stride;
                    x[i] = _mm512_fmadd_ps(_mm512_set1_ps(a[row]), column, x[i]);
                    y[i] = _mm512_fmadd_ps(_mm512_set1_ps(b[row]), column, y[i]);
                }
                ++a;
                ++b;
            }
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
                kk[r + i] = x[i];
                qk[r + i] = y[i];
            }
        }
    }
}

// The sums of gates between two tokens are built row by row (row i = row i-1 + g_i), never as differences of long sums.
AVX512 void build_gates(const Problem &p, int64_t head, int64_t first, int64_t tokens, const __m512 *kk, const __m512 *qk,
                        GateChunk *out) {
    __m512 between = _mm512_setzero_ps();  // lane j: sum of the gates of tokens j+1 .. i
    float before = 0.0f, sums[kChunk];     // sum of the gates of tokens 0 .. i
    for (int i = 0; i < kChunk; ++i) {
        const int64_t at = (first + i) * p.HV + head;
        const float gate = i < tokens ? p.g[at] : 0.0f, beta = i < tokens ? p.beta[at] : 0.0f;
        const __mmask16 earlier = static_cast<__mmask16>((1u << i) - 1), upto = static_cast<__mmask16>((2u << i) - 1);
        between = _mm512_mask_add_ps(between, earlier, between, _mm512_set1_ps(gate));
        const __m512 decay = exp16(between);
        sums[i] = before += gate;
        out->beta[i] = beta;
        _mm512_storeu_ps(out->solve[i], _mm512_maskz_mul_ps(earlier, _mm512_mul_ps(kk[i], _mm512_set1_ps(beta)), decay));
        _mm512_storeu_ps(out->attend[i], _mm512_maskz_mul_ps(upto, qk[i], decay));
    }
    _mm512_storeu_ps(out->remain, exp16(between));
    _mm512_storeu_ps(out->decay, exp16(_mm512_loadu_ps(sums)));
}

// One chunk of one value head.
AVX512 void prepare_chunk(const Problem &p, int64_t head, int64_t chunk, GateChunk *gates) {
    const int64_t first = chunk * kChunk, tokens = std::min<int64_t>(kChunk, p.T - first);
    const int64_t offset = (first * p.HQK + head / (p.HV / p.HQK)) * p.D;
    __m512 kk[kChunk], qk[kChunk];
    chunk_dots(p.k + offset, p.q + offset, p.HQK * p.D, tokens - 1, p.D, kk, qk);
    build_gates(p, head, first, tokens, kk, qk, gates);
}

template <bool kFull>
AVX512 INLINE __m512 load_lanes(const float *from, __mmask16 live) {
    return kFull ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps(live, from);
}

template <bool kFull>
AVX512 INLINE void store_lanes(float *to, __mmask16 live, __m512 x) {
    if (kFull) _mm512_storeu_ps(to, x);
    else _mm512_mask_storeu_ps(to, live, x);
}

// tile[i][:] += (or -=) the sum over d of a[i * a_row + d * a_step] b[d * b_row + :], in the columns that live. Rows past
// the last repeat it. kFull: all rows and columns of the tile exist.
template <bool kSubtract, bool kFull>
AVX512 INLINE void accumulate(__m512 (&tile)[kRows][kVectors], const float *a, int64_t a_row, int64_t a_step, int64_t last,
                              const float *b, int64_t b_row, const __mmask16 (&live)[kVectors], int64_t depth) {
    for (int64_t d = 0; d < depth; ++d) {
        __m512 y[kVectors];
#pragma GCC unroll 2
        for (int t = 0; t < kVectors; ++t) y[t] = load_lanes<kFull>(b + t * kLanes, live[t]);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            const __m512 x = _mm512_set1_ps(a[(kFull || i < last ? i : last) * a_row]);
#pragma GCC unroll 2
            for (int t = 0; t < kVectors; ++t)
                tile[i][t] = kSubtract ? _mm512_fnmadd_ps(x, y[t], tile[i][t]) : _mm512_fmadd_ps(x, y[t], tile[i][t]);
        }
        a += a_step;
        b += b_row;
    }
}

// U = (I + solve)^-1 beta (V - decay K S) in one panel: right hand side, then forward substitution: finished tiles as a
// dense product, the triangle of a tile in registers.
template <bool kFull>
AVX512 void solve_rows(const float *k, int64_t k_stride, const GateChunk &gates, const float *S, int64_t D, int64_t tokens,
                       const float *v, int64_t v_stride, const __mmask16 (&live)[kVectors], float *U) {
    for (int64_t r = 0; r < tokens; r += kRows) {
        const int64_t last = tokens - 1 - r;
        __m512 u[kRows][kVectors];
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
            for (int t = 0; t < kVectors; ++t) u[i][t] = _mm512_setzero_ps();
        }
        accumulate<false, kFull>(u, k + r * k_stride, k_stride, 1, last, S, D, live, D);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            const __m512 decay = _mm512_set1_ps(gates.decay[r + i]), beta = _mm512_set1_ps(gates.beta[r + i]);
            const float *row = v + (r + (kFull || i < last ? i : last)) * v_stride;
#pragma GCC unroll 2
            for (int t = 0; t < kVectors; ++t)
                u[i][t] = _mm512_mul_ps(beta, _mm512_fnmadd_ps(decay, u[i][t], load_lanes<kFull>(row + t * kLanes, live[t])));
        }
        accumulate<true, true>(u, gates.solve[r], kChunk, 1, kRows - 1, U, kPanel, live, r);
#pragma GCC unroll 8
        for (int j = 0; j < kRows; ++j) {
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
                if (i > j) {
                    const __m512 x = _mm512_set1_ps(gates.solve[r + i][r + j]);
#pragma GCC unroll 2
                    for (int t = 0; t < kVectors; ++t) u[i][t] = _mm512_fnmadd_ps(x, u[j][t], u[i][t]);
                }
            }
#pragma GCC unroll 2
            for (int t = 0; t < kVectors; ++t) _mm512_storeu_ps(U + (r + j) * kPanel + t * kLanes, u[j][t]);
        }
    }
}

// O = scale (decay Q S + attend U) in one panel. The triangle of a tile takes only j <= i: no zero meets a later row of U.
template <bool kFull>
AVX512 void output_rows(const float *q, int64_t q_stride, const GateChunk &gates, const float *S, const float *U, int64_t D,
                        int64_t tokens, float scale, float *o, int64_t o_stride, const __mmask16 (&live)[kVectors]) {
    for (int64_t r = 0; r < tokens; r += kRows) {
        const int64_t last = tokens - 1 - r;
        __m512 acc[kRows][kVectors];
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
            for (int t = 0; t < kVectors; ++t) acc[i][t] = _mm512_setzero_ps();
        }
        accumulate<false, kFull>(acc, q + r * q_stride, q_stride, 1, last, S, D, live, D);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            const __m512 decay = _mm512_set1_ps(gates.decay[r + i]);
#pragma GCC unroll 2
            for (int t = 0; t < kVectors; ++t) acc[i][t] = _mm512_mul_ps(decay, acc[i][t]);
        }
        accumulate<false, true>(acc, gates.attend[r], kChunk, 1, kRows - 1, U, kPanel, live, r);
#pragma GCC unroll 8
        for (int j = 0; j < kRows; ++j) {
            __m512 y[kVectors];
#pragma GCC unroll 2
            for (int t = 0; t < kVectors; ++t) y[t] = _mm512_loadu_ps(U + (r + j) * kPanel + t * kLanes);
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
                if (i >= j) {
                    const __m512 x = _mm512_set1_ps(gates.attend[r + i][r + j]);
#pragma GCC unroll 2
                    for (int t = 0; t < kVectors; ++t) acc[i][t] = _mm512_fmadd_ps(x, y[t], acc[i][t]);
                }
            }
        }
        const __m512 factor = _mm512_set1_ps(scale);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            if (kFull || i <= last) {
#pragma GCC unroll 2
                for (int t = 0; t < kVectors; ++t)
                    store_lanes<kFull>(o + (r + i) * o_stride + t * kLanes, live[t], _mm512_mul_ps(factor, acc[i][t]));
            }
        }
    }
}

// U <- remain U, then S <- decay_last S + K^T U, in one panel.
template <bool kFull>
AVX512 void update_state(const float *k, int64_t k_stride, const GateChunk &gates, float *U, int64_t D, int64_t tokens,
                         const __mmask16 (&live)[kVectors], float *S) {
    for (int64_t i = 0; i < tokens; ++i) {
        const float remain = gates.remain[i];
        for (int64_t j = 0; j < kPanel; ++j) U[i * kPanel + j] *= remain;
    }
    const __m512 decay = _mm512_set1_ps(gates.decay[kChunk - 1]);
    for (int64_t r = 0; r < D; r += kRows) {
        const int64_t last = D - 1 - r;
        __m512 s[kRows][kVectors];
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            const float *row = S + (r + (kFull || i < last ? i : last)) * D;
#pragma GCC unroll 2
            for (int t = 0; t < kVectors; ++t)
                s[i][t] = _mm512_mul_ps(decay, load_lanes<kFull>(row + t * kLanes, live[t]));
        }
        accumulate<false, kFull>(s, k + r, 1, k_stride, last, U, kPanel, live, tokens);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            if (kFull || i <= last) {
#pragma GCC unroll 2
                for (int t = 0; t < kVectors; ++t)
                    store_lanes<kFull>(S + (r + i) * D + t * kLanes, live[t], s[i][t]);
            }
        }
    }
}

// One value head: the chunks in order.
AVX512 void run_head(const Problem &p, int64_t head) {
    GateChunk gates;
    alignas(64) float U[kChunk * kPanel];
    const int64_t stride = p.HV * p.D, k_stride = p.HQK * p.D, at = head * p.D * p.D;
    if (p.state0) std::copy_n(p.state0 + at, p.D * p.D, p.state + at);
    else std::fill_n(p.state + at, p.D * p.D, 0.0f);
    for (int64_t c = 0; c < p.chunks; ++c) {
        const int64_t first = c * kChunk, tokens = std::min<int64_t>(kChunk, p.T - first);
        const int64_t offset = (first * p.HQK + head / (p.HV / p.HQK)) * p.D;
        const float *q = p.q + offset, *k = p.k + offset;
        prepare_chunk(p, head, c, &gates);
        const bool full = tokens == kChunk && p.D % kPanel == 0;  // then every tile is whole
        for (int64_t column = 0; column < p.D; column += kPanel) {
            __mmask16 live[kVectors];
            for (int t = 0; t < kVectors; ++t) {
                const int64_t columns = std::max<int64_t>(0, std::min<int64_t>(kLanes, p.D - column - t * kLanes));
                live[t] = static_cast<__mmask16>((1u << columns) - 1);
            }
            const float *v = p.v + (first * p.HV + head) * p.D + column;
            float *o = p.o + (first * p.HV + head) * p.D + column, *S = p.state + at + column;
            if (full) {
                solve_rows<true>(k, k_stride, gates, S, p.D, tokens, v, stride, live, U);
                output_rows<true>(q, k_stride, gates, S, U, p.D, tokens, p.scale, o, stride, live);
                update_state<true>(k, k_stride, gates, U, p.D, tokens, live, S);
            } else {
                solve_rows<false>(k, k_stride, gates, S, p.D, tokens, v, stride, live, U);
                output_rows<false>(q, k_stride, gates, S, U, p.D, tokens, p.scale, o, stride, live);
                update_state<false>(k, k_stride, gates, U, p.D, tokens, live, S);
            }
        }
    }
}

void run_avx512(const Problem &p) {
#pragma omp parallel for schedule(dynamic)
    for (int64_t h = 0; h < p.HV; ++h) run_head(p, h);
}

// ------------------------------------------------------------------------------------------------- AVX2 and portable

// The recurrence itself, one head; inner loops over value columns, which the compiler turns into vectors.
INLINE void recurrence(const Problem &p, int64_t h, float *__restrict u) {
    const int64_t D = p.D, hq = h / (p.HV / p.HQK);
    float *__restrict S = p.state + h * D * D;
    if (p.state0) std::copy_n(p.state0 + h * D * D, D * D, S);
    else std::fill_n(S, D * D, 0.0f);
    for (int64_t t = 0; t < p.T; ++t) {
        const float *q = p.q + (t * p.HQK + hq) * D, *k = p.k + (t * p.HQK + hq) * D, *v = p.v + (t * p.HV + h) * D;
        // S + S (exp(g) - 1): next to g = 0 a factor exp(g) would carry its rounding error into every step
        const float change = std::expm1(p.g[t * p.HV + h]), beta = p.beta[t * p.HV + h];
        float *__restrict o = p.o + (t * p.HV + h) * D;
        for (int64_t j = 0; j < D; ++j) u[j] = o[j] = 0.0f;
        for (int64_t i = 0; i < D; ++i)
            for (int64_t j = 0; j < D; ++j) u[j] += k[i] * (S[i * D + j] += change * S[i * D + j]);
        for (int64_t j = 0; j < D; ++j) u[j] = beta * (v[j] - u[j]);
        for (int64_t i = 0; i < D; ++i)
            for (int64_t j = 0; j < D; ++j) o[j] += p.scale * q[i] * (S[i * D + j] += k[i] * u[j]);
    }
}

__attribute__((target("avx2,fma"))) void head_avx2(const Problem &p, int64_t h, float *u) { recurrence(p, h, u); }
void head_portable(const Problem &p, int64_t h, float *u) { recurrence(p, h, u); }

void run_by_token(const Problem &p, void (*head)(const Problem &, int64_t, float *)) {
#pragma omp parallel
    {
        std::vector<float> u(p.D);
#pragma omp for schedule(dynamic)
        for (int64_t h = 0; h < p.HV; ++h) head(p, h, u.data());
    }
}

bool is_contiguous(const klineage_tensor &t) {
    int64_t expected = 1;
    for (int d = t.num_dims - 1; d >= 0; expected *= t.shape[d--])
        if (t.shape[d] > 1 && t.stride[d] != expected) return false;
    return true;
}

bool has_shape(const klineage_tensor &t, int64_t a, int64_t b, int64_t c = -1) {
    return t.num_dims == (c < 0 ? 2 : 3) && t.shape[0] == a && t.shape[1] == b && (c < 0 || t.shape[2] == c);
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, (call->num_inputs == 5 || call->num_inputs == 6) && call->num_outputs == 2,
                     "gdn: expects inputs q, k, v, g, beta [, state0] and outputs o, state");
    for (int i = 0; i < call->num_inputs + 2; ++i) {
        const klineage_tensor &t = i < 2 ? call->outputs[i] : call->inputs[i - 2];
        KLINEAGE_REQUIRE(call, t.dtype == KLINEAGE_FLOAT32, "gdn: only fp32 tensors");
        KLINEAGE_REQUIRE(call, is_contiguous(t), "gdn: tensors must be contiguous");
    }
    const klineage_tensor *in = call->inputs, *out = call->outputs;
    KLINEAGE_REQUIRE(call, in[0].num_dims == 3 && in[2].num_dims == 3, "gdn: q and v must be 3-d");
    const int64_t T = in[2].shape[0], HV = in[2].shape[1], D = in[2].shape[2], HQK = in[0].shape[1];
    KLINEAGE_REQUIRE(call, HQK >= 1 && HV % HQK == 0, "gdn: the value heads must be a multiple of the q/k heads");
    KLINEAGE_REQUIRE(call, has_shape(in[0], T, HQK, D) && has_shape(in[1], T, HQK, D) && has_shape(in[3], T, HV) &&
                     has_shape(in[4], T, HV) && (call->num_inputs == 5 || has_shape(in[5], HV, D, D)) &&
                     has_shape(out[0], T, HV, D) && has_shape(out[1], HV, D, D), "gdn: shapes do not match");
    if (HV == 0 || D == 0) return 0;
    auto data = [](const klineage_tensor &t) { return static_cast<float *>(t.data); };
    const double scale = klineage_scalar_value(call, "scale", 1.0 / std::sqrt(static_cast<double>(D)));
    const Problem p = {T, HQK, HV, D, (T + kChunk - 1) / kChunk, static_cast<float>(scale),
                       data(in[0]), data(in[1]), data(in[2]), data(in[3]), data(in[4]),
                       call->num_inputs == 6 ? data(in[5]) : nullptr, data(out[0]), data(out[1])};
    __builtin_cpu_init();
    if (KLINEAGE_ISA_CAP >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        run_avx512(p);
    else if (KLINEAGE_ISA_CAP >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        run_by_token(p, head_avx2);
    else
        run_by_token(p, head_portable);
    return 0;
}
