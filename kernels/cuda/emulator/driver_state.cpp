// The stand-in driver: its books, which the files of `cu*` functions all look into and which look into none of them.
//
// What is lost or refused, which memory the device can reach, and whether a test wants an allocation to fail.
#include "driver.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

namespace on_cpu {

thread_local Device *current = nullptr;
thread_local int own_captures = 0;

Driver &driver() {
    static Driver &only = *new Driver; // never destroyed: streams outlive `main`
    return only;
}

CUresult usable() {
    if (!driver().ready) return CUDA_ERROR_NOT_INITIALIZED;
    if (int lost = driver().lost) return static_cast<CUresult>(lost);
    return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult usable_outside_captures() {
    if (CUresult error = usable()) return error;
    return driver().captures > 0 || own_captures > 0 ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

void lose_device(CUresult why, const std::string &message) {
    int none = 0;
    if (driver().lost.compare_exchange_strong(none, why))
        std::fprintf(stderr, "cuda-on-cpu: the device is lost: %s\n", message.c_str());
}

bool is_refused(const char *what) {
    const char *word = std::getenv("CUDA_ON_CPU_REFUSE");
    return word && std::strcmp(word, what) == 0;
}

// ---- Memory that the device can reach ---------------------------------------------------------------------------------

size_t page_bytes() {
    static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

static const Allocation *holding(uintptr_t at, size_t bytes, uintptr_t &start) {
    auto &memory = driver().memory;
    auto after = memory.upper_bound(at);
    if (after == memory.begin()) return nullptr;
    auto &[base, allocation] = *std::prev(after);
    if (at + bytes > base + allocation.bytes) return nullptr;
    start = base;
    return &allocation;
}

bool reachable(CUdeviceptr at, size_t bytes) {
    std::lock_guard<std::mutex> hold(driver().lock);
    uintptr_t start;
    return holding(at, bytes, start) != nullptr;
}

size_t offset_in_allocation(const void *at) {
    std::lock_guard<std::mutex> hold(driver().lock);
    uintptr_t start = 0, address = reinterpret_cast<uintptr_t>(at);
    return holding(address, 0, start) ? address - start : address;
}

std::string describe_address(uintptr_t address) {
    std::lock_guard<std::mutex> hold(driver().lock);
    char text[160];
    auto after = driver().memory.upper_bound(address);
    if (after != driver().memory.begin()) {
        auto &[base, allocation] = *std::prev(after);
        size_t at = address - base;
        if (at < allocation.bytes + 2 * page_bytes()) {
            std::snprintf(text, sizeof text, "illegal address: byte %zu of an allocation of %zu bytes", at, allocation.bytes);
            return text;
        }
    }
    std::snprintf(text, sizeof text, "illegal address 0x%zx, in no allocation (shared memory ends at a guard, too)", address);
    return text;
}

bool is_pinned(const void *at, size_t bytes) {
    std::lock_guard<std::mutex> hold(driver().lock);
    uintptr_t start;
    const Allocation *found = holding(reinterpret_cast<uintptr_t>(at), bytes, start);
    return found && found->kind != MemoryKind::Device;
}

bool may_allocate(size_t bytes) {
    static const char *const path = std::getenv("CUDA_ON_CPU_ALLOCATIONS");
    if (!path) return true;
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> hold(one_at_a_time);
    char rule[8] = "";
    unsigned long long number = 0;
    std::FILE *file = std::fopen(path, "r");
    if (!file) return true;
    int words = std::fscanf(file, "%7s %llu", rule, &number);
    std::fclose(file);
    if (words != 2 || number == 0) return true;
    if (std::strcmp(rule, "above") == 0) return bytes <= number;
    bool is_once = std::strcmp(rule, "once") == 0;
    if (number == 1 && !is_once) return false;
    // What is left to count, for the next call, and for whoever wants to know how many there were.
    if ((file = std::fopen(path, "w"))) {
        std::fprintf(file, "%s %llu\n", rule, number - 1);
        std::fclose(file);
    }
    return number > 1;
}

} // namespace on_cpu
