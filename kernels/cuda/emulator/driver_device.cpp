// The stand-in driver: devices, contexts, and errors.
#include "driver.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace on_cpu {

static size_t number_from(const char *variable, size_t otherwise) {
    const char *word = std::getenv(variable);
    return word && *word ? std::strtoull(word, nullptr, 10) : otherwise;
}

static void open_devices() {
    Driver &all = driver();
    size_t count = number_from("CUDA_ON_CPU_DEVICES", 1);
    size_t capacity = number_from("CUDA_ON_CPU_MEMORY", size_t{8} << 30);
    for (size_t at = 0; at < count; ++at) {
        all.devices.push_back(std::make_unique<Device>());
        all.devices.back()->ordinal = static_cast<int>(at);
        all.devices.back()->capacity = capacity;
    }
    catch_faults();
    load_kernels();
    all.ready = true;
}

static Device *device_at(int ordinal) {
    auto &devices = driver().devices;
    if (!driver().ready || ordinal < 0 || static_cast<size_t>(ordinal) >= devices.size()) return nullptr;
    return devices[static_cast<size_t>(ordinal)].get();
}

} // namespace on_cpu

using namespace on_cpu;

EXPORT CUresult cuInit(unsigned flags) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard<std::mutex> hold(driver().lock);
    if (!driver().ready) open_devices();
    return driver().devices.empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    if (!driver().ready) return CUDA_ERROR_NOT_INITIALIZED;
    *count = static_cast<int>(driver().devices.size());
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(int *device, int ordinal) {
    if (!driver().ready) return CUDA_ERROR_NOT_INITIALIZED;
    if (!device_at(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int bytes, int device) {
    if (!device_at(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, static_cast<size_t>(bytes), "CUDA on this CPU");
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    if (!device_at(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::memcpy(uuid, "cuda-on-this-cpu", 16);
    uuid[15] = static_cast<unsigned char>(device);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetUuid(unsigned char *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) {
    Device *found = device_at(device);
    if (!found) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = found->capacity;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (!device_at(device)) return CUDA_ERROR_INVALID_DEVICE;
    // CUdevice_attribute: those of an A100 where a number must be chosen. The compute capability is 9.0: what newer devices
    // can do is to be tried, too.
    static const std::map<int, int> values = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64},            // threads a block, and a block's extents
        {5, 2147483647}, {6, 65535}, {7, 65535},             // a grid's extents
        {8, STATIC_SHARED_LIMIT}, {9, 65536}, {10, 32},      // shared memory a block, constant memory, warp size
        {11, 2147483647}, {12, 65536}, {13, 1410000},        // pitch, registers a block, clock in kHz
        {15, 1}, {16, MULTIPROCESSORS}, {17, 0}, {18, 0},    // overlap, multiprocessors, no timeout, not integrated
        {19, 1}, {20, 0}, {31, 1}, {32, 0},                  // maps host memory, default mode, concurrent kernels
        {36, 1215000}, {37, 5120}, {38, 41943040},           // memory clock in kHz, bus width in bits, L2 cache
        {39, 2048}, {40, 3}, {41, 1},                        // threads a multiprocessor, copy engines, one address space
        {75, 9}, {76, 0}, {78, 1}, {79, 1}, {80, 1},         // capability, stream priorities, L1 caching
        {81, 164 * 1024}, {82, 65536}, {83, 1}, {84, 0},     // shared memory and registers a multiprocessor, managed memory
        {88, 0}, {89, 0}, {90, 1}, {91, 1}, {95, 1},         // pageable access, ..., host registration, cooperative
        {92, 1}, {93, 1}, {94, 1}, {97, OPTIN_SHARED_LIMIT}, // stream memory operations, shared memory by opt-in
        {99, 1}, {100, 0}, {106, 32}, {111, 1024},           // host registration, blocks a multiprocessor, reserved shared
        {115, 0}, {121, 0}, {122, 1}, {123, 1},              // no memory pools, stream memory operations
    };
    auto found = values.find(attribute);
    *value = found == values.end() ? 0 : found->second;
    return attribute <= 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    Device *found = device_at(device);
    if (!driver().ready) return CUDA_ERROR_NOT_INITIALIZED;
    if (!found) return CUDA_ERROR_INVALID_DEVICE;
    if (int lost = driver().lost) return static_cast<CUresult>(lost);
    if (is_refused("opening")) return CUDA_ERROR_DEVICE_UNAVAILABLE;
    std::lock_guard<std::mutex> hold(driver().lock);
    ++found->retained;
    if (!found->legacy) found->legacy = start_stream(found, false);
    *context = found;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    Device *found = device_at(device);
    if (!found) return CUDA_ERROR_INVALID_DEVICE;
    std::lock_guard<std::mutex> hold(driver().lock);
    if (found->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    --found->retained;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRelease(int device) { return cuDevicePrimaryCtxRelease_v2(device); }

EXPORT CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    Device *found = device_at(device);
    if (!found) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = found->retained > 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(int device, unsigned) {
    return device_at(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuCtxSetFlags(unsigned) { return usable(); }

EXPORT CUresult cuCtxSetCurrent(void *context) {
    if (!driver().ready) return CUDA_ERROR_NOT_INITIALIZED;
    current = static_cast<Device *>(context);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(void **context) {
    if (!driver().ready) return CUDA_ERROR_NOT_INITIALIZED;
    *context = current;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(int *device) {
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    *device = current->ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize() {
    if (CUresult error = usable()) return error;
    if (CUresult error = refuse_in_captures()) return error;
    synchronize_device();
    return usable();
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return usable();
}

static const struct {
    CUresult code;
    const char *name, *text;
} ERRORS[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "the capture was not initiated in this stream"},
    {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
};

EXPORT CUresult cuGetErrorName(CUresult code, const char **name) {
    for (auto &error : ERRORS)
        if (error.code == code) return *name = error.name, CUDA_SUCCESS;
    *name = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult code, const char **text) {
    for (auto &error : ERRORS)
        if (error.code == code) return *text = error.text, CUDA_SUCCESS;
    *text = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}
