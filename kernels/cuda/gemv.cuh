// What the two kernels for few rows share (`gemv.cu`, `gemv_quantized.cu`).
//
//   out[r, column + o] = sum_k W[o, k] x[r, k] (+ bias[o])       r < batch <= 8 * TILES
//
// Decoding reads every weight once for a handful of rows, so the time is that of reading W. Tensor cores
// serve here not for their speed but because one instruction takes 8 rows of x for the issue slots of one: a
// batch of 8 costs what a row does.
//
//   - A block of 8 warps takes BANDS (1, 2) of 16 output features. A band of W is the 16x16 operand, x
//     transposed the 16x8 one; TILES of them (1, 2, 4) share one reading of W.
//   - The warps share k: warp w takes the stretches w, w + 8, ... of 128 elements. The order of the inner
//     dimension does not matter as long as both operands have the same, so lane (group, t) takes elements 8t
//     .. 8t + 7 of each 32: 16 bytes of x, 16 bytes of 16-bit weights, of rows `group` and `group + 8` of a
//     band. Loads of W are under way before the first is used: 128 bytes a thread, 32 KB a block.
//   - The warps' sums meet in shared memory and are added in the order of the warps. An output's sum thus
//     depends on W and its own row of x alone, never on the other rows, their number, TILES or BANDS: a token
//     does not depend on its company.
//   - The first weights are asked for before x is there (`await_front`).
//   - Up to three matrices with the same x (query, key, value; gate, up) go in one launch, side by side.
//
// W passes the first-level cache by: it is read once, and x should stay.
#pragma once

#include "common.cuh"

constexpr int WARPS = 8, BAND = 16, STRETCH = 128;

// 16 bytes that are read once.
__device__ __forceinline__ uint4 load_once(const void *from) {
#ifdef ON_CPU
    return *static_cast<const uint4 *>(from);
#else
    uint4 value;
    // Volatile, and not through .nc: so it stays in front of `await_front`.
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
        : "l"(from));
    return value;
#endif
}

// One of up to three matrices, and the features of it that this block takes.
struct Part {
    const void *weight;
    const float *bias;
    unsigned rows, column, first;
};


#define PARTS_TAKEN                                                                                          \
    const void *w0, const void *w1, const void *w2, const float *bias0, const float *bias1,                  \
        const float *bias2, unsigned rows0, unsigned rows1, unsigned rows2, unsigned column0,                \
        unsigned column1, unsigned column2
#define PARTS_GIVEN w0, w1, w2, bias0, bias1, bias2, rows0, rows1, rows2, column0, column1, column2

// A block takes FEATURES of one part.
template <int FEATURES> __device__ __forceinline__ Part part_of_block(PARTS_TAKEN) {
    unsigned block = blockIdx.x, blocks = (rows0 + FEATURES - 1) / FEATURES;
    if (block < blocks) return {w0, bias0, rows0, column0, block * FEATURES};
    block -= blocks;
    blocks = (rows1 + FEATURES - 1) / FEATURES;
    if (block < blocks) return {w1, bias1, rows1, column1, block * FEATURES};
    return {w2, bias2, rows2, column2, (block - blocks) * FEATURES};
}

// Adds the warps' sums and writes the outputs. sums[band][tile] is the lane's part of c of `mma_16x8x16`. All
// threads come. Rows in shared memory are 4 numbers longer than they need be: against bank conflicts.
template <typename T, int BANDS, int TILES>
__device__ __forceinline__ void write_sums(const float (&sums)[BANDS][TILES][4], const Part &part,
                                           unsigned batch, void *out, unsigned out_stride,
                                           unsigned out_is_f32) {
    constexpr int FEATURES = BANDS * BAND;
    __shared__ float of_warp[WARPS][TILES * 8][FEATURES + 4];
    int group = lane_index() / 4, pair = lane_index() % 4 * 2;
#pragma unroll
    for (int band = 0; band < BANDS; ++band) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                of_warp[warp_index()][tile * 8 + pair + i % 2][band * BAND + group + i / 2 * 8] =
                    sums[band][tile][i];
        }
    }
    __syncthreads();
    constexpr unsigned OUTPUTS = TILES * 8 * FEATURES, THREADS = WARPS * LANES;
    // Written out: of a loop the compiler would make one for each case of bias and kind.
#pragma unroll
    for (unsigned first = 0; first < OUTPUTS; first += THREADS) {
        unsigned at = first + threadIdx.x, row = at / FEATURES, feature = part.first + at % FEATURES;
        if (at >= OUTPUTS || row >= batch || feature >= part.rows) continue;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += of_warp[warp][row][at % FEATURES];
        if (part.bias) sum += part.bias[feature];
        size_t to = size_t(row) * out_stride + part.column + feature;
        if (out_is_f32) {
            static_cast<float *>(out)[to] = sum;
        } else {
            static_cast<T *>(out)[to] = from_float<T>(sum);
        }
    }
}
