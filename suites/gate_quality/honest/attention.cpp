// id: C14
// mechanism: attention in two passes, with a mask
// case: fmha 1x2x32x16 fp32 causal=1
// expect: scored
// source: written for this set
#include "honest.h"

extern "C" int run(const klineage_call *call) {
    return honest::attention(call), 0;
}
