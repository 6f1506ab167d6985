// The stand-in driver: memory and copies.
//
// Device memory is host memory, each piece in a mapping of its own that ends at a page nobody may touch, and full of
// 0xFF (NaN for every float). What a real driver does at once is done at once, and what it may do later is done
// later: pageable sources are staged before the call returns, pinned ones are read when the stream gets there.
#include "driver.hpp"

#include <cstring>
#include <sys/mman.h>

namespace on_cpu {

// A mapping whose last byte, rounded up to 16, lies right before a guard page. Locked by the caller.
static void *map_guarded(size_t bytes, MemoryKind kind) {
    size_t page = page_bytes(), usable_bytes = (bytes + page - 1) / page * page;
    void *mapping = mmap(nullptr, usable_bytes + page, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return nullptr;
    auto *first = static_cast<unsigned char *>(mapping);
    mprotect(first + usable_bytes, page, PROT_NONE);
    std::memset(first, 0xFF, usable_bytes);
    // A real allocation is 256-byte aligned; where it matters here, 16 bytes are enough to keep the guard close.
    unsigned char *start = first + usable_bytes - (bytes + 15) / 16 * 16;
    driver().memory[reinterpret_cast<uintptr_t>(start)] = {bytes, kind, mapping, usable_bytes + page};
    return start;
}

static void *pointer(CUdeviceptr at) { return reinterpret_cast<void *>(at); }

static CUresult unmap(uintptr_t at, MemoryKind kind) {
    std::lock_guard<std::mutex> hold(driver().lock);
    auto found = driver().memory.find(at);
    if (found == driver().memory.end() || found->second.kind != kind) return CUDA_ERROR_INVALID_VALUE;
    if (kind == MemoryKind::Device) current->used -= found->second.bytes;
    munmap(found->second.mapping, found->second.mapping_bytes);
    driver().memory.erase(found);
    return CUDA_SUCCESS;
}

} // namespace on_cpu

using namespace on_cpu;

EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    if (CUresult error = usable()) return error;
    std::lock_guard<std::mutex> hold(driver().lock);
    *free = current->capacity - current->used;
    *total = current->capacity;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
    if (CUresult error = usable_outside_captures()) return error;
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (!may_allocate(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    std::lock_guard<std::mutex> hold(driver().lock);
    if (bytes > current->capacity - current->used) return CUDA_ERROR_OUT_OF_MEMORY;
    void *start = map_guarded(bytes, MemoryKind::Device);
    if (!start) return CUDA_ERROR_OUT_OF_MEMORY;
    current->used += bytes;
    *out = reinterpret_cast<CUdeviceptr>(start);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr at) {
    if (CUresult error = usable_outside_captures()) return error;
    if (at == 0) return CUDA_SUCCESS;
    synchronize_device();
    return unmap(at, MemoryKind::Device);
}

EXPORT CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned) {
    if (CUresult error = usable_outside_captures()) return error;
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (!may_allocate(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    std::lock_guard<std::mutex> hold(driver().lock);
    *out = map_guarded(bytes, MemoryKind::Host);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuMemAllocHost_v2(void **out, size_t bytes) { return cuMemHostAlloc(out, bytes, 0); }

EXPORT CUresult cuMemFreeHost(void *at) {
    if (CUresult error = usable_outside_captures()) return error;
    synchronize_device();
    return unmap(reinterpret_cast<uintptr_t>(at), MemoryKind::Host);
}

// Whole pages are registered, so no two ranges may share one.
EXPORT CUresult cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) {
    if (CUresult error = usable_outside_captures()) return error;
    auto first = reinterpret_cast<uintptr_t>(at);
    uintptr_t page = page_bytes(), begin = first / page * page, end = (first + bytes + page - 1) / page * page;
    if (!at || bytes == 0 || flags > 15) return CUDA_ERROR_INVALID_VALUE;
    if (is_refused("registration")) return CUDA_ERROR_NOT_SUPPORTED;
    if (msync(reinterpret_cast<void *>(begin), end - begin, MS_ASYNC) != 0) return CUDA_ERROR_INVALID_VALUE; // not mapped
    if (!may_allocate(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    std::lock_guard<std::mutex> hold(driver().lock);
    for (auto &[base, allocation] : driver().memory)
        if (base / page * page < end && begin < base + allocation.bytes) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    driver().memory[first] = {bytes, MemoryKind::Registered, nullptr, 0};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostUnregister(void *at) {
    if (CUresult error = usable_outside_captures()) return error;
    synchronize_device();
    std::lock_guard<std::mutex> hold(driver().lock);
    auto found = driver().memory.find(reinterpret_cast<uintptr_t>(at));
    if (found == driver().memory.end() || found->second.kind != MemoryKind::Registered)
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    driver().memory.erase(found);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *at, unsigned flags) {
    if (CUresult error = usable()) return error;
    if (flags != 0 || !is_pinned(at, 1)) return CUDA_ERROR_INVALID_VALUE;
    *out = reinterpret_cast<CUdeviceptr>(at);
    return CUDA_SUCCESS;
}

// ---- Copies -----------------------------------------------------------------------------------------------------------

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, void *handle) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (bytes == 0) return CUDA_SUCCESS;
    if (!reachable(to, bytes)) return CUDA_ERROR_INVALID_VALUE;
    bool pinned = is_pinned(from, bytes);
    // A record would read the caller's memory at each replay.
    if (!pinned)
        if (CUresult error = refuse_in_capture(stream)) return error;
    if (pinned) {
        enqueue(stream, [=] { std::memcpy(pointer(to), from, bytes); });
        return CUDA_SUCCESS;
    }
    auto *first = static_cast<const unsigned char *>(from);
    auto staged = std::make_shared<std::vector<unsigned char>>(first, first + bytes);
    enqueue(stream, [=] { std::memcpy(pointer(to), staged->data(), bytes); });
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, void *handle) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (bytes == 0) return CUDA_SUCCESS;
    if (!reachable(from, bytes)) return CUDA_ERROR_INVALID_VALUE;
    bool pinned = is_pinned(to, bytes);
    if (!pinned)
        if (CUresult error = refuse_in_capture(stream)) return error;
    enqueue(stream, [=] { std::memcpy(to, pointer(from), bytes); });
    // Into pageable memory the driver copies before it returns.
    if (!pinned) stream->wait_for(stream->count_issued());
    return usable();
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, void *handle) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (bytes == 0) return CUDA_SUCCESS;
    if (!reachable(to, bytes) || !reachable(from, bytes)) return CUDA_ERROR_INVALID_VALUE;
    enqueue(stream, [=] { std::memmove(pointer(to), pointer(from), bytes); });
    return CUDA_SUCCESS;
}

// The kind of each side is known from its address, as with unified addressing.
EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, void *handle) {
    if (!reachable(from, bytes)) return cuMemcpyHtoDAsync_v2(to, pointer(from), bytes, handle);
    if (!reachable(to, bytes)) return cuMemcpyDtoHAsync_v2(pointer(to), from, bytes, handle);
    return cuMemcpyDtoDAsync_v2(to, from, bytes, handle);
}

static CUresult finish_legacy(CUresult begun) {
    if (begun != CUDA_SUCCESS) return begun;
    current->legacy->wait_for(current->legacy->count_issued());
    return usable();
}
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    return finish_legacy(cuMemcpyHtoDAsync_v2(to, from, bytes, nullptr));
}
EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    return finish_legacy(cuMemcpyDtoHAsync_v2(to, from, bytes, nullptr));
}
EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return finish_legacy(cuMemcpyDtoDAsync_v2(to, from, bytes, nullptr));
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, void *handle) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!reachable(to, count)) return CUDA_ERROR_INVALID_VALUE;
    enqueue(stream, [=] { std::memset(pointer(to), value, count); });
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, void *handle) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (to % 4 != 0 || !reachable(to, 4 * count)) return CUDA_ERROR_INVALID_VALUE;
    enqueue(stream, [=] { std::fill_n(static_cast<unsigned *>(pointer(to)), count, value); });
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
    return finish_legacy(cuMemsetD8Async(to, value, count, nullptr));
}
EXPORT CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) {
    return finish_legacy(cuMemsetD32Async(to, value, count, nullptr));
}
