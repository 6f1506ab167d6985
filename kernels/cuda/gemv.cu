// Few rows through f16 and bf16 weights: `gemv.cuh` says what and how.
//
// Bytes: 2 a weight, once. Arithmetic: 2 mma of 16x8x16 for 512 weights and 8 rows, no conversions.
// The kernels for 32 rows take two bands. A warp then reads 8 KB of x for 8 KB of W, not 8 for 4: 32 rows of
// x are more than the first-level cache holds, and the second would have to give three bytes for each one of
// W, which is more than it can while W comes as fast as memory allows.
// Rows of W are [rows, columns] without gaps, and columns is a multiple of 8: rows are aligned for wide
// loads. Other widths, which no model has, are left to `gemm.cu`.

#include "gemv.cuh"

// Elements k .. k + 7 of a row of W, which is read once; zeros behind its end.
template <typename T>
__device__ __forceinline__ uint4 load_eight(const T *row, unsigned k, unsigned columns) {
    return k < columns ? load_once(row + k) : make_uint4(0, 0, 0, 0);
}

// HELD steps of 32 elements of W at a time: as many as make 128 bytes a thread.
template <typename T, int BANDS, int TILES>
__device__ __forceinline__ void gemv(const Part &part, unsigned columns, const T *x, unsigned batch,
                                     void *out, unsigned out_stride, unsigned out_is_f32) {
    constexpr int HELD = 4 / BANDS;
    int group = lane_index() / 4, mine = lane_index() % 4 * 8;
    const T *rows[BANDS][2];
#pragma unroll
    for (int at = 0; at < 2 * BANDS; ++at) {
        // Rows behind the last one are read as the last one; what comes of them is not written.
        unsigned row = min(part.first + group + 8 * at, part.rows - 1);
        rows[at / 2][at % 2] = static_cast<const T *>(part.weight) + size_t(row) * columns;
    }
    x += group * columns;
    // A warp's turns: as many in each of its stretches as it takes.
    constexpr unsigned HERE = 32 * HELD, TURNS = STRETCH / HERE;
    auto begin_of = [](unsigned turn) {
        return (turn / TURNS * WARPS + warp_index()) * STRETCH + turn % TURNS * HERE;
    };
    uint4 w[HELD][BANDS][2];
    auto load = [&](unsigned from) {
#pragma unroll
        for (int step = 0; step < HELD; ++step)
#pragma unroll
            for (int at = 0; at < 2 * BANDS; ++at)
                w[step][at / 2][at % 2] = load_eight(rows[at / 2][at % 2], from + 32 * step, columns);
    };
    load(begin_of(0) + mine);
    await_front();
    float sums[BANDS][TILES][4] = {};
#pragma unroll 1
    for (unsigned turn = 0, from; (from = begin_of(turn)) < columns; ++turn) {
        if (turn > 0) load(from + mine);
#pragma unroll
        for (int step = 0; step < HELD; ++step) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                // Through the cache; zeros behind the last row of x, and behind its end.
                unsigned k = from + mine + 32 * step;
                uint4 b = make_uint4(0, 0, 0, 0);
                if (tile * 8 + group < int(batch) && k < columns)
                    b = *reinterpret_cast<const uint4 *>(x + (tile * 8 * columns + k));
                unsigned b_first[2] = {b.x, b.y}, b_second[2] = {b.z, b.w};
#pragma unroll
                for (int band = 0; band < BANDS; ++band) {
                    const uint4 &upper = w[step][band][0], &lower = w[step][band][1];
                    unsigned first[4] = {upper.x, lower.x, upper.y, lower.y};
                    unsigned second[4] = {upper.z, lower.z, upper.w, lower.w};
                    mma_16x8x16<T>(sums[band][tile], first, b_first);
                    mma_16x8x16<T>(sums[band][tile], second, b_second);
                }
            }
        }
    }
    write_sums<T>(sums, part, batch, out, out_stride, out_is_f32);
}

#define GEMV(name, type, bands, tiles)                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                     \
        name(PARTS_TAKEN, unsigned columns, const void *x, unsigned batch, void *out, unsigned out_stride,   \
             unsigned out_is_f32) {                                                                          \
        Part part = part_of_block<bands * BAND>(PARTS_GIVEN);                                                \
        gemv<type, bands, tiles>(part, columns, static_cast<const type *>(x), batch, out, out_stride,        \
                                 out_is_f32);                                                                \
    }

GEMV(gemv_f16_8, f16, 1, 1)
GEMV(gemv_f16_16, f16, 1, 2)
GEMV(gemv_f16_32, f16, 2, 4)
GEMV(gemv_bf16_8, bf16, 1, 1)
GEMV(gemv_bf16_16, bf16, 1, 2)
GEMV(gemv_bf16_32, bf16, 2, 4)

ON_CPU_KERNEL(gemv_f16_8);
ON_CPU_KERNEL(gemv_f16_16);
ON_CPU_KERNEL(gemv_f16_32);
ON_CPU_KERNEL(gemv_bf16_8);
ON_CPU_KERNEL(gemv_bf16_16);
ON_CPU_KERNEL(gemv_bf16_32);
