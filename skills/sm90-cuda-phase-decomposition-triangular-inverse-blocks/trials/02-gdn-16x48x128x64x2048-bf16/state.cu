#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "klineage.h"

namespace {

constexpr int kDim = 128, kChunk = 64;
constexpr int kTile = 64 * 128;       // bytes of a swizzled 64x64 tile
constexpr int kVector = 2 * kChunk;   // floats per head and chunk: decay since the chunk's start, decay to its end
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kPitch = kChunk + 1;    // floats between rows of L
constexpr int kPrepareBytes = 1024 + 4 * kTile + (kChunk * kPitch + 2 * kChunk) * 4;
constexpr int kChainBytes = 1024 + 8 * kTile + kVector * 4;

struct Gates {
    const float *g, *beta;
    int64_t g_token, g_head, beta_token, beta_head;
};

// A bf16 tensor [T,H,128] with the strides of the call, in elements.
struct Rows {
    __nv_bfloat16 *data;
    int64_t token, head;
    __host__ explicit Rows(const klineage_tensor &t) : data(static_cast<__nv_bfloat16 *>(t.data)), token(t.stride[0]), head(t.stride[1]) {}
    __device__ __nv_bfloat16 *at(int t, int h) const { return data + t * token + h * this->head; }
};

// Device memory that grows when a call needs more and is kept between calls: the decays of every chunk, then T' and P as [T,HV,128].
struct Scratch {
    uint8_t *data = nullptr;
    int64_t held = 0;
    bool reserve(int64_t bytes) {
        if (bytes <= held) return true;
        cudaFree(data);
        held = cudaMalloc(&data, bytes) == cudaSuccess ? bytes : 0;
        return held > 0;
    }
};

__device__ __forceinline__ uint32_t smem_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Copies 16 bytes asynchronously, or writes zeros when the source row does not exist.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void *src, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Makes writes of this thread to shared memory visible to wgmma (before the barrier).
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of registers across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// Descriptor of 128-byte swizzled tiles, 8-row groups 1,024 bytes apart. `leading` matters only for transposed operands: bytes between 64-column blocks.
__device__ __forceinline__ uint64_t descriptor(uint32_t tile, uint32_t leading) {
    return uint64_t((tile >> 4) & 0x3fffu) | uint64_t(leading >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}
// What to add to a descriptor for columns 16 step to 16 step + 15 of tiles.
__device__ __forceinline__ uint64_t along(int step) { return uint64_t((step / 4 * kTile + step % 4 * 32) >> 4); }
// What to add to a descriptor for rows 16 step to 16 step + 15 of tiles.
__device__ __forceinline__ uint64_t down(int step) { return uint64_t((step * 2048) >> 4); }

// d[64x64] = A[64x16] B[64x16]^T (+ d), both in shared memory.
__device__ __forceinline__ void wgmma_n64(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate));
}

// d[64x64] = A[64x16] B[64x16]^T (+ d), A in registers, B in shared memory.
__device__ __forceinline__ void wgmma_n64(float (&d)[32], const uint32_t *a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// d[64x128] += A[64x16] B[16x128], A in registers, B in shared memory with contiguous rows (transposed operand).
__device__ __forceinline__ void wgmma_n128_transposed(float (&d)[64], const uint32_t *a, uint64_t b) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
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

// Sums of one head's gates from the start of a chunk, in units of log 2, and its betas; one warp. Also writes the decays: from the chunk's start to
// each token, and from each token to the chunk's end.
__device__ __forceinline__ void sum_gates(const Gates &gates, int head, int t0, int tokens, float *gamma, float *beta, float *decays) {
    const int lane = threadIdx.x % 32;
    float sum[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int t = t0 + lane + 32 * i;
        sum[i] = t < tokens ? gates.g[t * gates.g_token + head * gates.g_head] : 0.f;
        beta[lane + 32 * i] = t < tokens ? gates.beta[t * gates.beta_token + head * gates.beta_head] : 0.f;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other0 = __shfl_up_sync(~0u, sum[0], step), other1 = __shfl_up_sync(~0u, sum[1], step);
        if (lane >= step) sum[0] += other0, sum[1] += other1;
    }
    sum[1] += __shfl_sync(~0u, sum[0], 31);
    const float total = __shfl_sync(~0u, sum[1], 31);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        gamma[lane + 32 * i] = sum[i] * kLog2e;
        decays[lane + 32 * i] = exp2_fast(sum[i] * kLog2e);
        decays[kChunk + lane + 32 * i] = exp2_fast((total - sum[i]) * kLog2e);
    }
}

// For one chunk of one value head: T' = (I + tril(beta K K^T o G, -1))^-1 diag(beta) and P = scale tril(Q K^T o G), both bf16 [64x64], side by side in
// the scratch rows of the chunk; and the decays. G_ij = exp(gates between tokens j and i).
__global__ void __launch_bounds__(128)
prepare(Rows q, Rows k, Rows scratch, Gates gates, float *vectors, int tokens, int group, float scale) {
    extern __shared__ uint8_t smem[];
    const uint32_t start = smem_address(smem), base = (start + 1023) & ~1023u, tile_k = base, tile_q = base + 2 * kTile;
    float *const lower = reinterpret_cast<float *>(smem + (base - start) + 4 * kTile);  // [64][kPitch]
    float *const gamma = lower + kChunk * kPitch, *const beta = gamma + kChunk;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, head = blockIdx.x, chunk = blockIdx.y, t0 = chunk * kChunk;
    load_rows<128>(tile_k, k, head / group, 0, kDim, t0, tokens);
    load_rows<128>(tile_q, q, head / group, 0, kDim, t0, tokens);
    if (warp == 0) sum_gates(gates, head, t0, tokens, gamma, beta, vectors + (int64_t(chunk) * gridDim.x + head) * kVector);
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_async_proxy();
    __syncthreads();
    const uint64_t of_k = descriptor(tile_k, 16), of_q = descriptor(tile_q, 16);
    float kk[32], qk[32];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) wgmma_n64(kk, of_k + along(i), of_k + along(i), i > 0);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) wgmma_n64(qk, of_q + along(i), of_k + along(i), i > 0);
    wgmma_commit();
    wgmma_wait<0>();
    pin(kk), pin(qk);
    const int c = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = 16 * warp + lane / 4 + 8 * i;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int column = 8 * n + c;
            const float e0 = exp2_fast(gamma[row] - gamma[column]), e1 = exp2_fast(gamma[row] - gamma[column + 1]);  // above the diagonal maybe infinite
            lower[row * kPitch + column] = column < row ? kk[4 * n + 2 * i] * e0 * beta[row] : 0.f;
            lower[row * kPitch + column + 1] = column + 1 < row ? kk[4 * n + 2 * i + 1] * e1 * beta[row] : 0.f;
            const float p0 = column <= row ? qk[4 * n + 2 * i] * e0 * scale : 0.f, p1 = column + 1 <= row ? qk[4 * n + 2 * i + 1] * e1 * scale : 0.f;
            if (t0 + row < tokens) *reinterpret_cast<uint32_t *>(scratch.at(t0 + row, head) + kChunk + column) = pack(p0, p1);
        }
    }
    __syncthreads();
    if (tid >= kChunk) return;
    float x[kChunk];  // column tid of (I + L)^-1, row by row
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        float sum = i == tid ? 1.f : 0.f;
#pragma unroll
        for (int m = 0; m < i; ++m) sum -= lower[i * kPitch + m] * x[m];
        x[i] = sum;
        if (t0 + i < tokens) scratch.at(t0 + i, head)[tid] = __float2bfloat16(sum * beta[tid]);
    }
}

// The chain over the chunks of one head's 64 value columns. S^T [64 values x 128 keys] stays in the accumulators; every product has a transposed
// operand in registers: X = S^T K^T, N = (V^T - e^gamma X) T'^T, O^T = scale e^gamma (S^T Q^T) + N P^T, S^T = e^gamma_C S^T + (N e^(gamma_C - gamma)) K.
__global__ void __launch_bounds__(128, 1)
chain(Rows q, Rows k, Rows v, Rows scratch, Rows o, const float *vectors, const float *state0, float *state, int tokens, int group, float scale) {
    extern __shared__ uint8_t smem[];
    const uint32_t start = smem_address(smem), base = (start + 1023) & ~1023u, tile_k = base, tile_q = base + 2 * kTile, tile_v = base + 4 * kTile;
    const uint32_t tile_t = base + 5 * kTile, tile_p = base + 6 * kTile, staging = base + 7 * kTile;
    float *const decays = reinterpret_cast<float *>(smem + (base - start) + 8 * kTile);
    const uint64_t of_k = descriptor(tile_k, 16), of_q = descriptor(tile_q, 16), of_t = descriptor(tile_t, 16), of_p = descriptor(tile_p, 16);
    const uint64_t of_k_transposed = descriptor(tile_k, kTile);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, c = lane % 4 * 2, head = blockIdx.x / 2, half = blockIdx.x % 2;
    const int64_t corner = int64_t(head) * kDim * kDim + c * kDim + half * 64 + 16 * warp + lane / 4;  // this lane's first element of [128 keys][128 values]
    float s[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = state0 ? state0[corner + (i / 4 * 8 + i % 2) * kDim + i / 2 % 2 * 8] : 0.f;
    for (int t0 = 0; t0 < tokens; t0 += kChunk) {
        load_rows<128>(tile_k, k, head / group, 0, kDim, t0, tokens);
        load_rows<128>(tile_q, q, head / group, 0, kDim, t0, tokens);
        load_rows<128>(tile_v, v, head, half * 64, 64, t0, tokens);
        load_rows<128>(tile_t, scratch, head, 0, kDim, t0, tokens);  // T' and P
        decays[tid] = vectors[(int64_t(t0 / kChunk) * (gridDim.x / 2) + head) * kVector + tid];
        uint32_t a[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) a[i] = pack(s[2 * i], s[2 * i + 1]);
        asm volatile("cp.async.wait_all;" ::: "memory");
        fence_async_proxy();
        __syncthreads();
        float x[32], out[32];
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_n64(x, a + 4 * i, of_k + along(i), i > 0);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_n64(out, a + 4 * i, of_q + along(i), i > 0);
        wgmma_commit();
        // Under the products: this lane's values and decays, and the state's decay (its packed copy is what the products read).
        uint32_t pairs[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) ldmatrix_x4_trans(pairs[i], swizzled(tile_v, 16 * i + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2));
        float since[16];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float2 two = *reinterpret_cast<const float2 *>(decays + 8 * i + c);
            since[2 * i] = two.x, since[2 * i + 1] = two.y;
        }
        const float kept = decays[kChunk - 1];
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] *= kept;
        pin(s);
        wgmma_wait<1>();
        pin(x);
        uint32_t y[16];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const float2 value = unpack(pairs[j / 4][j % 4]);
            y[j] = pack(value.x - since[j / 2 * 2] * x[2 * j], value.y - since[j / 2 * 2 + 1] * x[2 * j + 1]);
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_n64(x, y + 4 * i, of_t + along(i), i > 0);
        wgmma_commit();
        float until[16];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float2 two = *reinterpret_cast<const float2 *>(decays + kChunk + 8 * i + c);
            until[2 * i] = two.x, until[2 * i + 1] = two.y;
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) since[i] *= scale;
        wgmma_wait<0>();
        pin(x), pin(out), pin(a), pin(y);
        uint32_t u[16], w[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int pair = i / 2 * 2;
            u[i] = pack(x[2 * i], x[2 * i + 1]);
            w[i] = pack(x[2 * i] * until[pair], x[2 * i + 1] * until[pair + 1]);
            out[2 * i] *= since[pair], out[2 * i + 1] *= since[pair + 1];
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_n128_transposed(s, w + 4 * i, of_k_transposed + down(i));
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_n64(out, u + 4 * i, of_p + along(i), 1);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s), pin(out), pin(u), pin(w);
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

bool rows_are_contiguous(const klineage_tensor &t) {
    return t.stride[2] == 1 && t.stride[0] > 0 && t.stride[1] > 0 && t.stride[0] % 8 == 0 && t.stride[1] % 8 == 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if ((call->num_inputs != 5 && call->num_inputs != 6) || call->num_outputs != 2) return "gdn reads q, k, v, g, beta [, state0] and writes o and state";
    const klineage_tensor *in = call->inputs, &v = in[2], &o = call->outputs[0], &state = call->outputs[1];
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &o})
        if (t->dtype != KLINEAGE_BFLOAT16 || t->num_dims != 3 || t->shape[2] != kDim || t->shape[0] != v.shape[0]) return "gdn: q, k, v and o must be bf16 [T,H,128]";
    for (const klineage_tensor *t : {&in[0], &in[1], &v, &o})
        if (!rows_are_contiguous(*t)) return "gdn: rows must be contiguous and 16-byte aligned";
    for (const klineage_tensor *t : {&in[3], &in[4]})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 2 || t->shape[0] != v.shape[0] || t->shape[1] != v.shape[1]) return "gdn: g and beta must be fp32 [T,HV]";
    for (const klineage_tensor *t : {&state, call->num_inputs == 6 ? &in[5] : &state})
        if (t->dtype != KLINEAGE_FLOAT32 || t->num_dims != 3 || t->shape[0] != v.shape[1] || t->shape[1] != kDim || t->shape[2] != kDim || t->stride[2] != 1 ||
            t->stride[1] != kDim || t->stride[0] != kDim * kDim || reinterpret_cast<uintptr_t>(t->data) % 16)
            return "gdn: state0 and state must be contiguous fp32 [HV,128,128]";
    if (in[0].shape[1] < 1 || in[1].shape[1] != in[0].shape[1] || v.shape[1] % in[0].shape[1] || o.shape[1] != v.shape[1]) return "gdn: HV must be a multiple of HQK";
    if (v.shape[0] < 1 || v.shape[0] > 8192) return "gdn: 1 to 8192 tokens";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor *in = call->inputs, &o = call->outputs[0];
    const int tokens = int(in[2].shape[0]), key_heads = int(in[0].shape[1]), heads = int(in[2].shape[1]), group = heads / key_heads;
    const int chunks = (tokens + kChunk - 1) / kChunk;
    const float scale = float(klineage_scalar_value(call, "scale", 0.08838834764831845));
    const auto stream = static_cast<cudaStream_t>(call->stream);
    const Gates gates{static_cast<const float *>(in[3].data), static_cast<const float *>(in[4].data), in[3].stride[0], in[3].stride[1], in[4].stride[0], in[4].stride[1]};
    const float *const state0 = call->num_inputs == 6 ? static_cast<const float *>(in[5].data) : nullptr;
    float *const state = static_cast<float *>(call->outputs[1].data);
    static Scratch memory;
    const int64_t vector_bytes = int64_t(chunks) * heads * kVector * 4;
    KLINEAGE_REQUIRE(call, memory.reserve(vector_bytes + int64_t(tokens) * heads * kDim * 2), "gdn: out of memory for scratch");
    float *const vectors = reinterpret_cast<float *>(memory.data);
    klineage_tensor scratch = o;
    scratch.data = memory.data + vector_bytes, scratch.stride[0] = heads * kDim, scratch.stride[1] = kDim;
    cudaFuncSetAttribute(prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, kPrepareBytes);
    cudaFuncSetAttribute(chain, cudaFuncAttributeMaxDynamicSharedMemorySize, kChainBytes);
    prepare<<<dim3(heads, chunks), 128, kPrepareBytes, stream>>>(Rows(in[0]), Rows(in[1]), Rows(scratch), gates, vectors, tokens, group, scale);
    chain<<<2 * heads, 128, kChainBytes, stream>>>(Rows(in[0]), Rows(in[1]), Rows(in[2]), Rows(scratch), Rows(o), vectors, state0, state, tokens, group, scale);
    KLINEAGE_REQUIRE(call, cudaGetLastError() == cudaSuccess, "gdn: a launch failed");
    return 0;
}
