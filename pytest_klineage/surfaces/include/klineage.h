/* klineage.h: the native ABI of pytest-klineage, version 1. C99 and C++11; no other header needed.
 *
 * A kernel exports one function with C linkage:
 *
 *     extern "C" int my_kernel(const klineage_call *call);
 *
 * It reads call->inputs, writes every element of call->outputs (destination passing: the harness owns all memory) and
 * returns 0, or non-zero to report an error; KLINEAGE_REQUIRE refuses what the kernel does not support with a message.
 * Tensors are described in elements, never in bytes; outputs never overlap inputs. A tensor that the operator declares
 * inout is among the inputs only: the kernel reads it and overwrites it in place. On CUDA the pointers are device
 * pointers and all work goes to call->stream (a cudaStream_t); on a CPU stream is NULL and the call is synchronous.
 */
#ifndef KLINEAGE_H
#define KLINEAGE_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define KLINEAGE_ABI_VERSION 1
#define KLINEAGE_MAX_DIMS 8

#ifdef __cplusplus
extern "C" {
#endif

typedef enum klineage_dtype {
    KLINEAGE_FLOAT64 = 1,
    KLINEAGE_FLOAT32 = 2,
    KLINEAGE_FLOAT16 = 3,
    KLINEAGE_BFLOAT16 = 4,
    KLINEAGE_INT64 = 5,
    KLINEAGE_INT32 = 6,
    KLINEAGE_UINT8 = 7,
    KLINEAGE_FLOAT8_E4M3 = 8,
    KLINEAGE_FLOAT8_E5M2 = 9,
    KLINEAGE_INT16 = 10,
    KLINEAGE_INT8 = 11,
    KLINEAGE_BOOL = 12 /* one byte, 0 or 1 */
} klineage_dtype;

typedef struct klineage_tensor {
    void *data;
    int32_t dtype; /* klineage_dtype */
    int32_t num_dims;
    int64_t shape[KLINEAGE_MAX_DIMS];  /* elements */
    int64_t stride[KLINEAGE_MAX_DIMS]; /* elements */
} klineage_tensor;

/* A scalar argument of the operator, such as "stride" or "scale". */
typedef struct klineage_scalar {
    const char *name;
    double value;
} klineage_scalar;

typedef struct klineage_call {
    int32_t abi_version; /* KLINEAGE_ABI_VERSION of the harness */
    int32_t num_inputs;
    int32_t num_outputs;
    int32_t num_scalars;
    const klineage_tensor *inputs;  /* in the operator's order */
    const klineage_tensor *outputs; /* in the operator's order */
    const klineage_scalar *scalars;
    void *stream;           /* cudaStream_t, or NULL on a CPU */
    char *error;            /* where to put a message, error_capacity bytes */
    int32_t error_capacity;
} klineage_call;

/* The value of the scalar argument `name`, or `fallback` when the operator has none of that name. */
static inline double klineage_scalar_value(const klineage_call *call, const char *name, double fallback) {
    for (int32_t i = 0; i < call->num_scalars; ++i)
        if (strcmp(call->scalars[i].name, name) == 0) return call->scalars[i].value;
    return fallback;
}

static inline int klineage_fail(const klineage_call *call, const char *message) {
    if (call->error && call->error_capacity > 0)
        snprintf(call->error, (size_t)call->error_capacity, "%s", message);
    return 1;
}

/* Return from the kernel with an error unless `condition` holds. */
#define KLINEAGE_REQUIRE(call, condition, message) \
    do { if (!(condition)) return klineage_fail((call), (message)); } while (0)

#ifdef __cplusplus
}
#endif
#endif /* KLINEAGE_H */
