// Gated delta rule, fp32, contiguous. Per value head with state S [D_key, D_value], per token:
//   S <- exp(g) S ; u = beta (v - S^T k) ; S <- S + k u^T ; o = scale S^T q
// Computed by chunks of CH tokens: S is only read within a chunk and written once at its end.
//
// Preconditions: contiguous tensors, gates <= 0.
#include "klineage.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t CH = 16;  // tokens of a chunk
constexpr int64_t W = 4;    // floats of a vector

typedef float vec __attribute__((vector_size(16)));
typedef float loose_vec __attribute__((vector_size(16), aligned(4), may_alias));

inline __attribute__((always_inline)) vec load(const float *p) { return *reinterpret_cast<const loose_vec *>(p); }
inline __attribute__((always_inline)) void store(float *p, vec x) { *reinterpret_cast<loose_vec *>(p) = x; }
inline __attribute__((always_inline)) vec splat(float a) {
    const vec x = {a, a, a, a};
    return x;
}

struct Problem {
    int64_t T, HQK, HV, D;
    float scale;
    const float *q, *k, *v, *g, *beta, *state0;  // state0 may be null
    float *o, *state;
};

// Factors between the tokens of a chunk; G is the running sum of the gates from the chunk's start.
struct Coef {
    float solve[CH][CH];   // -beta_i exp(G_i - G_j) k_i.k_j, j <  i
    float attend[CH][CH];  //         exp(G_i - G_j) q_i.k_j, j <= i
    float decay[CH];       // exp(G_i): state before the chunk -> token i
    float remain[CH];      // exp(G_last - G_i): token i -> end of the chunk
};

// How the old contents of a product's result are scaled: x + factor x, or factor x.
struct Decay {
    bool is_change;
    float factor;
};

template <int RR, int N, bool Decays>
inline __attribute__((always_inline)) void tile(float *out, int64_t ldo, const float *A, int64_t ar, int64_t ad,
                                                const float *B, int64_t ldb, int64_t depth, Decay decay) {
    vec acc[RR][N];
    for (int r = 0; r < RR; ++r)
        for (int x = 0; x < N; ++x) acc[r][x] = load(out + r * ldo + x * W);
    if (Decays) {
        const vec f = splat(decay.factor);
        if (decay.is_change) {
            for (int r = 0; r < RR; ++r)
                for (int x = 0; x < N; ++x) acc[r][x] = acc[r][x] + f * acc[r][x];
        } else {
            for (int r = 0; r < RR; ++r)
                for (int x = 0; x < N; ++x) acc[r][x] = acc[r][x] * f;
        }
    }
    for (int64_t d = 0; d < depth; ++d) {
        vec b[N];
        for (int x = 0; x < N; ++x) b[x] = load(B + d * ldb + x * W);
        for (int r = 0; r < RR; ++r) {
            const vec a = splat(A[r * ar + d * ad]);
            for (int x = 0; x < N; ++x) acc[r][x] += a * b[x];
        }
    }
    for (int r = 0; r < RR; ++r)
        for (int x = 0; x < N; ++x) store(out + r * ldo + x * W, acc[r][x]);
}

// RR rows of the product, all columns.
template <int RR, bool Decays>
void strip(float *out, int64_t ldo, const float *A, int64_t ar, int64_t ad, const float *B, int64_t ldb, int64_t depth,
           int64_t cols, Decay decay) {
    constexpr int N = 8 / RR;
    int64_t j = 0;
    for (; j + N * W <= cols; j += N * W) tile<RR, N, Decays>(out + j, ldo, A, ar, ad, B + j, ldb, depth, decay);
    for (; j + W <= cols; j += W) tile<RR, 1, Decays>(out + j, ldo, A, ar, ad, B + j, ldb, depth, decay);
    for (; j < cols; ++j)
        for (int r = 0; r < RR; ++r) {
            float x = out[r * ldo + j];
            if (Decays) x = decay.is_change ? x + decay.factor * x : x * decay.factor;
            for (int64_t d = 0; d < depth; ++d) x += A[r * ar + d * ad] * B[d * ldb + j];
            out[r * ldo + j] = x;
        }
}

// out[r][:] = (decayed) out[r][:] + sum_d A[r * ar + d * ad] * B[d][:]
template <bool Decays>
void rows_times(float *out, int64_t ldo, const float *A, int64_t ar, int64_t ad, const float *B, int64_t ldb,
                int64_t rows, int64_t depth, int64_t cols, Decay decay = Decay{false, 1.0f}) {
    constexpr int R = 4;
    int64_t r = 0;
    for (; r + R <= rows; r += R) strip<R, Decays>(out + r * ldo, ldo, A + r * ar, ar, ad, B, ldb, depth, cols, decay);
    for (; r < rows; ++r) strip<1, Decays>(out + r * ldo, ldo, A + r * ar, ar, ad, B, ldb, depth, cols, decay);
}

inline float dot(const float *a, const float *b, int64_t len) {
    vec s0 = splat(0.0f), s1 = s0, s2 = s0, s3 = s0;
    int64_t d = 0;
    for (; d + 4 * W <= len; d += 4 * W) {
        s0 += load(a + d) * load(b + d);
        s1 += load(a + d + W) * load(b + d + W);
        s2 += load(a + d + 2 * W) * load(b + d + 2 * W);
        s3 += load(a + d + 3 * W) * load(b + d + 3 * W);
    }
    const vec s = (s0 + s1) + (s2 + s3);
    float sum = (s[0] + s[1]) + (s[2] + s[3]);
    for (; d < len; ++d) sum += a[d] * b[d];
    return sum;
}

// One value head: the chunks in order. U [CH, D] and c belong to the thread.
void run_head(const Problem &p, int64_t head, float *__restrict U, Coef &c) {
    const int64_t D = p.D, hq = head / (p.HV / p.HQK), at = head * D * D;
    const int64_t ks = p.HQK * D, vs = p.HV * D;
    float *__restrict S = p.state + at;
    if (p.state0) std::copy_n(p.state0 + at, D * D, S);
    else std::fill_n(S, D * D, 0.0f);
    for (int64_t first = 0; first < p.T; first += CH) {
        const int64_t n = std::min(CH, p.T - first);
        const float *Q = p.q + (first * p.HQK + hq) * D, *K = p.k + (first * p.HQK + hq) * D;
        const float *V = p.v + (first * p.HV + head) * D;
        const float *g = p.g + first * p.HV + head, *beta = p.beta + first * p.HV + head;
        float *O = p.o + (first * p.HV + head) * D;

        // Phase 1, independent of S: pair products and gate sums. between[j] = g[j+1] + .. + g[i], grown token by
        // token: differences of prefix sums would cancel, or be inf - inf.
        float between[CH] = {0}, before = 0.0f;
        for (int64_t i = 0; i < n; ++i) {
            const float gate = g[i * p.HV], b = beta[i * p.HV];
            const float *ki = K + i * ks, *qi = Q + i * ks;
            before += gate;
            c.decay[i] = std::exp(before);
            for (int64_t j = 0; j < i; ++j) {
                between[j] += gate;
                const float e = std::exp(between[j]);
                c.solve[i][j] = -b * (e * dot(ki, K + j * ks, D));
                c.attend[i][j] = e * dot(qi, K + j * ks, D);
            }
            c.attend[i][i] = dot(qi, ki, D);
        }
        for (int64_t i = 0; i < n; ++i) c.remain[i] = std::exp(between[i]);

        // Phase 2: right hand sides against the old state, then forward substitution.
        std::fill_n(U, n * D, 0.0f);
        rows_times<false>(U, D, K, ks, 1, S, D, n, D, D);
        for (int64_t i = 0; i < n; ++i) {
            const float b = beta[i * p.HV], decay = c.decay[i];
            const float *v = V + i * vs;
            float *__restrict u = U + i * D;
            for (int64_t j = 0; j < D; ++j) u[j] = b * (v[j] - decay * u[j]);
        }
        for (int64_t i = 1; i < n; ++i) rows_times<false>(U + i * D, D, c.solve[i], 0, 1, U, D, 1, i, D);

        // Phase 3: outputs, still with the old state and the unscaled U.
        for (int64_t i = 0; i < n; ++i) std::fill_n(O + i * vs, D, 0.0f);
        rows_times<false>(O, vs, Q, ks, 1, S, D, n, D, D);
        for (int64_t i = 0; i < n; ++i) {
            float *__restrict o = O + i * vs;
            const float decay = c.decay[i], scale = p.scale;
            for (int64_t j = 0; j < D; ++j) o[j] *= decay;
            rows_times<false>(o, vs, c.attend[i], 0, 1, U, D, 1, i + 1, D);
            for (int64_t j = 0; j < D; ++j) o[j] *= scale;
        }

        // Phase 4: the only write of S in the chunk.
        for (int64_t i = 0; i < n; ++i) {
            const float remain = c.remain[i];
            float *__restrict u = U + i * D;
            for (int64_t j = 0; j < D; ++j) u[j] *= remain;
        }
        // Next to 0 a factor exp(g) would carry its rounding error into every chunk; far from it S + S (exp(g) - 1) cancels.
        const bool is_change = before > -0.5f;
        const Decay decay = {is_change, is_change ? std::expm1(before) : c.decay[n - 1]};
        rows_times<true>(S, D, K, 1, ks, U, D, D, n, D, decay);
    }
}

void run_heads(const Problem &p) {
#pragma omp parallel
    {
        std::vector<float> u(CH * p.D);
        Coef c;
#pragma omp for schedule(dynamic)
        for (int64_t h = 0; h < p.HV; ++h) run_head(p, h, u.data(), c);
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
    const Problem p = {T, HQK, HV, D, static_cast<float>(scale),
                       data(in[0]), data(in[1]), data(in[2]), data(in[3]), data(in[4]),
                       call->num_inputs == 6 ? data(in[5]) : nullptr, data(out[0]), data(out[1])};
    run_heads(p);
    return 0;
}
