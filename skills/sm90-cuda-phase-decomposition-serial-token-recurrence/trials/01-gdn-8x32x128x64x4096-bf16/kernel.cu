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

constexpr int kChunk = 64;                  // tokens
constexpr int kThreads = 128;
constexpr int kValues = 64;                 // value columns of a CTA of chain, 16 for each warp
constexpr int kTileBytes = kChunk * 128;    // 64 rows of 64 bf16
constexpr int kPitch = kChunk + 4;          // of L: rows stay aligned to 16 bytes
constexpr int kBlock = kChunk * 2 * kChunk; // elements of T | P of a chunk and head
constexpr int kChainBytes = 8 * kTileBytes + 2 * kChunk * int(sizeof(float));

static_assert(kValues == 64 && kThreads == 2 * kValues, "one tile of values, 16 for each warp");

// 16-byte piece `ch` of a row; swizzled, 64 bf16 columns per tile.
__device__ __forceinline__ uint32_t address(uint32_t tile, uint32_t row, uint32_t ch) {
    return tile + ch / 8 * kTileBytes + row * 128 + ((ch % 8) ^ (row % 8)) * 16;
}

__device__ __forceinline__ void copy16(uint32_t to, const void *from, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

// kPieces 16-byte pieces of each of the kChunk rows; rows from count on become zero.
template <int kPieces>
__device__ __forceinline__ void load_rows(uint32_t tile, const Bf16 *from, int64_t stride, int count) {
#pragma unroll
    for (int n = 0; n < kChunk * kPieces / kThreads; ++n) {
        const int index = int(threadIdx.x) + n * kThreads, row = index / kPieces, ch = index % kPieces;
        const bool valid = row < count;
        copy16(address(tile, uint32_t(row), uint32_t(ch)), from + (valid ? row * stride : int64_t(0)) + 8 * ch, valid);
    }
}

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}

__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}

__device__ __forceinline__ void stmatrix_trans(uint32_t to, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

__device__ __forceinline__ void mma(float *acc, const uint32_t *a, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float2 unpack(uint32_t x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }

// acc[16][8 kTiles] += A B^T with B[n][k] in rows of k.
template <int kSteps, int kTiles>
__device__ __forceinline__ void mul_nt(float (&acc)[4 * kTiles], const uint32_t (&a)[4 * kSteps], uint32_t tile, uint32_t lane) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
            uint32_t b[4];
            ldmatrix(b, address(tile, 16 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
            mma(acc + 8 * n, a + 4 * k, b[0], b[1]);
            mma(acc + 8 * n + 4, a + 4 * k, b[2], b[3]);
        }
    }
}

// acc[16][8 kTiles] += A B with B[k][n] in rows of n.
template <int kSteps, int kTiles>
__device__ __forceinline__ void mul_nn(float (&acc)[4 * kTiles], const uint32_t (&a)[4 * kSteps], uint32_t tile, uint32_t lane) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
            uint32_t b[4];
            ldmatrix_trans(b, address(tile, 16 * k + lane % 16, 2 * n + lane / 16));
            mma(acc + 8 * n, a + 4 * k, b[0], b[1]);
            mma(acc + 8 * n + 4, a + 4 * k, b[2], b[3]);
        }
    }
}

// Rows kRow and on of one column of (I + L)^-1.
template <int kRow>
__device__ __forceinline__ void solve(const float *lower, float (&x)[kChunk], int column) {
    float sum[4] = {column == kRow ? 1.f : 0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int m = 0; m < kRow; m += 4) {
        const float4 l = *reinterpret_cast<const float4 *>(lower + kRow * kPitch + m);
        sum[0] = fmaf(-l.x, x[m], sum[0]);
        if (m + 1 < kRow) sum[1] = fmaf(-l.y, x[m + 1], sum[1]);
        if (m + 2 < kRow) sum[2] = fmaf(-l.z, x[m + 2], sum[2]);
        if (m + 3 < kRow) sum[3] = fmaf(-l.w, x[m + 3], sum[3]);
    }
    x[kRow] = sum[0] + sum[1] + (sum[2] + sum[3]);
    if constexpr (kRow + 1 < kChunk) solve<kRow + 1>(lower, x, column);
}

// Of each chunk and head: T = (I + L)^-1 diag(beta), P = the masked and decayed scale Q K^T, d = exp(c) and e = exp(c[last] - c).
__global__ void __launch_bounds__(kThreads) prepare(View<const Bf16> q, View<const Bf16> k, View<const float> g, View<const float> beta, Bf16 *solved, float *decays,
                                                    int tokens, int group, float scale) {
    __shared__ __align__(128) unsigned char tiles[4 * kTileBytes];  // K and Q, then L
    __shared__ float sums[kChunk], betas[kChunk];
    const int h = blockIdx.x, chunk = blockIdx.y, hq = h / group, thread = threadIdx.x, warp = thread / 32;
    const uint32_t lane = threadIdx.x % 32;
    const int t0 = chunk * kChunk, count = min(kChunk, tokens - t0);
    const int64_t block = int64_t(chunk) * gridDim.x + h;
    Bf16 *to = solved + block * kBlock;
    const uint32_t keys = uint32_t(__cvta_generic_to_shared(tiles)), queries = keys + 2 * kTileBytes;

    load_rows<kDim / 8>(keys, k.at(t0, hq), k.token, count);
    load_rows<kDim / 8>(queries, q.at(t0, hq), q.token, count);

    if (warp == 0) {
        const int t = 2 * int(lane);
        float g0 = 0.f, g1 = 0.f, beta0 = 0.f, beta1 = 0.f;
        if (t < count) g0 = *g.at(t0 + t, h), beta0 = *beta.at(t0 + t, h);
        if (t + 1 < count) g1 = *g.at(t0 + t + 1, h), beta1 = *beta.at(t0 + t + 1, h);
        float total = g0 + g1;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(0xffffffffu, total, step);
            if (int(lane) >= step) total += other;
        }
        float before = __shfl_up_sync(0xffffffffu, total, 1);
        if (lane == 0) before = 0.f;
        const float last = __shfl_sync(0xffffffffu, total, 31);
        const float c0 = before + g0, c1 = total;
        sums[t] = c0, sums[t + 1] = c1;
        betas[t] = beta0, betas[t + 1] = beta1;
        float *decay = decays + block * (2 * kChunk);
        *reinterpret_cast<float2 *>(decay + t) = make_float2(expf(c0), expf(c1));
        *reinterpret_cast<float2 *>(decay + kChunk + t) = make_float2(expf(last - c0), expf(last - c1));
    }
    copies_wait();
    __syncthreads();

    // A warp owns 16 rows.
    float kk[32], qk[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) kk[i] = qk[i] = 0.f;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
        uint32_t a_k[4], a_q[4];
        ldmatrix(a_k, address(keys, 16 * warp + lane % 16, 2 * step + lane / 16));
        ldmatrix(a_q, address(queries, 16 * warp + lane % 16, 2 * step + lane / 16));
#pragma unroll
        for (int n = 0; n < kChunk / 16; ++n) {
            uint32_t b[4];
            ldmatrix(b, address(keys, 16 * n + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
            mma(kk + 8 * n, a_k, b[0], b[1]);
            mma(kk + 8 * n + 4, a_k, b[2], b[3]);
            mma(qk + 8 * n, a_q, b[0], b[1]);
            mma(qk + 8 * n + 4, a_q, b[2], b[3]);
        }
    }

#pragma unroll
    for (int m = 0; m < 16; ++m) {
        const int i = 16 * warp + int(lane / 4) + 8 * (m % 2);
        const int j = 8 * (m / 2) + 2 * int(lane % 4);
        float p[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float decay = j + c <= i ? expf(sums[i] - sums[j + c]) : 0.f;
            p[c] = j + c <= i ? scale * qk[2 * m + c] * decay : 0.f;
            kk[2 * m + c] = j + c < i ? betas[i] * kk[2 * m + c] * decay : 0.f;
        }
        *reinterpret_cast<uint32_t *>(to + i * (2 * kChunk) + kChunk + j) = pack(p[0], p[1]);
    }
    __syncthreads();  // the tiles have been read: L takes their place
    float *lower = reinterpret_cast<float *>(tiles);
#pragma unroll
    for (int m = 0; m < 16; ++m) {
        const int i = 16 * warp + int(lane / 4) + 8 * (m % 2);
        const int j = 8 * (m / 2) + 2 * int(lane % 4);
        *reinterpret_cast<float2 *>(lower + i * kPitch + j) = make_float2(kk[2 * m], kk[2 * m + 1]);
    }
    __syncthreads();

    if (thread < kChunk) {
        float x[kChunk];
        solve<0>(lower, x, thread);
        const float b = betas[thread];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) to[i * (2 * kChunk) + thread] = __float2bfloat16(x[i] * b);
    }
}

// Carries S^T of a head and kValues of its value columns from chunk to chunk.
__global__ void __launch_bounds__(kThreads) chain(View<const Bf16> q, View<const Bf16> k, View<const Bf16> v, const Bf16 *solved, const float *decays, const float *state0,
                                                  View<Bf16> o, float *state, int tokens, int group, float scale) {
    extern __shared__ __align__(128) unsigned char memory[];
    const int h = blockIdx.x, hq = h / group, first = blockIdx.y * kValues, thread = threadIdx.x, warp = thread / 32;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t keys = uint32_t(__cvta_generic_to_shared(memory)), queries = keys + 2 * kTileBytes, values = keys + 4 * kTileBytes;
    const uint32_t solution = keys + 5 * kTileBytes, products = keys + 6 * kTileBytes, staging = keys + 7 * kTileBytes, decay_at = keys + 8 * kTileBytes;
    const float *d = reinterpret_cast<const float *>(memory + 8 * kTileBytes), *e = d + kChunk;

    // s[4 n + c]: key 8 n + lane % 4 * 2 + c % 2, value lane / 4 + 8 (c / 2) of the warp.
    const int64_t corner = int64_t(h) * kDim * kDim + int64_t(2 * (lane % 4)) * kDim + first + 16 * warp + int(lane / 4);
    float s[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = state0 ? state0[corner + (8 * (i / 4) + i % 2) * kDim + 8 * (i / 2 % 2)] : 0.f;

    for (int t0 = 0, chunk = 0; t0 < tokens; t0 += kChunk, ++chunk) {
        const int count = min(kChunk, tokens - t0);
        const int64_t block = int64_t(chunk) * gridDim.x + h;
        load_rows<kDim / 8>(keys, k.at(t0, hq), k.token, count);
        load_rows<kDim / 8>(queries, q.at(t0, hq), q.token, count);
        load_rows<kValues / 8>(values, v.at(t0, h) + first, v.token, count);
        load_rows<2 * kChunk / 8>(solution, solved + block * kBlock, 2 * kChunk, kChunk);  // T, and P in the next tile
        if (thread < 2 * kChunk / 4) copy16(decay_at + 16 * thread, decays + block * (2 * kChunk) + 4 * thread, true);

        uint32_t a[32];
#pragma unroll
        for (int m = 0; m < 32; ++m) a[m] = pack(s[2 * m], s[2 * m + 1]);
        float x[32], out[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] = out[i] = 0.f;
        copies_wait();
        __syncthreads();

        // Reads of the state before the chunk.
        mul_nt<8, 8>(x, a, keys, lane);
        mul_nt<8, 8>(out, a, queries, lane);

        uint32_t y[16];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            uint32_t r[4];
            ldmatrix_trans(r, address(values, 16 * n + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int m = 4 * n + i;
                const float2 decay = *reinterpret_cast<const float2 *>(d + 8 * (m / 2) + 2 * (lane % 4));
                const float2 value = unpack(r[i]);
                y[m] = pack(value.x - decay.x * x[2 * m], value.y - decay.y * x[2 * m + 1]);
                out[2 * m] *= scale * decay.x;
                out[2 * m + 1] *= scale * decay.y;
            }
        }

        // The updates u of the chunk.
        float update[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) update[i] = 0.f;
        mul_nt<4, 8>(update, y, solution, lane);
        uint32_t u[16], w[16];
#pragma unroll
        for (int m = 0; m < 16; ++m) {
            const float2 rest = *reinterpret_cast<const float2 *>(e + 8 * (m / 2) + 2 * (lane % 4));
            u[m] = pack(update[2 * m], update[2 * m + 1]);
            w[m] = pack(update[2 * m] * rest.x, update[2 * m + 1] * rest.y);
        }

        const float whole = d[kChunk - 1];
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] *= whole;
        mul_nn<4, 16>(s, w, keys, lane);
        mul_nt<4, 8>(out, u, products, lane);

#pragma unroll
        for (int n = 0; n < 4; ++n) {
            stmatrix_trans(address(staging, 16 * n + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2), pack(out[8 * n], out[8 * n + 1]), pack(out[8 * n + 2], out[8 * n + 3]),
                           pack(out[8 * n + 4], out[8 * n + 5]), pack(out[8 * n + 6], out[8 * n + 7]));
        }
        __syncthreads();  // the tiles may be filled again, and the staged outputs are complete
#pragma unroll
        for (int n = 0; n < kChunk * (kValues / 8) / kThreads; ++n) {
            const int index = thread + n * kThreads, row = index / (kValues / 8), ch = index % (kValues / 8);
            if (row < count)
                *reinterpret_cast<uint4 *>(o.at(t0 + row, h) + first + 8 * ch) =
                    *reinterpret_cast<const uint4 *>(memory + (address(staging, uint32_t(row), uint32_t(ch)) - keys));
        }
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) state[corner + (8 * (i / 4) + i % 2) * kDim + 8 * (i / 2 % 2)] = s[i];
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if ((call->num_inputs != 5 && call->num_inputs != 6) || call->num_outputs != 2) return "gdn reads q, k, v, g, beta [, state0] and writes o and state";
    const klineage_tensor *in = call->inputs, &v = in[2], &o = call->outputs[0], &state = call->outputs[1];
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &o})
        if (t->dtype != KLINEAGE_BFLOAT16 || t->num_dims != 3 || t->shape[2] != kDim || t->shape[0] != v.shape[0] || t->stride[2] != 1)
            return "gdn: q, k, v and o must be bf16 [T,H,128] with contiguous rows";
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &o})
        if (reinterpret_cast<uintptr_t>(t->data) % 16 != 0 || t->stride[0] % 8 != 0 || t->stride[1] % 8 != 0) return "gdn: rows of q, k, v and o must be aligned to 16 bytes";
    for (const klineage_tensor *t : {&in[3], &in[4]})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 2 || t->shape[0] != v.shape[0] || t->shape[1] != v.shape[1]) return "gdn: g and beta must be fp32 [T,HV]";
    for (const klineage_tensor *t : {&state, call->num_inputs == 6 ? &in[5] : &state})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 3 || t->shape[0] != v.shape[1] || t->shape[1] != kDim || t->shape[2] != kDim || t->stride[2] != 1 ||
            t->stride[1] != kDim || t->stride[0] != kDim * kDim)
            return "gdn: state0 and state must be contiguous fp32 [HV,128,128]";
    if (in[0].shape[1] < 1 || in[1].shape[1] != in[0].shape[1] || v.shape[1] % in[0].shape[1] || o.shape[1] != v.shape[1]) return "gdn: HV must be a multiple of HQK";
    if ((v.shape[0] + kChunk - 1) / kChunk > 65535) return "gdn: too many tokens";
    return nullptr;
}

struct Scratch {
    void *data;
    size_t bytes;
};

// Memory that outlives both kernels, one piece for each device and stream; nullptr when there is none.
void *scratch(cudaStream_t stream, size_t bytes) {
    static std::mutex mutex;
    static std::map<std::pair<int, cudaStream_t>, Scratch> kept;
    std::lock_guard<std::mutex> lock(mutex);
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
    Scratch &mine = kept[std::make_pair(device, stream)];  // zero when it is new
    if (mine.bytes < bytes) {
        if (mine.data) cudaFree(mine.data);  // waits for the kernels that use it
        mine.data = nullptr;
        mine.bytes = 0;
        if (cudaMalloc(&mine.data, bytes) != cudaSuccess) {
            mine.data = nullptr;
            return nullptr;
        }
        mine.bytes = bytes;
    }
    return mine.data;
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

    const size_t blocks = size_t(chunks) * size_t(heads), solved_bytes = blocks * kBlock * sizeof(Bf16), decay_bytes = blocks * 2 * kChunk * sizeof(float);
    unsigned char *memory = nullptr;
    if (blocks > 0) {
        memory = static_cast<unsigned char *>(scratch(stream, solved_bytes + decay_bytes));
        KLINEAGE_REQUIRE(call, memory != nullptr, "gdn: no scratch memory");
    }
    Bf16 *solved = reinterpret_cast<Bf16 *>(memory);
    float *decays = memory ? reinterpret_cast<float *>(memory + solved_bytes) : nullptr;

    KLINEAGE_REQUIRE(call, cudaFuncSetAttribute(chain, cudaFuncAttributeMaxDynamicSharedMemorySize, kChainBytes) == cudaSuccess, "gdn: too little shared memory");
    if (blocks > 0) {
        prepare<<<dim3(heads, chunks), kThreads, 0, stream>>>(View<const Bf16>(in[0]), View<const Bf16>(in[1]), View<const float>(in[3]), View<const float>(in[4]), solved,
                                                              decays, tokens, group, scale);
        KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: the launch of prepare failed");
    }
    chain<<<dim3(heads, kDim / kValues), kThreads, kChainBytes, stream>>>(
        View<const Bf16>(in[0]), View<const Bf16>(in[1]), View<const Bf16>(in[2]), solved, decays,
        call->num_inputs == 6 ? static_cast<const float *>(in[5].data) : nullptr, View<Bf16>(out[0]), static_cast<float *>(out[1].data), tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: the launch of chain failed");
    return 0;
}
