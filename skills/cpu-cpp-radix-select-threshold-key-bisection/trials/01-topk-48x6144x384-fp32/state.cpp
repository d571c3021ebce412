// Top-k of every row of x[R,C] (fp32, contiguous): exact, largest first, among ties the first.
//
// Per row: k times the largest of what is left. Floor, R 64, C 4096, k 512: 1 MB read and 0.4 MB written = 0.05 ms at
// 30 GB/s. Bound by instructions, not by memory.
//
// Gains: time without the technique over time with it, all else equal, on one core of a 2-core EPYC Zen 4 (3.65 GHz, both
// cores together 220 GFLOPS of fp32 FMA and 30 GB/s of reads) with the last-level cache flushed before every call.
//  1. threads: rows shared out over the cores                                                            1.8 (two cores)
//
// Preconditions: contiguous tensors.
#include "klineage.h"

#include <cstdint>

namespace {

void select_row(const float *row, int64_t n, int64_t k, float *values, int64_t *indices) {
    for (int64_t j = 0; j < k; ++j) {
        int64_t best = -1;
        for (int64_t i = 0; i < n; ++i) {
            // Taken already: what is larger than the last one taken, or equal to it and not after it.
            if (j > 0 && (row[i] > values[j - 1] || (row[i] == values[j - 1] && i <= indices[j - 1]))) continue;
            if (best < 0 || row[i] > row[best]) best = i;
        }
        values[j] = row[best];
        indices[j] = best;
    }
}

bool is_contiguous(const klineage_tensor &t) {
    int64_t expected = 1;
    for (int d = t.num_dims - 1; d >= 0; expected *= t.shape[d--])
        if (t.shape[d] > 1 && t.stride[d] != expected) return false;
    return true;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 1 && call->num_outputs == 2, "topk: expects input x, outputs values, indices");
    const klineage_tensor &x = call->inputs[0], &values = call->outputs[0], &indices = call->outputs[1];
    KLINEAGE_REQUIRE(call, x.dtype == KLINEAGE_FLOAT32 && values.dtype == KLINEAGE_FLOAT32 && indices.dtype == KLINEAGE_INT64,
                     "topk: x and values must be fp32, indices int64");
    KLINEAGE_REQUIRE(call, x.num_dims == 2 && values.num_dims == 2 && indices.num_dims == 2, "topk: tensors must be 2-d");
    const int64_t R = x.shape[0], C = x.shape[1], k = values.shape[1];
    KLINEAGE_REQUIRE(call, values.shape[0] == R && indices.shape[0] == R && indices.shape[1] == k && k <= C,
                     "topk: shapes do not match");
    KLINEAGE_REQUIRE(call, C < INT32_MAX - 16, "topk: a row must have fewer than 2^31 - 17 elements");
    if (R == 0 || k == 0) return 0;
    KLINEAGE_REQUIRE(call, is_contiguous(x) && is_contiguous(values) && is_contiguous(indices),
                     "topk: tensors must be contiguous");
    const float *xp = static_cast<const float *>(x.data);
    float *vp = static_cast<float *>(values.data);
    int64_t *ip = static_cast<int64_t *>(indices.data);

#pragma omp parallel for schedule(static) if (R > 1)
    for (int64_t r = 0; r < R; ++r) select_row(xp + r * C, C, k, vp + r * k, ip + r * k);
    return 0;
}
