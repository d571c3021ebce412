// Times and exactness of every plan of the top-k expert, from which the table `kStreamed` was fitted: whole rows held (old), the
// choice of run() (new), and each streamed plan. Built in this folder:
//     nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -I../../../pytest_klineage/surfaces/include -o bench bench.cu
//     ./bench [exact|time|all] [part of a line's name]
// Microseconds: the median of 20 calls between events, each after a flush of 256 MB. Seven distributions are checked: every row on the
// GPU, some rows against a selection on the host too.
#include "expert.cu"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <string>
#include <thread>
#include <vector>

#define CHECK(call)                                                                                        \
    do {                                                                                                   \
        const cudaError_t e_ = (call);                                                                     \
        if (e_ != cudaSuccess) {                                                                           \
            std::printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e_));                         \
            std::exit(1);                                                                                  \
        }                                                                                                  \
    } while (0)

struct Shape {
    int rows, columns, k;
    bool timed;
};
const Shape kShapes[] = {
    {256, 262144, 2048, true}, {512, 65536, 256, true}, {128, 32768, 2048, true}, {64, 131072, 64, true},
    {256, 65536, 2048, true},  {256, 16384, 1024, true}, {4096, 1024, 8, true},   {64, 4096, 512, true},
    {8, 262144, 2048, true},   {64, 50001, 50, true},
    // Beyond the list: edges of the streamed path, and old measurements of NOTES.md.
    {7, 2048, 2048, false},    {5, 37, 20, false},       {9, 12345, 1, false},    {140, 20011, 2047, false},
    {1024, 16384, 2048, true}, {2048, 32768, 256, true}, {64, 262144, 2048, true}, {16, 131072, 1024, true},
};
enum Type { kF32, kBF16, kF16 };
const char *kTypeNames[] = {"fp32", "bf16", "fp16"};
enum Dist { kNormal, kEqual, kAscending, kDescending, kTwoClusters, kInfinities, kNans, kNumDists };
const char *kDistNames[] = {"normal", "equal", "ascending", "descending", "clusters", "inf", "nan"};

__host__ __device__ inline unsigned long long mix(unsigned long long z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

__device__ unsigned to_bits(int type, float f) {
    if (type == kF32) return __float_as_uint(f);
    if (type == kBF16) return __bfloat16_as_ushort(__float2bfloat16(f));
    return __half_as_ushort(__float2half(f));
}

__global__ void fill(unsigned char *x, int type, int dist, int rows, int columns, unsigned seed) {
    const long long all = (long long)rows * columns;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < all; i += (long long)gridDim.x * blockDim.x) {
        const int row = (int)(i / columns), c = (int)(i % columns);
        const unsigned long long h = mix(i ^ ((unsigned long long)seed << 40));
        const unsigned low = (unsigned)h, high = (unsigned)(h >> 32);
        const float u = (low + 0.5f) * 2.3283064e-10f, w = high * 2.3283064e-10f;
        const float normal = sqrtf(-2.f * logf(fminf(u, 0.9999999f))) * cospif(2.f * w);
        const unsigned pick = (unsigned)mix(h) ;
        const unsigned inf = type == kF32 ? 0x7f800000u : type == kBF16 ? 0x7f80u : 0x7c00u;
        const unsigned sign = type == kF32 ? 0x80000000u : 0x8000u;
        unsigned bits = to_bits(type, normal);
        if (dist == kEqual) bits = to_bits(type, 1.5f);
        if (dist == kAscending) bits = to_bits(type, c * 0.001f - 100.f);
        if (dist == kDescending) bits = to_bits(type, 100.f - c * 0.001f);
        if (dist == kTwoClusters) bits = to_bits(type, (pick & 1 ? 1.f : -1.f) + w * 1e-4f);
        if (dist == kInfinities) {
            const unsigned rare = row % 2 ? 4096 : 8;
            if (pick % rare == 0) bits = inf;
            if (pick % rare == 1) bits = inf | sign;
        }
        if (dist == kNans) {
            const unsigned payload = ((pick >> 8) & (inf ^ (sign - 1))) | 1;
            if (row % 4 == 3) bits = sign - 1;  // the largest NaN only
            else if (row % 4 == 2) bits = pick & 1 ? 0 : sign;  // +0 and -0
            else if (pick % (row % 4 ? 4096 : 16) == 0) bits = inf | payload | (pick & 0x80 ? sign : 0);
        }
        if (type == kF32) ((unsigned *)x)[i] = bits;
        else ((unsigned short *)x)[i] = (unsigned short)bits;
    }
}

// Per row: the sum of the mixed codes of the answer, or all ones when an index is repeated or out of range, or a value is
// not the one at its index.
__global__ void inspect(const unsigned char *x, const unsigned char *values, const long long *indices, int bytes, int columns,
                        int k, unsigned long long *sums) {
    __shared__ unsigned seen[262144 / 32];
    __shared__ unsigned long long sum;
    __shared__ int bad;
    for (int i = threadIdx.x; i < 262144 / 32; i += blockDim.x) seen[i] = 0;
    if (threadIdx.x == 0) sum = 0, bad = 0;
    __syncthreads();
    const long long row = blockIdx.x;
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        const long long at = indices[row * k + i];
        if (at < 0 || at >= columns) {
            bad = 1;
            continue;
        }
        if (atomicOr(&seen[at / 32], 1u << (at % 32)) >> (at % 32) & 1) bad = 1;
        unsigned value, there;
        if (bytes == 4) {
            value = ((const unsigned *)values)[row * k + i], there = ((const unsigned *)x)[row * columns + at];
        } else {
            value = ((const unsigned short *)values)[row * k + i], there = ((const unsigned short *)x)[row * columns + at];
        }
        if (value != there) bad = 1;
        atomicAdd(&sum, mix(value));
    }
    __syncthreads();
    if (threadIdx.x == 0) sums[row] = bad ? ~0ull : sum;
}

// The same sum of the k best of a row, from a sort by the order of the bits.
unsigned long long reference(const unsigned char *row, int bytes, int columns, int k) {
    const unsigned top = bytes == 4 ? 0x80000000u : 0x8000u;
    std::vector<unsigned> keys(columns);  // a larger float has a larger key
    for (int i = 0; i < columns; ++i) {
        const unsigned bits = bytes == 4 ? ((const unsigned *)row)[i] : ((const unsigned short *)row)[i];
        keys[i] = bits & top ? (top - 1) - (bits & (top - 1)) : bits | top;
    }
    if (k < columns) std::nth_element(keys.begin(), keys.begin() + k, keys.end(), std::greater<unsigned>());
    unsigned long long sum = 0;
    for (int i = 0; i < k; ++i) {
        const unsigned key = keys[i];
        sum += mix(key & top ? key & (top - 1) : top | ((top - 1) - key));
    }
    return sum;
}

struct Candidate {
    const char *name;
    int kind;  // 0: the old choice, 1: the new choice, 2: forced
    Plan plan;
};
const Candidate kCandidates[] = {
    {"old", 0, {0, 0}},
    {"new", 1, {0, 0}},
    {"s256", 2, {kStream256, 1}},
    {"s512", 2, {kStream512, 1}},
    {"s1024", 2, {kStream1024, 1}},
    {"c2", 2, {kStreamCluster512, 2}},
    {"c4", 2, {kStreamCluster512, 4}},
    {"c8", 2, {kStreamCluster512, 8}},
    {"c16", 2, {kStreamCluster512, 16}},
};

struct Buffers {
    unsigned char *x, *values;
    long long *indices;
    unsigned long long *sums;
    void *flush;
    cudaStream_t stream;
};

int select(const Candidate &candidate, const Buffers &b, const Shape &s, Type type, char *error) {
    const int dtypes[] = {KLINEAGE_FLOAT32, KLINEAGE_BFLOAT16, KLINEAGE_FLOAT16};
    klineage_tensor x{}, outputs[2]{};
    x.data = b.x, x.dtype = dtypes[type], x.num_dims = 2;
    x.shape[0] = s.rows, x.shape[1] = s.columns, x.stride[0] = s.columns, x.stride[1] = 1;
    outputs[0] = x, outputs[0].data = b.values, outputs[0].shape[1] = outputs[0].stride[0] = s.k;
    outputs[1] = outputs[0], outputs[1].data = b.indices, outputs[1].dtype = KLINEAGE_INT64;
    klineage_call call{};
    call.abi_version = KLINEAGE_ABI_VERSION, call.num_inputs = 1, call.num_outputs = 2;
    call.inputs = &x, call.outputs = outputs, call.stream = b.stream, call.error = error, call.error_capacity = 200;
    const int bytes = type == kF32 ? 4 : 2;
    const bool aligned = (long long)s.columns * bytes % 16 == 0;
    const int64_t vectors = ((int64_t)s.columns * bytes + 15) / 16 + !aligned;
    if (candidate.kind == 2) return run_plan(&call, &candidate.plan);
    Problem p{};
    p.columns = s.columns, p.k = s.k;
    if (candidate.kind == 1 || short_rows::takes(p, bytes, aligned, s.rows)) return run(&call);
    const Plan plan = choose_resident(s.rows, vectors);
    return run_plan(&call, &plan);
}

int main(int argc, char **argv) {
    const std::string mode = argc > 1 ? argv[1] : "all", filter = argc > 2 ? argv[2] : "";
    const size_t flush_bytes = 256u << 20;
    Buffers b{};
    CHECK(cudaMalloc(&b.x, size_t{1} << 28));
    CHECK(cudaMalloc(&b.values, size_t{1} << 25));
    CHECK(cudaMalloc(&b.indices, size_t{1} << 26));
    CHECK(cudaMalloc(&b.sums, 8 * 4096));
    CHECK(cudaMalloc(&b.flush, flush_bytes));
    CHECK(cudaStreamCreate(&b.stream));
    constexpr int kCalls = 20;
    cudaEvent_t events[kCalls][2];
    for (auto &pair : events)
        for (auto &event : pair) CHECK(cudaEventCreate(&event));
    int wrong_lines = 0;
    const auto started = std::chrono::steady_clock::now();
    for (const Shape &s : kShapes)
        for (const Type type : {kF32, kBF16, kF16}) {
            char name[80];
            std::snprintf(name, sizeof name, "%dx%d k%d %s", s.rows, s.columns, s.k, kTypeNames[type]);
            if (std::string(name).find(filter) == std::string::npos) continue;
            const int bytes = type == kF32 ? 4 : 2;
            std::string wrong;
            char error[200] = "";
            if (mode != "time")
                for (int dist = 0; dist < kNumDists; ++dist) {
                    fill<<<1056, 256, 0, b.stream>>>(b.x, type, dist, s.rows, s.columns, 7 + dist);
                    CHECK(cudaStreamSynchronize(b.stream));
                    // The host sorts some rows; the old choice stands for the others.
                    std::vector<int> sampled;
                    for (const int r : {0, 1, 2, 3, s.rows / 2, s.rows - 1})
                        if (r < s.rows && std::find(sampled.begin(), sampled.end(), r) == sampled.end()) sampled.push_back(r);
                    std::vector<unsigned long long> want(sampled.size()), first, sums(s.rows);
                    std::vector<std::vector<unsigned char>> rows(sampled.size());
                    std::vector<std::thread> threads;
                    for (size_t i = 0; i < sampled.size(); ++i) {
                        const size_t row_bytes = (size_t)s.columns * bytes;
                        rows[i].resize(row_bytes);
                        CHECK(cudaMemcpy(rows[i].data(), b.x + sampled[i] * row_bytes, row_bytes, cudaMemcpyDeviceToHost));
                        threads.emplace_back([&, i] { want[i] = reference(rows[i].data(), bytes, s.columns, s.k); });
                    }
                    for (auto &thread : threads) thread.join();
                    for (const Candidate &c : kCandidates) {
                        CHECK(cudaMemsetAsync(b.values, 0xa5, (size_t)s.rows * s.k * bytes, b.stream));
                        CHECK(cudaMemsetAsync(b.indices, 0xff, (size_t)s.rows * s.k * 8, b.stream));
                        bool ok = select(c, b, s, type, error) == 0;
                        if (!ok) {
                            cudaGetLastError();
                        } else {
                            inspect<<<s.rows, 256, 0, b.stream>>>(b.x, b.values, b.indices, bytes, s.columns, s.k, b.sums);
                            CHECK(cudaMemcpyAsync(sums.data(), b.sums, 8 * s.rows, cudaMemcpyDeviceToHost, b.stream));
                            CHECK(cudaStreamSynchronize(b.stream));
                            for (size_t i = 0; i < sampled.size(); ++i) ok = ok && sums[sampled[i]] == want[i];
                            if (c.kind == 0) first = sums;
                            ok = ok && sums == first;
                            for (const auto sum : sums) ok = ok && sum != ~0ull;
                        }
                        if (!ok) wrong += std::string(" ") + c.name + ":" + kDistNames[dist];
                    }
                }
            std::printf("%-24s", name);
            if (mode != "exact" && s.timed) {
                fill<<<1056, 256, 0, b.stream>>>(b.x, type, kNormal, s.rows, s.columns, 99);
                for (const Candidate &c : kCandidates) {
                    std::vector<float> times;
                    bool ok = true;
                    for (int i = -2; i < kCalls && ok; ++i) {
                        CHECK(cudaMemsetAsync(b.flush, i & 1, flush_bytes, b.stream));
                        if (i >= 0) CHECK(cudaEventRecord(events[i][0], b.stream));
                        ok = select(c, b, s, type, error) == 0;
                        if (i >= 0) CHECK(cudaEventRecord(events[i][1], b.stream));
                    }
                    CHECK(cudaStreamSynchronize(b.stream));
                    for (int i = 0; i < kCalls && ok; ++i) {
                        float ms = 0;
                        CHECK(cudaEventElapsedTime(&ms, events[i][0], events[i][1]));
                        times.push_back(ms * 1000);
                    }
                    std::sort(times.begin(), times.end());
                    if (ok) std::printf(" %s %.1f", c.name, (times[kCalls / 2 - 1] + times[kCalls / 2]) / 2);
                    else std::printf(" %s -", c.name), cudaGetLastError();
                }
            }
            if (mode != "time") std::printf(" %s%s", wrong.empty() ? "exact" : "WRONG", wrong.c_str());
            if (error[0]) std::printf(" (%s)", error);
            std::printf("\n");
            std::fflush(stdout);
            wrong_lines += !wrong.empty();
        }
    std::printf("%d lines WRONG, %.1f s\n", wrong_lines,
                std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
    return wrong_lines != 0;
}
