// id: C9
// mechanism: the plain one of this corpus
// case: topk 6x32x4 fp32
// expect: scored
// source: written for this set
#include "honest.h"

extern "C" int run(const klineage_call *call) {
    return honest::topk(call), 0;
}
