// Dense GEMM for sm_90a: c[M,N] = a[M,K] b[K,N] in bf16 or fp16 with fp32 sums; a and b row-major or column-major.
//
// kernel.cuh holds the kernel as a template, launch.cuh starts it. Here are the configurations that are built, and the choice among them: the
// smallest estimate of the time, from each one's time for a step of 64 k and for a tile's end, fitted to measurements on an H200. Tiles are
// counted in waves of the clusters that the device holds, so that a shape takes the tile that fills its last wave best.
#include <cmath>

#include "klineage.h"
#include "launch.cuh"

// Plans that were not measured yet, off: GEMM_TURNED_160, GEMM_SHARED_64, GEMM_FEW_ROWS, GEMM_NARROW_BLOCKS and GEMM_LINES; see NOTES.md. Their times
// are guesses, such that the shapes that they are for choose them. GEMM_ONLY=i leaves plan i of each list alone, to time it.
#ifndef GEMM_LINES
#define GEMM_LINES 0
#endif

namespace {
using gemm::Config;
using gemm::Problem;
using gemm::Walk;

// A configuration and its measured times in microseconds: a step of 64 k, and the end of a tile. A step takes `misaligned` times as long for
// each of a and b whose rows do not all start at multiples of 128 bytes.
struct Plan {
    int rows, columns, split, least_k;  // rows and columns of C that a cluster computes
    float step, tile, misaligned;
    bool deferred;
    int (*resident)();
    const char *(*start)(const Problem &, const Walk &);
};

template <class C>
constexpr Plan plan(float step, float tile, float misaligned) {
    return {C::kTurned ? C::kN * C::kShareA : C::kM * C::kShareB, C::kTurned ? C::kM * C::kShareB : C::kN * C::kShareA, C::kSplit,
            C::kSplit > 1 ? C::kSplit * 2 * gemm::kTileK : C::kDefer ? (C::kDefer + 1) * gemm::kTileK : 1,
            step, tile, misaligned, C::kDefer > 0, gemm::resident_clusters<C>, gemm::start<C>};
}

constexpr float kMegabytesPerMicrosecond = 4.0f;  // of the device's memory
constexpr int kLine = 64;                         // elements of 128 bytes

// Estimated microseconds of a plan, infinite where it cannot run. Where memory decides, the shorter computation wins.
float estimate(const Plan &plan, const Problem &p) {
    const int held = plan.resident();
    if (held < 1 || p.k < plan.least_k) return INFINITY;
    const int64_t clusters = int64_t((p.m + plan.rows - 1) / plan.rows) * ((p.n + plan.columns - 1) / plan.columns);
    const int64_t waves = (clusters + held - 1) / held;
    const int steps = ((p.k + gemm::kTileK - 1) / gemm::kTileK + plan.split - 1) / plan.split;
    const float slower = (p.lda % kLine ? plan.misaligned : 1.0f) * (p.ldb % kLine ? plan.misaligned : 1.0f);
    const float computing = float(waves) * (float(steps) * plan.step * slower + plan.tile);
    const float elements = float(p.m) * p.k + float(p.k) * p.n + float(p.m) * p.n;
    return fmaxf(computing, elements * 2e-6f / kMegabytesPerMicrosecond) + 0.1f * computing;
}

// A box of misaligned rows reads parts of lines, so that 256 bytes at once would fetch lines that others fetch again.
Walk walk_of(const Plan &plan, const Problem &p) {
    Walk walk;
    if ((plan.deferred || GEMM_LINES) && (p.lda % kLine || p.ldb % kLine)) walk.promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    return walk;
}

template <int kCount>
const char *start_best(const Problem &p, const Plan (&plans)[kCount]) {
    const Plan *best = nullptr;
    float least = INFINITY;
    for (const Plan &plan : plans) {
#ifdef GEMM_ONLY
        if (&plan != &plans[GEMM_ONLY]) continue;
#endif
        const float time = estimate(plan, p);
        if (time < least) best = &plan, least = time;
    }
    return best ? best->start(p, walk_of(*best, p)) : "gemm: the device holds no cluster of any size that is built";
}

// What is built for a type and a layout: more tiles where both operands are row-major, as most callers have them.
template <class T, int kA, int kB>
const char *run_best(const Problem &p) {
    static constexpr Plan plans[] = {
        plan<Config<T, 128, 256, 2, 1, 2, 1, 1, kA, kB>>(0.644f, 0.52f, 1.0f),
        plan<Config<T, 128, 128, 2, 1, 2, 1, 0, kA, kB>>(0.37f, 0.6f, 1.2f),
        plan<Config<T, 64, 128, 1, 1, 1, 1, 0, kA, kB>>(0.205f, 0.75f, 1.6f),
        plan<Config<T, 64, 128, 1, 1, 1, 4, 0, kA, kB>>(0.32f, 3.5f, 1.1f),
    };
    return start_best(p, plans);
}
template <class T>
const char *run_rows(const Problem &p) {
    static constexpr Plan plans[] = {
        plan<Config<T, 128, 256, 2, 1, 2, 1, 1>>(0.644f, 0.52f, 1.0f),
        plan<Config<T, 128, 224, 2, 1, 2, 1, 1>>(0.578f, 0.42f, 1.08f),
        plan<Config<T, 128, 192, 2, 1, 2, 1, 1>>(0.489f, 0.42f, 1.08f),
        plan<Config<T, 128, 160, 2, 1, 2, 1, 1>>(0.417f, 1.0f, 1.2f),
        plan<Config<T, 256, 128, 2, 1, 2, 1, 1>>(0.644f, 0.94f, 1.1f),
        plan<Config<T, 128, 192, 2, 2, 2, 1, 1>>(0.49f, 0.5f, 1.0f),
        plan<Config<T, 128, 128, 2, 2, 2, 1, 0>>(0.36f, 1.2f, 1.05f),
        plan<Config<T, 128, 128, 2, 1, 1, 1, 0>>(0.36f, 0.6f, 1.2f),
        plan<Config<T, 64, 128, 1, 1, 1, 1, 0>>(0.205f, 0.75f, 1.6f),
        plan<Config<T, 64, 64, 1, 1, 1, 1, 0, 0, 1, 2>>(0.24f, 0.42f, 1.6f),
        plan<Config<T, 64, 128, 1, 1, 1, 2, 0>>(0.312f, 1.85f, 1.1f),
        plan<Config<T, 64, 256, 1, 1, 1, 4, 0>>(0.563f, 3.67f, 1.3f),
#if GEMM_TURNED_160
        plan<gemm::Turned<T, 128, 160, GEMM_TURNED_160, 2>>(0.41f, 1.3f, 1.2f),
#endif
#if GEMM_SHARED_64
        plan<Config<T, 128, 64, GEMM_SHARED_64, 2, 1, 1, 0>>(0.205f, 0.8f, 1.2f),
#endif
#if GEMM_FEW_ROWS == 1
        plan<Config<T, 64, 192, 1, 1, 1, 4, 0>>(0.55f, 3.4f, 1.3f),
#elif GEMM_FEW_ROWS == 2
        plan<Config<T, 64, 64, 1, 1, 1, 2, 0>>(0.26f, 1.6f, 1.1f),
#endif
#if GEMM_NARROW_BLOCKS >= 32
        plan<Config<T, 64, 32, 1, 1, 1, 1, 0>>(0.2f, 0.4f, 1.6f),
#endif
    };
    return start_best(p, plans);
}

template <class T>
const char *run_layout(const Problem &p, int major_a, int major_b) {
    if (major_a == 0) return major_b ? run_rows<T>(p) : run_best<T, 0, 0>(p);
    return major_b ? run_best<T, 1, 1>(p) : run_best<T, 1, 0>(p);
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
    why = a.dtype == KLINEAGE_FLOAT16 ? run_layout<__half>(p, major_a, major_b) : run_layout<__nv_bfloat16>(p, major_a, major_b);
    KLINEAGE_REQUIRE(call, why == nullptr, why);
    return 0;
}
