#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "klineage.h"

namespace {

constexpr int kDim = 128;

// A tensor [T,H,...] with the strides of the call, in elements.
template <class Element>
struct View {
    Element *data;
    int64_t token, head;
    __host__ explicit View(const klineage_tensor &t) : data(static_cast<Element *>(t.data)), token(t.stride[0]), head(t.stride[1]) {}
    __device__ Element *at(int t, int h) const { return data + t * token + h * head; }
};

using Bf16 = __nv_bfloat16;

constexpr int kChunk = 64;
constexpr int kThreads = 128;
constexpr int kValues = 64;               // of a CTA of chain; a warp owns 16
constexpr int kSplits = kDim / kValues;
constexpr int kTileBytes = kChunk * 128;  // 64 rows of 64 bf16
constexpr int kPitch = kChunk + 4;        // of L, in floats: rows are read four at a time

constexpr int kProducts = 2 * kChunk * kChunk;  // bf16 of scratch of a chunk and head: T, then P
constexpr int kDecays = 2 * kChunk;             // fp32 of scratch of a chunk and head: d, then e

constexpr int kPrepareBytes = 4 * kTileBytes + (kChunk * kPitch + 2 * kChunk) * 4;
constexpr int kChainBytes = 8 * kTileBytes + kDecays * 4;

// The 16-byte piece 2 * pair + half (half is 0 or 1) of a row of swizzled tiles.
__device__ __forceinline__ uint32_t piece(uint32_t tile, int row, int pair, int half) {
    return tile + (pair / 4) * kTileBytes + row * 128 + (((2 * (pair % 4) + half) ^ (row & 7)) << 4);
}

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void stmatrix(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void stmatrix_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t *a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float low_of(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_of(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

// bytes = 0 writes zeros.
__device__ __forceinline__ void cp_async16(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Starts the copy of 64 rows of kPieces * 8 bf16 into swizzled tiles; rows from count on become zeros.
template <int kPieces>
__device__ __forceinline__ void fetch(uint32_t tile, const Bf16 *first, int64_t pitch, int count) {
    constexpr int kStep = kThreads / kPieces;  // a multiple of 8: the swizzle stays
    const int row = threadIdx.x / kPieces, column = threadIdx.x % kPieces;
    const uint32_t to = piece(tile, row, column / 2, column % 2);
    const Bf16 *from = first + row * pitch + column * 8;
#pragma unroll
    for (int i = 0; i < kChunk / kStep; ++i) {
        const bool valid = row + i * kStep < count;
        cp_async16(to + i * kStep * 128, valid ? from + i * kStep * pitch : first, valid ? 16 : 0);
    }
}

// acc += a B^T with B[16 kPairs][16 kSteps] in tiles.
template <int kPairs, int kSteps>
__device__ __forceinline__ void mul_nt(float (&acc)[2 * kPairs][4], const uint32_t (&a)[4 * kSteps], uint32_t tile, int lane) {
    const int row = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
            uint32_t b[4];
            ldmatrix(b, piece(tile, 16 * n + row, k, half));
            mma(acc[2 * n], a + 4 * k, b[0], b[1]);
            mma(acc[2 * n + 1], a + 4 * k, b[2], b[3]);
        }
    }
}

// acc += a B with B[16 kSteps][16 kPairs] in tiles.
template <int kPairs, int kSteps>
__device__ __forceinline__ void mul_nn(float (&acc)[2 * kPairs][4], const uint32_t (&a)[4 * kSteps], uint32_t tile, int lane) {
    const int row = lane % 16, half = lane / 16;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
            uint32_t b[4];
            ldmatrix_trans(b, piece(tile, 16 * k + row, n, half));
            mma(acc[2 * n], a + 4 * k, b[0], b[1]);
            mma(acc[2 * n + 1], a + 4 * k, b[2], b[3]);
        }
    }
}

// Rows i.. of column j of (I + L)^-1.
template <int i>
__device__ __forceinline__ void solve(float (&x)[kChunk], const float *lower, int j) {
    if constexpr (i < kChunk) {
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int m = 0; m < i; m += 4) {
            const float4 l = *reinterpret_cast<const float4 *>(lower + i * kPitch + m);
            sum[0] = fmaf(l.x, x[m], sum[0]);
            if (m + 1 < i) sum[1] = fmaf(l.y, x[m + 1], sum[1]);
            if (m + 2 < i) sum[2] = fmaf(l.z, x[m + 2], sum[2]);
            if (m + 3 < i) sum[3] = fmaf(l.w, x[m + 3], sum[3]);
        }
        x[i] = (i == j ? 1.f : 0.f) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
        solve<i + 1>(x, lower, j);
    }
}

// A decay below exp(-128) is zero in fp32 anyway; the bound keeps differences of sums exact enough and finite.
__device__ __forceinline__ float bounded(float gate) { return gate < -128.f ? -128.f : gate; }

// Everything of a chunk that does not need the state: T = (I + L)^-1 diag(beta), P and the decays.
__global__ void __launch_bounds__(kThreads) prepare(View<const Bf16> q, View<const Bf16> k, View<const float> g, View<const float> beta, Bf16 *products, float *decays,
                                                    int tokens, int group, float scale) {
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t k_tile = static_cast<uint32_t>(__cvta_generic_to_shared(memory)), q_tile = k_tile + 2 * kTileBytes;
    float *lower = reinterpret_cast<float *>(memory + 4 * kTileBytes);
    float *sums = lower + kChunk * kPitch, *betas = sums + kChunk;
    const int h = blockIdx.x, hq = h / group, t0 = blockIdx.y * kChunk, count = min(kChunk, tokens - t0);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int64_t block = int64_t(h) * gridDim.y + blockIdx.y;

    fetch<16>(k_tile, k.at(t0, hq), k.token, count);
    fetch<16>(q_tile, q.at(t0, hq), q.token, count);
    if (warp == 0) {
        const int a = 2 * lane, b = a + 1;
        const float g0 = a < count ? bounded(*g.at(t0 + a, h)) : 0.f, g1 = b < count ? bounded(*g.at(t0 + b, h)) : 0.f;
        betas[a] = a < count ? *beta.at(t0 + a, h) : 0.f;
        betas[b] = b < count ? *beta.at(t0 + b, h) : 0.f;
        const float both = g0 + g1;
        float scan = both;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(0xffffffffu, scan, step);
            if (lane >= step) scan += other;
        }
        float before = __shfl_up_sync(0xffffffffu, scan, 1);
        if (lane == 0) before = 0.f;
        sums[a] = before + g0;
        sums[b] = before + both;
    }
    cp_async_wait();
    __syncthreads();

    // A warp owns 16 rows of K K^T and of Q K^T.
    float kk[8][4] = {}, qk[8][4] = {};
    {
        const int row = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
            uint32_t ak[4], aq[4];
            ldmatrix(ak, piece(k_tile, 16 * warp + lane % 16, step, lane / 16));
            ldmatrix(aq, piece(q_tile, 16 * warp + lane % 16, step, lane / 16));
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                uint32_t b[4];
                ldmatrix(b, piece(k_tile, 16 * n + row, step, half));
                mma(kk[2 * n], ak, b[0], b[1]);
                mma(kk[2 * n + 1], ak, b[2], b[3]);
                mma(qk[2 * n], aq, b[0], b[1]);
                mma(qk[2 * n + 1], aq, b[2], b[3]);
            }
        }
    }
    __syncwarp();
    uint32_t p[8][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = 16 * warp + lane / 4 + 8 * r;
        const float sum_i = sums[i], beta_i = betas[i];
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            const int j = 8 * t + lane % 4 * 2;
            const float2 sum_j = *reinterpret_cast<const float2 *>(sums + j);
            const float decay0 = __expf(j <= i ? sum_i - sum_j.x : 0.f), decay1 = __expf(j + 1 <= i ? sum_i - sum_j.y : 0.f);
            const float l0 = j < i ? beta_i * kk[t][2 * r] * decay0 : 0.f;
            const float l1 = j + 1 < i ? beta_i * kk[t][2 * r + 1] * decay1 : 0.f;
            *reinterpret_cast<float2 *>(lower + i * kPitch + j) = make_float2(l0, l1);
            const float p0 = j <= i ? scale * qk[t][2 * r] * decay0 : 0.f;
            const float p1 = j + 1 <= i ? scale * qk[t][2 * r + 1] * decay1 : 0.f;
            p[t][r] = pack(p0, p1);
        }
    }
    // P goes over this warp's own rows of Q, which no other warp reads.
#pragma unroll
    for (int n = 0; n < 4; ++n) stmatrix(piece(q_tile, 16 * warp + lane % 16, n, lane / 16), p[2 * n][0], p[2 * n][1], p[2 * n + 1][0], p[2 * n + 1][1]);
    __syncthreads();

    unsigned char *p_stage = memory + 2 * kTileBytes, *t_stage = memory + 3 * kTileBytes;
    if (thread < kChunk) {
        const int j = thread;
        float x[kChunk];
        solve<0>(x, lower, j);
        const float beta_j = betas[j];
#pragma unroll
        for (int i = 0; i < kChunk; ++i)
            *reinterpret_cast<Bf16 *>(t_stage + i * 128 + (((j / 8) ^ (i & 7)) << 4) + (j % 8) * 2) = __float2bfloat16(x[i] * beta_j);
    } else {
        const int i = thread - kChunk;
        decays[block * kDecays + i] = expf(sums[i]);
        decays[block * kDecays + kChunk + i] = expf(sums[kChunk - 1] - sums[i]);
    }
    __syncthreads();
    Bf16 *to = products + block * kProducts;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = thread / 8 + 16 * i, column = thread % 8, from = row * 128 + ((column ^ (row & 7)) << 4);
        *reinterpret_cast<uint4 *>(to + row * kChunk + column * 8) = *reinterpret_cast<const uint4 *>(t_stage + from);
        *reinterpret_cast<uint4 *>(to + kChunk * kChunk + row * kChunk + column * 8) = *reinterpret_cast<const uint4 *>(p_stage + from);
    }
}

// The chunks of a head one after the other; a warp holds S^T of 16 values x all keys.
__global__ void __launch_bounds__(kThreads) chain(View<const Bf16> q, View<const Bf16> k, View<const Bf16> v, const Bf16 *products, const float *decays, const float *state0,
                                                  View<Bf16> o, float *state, int tokens, int chunks, int group, float scale) {
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
    const uint32_t k_tile = base, q_tile = base + 2 * kTileBytes, v_tile = base + 4 * kTileBytes, t_tile = base + 5 * kTileBytes, p_tile = base + 6 * kTileBytes;
    const uint32_t stage = base + 7 * kTileBytes, decay_tile = base + 8 * kTileBytes;
    const unsigned char *staged = memory + 7 * kTileBytes;
    const float *d = reinterpret_cast<const float *>(memory + 8 * kTileBytes), *e = d + kChunk;
    const int h = blockIdx.x / kSplits, first = blockIdx.x % kSplits * kValues, hq = h / group;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int row = lane % 8 + lane / 16 * 8, half = lane / 8 % 2, pair = lane % 4 * 2;
    const int64_t corner = int64_t(h) * kDim * kDim + first + 16 * warp + lane / 4;

    float s[16][4];
#pragma unroll
    for (int t = 0; t < 16; ++t) {
#pragma unroll
        for (int x = 0; x < 4; ++x) s[t][x] = state0 ? state0[corner + (8 * t + pair + x % 2) * kDim + x / 2 * 8] : 0.f;
    }

    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int t0 = chunk * kChunk, count = min(kChunk, tokens - t0);
        const int64_t block = int64_t(h) * chunks + chunk;
        fetch<16>(k_tile, k.at(t0, hq), k.token, count);
        fetch<16>(q_tile, q.at(t0, hq), q.token, count);
        fetch<8>(v_tile, v.at(t0, h) + first, v.token, count);
        fetch<8>(t_tile, products + block * kProducts, kChunk, kChunk);
        fetch<8>(p_tile, products + block * kProducts + kChunk * kChunk, kChunk, kChunk);
        if (thread < kDecays / 4) cp_async16(decay_tile + thread * 16, decays + block * kDecays + thread * 4, 16);

        uint32_t a[32];
#pragma unroll
        for (int t = 0; t < 16; ++t) {
            a[2 * t] = pack(s[t][0], s[t][1]);
            a[2 * t + 1] = pack(s[t][2], s[t][3]);
        }
        cp_async_wait();
        __syncthreads();

        // What the old state says to the keys and to the queries.
        float x[8][4] = {}, out[8][4] = {};
        mul_nt<4, 8>(x, a, k_tile, lane);
        mul_nt<4, 8>(out, a, q_tile, lane);

        uint32_t y[16];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            uint32_t value[4];
            ldmatrix_trans(value, piece(v_tile, 16 * n + row, warp, half));
            const float2 d0 = *reinterpret_cast<const float2 *>(d + 16 * n + pair), d1 = *reinterpret_cast<const float2 *>(d + 16 * n + 8 + pair);
            y[4 * n] = pack(low_of(value[0]) - d0.x * x[2 * n][0], high_of(value[0]) - d0.y * x[2 * n][1]);
            y[4 * n + 1] = pack(low_of(value[1]) - d0.x * x[2 * n][2], high_of(value[1]) - d0.y * x[2 * n][3]);
            y[4 * n + 2] = pack(low_of(value[2]) - d1.x * x[2 * n + 1][0], high_of(value[2]) - d1.y * x[2 * n + 1][1]);
            y[4 * n + 3] = pack(low_of(value[3]) - d1.x * x[2 * n + 1][2], high_of(value[3]) - d1.y * x[2 * n + 1][3]);
        }

        float update[8][4] = {};
        mul_nt<4, 4>(update, y, t_tile, lane);

        uint32_t u[16], w[16];
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            const float2 dt = *reinterpret_cast<const float2 *>(d + 8 * t + pair), et = *reinterpret_cast<const float2 *>(e + 8 * t + pair);
            u[2 * t] = pack(update[t][0], update[t][1]);
            u[2 * t + 1] = pack(update[t][2], update[t][3]);
            w[2 * t] = pack(update[t][0] * et.x, update[t][1] * et.y);
            w[2 * t + 1] = pack(update[t][2] * et.x, update[t][3] * et.y);
            out[t][0] *= scale * dt.x, out[t][1] *= scale * dt.y;
            out[t][2] *= scale * dt.x, out[t][3] *= scale * dt.y;
        }
        const float last = d[kChunk - 1];
#pragma unroll
        for (int t = 0; t < 16; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[t][i] *= last;
        }
        mul_nn<8, 4>(s, w, k_tile, lane);
        mul_nt<4, 4>(out, u, p_tile, lane);

#pragma unroll
        for (int n = 0; n < 4; ++n)
            stmatrix_trans(piece(stage, 16 * n + row, warp, half), pack(out[2 * n][0], out[2 * n][1]), pack(out[2 * n][2], out[2 * n][3]),
                           pack(out[2 * n + 1][0], out[2 * n + 1][1]), pack(out[2 * n + 1][2], out[2 * n + 1][3]));
        __syncthreads();  // the outputs are staged, and the tiles are free
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = thread / 8 + 16 * i, column = thread % 8;
            if (r < count)
                *reinterpret_cast<uint4 *>(o.at(t0 + r, h) + first + column * 8) = *reinterpret_cast<const uint4 *>(staged + r * 128 + ((column ^ (r & 7)) << 4));
        }
    }
#pragma unroll
    for (int t = 0; t < 16; ++t) {
#pragma unroll
        for (int x = 0; x < 4; ++x) state[corner + (8 * t + pair + x % 2) * kDim + x / 2 * 8] = s[t][x];
    }
}

struct Scratch {
    void *data = nullptr;
    size_t bytes = 0;
};

// Memory between the two kernels, one per device and stream, kept from call to call; nullptr when there is none.
void *scratch_of(cudaStream_t stream, size_t bytes) {
    static std::mutex mutex;
    static std::map<std::pair<int, cudaStream_t>, Scratch> all;
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
    std::lock_guard<std::mutex> lock(mutex);
    Scratch &mine = all[std::make_pair(device, stream)];
    if (mine.bytes < bytes) {
        if (mine.data) {
            cudaStreamSynchronize(stream);
            cudaFree(mine.data);
            mine = Scratch();
        }
        if (cudaFuncSetAttribute(prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, kPrepareBytes) != cudaSuccess) return nullptr;
        if (cudaFuncSetAttribute(chain, cudaFuncAttributeMaxDynamicSharedMemorySize, kChainBytes) != cudaSuccess) return nullptr;
        void *data = nullptr;
        if (cudaMalloc(&data, bytes) != cudaSuccess) {
            cudaGetLastError();
            return nullptr;
        }
        mine.data = data;
        mine.bytes = bytes;
    }
    return mine.data;
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if ((call->num_inputs != 5 && call->num_inputs != 6) || call->num_outputs != 2) return "gdn reads q, k, v, g, beta [, state0] and writes o and state";
    const klineage_tensor *in = call->inputs, &v = in[2], &o = call->outputs[0], &state = call->outputs[1];
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &o}) {
        if (t->dtype != KLINEAGE_BFLOAT16 || t->num_dims != 3 || t->shape[2] != kDim || t->shape[0] != v.shape[0] || t->stride[2] != 1)
            return "gdn: q, k, v and o must be bf16 [T,H,128] with contiguous rows";
        if (reinterpret_cast<uintptr_t>(t->data) % 16 != 0 || t->stride[0] % 8 != 0 || t->stride[1] % 8 != 0) return "gdn: rows of q, k, v and o must be aligned to 16 bytes";
    }
    for (const klineage_tensor *t : {&in[3], &in[4]})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 2 || t->shape[0] != v.shape[0] || t->shape[1] != v.shape[1]) return "gdn: g and beta must be fp32 [T,HV]";
    for (const klineage_tensor *t : {&state, call->num_inputs == 6 ? &in[5] : &state})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 3 || t->shape[0] != v.shape[1] || t->shape[1] != kDim || t->shape[2] != kDim || t->stride[2] != 1 ||
            t->stride[1] != kDim || t->stride[0] != kDim * kDim)
            return "gdn: state0 and state must be contiguous fp32 [HV,128,128]";
    if (in[0].shape[1] < 1 || in[1].shape[1] != in[0].shape[1] || v.shape[1] % in[0].shape[1] || o.shape[1] != v.shape[1]) return "gdn: HV must be a multiple of HQK";
    if (v.shape[0] > int64_t(65535) * kChunk) return "gdn: too many tokens";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor *in = call->inputs, *out = call->outputs;
    const int tokens = int(in[2].shape[0]), heads = int(in[2].shape[1]), group = heads / int(in[0].shape[1]);
    const int chunks = (tokens + kChunk - 1) / kChunk;
    const float scale = float(klineage_scalar_value(call, "scale", 0.08838834764831845));
    const cudaStream_t stream = static_cast<cudaStream_t>(call->stream);
    const size_t blocks = size_t(heads) * size_t(chunks > 0 ? chunks : 1);
    const size_t product_bytes = blocks * kProducts * sizeof(Bf16), decay_bytes = blocks * kDecays * sizeof(float);
    void *scratch = scratch_of(stream, product_bytes + decay_bytes);
    KLINEAGE_REQUIRE(call, scratch != nullptr, "gdn: no scratch memory");
    Bf16 *products = static_cast<Bf16 *>(scratch);
    float *decays = reinterpret_cast<float *>(static_cast<unsigned char *>(scratch) + product_bytes);
    if (chunks > 0)
        prepare<<<dim3(heads, chunks), kThreads, kPrepareBytes, stream>>>(View<const Bf16>(in[0]), View<const Bf16>(in[1]), View<const float>(in[3]), View<const float>(in[4]),
                                                                          products, decays, tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: the launch of prepare failed");
    chain<<<heads * kSplits, kThreads, kChainBytes, stream>>>(View<const Bf16>(in[0]), View<const Bf16>(in[1]), View<const Bf16>(in[2]), products, decays,
                                                              call->num_inputs == 6 ? static_cast<const float *>(in[5].data) : nullptr, View<Bf16>(out[0]),
                                                              static_cast<float *>(out[1].data), tokens, chunks, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: the launch of chain failed");
    return 0;
}
