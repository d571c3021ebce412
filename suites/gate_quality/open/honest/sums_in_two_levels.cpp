// id: C11
// mechanism: sums of blocks by two threads, then what comes before each block
// case: open/definitions.py:running 512 fp32
// expect: scored
// source: written for this set
#include "open.h"

extern "C" int run(const klineage_call *call) {
    const int64_t n = honest::size(call->inputs[0]), half = n / 2;
    const float *x = honest::data(call->inputs[0]);
    float *y = honest::data(call->outputs[0]);
    auto part = [&](int64_t first, int64_t last, double before) {
        for (int64_t i = first; i < last; ++i) y[i] = float(before += x[i]);
    };
    double sum = 0;
    for (int64_t i = 0; i < half; ++i) sum += x[i];
    std::thread other([&] { part(half, n, sum); });
    part(0, half, 0);
    other.join();
    return 0;
}
