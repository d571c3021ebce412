// id: C11
// mechanism: OpenMP tasks under a single thread that makes them
// case: gemm 48x40x56 fp32
// flags: -O2 -fopenmp
// expect: scored
// source: written for this set
#include "honest.h"

extern "C" int run(const klineage_call *call) {
    const honest::Gemm gemm(call);
#pragma omp parallel
#pragma omp single
    for (int64_t row = 0; row < gemm.M; row += 8) {
#pragma omp task firstprivate(row)
        gemm.rows(row, std::min(row + 8, gemm.M));
    }
    return 0;
}
