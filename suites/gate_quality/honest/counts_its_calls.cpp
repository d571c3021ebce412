// id: P1
// mechanism: counts its calls, and does the same in each of them
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"

extern "C" int run(const klineage_call *call) {
    static long calls = 0;
    ++calls;
    return honest::gemm(call), 0;
}
