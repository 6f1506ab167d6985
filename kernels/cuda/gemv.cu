// Few rows through f16 and bf16 weights: `gemv.cuh` says what and how.
//
// Bytes: 2 a weight, once. Arithmetic: 2 mma of 16x8x16 for 512 weights and 8 rows, no conversions.
// Rows of W are [rows, columns] without gaps, and columns is a multiple of 8: rows are aligned for wide loads. Other
// widths, which no model has, are left to `gemm.cu`.

#include "gemv.cuh"

// Elements k .. k + 7 of row `row` of x, through the cache; zeros behind the last row, and behind its end.
template <typename T>
__device__ __forceinline__ uint4 load_x(const T *x, unsigned row, unsigned batch, unsigned k,
                                        unsigned columns) {
    if (row >= batch || k >= columns) return make_uint4(0, 0, 0, 0);
    return __ldg(reinterpret_cast<const uint4 *>(x + size_t(row) * columns + k));
}

// The same of a row of W, which is read once.
template <typename T>
__device__ __forceinline__ uint4 load_eight(const T *row, unsigned k, unsigned columns) {
    return k < columns ? load_once(row + k) : make_uint4(0, 0, 0, 0);
}

template <typename T, int TILES>
__device__ __forceinline__ void gemv(const Part &part, unsigned columns, const T *x, unsigned batch,
                                     void *out, unsigned out_stride, unsigned out_is_f32) {
    int group = lane_index() / 4, mine = lane_index() % 4 * 8;
    // Rows behind the last one are read as the last one; what comes of them is not written.
    unsigned upper = min(part.first + group, part.rows - 1);
    unsigned lower = min(part.first + group + 8, part.rows - 1);
    const T *w = static_cast<const T *>(part.weight);
    const T *w_upper = w + size_t(upper) * columns, *w_lower = w + size_t(lower) * columns;
    float sums[TILES][4] = {};
    for (unsigned from = warp_index() * STRETCH; from < columns; from += WARPS * STRETCH) {
        uint4 a_upper[4], a_lower[4];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            a_upper[step] = load_eight(w_upper, from + 32 * step + mine, columns);
            a_lower[step] = load_eight(w_lower, from + 32 * step + mine, columns);
        }
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            unsigned first[4] = {a_upper[step].x, a_lower[step].x, a_upper[step].y, a_lower[step].y};
            unsigned second[4] = {a_upper[step].z, a_lower[step].z, a_upper[step].w, a_lower[step].w};
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                uint4 b = load_x(x, tile * 8 + group, batch, from + 32 * step + mine, columns);
                unsigned b_first[2] = {b.x, b.y}, b_second[2] = {b.z, b.w};
                mma_16x8x16<T>(sums[tile], first, b_first);
                mma_16x8x16<T>(sums[tile], second, b_second);
            }
        }
    }
    write_sums<T, TILES>(sums, part, batch, out, out_stride, out_is_f32);
}

#define GEMV(name, type, tiles)                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                     \
        name(PARTS_TAKEN, unsigned columns, const void *x, unsigned batch, void *out, unsigned out_stride,   \
             unsigned out_is_f32) {                                                                          \
        Part part = part_of_block(PARTS_GIVEN);                                                              \
        gemv<type, tiles>(part, columns, static_cast<const type *>(x), batch, out, out_stride, out_is_f32);  \
    }

GEMV(gemv_f16_8, f16, 1)
GEMV(gemv_f16_16, f16, 2)
GEMV(gemv_f16_32, f16, 4)
GEMV(gemv_bf16_8, bf16, 1)
GEMV(gemv_bf16_16, bf16, 2)
GEMV(gemv_bf16_32, bf16, 4)

ON_CPU_KERNEL(gemv_f16_8);
ON_CPU_KERNEL(gemv_f16_16);
ON_CPU_KERNEL(gemv_f16_32);
ON_CPU_KERNEL(gemv_bf16_8);
ON_CPU_KERNEL(gemv_bf16_16);
ON_CPU_KERNEL(gemv_bf16_32);
