#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64;
constexpr int kColumns = 64, kSide = 16, kThreads = kSide * kSide;  // columns per CTA; kSide x kSide threads
constexpr int kTokenTile = kChunk / kSide, kColumnTile = kColumns / kSide, kKeyTile = kDim / kSide;
constexpr int kKeyPitch = kDim + 1, kScorePitch = kChunk + 1, kValuePitch = kColumns + 1;  // odd, in floats
constexpr int kSharedFloats = 2 * kChunk * kKeyPitch + 2 * kChunk * kScorePitch + 2 * kChunk * kValuePitch + kDim * kColumns + 3 * kChunk;
constexpr int kSharedBytes = kSharedFloats * int(sizeof(float));

static_assert(kChunk % kSide == 0 && kColumns % kSide == 0 && kDim % kSide == 0 && kDim % kColumns == 0, "tiles have no tail code");
static_assert(kChunk <= kThreads, "one thread per token for the gates");

struct Gates {
    const float *gc, *beta;
    int64_t gc_token, gc_head, beta_token, beta_head;
    __device__ float sum(int t, int h) const { return gc[t * gc_token + h * gc_head]; }
    __device__ float rate(int t, int h) const { return beta[t * beta_token + h * beta_head]; }
};

// A bf16 tensor [T,H,...] with contiguous rows and the strides of the call, in elements.
struct Rows {
    __nv_bfloat16 *data;
    int64_t token, head;
    __host__ explicit Rows(const klineage_tensor &t) : data(static_cast<__nv_bfloat16 *>(t.data)), token(t.stride[0]), head(t.stride[1]) {}
    __device__ __nv_bfloat16 *at(int t, int h) const { return data + t * token + h * this->head; }
};

// Widens kWidth elements, from element `first` on, of the chunk's rows into shared memory; rows past the end are zero,
// and with kLower so is what lies above the diagonal.
template <int kWidth, int kPitch, bool kLower>
__device__ __forceinline__ void stage(float *to, const Rows &from, int t0, int tokens, int h, int first) {
    constexpr int kPairs = kWidth / 2, kEach = kChunk * kPairs / kThreads;
    static_assert(kChunk * kPairs % kThreads == 0, "no tail code");
    __nv_bfloat162 pairs[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const int index = int(threadIdx.x) + e * kThreads, row = index / kPairs, at = index % kPairs * 2;
        pairs[e] = __float2bfloat162_rn(0.f);
        if (t0 + row < tokens) pairs[e] = *reinterpret_cast<const __nv_bfloat162 *>(from.at(t0 + row, h) + first + at);
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const int index = int(threadIdx.x) + e * kThreads, row = index / kPairs, at = index % kPairs * 2;
        const float low = __low2float(pairs[e]), high = __high2float(pairs[e]);
        to[row * kPitch + at] = !kLower || at <= row ? low : 0.f;
        to[row * kPitch + at + 1] = !kLower || at + 1 <= row ? high : 0.f;
    }
}

// sums[i][j] = sum over n of a(y + kSide i, n) b(n, x + kSide j)
template <int kRows, int kCols, int kDepth, class A, class B>
__device__ __forceinline__ void multiply(float (&sums)[kRows][kCols], int x, int y, A a, B b) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kCols; ++j) sums[i][j] = 0.f;
#pragma unroll 8
    for (int n = 0; n < kDepth; ++n) {
        float left[kRows], right[kCols];
#pragma unroll
        for (int i = 0; i < kRows; ++i) left[i] = a(y + kSide * i, n);
#pragma unroll
        for (int j = 0; j < kCols; ++j) right[j] = b(n, x + kSide * j);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int j = 0; j < kCols; ++j) sums[i][j] += left[i] * right[j];
    }
}

__global__ void __launch_bounds__(kThreads) fused_fwd(Rows q, Rows k, Rows v, Rows inverse, Rows o, Gates gates, const float *state0, float *state, int tokens, int group, float scale) {
    extern __shared__ float shared[];
    float *const keys = shared;                               // [kChunk][kKeyPitch]
    float *const queries = keys + kChunk * kKeyPitch;         // [kChunk][kKeyPitch]
    float *const inv = queries + kChunk * kKeyPitch;          // [kChunk][kScorePitch]
    float *const scores = inv + kChunk * kScorePitch;         // [kChunk][kScorePitch]
    float *const w = scores + kChunk * kScorePitch;           // [kChunk][kValuePitch]
    float *const u = w + kChunk * kValuePitch;                // [kChunk][kValuePitch]
    float *const s = u + kChunk * kValuePitch;                // [kDim][kColumns]
    float *const g = s + kDim * kColumns;                     // [kChunk]
    float *const eg = g + kChunk;                             // [kChunk]
    float *const rate = eg + kChunk;                          // [kChunk]

    const int h = blockIdx.x, tid = threadIdx.x, x = tid % kSide, y = tid / kSide, first = blockIdx.y * kColumns;
    const int64_t corner = int64_t(h) * kDim * kDim + first;

#pragma unroll
    for (int i = 0; i < kKeyTile; ++i)
#pragma unroll
        for (int j = 0; j < kColumnTile; ++j) {
            const int d = y + kSide * i, c = x + kSide * j;
            s[d * kColumns + c] = state0 ? state0[corner + d * kDim + c] : 0.f;
        }

    for (int t0 = 0; t0 < tokens; t0 += kChunk) {
        __syncthreads();  // the last chunk's keys and u were read, s is written
        stage<kDim, kKeyPitch, false>(keys, k, t0, tokens, h / group, 0);
        stage<kDim, kKeyPitch, false>(queries, q, t0, tokens, h / group, 0);
        stage<kChunk, kScorePitch, true>(inv, inverse, t0, tokens, h, 0);
        stage<kColumns, kValuePitch, false>(w, v, t0, tokens, h, first);
        if (tid < kChunk) {
            const int t = t0 + tid;
            const float sum = gates.sum(min(t, tokens - 1), h);
            g[tid] = sum;
            eg[tid] = expf(sum);
            rate[tid] = t < tokens ? gates.rate(t, h) : 0.f;
        }
        __syncthreads();

        {  // scores = tril(Q K^T exp(gamma_i - gamma_j))
            float sums[kTokenTile][kTokenTile];
            multiply<kTokenTile, kTokenTile, kDim>(
                sums, x, y, [=](int i, int n) { return queries[i * kKeyPitch + n]; }, [=](int n, int j) { return keys[j * kKeyPitch + n]; });
#pragma unroll
            for (int a = 0; a < kTokenTile; ++a)
#pragma unroll
                for (int b = 0; b < kTokenTile; ++b) {
                    const int i = y + kSide * a, j = x + kSide * b;
                    scores[i * kScorePitch + j] = j <= i ? sums[a][b] * expf(g[i] - g[j]) : 0.f;
                }
        }
        {  // w = beta (V - exp(gamma) K S)
            float sums[kTokenTile][kColumnTile];
            multiply<kTokenTile, kColumnTile, kDim>(
                sums, x, y, [=](int i, int n) { return keys[i * kKeyPitch + n]; }, [=](int n, int j) { return s[n * kColumns + j]; });
#pragma unroll
            for (int a = 0; a < kTokenTile; ++a)
#pragma unroll
                for (int b = 0; b < kColumnTile; ++b) {
                    const int i = y + kSide * a, j = x + kSide * b;
                    w[i * kValuePitch + j] = rate[i] * (w[i * kValuePitch + j] - eg[i] * sums[a][b]);
                }
        }
        __syncthreads();

        {  // u = inverse w
            float sums[kTokenTile][kColumnTile];
            multiply<kTokenTile, kColumnTile, kChunk>(
                sums, x, y, [=](int i, int n) { return inv[i * kScorePitch + n]; }, [=](int n, int j) { return w[n * kValuePitch + j]; });
#pragma unroll
            for (int a = 0; a < kTokenTile; ++a)
#pragma unroll
                for (int b = 0; b < kColumnTile; ++b) u[(y + kSide * a) * kValuePitch + x + kSide * b] = sums[a][b];
        }
        __syncthreads();

        {  // O = scale (exp(gamma) Q S + scores u)
            float carried[kTokenTile][kColumnTile], inside[kTokenTile][kColumnTile];
            multiply<kTokenTile, kColumnTile, kDim>(
                carried, x, y, [=](int i, int n) { return queries[i * kKeyPitch + n]; }, [=](int n, int j) { return s[n * kColumns + j]; });
            multiply<kTokenTile, kColumnTile, kChunk>(
                inside, x, y, [=](int i, int n) { return scores[i * kScorePitch + n]; }, [=](int n, int j) { return u[n * kValuePitch + j]; });
#pragma unroll
            for (int a = 0; a < kTokenTile; ++a) {
                const int i = y + kSide * a;
                if (t0 + i < tokens) {
                    __nv_bfloat16 *const out = o.at(t0 + i, h) + first + x;
#pragma unroll
                    for (int b = 0; b < kColumnTile; ++b) out[kSide * b] = __float2bfloat16(scale * (eg[i] * carried[a][b] + inside[a][b]));
                }
            }
        }
        __syncthreads();  // s and the unscaled u were read

#pragma unroll
        for (int a = 0; a < kTokenTile; ++a) {
            const int i = y + kSide * a;
            const float decay = expf(g[kChunk - 1] - g[i]);
#pragma unroll
            for (int b = 0; b < kColumnTile; ++b) u[i * kValuePitch + x + kSide * b] *= decay;
        }
        __syncthreads();

        {  // S = exp(gamma_C) S + K^T (exp(gamma_C - gamma) u)
            float sums[kKeyTile][kColumnTile];
            multiply<kKeyTile, kColumnTile, kChunk>(
                sums, x, y, [=](int i, int n) { return keys[n * kKeyPitch + i]; }, [=](int n, int j) { return u[n * kValuePitch + j]; });
            const float kept = eg[kChunk - 1];
#pragma unroll
            for (int a = 0; a < kKeyTile; ++a)
#pragma unroll
                for (int b = 0; b < kColumnTile; ++b) {
                    float &element = s[(y + kSide * a) * kColumns + x + kSide * b];
                    element = kept * element + sums[a][b];
                }
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kKeyTile; ++i)
#pragma unroll
        for (int j = 0; j < kColumnTile; ++j) {
            const int d = y + kSide * i, c = x + kSide * j;
            state[corner + d * kDim + c] = s[d * kColumns + c];
        }
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if ((call->num_inputs != 6 && call->num_inputs != 7) || call->num_outputs != 2) return "gdn_fused_fwd reads q, k, v, inverse, gc, beta [, state0] and writes o and state";
    if (klineage_scalar_value(call, "chunk", kChunk) != kChunk) return "gdn_fused_fwd: chunks must have 64 tokens";
    const klineage_tensor *in = call->inputs, &v = in[2], &inverse = in[3], &o = call->outputs[0], &state = call->outputs[1];
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &inverse, &o})
        if (t->dtype != KLINEAGE_BFLOAT16 || t->num_dims != 3 || t->shape[0] != v.shape[0] || t->shape[2] != (t == &inverse ? kChunk : kDim))
            return "gdn_fused_fwd: q, k, v and o must be bf16 [T,H,128], inverse bf16 [T,HV,64]";
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &inverse, &o})
        if (t->stride[2] != 1 || t->stride[0] <= 0 || t->stride[1] <= 0 || t->stride[0] % 8 || t->stride[1] % 8 || reinterpret_cast<uintptr_t>(t->data) % 16)
            return "gdn_fused_fwd: rows must be contiguous and 16-byte aligned";
    for (const klineage_tensor *t : {&in[4], &in[5]})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 2 || t->shape[0] != v.shape[0] || t->shape[1] != v.shape[1]) return "gdn_fused_fwd: gc and beta must be fp32 [T,HV]";
    for (const klineage_tensor *t : {&state, call->num_inputs == 7 ? &in[6] : &state})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 3 || t->shape[0] != v.shape[1] || t->shape[1] != kDim || t->shape[2] != kDim || t->stride[2] != 1 ||
            t->stride[1] != kDim || t->stride[0] != kDim * kDim)
            return "gdn_fused_fwd: state0 and state must be contiguous fp32 [HV,128,128]";
    if (in[0].shape[1] < 1 || in[1].shape[1] != in[0].shape[1] || v.shape[1] < 1 || v.shape[1] % in[0].shape[1] || o.shape[1] != v.shape[1] || inverse.shape[1] != v.shape[1])
        return "gdn_fused_fwd: HV must be a multiple of HQK";
    if (v.shape[0] < 1 || v.shape[0] > INT32_MAX / 2 || v.shape[1] > 65536) return "gdn_fused_fwd: 1 to 2^30 tokens, at most 65536 heads";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor *in = call->inputs, &o = call->outputs[0];
    const int tokens = int(in[2].shape[0]), heads = int(in[2].shape[1]), group = heads / int(in[0].shape[1]);
    const float scale = float(klineage_scalar_value(call, "scale", 0.08838834764831845));
    const auto stream = static_cast<cudaStream_t>(call->stream);
    const Gates gates{static_cast<const float *>(in[4].data), static_cast<const float *>(in[5].data), in[4].stride[0], in[4].stride[1], in[5].stride[0], in[5].stride[1]};
    const float *const state0 = call->num_inputs == 7 ? static_cast<const float *>(in[6].data) : nullptr;
    float *const state = static_cast<float *>(call->outputs[1].data);
    KLINEAGE_REQUIRE(call, cudaFuncSetAttribute(fused_fwd, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes) == cudaSuccess,
                     "gdn_fused_fwd: the device has too little shared memory");
    fused_fwd<<<dim3(heads, kDim / kColumns), kThreads, kSharedBytes, stream>>>(Rows(in[0]), Rows(in[1]), Rows(in[2]), Rows(in[3]), Rows(o), gates, state0, state, tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_fused_fwd: the launch failed");
    return 0;
}
