// id: C2
// mechanism: halves the rows again and again, without regard to any cache
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"

static void halves(const honest::Gemm &gemm, int64_t first, int64_t last) {
    if (last - first <= 1) return gemm.rows(first, last);
    const int64_t middle = (first + last) / 2;
    halves(gemm, first, middle);
    halves(gemm, middle, last);
}

extern "C" int run(const klineage_call *call) {
    const honest::Gemm gemm(call);
    halves(gemm, 0, gemm.M);
    return 0;
}
