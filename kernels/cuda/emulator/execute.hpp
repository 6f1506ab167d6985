// How a kernel is executed on the CPU: what `language.hpp` is built upon.
//
// Every CUDA thread (a *lane* here) of a block is a fiber with a stack of its own; a block stays on one thread of the
// operating system, and the blocks of a grid are spread over a few. A lane runs until it ends or meets a barrier,
// so a kernel without barriers runs like a loop. See `execute.cpp`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace on_cpu {

struct Dim3 {
    unsigned x, y, z;
    constexpr Dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// A line of a kernel's source.
struct Place {
    const char *file;
    int line;
};

// What a lane sees of its block.
struct BlockView {
    Dim3 index, threads, grid;
    unsigned char *dynamic_shared;
};

// What a lane sees of itself.
struct LaneView {
    Dim3 thread;
    const BlockView *block;
    unsigned in_warp;
    bool has_waited; // for the kernel in front
};

// The lane that runs now. Fibers change it when they take turns, always inside a call that the compiler cannot see
// through, so it is read anew behind every barrier.
extern __thread LaneView *lane __attribute__((tls_model("initial-exec"), visibility("default")));

// The most that a lane can say to the others of its warp at once.
constexpr size_t SAID_BYTES = 32;

// What the 32 lanes of a warp said; `combine` may rewrite it.
struct Said {
    alignas(16) unsigned char bytes[32][SAID_BYTES];
};

#define ON_CPU_API __attribute__((visibility("default")))

// Waits for every lane of the block; returns how many came with a predicate other than 0.
ON_CPU_API int sync_block(int predicate, Place here);
// The lanes of this warp that have not ended.
ON_CPU_API unsigned active_mask();
// Waits for the kernel in front of this one, if that has not run yet.
ON_CPU_API void await_front(Place here);
// Lets the other lanes, and other threads of the machine, go on.
ON_CPU_API void sleep(unsigned ns);
// Reports a fault of the kernel, ends the whole launch, and makes the device unusable. Does not return.
[[noreturn]] ON_CPU_API void fail_lane(const char *why, Place here);

// cp.async: bytes that arrive when they are waited for. The target is poisoned until then.
ON_CPU_API void copy_later(void *to, const void *from, unsigned bytes, Place here);
ON_CPU_API void commit_copies();
ON_CPU_API void wait_copies(unsigned pending_groups);

struct Rendezvous;
ON_CPU_API Rendezvous *meet(unsigned mask, const void *said, size_t bytes, void (*combine)(Said &), Place here);
ON_CPU_API const Said &heard(const Rendezvous *rendezvous);
ON_CPU_API void leave(Rendezvous *rendezvous);

// All lanes in the mask meet, each saying something; whoever has met may read what everyone said. The last to
// arrive first applies `combine`, if there is one.
class Meeting {
  public:
    Meeting(unsigned mask, const void *said, size_t bytes, void (*combine)(Said &), Place here)
        : rendezvous_(meet(mask, said, bytes, combine, here)) {}
    ~Meeting() { leave(rendezvous_); }
    Meeting(const Meeting &) = delete;
    Meeting &operator=(const Meeting &) = delete;
    template <typename T> const T *said(unsigned by) const {
        return reinterpret_cast<const T *>(heard(rendezvous_).bytes[by]);
    }

  private:
    Rendezvous *rendezvous_;
};

// ---- Kernels make themselves known --------------------------------------------------------------------------------

// What the driver knows of a kernel: how to call it with an array of pointers to its arguments.
struct Kernel {
    const char *name;
    void (*call)(void **arguments);
    const uint32_t *argument_bytes;
    const bool *argument_is_pointer;
    uint32_t arguments;
    const void *address;
};
ON_CPU_API void announce(const Kernel &kernel);

template <auto function> struct Announce;
template <typename... A, void (*function)(A...)> struct Announce<function> {
    static_assert(((std::is_arithmetic_v<A> || std::is_pointer_v<A>) && ...), "kernels take plain scalars and pointers");
    template <size_t... I> static void call_with(void **arguments, std::index_sequence<I...>) {
        function(*static_cast<std::remove_const_t<A> *>(arguments[I])...);
    }
    static void call(void **arguments) { call_with(arguments, std::index_sequence_for<A...>()); }
    explicit Announce(const char *name) {
        static const uint32_t bytes[] = {sizeof(A)..., 0};
        static const bool is_pointer[] = {std::is_pointer_v<A>..., false};
        announce({name, call, bytes, is_pointer, sizeof...(A), reinterpret_cast<const void *>(&call)});
    }
};

} // namespace on_cpu

// Written once for every kernel, at the end of its file.
#define ON_CPU_KERNEL(kernel) static const on_cpu::Announce<&kernel> on_cpu_announce_##kernel{#kernel}
