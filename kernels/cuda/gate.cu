// The gate of a feed-forward block.
//
//     out[r, c] = silu(gate[r, c]) * up[r, c],   silu(x) = x / (1 + e^-x)
//
// gate_up has rows of [gate | up], 2 * width numbers of the model's kind; out has rows of width. The
// arithmetic is f32.
//
// Nothing but memory traffic, so a thread moves a pack (16 bytes) of each of the three. Widths that are not
// whole packs take the plain kernel, a number a thread.
#include "common.cuh"

constexpr int THREADS = 256;

__device__ __forceinline__ float silu_times(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

// `numbers` is rows * width.
template <typename T> __device__ __forceinline__ void silu_mul(const T *gate_up, T *out, unsigned width,
                                                               unsigned long long numbers) {
    constexpr int COUNT = Pack<T>::COUNT;
    size_t at = (size_t(blockIdx.x) * THREADS + threadIdx.x) * COUNT;
    if (at >= numbers) return;
    size_t row = at / width;
    const T *gates = gate_up + row * width + at; // 2 * row * width + (at - row * width)
    Pack<T> gate = load_pack(gates), up = load_pack(gates + width), gated;
#pragma unroll
    for (int c = 0; c < COUNT; ++c)
        gated.at[c] = from_float<T>(silu_times(to_float(gate.at[c]), to_float(up.at[c])));
    store_pack(out + at, gated);
}

template <typename T> __device__ __forceinline__ void silu_mul_plain(const T *gate_up, T *out, unsigned width,
                                                                     unsigned long long numbers) {
    size_t at = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= numbers) return;
    const T *gate = gate_up + at / width * width + at;
    out[at] = from_float<T>(silu_times(to_float(gate[0]), to_float(gate[width])));
}

// width is a multiple of Pack<T>::COUNT; pointers are 16-byte aligned.
extern "C" __global__ void __launch_bounds__(THREADS)
    silu_mul_f32(const float *gate_up, float *out, unsigned width, unsigned long long numbers) {
    silu_mul(gate_up, out, width, numbers);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    silu_mul_f16(const f16 *gate_up, f16 *out, unsigned width, unsigned long long numbers) {
    silu_mul(gate_up, out, width, numbers);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    silu_mul_bf16(const bf16 *gate_up, bf16 *out, unsigned width, unsigned long long numbers) {
    silu_mul(gate_up, out, width, numbers);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    silu_mul_plain_f32(const float *gate_up, float *out, unsigned width, unsigned long long numbers) {
    silu_mul_plain(gate_up, out, width, numbers);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    silu_mul_plain_f16(const f16 *gate_up, f16 *out, unsigned width, unsigned long long numbers) {
    silu_mul_plain(gate_up, out, width, numbers);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    silu_mul_plain_bf16(const bf16 *gate_up, bf16 *out, unsigned width, unsigned long long numbers) {
    silu_mul_plain(gate_up, out, width, numbers);
}

ON_CPU_KERNEL(silu_mul_f32);
ON_CPU_KERNEL(silu_mul_f16);
ON_CPU_KERNEL(silu_mul_bf16);
ON_CPU_KERNEL(silu_mul_plain_f32);
ON_CPU_KERNEL(silu_mul_plain_f16);
ON_CPU_KERNEL(silu_mul_plain_bf16);
