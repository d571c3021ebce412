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
#include <vector>

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

void run_heads(const Problem &p) {
#pragma omp parallel
    {
        std::vector<float> U(kChunk * p.D);
#pragma omp for schedule(dynamic)
        for (int64_t h = 0; h < p.HV; ++h) run_head(p, h, U.data());
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
