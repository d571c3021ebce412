#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128;
constexpr int kRows = 64, kKeys = 64, kThreads = 128;

// One tensor [B,H,S,128] with the strides of the call, in elements.
struct View {
    half *data;
    int64_t batch, head, token;
    __host__ explicit View(const klineage_tensor &t)
        : data(static_cast<half *>(t.data)), batch(t.stride[0]), head(t.stride[1]), token(t.stride[2]) {}
    __device__ half *row(int b, int h, int s) const { return data + b * batch + h * head + s * token; }
};

__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t smem_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// Byte offset of 16-byte chunk `chunk` of a 256-byte row; the XOR puts 8 consecutive rows of one chunk into 8 different bank groups.
__device__ __forceinline__ int offset(int row, int chunk) { return row * 256 + (chunk ^ row % 8) * 16; }

__device__ __forceinline__ uint32_t pack(float lo, float hi) {
    const half2 h = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&h);
}

// A thread's share of two score rows (lane / 4 and lane / 4 + 8): their running maxima (base-2 units) and sums.
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {0.f, 0.f};

    // Raw scores in, probabilities against the raised maximum out; `shrink` is what earlier sums and outputs shrink by.
    template <int kTiles>
    __device__ __forceinline__ void step(float (&score)[kTiles][4], float (&shrink)[2], float scale) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float high = -INFINITY;
#pragma unroll
            for (int j = 0; j < kTiles; ++j) high = fmaxf(high, fmaxf(score[j][2 * i], score[j][2 * i + 1]));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
            const float raised = fmaxf(top[i], high * scale);
            shrink[i] = exp2f(top[i] - raised);
            top[i] = raised;
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                score[j][2 * i] = exp2f(score[j][2 * i] * scale - raised);
                score[j][2 * i + 1] = exp2f(score[j][2 * i + 1] * scale - raised);
                sum += score[j][2 * i] + score[j][2 * i + 1];
            }
            total[i] = total[i] * shrink[i] + sum;
        }
    }

    __device__ __forceinline__ float inverse(int i) const {
        float sum = total[i] + __shfl_xor_sync(~0u, total[i], 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        return 1.f / sum;
    }
};

// 4 warps, each 16 query rows; scores and probabilities never leave registers.
__global__ void __launch_bounds__(kThreads) fmha(View q, View k, View v, View o, int tokens, float scale) {
    __shared__ __align__(128) uint8_t tile_k[kKeys * kDim * 2], tile_v[kKeys * kDim * 2];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, h = blockIdx.y, b = blockIdx.z;
    const int row = blockIdx.x * kRows + warp * 16 + lane / 4;
    uint32_t query[kDim / 16][4];
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int r = row + e % 2 * 8, d = i * 16 + lane % 4 * 2 + e / 2 * 8;
            query[i][e] = r < tokens ? *reinterpret_cast<const uint32_t *>(q.row(b, h, r) + d) : 0u;
        }
    float out[kDim / 8][4] = {};
    Softmax softmax;
    for (int j0 = 0; j0 < tokens; j0 += kKeys) {
        __syncthreads();
        for (int i = tid; i < kKeys * kDim / 8; i += kThreads) {
            const bool there = j0 + i / 16 < tokens;
            *reinterpret_cast<uint4 *>(tile_k + offset(i / 16, i % 16)) = there ? *reinterpret_cast<const uint4 *>(k.row(b, h, j0 + i / 16) + i % 16 * 8) : uint4{};
            *reinterpret_cast<uint4 *>(tile_v + offset(i / 16, i % 16)) = there ? *reinterpret_cast<const uint4 *>(v.row(b, h, j0 + i / 16) + i % 16 * 8) : uint4{};
        }
        __syncthreads();
        float score[kKeys / 8][4] = {};
#pragma unroll
        for (int i = 0; i < kDim / 16; ++i)
#pragma unroll
            for (int j = 0; j < kKeys / 8; j += 2) {
                uint32_t key[4];
                ldmatrix_x4(key, smem_address(tile_k) + offset(j * 8 + lane % 8 + lane / 16 * 8, i * 2 + lane / 8 % 2));
                mma_16816(score[j], query[i], key[0], key[1]);
                mma_16816(score[j + 1], query[i], key[2], key[3]);
            }
        if (j0 + kKeys > tokens)
#pragma unroll
            for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (j0 + j * 8 + lane % 4 * 2 + e % 2 >= tokens) score[j][e] = -INFINITY;
        float shrink[2];
        softmax.step(score, shrink, scale);
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[d][e] *= shrink[e / 2];
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) {
            const uint32_t p[4] = {pack(score[2 * i][0], score[2 * i][1]), pack(score[2 * i][2], score[2 * i][3]),
                                   pack(score[2 * i + 1][0], score[2 * i + 1][1]), pack(score[2 * i + 1][2], score[2 * i + 1][3])};
#pragma unroll
            for (int d = 0; d < kDim / 8; d += 2) {
                uint32_t value[4];
                ldmatrix_x4_trans(value, smem_address(tile_v) + offset(i * 16 + lane % 16, d + lane / 16));
                mma_16816(out[d], p, value[0], value[1]);
                mma_16816(out[d + 1], p, value[2], value[3]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float inverse = softmax.inverse(i);
        if (row + i * 8 >= tokens) continue;
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d) {
            const uint32_t pair = pack(out[d][2 * i] * inverse, out[d][2 * i + 1] * inverse);
            *reinterpret_cast<uint32_t *>(o.row(b, h, row + i * 8) + d * 8 + lane % 4 * 2) = pair;
        }
    }
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if (call->num_inputs != 3 || call->num_outputs != 1) return "fmha reads q, k, v and writes o";
    for (const klineage_tensor *t : {&call->inputs[0], &call->inputs[1], &call->inputs[2], &call->outputs[0]}) {
        if (t->dtype != KLINEAGE_FLOAT16 || t->num_dims != 4 || t->shape[3] != kDim) return "fmha: fp16 [B,H,S,128] only";
        if (t->stride[3] != 1 || t->stride[0] % 8 || t->stride[1] % 8 || t->stride[2] % 8 || reinterpret_cast<uintptr_t>(t->data) % 16)
            return "fmha: rows must be contiguous and 16-byte aligned";
        if (t->stride[0] <= 0 || t->stride[1] <= 0 || t->stride[2] <= 0) return "fmha: strides must be positive";
        for (int i = 0; i < 4; ++i)
            if (t->shape[i] != call->inputs[0].shape[i]) return "fmha: q, k, v and o must have one shape";
    }
    const int64_t tokens = call->inputs[0].shape[2];
    if (tokens < 8 || tokens > 65536 || tokens % 8) return "fmha: 8 to 65536 tokens, a multiple of 8";
    if (klineage_scalar_value(call, "causal", 0) != 0) return "fmha: non-causal only";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor &q = call->inputs[0];
    const int batch = int(q.shape[0]), heads = int(q.shape[1]), tokens = int(q.shape[2]);
    const float scale = float(klineage_scalar_value(call, "scale", 0.08838834764831845)) * 1.4426950408889634f;  // base-2 exponentials
    const auto stream = static_cast<cudaStream_t>(call->stream);
    fmha<<<dim3((tokens + kRows - 1) / kRows, heads, batch), kThreads, 0, stream>>>(View(q), View(call->inputs[1]), View(call->inputs[2]), View(call->outputs[0]), tokens, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "fmha: the launch failed");
    return 0;
}
