// id: C11
// mechanism: prepares itself once, by std::call_once, from several threads
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"
#include <mutex>
#include <thread>

extern "C" int run(const klineage_call *call) {
    static std::once_flag ready;
    static std::vector<int64_t> starts;
    const honest::Gemm gemm(call);
    auto work = [&](int half) {
        std::call_once(ready, [&] { starts = {0, gemm.M / 2, gemm.M}; });
        gemm.rows(starts[half], starts[half + 1]);
    };
    std::thread other(work, 0);
    work(1);
    other.join();
    return 0;
}
