// id: C10
// mechanism: maximum and sum of a row in one pass
// case: open/definitions.py:softmax 20x24 fp32
// expect: scored
// source: written for this set
#include "open.h"
#include <algorithm>

extern "C" int run(const klineage_call *call) {
    const int64_t m = call->inputs[0].shape[0], n = call->inputs[0].shape[1];
    for (int64_t i = 0; i < m; ++i) {
        const float *x = honest::data(call->inputs[0]) + i * n;
        double top = x[0], sum = 0;
        for (int64_t j = 0; j < n; ++j) {
            const double next = std::max<double>(top, x[j]);
            sum = sum * std::exp(top - next) + std::exp(x[j] - next);
            top = next;
        }
        for (int64_t j = 0; j < n; ++j) honest::data(call->outputs[0])[i * n + j] = float(std::exp(x[j] - top) / sum);
    }
    return 0;
}
