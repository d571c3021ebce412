#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64;
// A CTA has kSide x kSide threads and kColumns value columns of a head; kSlices CTAs share a head.
constexpr int kSide = 16, kThreads = kSide * kSide, kColumns = 64, kSlices = kDim / kColumns;
// Register tiles: tokens, value columns and keys of a thread
constexpr int kTileTokens = kChunk / kSide, kTileColumns = kColumns / kSide, kTileKeys = kDim / kSide;
// Odd pitches in floats
constexpr int kWide = kDim + 1, kSquare = kChunk + 1, kNarrow = kColumns + 1;
constexpr int kFloats = 2 * kChunk * kWide + 2 * kChunk * kSquare + 2 * kChunk * kNarrow + kDim * kColumns + 3 * kChunk;
constexpr int kBytes = kFloats * int(sizeof(float));
static_assert(kChunk % kSide == 0 && kDim % kSide == 0 && kColumns % kSide == 0 && kDim % kColumns == 0, "tiles have no tails");
static_assert(kBytes <= 227 * 1024, "shared memory of a CTA");

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

// Widens the chunk's rows (Width elements from offset on) to fp32 in shared memory; zero past the last token and, where
// Triangular, above the diagonal.
template <int Width, int Pitch, bool Triangular>
__device__ __forceinline__ void stage(float *to, const Rows &from, int t0, int h, int offset, int tokens) {
    constexpr int kPairs = Width / 2, kEach = kChunk * kPairs / kThreads;
    static_assert(kChunk * kPairs % kThreads == 0, "staging has no tail");
    uint32_t bits[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const int index = int(threadIdx.x) + e * kThreads, i = index / kPairs, j = index % kPairs * 2;
        bits[e] = 0u;
        if (t0 + i < tokens) bits[e] = *reinterpret_cast<const uint32_t *>(from.at(t0 + i, h) + offset + j);
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const int index = int(threadIdx.x) + e * kThreads, i = index / kPairs, j = index % kPairs * 2;
        float low = __uint_as_float(bits[e] << 16), high = __uint_as_float(bits[e] & 0xffff0000u);
        if (Triangular) {
            if (j > i) low = 0.f;
            if (j + 1 > i) high = 0.f;
        }
        to[i * Pitch + j] = low;
        to[i * Pitch + j + 1] = high;
    }
}

// acc[i'][j'] = sum over n of a(i, n) b(n, j) with i = y + kSide i', j = x + kSide j'; the strides are in floats.
template <int Depth, int ARow, int ADepth, int BDepth, int BColumn, int R, int N>
__device__ __forceinline__ void multiply(float (&acc)[R][N], const float *a, const float *b) {
    const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
    a += y * ARow;
    b += x * BColumn;
#pragma unroll
    for (int i = 0; i < R; ++i)
#pragma unroll
        for (int j = 0; j < N; ++j) acc[i][j] = 0.f;
#pragma unroll 8
    for (int n = 0; n < Depth; ++n) {
        float r[R], c[N];
#pragma unroll
        for (int i = 0; i < R; ++i) r[i] = a[i * kSide * ARow + n * ADepth];
#pragma unroll
        for (int j = 0; j < N; ++j) c[j] = b[n * BDepth + j * kSide * BColumn];
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
            for (int j = 0; j < N; ++j) acc[i][j] += r[i] * c[j];
    }
}

__global__ void __launch_bounds__(kThreads, 1) fused_fwd(Rows q, Rows k, Rows v, Rows inverse, Rows o, Gates gates, const float *state0, float *state, int tokens, int group, float scale) {
    extern __shared__ float memory[];
    float *const keys = memory;                        // [kChunk][kWide]
    float *const queries = keys + kChunk * kWide;      // [kChunk][kWide]
    float *const inv = queries + kChunk * kWide;       // [kChunk][kSquare]
    float *const scores = inv + kChunk * kSquare;      // [kChunk][kSquare]
    float *const w = scores + kChunk * kSquare;        // [kChunk][kNarrow]
    float *const u = w + kChunk * kNarrow;             // [kChunk][kNarrow]
    float *const s = u + kChunk * kNarrow;             // [kDim][kColumns]
    float *const gamma = s + kDim * kColumns;          // [kChunk]
    float *const decay = gamma + kChunk;               // [kChunk]
    float *const rate = decay + kChunk;                // [kChunk]

    const int tid = threadIdx.x, x = tid % kSide, y = tid / kSide;
    const int h = blockIdx.x, head = h / group, column0 = blockIdx.y * kColumns;
    const int64_t first = int64_t(h) * kDim * kDim + column0;

    for (int index = tid; index < kDim * kColumns; index += kThreads) {
        const int i = index / kColumns, j = index % kColumns;
        s[index] = state0 ? state0[first + i * kDim + j] : 0.f;
    }

    for (int t0 = 0; t0 < tokens; t0 += kChunk) {
        __syncthreads();  // the old keys, u and gates were read, the state is written
        stage<kDim, kWide, false>(keys, k, t0, head, 0, tokens);
        stage<kDim, kWide, false>(queries, q, t0, head, 0, tokens);
        stage<kChunk, kSquare, true>(inv, inverse, t0, h, 0, tokens);
        stage<kColumns, kNarrow, false>(w, v, t0, h, column0, tokens);
        if (tid < kChunk) {
            const int t = min(t0 + tid, tokens - 1);
            const float sum = gates.sum(t, h);
            gamma[tid] = sum;
            decay[tid] = expf(sum);
            rate[tid] = t0 + tid < tokens ? gates.rate(t, h) : 0.f;
        }
        __syncthreads();

        // scores = tril(Q K^T exp(gamma_i - gamma_j))
        {
            float p[kTileTokens][kTileTokens];
            multiply<kDim, kWide, 1, 1, kWide>(p, queries, keys);
#pragma unroll
            for (int a = 0; a < kTileTokens; ++a)
#pragma unroll
                for (int b = 0; b < kTileTokens; ++b) {
                    const int i = y + kSide * a, j = x + kSide * b;
                    scores[i * kSquare + j] = j <= i ? p[a][b] * expf(gamma[i] - gamma[j]) : 0.f;
                }
        }
        // w = beta (v - exp(gamma) K S), in place of v
        {
            float p[kTileTokens][kTileColumns];
            multiply<kDim, kWide, 1, kColumns, 1>(p, keys, s);
#pragma unroll
            for (int a = 0; a < kTileTokens; ++a)
#pragma unroll
                for (int b = 0; b < kTileColumns; ++b) {
                    const int i = y + kSide * a, j = x + kSide * b;
                    w[i * kNarrow + j] = rate[i] * (w[i * kNarrow + j] - decay[i] * p[a][b]);
                }
        }
        __syncthreads();

        // u = inverse w
        {
            float p[kTileTokens][kTileColumns];
            multiply<kChunk, kSquare, 1, kNarrow, 1>(p, inv, w);
#pragma unroll
            for (int a = 0; a < kTileTokens; ++a)
#pragma unroll
                for (int b = 0; b < kTileColumns; ++b) u[(y + kSide * a) * kNarrow + x + kSide * b] = p[a][b];
        }
        __syncthreads();

        // o = scale (exp(gamma) Q S + scores u)
        {
            float old[kTileTokens][kTileColumns], p[kTileTokens][kTileColumns];
            multiply<kDim, kWide, 1, kColumns, 1>(old, queries, s);
            multiply<kChunk, kSquare, 1, kNarrow, 1>(p, scores, u);
#pragma unroll
            for (int a = 0; a < kTileTokens; ++a) {
                const int i = y + kSide * a;
                if (t0 + i < tokens) {
                    __nv_bfloat16 *const row = o.at(t0 + i, h) + column0 + x;
#pragma unroll
                    for (int b = 0; b < kTileColumns; ++b) row[kSide * b] = __float2bfloat16(scale * (decay[i] * old[a][b] + p[a][b]));
                }
            }
        }
        __syncthreads();  // the state and the unscaled u were read

        const float end = gamma[kChunk - 1], fade = decay[kChunk - 1];
#pragma unroll
        for (int a = 0; a < kTileTokens; ++a) {
            const int i = y + kSide * a;
            const float weight = expf(end - gamma[i]);
#pragma unroll
            for (int b = 0; b < kTileColumns; ++b) u[i * kNarrow + x + kSide * b] *= weight;
        }
        __syncthreads();

        // The state after the chunk; every thread updates its own elements
        {
            float next[kTileKeys][kTileColumns];
            multiply<kChunk, 1, kWide, kNarrow, 1>(next, keys, u);
#pragma unroll
            for (int a = 0; a < kTileKeys; ++a)
#pragma unroll
                for (int b = 0; b < kTileColumns; ++b) {
                    float &element = s[(y + kSide * a) * kColumns + x + kSide * b];
                    element = fade * element + next[a][b];
                }
        }
    }
    __syncthreads();
    for (int index = tid; index < kDim * kColumns; index += kThreads) {
        const int i = index / kColumns, j = index % kColumns;
        state[first + i * kDim + j] = s[index];
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
    KLINEAGE_REQUIRE(call, cudaFuncSetAttribute(fused_fwd, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes) == cudaSuccess, "gdn_fused_fwd: too little shared memory");
    fused_fwd<<<dim3(heads, kSlices), kThreads, kBytes, stream>>>(Rows(in[0]), Rows(in[1]), Rows(in[2]), Rows(in[3]), Rows(o), gates, state0, state, tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_fused_fwd: the launch failed");
    return 0;
}
