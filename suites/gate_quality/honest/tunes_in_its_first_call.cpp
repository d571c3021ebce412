// id: C4
// mechanism: times two block sizes in the first call of a shape, and keeps the faster one
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"
#include <array>
#include <chrono>
#include <map>

namespace {
double seconds(const honest::Gemm &gemm, int64_t block) {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t row = 0; row < gemm.M; row += block) gemm.rows(row, std::min(row + block, gemm.M));
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
}  // namespace

extern "C" int run(const klineage_call *call) {
    static std::map<std::array<int64_t, 3>, int64_t> best;
    const honest::Gemm gemm(call);
    const std::array<int64_t, 3> shape{gemm.M, gemm.N, gemm.K};
    if (!best.count(shape)) best[shape] = seconds(gemm, 4) < seconds(gemm, 16) ? 4 : 16;
    seconds(gemm, best[shape]);
    return 0;
}
