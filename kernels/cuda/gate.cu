// The gate of a feed-forward block.
//
//     out[r, c] = gate[r, c] / (1 + e^-z) * up[r, c]
//     z = x for silu, z = 2 sqrt(2 / pi) (x + 0.044715 x^3) for the approximation of gelu by a tanh
//
// gate_up has rows of [gate | up], 2 * width numbers of the model's kind; out has rows of width. The
// arithmetic is f32.
//
// Nothing but memory traffic, so a thread moves a pack (16 bytes) of each of the three. Widths that are not
// whole packs take the plain kernel, a number a thread.
#include "common.cuh"

constexpr int THREADS = 256;

struct Silu {
    static __device__ __forceinline__ float argument(float x) { return x; }
};
struct Gelu {
    static __device__ __forceinline__ float argument(float x) { return x * fmaf(x * x, 0.0713548163f, 1.5957691216f); }
};

template <typename G> __device__ __forceinline__ float open(float gate, float up) {
    return gate / (1.0f + expf(-G::argument(gate))) * up;
}

// `numbers` is rows * width.
template <typename G, typename T> __device__ __forceinline__ void gate_mul(const T *gate_up, T *out, unsigned width,
                                        unsigned long long numbers) {
    constexpr int COUNT = Pack<T>::COUNT;
    size_t at = (size_t(blockIdx.x) * THREADS + threadIdx.x) * COUNT;
    await_front();
    if (at >= numbers) return;
    size_t row = at / width;
    const T *gates = gate_up + row * width + at; // 2 * row * width + (at - row * width)
    Pack<T> gate = load_pack(gates), up = load_pack(gates + width), gated;
#pragma unroll
    for (int c = 0; c < COUNT; ++c)
        gated.at[c] = from_float<T>(open<G>(to_float(gate.at[c]), to_float(up.at[c])));
    store_pack(out + at, gated);
}

template <typename G, typename T> __device__ __forceinline__ void gate_mul_plain(const T *gate_up, T *out, unsigned width,
                                                                     unsigned long long numbers) {
    size_t at = size_t(blockIdx.x) * THREADS + threadIdx.x;
    await_front();
    if (at >= numbers) return;
    const T *gate = gate_up + at / width * width + at;
    out[at] = from_float<T>(open<G>(to_float(gate[0]), to_float(gate[width])));
}

// width is a multiple of Pack<T>::COUNT; pointers are 16-byte aligned. Plain ones take any width.
#define GATE_MUL(name, kernel, gate, type)                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                    \
        name(const type *gate_up, type *out, unsigned width, unsigned long long numbers) {                   \
        kernel<gate>(gate_up, out, width, numbers);                                                          \
    }

GATE_MUL(silu_mul_f32, gate_mul, Silu, float)
GATE_MUL(silu_mul_f16, gate_mul, Silu, f16)
GATE_MUL(silu_mul_bf16, gate_mul, Silu, bf16)
GATE_MUL(gelu_mul_f32, gate_mul, Gelu, float)
GATE_MUL(gelu_mul_f16, gate_mul, Gelu, f16)
GATE_MUL(gelu_mul_bf16, gate_mul, Gelu, bf16)
GATE_MUL(silu_mul_plain_f32, gate_mul_plain, Silu, float)
GATE_MUL(silu_mul_plain_f16, gate_mul_plain, Silu, f16)
GATE_MUL(silu_mul_plain_bf16, gate_mul_plain, Silu, bf16)
GATE_MUL(gelu_mul_plain_f32, gate_mul_plain, Gelu, float)
GATE_MUL(gelu_mul_plain_f16, gate_mul_plain, Gelu, f16)
GATE_MUL(gelu_mul_plain_bf16, gate_mul_plain, Gelu, bf16)

ON_CPU_KERNEL(silu_mul_f32);
ON_CPU_KERNEL(silu_mul_f16);
ON_CPU_KERNEL(silu_mul_bf16);
ON_CPU_KERNEL(gelu_mul_f32);
ON_CPU_KERNEL(gelu_mul_f16);
ON_CPU_KERNEL(gelu_mul_bf16);
ON_CPU_KERNEL(silu_mul_plain_f32);
ON_CPU_KERNEL(silu_mul_plain_f16);
ON_CPU_KERNEL(silu_mul_plain_bf16);
ON_CPU_KERNEL(gelu_mul_plain_f32);
ON_CPU_KERNEL(gelu_mul_plain_f16);
ON_CPU_KERNEL(gelu_mul_plain_bf16);
