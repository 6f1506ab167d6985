// Products of matrices with many rows, in tiles: what `gemm.cu` and `gemm_transposed.cu` share. They serve
// where there is no cuBLASLt, and for shapes it refuses; they are right for any shape and kind, and fast
// enough to be lived with.
//
//   out[m, n] = sum_k A[m, k] B[k, n] (+ bias[n]) (+ out[m, n])
//
// 16-bit kinds. A block of 8 warps makes 64 rows by 128 columns of out, a warp 32 by 32, with mma of 16x8x16.
// Stretches of 32 of k travel to shared memory by asynchronous copies, one ahead of the arithmetic. Rows of a
// tile are padded by 16 bytes, so that the eight rows a `ldmatrix` takes lie in different banks. Where rows
// are no multiples of 16 bytes, elements are copied one by one instead. What lies outside the matrices is
// zero, so any shape is right. f32. 64 by 64, a thread 4 by 4, stretches of 16; transposed products, whose k
// is as long as a vocabulary, sum each 64 of it from zero, and then these sums.
//
// Of a 16-bit tile, a byte from memory serves 64 * 128 / (64 + 128) = 43 multiply-adds.
#pragma once

#include "common.cuh"

constexpr int TILE_M = 64, TILE_N = 128, TILE_K = 32, GEMM_THREADS = 256, PAD = 8;

// The operands. b_stride: of rows of B^T [n, k] (plain), or of B [k, n] (transposed).
template <typename T> struct Operands {
    const T *a, *b;
    unsigned rows, columns, inner, a_stride, b_stride;
};

// Where outputs go.
struct Target {
    void *out;
    const float *bias;
    unsigned stride, is_f32, accumulate;
};

template <typename T>
__device__ __forceinline__ void write_output(const Target &to, size_t row, unsigned n, float sum) {
    size_t at = row * to.stride + n;
    if (to.bias) sum += to.bias[n];
    if (to.is_f32) {
        float *out = static_cast<float *>(to.out) + at;
        *out = to.accumulate ? *out + sum : sum;
    } else {
        static_cast<T *>(to.out)[at] = from_float<T>(sum);
    }
}

// Begins the copy of ROWS x WIDTH elements from (row, column) of a matrix to a tile whose rows are padded;
// zeros outside.
template <typename T, int ROWS, int WIDTH>
__device__ __forceinline__ void copy_tile(T *tile, const T *from, unsigned rows, unsigned width,
                                          unsigned stride, unsigned row, unsigned column, bool wide) {
    constexpr int CHUNKS = WIDTH / 8;
    for (int at = threadIdx.x; at < ROWS * CHUNKS; at += GEMM_THREADS) {
        unsigned r = row + at / CHUNKS, c = column + at % CHUNKS * 8;
        T *to = tile + at / CHUNKS * (WIDTH + PAD) + at % CHUNKS * 8;
        bool there = r < rows && c < width;
        const T *source = from + (there ? size_t(r) * stride + c : 0);
        if (wide) {
            cp_async16_or_zero(to, source, there);
        } else {
#pragma unroll 1
            for (int i = 0; i < 8; ++i) to[i] = there && c + i < width ? source[i] : from_float<T>(0.0f);
        }
    }
}

// Both tiles of a stretch of k.
template <typename T, bool TRANSPOSED> struct Stage {
    static constexpr int B_ROWS = TRANSPOSED ? TILE_K : TILE_N, B_WIDTH = TRANSPOSED ? TILE_N : TILE_K;
    T a[TILE_M][TILE_K + PAD];
    T b[B_ROWS][B_WIDTH + PAD];
};

template <typename T, bool TRANSPOSED>
__device__ __forceinline__ void copy_stage(Stage<T, TRANSPOSED> &stage, const Operands<T> &o, unsigned k, bool
                                           wide_a, bool wide_b) {
    using S = Stage<T, TRANSPOSED>;
    unsigned m = blockIdx.y * TILE_M, n = blockIdx.x * TILE_N;
    copy_tile<T, TILE_M, TILE_K>(&stage.a[0][0], o.a, o.rows, o.inner, o.a_stride, m, k, wide_a);
    if (TRANSPOSED) {
        copy_tile<T, S::B_ROWS, S::B_WIDTH>(&stage.b[0][0], o.b, o.inner, o.columns, o.b_stride, k, n,
                                            wide_b);
    } else {
        copy_tile<T, S::B_ROWS, S::B_WIDTH>(&stage.b[0][0], o.b, o.columns, o.inner, o.b_stride, n, k,
                                            wide_b);
    }
    cp_async_commit();
}

// Adds a stage's products to a warp's 32 by 32 sums.
template <typename T, bool TRANSPOSED>
__device__ __forceinline__ void multiply_stage(float (&sums)[2][4][4], const Stage<T, TRANSPOSED> &stage) {
    int lane = lane_index(), m = warp_index() / 4 * 32, n = warp_index() % 4 * 32;
#pragma unroll
    for (int k = 0; k < TILE_K; k += 16) {
        unsigned a[2][4], b[4]; // b: of two times 8 columns, both halves of k
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load_matrices_x4(a[i], &stage.a[m + 16 * i + lane % 16][k + lane / 16 * 8]);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            if (TRANSPOSED) {
                load_matrices_x4_transposed(b, &stage.b[k + lane % 16][n + 8 * j + lane / 16 * 8]);
            } else {
                load_matrices_x4(b, &stage.b[n + 8 * j + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
                mma_16x8x16<T>(sums[i][j], a[i], first);
                mma_16x8x16<T>(sums[i][j + 1], a[i], second);
            }
        }
    }
}

template <typename T, bool TRANSPOSED>
__device__ __forceinline__ void multiply_tiles_of(const Operands<T> &o, const Target &to) {
    __shared__ __align__(16) Stage<T, TRANSPOSED> stages[2];
    // Rows that begin at multiples of 16 bytes, and end there, may be copied wide.
    bool wide_a = o.a_stride % 8 == 0 && o.inner % 8 == 0 && reinterpret_cast<uintptr_t>(o.a) % 16 == 0;
    bool wide_b = o.b_stride % 8 == 0 && (TRANSPOSED ? o.columns : o.inner) % 8 == 0 &&
                  reinterpret_cast<uintptr_t>(o.b) % 16 == 0;
    float sums[2][4][4] = {};
    unsigned steps = (o.inner + TILE_K - 1) / TILE_K;
    copy_stage(stages[0], o, 0, wide_a, wide_b);
    for (unsigned step = 0; step < steps; ++step) {
        if (step + 1 < steps) {
            copy_stage(stages[(step + 1) % 2], o, (step + 1) * TILE_K, wide_a, wide_b);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads(); // everybody's copies of this stage are there
        multiply_stage(sums, stages[step % 2]);
        __syncthreads(); // nobody reads this stage any more: it may be overwritten
    }
    unsigned m = blockIdx.y * TILE_M + warp_index() / 4 * 32 + lane_index() / 4;
    unsigned n = blockIdx.x * TILE_N + warp_index() % 4 * 32 + lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int at = 0; at < 4; ++at) {
                unsigned row = m + 16 * i + at / 2 * 8, column = n + 8 * j + at % 2;
                if (row < o.rows && column < o.columns) write_output<T>(to, row, column, sums[i][j][at]);
            }
}

constexpr int F32_TILE = 64, F32_K = 16, F32_CHAIN = 64;

// sums += chain, which begins anew.
__device__ __forceinline__ void end_chain(float (&sums)[4][4], float (&chain)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] += chain[i][j], chain[i][j] = 0.0f;
}

template <bool TRANSPOSED>
__device__ __forceinline__ void multiply_tiles_f32(const Operands<float> &o, const Target &to) {
    __shared__ float a[F32_K][F32_TILE + 4], b[F32_K][F32_TILE + 4];
    unsigned m = blockIdx.y * F32_TILE, n = blockIdx.x * F32_TILE;
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    float sums[4][4] = {}, chain[4][4] = {};
    for (unsigned k = 0; k < o.inner; k += F32_K) {
        if (TRANSPOSED && k % F32_CHAIN == 0) end_chain(sums, chain);
        for (int at = threadIdx.x; at < F32_K * F32_TILE; at += GEMM_THREADS) {
            unsigned dk = at % F32_K, d = at / F32_K;
            bool there = m + d < o.rows && k + dk < o.inner;
            a[dk][d] = there ? o.a[size_t(m + d) * o.a_stride + k + dk] : 0.0f;
            if (TRANSPOSED) dk = at / F32_TILE, d = at % F32_TILE; // neighbours in memory to neighbours
            there = n + d < o.columns && k + dk < o.inner;
            size_t from = TRANSPOSED ? size_t(k + dk) * o.b_stride + n + d
                                     : size_t(n + d) * o.b_stride + k + dk;
            b[dk][d] = there ? o.b[from] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int dk = 0; dk < F32_K; ++dk)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    chain[i][j] = fmaf(a[dk][row + i], b[dk][column + j], chain[i][j]);
        __syncthreads();
    }
    if (TRANSPOSED) end_chain(sums, chain);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (m + row + i < o.rows && n + column + j < o.columns)
                write_output<float>(to, m + row + i, n + column + j, (TRANSPOSED ? sums : chain)[i][j]);
}

#define GEMM_TAKEN(type)                                                                                     \
    const type *a, const type *b, void *out, const float *bias, unsigned rows, unsigned columns,             \
        unsigned inner, unsigned a_stride, unsigned b_stride, unsigned out_stride, unsigned out_is_f32,      \
        unsigned accumulate
#define GEMM_OPERANDS {a, b, rows, columns, inner, a_stride, b_stride}
#define GEMM_TARGET {out, bias, out_stride, out_is_f32, accumulate}
