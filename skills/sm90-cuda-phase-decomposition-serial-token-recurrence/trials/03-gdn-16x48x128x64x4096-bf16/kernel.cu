#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

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
constexpr int kValues = 64;                     // value columns per CTA of chain, 16 per warp
constexpr int kTileBytes = kChunk * 128;        // 64 rows of 64 bf16
constexpr int kRowElements = 2 * kChunk;        // a row of scratch: T row | P row
constexpr int kVecElements = 2 * kChunk;        // d | e

// Shared memory of prepare.
constexpr int kLowerPitch = kChunk + 4;         // floats
constexpr int kStagePitch = kRowElements + 8;   // bf16
constexpr int kPrepareKeys = 0, kPrepareQueries = 2 * kTileBytes, kPrepareLower = 4 * kTileBytes;
constexpr int kPrepareSums = kPrepareLower + kChunk * kLowerPitch * 4, kPrepareBetas = kPrepareSums + kChunk * 4;
constexpr int kPrepareBytes = kPrepareBetas + kChunk * 4;
static_assert(kChunk * kStagePitch * 2 <= 4 * kTileBytes, "the staging of prepare lies over its tiles");

// Shared memory of chain.
constexpr int kChainKeys = 0, kChainQueries = 2 * kTileBytes, kChainValues = 4 * kTileBytes;
constexpr int kChainSolved = 5 * kTileBytes, kChainWeights = 6 * kTileBytes, kChainStage = 7 * kTileBytes, kChainVec = 8 * kTileBytes;
constexpr int kChainBytes = kChainVec + kVecElements * 4;

__device__ __forceinline__ uint32_t tile_address(uint32_t tile, int row, int ch) {
    return tile + (ch / 8) * kTileBytes + row * 128 + ((ch % 8) ^ (row % 8)) * 16;
}

__device__ __forceinline__ void copy16(uint32_t to, const void *from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void load_matrices_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void store_matrices_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

__device__ __forceinline__ void mma(float *acc, const uint32_t *a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float low_of(uint32_t r) { return __uint_as_float(r << 16); }
__device__ __forceinline__ float high_of(uint32_t r) { return __uint_as_float(r & 0xffff0000u); }

// acc[16][16 kPairs] += a[16][16 kSteps] B^T, B[n][k] in the tile
template <int kSteps, int kPairs>
__device__ __forceinline__ void mul_nt(float *acc, const uint32_t *a, uint32_t tile, int lane) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
            uint32_t b[4];
            load_matrices(b, tile_address(tile, 16 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
            mma(acc + 8 * n, a + 4 * k, b[0], b[1]);
            mma(acc + 8 * n + 4, a + 4 * k, b[2], b[3]);
        }
    }
}

// acc[16][16 kPairs] += a[16][16 kSteps] B, B[k][n] in the tile
template <int kSteps, int kPairs>
__device__ __forceinline__ void mul_nn(float *acc, const uint32_t *a, uint32_t tile, int lane) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
            uint32_t b[4];
            load_matrices_trans(b, tile_address(tile, 16 * k + lane % 16, 2 * n + lane / 16));
            mma(acc + 8 * n, a + 4 * k, b[0], b[1]);
            mma(acc + 8 * n + 4, a + 4 * k, b[2], b[3]);
        }
    }
}

// What does not depend on the state, for one head and one chunk: T = (I+L)^-1 diag(beta), P and the decays.
__global__ void __launch_bounds__(kThreads, 4) prepare(View<const Bf16> q, View<const Bf16> k, View<const float> g, View<const float> beta, Bf16 *scratch, float *vec,
                                                       int tokens, int group, float scale) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
    const uint32_t keys = base + kPrepareKeys, queries = base + kPrepareQueries;
    float *lower = reinterpret_cast<float *>(smem + kPrepareLower);
    float *sums = reinterpret_cast<float *>(smem + kPrepareSums), *betas = reinterpret_cast<float *>(smem + kPrepareBetas);
    Bf16 *stage = reinterpret_cast<Bf16 *>(smem);  // over the tiles, once these have been read
    const int h = blockIdx.x, chunk = blockIdx.y, t0 = chunk * kChunk, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int64_t block = int64_t(chunk) * gridDim.x + h;

#pragma unroll
    for (int i = 0; i < kChunk * 16 / kThreads; ++i) {
        const int index = i * kThreads + tid, row = index / 16, ch = index % 16;
        const bool inside = t0 + row < tokens;
        const int t = inside ? t0 + row : 0;
        copy16(tile_address(keys, row, ch), k.at(t, h / group) + 8 * ch, inside);
        copy16(tile_address(queries, row, ch), q.at(t, h / group) + 8 * ch, inside);
    }
    if (warp == 0) {
        float c[2];
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const int i = 32 * part + lane;
            const bool inside = t0 + i < tokens;
            c[part] = inside ? *g.at(t0 + i, h) : 0.f;
            betas[i] = inside ? *beta.at(t0 + i, h) : 0.f;
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
                const float other = __shfl_up_sync(~0u, c[part], offset);
                if (lane >= offset) c[part] += other;
            }
        }
        c[1] += __shfl_sync(~0u, c[0], 31);
        const float last = __shfl_sync(~0u, c[1], 31);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const int i = 32 * part + lane;
            sums[i] = c[part];
            vec[block * kVecElements + i] = expf(c[part]);
            vec[block * kVecElements + kChunk + i] = expf(last - c[part]);
        }
    }
    copy_wait();
    __syncthreads();

    // A warp owns 16 rows of K K^T and of Q K^T.
    float kk[32] = {}, qk[32] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
        uint32_t ak[4], aq[4];
        load_matrices(ak, tile_address(keys, 16 * warp + lane % 16, 2 * step + lane / 16));
        load_matrices(aq, tile_address(queries, 16 * warp + lane % 16, 2 * step + lane / 16));
#pragma unroll
        for (int n = 0; n < kChunk / 16; ++n) {
            uint32_t b[4];
            load_matrices(b, tile_address(keys, 16 * n + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
            mma(kk + 8 * n, ak, b[0], b[1]);
            mma(kk + 8 * n + 4, ak, b[2], b[3]);
            mma(qk + 8 * n, aq, b[0], b[1]);
            mma(qk + 8 * n + 4, aq, b[2], b[3]);
        }
    }
    uint32_t weights[16];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = 16 * warp + lane / 4 + 8 * half;
        const float ci = sums[i], bi = betas[i];
#pragma unroll
        for (int tile = 0; tile < 8; ++tile) {
            const int j = 8 * tile + lane % 4 * 2;
            float l[2], p[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float decay = j + r <= i ? expf(ci - sums[j + r]) : 0.f;
                l[r] = j + r < i ? bi * kk[4 * tile + 2 * half + r] * decay : 0.f;
                p[r] = j + r <= i ? scale * qk[4 * tile + 2 * half + r] * decay : 0.f;
            }
            *reinterpret_cast<float2 *>(lower + i * kLowerPitch + j) = make_float2(l[0], l[1]);
            weights[2 * tile + half] = pack(p[0], p[1]);
        }
    }
    __syncthreads();  // L is complete, and the tiles are free

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = 16 * warp + lane / 4 + 8 * half;
#pragma unroll
        for (int tile = 0; tile < 8; ++tile)
            *reinterpret_cast<uint32_t *>(stage + i * kStagePitch + kChunk + 8 * tile + lane % 4 * 2) = weights[2 * tile + half];
    }
    if (tid < kChunk) {
        const int j = tid;
        const float bj = betas[j];
        float x[kChunk];  // column j of (I+L)^-1
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            float sum0 = i == j ? 1.f : 0.f, sum1 = 0.f, sum2 = 0.f, sum3 = 0.f;
#pragma unroll
            for (int m = 0; m < kChunk; m += 4) {
                if (m < i) {
                    const float4 l = *reinterpret_cast<const float4 *>(lower + i * kLowerPitch + m);
                    sum0 -= l.x * x[m];
                    if (m + 1 < i) sum1 -= l.y * x[m + 1];
                    if (m + 2 < i) sum2 -= l.z * x[m + 2];
                    if (m + 3 < i) sum3 -= l.w * x[m + 3];
                }
            }
            x[i] = (sum0 + sum1) + (sum2 + sum3);
        }
#pragma unroll
        for (int i = 0; i < kChunk; ++i) stage[i * kStagePitch + j] = __float2bfloat16(x[i] * bj);
    }
    __syncthreads();

    Bf16 *target = scratch + block * (kChunk * kRowElements);
#pragma unroll
    for (int i = 0; i < kChunk * 16 / kThreads; ++i) {
        const int index = i * kThreads + tid, row = index / 16, ch = index % 16;
        *reinterpret_cast<uint4 *>(target + row * kRowElements + 8 * ch) = *reinterpret_cast<const uint4 *>(stage + row * kStagePitch + 8 * ch);
    }
}

// The chunks of one head and 64 value columns one after another; a warp holds S^T of 16 values and all keys.
__global__ void __launch_bounds__(kThreads, 1) chain(View<const Bf16> q, View<const Bf16> k, View<const Bf16> v, const Bf16 *scratch, const float *vec, const float *state0,
                                                     View<Bf16> o, float *state, int tokens, int group, float scale) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
    const uint32_t keys = base + kChainKeys, queries = base + kChainQueries, values = base + kChainValues;
    const uint32_t solved = base + kChainSolved, weights = base + kChainWeights, stage = base + kChainStage;
    const float *d = reinterpret_cast<const float *>(smem + kChainVec), *e = d + kChunk;
    const int h = blockIdx.x, heads = gridDim.x, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int first = blockIdx.y * kValues;  // value column of the CTA
    const int chunks = (tokens + kChunk - 1) / kChunk;
    const int64_t corner = int64_t(h) * kDim * kDim + first + 16 * warp + lane / 4;

    float s[64];  // 4 tile + r: key 8 tile + lane % 4 * 2 + r % 2, value lane / 4 + r / 2 * 8
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = state0 ? state0[corner + (i / 4 * 8 + lane % 4 * 2 + i % 2) * kDim + i % 4 / 2 * 8] : 0.f;

    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int t0 = chunk * kChunk;
        const int64_t block = int64_t(chunk) * heads + h;
        const Bf16 *source = scratch + block * (kChunk * kRowElements);
#pragma unroll
        for (int i = 0; i < kChunk * 16 / kThreads; ++i) {
            const int index = i * kThreads + tid, row = index / 16, ch = index % 16;
            const bool inside = t0 + row < tokens;
            const int t = inside ? t0 + row : 0;
            copy16(tile_address(keys, row, ch), k.at(t, h / group) + 8 * ch, inside);
            copy16(tile_address(queries, row, ch), q.at(t, h / group) + 8 * ch, inside);
            copy16(tile_address(solved, row, ch), source + row * kRowElements + 8 * ch, true);  // T, and P in the tile after it
        }
#pragma unroll
        for (int i = 0; i < kChunk * 8 / kThreads; ++i) {
            const int index = i * kThreads + tid, row = index / 8, ch = index % 8;
            const bool inside = t0 + row < tokens;
            const int t = inside ? t0 + row : 0;
            copy16(tile_address(values, row, ch), v.at(t, h) + first + 8 * ch, inside);
        }
        if (tid < kVecElements / 4) copy16(base + kChainVec + 16 * tid, vec + block * kVecElements + 4 * tid, true);

        uint32_t a[32];  // the old state as A fragments
#pragma unroll
        for (int m = 0; m < 32; ++m) a[m] = pack(s[2 * m], s[2 * m + 1]);
        copy_wait();
        __syncthreads();

        float x[32] = {}, out[32] = {};
        mul_nt<kDim / 16, kChunk / 16>(x, a, keys, lane);
        mul_nt<kDim / 16, kChunk / 16>(out, a, queries, lane);

        uint32_t y[16];  // V^T - d S^T K^T
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            uint32_t r[4];
            load_matrices_trans(r, tile_address(values, 16 * n + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 dd = *reinterpret_cast<const float2 *>(d + 8 * (2 * n + i / 2) + lane % 4 * 2);
                y[4 * n + i] = pack(low_of(r[i]) - dd.x * x[8 * n + 2 * i], high_of(r[i]) - dd.y * x[8 * n + 2 * i + 1]);
            }
        }

        float update[32] = {};
        mul_nt<kChunk / 16, kChunk / 16>(update, y, solved, lane);

        uint32_t u[16], w[16];
#pragma unroll
        for (int m = 0; m < 16; ++m) {
            const int col = 8 * (m / 2) + lane % 4 * 2;
            const float2 dd = *reinterpret_cast<const float2 *>(d + col), ee = *reinterpret_cast<const float2 *>(e + col);
            u[m] = pack(update[2 * m], update[2 * m + 1]);
            w[m] = pack(update[2 * m] * ee.x, update[2 * m + 1] * ee.y);
            out[2 * m] *= scale * dd.x;
            out[2 * m + 1] *= scale * dd.y;
        }
        const float decay = d[kChunk - 1];
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] *= decay;

        mul_nn<kChunk / 16, kDim / 16>(s, w, keys, lane);
        mul_nt<kChunk / 16, kChunk / 16>(out, u, weights, lane);

#pragma unroll
        for (int n = 0; n < 4; ++n)
            store_matrices_trans(tile_address(stage, 16 * n + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2), pack(out[8 * n], out[8 * n + 1]),
                                 pack(out[8 * n + 2], out[8 * n + 3]), pack(out[8 * n + 4], out[8 * n + 5]), pack(out[8 * n + 6], out[8 * n + 7]));
        __syncthreads();  // the output is staged, and the tiles are free
#pragma unroll
        for (int i = 0; i < kChunk * 8 / kThreads; ++i) {
            const int index = i * kThreads + tid, row = index / 8, ch = index % 8;
            if (t0 + row < tokens)
                *reinterpret_cast<uint4 *>(o.at(t0 + row, h) + first + 8 * ch) = *reinterpret_cast<const uint4 *>(smem + tile_address(kChainStage, row, ch));
        }
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) state[corner + (i / 4 * 8 + lane % 4 * 2 + i % 2) * kDim + i % 4 / 2 * 8] = s[i];
}

// Scratch memory of a stream, kept from call to call (its contents are not); nullptr when there is none.
struct Scratch {
    int device;
    cudaStream_t stream;
    void *data;
    size_t bytes;
};

void *scratch_of(cudaStream_t stream, size_t bytes) {
    static std::mutex mutex;
    static std::vector<Scratch> kept;
    std::lock_guard<std::mutex> guard(mutex);
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
    Scratch *mine = nullptr;
    for (Scratch &s : kept)
        if (s.device == device && s.stream == stream) mine = &s;
    if (!mine) {
        kept.push_back(Scratch{device, stream, nullptr, 0});
        mine = &kept.back();
    }
    if (mine->bytes < bytes) {
        if (mine->data) cudaFree(mine->data);
        mine->data = nullptr, mine->bytes = 0;
        if (cudaMalloc(&mine->data, bytes) != cudaSuccess) {
            mine->data = nullptr;
            return nullptr;
        }
        mine->bytes = bytes;
    }
    return mine->data;
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if ((call->num_inputs != 5 && call->num_inputs != 6) || call->num_outputs != 2) return "gdn reads q, k, v, g, beta [, state0] and writes o and state";
    const klineage_tensor *in = call->inputs, &v = in[2], &o = call->outputs[0], &state = call->outputs[1];
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &o}) {
        if (t->dtype != KLINEAGE_BFLOAT16 || t->num_dims != 3 || t->shape[2] != kDim || t->shape[0] != v.shape[0] || t->stride[2] != 1)
            return "gdn: q, k, v and o must be bf16 [T,H,128] with contiguous rows";
        if (t->stride[0] % 8 || t->stride[1] % 8 || reinterpret_cast<uintptr_t>(t->data) % 16) return "gdn: the rows of q, k, v and o must be aligned to 16 bytes";
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

    const size_t blocks = size_t(chunks) * size_t(heads), matrix_bytes = blocks * kChunk * kRowElements * sizeof(Bf16);
    unsigned char *memory = nullptr;
    if (blocks) {
        memory = static_cast<unsigned char *>(scratch_of(stream, matrix_bytes + blocks * kVecElements * sizeof(float)));
        KLINEAGE_REQUIRE(call, memory != nullptr, "gdn: no scratch memory");
    }
    Bf16 *scratch = reinterpret_cast<Bf16 *>(memory);
    float *vec = memory ? reinterpret_cast<float *>(memory + matrix_bytes) : nullptr;

    KLINEAGE_REQUIRE(call,
                     cudaFuncSetAttribute(prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, kPrepareBytes) == cudaSuccess &&
                         cudaFuncSetAttribute(chain, cudaFuncAttributeMaxDynamicSharedMemorySize, kChainBytes) == cudaSuccess,
                     "gdn: too little shared memory");
    if (blocks) {
        prepare<<<dim3(heads, chunks), kThreads, kPrepareBytes, stream>>>(View<const Bf16>(in[0]), View<const Bf16>(in[1]), View<const float>(in[3]),
                                                                          View<const float>(in[4]), scratch, vec, tokens, group, scale);
        KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: the launch of prepare failed");
    }
    chain<<<dim3(heads, kDim / kValues), kThreads, kChainBytes, stream>>>(
        View<const Bf16>(in[0]), View<const Bf16>(in[1]), View<const Bf16>(in[2]), scratch, vec,
        call->num_inputs == 6 ? static_cast<const float *>(in[5].data) : nullptr, View<Bf16>(out[0]), static_cast<float *>(out[1].data), tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: the launch of chain failed");
    return 0;
}
