#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64;
// kSlices CTAs share a head; a CTA's threads form a grid of kDown x kAcross, and a thread owns the elements
// (y + kDown * i, x + kAcross * j) of every product.
constexpr int kSlices = 4, kColumns = kDim / kSlices, kAcross = 8, kDown = 16, kThreads = kAcross * kDown;
// Odd pitches, 9 modulo 32: neither the rows of an operand nor the elements of a tile or of the staging meet on banks.
constexpr int kPad = 9, kDimPitch = kDim + kPad, kChunkPitch = kChunk + kPad, kColumnPitch = kColumns + kPad;
static_assert(kThreads == 128 && kColumns == 32, "the split of a head");
static_assert(kChunk % kDown == 0 && kDim % kDown == 0 && kChunk % kAcross == 0 && kColumns % kAcross == 0, "tiles have no tails");

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

struct Shared {
    float k[kChunk * kDimPitch], q[kChunk * kDimPitch];
    float inverse[kChunk * kChunkPitch], score[kChunk * kChunkPitch];
    float w[kChunk * kColumnPitch], u[kChunk * kColumnPitch];
    float s[kDim * kColumnPitch];
    float g[kChunk], eg[kChunk], beta[kChunk];
};

// Staging of kChunk rows of Vecs 16-byte vectors: a warp takes 8 rows x 4 vectors at a time.
template <int Vecs>
__device__ __forceinline__ int staged_row(int e) {
    return (e & 7) + (e >> 5) / (Vecs / 4) * 8;
}

template <int Vecs>
__device__ __forceinline__ int staged_vec(int e) {
    return ((e >> 3) & 3) + (e >> 5) % (Vecs / 4) * 4;
}

template <int Vecs>
__device__ __forceinline__ void load_rows(uint4 (&raw)[kChunk * Vecs / kThreads], const Rows &from, int t0, int tokens, int head, int offset) {
#pragma unroll
    for (int n = 0; n < kChunk * Vecs / kThreads; ++n) {
        const int e = n * kThreads + int(threadIdx.x), t = t0 + staged_row<Vecs>(e);
        raw[n] = make_uint4(0u, 0u, 0u, 0u);
        if (t < tokens) raw[n] = __ldg(reinterpret_cast<const uint4 *>(from.at(t, head) + offset) + staged_vec<Vecs>(e));
    }
}

// Widens to fp32; Lower keeps the lower triangle only.
template <int Vecs, int Pitch, bool Lower>
__device__ __forceinline__ void store_rows(float *to, const uint4 (&raw)[kChunk * Vecs / kThreads]) {
#pragma unroll
    for (int n = 0; n < kChunk * Vecs / kThreads; ++n) {
        const int e = n * kThreads + int(threadIdx.x), row = staged_row<Vecs>(e), first = staged_vec<Vecs>(e) * 8;
        const uint32_t words[4] = {raw[n].x, raw[n].y, raw[n].z, raw[n].w};
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const int column = first + 2 * p;
            const float low = __uint_as_float(words[p] << 16), high = __uint_as_float(words[p] & 0xffff0000u);
            to[row * Pitch + column] = !Lower || column <= row ? low : 0.f;
            to[row * Pitch + column + 1] = !Lower || column + 1 <= row ? high : 0.f;
        }
    }
}

// acc[i][j] = sum over n of A(y + kDown * i, n) B(n, x + kAcross * j), where a is at A(y, 0) and b at B(0, x);
// AI, AN, BN and BJ are the steps of the operands in floats.
template <int R, int N, int Depth, int AI, int AN, int BN, int BJ>
__device__ __forceinline__ void multiply(float (&acc)[R][N], const float *a, const float *b) {
#pragma unroll
    for (int i = 0; i < R; ++i)
#pragma unroll
        for (int j = 0; j < N; ++j) acc[i][j] = 0.f;
#pragma unroll 8
    for (int n = 0; n < Depth; ++n) {
        float row[R], col[N];
#pragma unroll
        for (int i = 0; i < R; ++i) row[i] = a[i * kDown * AI + n * AN];
#pragma unroll
        for (int j = 0; j < N; ++j) col[j] = b[n * BN + j * kAcross * BJ];
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
            for (int j = 0; j < N; ++j) acc[i][j] += row[i] * col[j];
    }
}

__global__ void __launch_bounds__(kThreads, 1) fused_fwd(Rows q, Rows k, Rows v, Rows inverse, Rows o, Gates gates, const float *state0, float *state, int tokens, int group, float scale) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared &m = *reinterpret_cast<Shared *>(memory);
    constexpr int kRowTile = kChunk / kDown, kColumnTile = kColumns / kAcross, kScoreTile = kChunk / kAcross, kStateTile = kDim / kDown;
    const int tid = int(threadIdx.x), x = tid % kAcross, y = tid / kAcross;
    const int h = blockIdx.x, column0 = blockIdx.y * kColumns, head = h / group;
    const int64_t first = int64_t(h) * kDim * kDim + column0;

#pragma unroll
    for (int i = 0; i < kStateTile; ++i)
#pragma unroll
        for (int j = 0; j < kColumnTile; ++j) {
            const int row = y + kDown * i, column = x + kAcross * j;
            m.s[row * kColumnPitch + column] = state0 ? state0[first + row * kDim + column] : 0.f;
        }

    for (int t0 = 0; t0 < tokens; t0 += kChunk) {
        __syncthreads();  // the old k and u were read, s is written
        {
            uint4 keys[kChunk * 16 / kThreads], queries[kChunk * 16 / kThreads], entries[kChunk * 8 / kThreads], values[kChunk * 4 / kThreads];
            load_rows<16>(keys, k, t0, tokens, head, 0);
            load_rows<16>(queries, q, t0, tokens, head, 0);
            load_rows<8>(entries, inverse, t0, tokens, h, 0);
            load_rows<4>(values, v, t0, tokens, h, column0);
            if (tid < kChunk) {
                const int t = min(t0 + tid, tokens - 1);
                const float g = gates.sum(t, h);
                m.g[tid] = g;
                m.eg[tid] = expf(g);
                m.beta[tid] = t0 + tid < tokens ? gates.rate(t, h) : 0.f;
            }
            store_rows<16, kDimPitch, false>(m.k, keys);
            store_rows<16, kDimPitch, false>(m.q, queries);
            store_rows<8, kChunkPitch, true>(m.inverse, entries);
            store_rows<4, kColumnPitch, false>(m.w, values);
        }
        __syncthreads();

        // score = tril(Q K^T exp(gamma_i - gamma_j))
        {
            float p[kRowTile][kScoreTile];
            multiply<kRowTile, kScoreTile, kDim, kDimPitch, 1, 1, kDimPitch>(p, m.q + y * kDimPitch, m.k + x * kDimPitch);
#pragma unroll
            for (int i = 0; i < kRowTile; ++i) {
                const int row = y + kDown * i;
                const float gamma = m.g[row];
#pragma unroll
                for (int j = 0; j < kScoreTile; ++j) {
                    const int column = x + kAcross * j;
                    m.score[row * kChunkPitch + column] = column <= row ? p[i][j] * expf(gamma - m.g[column]) : 0.f;
                }
            }
        }
        // w = beta (v - exp(gamma) K S)
        {
            float p[kRowTile][kColumnTile];
            multiply<kRowTile, kColumnTile, kDim, kDimPitch, 1, kColumnPitch, 1>(p, m.k + y * kDimPitch, m.s + x);
#pragma unroll
            for (int i = 0; i < kRowTile; ++i) {
                const int row = y + kDown * i;
                const float rate = m.beta[row], decay = m.eg[row];
#pragma unroll
                for (int j = 0; j < kColumnTile; ++j) {
                    float &w = m.w[row * kColumnPitch + x + kAcross * j];
                    w = rate * (w - decay * p[i][j]);
                }
            }
        }
        __syncthreads();

        // u = inverse w
        {
            float p[kRowTile][kColumnTile];
            multiply<kRowTile, kColumnTile, kChunk, kChunkPitch, 1, kColumnPitch, 1>(p, m.inverse + y * kChunkPitch, m.w + x);
#pragma unroll
            for (int i = 0; i < kRowTile; ++i)
#pragma unroll
                for (int j = 0; j < kColumnTile; ++j) m.u[(y + kDown * i) * kColumnPitch + x + kAcross * j] = p[i][j];
        }
        __syncthreads();

        // o = scale (exp(gamma) Q S + score u)
        {
            float read[kRowTile][kColumnTile], p[kRowTile][kColumnTile];
            multiply<kRowTile, kColumnTile, kDim, kDimPitch, 1, kColumnPitch, 1>(read, m.q + y * kDimPitch, m.s + x);
            multiply<kRowTile, kColumnTile, kChunk, kChunkPitch, 1, kColumnPitch, 1>(p, m.score + y * kChunkPitch, m.u + x);
#pragma unroll
            for (int i = 0; i < kRowTile; ++i) {
                const int row = y + kDown * i;
                if (t0 + row < tokens) {
                    const float decay = m.eg[row];
                    __nv_bfloat16 *const out = o.at(t0 + row, h) + column0 + x;
#pragma unroll
                    for (int j = 0; j < kColumnTile; ++j) out[kAcross * j] = __float2bfloat16(scale * (decay * read[i][j] + p[i][j]));
                }
            }
        }
        __syncthreads();  // s and the unscaled u were read

        const float end = m.g[kChunk - 1], fade = m.eg[kChunk - 1];
#pragma unroll
        for (int i = 0; i < kRowTile; ++i) {
            const int row = y + kDown * i;
            const float weight = expf(end - m.g[row]);
#pragma unroll
            for (int j = 0; j < kColumnTile; ++j) m.u[row * kColumnPitch + x + kAcross * j] *= weight;
        }
        __syncthreads();

        // The state after the chunk; every thread reads and writes its own elements of s only
        {
            float next[kStateTile][kColumnTile];
            multiply<kStateTile, kColumnTile, kChunk, 1, kDimPitch, kColumnPitch, 1>(next, m.k + y, m.u + x);
#pragma unroll
            for (int i = 0; i < kStateTile; ++i)
#pragma unroll
                for (int j = 0; j < kColumnTile; ++j) {
                    float &s = m.s[(y + kDown * i) * kColumnPitch + x + kAcross * j];
                    s = fade * s + next[i][j];
                }
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kStateTile; ++i)
#pragma unroll
        for (int j = 0; j < kColumnTile; ++j) {
            const int row = y + kDown * i, column = x + kAcross * j;
            state[first + row * kDim + column] = m.s[row * kColumnPitch + column];
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
    KLINEAGE_REQUIRE(call, cudaFuncSetAttribute(fused_fwd, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared))) == cudaSuccess,
                     "gdn_fused_fwd: the device has too little shared memory");
    fused_fwd<<<dim3(heads, kSlices), kThreads, sizeof(Shared), stream>>>(Rows(in[0]), Rows(in[1]), Rows(in[2]), Rows(in[3]), Rows(o), gates, state0, state, tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_fused_fwd: the launch failed");
    return 0;
}
