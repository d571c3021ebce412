// Every plan of the convolution expert: right against a naive kernel, and its time with a flush (256 MB memset) before each call.
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -t 1 -DCONV_ONE_WAVE=1 [-DCONV_STREAM_X=1] \
//        -I experts/conv2d/sm90-cuda -I pytest_klineage/surfaces/include suites/experts/conv2d_plans.cu -o conv2d_plans
//   conv2d_plans check          all plans of odd shapes, both layouts and types: PASS or what is wrong
//   conv2d_plans time [top]     the sweep's layers: the best `top` plans (default 12) by the model, and all turned ones
#include "expert.cu"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
using namespace conv2d;
static void ok_at(cudaError_t e, int line) { if (e != cudaSuccess) { printf("line %d: %s\n", line, cudaGetErrorString(e)); exit(1); } }
#define OK(call) ok_at((call), __LINE__)

struct Layer { int n, c, h, w, f, size, stride, pad; bool nchw, bf16; };
static Shape shape_of(const Layer &l) {
    Shape s = {};
    s.n = l.n, s.c = l.c, s.h = l.h, s.w = l.w, s.f = l.f, s.size = l.size, s.stride = l.stride, s.pad = l.pad;
    s.p = (l.h + 2 * l.pad - l.size) / l.stride + 1, s.q = (l.w + 2 * l.pad - l.size) / l.stride + 1;
    return s;
}
template <class T> __device__ float value(T v) { return static_cast<float>(v); }
template <class T> __global__ void fill(T *p, size_t count, unsigned seed) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
        unsigned v = unsigned(i) * 2654435761u + seed;
        v ^= v >> 15, v *= 2246822519u, v ^= v >> 13, v *= 3266489917u, v ^= v >> 16;
        p[i] = T(float(int(v % 2001) - 1000) / 1000.0f);
    }
}
template <class T> __global__ void naive(Shape s, bool nchw, const T *x, const T *w, float *y) {
    const size_t total = size_t(s.n) * s.p * s.q * s.f;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < total; i += size_t(gridDim.x) * blockDim.x) {
        const int f = nchw ? i / (s.p * s.q) % s.f : i % s.f, n = i / (size_t(s.p) * s.q * s.f);
        const size_t pixel = nchw ? i % (s.p * s.q) : i / s.f % (size_t(s.p) * s.q);
        const int p = pixel / s.q, q = pixel % s.q;
        float sum = 0;
        for (int r = 0; r < s.size; ++r)
            for (int t = 0; t < s.size; ++t) {
                const int h = p * s.stride - s.pad + r, v = q * s.stride - s.pad + t;
                if (h < 0 || h >= s.h || v < 0 || v >= s.w) continue;
                for (int c = 0; c < s.c; ++c)
                    sum += nchw ? value(x[((size_t(n) * s.c + c) * s.h + h) * s.w + v]) * value(w[((size_t(f) * s.c + c) * s.size + r) * s.size + t])
                                : value(x[((size_t(n) * s.h + h) * s.w + v) * s.c + c]) * value(w[((size_t(f) * s.size + r) * s.size + t) * s.c + c]);
            }
        y[i] = sum;
    }
}
// Wrong elements; a 16-bit rounding and the order of a sum are allowed.
template <class T> __global__ void compare(const T *y, const float *want, size_t count, float relative, unsigned long long *wrong, float *worst) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
        const float off = fabsf(value(y[i]) - want[i]), bound = relative * fabsf(want[i]) + 0.02f;
        if (!(off <= bound)) atomicAdd(wrong, 1ull);
        atomicMax(reinterpret_cast<int *>(worst), __float_as_int(off / bound));
    }
}
static std::string text(const Plan &p, const Instance &t) {
    char b[160];
    const char *kind = t.turned() ? "turned" : t.stream() ? "stream" : t.kind == Kind::kHalo ? "halo" : "im2col";
    snprintf(b, sizeof b, "%-6s %s %3dx%-3d groups %d per_sm %d pixel_stages %d splits %d resident %d", kind, t.filter_rows ? "F" : "P", t.pixels, t.filters,
             t.groups, p.per_sm, p.pixel_stages, p.splits, p.resident);
    return b;
}
static char *flushed;
constexpr size_t kFlush = 256 << 20, kGuard = 4096;

template <class T> int layer(const Layer &l, bool timed, int top) {
    const Shape s = shape_of(l);
    const size_t nx = size_t(s.n) * s.c * s.h * s.w, nw = size_t(s.f) * s.c * s.taps(), ny = size_t(s.n) * s.f * s.p * s.q;
    T *x, *w;
    char *y;
    float *want, *worst;
    unsigned long long *wrong;
    OK(cudaMalloc(&x, nx * 2)), OK(cudaMalloc(&w, nw * 2)), OK(cudaMalloc(&y, ny * 2 + 2 * kGuard)), OK(cudaMalloc(&want, ny * 4));
    OK(cudaMalloc(&wrong, 16));
    worst = reinterpret_cast<float *>(wrong + 1);
    fill<T><<<1024, 256>>>(x, nx, 1), fill<T><<<1024, 256>>>(w, nw, 2);
    naive<T><<<4096, 256>>>(s, l.nchw, x, w, want);
    OK(cudaDeviceSynchronize());
    const Instances all = instances<T>();
    struct Entry { Plan plan; float clocks; };
    std::vector<Entry> plans;
    const int units = multiprocessors();
    each_plan(s, all, l.nchw, [&](const Plan &p) {
        const float clocks = clocks_of(Machine(), s, p, all.list[p.instance], units);
        if (clocks > 0) plans.push_back({p, clocks});
    });
    std::stable_sort(plans.begin(), plans.end(), [](const Entry &a, const Entry &b) { return a.clocks < b.clocks; });
    printf("== %s %s %dx%dx%dx%dx%dx%dx%dx%d: %zu plans\n", l.bf16 ? "bf16" : "fp16", l.nchw ? "NCHW" : "NHWC", l.n, l.c, l.h, l.w, l.f, l.size, l.stride,
           l.pad, plans.size());
    cudaEvent_t a, b;
    OK(cudaEventCreate(&a)), OK(cudaEventCreate(&b));
    int bad = 0;
    for (size_t i = 0; i < plans.size(); ++i) {
        const Instance &tile = all.list[plans[i].plan.instance];
        if (timed && int(i) >= top && !tile.turned()) continue;
        const auto call = [&] {
            const char *e = l.nchw && tile.kind != Kind::kStreamDirect ? run_reordered<T>(s, plans[i].plan, tile, x, w, y + kGuard, nullptr)
                                                                       : launch_plan<T>(s, plans[i].plan, tile, x, w, y + kGuard, nullptr, false);
            if (e) printf("  %s: %s\n", text(plans[i].plan, tile).c_str(), e), ++bad;
            return e == nullptr;
        };
        OK(cudaMemset(y, 0xff, ny * 2 + 2 * kGuard));
        OK(cudaMemset(wrong, 0, 16));
        if (!call()) continue;
        OK(cudaDeviceSynchronize());
        compare<T><<<1024, 256>>>(reinterpret_cast<T *>(y + kGuard), want, ny, l.bf16 ? 0.008f : 0.001f, wrong, worst);
        std::vector<unsigned char> guard(2 * kGuard);
        OK(cudaMemcpy(guard.data(), y, kGuard, cudaMemcpyDeviceToHost)), OK(cudaMemcpy(guard.data() + kGuard, y + kGuard + ny * 2, kGuard, cudaMemcpyDeviceToHost));
        struct { unsigned long long wrong; float worst; } found;
        OK(cudaMemcpy(&found, wrong, 16, cudaMemcpyDeviceToHost));
        for (unsigned char v : guard) found.wrong += v != 0xff;
        if (found.wrong) printf("  WRONG %llu (worst %.1f of the bound) %s\n", found.wrong, found.worst, text(plans[i].plan, tile).c_str()), ++bad;
        if (!timed) continue;
        std::vector<float> us;
        for (int k = 0; k < 23; ++k) {
            OK(cudaMemsetAsync(flushed, k, kFlush)), OK(cudaEventRecord(a));
            call();
            OK(cudaEventRecord(b)), OK(cudaEventSynchronize(b));
            float ms;
            OK(cudaEventElapsedTime(&ms, a, b));
            if (k >= 3) us.push_back(ms * 1000);
        }
        std::sort(us.begin(), us.end());
        printf("  %7.2f us  model %6.0f  %s%s\n", us[us.size() / 2], plans[i].clocks, text(plans[i].plan, tile).c_str(), i == 0 ? "  <- chosen" : "");
    }
    OK(cudaFree(x)), OK(cudaFree(w)), OK(cudaFree(y)), OK(cudaFree(want)), OK(cudaFree(wrong));
    return bad;
}

int main(int argc, char **argv) {
    const bool timed = argc > 1 && !strcmp(argv[1], "time");
    const int top = argc > 2 ? atoi(argv[2]) : 12;
    OK(cudaMalloc(&flushed, kFlush));
    const Layer sweep[] = {
        {32, 1024, 14, 14, 256, 1, 1, 0}, {32, 512, 28, 28, 128, 1, 1, 0}, {32, 512, 7, 7, 512, 3, 1, 1}, {32, 256, 14, 14, 256, 3, 1, 1},
        {32, 128, 56, 56, 128, 3, 2, 1}, {32, 64, 56, 56, 128, 3, 1, 1, false, true}, {32, 64, 56, 56, 256, 1, 1, 0, true},
        {32, 128, 28, 28, 128, 3, 1, 1}, {32, 64, 56, 56, 64, 3, 1, 1}, {32, 64, 56, 56, 64, 5, 1, 2}, {32, 256, 56, 56, 512, 1, 2, 0},
        {32, 256, 14, 14, 256, 3, 1, 1, true}, {32, 512, 7, 7, 512, 3, 1, 1, true}, {32, 1024, 14, 14, 256, 1, 1, 0, true}};
    const Layer odd[] = {
        {3, 24, 9, 11, 40, 3, 1, 1}, {2, 128, 7, 7, 520, 3, 1, 1}, {9, 512, 7, 7, 512, 3, 1, 1}, {1, 64, 3, 250, 64, 3, 1, 2},
        {2, 64, 16, 16, 64, 5, 1, 0}, {5, 136, 20, 31, 200, 3, 1, 1}, {3, 40, 50, 60, 200, 7, 1, 3}, {30, 200, 13, 13, 72, 3, 1, 0},
        {17, 64, 33, 17, 72, 5, 1, 2}, {1, 8, 1, 8, 8, 3, 1, 1}, {3, 1024, 14, 14, 256, 1, 1, 0}, {2, 128, 28, 28, 192, 1, 1, 0},
        {2, 72, 13, 17, 136, 3, 2, 1}, {24, 320, 9, 9, 320, 3, 1, 1}, {2, 64, 12, 10, 72, 1, 2, 0}};
    int bad = 0;
    if (timed) {
        for (const Layer &l : sweep) bad += l.bf16 ? layer<__nv_bfloat16>(l, true, top) : layer<__half>(l, true, top);
    } else {
        for (Layer l : odd)
            for (int k = 0; k < 4; ++k) l.nchw = k & 1, l.bf16 = k & 2, bad += l.bf16 ? layer<__nv_bfloat16>(l, false, top) : layer<__half>(l, false, top);
    }
    printf(bad ? "%d WRONG\n" : "PASS\n", bad);
    return bad != 0;
}
