// What the stand-in driver asks of `execute.cpp`.
#pragma once

#include "execute.hpp"

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace on_cpu {

enum class Order { Forward, Backward, Shuffled };
Order run_order();

// Where the thread-local segment of a library of kernels is found: its static shared memory.
struct Library {
    unsigned long tls_module = 0;
    size_t shared_bytes = 0;
};

// One launch of a kernel: what to run, and how far it is.
struct Launch {
    const Kernel *kernel = nullptr;
    Library library;
    void **arguments = nullptr;
    Dim3 grid, threads;
    uint32_t shared_bytes = 0;
    bool begins_early = false; // so that every lane must come to `await_front`
    const std::function<void()> *front = nullptr; // to be run where the first block waits for it
    uint64_t seed = 0;

    std::atomic<uint64_t> next_block{0};
    std::atomic<bool> failed{false}, illegal_address{false};
    unsigned helping = 0; // guarded by the helpers' lock
    std::mutex lock;
    std::string failure; // guarded by `lock` until the grid has ended

    uint64_t blocks() const { return uint64_t{grid.x} * grid.y * grid.z; }
    void fail(const std::string &why);
};

// From now on a kernel's fault ends its launch, not the process.
void catch_faults();
// Where an address lies that a kernel must not touch; the driver knows.
std::string describe_address(uintptr_t address);

// Runs every block; returns what went wrong, or nothing.
std::string run_grid(const std::shared_ptr<Launch> &launch);

} // namespace on_cpu
