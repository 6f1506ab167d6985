// The transposed product modulo 2^64 or 2^48: the gradient at the inputs of `ring.cu`. Its sums are words, whose
// lower bits are taken for numbers of 48 in the end.
//
//   out[r, i] += sum_o g[r, column + o] W[o, i]        modulo 2^64
//
// Parts of a layer, and stretches of their outputs, are added to the same words: in atomic additions, whose
// order does not matter. Scales vary along the sum here, so weights are taken as whole numbers of 32 bits:
// with a word as two numbers with signs, low + 2^32 high, a product is one of 32 bits by 32 to 64, and one of
// 32 by 32 of which the lower half counts.
//
// A block takes 256 inputs, a lane eight of them, of four rows; its warps take the outputs of a stretch in turn.

#include "ring.cuh"

constexpr unsigned THREADS = 256, WARPS = THREADS / LANES, TILE_ROWS = 4, OCTETS = LANES;

template <Form F>
__device__ __forceinline__ void ring_transposed(const void *weight, unsigned outputs, unsigned columns, Factors by,
                                                const void *g, unsigned number_bytes, unsigned rows,
                                                unsigned stride, unsigned slice, Word *out) {
    unsigned at = (blockIdx.x * OCTETS + lane_index()) * 8, first = blockIdx.y * TILE_ROWS;
    unsigned batch = min(rows - first, TILE_ROWS), end = min((blockIdx.z + 1) * slice, outputs);
    Word sums[TILE_ROWS][8] = {};
    for (unsigned output = blockIdx.z * slice + warp_index(); output < end; output += WARPS) {
        int whole[8] = {};
        if (at < columns) whole_octet<F>(weight, outputs, columns, output, at, by, whole);
#pragma unroll
        for (unsigned row = 0; row < TILE_ROWS; ++row) {
            if (row >= batch) break;
            Word word = load_number(g, number_bytes, size_t(first + row) * stride + output);
            int low = int(unsigned(word));
            unsigned high = unsigned((word + 0x80000000u) >> 32);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sums[row][i] += Word(static_cast<long long>(low) * whole[i]);
                sums[row][i] += Word(high * unsigned(whole[i])) << 32;
            }
        }
    }
    // The warps in turn.
    __shared__ Word of_block[TILE_ROWS][8][LANES];
    for (unsigned warp = 0; warp < WARPS; ++warp) {
        if (warp_index() == int(warp)) {
#pragma unroll
            for (unsigned row = 0; row < TILE_ROWS; ++row)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    Word &word = of_block[row][i][lane_index()];
                    word = warp == 0 ? sums[row][i] : word + sums[row][i];
                }
        }
        __syncthreads();
    }
    // Neighbours in memory to neighbours.
    for (unsigned index = threadIdx.x; index < batch * OCTETS * 8; index += THREADS) {
        unsigned row = index / (OCTETS * 8), input = index % (OCTETS * 8), column = blockIdx.x * OCTETS * 8 + input;
        if (column < columns)
            atomicAdd(out + size_t(first + row) * columns + column, of_block[row][input % 8][input / 8]);
    }
}

#define RING_TRANSPOSED(form)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                 \
        ring_transposed_##form(const void *weight, unsigned outputs, unsigned columns, float factor,         \
                               float then, const void *g, unsigned number_bytes, unsigned rows,              \
                               unsigned stride, unsigned slice, Word *out) {                                 \
        ring_transposed<Form::form>(weight, outputs, columns, {factor, then}, g, number_bytes, rows, stride, \
                                    slice, out);                                                             \
    }

RING_TRANSPOSED(f32)
RING_TRANSPOSED(f16)
RING_TRANSPOSED(bf16)
RING_TRANSPOSED(q4_0)
RING_TRANSPOSED(q4_1)
RING_TRANSPOSED(q5_0)
RING_TRANSPOSED(q5_1)
RING_TRANSPOSED(q8_0)
RING_TRANSPOSED(q4_k)
RING_TRANSPOSED(q5_k)
RING_TRANSPOSED(q6_k)

// Words as numbers of 48 bits.
extern "C" __global__ void __launch_bounds__(THREADS) ring_narrow(const Word *words, size_t count, void *numbers) {
    size_t at = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (at < count) store_number(numbers, 6, at, words[at]);
}

ON_CPU_KERNEL(ring_narrow);
ON_CPU_KERNEL(ring_transposed_f32);
ON_CPU_KERNEL(ring_transposed_f16);
ON_CPU_KERNEL(ring_transposed_bf16);
ON_CPU_KERNEL(ring_transposed_q4_0);
ON_CPU_KERNEL(ring_transposed_q4_1);
ON_CPU_KERNEL(ring_transposed_q5_0);
ON_CPU_KERNEL(ring_transposed_q5_1);
ON_CPU_KERNEL(ring_transposed_q8_0);
ON_CPU_KERNEL(ring_transposed_q4_k);
ON_CPU_KERNEL(ring_transposed_q5_k);
ON_CPU_KERNEL(ring_transposed_q6_k);
