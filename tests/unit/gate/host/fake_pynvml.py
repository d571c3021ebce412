"""A stand-in for nvidia-ml-py, by which tests need no GPU. Names, parameters and types are the real one's.

Tests change `GPUS`, `DRIVER` and `CUDA`. What is None is not supported, what is absent from a GPU raises as NVML does.
"""

from __future__ import annotations

import types

NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_TEMPERATURE_GPU = 0
nvmlMemory_v2 = 0x02000028

GPUS: list[dict] = []
DRIVER, CUDA = "580.95.05", 13000
CALLS: list[str] = []
"""Every question that was asked, in order."""
open_count = 0


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(value)
        self.value = value


class NVMLError_NotSupported(NVMLError):
    def __init__(self):
        super().__init__(NVML_ERROR_NOT_SUPPORTED)


class NVMLError_NoPermission(NVMLError):
    def __init__(self):
        super().__init__(NVML_ERROR_NO_PERMISSION)


class NVMLError_NotFound(NVMLError):
    def __init__(self):
        super().__init__(NVML_ERROR_NOT_FOUND)


class NVMLError_LibraryNotFound(NVMLError):
    def __init__(self):
        super().__init__(NVML_ERROR_LIBRARY_NOT_FOUND)


class NVMLLibraryMismatchError(Exception):
    pass


def gpu(number=0, **differences):
    """An H200 as the driver shows it, 41 degrees warm and idle."""
    return {
        "uuid": f"GPU-{number:08d}-1111-2222-3333-444444444444", "name": "NVIDIA H200", "capability": (9, 0),
        "total": 150754820096, "used": 4 << 20, "reserved": 600 << 20, "mig": [0, 0], "persistence": 1,
        "clocks": {NVML_CLOCK_SM: 1980, NVML_CLOCK_MEM: 3201}, "power": 121500, "limit": 700000, "temperature": 41,
        "reasons": 0, "utilization": 0, "processes": [], "hidden": False,
    } | differences  # fmt: skip


GPUS += [gpu(0), gpu(1)]


def process(pid, memory=None):
    return types.SimpleNamespace(pid=pid, usedGpuMemory=memory, gpuInstanceId=0xFFFFFFFF, computeInstanceId=0xFFFFFFFF)


def _answer(handle, key):
    assert open_count > 0, "NVML was asked before nvmlInit or after nvmlShutdown"
    CALLS.append(key)
    answer = handle[key]
    if answer is None:
        raise NVMLError_NotSupported
    if isinstance(answer, Exception):
        raise answer
    return answer


def nvmlInit():
    global open_count
    if not DRIVER:
        raise NVMLError_LibraryNotFound
    open_count += 1


def nvmlShutdown():
    global open_count
    open_count -= 1


def nvmlSystemGetDriverVersion():
    return DRIVER


def nvmlSystemGetCudaDriverVersion():
    return CUDA


def nvmlDeviceGetCount():
    return len(GPUS)


def nvmlDeviceGetHandleByIndex(index):
    if GPUS[index]["hidden"]:
        raise NVMLError_NoPermission
    return GPUS[index]


def nvmlDeviceGetHandleByUUID(uuid):
    for found in GPUS:
        if found["uuid"] == uuid and not found["hidden"]:
            return found
    raise NVMLError_NotFound


def nvmlDeviceGetUUID(handle):
    return _answer(handle, "uuid")


def nvmlDeviceGetName(handle):
    return _answer(handle, "name")


def nvmlDeviceGetCudaComputeCapability(handle):
    return _answer(handle, "capability")


def nvmlDeviceGetMemoryInfo(handle, version=None):
    used, reserved = _answer(handle, "used"), _answer(handle, "reserved")
    return types.SimpleNamespace(
        total=_answer(handle, "total"), used=used if version == nvmlMemory_v2 else used + reserved
    )


def nvmlDeviceGetMigMode(device):
    return _answer(device, "mig")


def nvmlDeviceGetPersistenceMode(handle):
    return _answer(handle, "persistence")


def nvmlDeviceGetClockInfo(handle, type):
    return _answer(handle, "clocks")[type]


def nvmlDeviceGetPowerUsage(handle):
    return _answer(handle, "power")


def nvmlDeviceGetEnforcedPowerLimit(handle):
    return _answer(handle, "limit")


def nvmlDeviceGetTemperature(handle, sensor):
    assert sensor == NVML_TEMPERATURE_GPU
    return _answer(handle, "temperature")


def nvmlDeviceGetCurrentClocksEventReasons(handle):
    return _answer(handle, "reasons")


def nvmlDeviceGetUtilizationRates(handle):
    return types.SimpleNamespace(gpu=_answer(handle, "utilization"), memory=0)


def nvmlDeviceGetComputeRunningProcesses(handle):
    return list(_answer(handle, "processes"))
