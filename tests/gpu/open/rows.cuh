// Honest kernels for the operators in definitions.py: a block of 256 threads for every row, sums in fp32.
#pragma once
#include "klineage.h"
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <map>
#include <string>

namespace own {

using bf16 = __nv_bfloat16;
constexpr int kThreads = 256;

inline cudaStream_t stream(const klineage_call *call) { return static_cast<cudaStream_t>(call->stream); }
inline int finish(const klineage_call *call) {
    const cudaError_t status = cudaGetLastError();
    return status == cudaSuccess ? 0 : klineage_fail(call, cudaGetErrorString(status));
}

template <bool kMax> __device__ float reduce(float value) {
    __shared__ float part[kThreads / 32];
    for (int step = 16; step; step /= 2) {
        const float other = __shfl_xor_sync(~0u, value, step);
        value = kMax ? fmaxf(value, other) : value + other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
    __syncthreads();
    value = part[0];
    for (int warp = 1; warp < kThreads / 32; ++warp) value = kMax ? fmaxf(value, part[warp]) : value + part[warp];
    return value;
}

__global__ void softmax_kernel(const bf16 *x, bf16 *y, int n, int first) {
    x += (int64_t(blockIdx.x) + first) * n;
    y += (int64_t(blockIdx.x) + first) * n;
    float top = -INFINITY, sum = 0;
    for (int j = threadIdx.x; j < n; j += kThreads) top = fmaxf(top, float(x[j]));
    top = reduce<true>(top);
    for (int j = threadIdx.x; j < n; j += kThreads) sum += __expf(float(x[j]) - top);
    sum = reduce<false>(sum);
    for (int j = threadIdx.x; j < n; j += kThreads) y[j] = bf16(__expf(float(x[j]) - top) / sum);
}
inline void softmax(const klineage_call *call, cudaStream_t where, int first = 0) {
    const klineage_tensor &x = call->inputs[0];
    softmax_kernel<<<int(x.shape[0]) - first, kThreads, 0, where>>>(
        static_cast<const bf16 *>(x.data), static_cast<bf16 *>(call->outputs[0].data), int(x.shape[1]), first);
}

__global__ void add_norm_kernel(bf16 *x, bf16 *r, const bf16 *w, int n, float eps) {
    x += int64_t(blockIdx.x) * n;
    r += int64_t(blockIdx.x) * n;
    float sum = 0;
    for (int j = threadIdx.x; j < n; j += kThreads) {
        const float total = float(x[j]) + float(r[j]);
        sum += total * total;
    }
    const float scale = rsqrtf(reduce<false>(sum) / n + eps);
    for (int j = threadIdx.x; j < n; j += kThreads) {
        const float total = float(x[j]) + float(r[j]);
        r[j] = bf16(total);
        x[j] = bf16(total * scale * float(w[j]));
    }
}
inline void add_norm(const klineage_call *call, cudaStream_t where) {
    const klineage_tensor &x = call->inputs[0];
    add_norm_kernel<<<int(x.shape[0]), kThreads, 0, where>>>(
        static_cast<bf16 *>(x.data), static_cast<bf16 *>(call->inputs[1].data),
        static_cast<const bf16 *>(call->inputs[2].data), int(x.shape[1]), float(klineage_scalar_value(call, "eps", 0)));
}

__global__ void layer_norm_kernel(const bf16 *x, bf16 *y, float *means, float *rstds, int n, float eps) {
    x += int64_t(blockIdx.x) * n;
    y += int64_t(blockIdx.x) * n;
    float sum = 0, squares = 0;
    for (int j = threadIdx.x; j < n; j += kThreads) sum += float(x[j]);
    const float mean = reduce<false>(sum) / n;
    for (int j = threadIdx.x; j < n; j += kThreads) squares += (float(x[j]) - mean) * (float(x[j]) - mean);
    const float rstd = rsqrtf(reduce<false>(squares) / n + eps);
    for (int j = threadIdx.x; j < n; j += kThreads) y[j] = bf16((float(x[j]) - mean) * rstd);
    if (threadIdx.x == 0) means[blockIdx.x] = mean, rstds[blockIdx.x] = rstd;
}
inline void layer_norm(const klineage_call *call, cudaStream_t where) {
    const klineage_tensor &x = call->inputs[0];
    layer_norm_kernel<<<int(x.shape[0]), kThreads, 0, where>>>(
        static_cast<const bf16 *>(x.data), static_cast<bf16 *>(call->outputs[0].data),
        static_cast<float *>(call->outputs[1].data), static_cast<float *>(call->outputs[2].data), int(x.shape[1]),
        float(klineage_scalar_value(call, "eps", 0)));
}

__global__ void quantise_kernel(const bf16 *x, __nv_fp8_e4m3 *y, float *scales, int n) {
    x += int64_t(blockIdx.x) * n;
    y += int64_t(blockIdx.x) * n;
    float top = 0;
    for (int j = threadIdx.x; j < n; j += kThreads) top = fmaxf(top, fabsf(float(x[j])));
    const float scale = reduce<true>(top) / 448;
    for (int j = threadIdx.x; j < n; j += kThreads) y[j] = __nv_fp8_e4m3(float(x[j]) / scale);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}
inline void quantise(const klineage_call *call, cudaStream_t where) {
    const klineage_tensor &x = call->inputs[0];
    quantise_kernel<<<int(x.shape[0]), kThreads, 0, where>>>(
        static_cast<const bf16 *>(x.data), static_cast<__nv_fp8_e4m3 *>(call->outputs[0].data),
        static_cast<float *>(call->outputs[1].data), int(x.shape[1]));
}

__global__ void dequantise_kernel(const __nv_fp8_e4m3 *x, const float *scales, bf16 *y, int n) {
    const int64_t base = int64_t(blockIdx.x) * n;
    for (int j = threadIdx.x; j < n; j += kThreads) y[base + j] = bf16(float(x[base + j]) * scales[blockIdx.x]);
}
inline void dequantise(const klineage_call *call, cudaStream_t where) {
    const klineage_tensor &x = call->inputs[0];
    dequantise_kernel<<<int(x.shape[0]), kThreads, 0, where>>>(
        static_cast<const __nv_fp8_e4m3 *>(x.data), static_cast<const float *>(call->inputs[1].data),
        static_cast<bf16 *>(call->outputs[0].data), int(x.shape[1]));
}

__global__ void classify_kernel(const bf16 *x, int8_t *signs, int64_t *hits, int n, float limit) {
    const int64_t base = int64_t(blockIdx.x) * n;
    float found = 0;
    for (int j = threadIdx.x; j < n; j += kThreads) {
        const float value = float(x[base + j]);
        signs[base + j] = int8_t((value > limit) - (value < -limit));
        found += value > limit || value < -limit;
    }
    found = reduce<false>(found);
    if (threadIdx.x == 0) hits[blockIdx.x] = int64_t(found);
}
inline void classify(const klineage_call *call, cudaStream_t where) {
    const klineage_tensor &x = call->inputs[0];
    classify_kernel<<<int(x.shape[0]), kThreads, 0, where>>>(
        static_cast<const bf16 *>(x.data), static_cast<int8_t *>(call->outputs[0].data),
        static_cast<int64_t *>(call->outputs[1].data), int(x.shape[1]),
        float(klineage_scalar_value(call, "limit", 0)));
}

__global__ void iterated_kernel(const bf16 *x, bf16 *y, int64_t size) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= size) return;
    float value = float(x[i]);
    for (int step = 0; step < 64; ++step) value += 0.01f * sinf(value);
    y[i] = bf16(value);
}
inline void iterated(const klineage_call *call, cudaStream_t where) {
    const klineage_tensor &x = call->inputs[0];
    const int64_t size = x.shape[0] * x.shape[1];
    iterated_kernel<<<unsigned((size + kThreads - 1) / kThreads), kThreads, 0, where>>>(
        static_cast<const bf16 *>(x.data), static_cast<bf16 *>(call->outputs[0].data), size);
}

// A stream that no other stream waits for.
inline cudaStream_t side_stream() {
    static cudaStream_t made = [] {
        cudaStream_t stream = nullptr;
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        return stream;
    }();
    return made;
}

static __global__ void wait_kernel(unsigned long long duration) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < duration);
}

// Five bits of mantissa are left of every number: less than bf16 has.
static __global__ void cut_kernel(const bf16 *x, bf16 *cut, int64_t size) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < size) cut[i] = __ushort_as_bfloat16(__bfloat16_as_ushort(x[i]) & 0xFFF0);
}

}  // namespace own
