#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128;
constexpr int kRows = 64, kKeys = 64;  // query rows of a block, keys of a tile
constexpr int kPitch = kDim + 8;       // elements from row to row of a tile: fragment loads hit 32 different banks

// One tensor [B,H,S,128] with the strides of the call, in elements.
struct View {
    half *data;
    int64_t batch, head, token;
    __host__ explicit View(const klineage_tensor &t)
        : data(static_cast<half *>(t.data)), batch(t.stride[0]), head(t.stride[1]), token(t.stride[2]) {}
    __device__ half *row(int b, int h, int s) const { return data + b * batch + h * head + s * token; }
};

// c += a * b, 16x8 += 16x16 * 16x8
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ uint32_t word(const half *p) { return *reinterpret_cast<const uint32_t *>(p); }

// Two elements of one column in neighbouring rows of a tile.
__device__ __forceinline__ uint32_t column_pair(const half *p) {
    const uint32_t low = *reinterpret_cast<const uint16_t *>(p), high = *reinterpret_cast<const uint16_t *>(p + kPitch);
    return __byte_perm(low, high, 0x5410);
}

__global__ void __launch_bounds__(128, 3) fmha(View q, View k, View v, View o, int tokens, float scale) {
    __shared__ __align__(16) half tile_k[kKeys][kPitch], tile_v[kKeys][kPitch];
    const int tid = threadIdx.x, warp = tid / 32, group = tid % 32 / 4, quad = tid % 4, h = blockIdx.y, b = blockIdx.z;
    const int row0 = blockIdx.x * kRows + warp * 16 + group, row1 = row0 + 8;

    uint32_t query[kDim / 16][4];  // A fragments
    {
        const half *q0 = q.row(b, h, row0) + 2 * quad, *q1 = q.row(b, h, row1) + 2 * quad;
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
            query[d][0] = row0 < tokens ? word(q0 + d * 16) : 0u;
            query[d][1] = row1 < tokens ? word(q1 + d * 16) : 0u;
            query[d][2] = row0 < tokens ? word(q0 + d * 16 + 8) : 0u;
            query[d][3] = row1 < tokens ? word(q1 + d * 16 + 8) : 0u;
        }
    }

    float out[kDim / 8][4] = {};
    float top0 = -INFINITY, top1 = -INFINITY, total0 = 0.f, total1 = 0.f;

    // What this thread copies: 16 bytes of every eighth row.
    const int copy_row = tid / 16, copy_column = tid % 16 * 8;
    const half *from_k = k.row(b, h, copy_row) + copy_column, *from_v = v.row(b, h, copy_row) + copy_column;
    half *const to_k = &tile_k[copy_row][copy_column], *const to_v = &tile_v[copy_row][copy_column];
    const int64_t step_k = 8 * k.token, step_v = 8 * v.token;

    // Where the B fragments of this thread start.
    const half *const keys = &tile_k[group][2 * quad], *const values = &tile_v[2 * quad][group];

#pragma unroll 1
    for (int j0 = 0; j0 < tokens; j0 += kKeys) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i) {
            uint4 x = make_uint4(0, 0, 0, 0);
            if (j0 + copy_row + i * 8 < tokens) x = __ldg(reinterpret_cast<const uint4 *>(from_k));
            *reinterpret_cast<uint4 *>(to_k + i * 8 * kPitch) = x;
            from_k += step_k;
        }
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i) {
            uint4 x = make_uint4(0, 0, 0, 0);
            if (j0 + copy_row + i * 8 < tokens) x = __ldg(reinterpret_cast<const uint4 *>(from_v));
            *reinterpret_cast<uint4 *>(to_v + i * 8 * kPitch) = x;
            from_v += step_v;
        }
        __syncthreads();

        float score[kKeys / 8][4] = {};
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) {
                const half *p = keys + n * 8 * kPitch + d * 16;
                mma(score[n], query[d], word(p), word(p + 8));
            }
        }

        if (j0 + kKeys > tokens) {
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) {
                const int j = j0 + n * 8 + 2 * quad;
                if (j >= tokens) score[n][0] = score[n][2] = -INFINITY;
                if (j + 1 >= tokens) score[n][1] = score[n][3] = -INFINITY;
            }
        }

        float most0 = fmaxf(score[0][0], score[0][1]), most1 = fmaxf(score[0][2], score[0][3]);
#pragma unroll
        for (int n = 1; n < kKeys / 8; ++n) {
            most0 = fmaxf(most0, fmaxf(score[n][0], score[n][1]));
            most1 = fmaxf(most1, fmaxf(score[n][2], score[n][3]));
        }
        most0 = fmaxf(most0, __shfl_xor_sync(~0u, most0, 1));
        most1 = fmaxf(most1, __shfl_xor_sync(~0u, most1, 1));
        most0 = fmaxf(most0, __shfl_xor_sync(~0u, most0, 2));
        most1 = fmaxf(most1, __shfl_xor_sync(~0u, most1, 2));

        const float raised0 = fmaxf(top0, most0 * scale), raised1 = fmaxf(top1, most1 * scale);
        const float shrink0 = power2(top0 - raised0), shrink1 = power2(top1 - raised1);
        top0 = raised0;
        top1 = raised1;
        total0 *= shrink0;
        total1 *= shrink1;

        uint32_t weight[kKeys / 16][4];  // A fragments of the second product
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
            const float w0 = power2(fmaf(score[n][0], scale, -raised0)), w1 = power2(fmaf(score[n][1], scale, -raised0));
            const float w2 = power2(fmaf(score[n][2], scale, -raised1)), w3 = power2(fmaf(score[n][3], scale, -raised1));
            total0 += w0 + w1;
            total1 += w2 + w3;
            weight[n / 2][n % 2 * 2] = pack(w0, w1);
            weight[n / 2][n % 2 * 2 + 1] = pack(w2, w3);
        }

#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
            out[n][0] *= shrink0;
            out[n][1] *= shrink0;
            out[n][2] *= shrink1;
            out[n][3] *= shrink1;
        }

#pragma unroll
        for (int j = 0; j < kKeys / 16; ++j) {
#pragma unroll
            for (int n = 0; n < kDim / 8; ++n) {
                const half *p = values + j * 16 * kPitch + n * 8;
                mma(out[n], weight[j], column_pair(p), column_pair(p + 8 * kPitch));
            }
        }
    }

    total0 += __shfl_xor_sync(~0u, total0, 1);
    total1 += __shfl_xor_sync(~0u, total1, 1);
    total0 += __shfl_xor_sync(~0u, total0, 2);
    total1 += __shfl_xor_sync(~0u, total1, 2);
    const float inverse0 = 1.f / total0, inverse1 = 1.f / total1;
    if (row0 < tokens) {
        half *p = o.row(b, h, row0) + 2 * quad;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) *reinterpret_cast<uint32_t *>(p + n * 8) = pack(out[n][0] * inverse0, out[n][1] * inverse0);
    }
    if (row1 < tokens) {
        half *p = o.row(b, h, row1) + 2 * quad;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) *reinterpret_cast<uint32_t *>(p + n * 8) = pack(out[n][2] * inverse1, out[n][3] * inverse1);
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
    fmha<<<dim3((tokens + kRows - 1) / kRows, heads, batch), 128, 0, stream>>>(View(q), View(call->inputs[1]), View(call->inputs[2]), View(call->outputs[0]), tokens, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "fmha: the launch failed");
    return 0;
}
