// id: N3
// mechanism: built for processors with fused multiply-add
// case: gemm 48x40x56 fp32
// flags: -O3 -march=x86-64-v3
// expect: scored
// source: written for this set
#include "honest.h"

extern "C" int run(const klineage_call *call) {
    return honest::gemm(call), 0;
}
