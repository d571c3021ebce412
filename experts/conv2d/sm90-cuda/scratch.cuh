// Memory for one call, in the order of its stream.
#ifndef CONV2D_SCRATCH_CUH
#define CONV2D_SCRATCH_CUH

#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>

namespace conv2d {

// The pool of the current device, which keeps what was freed for the next call; nullptr if there is none.
inline cudaMemPool_t scratch_pool() {
    constexpr int kDevices = 64;
    static std::mutex mutex;
    static cudaMemPool_t pools[kDevices] = {};
    int device = -1;
    if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= kDevices) return nullptr;
    const std::lock_guard<std::mutex> guard(mutex);
    if (pools[device]) return pools[device];
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned, properties.location = {cudaMemLocationTypeDevice, device};
    cudaMemPool_t pool = nullptr;
    uint64_t keep = UINT64_MAX;
    if (cudaMemPoolCreate(&pool, &properties) != cudaSuccess) return nullptr;
    if (cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep) != cudaSuccess) return nullptr;
    return pools[device] = pool;
}

// 256-byte aligned bytes; nullptr if there are none. The destructor frees them behind the kernels launched before it.
struct Scratch {
    void *data = nullptr;
    cudaStream_t stream;
    Scratch(size_t bytes, cudaStream_t stream) : stream(stream) {
        const cudaMemPool_t pool = scratch_pool();
        if (pool == nullptr || cudaMallocFromPoolAsync(&data, bytes, pool, stream) != cudaSuccess) data = nullptr, cudaGetLastError();
    }
    ~Scratch() {
        if (data) cudaFreeAsync(data, stream);
    }
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
};

}  // namespace conv2d
#endif
