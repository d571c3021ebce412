// Gated delta rule, fp32, contiguous. Per value head with state S [D_key, D_value], per token:
//   S <- exp(g) S ; u = beta (v - S^T k) ; S <- S + k u^T ; o = scale S^T q
//
// Chunk form: with G_i the sum of the gates of a chunk's tokens up to i, the rows u_i of a chunk solve
//   u_i + sum_{j<i} beta_i exp(G_i - G_j) (k_i.k_j) u_j = beta_i (v_i - exp(G_i) S^T k_i),
// then o_i = scale (exp(G_i) S^T q_i + sum_{j<=i} exp(G_i - G_j) (q_i.k_j) u_j) and
//      S <- exp(G_last) S + sum_j exp(G_last - G_j) k_j u_j^T: products of small matrices, the state touched once a chunk.
// A chunk of 16 keeps the part of the work that grows with the chunk at a tenth.
//
// Preconditions: contiguous tensors, gates <= 0. Gates between two tokens are summed, never subtracted, and exp(-inf) is 0, so
// strong gates give zeros.
#include "klineage.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include <immintrin.h>

namespace {

constexpr int kChunk = 16;  // tokens per chunk

struct Problem {
    int64_t T, HQK, HV, D, chunks;
    float scale;
    const float *q, *k, *v, *g, *beta, *state0;  // state0 may be null
    float *o, *state;
};

// The gates and products of a chunk of one value head. G_i is the sum of the gates of tokens 0..i.
struct GateChunk {
    float solve[kChunk][kChunk];   // beta_i exp(G_i - G_j) k_i.k_j for j < i
    float attend[kChunk][kChunk];  // exp(G_i - G_j) q_i.k_j for j <= i
    float decay[kChunk];           // exp(G_i): from the state before the chunk to token i
    float remain[kChunk];          // exp(G_last - G_i): from token i to the end of the chunk
    float beta[kChunk];
};

// dots[i][j] = a_i . b_j for the rows of two chunks, j <= i.
void chunk_dots(const float *a, const float *b, int64_t stride, int64_t tokens, int64_t D, float (&dots)[kChunk][kChunk]) {
    for (int64_t i = 0; i < tokens; ++i)
        for (int64_t j = 0; j <= i; ++j) {
            float sum = 0.0f;
            for (int64_t d = 0; d < D; ++d) sum += a[i * stride + d] * b[j * stride + d];
            dots[i][j] = sum;
        }
}

// The sums of gates between two tokens are built row by row (row i = row i-1 + g_i), never as differences of long sums.
void build_gates(const Problem &p, int64_t head, int64_t first, int64_t tokens, const float (&kk)[kChunk][kChunk],
                 const float (&qk)[kChunk][kChunk], GateChunk *out) {
    float between[kChunk] = {};  // [j]: sum of the gates of tokens j+1 .. i
    float before = 0.0f;         // sum of the gates of tokens 0 .. i
    for (int64_t i = 0; i < tokens; ++i) {
        const int64_t at = (first + i) * p.HV + head;
        const float gate = p.g[at], beta = p.beta[at];
        before += gate;
        out->decay[i] = std::exp(before);
        out->beta[i] = beta;
        for (int64_t j = 0; j < i; ++j) {
            between[j] += gate;
            const float decay = std::exp(between[j]);
            out->solve[i][j] = kk[i][j] * beta * decay;
            out->attend[i][j] = qk[i][j] * decay;
        }
        out->attend[i][i] = qk[i][i];
    }
    for (int64_t i = 0; i < tokens; ++i) out->remain[i] = std::exp(between[i]);
}

// One chunk of one value head.
void prepare_chunk(const Problem &p, int64_t head, int64_t chunk, GateChunk *gates) {
    const int64_t first = chunk * kChunk, tokens = std::min<int64_t>(kChunk, p.T - first);
    const int64_t offset = (first * p.HQK + head / (p.HV / p.HQK)) * p.D;
    float kk[kChunk][kChunk], qk[kChunk][kChunk];
    chunk_dots(p.k + offset, p.k + offset, p.HQK * p.D, tokens, p.D, kk);
    chunk_dots(p.q + offset, p.k + offset, p.HQK * p.D, tokens, p.D, qk);
    build_gates(p, head, first, tokens, kk, qk, gates);
}

// sum[:] += (or -=) sum over d of a[d * step] b[d, :], with rows of D columns.
template <bool kSubtract = false>
void accumulate(float *__restrict sum, const float *a, int64_t step, const float *b, int64_t D, int64_t depth) {
    for (int64_t d = 0; d < depth; ++d) {
        const float x = kSubtract ? -a[d * step] : a[d * step];
        for (int64_t j = 0; j < D; ++j) sum[j] += x * b[d * D + j];
    }
}

// Row i of U = (I + solve)^-1 beta (V - decay K S): right hand side, then forward substitution.
void solve_row(const float *k, const GateChunk &gates, const float *S, int64_t D, int64_t i, const float *v, float *U) {
    float *u = U + i * D;
    const float decay = gates.decay[i], beta = gates.beta[i];
    std::fill_n(u, D, 0.0f);
    accumulate(u, k, 1, S, D, D);
    for (int64_t j = 0; j < D; ++j) u[j] = beta * (v[j] - decay * u[j]);
    accumulate<true>(u, gates.solve[i], 1, U, D, i);
}

// Row i of O = scale (decay Q S + attend U).
void output_row(const float *q, const GateChunk &gates, const float *S, const float *U, int64_t D, float scale, int64_t i,
                float *o) {
    const float decay = gates.decay[i];
    std::fill_n(o, D, 0.0f);
    accumulate(o, q, 1, S, D, D);
    for (int64_t j = 0; j < D; ++j) o[j] *= decay;
    accumulate(o, gates.attend[i], 1, U, D, i + 1);
    for (int64_t j = 0; j < D; ++j) o[j] *= scale;
}

// U <- remain U, then S <- decay_last S + K^T U.
void update_state(const float *k, int64_t k_stride, const GateChunk &gates, float *U, int64_t D, int64_t tokens, float *S) {
    for (int64_t i = 0; i < tokens; ++i) {
        const float remain = gates.remain[i];
        for (int64_t j = 0; j < D; ++j) U[i * D + j] *= remain;
    }
    const float decay = gates.decay[tokens - 1];
    for (int64_t d = 0; d < D; ++d) {
        for (int64_t j = 0; j < D; ++j) S[d * D + j] *= decay;
        accumulate(S + d * D, k + d, k_stride, U, D, tokens);
    }
}

// One value head: the chunks in order.
void run_head(const Problem &p, int64_t head, float *U) {
    GateChunk gates;
    const int64_t stride = p.HV * p.D, k_stride = p.HQK * p.D, at = head * p.D * p.D;
    float *S = p.state + at;
    if (p.state0) std::copy_n(p.state0 + at, p.D * p.D, S);
    else std::fill_n(S, p.D * p.D, 0.0f);
    for (int64_t c = 0; c < p.chunks; ++c) {
        const int64_t first = c * kChunk, tokens = std::min<int64_t>(kChunk, p.T - first);
        const int64_t offset = (first * p.HQK + head / (p.HV / p.HQK)) * p.D;
        const float *q = p.q + offset, *k = p.k + offset, *v = p.v + (first * p.HV + head) * p.D;
        float *o = p.o + (first * p.HV + head) * p.D;
        prepare_chunk(p, head, c, &gates);
        for (int64_t i = 0; i < tokens; ++i) solve_row(k + i * k_stride, gates, S, p.D, i, v + i * stride, U);
        for (int64_t i = 0; i < tokens; ++i) output_row(q + i * k_stride, gates, S, U, p.D, p.scale, i, o + i * stride);
        update_state(k, k_stride, gates, U, p.D, tokens, S);
    }
}

// ---- AVX-512: lanes are output columns, the rows of a block of columns are registers over the whole depth sum.
#define SIMD_TARGET __attribute__((target("avx512f")))
#define SIMD_INLINE SIMD_TARGET __attribute__((always_inline)) inline

constexpr int kLanes = 16;
static_assert(kChunk == kLanes, "one register holds one value per token of a chunk");

template <int... R>
using Seq = std::integer_sequence<int, R...>;
using Rows = std::make_integer_sequence<int, kChunk>;

// exp with about 1 ulp; exp(-inf) = 0, NaN stays NaN.
SIMD_INLINE __m512 vexp(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);
    x = _mm512_min_ps(_mm512_set1_ps(89.0f), x);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0x08);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.3981999507e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519073e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.0000001201e-1f));
    y = _mm512_fmadd_ps(y, _mm512_mul_ps(r, r), r);
    y = _mm512_add_ps(y, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

template <bool kFull>
SIMD_INLINE __m512 load_columns(const float *p, __mmask16 live) {
    if constexpr (kFull) return _mm512_loadu_ps(p);
    else return _mm512_maskz_loadu_ps(live, p);
}

template <bool kFull>
SIMD_INLINE void store_columns(float *p, __mmask16 live, __m512 x) {
    if constexpr (kFull) _mm512_storeu_ps(p, x);
    else _mm512_mask_storeu_ps(p, live, x);
}

template <int... R>
SIMD_INLINE void zero_rows(__m512 (&x)[kChunk], Seq<R...>) {
    ((x[R] = _mm512_setzero_ps()), ...);
}

template <int... R>
SIMD_INLINE void store_rows(float *to, const __m512 (&x)[kChunk], Seq<R...>) {
    (_mm512_storeu_ps(to + R * kLanes, x[R]), ...);
}

// acc[r] += a[r] * row for all rows of a chunk.
template <int... R>
SIMD_INLINE void fma_rows(__m512 (&acc)[kChunk], const float *a, __m512 row, Seq<R...>) {
    ((acc[R] = _mm512_fmadd_ps(_mm512_set1_ps(a[R]), row, acc[R])), ...);
}

// Transposition of a chunk into a depth-major panel [D rounded up to 16][16]; rows past the last token are zero.
template <int G>
SIMD_INLINE void transpose_quad(__m512 (&r)[kChunk]) {
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[4 * G], r[4 * G + 1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(r[4 * G], r[4 * G + 1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(r[4 * G + 2], r[4 * G + 3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r[4 * G + 2], r[4 * G + 3]));
    r[4 * G] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    r[4 * G + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    r[4 * G + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    r[4 * G + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
}

template <int C>
SIMD_INLINE void transpose_lanes(const __m512 (&r)[kChunk], float *out) {
    const __m512 a = _mm512_shuffle_f32x4(r[C], r[4 + C], 0x88), b = _mm512_shuffle_f32x4(r[C], r[4 + C], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(r[8 + C], r[12 + C], 0x88), d = _mm512_shuffle_f32x4(r[8 + C], r[12 + C], 0xdd);
    _mm512_storeu_ps(out + C * kLanes, _mm512_shuffle_f32x4(a, c, 0x88));
    _mm512_storeu_ps(out + (4 + C) * kLanes, _mm512_shuffle_f32x4(b, d, 0x88));
    _mm512_storeu_ps(out + (8 + C) * kLanes, _mm512_shuffle_f32x4(a, c, 0xdd));
    _mm512_storeu_ps(out + (12 + C) * kLanes, _mm512_shuffle_f32x4(b, d, 0xdd));
}

template <int... R>
SIMD_INLINE void load_rows(__m512 (&r)[kChunk], const float *a, int64_t stride, int64_t tokens, __mmask16 live, Seq<R...>) {
    ((r[R] = _mm512_maskz_loadu_ps(R < tokens ? live : static_cast<__mmask16>(0), a + (R < tokens ? R : 0) * stride)), ...);
}

SIMD_INLINE __mmask16 live_lanes(int64_t left) {
    return left >= kLanes ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << left) - 1u);
}

SIMD_TARGET __attribute__((noinline)) void transpose_panel(const float *a, int64_t stride, int64_t tokens, int64_t D, float *panel) {
    for (int64_t d = 0; d < D; d += kLanes) {
        __m512 r[kChunk];
        load_rows(r, a + d, stride, tokens, live_lanes(D - d), Rows{});
        transpose_quad<0>(r);
        transpose_quad<1>(r);
        transpose_quad<2>(r);
        transpose_quad<3>(r);
        float *out = panel + d * kLanes;
        transpose_lanes<0>(r, out);
        transpose_lanes<1>(r, out);
        transpose_lanes<2>(r, out);
        transpose_lanes<3>(r, out);
    }
}

// dots[i][j] = a_i . b_j from two panels: lane j, one accumulator per row i.
SIMD_TARGET __attribute__((noinline)) void panel_dots(const float *a, const float *b, int64_t D, float *dots) {
    __m512 acc[kChunk];
    zero_rows(acc, Rows{});
    for (int64_t d = 0; d < D; ++d) fma_rows(acc, a + d * kLanes, _mm512_loadu_ps(b + d * kLanes), Rows{});
    store_rows(dots, acc, Rows{});
}

// All rows of the factors; tokens past the last are neutral, so decay[kChunk - 1] is the decay of the whole chunk.
SIMD_TARGET __attribute__((noinline)) void build_gates_simd(const Problem &p, int64_t head, int64_t first, int64_t tokens,
                                                            const float *kk, const float *qk, GateChunk *out) {
    alignas(64) float sums[kChunk];
    __m512 between = _mm512_setzero_ps();  // lane j: sum of the gates of tokens j+1 .. i
    float before = 0.0f;
    for (int i = 0; i < kChunk; ++i) {
        const int64_t at = (first + i) * p.HV + head;
        const float gate = i < tokens ? p.g[at] : 0.0f, beta = i < tokens ? p.beta[at] : 0.0f;
        const __mmask16 below = static_cast<__mmask16>((1u << i) - 1u), upto = static_cast<__mmask16>((2u << i) - 1u);
        between = _mm512_mask_add_ps(between, below, between, _mm512_set1_ps(gate));
        before += gate;
        sums[i] = before;
        out->beta[i] = beta;
        const __m512 decay = vexp(between);
        const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(kk + i * kLanes), _mm512_set1_ps(beta));
        _mm512_storeu_ps(out->solve[i], _mm512_maskz_mul_ps(below, scaled, decay));
        _mm512_storeu_ps(out->attend[i], _mm512_maskz_mul_ps(upto, _mm512_loadu_ps(qk + i * kLanes), decay));
    }
    _mm512_storeu_ps(out->remain, vexp(between));
    _mm512_storeu_ps(out->decay, vexp(_mm512_loadu_ps(sums)));
}

template <bool kFull, int R>
SIMD_INLINE void right_hand_side(__m512 &u, const GateChunk &gates, const float *v, int64_t stride, int64_t tokens,
                                 __mmask16 live) {
    const __m512 beta = _mm512_set1_ps(gates.beta[R]), decay = _mm512_set1_ps(gates.decay[R]);
    if constexpr (kFull) {
        u = _mm512_mul_ps(beta, _mm512_fnmadd_ps(decay, u, _mm512_loadu_ps(v + R * stride)));
    } else {
        const __mmask16 mask = R < tokens ? live : static_cast<__mmask16>(0);
        const __m512 value = _mm512_maskz_loadu_ps(mask, v + (R < tokens ? R : 0) * stride);
        u = _mm512_maskz_mul_ps(mask, beta, _mm512_fnmadd_ps(decay, u, value));
    }
}

template <bool kFull, int... R>
SIMD_INLINE void right_hand_sides(__m512 (&u)[kChunk], const GateChunk &gates, const float *v, int64_t stride, int64_t tokens,
                                  __mmask16 live, Seq<R...>) {
    (right_hand_side<kFull, R>(u[R], gates, v, stride, tokens, live), ...);
}

template <int J, int R>
SIMD_INLINE void substitute_one(__m512 (&u)[kChunk], const GateChunk &gates) {
    if constexpr (R > J) u[R] = _mm512_fnmadd_ps(_mm512_set1_ps(gates.solve[R][J]), u[J], u[R]);
}

template <int J, int... R>
SIMD_INLINE void substitute_column(__m512 (&u)[kChunk], const GateChunk &gates, Seq<R...>) {
    (substitute_one<J, R>(u, gates), ...);
}

template <int... J>
SIMD_INLINE void substitute(__m512 (&u)[kChunk], const GateChunk &gates, Seq<J...>) {
    (substitute_column<J>(u, gates, Rows{}), ...);
}

// One block of columns of U.
template <bool kFull>
SIMD_TARGET __attribute__((noinline)) void solve_block(const float *kT, const GateChunk &gates, const float *S, int64_t D,
                                                       const float *v, int64_t stride, int64_t tokens, __mmask16 live,
                                                       float *U) {
    __m512 u[kChunk];
    zero_rows(u, Rows{});
    for (int64_t d = 0; d < D; ++d) fma_rows(u, kT + d * kLanes, load_columns<kFull>(S + d * D, live), Rows{});
    right_hand_sides<kFull>(u, gates, v, stride, tokens, live, Rows{});
    substitute(u, gates, Rows{});
    store_rows(U, u, Rows{});
}

template <int... R>
SIMD_INLINE void scale_rows(__m512 (&x)[kChunk], const float *by, Seq<R...>) {
    ((x[R] = _mm512_mul_ps(_mm512_set1_ps(by[R]), x[R])), ...);
}

template <int J, int R>
SIMD_INLINE void attend_one(__m512 (&o)[kChunk], const GateChunk &gates, __m512 u) {
    if constexpr (R >= J) o[R] = _mm512_fmadd_ps(_mm512_set1_ps(gates.attend[R][J]), u, o[R]);
}

template <int J, int... R>
SIMD_INLINE void attend_column(__m512 (&o)[kChunk], const GateChunk &gates, __m512 u, Seq<R...>) {
    (attend_one<J, R>(o, gates, u), ...);
}

template <int... J>
SIMD_INLINE void attend_all(__m512 (&o)[kChunk], const GateChunk &gates, const float *U, Seq<J...>) {
    (attend_column<J>(o, gates, _mm512_loadu_ps(U + J * kLanes), Rows{}), ...);
}

template <bool kFull, int R>
SIMD_INLINE void store_output(float *o, int64_t stride, int64_t tokens, __mmask16 live, __m512 x) {
    if (kFull || R < tokens) store_columns<kFull>(o + R * stride, live, x);
}

template <bool kFull, int... R>
SIMD_INLINE void store_outputs(float *o, int64_t stride, int64_t tokens, __mmask16 live, __m512 scale,
                               const __m512 (&x)[kChunk], Seq<R...>) {
    (store_output<kFull, R>(o, stride, tokens, live, _mm512_mul_ps(scale, x[R])), ...);
}

// One block of columns of O.
template <bool kFull>
SIMD_TARGET __attribute__((noinline)) void output_block(const float *qT, const GateChunk &gates, const float *S, int64_t D,
                                                        const float *U, float scale, int64_t stride, int64_t tokens,
                                                        __mmask16 live, float *o) {
    __m512 acc[kChunk];
    zero_rows(acc, Rows{});
    for (int64_t d = 0; d < D; ++d) fma_rows(acc, qT + d * kLanes, load_columns<kFull>(S + d * D, live), Rows{});
    scale_rows(acc, gates.decay, Rows{});
    attend_all(acc, gates, U, Rows{});
    store_outputs<kFull>(o, stride, tokens, live, _mm512_set1_ps(scale), acc, Rows{});
}

template <int... R>
SIMD_INLINE void load_scaled(__m512 (&u)[kChunk], const float *U, const float *by, Seq<R...>) {
    ((u[R] = _mm512_mul_ps(_mm512_set1_ps(by[R]), _mm512_loadu_ps(U + R * kLanes))), ...);
}

template <int J, int N, int... M>
SIMD_INLINE void update_token(__m512 (&s)[N], const float *kT, __m512 u, Seq<M...>) {
    ((s[M] = _mm512_fmadd_ps(_mm512_set1_ps(kT[M * kLanes + J]), u, s[M])), ...);
}

template <int N, int... J>
SIMD_INLINE void update_tokens(__m512 (&s)[N], const float *kT, const __m512 (&u)[kChunk], Seq<J...>) {
    (update_token<J, N>(s, kT, u[J], std::make_integer_sequence<int, N>{}), ...);
}

// N rows of the state at once: N independent chains over the tokens.
template <bool kFull, int N, int... M>
SIMD_INLINE void update_rows(const float *kT, const __m512 (&u)[kChunk], __m512 decay, int64_t D, __mmask16 live, float *S,
                             Seq<M...>) {
    __m512 s[N];
    ((s[M] = _mm512_mul_ps(decay, load_columns<kFull>(S + M * D, live))), ...);
    update_tokens<N>(s, kT, u, Rows{});
    (store_columns<kFull>(S + M * D, live, s[M]), ...);
}

// One block of columns of S.
template <bool kFull>
SIMD_TARGET __attribute__((noinline)) void update_block(const float *kT, const GateChunk &gates, const float *U, int64_t D,
                                                        __mmask16 live, float *S) {
    __m512 u[kChunk];
    load_scaled(u, U, gates.remain, Rows{});
    const __m512 decay = _mm512_set1_ps(gates.decay[kChunk - 1]);
    int64_t d = 0;
    for (; d + 8 <= D; d += 8)
        update_rows<kFull, 8>(kT + d * kLanes, u, decay, D, live, S + d * D, std::make_integer_sequence<int, 8>{});
    for (; d < D; ++d)
        update_rows<kFull, 1>(kT + d * kLanes, u, decay, D, live, S + d * D, std::make_integer_sequence<int, 1>{});
}

template <bool kFull>
SIMD_TARGET void run_block(const Problem &p, const float *kT, const float *qT, const GateChunk &gates, const float *v,
                           int64_t tokens, __mmask16 live, float *S, float *o, float *U) {
    const int64_t stride = p.HV * p.D;
    solve_block<kFull>(kT, gates, S, p.D, v, stride, tokens, live, U);
    output_block<kFull>(qT, gates, S, p.D, U, p.scale, stride, tokens, live, o);
    update_block<kFull>(kT, gates, U, p.D, live, S);
}

int64_t panel_floats(int64_t D) { return (D + kLanes - 1) / kLanes * kLanes * kLanes; }

// One value head: the chunks in order, each in blocks of columns. panels: two panels, aligned to 64 bytes.
SIMD_TARGET __attribute__((noinline)) void run_head_simd(const Problem &p, int64_t head, float *panels) {
    alignas(64) GateChunk gates;
    alignas(64) float U[kChunk * kLanes], kk[kChunk * kLanes], qk[kChunk * kLanes];
    float *kT = panels, *qT = panels + panel_floats(p.D);
    const int64_t k_stride = p.HQK * p.D, at = head * p.D * p.D;
    float *S = p.state + at;
    if (p.state0) std::copy_n(p.state0 + at, p.D * p.D, S);
    else std::fill_n(S, p.D * p.D, 0.0f);
    for (int64_t c = 0; c < p.chunks; ++c) {
        const int64_t first = c * kChunk, tokens = std::min<int64_t>(kChunk, p.T - first);
        const int64_t offset = (first * p.HQK + head / (p.HV / p.HQK)) * p.D;
        const float *v = p.v + (first * p.HV + head) * p.D;
        float *o = p.o + (first * p.HV + head) * p.D;
        transpose_panel(p.k + offset, k_stride, tokens, p.D, kT);
        transpose_panel(p.q + offset, k_stride, tokens, p.D, qT);
        panel_dots(kT, kT, p.D, kk);
        panel_dots(qT, kT, p.D, qk);
        build_gates_simd(p, head, first, tokens, kk, qk, &gates);
        for (int64_t c0 = 0; c0 < p.D; c0 += kLanes) {
            const __mmask16 live = live_lanes(p.D - c0);
            if (tokens == kChunk && p.D - c0 >= kLanes)
                run_block<true>(p, kT, qT, gates, v + c0, tokens, live, S + c0, o + c0, U);
            else
                run_block<false>(p, kT, qT, gates, v + c0, tokens, live, S + c0, o + c0, U);
        }
    }
}

void run_heads(const Problem &p) {
    const bool simd = __builtin_cpu_supports("avx512f");
#pragma omp parallel
    {
        std::vector<float> scratch(simd ? 2 * panel_floats(p.D) + kLanes : kChunk * p.D);
        float *at = scratch.data();
        if (simd) at = reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(at) + 63) & ~static_cast<uintptr_t>(63));
#pragma omp for schedule(dynamic)
        for (int64_t h = 0; h < p.HV; ++h) {
            if (simd) run_head_simd(p, h, at);
            else run_head(p, h, at);
        }
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
    run_heads(p);
    return 0;
}
