// id: C10
// mechanism: adds up in double precision
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"

extern "C" int run(const klineage_call *call) {
    const honest::Gemm gemm(call);
    for (int64_t i = 0; i < gemm.M; ++i)
        for (int64_t j = 0; j < gemm.N; ++j) {
            double sum = 0;
            for (int64_t k = 0; k < gemm.K; ++k) {
                const float x = gemm.a[i * gemm.K + k], y = gemm.b[k * gemm.N + j];
                sum += double(x) * y;
            }
            gemm.c[i * gemm.N + j] = float(sum);
        }
    return 0;
}
