// Moving rows about, and changing a few columns of them.
//
//     gather:         to[i, c] = from[rows[i], c]
//     scale_columns:  values[first + i, column + c] *= factors[c]                           (IA3)
//     place:          to[first + i, column + c] = values[i, c]                               (prefix tuning)
//     add_weighted:   to[rows[i], c] += weights[i] * from[i, c]                              (mixtures of experts)
//     cap:            values[i] = cap * tanh(values[i] / cap)                                (logits of Gemma 2)
//
// Matrices are row-major. Gathering does not look at the numbers: it moves units of 16 bytes where rows are
// whole ones and of 2 bytes else, whatever the kind. A row that does not exist is not read: its copy is all
// ones, which is NaN in every kind, so that a wrong index shows instead of leaking somebody's numbers.
//
// Scaling and placing are for few columns of few rows: a number a thread, one row a block in x, chunks of
// columns in y. So is adding, of whole rows to sums in 32 bits: each row is named once, and one that does not exist is left out.
#include "common.cuh"

constexpr int THREADS = 256;

// ---- Gather ----------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 all_ones(uint4) { return make_uint4(~0u, ~0u, ~0u, ~0u); }
__device__ __forceinline__ unsigned short all_ones(unsigned short) { return 0xFFFF; }

// `width` is the units of a row.
template <typename Unit> __device__ __forceinline__ void
gather(const Unit *from, unsigned from_rows, const unsigned *rows, Unit *to, unsigned width) {
    unsigned row = rows[blockIdx.x];
    for (unsigned c = blockIdx.y * THREADS + threadIdx.x; c < width; c += gridDim.y * THREADS)
        to[size_t(blockIdx.x) * width + c] =
            row < from_rows ? from[size_t(row) * width + c] : all_ones(Unit());
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_rows_wide(const uint4 *from, unsigned from_rows, const unsigned *rows, uint4 *to, unsigned width) {
    gather(from, from_rows, rows, to, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    gather_rows_narrow(const unsigned short *from, unsigned from_rows, const unsigned *rows,
                       unsigned short *to, unsigned width) {
    gather(from, from_rows, rows, to, width);
}

// ---- Columns ---------------------------------------------------------------------------------------------

// `values` begins at the first row; rows are `stride` apart.
template <typename T> __device__ __forceinline__ void
scale_columns(T *values, unsigned stride, unsigned column, const float *factors, unsigned count) {
    unsigned c = blockIdx.y * THREADS + threadIdx.x;
    if (c >= count) return;
    T *value = values + size_t(blockIdx.x) * stride + column + c;
    *value = from_float<T>(to_float(*value) * factors[c]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    scale_columns_f32(float *values, unsigned stride, unsigned column, const float *factors, unsigned count) {
    scale_columns(values, stride, column, factors, count);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    scale_columns_f16(f16 *values, unsigned stride, unsigned column, const float *factors, unsigned count) {
    scale_columns(values, stride, column, factors, count);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    scale_columns_bf16(bf16 *values, unsigned stride, unsigned column, const float *factors, unsigned count) {
    scale_columns(values, stride, column, factors, count);
}

// `to` begins at the first row; rows are `stride` apart. `values` has rows of `width`.
template <typename T> __device__ __forceinline__ void place(T *to, unsigned stride, unsigned column,
                                                            const float *values, unsigned width) {
    unsigned c = blockIdx.y * THREADS + threadIdx.x;
    if (c >= width) return;
    to[size_t(blockIdx.x) * stride + column + c] = from_float<T>(values[size_t(blockIdx.x) * width + c]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    place_f32(float *to, unsigned stride, unsigned column, const float *values, unsigned width) {
    place(to, stride, column, values, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    place_f16(f16 *to, unsigned stride, unsigned column, const float *values, unsigned width) {
    place(to, stride, column, values, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    place_bf16(bf16 *to, unsigned stride, unsigned column, const float *values, unsigned width) {
    place(to, stride, column, values, width);
}

template <typename T> __device__ __forceinline__ void
add_weighted(const T *from, const unsigned *rows, const float *weights, float *to, unsigned to_rows, unsigned width) {
    unsigned c = blockIdx.y * THREADS + threadIdx.x, row = rows[blockIdx.x];
    if (c >= width || row >= to_rows) return;
    to[size_t(row) * width + c] += weights[blockIdx.x] * to_float(from[size_t(blockIdx.x) * width + c]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_weighted_f32(const float *from, const unsigned *rows, const float *weights, float *to, unsigned to_rows,
                     unsigned width) {
    add_weighted(from, rows, weights, to, to_rows, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    add_weighted_f16(const f16 *from, const unsigned *rows, const float *weights, float *to, unsigned to_rows,
                     unsigned width) {
    add_weighted(from, rows, weights, to, to_rows, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    add_weighted_bf16(const bf16 *from, const unsigned *rows, const float *weights, float *to, unsigned to_rows,
                      unsigned width) {
    add_weighted(from, rows, weights, to, to_rows, width);
}

extern "C" __global__ void __launch_bounds__(THREADS) cap_f32(float *values, float cap, unsigned long long numbers) {
    size_t at = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (at < numbers) values[at] = cap * tanhf(values[at] / cap);
}

ON_CPU_KERNEL(cap_f32);
ON_CPU_KERNEL(gather_rows_wide);
ON_CPU_KERNEL(gather_rows_narrow);
ON_CPU_KERNEL(scale_columns_f32);
ON_CPU_KERNEL(scale_columns_f16);
ON_CPU_KERNEL(scale_columns_bf16);
ON_CPU_KERNEL(place_f32);
ON_CPU_KERNEL(place_f16);
ON_CPU_KERNEL(place_bf16);
ON_CPU_KERNEL(add_weighted_f32);
ON_CPU_KERNEL(add_weighted_f16);
ON_CPU_KERNEL(add_weighted_bf16);
