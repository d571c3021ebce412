// id: C11
// mechanism: OpenMP, schedule(guided)
// case: gemm 48x40x56 fp32
// flags: -O2 -fopenmp
// expect: scored
// source: written for this set
#include "honest.h"

extern "C" int run(const klineage_call *call) {
    const honest::Gemm gemm(call);
#pragma omp parallel for schedule(guided)
    for (int64_t row = 0; row < gemm.M; ++row) gemm.rows(row, row + 1);
    return 0;
}
