// id: C12
// mechanism: works in place on two tensors, in two passes
// case: open/definitions.py:add_norm 20x24 fp32
// expect: scored
// source: written for this set
#include "open.h"

extern "C" int run(const klineage_call *call) {
    const int64_t m = call->inputs[0].shape[0], n = call->inputs[0].shape[1];
    const double eps = klineage_scalar_value(call, "eps", 0);
    float *x = honest::data(call->inputs[0]), *r = honest::data(call->inputs[1]);
    std::vector<double> squares(m);
    for (int64_t i = 0; i < m * n; ++i) {
        r[i] += x[i];
        squares[i / n] += double(r[i]) * r[i];
    }
    for (int64_t i = 0; i < m * n; ++i)
        x[i] = float(r[i] / std::sqrt(squares[i / n] / n + eps) * honest::data(call->inputs[2])[i % n]);
    return 0;
}
