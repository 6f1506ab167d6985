// out[r, column + o] += bias[o], behind a product that a library wrote.
//
// In f32, rounded once more to the kind of out: biases may be much larger than the product (keys of Qwen2),
// so they are not rounded before they are added. A block takes a row at a time; a thread an output. Bytes:
// out, once read, once written.

#include "common.cuh"

template <typename T>
__device__ __forceinline__ void add_bias(T *out, unsigned rows, unsigned stride, unsigned column,
                                         unsigned width, const float *bias) {
    unsigned feature = blockIdx.x * blockDim.x + threadIdx.x;
    if (feature >= width) return;
    for (unsigned row = blockIdx.y; row < rows; row += gridDim.y) {
        T *to = out + size_t(row) * stride + column + feature;
        *to = from_float<T>(to_float(*to) + bias[feature]);
    }
}

#define ADD_BIAS(name, type)                                                                                 \
    extern "C" __global__ void name(type *out, unsigned rows, unsigned stride, unsigned column,              \
                                    unsigned width, const float *bias) {                                     \
        add_bias<type>(out, rows, stride, column, width, bias);                                              \
    }

ADD_BIAS(add_bias_f32, float)
ADD_BIAS(add_bias_f16, f16)
ADD_BIAS(add_bias_bf16, bf16)

ON_CPU_KERNEL(add_bias_f32);
ON_CPU_KERNEL(add_bias_f16);
ON_CPU_KERNEL(add_bias_bf16);
