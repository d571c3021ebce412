// The rows of the suite on a CPU, in fp32: one loop over rows for all threads, sums in fp64. Each entry is one operator.
#include <cmath>
#include <cstdint>
#include <vector>

#include "klineage.h"

namespace {

const float *in(const klineage_call *call, int i) { return static_cast<const float *>(call->inputs[i].data); }
float *inout(const klineage_call *call, int i) { return static_cast<float *>(call->inputs[i].data); }
float *out(const klineage_call *call) { return static_cast<float *>(call->outputs[0].data); }
int64_t size(const klineage_call *call, int tensor, int axis) { return call->inputs[tensor].shape[axis]; }

double root_of_mean_square(const float *row, int64_t count, double eps) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < count; ++j) sum += double(row[j]) * row[j];
    return 1 / std::sqrt(sum / count + eps);
}

// c[m,n] = bias[m,n] + a[m,k] b[k,n], row by row; bias may be null.
void row_product(const float *a, const float *b, const float *bias, float *c, int64_t depth, int64_t columns) {
    for (int64_t j = 0; j < columns; ++j) c[j] = bias ? bias[j] : 0;
    for (int64_t k = 0; k < depth; ++k) {
        const float value = a[k], *other = b + k * columns;
#pragma omp simd
        for (int64_t j = 0; j < columns; ++j) c[j] += value * other[j];
    }
}

bool is_float(const klineage_call *call) {
    for (int i = 0; i < call->num_inputs; ++i)
        if (call->inputs[i].dtype != KLINEAGE_FLOAT32 && call->inputs[i].dtype != KLINEAGE_INT32) return false;
    return true;
}

}  // namespace

extern "C" int rms_norm(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, is_float(call), "fp32 only");
    const int64_t rows = size(call, 0, 0), columns = size(call, 0, 1);
    const double eps = klineage_scalar_value(call, "eps", 1e-5);
#pragma omp parallel for
    for (int64_t i = 0; i < rows; ++i) {
        const float *x = in(call, 0) + i * columns, scale = float(root_of_mean_square(x, columns, eps));
        for (int64_t j = 0; j < columns; ++j) out(call)[i * columns + j] = x[j] * scale * in(call, 1)[j];
    }
    return 0;
}

extern "C" int fused_add_rms_norm(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, is_float(call), "fp32 only");
    const int64_t rows = size(call, 0, 0), columns = size(call, 0, 1);
    const double eps = klineage_scalar_value(call, "eps", 1e-5);
#pragma omp parallel for
    for (int64_t i = 0; i < rows; ++i) {
        float *x = inout(call, 0) + i * columns, *residual = inout(call, 1) + i * columns;
        for (int64_t j = 0; j < columns; ++j) residual[j] += x[j];
        const float scale = float(root_of_mean_square(residual, columns, eps));
        for (int64_t j = 0; j < columns; ++j) x[j] = residual[j] * scale * in(call, 2)[j];
    }
    return 0;
}

extern "C" int layer_norm(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, is_float(call), "fp32 only");
    const int64_t rows = size(call, 0, 0), columns = size(call, 0, 1);
    const double eps = klineage_scalar_value(call, "eps", 1e-5);
#pragma omp parallel for
    for (int64_t i = 0; i < rows; ++i) {
        const float *x = in(call, 0) + i * columns;
        double sum = 0, squares = 0;
        for (int64_t j = 0; j < columns; ++j) sum += x[j];
        const double mean = sum / columns;
        for (int64_t j = 0; j < columns; ++j) squares += (x[j] - mean) * (x[j] - mean);
        const double scale = 1 / std::sqrt(squares / columns + eps);
        for (int64_t j = 0; j < columns; ++j)
            out(call)[i * columns + j] = float((x[j] - mean) * scale) * in(call, 1)[j] + in(call, 2)[j];
    }
    return 0;
}

extern "C" int softmax(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, is_float(call), "fp32 only");
    const int64_t rows = size(call, 0, 0), columns = size(call, 0, 1);
#pragma omp parallel for
    for (int64_t i = 0; i < rows; ++i) {
        const float *x = in(call, 0) + i * columns;
        float *y = out(call) + i * columns, top = x[0];
        double sum = 0;
        for (int64_t j = 1; j < columns; ++j) top = x[j] > top ? x[j] : top;
        for (int64_t j = 0; j < columns; ++j) sum += y[j] = std::exp(x[j] - top);
        for (int64_t j = 0; j < columns; ++j) y[j] = float(y[j] / sum);
    }
    return 0;
}

extern "C" int addmm(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, is_float(call), "fp32 only");
    const int64_t rows = size(call, 1, 0), depth = size(call, 1, 1), columns = size(call, 2, 1);
#pragma omp parallel for
    for (int64_t i = 0; i < rows; ++i)
        row_product(in(call, 1) + i * depth, in(call, 2), in(call, 0) + i * columns, out(call) + i * columns, depth, columns);
    return 0;
}

extern "C" int bmm(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, is_float(call), "fp32 only");
    const int64_t rows = size(call, 0, 1), depth = size(call, 0, 2), columns = size(call, 1, 2);
#pragma omp parallel for
    for (int64_t i = 0; i < size(call, 0, 0) * rows; ++i)
        row_product(in(call, 0) + i * depth, in(call, 1) + i / rows * depth * columns, nullptr, out(call) + i * columns, depth, columns);
    return 0;
}

extern "C" int grouped_mm(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, is_float(call), "fp32 only");
    const int64_t rows = size(call, 0, 0), depth = size(call, 0, 1), columns = size(call, 1, 2);
    const int32_t *ends = static_cast<const int32_t *>(call->inputs[2].data);
#pragma omp parallel for
    for (int64_t i = 0; i < rows; ++i) {
        int64_t group = 0;
        while (group + 1 < size(call, 2, 0) && ends[group] <= i) ++group;
        row_product(in(call, 0) + i * depth, in(call, 1) + group * depth * columns, nullptr, out(call) + i * columns, depth, columns);
    }
    return 0;
}

// A query row at a time; query head h reads key head h / (H / G).
extern "C" int attention(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, is_float(call), "fp32 only");
    const int64_t batch = size(call, 0, 0), heads = size(call, 0, 1), tokens = size(call, 0, 2), width = size(call, 0, 3), key_heads = size(call, 1, 1);
    const bool causal = klineage_scalar_value(call, "causal", 0) != 0;
#pragma omp parallel for
    for (int64_t i = 0; i < batch * heads * tokens; ++i) {
        const int64_t token = i % tokens, head = i / tokens % heads, keys = causal ? token + 1 : tokens;
        const int64_t first = (i / tokens / heads * key_heads + head / (heads / key_heads)) * tokens * width;
        const float *q = in(call, 0) + i * width, *k = in(call, 1) + first, *v = in(call, 2) + first;
        std::vector<double> scores(keys), sums(width, 0.0);
        double top = -INFINITY, total = 0;
        for (int64_t j = 0; j < keys; ++j) {
            double score = 0;
            for (int64_t d = 0; d < width; ++d) score += double(q[d]) * k[j * width + d];
            scores[j] = score / std::sqrt(double(width)), top = scores[j] > top ? scores[j] : top;
        }
        for (int64_t j = 0; j < keys; ++j) {
            const double power = std::exp(scores[j] - top);
            total += power;
            for (int64_t d = 0; d < width; ++d) sums[d] += power * v[j * width + d];
        }
        for (int64_t d = 0; d < width; ++d) out(call)[i * width + d] = float(sums[d] / total);
    }
    return 0;
}
