// id: C11
// mechanism: computes rows in futures of std::async
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"
#include <future>

extern "C" int run(const klineage_call *call) {
    const honest::Gemm gemm(call);
    std::vector<std::future<void>> parts;
    for (int64_t row = 0; row < gemm.M; row += 12)
        parts.push_back(std::async(std::launch::async, [&gemm, row] { gemm.rows(row, std::min(row + 12, gemm.M)); }));
    for (auto &part : parts) part.get();
    return 0;
}
