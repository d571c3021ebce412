// Attention o[B,H,S,D] = softmax(scale q k^T) v, fp32, contiguous, optionally causal.
//
// One query at a time: its scores against all keys, a softmax, its weighted values.
//
//  1. threads: blocks of 64 queries shared out over the cores
//  2. simd: scores with 16 key rows as lanes (gathered), weighted sum with neighbouring columns as lanes, vector maximum;
//     the instruction set is chosen at run time (AVX-512, AVX2 with FMA, plain)
//
// Preconditions: contiguous tensors of one shape, finite inputs, scale >= 0. Scratch per thread: the scores of a query,
// rounded up to a multiple of the lanes.
#include "klineage.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int kQueries = 64;     // query rows per task
constexpr int kLanes = 16;       // rows per panel of scores, columns per panel of the weighted sum

// The vector parts, one set for each instruction set.
struct Vectors {
    // sums[l] = sum over d of a[d] b[offset[l] + d] for kLanes lanes; always stores kLanes floats
    void (*scores)(int64_t depth, const float *a, const float *b, const int32_t *offset, float *sums);
    // the largest of exactly n floats
    float (*largest)(const float *x, int64_t n);
    // sums[c] = sum over r of a[r] b[r * ldb + c] for c < width; stores exactly width floats
    void (*weigh)(int64_t rows, const float *a, const float *b, int64_t ldb, int64_t width, float *sums);
};

// ---- AVX-512: one vector of 16 lanes

#define TARGET_AVX512 __attribute__((target("avx512f")))

TARGET_AVX512 void scores_avx512(int64_t depth, const float *a, const float *b, const int32_t *offset, float *sums) {
    const __m512i o = _mm512_loadu_si512(offset);
    __m512 acc = _mm512_setzero_ps();
    for (int64_t d = 0; d < depth; ++d)
        acc = _mm512_fmadd_ps(_mm512_set1_ps(a[d]), _mm512_i32gather_ps(o, b + d, 4), acc);
    _mm512_storeu_ps(sums, acc);
}

TARGET_AVX512 float largest_avx512(const float *x, int64_t n) {
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    __m512 m0 = lowest, m1 = lowest;
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        m0 = _mm512_max_ps(m0, _mm512_loadu_ps(x + i));
        m1 = _mm512_max_ps(m1, _mm512_loadu_ps(x + i + 16));
    }
    for (; i < n; i += 16) {
        const int64_t left = n - i < 16 ? n - i : 16;
        const __mmask16 m = static_cast<__mmask16>((1u << left) - 1u);
        m0 = _mm512_max_ps(m0, _mm512_mask_loadu_ps(lowest, m, x + i));
    }
    return _mm512_reduce_max_ps(_mm512_max_ps(m0, m1));
}

TARGET_AVX512 void weigh_avx512(int64_t rows, const float *a, const float *b, int64_t ldb, int64_t width, float *sums) {
    int64_t c = 0;
    for (; c + 64 <= width; c += 64) {
        __m512 acc0 = _mm512_setzero_ps(), acc1 = acc0, acc2 = acc0, acc3 = acc0;
        const float *row = b + c;
        for (int64_t r = 0; r < rows; ++r, row += ldb) {
            const __m512 w = _mm512_set1_ps(a[r]);
            acc0 = _mm512_fmadd_ps(w, _mm512_loadu_ps(row), acc0);
            acc1 = _mm512_fmadd_ps(w, _mm512_loadu_ps(row + 16), acc1);
            acc2 = _mm512_fmadd_ps(w, _mm512_loadu_ps(row + 32), acc2);
            acc3 = _mm512_fmadd_ps(w, _mm512_loadu_ps(row + 48), acc3);
        }
        _mm512_storeu_ps(sums + c, acc0);
        _mm512_storeu_ps(sums + c + 16, acc1);
        _mm512_storeu_ps(sums + c + 32, acc2);
        _mm512_storeu_ps(sums + c + 48, acc3);
    }
    for (; c < width; c += 16) {
        const int64_t left = width - c < 16 ? width - c : 16;
        const __mmask16 m = static_cast<__mmask16>((1u << left) - 1u);
        __m512 acc = _mm512_setzero_ps();
        for (int64_t r = 0; r < rows; ++r)
            acc = _mm512_fmadd_ps(_mm512_set1_ps(a[r]), _mm512_maskz_loadu_ps(m, b + r * ldb + c), acc);
        _mm512_mask_storeu_ps(sums + c, m, acc);
    }
}

// ---- AVX2 with FMA: two vectors of 8 lanes

#define TARGET_AVX2 __attribute__((target("avx2,fma")))

TARGET_AVX2 void scores_avx2(int64_t depth, const float *a, const float *b, const int32_t *offset, float *sums) {
    const __m256i o0 = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(offset));
    const __m256i o1 = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(offset + 8));
    __m256 acc0 = _mm256_setzero_ps(), acc1 = acc0;
    for (int64_t d = 0; d < depth; ++d) {
        const __m256 w = _mm256_set1_ps(a[d]);
        acc0 = _mm256_fmadd_ps(w, _mm256_i32gather_ps(b + d, o0, 4), acc0);
        acc1 = _mm256_fmadd_ps(w, _mm256_i32gather_ps(b + d, o1, 4), acc1);
    }
    _mm256_storeu_ps(sums, acc0);
    _mm256_storeu_ps(sums + 8, acc1);
}

TARGET_AVX2 float largest_avx2(const float *x, int64_t n) {
    __m256 m0 = _mm256_set1_ps(-INFINITY), m1 = m0;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        m0 = _mm256_max_ps(m0, _mm256_loadu_ps(x + i));
        m1 = _mm256_max_ps(m1, _mm256_loadu_ps(x + i + 8));
    }
    float lanes[8];
    _mm256_storeu_ps(lanes, _mm256_max_ps(m0, m1));
    float result = lanes[0];
    for (int l = 1; l < 8; ++l) result = result < lanes[l] ? lanes[l] : result;
    for (; i < n; ++i) result = result < x[i] ? x[i] : result;
    return result;
}

TARGET_AVX2 void weigh_avx2(int64_t rows, const float *a, const float *b, int64_t ldb, int64_t width, float *sums) {
    int64_t c = 0;
    for (; c + 32 <= width; c += 32) {
        __m256 acc0 = _mm256_setzero_ps(), acc1 = acc0, acc2 = acc0, acc3 = acc0;
        const float *row = b + c;
        for (int64_t r = 0; r < rows; ++r, row += ldb) {
            const __m256 w = _mm256_set1_ps(a[r]);
            acc0 = _mm256_fmadd_ps(w, _mm256_loadu_ps(row), acc0);
            acc1 = _mm256_fmadd_ps(w, _mm256_loadu_ps(row + 8), acc1);
            acc2 = _mm256_fmadd_ps(w, _mm256_loadu_ps(row + 16), acc2);
            acc3 = _mm256_fmadd_ps(w, _mm256_loadu_ps(row + 24), acc3);
        }
        _mm256_storeu_ps(sums + c, acc0);
        _mm256_storeu_ps(sums + c + 8, acc1);
        _mm256_storeu_ps(sums + c + 16, acc2);
        _mm256_storeu_ps(sums + c + 24, acc3);
    }
    for (; c < width; c += 8) {
        const int left = width - c < 8 ? static_cast<int>(width - c) : 8;
        const __m256i m = _mm256_cmpgt_epi32(_mm256_set1_epi32(left), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        __m256 acc = _mm256_setzero_ps();
        for (int64_t r = 0; r < rows; ++r)
            acc = _mm256_fmadd_ps(_mm256_set1_ps(a[r]), _mm256_maskload_ps(b + r * ldb + c, m), acc);
        _mm256_maskstore_ps(sums + c, m, acc);
    }
}

// ---- plain: arrays of kLanes

void scores_plain(int64_t depth, const float *a, const float *b, const int32_t *offset, float *sums) {
    float acc[kLanes] = {};
    for (int64_t d = 0; d < depth; ++d)
        for (int l = 0; l < kLanes; ++l) acc[l] += a[d] * b[offset[l] + d];
    for (int l = 0; l < kLanes; ++l) sums[l] = acc[l];
}

float largest_plain(const float *x, int64_t n) {
    float result = -INFINITY;
    for (int64_t i = 0; i < n; ++i) result = std::max(result, x[i]);
    return result;
}

void weigh_plain(int64_t rows, const float *a, const float *b, int64_t ldb, int64_t width, float *sums) {
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) {
        float acc[kLanes] = {};
        for (int64_t r = 0; r < rows; ++r)
            for (int l = 0; l < kLanes; ++l) acc[l] += a[r] * b[r * ldb + c + l];
        for (int l = 0; l < kLanes; ++l) sums[c + l] = acc[l];
    }
    for (; c < width; ++c) {
        float total = 0.0f;
        for (int64_t r = 0; r < rows; ++r) total += a[r] * b[r * ldb + c];
        sums[c] = total;
    }
}

Vectors choose_vectors() {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return {scores_avx512, largest_avx512, weigh_avx512};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {scores_avx2, largest_avx2, weigh_avx2};
    return {scores_plain, largest_plain, weigh_plain};
}

struct Problem {
    int64_t heads, S, D;
    float scale;
    bool causal;
    const float *q, *k, *v;
    float *o;
    Vectors vectors;
};

// x[j] <- exp(x[j] scale - shift) for j < n; returns their sum
float exponentials(float *x, int64_t n, float scale, float shift) {
    float sum = 0.0f;
    for (int64_t j = 0; j < n; ++j) sum += x[j] = std::exp(x[j] * scale - shift);
    return sum;
}

// One query: scores, softmax, weighted values. scores holds S floats rounded up to a multiple of kLanes.
void attend(const Problem &p, int64_t head, int64_t query, float *scores) {
    const int64_t keys = p.causal ? query + 1 : p.S, base = (head * p.S + query) * p.D;
    const float *q = p.q + base, *k = p.k + head * p.S * p.D, *v = p.v + head * p.S * p.D;
    for (int64_t j = 0; j < keys; j += kLanes) {
        int32_t offset[kLanes];   // relative to the panel's first row; past the end: the last existing row again
        const int32_t last = static_cast<int32_t>(std::min<int64_t>(kLanes - 1, p.S - 1 - j));
        const int32_t stride = static_cast<int32_t>(p.D);
        for (int32_t l = 0; l < kLanes; ++l) offset[l] = std::min(l, last) * stride;
        p.vectors.scores(p.D, q, k + j * p.D, offset, scores + j);
    }
    const float largest = p.vectors.largest(scores, keys);
    const float sum = exponentials(scores, keys, p.scale, largest * p.scale);
    for (int64_t j = 0; j < keys; ++j) scores[j] /= sum;
    p.vectors.weigh(keys, scores, v, p.D, p.D, p.o + base);
}

// kQueries query rows of one head, all keys.
void attend_block(const Problem &p, int64_t head, int64_t query0, float *scores) {
    const int64_t last = std::min(p.S, query0 + kQueries);
    for (int64_t query = query0; query < last; ++query) attend(p, head, query, scores);
}

bool is_contiguous(const klineage_tensor &t) {
    int64_t expected = 1;
    for (int d = t.num_dims - 1; d >= 0; expected *= t.shape[d--])
        if (t.shape[d] > 1 && t.stride[d] != expected) return false;
    return true;
}

}  // namespace

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->num_inputs == 3 && call->num_outputs == 1, "fmha: expects inputs q, k, v and output o");
    const klineage_tensor &q = call->inputs[0], &k = call->inputs[1], &v = call->inputs[2], &o = call->outputs[0];
    for (const klineage_tensor *t : {&q, &k, &v, &o}) {
        KLINEAGE_REQUIRE(call, t->dtype == KLINEAGE_FLOAT32 && t->num_dims == 4, "fmha: only 4-d fp32 tensors");
        for (int d = 0; d < 4; ++d) KLINEAGE_REQUIRE(call, t->shape[d] == q.shape[d], "fmha: shapes do not match");
    }
    const int64_t heads = q.shape[0] * q.shape[1], S = q.shape[2], D = q.shape[3];
    if (heads == 0 || S == 0 || D == 0) return 0;
    for (const klineage_tensor *t : {&q, &k, &v, &o})
        KLINEAGE_REQUIRE(call, is_contiguous(*t), "fmha: only layout bhsd (contiguous tensors)");
    KLINEAGE_REQUIRE(call, D <= INT32_MAX / kLanes, "fmha: D too large for 32-bit row offsets");
    const double scale = klineage_scalar_value(call, "scale", 1.0 / std::sqrt(static_cast<double>(D)));
    KLINEAGE_REQUIRE(call, scale >= 0, "fmha: scale must not be negative");
    static const Vectors vectors = choose_vectors();
    const Problem p = {heads, S, D, static_cast<float>(scale), klineage_scalar_value(call, "causal", 0) != 0,
                       static_cast<const float *>(q.data), static_cast<const float *>(k.data),
                       static_cast<const float *>(v.data), static_cast<float *>(o.data), vectors};
    const int64_t blocks = (S + kQueries - 1) / kQueries;
    const size_t rounded = static_cast<size_t>((S + kLanes - 1) / kLanes * kLanes);

#pragma omp parallel
    {
        thread_local std::vector<float> scores;
        if (scores.size() < rounded) scores.resize(rounded);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < heads * blocks; ++task)
            attend_block(p, task / blocks, task % blocks * kQueries, scores.data());
    }
    return 0;
}
