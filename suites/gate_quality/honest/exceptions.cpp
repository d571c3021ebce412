// id: C5
// mechanism: throws and catches an exception of its own in every call
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"
#include <stdexcept>

extern "C" int run(const klineage_call *call) {
    try {
        throw std::length_error("a shape that has no fast way");
    } catch (const std::length_error &) {
        honest::gemm(call);
    }
    return 0;
}
