// Host side of kernels for sm_90: tensor maps and launches whose status is checked. Frozen: version 1.
//
// Every function returns nullptr, or a static text that says what failed: hand it to KLINEAGE_REQUIRE. The driver's
// entry points are looked up at run time, so that nothing links to libcuda.
#ifndef KLINEAGE_SM90_V1_TENSOR_MAP_CUH
#define KLINEAGE_SM90_V1_TENSOR_MAP_CUH

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

namespace klineage {
namespace sm90 {
inline namespace v1 {

// The map's type for an element of a kernel.
template <class T>
struct TensorMapType;
template <>
struct TensorMapType<__nv_bfloat16> { static constexpr CUtensorMapDataType value = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; };
template <>
struct TensorMapType<__half> { static constexpr CUtensorMapDataType value = CU_TENSOR_MAP_DATA_TYPE_FLOAT16; };
template <>
struct TensorMapType<float> { static constexpr CUtensorMapDataType value = CU_TENSOR_MAP_DATA_TYPE_FLOAT32; };
template <>
struct TensorMapType<int32_t> { static constexpr CUtensorMapDataType value = CU_TENSOR_MAP_DATA_TYPE_INT32; };
template <>
struct TensorMapType<__nv_fp8_e4m3> { static constexpr CUtensorMapDataType value = CU_TENSOR_MAP_DATA_TYPE_UINT8; };
template <>
struct TensorMapType<uint8_t> { static constexpr CUtensorMapDataType value = CU_TENSOR_MAP_DATA_TYPE_UINT8; };

// A function of the driver by name, or nullptr.
template <class F>
F driver_function(const char *name) {
    void *entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
    return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<F>(entry) : nullptr;
}

// A map of kRank dimensions, innermost first: `sizes` in elements (1 to 2^32), `strides` of dimensions 1.. in bytes
// (multiples of 16 under 2^40), `box` in elements (1 to 256; innermost at most one swizzle row of bytes, and a multiple
// of 16 bytes). `data` is 16-byte aligned. What a box has outside of the tensor is loaded as zeros and not stored.
template <class T, int kRank>
const char *encode_tiled(CUtensorMap *map, const void *data, const cuuint64_t (&sizes)[kRank],
                         const cuuint64_t (&strides)[kRank > 1 ? kRank - 1 : 1], const cuuint32_t (&box)[kRank],
                         CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                         CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
    if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled";
    if (reinterpret_cast<uintptr_t>(data) % 16) return "a tensor map needs data aligned to 16 bytes";
    for (int i = 0; i + 1 < kRank; ++i)
        if (strides[i] % 16) return "a tensor map needs strides that are multiples of 16 bytes";
    cuuint32_t steps[kRank];
    for (cuuint32_t &step : steps) step = 1;
    const CUresult status = encode(map, TensorMapType<T>::value, kRank, const_cast<void *>(data), sizes, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return status == CUDA_SUCCESS ? nullptr : "the driver refused a tensor map";
}

// A map for im2col loads of an NHWC tensor of kRank dimensions (c, w, h, n for 4): `lower` and `upper` are the corners of
// the bounding box of pixels, relative to the tensor's first and last pixel (innermost spatial dimension first); `steps`
// the traversal strides of all dimensions (1 for channels). A load brings `pixels` of `channels` each.
template <class T, int kRank>
const char *encode_im2col(CUtensorMap *map, const void *data, const cuuint64_t (&sizes)[kRank],
                          const cuuint64_t (&strides)[kRank - 1], const int (&lower)[kRank - 2], const int (&upper)[kRank - 2],
                          cuuint32_t channels, cuuint32_t pixels, const cuuint32_t (&steps)[kRank],
                          CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                          CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    static const auto encode = driver_function<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
    if (encode == nullptr) return "the driver has no cuTensorMapEncodeIm2col";
    if (reinterpret_cast<uintptr_t>(data) % 16) return "a tensor map needs data aligned to 16 bytes";
    const CUresult status = encode(map, TensorMapType<T>::value, kRank, const_cast<void *>(data), sizes, strides, lower, upper,
                                   channels, pixels, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return status == CUDA_SUCCESS ? nullptr : "the driver refused an im2col tensor map";
}

struct Launch {
    dim3 grid;
    dim3 block;
    uint32_t shared_bytes = 0;  // dynamic; up to 232,448
    cudaStream_t stream = nullptr;
    uint32_t cluster = 1;    // CTAs of a cluster along x; grid.x is a multiple. Over 8: up to 16, on sm_90 only
    bool dependent = false;  // may start under the kernel before it, which grid_dependency_wait (cluster.cuh) waits for
};

// Starts a kernel and says why it could not be started. An error of the device itself shows in a later call.
template <class... P, class... A>
const char *launch(void (*kernel)(P...), const Launch &how, A &&...arguments) {
    if (how.shared_bytes > 48 * 1024 &&
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(how.shared_bytes)) != cudaSuccess)
        return "the kernel cannot have that much shared memory";
    if (how.cluster > 8 && cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess)
        return "the kernel cannot have clusters of that size";
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    config.gridDim = how.grid, config.blockDim = how.block;
    config.dynamicSmemBytes = how.shared_bytes, config.stream = how.stream;
    config.attrs = attributes;
    if (how.cluster > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {how.cluster, 1, 1};
    }
    if (how.dependent) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    const cudaError_t status = cudaLaunchKernelEx(&config, kernel, std::forward<A>(arguments)...);
    if (status == cudaSuccess) return nullptr;
    cudaGetLastError();
    return cudaGetErrorString(status);
}

}  // namespace v1
}  // namespace sm90
}  // namespace klineage
#endif
