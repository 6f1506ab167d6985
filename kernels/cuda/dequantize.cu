// Rows of a weight of any kind as plain rows of f32, f16 or bf16: what the matrix units multiply when many
// rows of activations share them, or when activations have another kind than the weight.
//
//   out[r, k] = W[first + r, k]        r < count, out is [count, columns]
//
// A thread takes eight neighbours: one octet of a block format (4 to 8 bytes and a shared scale), written as
// 16 or 32 bytes. Bytes a weight: 0.6 to 1.1 read, 2 written in a 16-bit kind; no arithmetic worth counting.

#include "quant.cuh"

// Numbers of Rust's `kind_number`.
constexpr unsigned TO_F32 = 0, TO_F16 = 1;

template <typename T>
__device__ __forceinline__ void store_eight(void *out, size_t at, const float (&values)[8]) {
    constexpr int COUNT = Pack<T>::COUNT;
#pragma unroll
    for (int from = 0; from < 8; from += COUNT) {
        Pack<T> pack;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) pack.at[i] = from_float<T>(values[from + i]);
        store_pack(static_cast<T *>(out) + at + from, pack);
    }
}

__device__ __forceinline__ void store_one(void *out, unsigned kind, size_t at, float value) {
    if (kind == TO_F32) {
        static_cast<float *>(out)[at] = value;
    } else if (kind == TO_F16) {
        static_cast<f16 *>(out)[at] = from_float<f16>(value);
    } else {
        static_cast<bf16 *>(out)[at] = from_float<bf16>(value);
    }
}

template <Form F>
__device__ __forceinline__ void dequantize(const void *weight, unsigned rows, unsigned columns,
                                           unsigned first, unsigned count, void *out, unsigned kind) {
    size_t at = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (at >= size_t(count) * columns) return;
    float values[8];
    octet<F>(weight, rows, columns, unsigned(first + at / columns), unsigned(at % columns), values);
    if (kind == TO_F32) {
        store_eight<float>(out, at, values);
    } else if (kind == TO_F16) {
        store_eight<f16>(out, at, values);
    } else {
        store_eight<bf16>(out, at, values);
    }
}

// Float weights are one line of numbers, and rows need not be multiples of eight.
template <typename T>
__device__ __forceinline__ void convert_rows(const void *weight, unsigned columns, unsigned first,
                                             unsigned count, void *out, unsigned kind) {
    const T *from = static_cast<const T *>(weight) + size_t(first) * columns;
    size_t at = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8, all = size_t(count) * columns;
    for (size_t i = at; i < all && i < at + 8; ++i) store_one(out, kind, i, to_float(from[i]));
}

#define DEQUANTIZE(name, form)                                                                               \
    extern "C" __global__ void name(const void *weight, unsigned rows, unsigned columns, unsigned first,     \
                                    unsigned count, void *out, unsigned kind) {                              \
        dequantize<Form::form>(weight, rows, columns, first, count, out, kind);                              \
    }
#define CONVERT_ROWS(name, type)                                                                             \
    extern "C" __global__ void name(const void *weight, unsigned rows, unsigned columns, unsigned first,     \
                                    unsigned count, void *out, unsigned kind) {                              \
        convert_rows<type>(weight, columns, first, count, out, kind);                                        \
    }

CONVERT_ROWS(dequantize_f32, float)
CONVERT_ROWS(dequantize_f16, f16)
CONVERT_ROWS(dequantize_bf16, bf16)
DEQUANTIZE(dequantize_q4_0, q4_0)
DEQUANTIZE(dequantize_q4_1, q4_1)
DEQUANTIZE(dequantize_q5_0, q5_0)
DEQUANTIZE(dequantize_q5_1, q5_1)
DEQUANTIZE(dequantize_q8_0, q8_0)
DEQUANTIZE(dequantize_q4_k, q4_k)
DEQUANTIZE(dequantize_q5_k, q5_k)
DEQUANTIZE(dequantize_q6_k, q6_k)

ON_CPU_KERNEL(dequantize_f32);
ON_CPU_KERNEL(dequantize_f16);
ON_CPU_KERNEL(dequantize_bf16);
ON_CPU_KERNEL(dequantize_q4_0);
ON_CPU_KERNEL(dequantize_q4_1);
ON_CPU_KERNEL(dequantize_q5_0);
ON_CPU_KERNEL(dequantize_q5_1);
ON_CPU_KERNEL(dequantize_q8_0);
ON_CPU_KERNEL(dequantize_q4_k);
ON_CPU_KERNEL(dequantize_q5_k);
ON_CPU_KERNEL(dequantize_q6_k);
