// id: C2
// mechanism: keeps scratch memory by thread between calls
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"

extern "C" int run(const klineage_call *call) {
    static thread_local std::vector<float> scratch;
    const honest::Gemm gemm(call);
    scratch.resize(gemm.K * gemm.N);
    float *packed = scratch.data();

    for (int64_t i = 0; i < gemm.K * gemm.N; ++i) packed[i] = gemm.b[i];
    honest::Gemm other = gemm;
    other.b = packed;
    other.all();
    return 0;
}
