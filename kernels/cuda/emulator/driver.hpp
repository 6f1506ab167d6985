// The stand-in driver's own view of devices, memory, streams and modules; the `cu*` functions are in driver_*.cpp.
#pragma once

#include "run.hpp"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

// The numbers are those of NVIDIA's driver.
enum CUresult : int {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    CUDA_ERROR_CAPTURED_EVENT = 907,
};

using CUdeviceptr = unsigned long long;
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace on_cpu {

constexpr uint32_t STATIC_SHARED_LIMIT = 48 * 1024;
constexpr uint32_t OPTIN_SHARED_LIMIT = 163 * 1024;
constexpr int MULTIPROCESSORS = 4;

// One pass of a stream over an event.
struct Record {
    std::mutex lock;
    std::condition_variable changed;
    bool done = false;
    long long at_ns = 0;
};

// What a stream does. `front` is null, or a kernel that has not run yet: the work calls it where it waits for it.
using Front = std::function<void()>;
struct Work {
    std::function<void(const Front *front)> run;
    bool is_kernel = false, begins_early = false;
};

// Does work in its order, and yet begins a kernel that may begin early before the one in front has run: half of the
// kernels, by chance, are held back until the next work is known.
class Turns {
  public:
    explicit Turns(unsigned seed) : random_(seed + 1) {}
    void take(Work work);
    void settle();
    bool hold_back() const { return held_.has_value(); }

  private:
    std::minstd_rand random_;
    std::optional<Work> held_;
};

struct Graph {
    std::vector<Work> nodes;
    bool invalid = false;
    int mode = 2; // of the capture: 0 global, 1 of this thread, 2 relaxed
};

struct Device;

// A queue of work and the thread that does it.
struct Stream {
    Device *device = nullptr;
    bool non_blocking = false;
    std::mutex lock;
    std::condition_variable changed;
    std::deque<Work> work;
    uint64_t issued = 0, done = 0; // guarded by `lock`
    std::atomic<bool> closed{false};
    std::shared_ptr<Graph> capture;
    bool capture_origin = false;

    void wait_for(uint64_t count);
    uint64_t count_issued();
};

struct Event {
    std::shared_ptr<Record> record;
    std::shared_ptr<Graph> captured;
    bool timed = true;
};

enum class MemoryKind { Device, Host, Registered };
struct Allocation {
    size_t bytes;
    MemoryKind kind;
    void *mapping;
    size_t mapping_bytes;
};

// A device is its primary context.
struct Device {
    int ordinal = 0;
    size_t capacity = 0, used = 0; // guarded by the driver's lock
    unsigned retained = 0;
    std::shared_ptr<Stream> legacy; // stream 0
};

struct Driver {
    std::mutex lock;
    bool ready = false;
    std::vector<std::unique_ptr<Device>> devices;
    std::map<uintptr_t, Allocation> memory; // by address; device memory, and host memory the device can reach
    std::set<std::shared_ptr<Stream>> streams;
    std::set<Event *> events;
    std::atomic<int> lost{0};      // a CUresult: the device is unusable from now on
    std::atomic<int> captures{0};  // captures that forbid, everywhere, calls which wait for the device
    std::atomic<uint64_t> launches{0};
};
Driver &driver();

// The context that the calling thread made current.
extern thread_local Device *current;

// The calling thread's captures that forbid it such calls.
extern thread_local int own_captures;

// CUDA_SUCCESS, or why nothing can be done now: no context, or a device that was lost.
ON_CPU_API CUresult usable();
CUresult usable_outside_captures();
void lose_device(CUresult why, const std::string &message);

// The stream behind a handle (0: the legacy stream of the current context), or nobody.
ON_CPU_API std::shared_ptr<Stream> find_stream(void *handle);
std::shared_ptr<Stream> start_stream(Device *device, bool non_blocking);
// Puts work at the stream's end, or into the graph it captures.
ON_CPU_API void enqueue(const std::shared_ptr<Stream> &stream, std::function<void()> work);
void enqueue_kernel(const std::shared_ptr<Stream> &stream, std::function<void(const Front *)> run, bool begins_early);
// CUDA_SUCCESS, or the end of the capture that the stream is in.
CUresult refuse_in_capture(const std::shared_ptr<Stream> &stream);
// The same for every stream of the current context: whoever waits for the device ends all captures, other threads' too.
CUresult refuse_in_captures();
void synchronize_device();

size_t page_bytes();
// Whether [at, at + bytes) lies in memory that the device can reach; host memory too where it is registered.
ON_CPU_API bool reachable(CUdeviceptr at, size_t bytes);
// How far into its allocation an address lies: a real one starts at a multiple of 256 bytes.
ON_CPU_API size_t offset_in_allocation(const void *at);
bool is_pinned(const void *at, size_t bytes);
// False if a test wants this allocation to fail (the file that CUDA_ON_CPU_ALLOCATIONS names). Asked outside all locks.
bool may_allocate(size_t bytes);
// True if CUDA_ON_CPU_REFUSE names it: what some machines do not allow.
bool is_refused(const char *what);

// What cuModuleGetFunction gives: a kernel of the libraries that the PTX names as well.
struct Function {
    const Kernel *kernel = nullptr;
    Library library;
    uint32_t most_threads = 1024, static_shared_bytes = 0, most_dynamic_bytes = STATIC_SHARED_LIMIT;
    std::atomic<bool> loaded{false}; // on the device; by cuFuncLoad, or late, by the first launch
};
void load_kernels();

} // namespace on_cpu
