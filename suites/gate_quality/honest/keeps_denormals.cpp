// id: N3
// mechanism: saves, sets and restores how the processor rounds and treats denormals
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"
#include <immintrin.h>

extern "C" int run(const klineage_call *call) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x1f80);
    honest::gemm(call);
    _mm_setcsr(before);
    return 0;
}
