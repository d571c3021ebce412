// The choice of expert.cu for an entry whose roles are those of fused.cuh: the same estimate and the same constants.
#pragma once

#include "entries.cuh"

namespace gemm {

// A tile of products with the times in microseconds of the plain product (expert.cu): a step of 64 k, and a tile's end. A step takes `misaligned`
// times as long for each of a and b whose rows do not all start at multiples of 128 bytes.
template <class E>
struct Plan {
    int rows, columns, split, least_k;  // rows and columns of C that a cluster computes
    float step, end, misaligned;
    bool deferred;
    int (*held)();
    const char *(*start)(const Problem &, const typename E::Operands &, CUtensorMapL2promotion);
};

template <class E, class C>
constexpr Plan<E> plan(float step, float end, float misaligned) {
    return {C::kM * C::kShareB, C::kN * C::kShareA, C::kSplit,
            C::kSplit > 1 ? C::kSplit * 2 * kTileK : C::kDefer ? (C::kDefer + 1) * kTileK : 1,
            step, end, misaligned, C::kDefer > 0, held_clusters<C, C, E>, E::template start_with<C, C>};
}

constexpr float kMegabytesPerMicrosecond = 4.0f;  // of the device's memory
constexpr int kLine = 64;                         // elements of 128 bytes

// Estimated microseconds of a plan, infinite where it cannot run. Where memory decides, the shorter computation wins.
template <class E>
float estimate(const Plan<E> &plan, const Problem &p) {
    const int held = p.k < plan.least_k ? 0 : plan.held();
    if (held < 1) return INFINITY;
    const int64_t clusters = int64_t((p.m + plan.rows - 1) / plan.rows) * ((p.n + plan.columns - 1) / plan.columns);
    const int64_t waves = (clusters + held - 1) / held;
    const int steps = ((p.k + kTileK - 1) / kTileK + plan.split - 1) / plan.split;
    const float slower = (p.lda % kLine ? plan.misaligned : 1.0f) * (p.ldb % kLine ? plan.misaligned : 1.0f);
    const float computing = float(waves) * (float(steps) * plan.step * slower + plan.end);
    const float elements = float(p.m) * p.k + float(p.k) * p.n + float(p.m) * p.n;
    return fmaxf(computing, elements * 2e-6f / kMegabytesPerMicrosecond) + 0.1f * computing;
}

// Starts the plan of the smallest estimate. A box of misaligned rows reads parts of lines, so that 256 bytes at once would fetch lines that
// others fetch again.
template <class E, int kCount>
const char *start_best(const Plan<E> (&plans)[kCount], const Problem &p, const typename E::Operands &more) {
    const Plan<E> *best = nullptr;
    float least = INFINITY;
    for (const Plan<E> &one : plans) {
        const float time = estimate(one, p);
        if (time < least) best = &one, least = time;
    }
    if (!best) return "gemm: the device holds no cluster of any size that is built";
    const bool lines = best->deferred && (p.lda % kLine || p.ldb % kLine);
    return best->start(p, more, lines ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

}  // namespace gemm
