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
//  2. threads: heads and panels of 32 value columns shared out over the cores                            1.9 (two cores)
//  3. keys and queries transposed, so that eight tokens' values are adjacent broadcasts
// The products k_i.k_j and q_i.k_j do not depend on the state: a first phase forms them once for all value heads of a q/k head,
// in parallel over the chunks (18 per cent of the time). The substitution runs in registers, eight rows at a time.
// A chunk of 16 keeps the part of the work that grows with the chunk at a tenth.
//
// Preconditions: contiguous tensors, gates <= 0. Gates between two tokens are summed, never subtracted, and exp(-inf) is 0, so
// strong gates give zeros. Scratch: transposed keys and queries, and 2.2 KB for each chunk of each value head.
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
constexpr int kPanel = 32;  // value columns per panel: two vectors
constexpr int kTile = 8;    // rows of a register tile: 8 x 32 = 16 accumulators

struct Problem {
    int64_t T, HQK, HV, D, chunks, panels;
    float scale;
    const float *q, *k, *v, *g, *beta, *state0;  // state0 may be null
    float *o, *state;
};

// What a chunk of one q/k head contributes, whatever the state: keys and queries transposed to [D][kChunk].
struct KeyChunk {
    float *kt, *qt;
};

// What a chunk of one value head contributes, whatever the state. G_i is the sum of the gates of tokens 0..i.
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

// Transposes one chunk of a [T, H, D] tensor to [D][kChunk]; tokens past the end become zeros.
AVX512 void transpose_chunk(const float *x, int64_t tokens, int64_t row_stride, int64_t D, float *xt) {
    for (int64_t d = 0; d < D; ++d)
        for (int64_t i = 0; i < kChunk; ++i) xt[d * kChunk + i] = i < tokens ? x[i * row_stride + d] : 0.0f;
}

// dots[i][j] = a_i . b_j for two transposed chunks: 16 accumulators, the lanes are j.
AVX512 void chunk_dots(const float *at, const float *bt, int64_t D, __m512 (&dots)[kChunk]) {
    __m512 acc[kChunk];
#pragma GCC unroll 16
    for (int i = 0; i < kChunk; ++i) acc[i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < D; ++d) {
        const __m512 b = _mm512_loadu_ps(bt + d * kChunk);
#pragma GCC unroll 16
        for (int i = 0; i < kChunk; ++i) acc[i] = _mm512_fmadd_ps(_mm512_set1_ps(at[d * kChunk + i]), b, acc[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kChunk; ++i) dots[i] = acc[i];
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

// Phase 1, one chunk of one q/k head and the value heads that share it.
AVX512 void prepare_chunk(const Problem &p, int64_t hq, int64_t chunk, KeyChunk keys, GateChunk *gates) {
    const int64_t first = chunk * kChunk, tokens = std::min<int64_t>(kChunk, p.T - first), group = p.HV / p.HQK;
    const int64_t offset = (first * p.HQK + hq) * p.D;
    transpose_chunk(p.k + offset, tokens, p.HQK * p.D, p.D, keys.kt);
    transpose_chunk(p.q + offset, tokens, p.HQK * p.D, p.D, keys.qt);
    __m512 kk[kChunk], qk[kChunk];
    chunk_dots(keys.kt, keys.kt, p.D, kk);
    chunk_dots(keys.qt, keys.kt, p.D, qk);
    for (int64_t h = hq * group; h < (hq + 1) * group; ++h)
        build_gates(p, h, first, tokens, kk, qk, gates + h * p.chunks + chunk);
}

using Tile = __m512[kTile][2];

// tile[i][:] += (or -=) sum over d of a[i, d] b[d, :], with a[i, d] = a[i * kRow + d * kStep] and b rows of kPanel.
template <int kRow, int kStep, bool kSubtract = false>
AVX512 INLINE void accumulate(Tile &tile, const float *a, const float *b, int64_t depth) {
    for (int64_t d = 0; d < depth; ++d) {
        const __m512 b0 = _mm512_loadu_ps(b + d * kPanel), b1 = _mm512_loadu_ps(b + d * kPanel + 16);
#pragma GCC unroll 8
        for (int i = 0; i < kTile; ++i) {
            const __m512 x = _mm512_set1_ps(a[i * kRow + d * kStep]);
            tile[i][0] = kSubtract ? _mm512_fnmadd_ps(x, b0, tile[i][0]) : _mm512_fmadd_ps(x, b0, tile[i][0]);
            tile[i][1] = kSubtract ? _mm512_fnmadd_ps(x, b1, tile[i][1]) : _mm512_fmadd_ps(x, b1, tile[i][1]);
        }
    }
}

AVX512 INLINE void clear(Tile &tile) {
#pragma GCC unroll 8
    for (int i = 0; i < kTile; ++i) tile[i][0] = tile[i][1] = _mm512_setzero_ps();
}

struct Columns {  // the columns of a panel that exist
    __mmask16 lo, hi;
};

// Rows row0 .. row0+7 of U = (I + solve)^-1 beta (V - decay K S): right hand side, then forward substitution in registers.
AVX512 void solve_rows(const KeyChunk &keys, const GateChunk &gates, const float *S, int64_t D, int row0, const float *v,
                       int64_t v_stride, int64_t tokens, Columns live, float *U, float *U_remaining) {
    Tile u;
    clear(u);
    accumulate<1, kChunk>(u, keys.kt + row0, S, D);
#pragma GCC unroll 8
    for (int i = 0; i < kTile; ++i) {
        const __m512 decay = _mm512_set1_ps(gates.decay[row0 + i]), beta = _mm512_set1_ps(gates.beta[row0 + i]);
        const bool exists = row0 + i < tokens;
        const float *row = v + (exists ? (row0 + i) * v_stride : 0);
        const __m512 v0 = _mm512_maskz_loadu_ps(exists ? live.lo : 0, row);
        const __m512 v1 = _mm512_maskz_loadu_ps(exists ? live.hi : 0, row + 16);
        u[i][0] = _mm512_mul_ps(beta, _mm512_fnmadd_ps(decay, u[i][0], v0));
        u[i][1] = _mm512_mul_ps(beta, _mm512_fnmadd_ps(decay, u[i][1], v1));
    }
    accumulate<kChunk, 1, true>(u, &gates.solve[row0][0], U, row0);
#pragma GCC unroll 8
    for (int j = 0; j < kTile; ++j) {
#pragma GCC unroll 8
        for (int i = j + 1; i < kTile; ++i) {
            const __m512 factor = _mm512_set1_ps(gates.solve[row0 + i][row0 + j]);
            u[i][0] = _mm512_fnmadd_ps(factor, u[j][0], u[i][0]);
            u[i][1] = _mm512_fnmadd_ps(factor, u[j][1], u[i][1]);
        }
        const __m512 remain = _mm512_set1_ps(gates.remain[row0 + j]);
        _mm512_storeu_ps(U + (row0 + j) * kPanel, u[j][0]);
        _mm512_storeu_ps(U + (row0 + j) * kPanel + 16, u[j][1]);
        _mm512_storeu_ps(U_remaining + (row0 + j) * kPanel, _mm512_mul_ps(remain, u[j][0]));
        _mm512_storeu_ps(U_remaining + (row0 + j) * kPanel + 16, _mm512_mul_ps(remain, u[j][1]));
    }
}

// Rows row0 .. row0+7 of O = scale (decay Q S + attend U).
AVX512 void output_rows(const KeyChunk &keys, const GateChunk &gates, const float *S, const float *U, int64_t D, float scale,
                        int row0, float *o, int64_t o_stride, int64_t tokens, Columns live) {
    Tile acc;
    clear(acc);
    accumulate<1, kChunk>(acc, keys.qt + row0, S, D);
#pragma GCC unroll 8
    for (int i = 0; i < kTile; ++i) {
        const __m512 decay = _mm512_set1_ps(gates.decay[row0 + i]);
        acc[i][0] = _mm512_mul_ps(decay, acc[i][0]);
        acc[i][1] = _mm512_mul_ps(decay, acc[i][1]);
    }
    accumulate<kChunk, 1>(acc, &gates.attend[row0][0], U, row0 + kTile);
    const __m512 s = _mm512_set1_ps(scale);
#pragma GCC unroll 8
    for (int i = 0; i < kTile; ++i) {
        if (row0 + i >= tokens) continue;
        _mm512_mask_storeu_ps(o + (row0 + i) * o_stride, live.lo, _mm512_mul_ps(s, acc[i][0]));
        _mm512_mask_storeu_ps(o + (row0 + i) * o_stride + 16, live.hi, _mm512_mul_ps(s, acc[i][1]));
    }
}

// S <- decay_last S + K^T U_remaining, eight key rows at a time (S has its rows padded to a multiple of eight).
AVX512 void update_state(const KeyChunk &keys, const GateChunk &gates, const float *U_remaining, int64_t D, float *S) {
    const __m512 decay = _mm512_set1_ps(gates.decay[kChunk - 1]);
    for (int64_t d = 0; d < D; d += kTile) {
        Tile acc;
        float *rows = S + d * kPanel;
#pragma GCC unroll 8
        for (int i = 0; i < kTile; ++i) {
            acc[i][0] = _mm512_mul_ps(decay, _mm512_loadu_ps(rows + i * kPanel));
            acc[i][1] = _mm512_mul_ps(decay, _mm512_loadu_ps(rows + i * kPanel + 16));
        }
        accumulate<kChunk, 1>(acc, keys.kt + d * kChunk, U_remaining, kChunk);
#pragma GCC unroll 8
        for (int i = 0; i < kTile; ++i) {
            _mm512_storeu_ps(rows + i * kPanel, acc[i][0]);
            _mm512_storeu_ps(rows + i * kPanel + 16, acc[i][1]);
        }
    }
}

// Phase 2, one panel of value columns of one value head: the chunks in order, the panel of the state in L1.
AVX512 void run_panel(const Problem &p, int64_t head, int64_t panel, const KeyChunk *keys, const GateChunk *gates, float *S) {
    alignas(64) float U[kChunk * kPanel], U_remaining[kChunk * kPanel];
    const int64_t column = panel * kPanel, width = std::min<int64_t>(kPanel, p.D - column), stride = p.HV * p.D;
    const Columns live = {static_cast<__mmask16>((1u << std::min<int64_t>(width, 16)) - 1),
                          static_cast<__mmask16>((1u << std::max<int64_t>(width - 16, 0)) - 1)};
    const int64_t at = head * p.D * p.D + column;
    for (int64_t d = 0; d < (p.D + kTile - 1) / kTile * kTile; ++d)
        for (int64_t j = 0; j < kPanel; ++j)
            S[d * kPanel + j] = p.state0 && d < p.D && j < width ? p.state0[at + d * p.D + j] : 0.0f;
    for (int64_t c = 0; c < p.chunks; ++c) {
        const int64_t first = c * kChunk, tokens = std::min<int64_t>(kChunk, p.T - first);
        const float *v = p.v + (first * p.HV + head) * p.D + column;
        float *o = p.o + (first * p.HV + head) * p.D + column;
        for (int row0 = 0; row0 < kChunk; row0 += kTile)
            solve_rows(keys[c], gates[c], S, p.D, row0, v, stride, tokens, live, U, U_remaining);
        for (int row0 = 0; row0 < kChunk; row0 += kTile)
            output_rows(keys[c], gates[c], S, U, p.D, p.scale, row0, o, stride, tokens, live);
        update_state(keys[c], gates[c], U_remaining, p.D, S);
    }
    for (int64_t d = 0; d < p.D; ++d) std::copy_n(S + d * kPanel, width, p.state + at + d * p.D);
}

void run_avx512(const Problem &p) {
    const int64_t padded = (p.D + kTile - 1) / kTile * kTile, block = padded * kChunk;
    thread_local std::vector<float> transposed;
    thread_local std::vector<KeyChunk> key_chunks;
    thread_local std::vector<GateChunk> gate_chunks;
    transposed.resize(std::max<size_t>(transposed.size(), p.HQK * p.chunks * 2 * block));
    key_chunks.resize(std::max<size_t>(key_chunks.size(), p.HQK * p.chunks));
    gate_chunks.resize(std::max<size_t>(gate_chunks.size(), p.HV * p.chunks));
    KeyChunk *keys = key_chunks.data();
    GateChunk *gates = gate_chunks.data();
    for (int64_t i = 0; i < p.HQK * p.chunks; ++i) {
        keys[i].kt = transposed.data() + i * 2 * block;
        keys[i].qt = keys[i].kt + block;
    }
#pragma omp parallel
    {
        thread_local std::vector<float> state;
        state.resize(std::max<size_t>(state.size(), padded * kPanel));
#pragma omp for schedule(static) collapse(2)
        for (int64_t c = 0; c < p.chunks; ++c)
            for (int64_t hq = 0; hq < p.HQK; ++hq) prepare_chunk(p, hq, c, keys[hq * p.chunks + c], gates);
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t h = 0; h < p.HV; ++h)
            for (int64_t n = 0; n < p.panels; ++n)
                run_panel(p, h, n, keys + h / (p.HV / p.HQK) * p.chunks, gates + h * p.chunks, state.data());
    }
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
    const Problem p = {T, HQK, HV, D, (T + kChunk - 1) / kChunk, (D + kPanel - 1) / kPanel, static_cast<float>(scale),
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
