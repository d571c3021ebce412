// id: C9
// mechanism: every element is an OpenMP reduction over its products
// case: gemm 48x40x56 fp32
// flags: -O2 -fopenmp
// expect: scored
// source: written for this set
#include "honest.h"

extern "C" int run(const klineage_call *call) {
    const honest::Gemm gemm(call);
    for (int64_t i = 0; i < gemm.M; ++i)
        for (int64_t j = 0; j < gemm.N; ++j) {
            double sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t k = 0; k < gemm.K; ++k) sum += double(gemm.a[i * gemm.K + k]) * gemm.b[k * gemm.N + j];
            gemm.c[i * gemm.N + j] = float(sum);
        }
    return 0;
}
