// Dense GEMM for sm_90a: c[M,N] = a[M,K] b[K,N] in bf16 or fp16 with fp32 sums; a and b row-major or column-major.
//
// kernel.cuh holds the kernel as a template, launch.cuh starts it. Here are the configurations that are built, and the choice among them: the
// smallest estimate of the time, from each one's time for a step of 64 k and for a tile's end, measured on an H200. Tiles are
// counted in waves, so that a shape takes the tile that fills its last wave best.
#include "klineage.h"
#include "launch.cuh"

namespace {
using gemm::Config;
using gemm::Problem;
using gemm::Walk;

// A configuration and its measured times in microseconds: a step of 64 k, and the end of a tile.
struct Plan {
    int rows, columns, cluster, split, ctas_per_sm, least_k;  // rows and columns of C that a cluster computes
    float step, tile;
    const char *(*start)(const Problem &, const Walk &);
};

template <class C>
constexpr Plan plan(float step, float tile) {
    return {C::kM * C::kShareB, C::kN * C::kShareA, C::kCluster, C::kSplit, C::kCtasPerSm,
            C::kSplit > 1 ? C::kSplit * 2 * gemm::kTileK : C::kDefer ? (C::kDefer + 1) * gemm::kTileK : 1, step, tile, gemm::start<C>};
}

constexpr float kMegabytesPerMicrosecond = 4.0f;  // of the device's memory

// Estimated microseconds of a plan on a device of `sms` multiprocessors. Where memory decides, the shorter computation wins.
float estimate(const Plan &plan, const Problem &p, int sms) {
    const int64_t clusters = int64_t((p.m + plan.rows - 1) / plan.rows) * ((p.n + plan.columns - 1) / plan.columns);
    const int64_t held = sms * plan.ctas_per_sm / plan.cluster, waves = (clusters + held - 1) / held;
    const int steps = ((p.k + gemm::kTileK - 1) / gemm::kTileK + plan.split - 1) / plan.split;
    const float computing = float(waves) * (float(steps) * plan.step + plan.tile);
    const float elements = float(p.m) * p.k + float(p.k) * p.n + float(p.m) * p.n;
    return fmaxf(computing, elements * 2e-6f / kMegabytesPerMicrosecond) + 0.1f * computing;
}

template <int kCount>
const char *start_best(const Problem &p, int sms, const Plan (&plans)[kCount]) {
    const Plan *best = nullptr;
    for (const Plan &plan : plans)
        if (p.k >= plan.least_k && (best == nullptr || estimate(plan, p, sms) < estimate(*best, p, sms))) best = &plan;
    return best->start(p, Walk{});
}

// What is built for a type and a layout: more tiles where both operands are row-major, as most callers have them.
template <class T, int kA, int kB>
const char *run_best(const Problem &p, int sms) {
    static constexpr Plan plans[] = {
        plan<Config<T, 128, 256, 2, 1, 2, 1, 1, kA, kB>>(0.70f, 0.7f),
        plan<Config<T, 128, 128, 2, 1, 2, 1, 0, kA, kB>>(0.42f, 1.0f),
        plan<Config<T, 64, 128, 1, 1, 1, 1, 0, kA, kB>>(0.25f, 0.8f),
    };
    return start_best(p, sms, plans);
}
template <class T>
const char *run_rows(const Problem &p, int sms) {
    static constexpr Plan plans[] = {
        plan<Config<T, 128, 256, 2, 1, 2, 1, 1>>(0.70f, 0.7f),
        plan<Config<T, 128, 224, 2, 1, 2, 1, 1>>(0.63f, 0.7f),
        plan<Config<T, 128, 192, 2, 1, 2, 1, 1>>(0.54f, 0.7f),
        plan<Config<T, 128, 160, 2, 1, 2, 1, 1>>(0.48f, 0.7f),
        plan<Config<T, 128, 128, 2, 1, 2, 1, 0>>(0.42f, 1.0f),
        plan<Config<T, 128, 128, 2, 1, 1, 1, 0>>(0.43f, 1.0f),
        plan<Config<T, 64, 256, 1, 1, 1, 1, 0>>(0.42f, 1.0f),
        plan<Config<T, 64, 128, 1, 1, 1, 1, 0>>(0.25f, 0.8f),
        plan<Config<T, 64, 64, 1, 1, 1, 1, 0, 0, 1, 2>>(0.27f, 0.6f),
    };
    return start_best(p, sms, plans);
}

template <class T>
const char *run_layout(const Problem &p, int major_a, int major_b, int sms) {
    if (major_a == 0) return major_b ? run_rows<T>(p, sms) : run_best<T, 0, 0>(p, sms);
    return major_b ? run_best<T, 1, 1>(p, sms) : run_best<T, 1, 0>(p, sms);
}

// The stride of a matrix whose other stride is 1, or 0. Inner: the dimension that has stride 1.
int64_t leading(const klineage_tensor &t, int inner) {
    const int64_t stride = t.stride[1 - inner];
    return t.stride[inner] == 1 && stride >= t.shape[inner] ? stride : 0;
}

// Why this call is refused, or nullptr.
const char *refusal(const klineage_call *call) {
    if (call->num_inputs != 2 || call->num_outputs != 1) return "gemm reads a and b and writes c";
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    for (const klineage_tensor *t : {&a, &b, &c}) {
        if (t->dtype != a.dtype || (t->dtype != KLINEAGE_BFLOAT16 && t->dtype != KLINEAGE_FLOAT16)) return "gemm: bf16 or fp16 matrices only";
        if (t->num_dims != 2) return "gemm: matrices only";
        const int64_t stride = leading(*t, 1) ? leading(*t, 1) : t == &c ? 0 : leading(*t, 0);
        if (stride == 0) return "gemm: a and b must be row-major or column-major, c row-major";
        if (stride % 8 || reinterpret_cast<uintptr_t>(t->data) % 16) return "gemm: rows must start at multiples of 16 bytes";
        if (t->shape[0] > 1 << 24 || t->shape[1] > 1 << 24) return "gemm: at most 2^24 rows and columns";
    }
    if (b.shape[0] != a.shape[1] || c.shape[0] != a.shape[0] || c.shape[1] != b.shape[1]) return "gemm: shapes do not match";
    if (c.shape[1] % 8) return "gemm: N must be a multiple of 8";
    return nullptr;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    const char *why = refusal(call);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    const klineage_tensor &a = call->inputs[0], &b = call->inputs[1], &c = call->outputs[0];
    const int major_a = leading(a, 1) ? 0 : 1, major_b = leading(b, 1) ? 1 : 0;
    const Problem p = {a.data, b.data, c.data, int(a.shape[0]), int(b.shape[1]), int(a.shape[1]), leading(a, 1 - major_a),
                       leading(b, major_b), leading(c, 1), static_cast<cudaStream_t>(call->stream)};
    int device = 0, sms = 0;
    cudaGetDevice(&device);
    KLINEAGE_REQUIRE(call, cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) == cudaSuccess, "gemm: no device");
    why = a.dtype == KLINEAGE_FLOAT16 ? run_layout<__half>(p, major_a, major_b, sms) : run_layout<__nv_bfloat16>(p, major_a, major_b, sms);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    return 0;
}
