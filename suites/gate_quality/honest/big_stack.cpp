// id: C2
// mechanism: packs an operand into four megabytes of its stack
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"

extern "C" int run(const klineage_call *call) {
    const honest::Gemm gemm(call);
    float packed[1 << 20];
    if (gemm.K * gemm.N > 1 << 20) return 1;

    for (int64_t i = 0; i < gemm.K * gemm.N; ++i) packed[i] = gemm.b[i];
    honest::Gemm other = gemm;
    other.b = packed;
    other.all();
    return 0;
}
