// id: C11
// mechanism: starts threads of std::thread in every call and joins them
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"
#include <thread>

extern "C" int run(const klineage_call *call) {
    const honest::Gemm gemm(call);
    std::thread other([&] { gemm.rows(0, gemm.M / 2); });
    gemm.rows(gemm.M / 2, gemm.M);
    other.join();
    return 0;
}
