// The softmax of a block of scores: masks, references, weights, sums.
#pragma once
#include "klineage/sm90/v1/ldmatrix.cuh"
#include "klineage/sm90/v1/wgmma.cuh"
#include "walk.cuh"

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ half2 as_half2(uint32_t x) { return *reinterpret_cast<const half2 *>(&x); }

// A thread's share of two score rows (lane / 4 and lane / 4 + 8): their references (base-2 units) and sums.
template <class T>
struct Softmax {
    static constexpr int kScores = T::kKeys / 2;
    float top[2], total[2], shrink[2];

    __device__ __forceinline__ void reset() { top[0] = top[1] = -1e30f, total[0] = total[1] = 0.f; }

    // Packed weights against the present references. The sums are taken over the rounded weights (fp16: two at a time), so that the rounding of
    // a dominant key cancels in the division, unless kLooseSums takes them as they are. False if some row grew so far that its weights may overflow.
    __device__ __forceinline__ bool weigh(const float (&score)[kScores], uint32_t (&p)[kScores / 8][4], float (&sum)[2], float scale) const {
        sum[0] = sum[1] = 0.f;
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
            const float x = exp2_fast(__fmaf_rn(score[2 * i], scale, -top[i % 2])), y = exp2_fast(__fmaf_rn(score[2 * i + 1], scale, -top[i % 2]));
            p[i / 4][i % 4] = klineage::sm90::pack<typename T::Element>(x, y);
            if constexpr (T::kLooseSums) {
                sum[i % 2] += x + y;
            } else if constexpr (T::kBf16) {
                sum[i % 2] += __uint_as_float(p[i / 4][i % 4] << 16) + __uint_as_float(p[i / 4][i % 4] & 0xffff0000u);
            } else if (i % 4 >= 2) {
                const half2 pair = __hadd2(as_half2(p[i / 4][i % 4]), as_half2(p[i / 4][i % 4 - 2]));
                const float2 added = __half22float2(pair);
                sum[i % 2] += added.x + added.y;
            }
        }
        return sum[0] <= T::kLimit && sum[1] <= T::kLimit;  // false for infinity and NaN too
    }

    // The row maxima, reduced over the quad of lanes that shares the rows.
    __device__ __forceinline__ void raise(const float (&score)[kScores], float scale) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float high = -INFINITY;
#pragma unroll
            for (int j = 0; j < kScores / 4; ++j) high = fmaxf(high, fmaxf(score[4 * j + 2 * i], score[4 * j + 2 * i + 1]));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            const float raised = fmaxf(top[i], fmaxf(high, __shfl_xor_sync(~0u, high, 2)) * scale);
            shrink[i] = exp2_fast(top[i] - raised);
            top[i] = raised;
            total[i] *= shrink[i];
        }
    }

    // One block. `exact` takes the maxima at once, else only when they must be raised. True when earlier outputs must shrink.
    __device__ __forceinline__ bool add(const float (&score)[kScores], uint32_t (&p)[kScores / 8][4], float scale, bool exact) {
        float sum[2];
        if (!exact) exact = __any_sync(~0u, !weigh(score, p, sum, scale));
        if (exact) {
            raise(score, scale);
            weigh(score, p, sum, scale);
        }
        total[0] += sum[0], total[1] += sum[1];
        return exact;
    }

    // A row without any key gives zeros.
    __device__ __forceinline__ float inverse(int i) const {
        float sum = total[i] + __shfl_xor_sync(~0u, total[i], 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        return sum == 0.f ? 0.f : 1.f / sum;
    }
};

// Takes the keys that a query may not see out of a block: past the end, later than the query, before its window.
template <int kScores>
__device__ __forceinline__ void mask(float (&score)[kScores], const Problem &p, int row, int first_key) {
    int low[2], high[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int query = row + 8 * i;
        high[i] = (p.causal ? min(p.key_tokens, query + 1) : p.key_tokens) - first_key;
        low[i] = (p.window > 0 ? query + 1 - p.window : 0) - first_key;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
        const int key = i / 4 * 8 + i % 2;
        if (key >= high[i / 2 % 2] || key < low[i / 2 % 2]) score[i] = -INFINITY;
    }
}
