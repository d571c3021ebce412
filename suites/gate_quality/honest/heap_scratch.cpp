// id: C2
// mechanism: packs an operand into memory of malloc, and frees it, in every call
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"
#include <cstdlib>

extern "C" int run(const klineage_call *call) {
    const honest::Gemm gemm(call);
    float *packed = static_cast<float *>(std::malloc(64 << 20));
    if (!packed) return 1;

    for (int64_t i = 0; i < gemm.K * gemm.N; ++i) packed[i] = gemm.b[i];
    honest::Gemm other = gemm;
    other.b = packed;
    other.all();
    std::free(packed);
    return 0;
}
