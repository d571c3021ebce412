// Right, yet it reads behind the last element of a; what it finds there is overwritten. For memcheck.
#include "device.cuh"

static __global__ void read_past_the_end(const honest::bf16 *a, int64_t count, honest::bf16 *c) {
    c[threadIdx.x] = a[count + threadIdx.x];
}

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->inputs[0].dtype == KLINEAGE_BFLOAT16, "bf16 only");
    read_past_the_end<<<1, 32, 0, honest::stream(call)>>>(
        static_cast<const honest::bf16 *>(call->inputs[0].data), honest::size(call->inputs[0]),
        static_cast<honest::bf16 *>(call->outputs[0].data));
    return honest::gemm(call);
}
