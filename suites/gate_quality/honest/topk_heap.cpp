// id: C9
// mechanism: partial sort
// case: topk 6x32x4 fp32
// expect: scored
// source: written for this set
#include "honest.h"

extern "C" int run(const klineage_call *call) {
    const int64_t rows = call->inputs[0].shape[0], columns = call->inputs[0].shape[1], k = call->outputs[0].shape[1];
    for (int64_t row = 0; row < rows; ++row) {
        const float *x = honest::input(call, 0) + row * columns;
        std::vector<int64_t> order(columns);
        for (int64_t i = 0; i < columns; ++i) order[i] = i;
        const auto before = [x](int64_t a, int64_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
        std::partial_sort(order.begin(), order.begin() + k, order.end(), before);
        for (int64_t i = 0; i < k; ++i) {
            honest::output(call)[row * k + i] = x[order[i]];
            static_cast<int64_t *>(call->outputs[1].data)[row * k + i] = order[i];
        }
    }
    return 0;
}
