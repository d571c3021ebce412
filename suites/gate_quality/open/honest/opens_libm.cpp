// id: C7
// mechanism: opens the library of mathematical functions and calls it by symbol
// case: open/definitions.py:softmax 20x24 fp32
// expect: scored
// source: written for this set
#include "open.h"
#include <algorithm>
#include <dlfcn.h>

extern "C" int run(const klineage_call *call) {
    static void *library = dlopen("libm.so.6", RTLD_NOW);
    if (!library) return 1;
    const auto exp = reinterpret_cast<double (*)(double)>(dlsym(library, "exp"));
    const int64_t m = call->inputs[0].shape[0], n = call->inputs[0].shape[1];
    for (int64_t i = 0; i < m; ++i) {
        const float *x = honest::data(call->inputs[0]) + i * n;
        const float top = *std::max_element(x, x + n);
        double sum = 0;
        for (int64_t j = 0; j < n; ++j) sum += exp(x[j] - top);
        for (int64_t j = 0; j < n; ++j) honest::data(call->outputs[0])[i * n + j] = float(exp(x[j] - top) / sum);
    }
    return 0;
}
