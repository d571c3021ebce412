// id: C11
// mechanism: two threads hand rows to one another through a queue
// case: gemm 48x40x56 fp32
// expect: scored
// source: written for this set
#include "honest.h"
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

extern "C" int run(const klineage_call *call) {
    const honest::Gemm gemm(call);
    std::mutex mutex;
    std::condition_variable filled;
    std::deque<int64_t> queue;
    std::thread consumer([&] {
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex);
            filled.wait(lock, [&] { return !queue.empty(); });
            const int64_t row = queue.front();
            queue.pop_front();
            if (row < 0) return;
            lock.unlock();
            gemm.rows(row, row + 1);
        }
    });
    for (int64_t row = 0; row <= gemm.M; ++row) {
        std::lock_guard<std::mutex> lock(mutex);
        queue.push_back(row < gemm.M ? row : -1);
        filled.notify_one();
    }
    consumer.join();
    return 0;
}
