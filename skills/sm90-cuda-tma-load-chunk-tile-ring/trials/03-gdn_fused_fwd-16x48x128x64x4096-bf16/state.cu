#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64;
constexpr int kTile = 64 * 128;      // bytes of a swizzled 64x64 tile
constexpr int kVector = 4 * kChunk;  // floats per chunk: decay since its start, decay to its end, sums of gates in units of log 2, betas
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kBytes = 1024 + 8 * kTile + kVector * 4;

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

__device__ __forceinline__ uint32_t smem_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Copies 16 bytes asynchronously, or writes zeros when the source row does not exist.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void *src, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ uint32_t pack(float lo, float hi) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
__device__ __forceinline__ float2 unpack(uint32_t x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Shared-memory matrix descriptor with 128-byte swizzle. Contiguous along k: 8-row groups 1024 bytes apart, `leading` unused. Transposed by
// the instruction: blocks of 64 columns `leading` bytes apart, groups of 8 k 1024 bytes apart.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading = 16) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// Offset of 16 columns number i in a matrix of 64-column tiles, in descriptor units.
__device__ __forceinline__ constexpr int k_step(int i) { return i / 4 * (kTile / 16) + i % 4 * 2; }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// Eight accumulators as operands.
#define ACC8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define D32                                                              \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

// d[64x64] (+)= A[64x16] B[64x16]^T, both in shared memory.
__device__ __forceinline__ void wgmma_64(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " D32 "}, %32, %33, p, 1, 1, 0, 0; }"
                 : ACC8(0), ACC8(8), ACC8(16), ACC8(24) : "l"(a), "l"(b), "r"(accumulate));
}
// The same with A in registers.
__device__ __forceinline__ void wgmma_64(float (&d)[32], const uint32_t *a, uint64_t b, int accumulate) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " D32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
                 : ACC8(0), ACC8(8), ACC8(16), ACC8(24) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
// d[64x128] += A[64x16] B[16x128]; A in registers, B with its columns contiguous.
__device__ __forceinline__ void wgmma_128(float (&d)[64], const uint32_t *a, uint64_t b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " D32 ", "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
                 : ACC8(0), ACC8(8), ACC8(16), ACC8(24), ACC8(32), ACC8(40), ACC8(48), ACC8(56) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

// Keeps the compiler from moving accesses to registers across the wait that completes them.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Address of 16-byte chunk `chunk` of row `row` in swizzled tiles of 64 columns.
__device__ __forceinline__ uint32_t swizzled(uint32_t tile, int row, int chunk) { return tile + chunk / 8 * kTile + row * 128 + (chunk % 8 ^ row % 8) * 16; }

// Copies `columns` columns of 64 tokens of one head into swizzled tiles; tokens past the end become zeros.
template <int kThreads>
__device__ __forceinline__ void load_rows(uint32_t tile, const Rows &from, int head, int column, int columns, int t0, int tokens) {
    for (int i = threadIdx.x; i < kChunk * columns / 8; i += kThreads) {
        const int row = i / (columns / 8), chunk = i % (columns / 8), t = t0 + row;
        cp_async_16(swizzled(tile, row, chunk), from.at(min(t, tokens - 1), head) + column + chunk * 8, t < tokens);
    }
}

// What a chunk needs of its gates, for one token. Tokens past the end have the last sum of gates and no beta.
__device__ __forceinline__ void spread_gates(float *vectors, int i, float sum, float end, float rate) {
    vectors[i] = exp2_fast(sum * kLog2e);
    vectors[kChunk + i] = exp2_fast((end - sum) * kLog2e);
    vectors[2 * kChunk + i] = sum * kLog2e;
    vectors[3 * kChunk + i] = rate;
}

// P = scale tril(Q K^T exp(gc_i - gc_j)) of this warp's 16 rows, from Q K^T, as packed accumulators.
__device__ __forceinline__ void decay_scores(uint32_t (&p)[16], const float (&qk)[32], const float *gamma, float scale) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, r = 16 * warp + lane / 4, c = lane % 4 * 2;
    const float row[2] = {gamma[r], gamma[r + 8]};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float2 column = *reinterpret_cast<const float2 *>(gamma + 8 * n + c);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int behind = r + 8 * i - 8 * n - c;  // row minus column; above the diagonal the exponential may be infinite
            const float p0 = qk[4 * n + 2 * i] * exp2_fast(row[i] - column.x) * scale, p1 = qk[4 * n + 2 * i + 1] * exp2_fast(row[i] - column.y) * scale;
            p[2 * n + i] = pack(behind < 0 ? 0.f : p0, behind < 1 ? 0.f : p1);
        }
    }
}

// The chain over the chunks of one head's 64 value columns, by one warpgroup. S^T [64 values x 128 keys] stays in the accumulators; every product has a
// transposed operand in registers: X = S^T K^T, N = ((V^T - e^gc X) beta) inverse^T, O^T = scale e^gc (S^T Q^T) + N P^T, S^T = e^gc_C S^T + (N e^(gc_C - gc)) K.
__global__ void __launch_bounds__(128, 1)
fused_fwd(Rows q, Rows k, Rows v, Rows inverse, Rows o, Gates gates, const float *state0, float *state, int tokens, int group, float scale) {
    extern __shared__ uint8_t smem[];
    const uint32_t start = smem_address(smem), base = (start + 1023) & ~1023u, tile_k = base, tile_q = base + 2 * kTile, tile_v = base + 4 * kTile;
    const uint32_t tile_t = base + 5 * kTile, tile_p = base + 6 * kTile, staging = base + 7 * kTile;
    float *const decays = reinterpret_cast<float *>(smem + (base - start) + 8 * kTile);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, c = lane % 4 * 2, head = blockIdx.x / 2, half = blockIdx.x % 2, key_head = head / group;
    const int corner = head * kDim * kDim + c * kDim + half * 64 + 16 * warp + lane / 4;  // this lane's first element of [128 keys][128 values]
    const float *const beta = decays + 3 * kChunk;
    float s[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = state0 ? state0[corner + (i / 4 * 8 + i % 2) * kDim + i / 2 % 2 * 8] : 0.f;
    for (int t0 = 0; t0 < tokens; t0 += kChunk) {
        load_rows<128>(tile_k, k, key_head, 0, kDim, t0, tokens);
        load_rows<128>(tile_q, q, key_head, 0, kDim, t0, tokens);
        load_rows<128>(tile_v, v, head, half * 64, 64, t0, tokens);
        load_rows<128>(tile_t, inverse, head, 0, kChunk, t0, tokens);
        if (tid < kChunk) {
            const int t = min(t0 + tid, tokens - 1);
            spread_gates(decays, tid, gates.sum(t, head), gates.sum(min(t0 + kChunk, tokens) - 1, head), t0 + tid < tokens ? gates.rate(t, head) : 0.f);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        fence_async();
        __syncthreads();
        float x[32], out[32];
        const uint64_t desc_k = matrix_descriptor(tile_k), desc_q = matrix_descriptor(tile_q), desc_t = matrix_descriptor(tile_t);
        const uint64_t desc_p = matrix_descriptor(tile_p), desc_kt = matrix_descriptor(tile_k, kTile);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_64(x, desc_q + k_step(i), desc_k + k_step(i), i);
        wgmma_commit();
        wgmma_wait<0>();
        pin(x);
        {
            uint32_t p[16];
            decay_scores(p, x, decays + 2 * kChunk, scale);
#pragma unroll
            for (int n = 0; n < 4; ++n)
                stmatrix_x4(swizzled(tile_p, 16 * warp + lane % 16, 2 * n + lane / 16), p[4 * n], p[4 * n + 1], p[4 * n + 2], p[4 * n + 3]);
        }
        fence_async();
        uint32_t a[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) a[i] = pack(s[2 * i], s[2 * i + 1]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_64(x, a + 4 * i, desc_k + k_step(i), i);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_64(out, a + 4 * i, desc_q + k_step(i), i);
        wgmma_commit();
        wgmma_wait<1>();
        pin(x);
        uint32_t y[16];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t pairs[4];
            ldmatrix_x4_trans(pairs, swizzled(tile_v, 16 * i + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 value = unpack(pairs[e]);
                const int j = 4 * i + e, token = j / 2 * 8 + c;
                y[j] = pack(beta[token] * (value.x - decays[token] * x[2 * j]), beta[token + 1] * (value.y - decays[token + 1] * x[2 * j + 1]));
            }
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_64(x, y + 4 * i, desc_t + k_step(i), i);
        wgmma_commit();
        wgmma_wait<0>();
        pin(x), pin(out);
        uint32_t u[16], w[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int token = i / 2 * 8 + c;
            u[i] = pack(x[2 * i], x[2 * i + 1]);
            w[i] = pack(x[2 * i] * decays[kChunk + token], x[2 * i + 1] * decays[kChunk + token + 1]);
            out[2 * i] *= scale * decays[token], out[2 * i + 1] *= scale * decays[token + 1];
        }
        const float kept = decays[kChunk - 1];
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] *= kept;
        __syncthreads();  // the scores are complete
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_128(s, w + 4 * i, desc_kt + i * 128);
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_64(out, u + 4 * i, desc_p + k_step(i), 1);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s), pin(out);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            stmatrix_x4_trans(swizzled(staging, 16 * i + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2), pack(out[8 * i], out[8 * i + 1]),
                              pack(out[8 * i + 2], out[8 * i + 3]), pack(out[8 * i + 4], out[8 * i + 5]), pack(out[8 * i + 6], out[8 * i + 7]));
        __syncthreads();  // the outputs are staged, and everybody has read the tiles
        for (int i = tid; i < kChunk * 8; i += 128) {
            const int row = i / 8, t = t0 + row;
            uint4 chunk;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w) : "r"(swizzled(staging, row, i % 8)) : "memory");
            if (t < tokens) *reinterpret_cast<uint4 *>(o.at(t, head) + half * 64 + i % 8 * 8) = chunk;
        }
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) state[corner + (i / 4 * 8 + i % 2) * kDim + i / 2 % 2 * 8] = s[i];
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
    cudaFuncSetAttribute(fused_fwd, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    fused_fwd<<<2 * heads, 128, kBytes, stream>>>(Rows(in[0]), Rows(in[1]), Rows(in[2]), Rows(in[3]), Rows(o), gates, state0, state, tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn_fused_fwd: the launch failed");
    return 0;
}
