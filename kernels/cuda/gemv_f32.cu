// Few rows through f32 weights, in f32.
//
//   out[r, column + o] = sum_k W[o, k] x[r, k] (+ bias[o])       r < batch <= ROWS
//
// A warp takes one output feature for all rows; a block has 8 warps. Lane l takes elements 4l .. 4l + 3 of
// each 128, in order, and the lanes' sums meet in a butterfly: an output's sum depends on W and its own row
// alone, whatever ROWS. Tensor cores have no f32, so here a row costs a multiplication a weight; 4 bytes a
// weight leave time for 8 of them. Where columns is no multiple of 4, rows are not aligned for wide loads,
// and elements are read one by one.

#include "common.cuh"

constexpr int WARPS = 8, STRIDE = 4 * LANES;

struct Part {
    const float *weight, *bias;
    unsigned rows, column, first;
};

__device__ __forceinline__ unsigned blocks_of(unsigned rows) { return (rows + WARPS - 1) / WARPS; }

// Elements k .. k + 3 of a row of `columns`, zeros behind its end. WIDE: columns is a multiple of 4.
template <bool WIDE>
__device__ __forceinline__ float4 load_four(const float *row, unsigned k, unsigned columns) {
    if (WIDE) return __ldg(reinterpret_cast<const float4 *>(row + k));
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (k < columns) v.x = row[k];
    if (k + 1 < columns) v.y = row[k + 1];
    if (k + 2 < columns) v.z = row[k + 2];
    if (k + 3 < columns) v.w = row[k + 3];
    return v;
}

// Adds what elements k .. k + 3 contribute.
template <bool WIDE, int ROWS>
__device__ __forceinline__ void add_four(float (&sums)[ROWS], const float *w, const float *x, unsigned k,
                                         unsigned columns, unsigned batch) {
    float4 a = load_four<WIDE>(w, k, columns);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        // Rows behind the last are read as the last; what comes of them is not written.
        float4 b = load_four<WIDE>(x + size_t(min(unsigned(r), batch - 1)) * columns, k, columns);
        sums[r] = fmaf(a.x, b.x, sums[r]);
        sums[r] = fmaf(a.y, b.y, sums[r]);
        sums[r] = fmaf(a.z, b.z, sums[r]);
        sums[r] = fmaf(a.w, b.w, sums[r]);
    }
}

template <int ROWS>
__device__ __forceinline__ void gemv(const Part &part, unsigned columns, const float *x, unsigned batch,
                                     float *out, unsigned out_stride) {
    unsigned feature = part.first + warp_index();
    if (feature >= part.rows) return; // the whole warp
    const float *w = part.weight + size_t(feature) * columns;
    float sums[ROWS] = {};
    if (columns % 4 == 0) {
#pragma unroll 4
        for (unsigned k = 4 * lane_index(); k < columns; k += STRIDE)
            add_four<true>(sums, w, x, k, columns, batch);
    } else {
#pragma unroll 1
        for (unsigned k = 4 * lane_index(); k < columns; k += STRIDE)
            add_four<false>(sums, w, x, k, columns, batch);
    }
    float bias = part.bias ? part.bias[feature] : 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float sum = warp_sum(sums[r]);
        if (lane_index() == 0 && r < int(batch))
            out[size_t(r) * out_stride + part.column + feature] = sum + bias;
    }
}

template <int ROWS>
__device__ __forceinline__ void gemv_parts(const Part (&parts)[3], unsigned columns, const float *x,
                                           unsigned batch, float *out, unsigned out_stride) {
    unsigned block = blockIdx.x, first = blocks_of(parts[0].rows), second = blocks_of(parts[1].rows);
    Part part = block < first ? parts[0] : block < first + second ? parts[1] : parts[2];
    block -= block < first ? 0 : block < first + second ? first : first + second;
    part.first = block * WARPS;
    gemv<ROWS>(part, columns, x, batch, out, out_stride);
}

// The same arguments as those of the other kernels for few rows; x and out are f32.
#define GEMV_F32(name, ROWS)                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                        \
        name(const float *w0, const float *w1, const float *w2, const float *bias0, const float *bias1,      \
             const float *bias2, unsigned rows0, unsigned rows1, unsigned rows2, unsigned column0,           \
             unsigned column1, unsigned column2, unsigned columns, const float *x, unsigned batch,           \
             float *out, unsigned out_stride, unsigned out_is_f32) {                                         \
        Part parts[3] = {{w0, bias0, rows0, column0, 0},                                                     \
                         {w1, bias1, rows1, column1, 0},                                                     \
                         {w2, bias2, rows2, column2, 0}};                                                    \
        gemv_parts<ROWS>(parts, columns, x, batch, out, out_stride);                                         \
    }

GEMV_F32(gemv_f32_1, 1)
GEMV_F32(gemv_f32_2, 2)
GEMV_F32(gemv_f32_4, 4)
GEMV_F32(gemv_f32_8, 8)

ON_CPU_KERNEL(gemv_f32_1);
ON_CPU_KERNEL(gemv_f32_2);
ON_CPU_KERNEL(gemv_f32_4);
ON_CPU_KERNEL(gemv_f32_8);
