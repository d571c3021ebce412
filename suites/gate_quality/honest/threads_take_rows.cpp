// id: C11
// mechanism: threads take the next row from an atomic counter
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"
#include <atomic>
#include <thread>

extern "C" int run(const klineage_call *call) {
    const honest::Gemm gemm(call);
    std::atomic<int64_t> next{0};
    auto work = [&] {
        for (int64_t row; (row = next++) < gemm.M;) gemm.rows(row, row + 1);
    };
    std::vector<std::thread> pool;
    for (int i = 0; i < 3; ++i) pool.emplace_back(work);
    for (std::thread &thread : pool) thread.join();
    return 0;
}
