// Right, yet it reads the output before anything was written there; that is overwritten. For initcheck.
#include "device.cuh"

static __global__ void shift(honest::bf16 *c) { c[threadIdx.x] = c[threadIdx.x + 64]; }

extern "C" int run(const klineage_call *call) {
    KLINEAGE_REQUIRE(call, call->outputs[0].dtype == KLINEAGE_BFLOAT16, "bf16 only");
    shift<<<1, 32, 0, honest::stream(call)>>>(static_cast<honest::bf16 *>(call->outputs[0].data));
    return honest::gemm(call);
}
