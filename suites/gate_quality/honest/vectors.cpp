// id: C10
// mechanism: computes eight columns at a time with vectors of the compiler
// case: gemm 48x40x56 fp32
// flags: -O2 -march=x86-64-v3
// expect: scored
// source: written for this set
#include "honest.h"

typedef float vector8 __attribute__((vector_size(32), aligned(4)));

extern "C" int run(const klineage_call *call) {
    const honest::Gemm gemm(call);
    for (int64_t i = 0; i < gemm.M; ++i)
        for (int64_t j = 0; j + 8 <= gemm.N; j += 8) {
            vector8 sum{};
            for (int64_t k = 0; k < gemm.K; ++k)
                sum += gemm.a[i * gemm.K + k] * *reinterpret_cast<const vector8 *>(gemm.b + k * gemm.N + j);
            *reinterpret_cast<vector8 *>(gemm.c + i * gemm.N + j) = sum;
        }
    return 0;
}
