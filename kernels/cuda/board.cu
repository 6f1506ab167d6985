// The device's end of the board: rows for workers on the CPU, and the sums that they answer with (CaraServe
// §4.2).
//
//   copy_and_signal:  slab[i] = f32(x[rows[i]]) for all i, then signal = value
//   await_signal:     waits until signal has come to value
//   add_sums:         out[row, column] += sums[row, column]
//
// Slab, signal and sums are memory of the host that the device reaches over the bus. The first is the fused
// operator: copy and signal are one kernel in the order of the stream, so the host neither waits for the copy
// nor launches anything after it, and the kernels of the base model go on behind it.
//
// The signal must not overtake a row. Each thread writes its numbers and makes them visible to the whole
// system (__threadfence_system), the block meets, and one thread takes a ticket. Whoever takes the last
// ticket knows that all blocks have written: it puts the ticket back to 0 for the next launch and stores the
// signal with release. The host loads it with acquire and reads the rows.
//
// Numbers count upwards and wrap, so "has come to" is a comparison of the difference's sign, as the driver's
// own wait for a memory word does it: int(signal - value) >= 0.
//
// Bytes: copy_and_signal reads rows * width * sizeof(T) from the device and writes rows * width * 4 over the
// bus, 512 neighbouring bytes a warp. add_sums reads rows * width * 4 over the bus and reads and writes as
// many outputs.

#include "common.cuh"

static constexpr int THREADS = 256;

// Four neighbours of whatever kind.
template <typename T> struct __align__(4 * sizeof(T)) Four { T at[4]; };

// Sixteen bytes that another processor has just written: from where they are, never from a cache.
__device__ __forceinline__ float4 load_system4(const float *from) {
#ifdef ON_CPU
    return *reinterpret_cast<const float4 *>(from);
#else
    float4 four;
    asm volatile("ld.volatile.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                 : "l"(from)
                 : "memory");
    return four;
#endif
}

// Rows as f32, one after another; `wide` if both sides allow four numbers at a time.
template <typename T>
__device__ void copy_rows(const T *x, const unsigned *rows, unsigned count, unsigned width, float *to,
                          bool wide) {
    unsigned step = wide ? 4 : 1, across = width / step;
    size_t all = size_t(count) * across;
    size_t threads = size_t(gridDim.x) * THREADS;
    for (size_t at = size_t(blockIdx.x) * THREADS + threadIdx.x; at < all; at += threads) {
        size_t row = at / across, column = at % across * step;
        const T *from = x + size_t(rows[row]) * width + column;
        float *slab = to + row * width + column;
        if (wide) {
            Four<T> four = *reinterpret_cast<const Four<T> *>(from);
            float4 values = {to_float(four.at[0]), to_float(four.at[1]), to_float(four.at[2]),
                             to_float(four.at[3])};
            *reinterpret_cast<float4 *>(slab) = values;
        } else {
            *slab = to_float(*from);
        }
    }
}

// Without a signal it is a plain copy.
template <typename T>
__device__ void copy_and_signal(const T *x, const unsigned *rows, unsigned count, unsigned width, float *to,
                                unsigned wide, unsigned *signal, unsigned value, unsigned *ticket) {
    copy_rows(x, rows, count, width, to, wide != 0);
    if (signal == nullptr) return;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x != 0) return;
    // Publishes what the whole block has written: its fence must stand behind the barrier.
    __threadfence_system();
    if (atomicAdd(ticket, 1u) + 1 != gridDim.x) return;
    *ticket = 0;
    // What others have written before they took their tickets is ours to announce from here on.
    __threadfence_system();
    store_release_system(signal, value);
}

extern "C" __global__ void __launch_bounds__(THREADS)
copy_and_signal_f32(const float *x, const unsigned *rows, unsigned count, unsigned width, float *to,
                    unsigned wide, unsigned *signal, unsigned value, unsigned *ticket) {
    copy_and_signal(x, rows, count, width, to, wide, signal, value, ticket);
}
extern "C" __global__ void __launch_bounds__(THREADS)
copy_and_signal_f16(const f16 *x, const unsigned *rows, unsigned count, unsigned width, float *to,
                    unsigned wide, unsigned *signal, unsigned value, unsigned *ticket) {
    copy_and_signal(x, rows, count, width, to, wide, signal, value, ticket);
}
extern "C" __global__ void __launch_bounds__(THREADS)
copy_and_signal_bf16(const bf16 *x, const unsigned *rows, unsigned count, unsigned width, float *to,
                     unsigned wide, unsigned *signal, unsigned value, unsigned *ticket) {
    copy_and_signal(x, rows, count, width, to, wide, signal, value, ticket);
}

// One thread. Gives up after `limit_us`, and says so in `fault`; then the waits behind it do not begin, so a
// pass whose workers are gone ends after one limit, not after one for each layer.
extern "C" __global__ void
await_signal(const unsigned *signal, unsigned value, unsigned *fault, unsigned limit_us) {
    if (threadIdx.x != 0) return;
    if (int(load_acquire_system(signal) - value) >= 0) return;
    if (load_acquire_system(fault) != 0) return;
    long long begin = now_ns(), limit_ns = 1000LL * limit_us;
    unsigned pause_ns = 32;
    while (int(load_acquire_system(signal) - value) < 0) {
        if (now_ns() - begin > limit_ns) {
            store_release_system(fault, 1);
            return;
        }
        // Every look crosses the bus: not too many of them.
        __nanosleep(pause_ns);
        pause_ns = min(2 * pause_ns, 512u);
    }
}

// `sums` is [rows, width], `out` the first of them in rows of `stride`.
template <typename T>
__device__ void add_sums(const float *sums, unsigned rows, unsigned width, T *out, unsigned stride,
                         bool wide) {
    unsigned step = wide ? 4 : 1, across = width / step;
    size_t all = size_t(rows) * across;
    size_t threads = size_t(gridDim.x) * THREADS;
    for (size_t at = size_t(blockIdx.x) * THREADS + threadIdx.x; at < all; at += threads) {
        size_t row = at / across, column = at % across * step;
        T *to = out + row * stride + column;
        const float *from = sums + row * width + column;
        if (wide) {
            float4 add = load_system4(from);
            Four<T> four = *reinterpret_cast<Four<T> *>(to);
            four.at[0] = from_float<T>(to_float(four.at[0]) + add.x);
            four.at[1] = from_float<T>(to_float(four.at[1]) + add.y);
            four.at[2] = from_float<T>(to_float(four.at[2]) + add.z);
            four.at[3] = from_float<T>(to_float(four.at[3]) + add.w);
            *reinterpret_cast<Four<T> *>(to) = four;
        } else {
            *to = from_float<T>(to_float(*to) + *const_cast<const volatile float *>(from));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
add_sums_f32(const float *sums, unsigned rows, unsigned width, float *out, unsigned stride, unsigned wide) {
    add_sums(sums, rows, width, out, stride, wide != 0);
}
extern "C" __global__ void __launch_bounds__(THREADS)
add_sums_f16(const float *sums, unsigned rows, unsigned width, f16 *out, unsigned stride, unsigned wide) {
    add_sums(sums, rows, width, out, stride, wide != 0);
}
extern "C" __global__ void __launch_bounds__(THREADS)
add_sums_bf16(const float *sums, unsigned rows, unsigned width, bf16 *out, unsigned stride, unsigned wide) {
    add_sums(sums, rows, width, out, stride, wide != 0);
}

ON_CPU_KERNEL(copy_and_signal_f32);
ON_CPU_KERNEL(copy_and_signal_f16);
ON_CPU_KERNEL(copy_and_signal_bf16);
ON_CPU_KERNEL(await_signal);
ON_CPU_KERNEL(add_sums_f32);
ON_CPU_KERNEL(add_sums_f16);
ON_CPU_KERNEL(add_sums_bf16);
