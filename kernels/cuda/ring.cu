// Linear layers modulo 2^64 or 2^48: rows of numbers of so many bits through weights that are whole numbers
// (`ring.cuh`). Products are words of 64 bits, of which numbers of 48 keep the lower ones.
//
//   out[r, column + o] = sum_k W[o, k] x[r, k]        modulo 2^64
//
// The tensor cores multiply bytes and sum in 32 bits. A row of x is eight planes of bytes, and a product of
// 16x32 signed bytes of W with 32x8 of x is that of 16 outputs with all planes of one row:
//
//   c[o, p] = sum over 32 elements: code[o, k] byte p of x[r, k]        |c| <= 32 * 128 * 255
//   out[r, o] += scale[o] sum over p: c[o, p] 2^8p                      for each group of 32 that shares a scale
//
// A lane holds planes 2t and 2t + 1 of c: c[2t] + 256 c[2t + 1] still fits 32 bits, its product with the scale
// is added in 64, and only at the end it is shifted by 16t bits and summed over the lanes and the warps.
// So 512 weights and a row cost a lane one mma, two shifted additions and two products.
//
// Everything else is a sum of such products, its *terms*: what is multiplied (signed bytes) and times what.
//
//   block formats   codes less ZERO times the scale; where a group has two scales: each half of it, the other being zero
//   minima          ones times the minimum
//   floats          four bytes with signs of W itself, times 2^8j
//
// The warps of a block share k, a stretch of 128 elements each in turn, and meet in shared memory. A block
// takes 16 outputs and eight rows; those of the same outputs lie side by side, and find W in the cache.

#include "ring.cuh"

constexpr unsigned THREADS = 256, WARPS = THREADS / LANES, BAND = 16, TILE_ROWS = 8, GROUP = 32;

// ---- Rows as planes of bytes -----------------------------------------------------------------------------

// For each row and group of 32 elements, and then each lane of a warp as it multiplies: plane lane / 4 of octet
// lane % 4, in the order of `signed_codes`. Zeros behind the end of a row.
extern "C" __global__ void __launch_bounds__(THREADS)
    ring_planes(const void *x, unsigned number_bytes, unsigned rows, unsigned width, unsigned groups, uint2 *planes) {
    size_t at = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= size_t(rows) * groups * LANES) return;
    size_t row = at / LANES / groups;
    unsigned plane = at % LANES / 4, first = unsigned(at / LANES % groups) * GROUP + unsigned(at % 4) * 8;
    unsigned bytes[8];
#pragma unroll
    for (unsigned i = 0; i < 8; ++i)
        bytes[i] = first + i < width ? unsigned(load_number(x, number_bytes, row * width + first + i) >> (8 * plane)) & 255 : 0;
    planes[at] = make_uint2(bytes[0] | bytes[4] << 8 | bytes[1] << 16 | bytes[5] << 24,
                            bytes[2] | bytes[6] << 8 | bytes[3] << 16 | bytes[7] << 24);
}

// ---- Products --------------------------------------------------------------------------------------------

// c[16x8] = a[16x32] b[32x8] by one whole warp: bytes of a have signs, those of b have none. With group = lane
// / 4 and t = lane % 4 a lane holds elements 4t .. 4t + 3 and 16 more of rows `group` (a[0], a[2]) and `group +
// 8` (a[1], a[3]) of a, and of column `group` of b; c as of `mma_16x8x16`.
#ifdef ON_CPU
inline void multiply_bytes(on_cpu::Said &said) {
    int c[16][8] = {};
    for (int at = 0; at < 16 * 8; ++at) {
        int row = at / 8, column = at % 8;
        for (int k = 0; k < 32; ++k) {
            auto held = [&](int group) {
                return reinterpret_cast<const unsigned *>(said.bytes[4 * group + k % 16 / 4]);
            };
            unsigned a = held(row % 8)[row / 8 + k / 16 * 2], b = held(column)[4 + k / 16];
            c[row][column] += static_cast<int8_t>(a >> (8 * (k % 4))) * static_cast<uint8_t>(b >> (8 * (k % 4)));
        }
    }
    for (int lane = 0; lane < LANES; ++lane)
        for (int at = 0; at < 4; ++at)
            reinterpret_cast<int *>(said.bytes[lane])[at] = c[lane / 4 + at / 2 * 8][lane % 4 * 2 + at % 2];
}
inline void mma_16x8x32(int *c, const unsigned *a, uint2 b, ON_CPU_HERE) {
    unsigned held[6] = {a[0], a[1], a[2], a[3], b.x, b.y};
    on_cpu::Meeting meeting(FULL_WARP, held, sizeof held, multiply_bytes, here);
    const int *product = meeting.said<int>(on_cpu::lane->in_warp);
    for (int at = 0; at < 4; ++at) c[at] = product[at];
}
#else
__device__ __forceinline__ void mma_16x8x32(int (&c)[4], const unsigned (&a)[4], uint2 b) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%10,%10,%10,%10};"
                 : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(0));
}
#endif

// What is multiplied with a group of x, of rows `group` and `group + 8` of the band, and the products times what.
template <Form F> struct Terms {
    static constexpr int COUNT = IS_FLOAT<F> ? 4 : Of<F>::HALVES || Of<F>::MINIMUM ? 2 : 1;
    unsigned bytes[COUNT][4];
    int times[COUNT][2];
};

// Byte j of each of four numbers in word j.
__device__ __forceinline__ void transpose_bytes(const unsigned (&numbers)[4], unsigned (&words)[4]) {
    unsigned low = __byte_perm(numbers[0], numbers[1], 0x5140), high = __byte_perm(numbers[0], numbers[1], 0x7362);
    unsigned low_next = __byte_perm(numbers[2], numbers[3], 0x5140);
    unsigned high_next = __byte_perm(numbers[2], numbers[3], 0x7362);
    words[0] = __byte_perm(low, low_next, 0x5410), words[1] = __byte_perm(low, low_next, 0x7632);
    words[2] = __byte_perm(high, high_next, 0x5410), words[3] = __byte_perm(high, high_next, 0x7632);
}

// The terms of floats, of row `half` of the two. Below 2^30, a number is one of four bytes with signs.
template <Form F>
__device__ __forceinline__ void set_terms(Terms<F> &terms, int half, const int (&whole)[8]) {
    const int order[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}};
#pragma unroll
    for (int word = 0; word < 2; ++word) {
        unsigned numbers[4], bytes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) numbers[i] = (unsigned(whole[order[word][i]]) + 0x00808080) ^ 0x00808080;
        transpose_bytes(numbers, bytes);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            terms.bytes[j][half + 2 * word] = bytes[j];
            terms.times[j][half] = 1 << (8 * j);
        }
    }
}

// The terms of a group of a block format.
template <Form F>
__device__ __forceinline__ void set_terms(Terms<F> &terms, int half, uint2 codes, const WholeWorth &worth) {
    if constexpr (Of<F>::HALVES) {
        bool second = lane_index() % 4 >= 2; // lanes whose octets are of the second half of the group
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            bool mine = second == (j == 1);
            terms.bytes[j][half] = mine ? codes.x : 0, terms.bytes[j][half + 2] = mine ? codes.y : 0;
            terms.times[j][half] = worth.scale[j];
        }
    } else {
        terms.bytes[0][half] = codes.x, terms.bytes[0][half + 2] = codes.y;
        terms.times[0][half] = worth.scale[0];
        if constexpr (Of<F>::MINIMUM) {
            terms.bytes[1][half] = terms.bytes[1][half + 2] = 0x01010101;
            terms.times[1][half] = worth.minimum;
        }
    }
}

// The lane's octets of a stretch of a row, one of each group. `first` counts over all rows. Zeros behind its end.
template <Form F>
__device__ __forceinline__ void load_stretch(const Planes &p, size_t first, unsigned at, unsigned octets,
                                             Octet (&stretch)[4]) {
    unsigned t = lane_index() % 4;
    if (at + 16 <= octets) { // side by side
        size_t place = first + at + 4 * t;
        uint4 codes[Of<F>::CODE_BYTES / 4];
#pragma unroll
        for (int i = 0; i < Of<F>::CODE_BYTES / 4; ++i)
            codes[i] = __ldg(reinterpret_cast<const uint4 *>(p.codes + place * Of<F>::CODE_BYTES) + i);
        uint2 high = make_uint2(0, 0);
        if (Of<F>::HIGH_BITS == 1) high.x = __ldg(reinterpret_cast<const unsigned *>(p.high + place));
        if (Of<F>::HIGH_BITS == 2) high = __ldg(reinterpret_cast<const uint2 *>(p.high + 2 * place));
        const unsigned words[4] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w};
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            stretch[u].codes = make_uint2(words[u], 0);
            if constexpr (Of<F>::CODE_BYTES == 8) {
                const uint4 &two = codes[u / 2];
                stretch[u].codes = u % 2 == 0 ? make_uint2(two.x, two.y) : make_uint2(two.z, two.w);
            }
            stretch[u].high = Of<F>::HIGH_BITS == 2 ? (u < 2 ? high.x : high.y) >> (16 * (u % 2)) & 0xFFFF
                                                    : high.x >> (8 * u) & 255;
        }
        return;
    }
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        stretch[u] = {};
        if (at + 4 * u < octets) stretch[u] = load_octet<F>(p, first + at + 4 * u + t);
    }
}

// What lane t of the quad has found a group's codes to be worth: each converts those of one group of a stretch, as
// conversions take four times as long as what else there is.
template <Form F> __device__ __forceinline__ WholeWorth worth_from(const WholeWorth &mine, unsigned t) {
    int from = (lane_index() & ~3) | int(t);
    WholeWorth worth = {};
    worth.scale[0] = __shfl_sync(FULL_WARP, mine.scale[0], from);
    if constexpr (Of<F>::HALVES) worth.scale[1] = __shfl_sync(FULL_WARP, mine.scale[1], from);
    if constexpr (Of<F>::MINIMUM) worth.minimum = __shfl_sync(FULL_WARP, mine.minimum, from);
    return worth;
}

// The words of eight rows and the two outputs of a lane, before their shift.
using Sums = long long[TILE_ROWS][2];

// Adds what a group gives. `x` is the lane's bytes of the first row, and rows are `stride` apart.
template <Form F>
__device__ __forceinline__ void add_group(Sums &sums, const Terms<F> &terms, const uint2 *x, size_t stride,
                                          unsigned batch) {
#pragma unroll
    for (unsigned row = 0; row < TILE_ROWS; ++row) {
        if (row >= batch) break;
        uint2 b = __ldg(x + row * stride);
#pragma unroll
        for (int j = 0; j < Terms<F>::COUNT; ++j) {
            int c[4];
            mma_16x8x32(c, terms.bytes[j], b);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                long long product = static_cast<long long>(c[2 * half] + 256 * c[2 * half + 1]) * terms.times[j][half];
                sums[row][half] = static_cast<long long>(Word(sums[row][half]) + Word(product));
            }
        }
    }
}

// Sums over the planes, and over the warps; writes the numbers of a block, whose first row is `row_from`.
__device__ __forceinline__ void write_words(const Sums &sums, unsigned batch, unsigned first, unsigned outputs,
                                            void *out, unsigned number_bytes, size_t row_from, size_t stride) {
    __shared__ Word of_warp[WARPS][TILE_ROWS][BAND];
    unsigned group = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (unsigned row = 0; row < TILE_ROWS; ++row) {
        if (row >= batch) break;
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
            Word word = Word(sums[row][half]) << (16 * t);
            word += __shfl_xor_sync(FULL_WARP, word, 1);
            word += __shfl_xor_sync(FULL_WARP, word, 2);
            if (t == 0) of_warp[warp_index()][row][group + 8 * half] = word;
        }
    }
    __syncthreads();
    unsigned row = threadIdx.x / BAND, output = first + threadIdx.x % BAND;
    if (row >= batch || output >= outputs) return;
    Word word = 0;
#pragma unroll
    for (unsigned warp = 0; warp < WARPS; ++warp) word += of_warp[warp][row][threadIdx.x % BAND];
    store_number(out, number_bytes, (row_from + row) * stride + output, word);
}

static_assert(TILE_ROWS * BAND <= THREADS, "a thread for each word that a block makes");

template <Form F>
__device__ __forceinline__ void ring_linear(const void *weight, unsigned outputs, unsigned columns, Factors by,
                                            const uint2 *x, unsigned rows, void *out, unsigned number_bytes,
                                            unsigned stride) {
    unsigned first = blockIdx.y * BAND, groups = (columns + GROUP - 1) / GROUP;
    unsigned batch = min(rows - blockIdx.x * TILE_ROWS, TILE_ROWS);
    size_t x_stride = size_t(groups) * LANES;
    x += blockIdx.x * TILE_ROWS * x_stride + lane_index();
    // Outputs behind the last one are computed as the last one, and not written.
    unsigned output[2] = {min(first + lane_index() / 4, outputs - 1),
                          min(first + lane_index() / 4 + 8, outputs - 1)};
    Sums sums = {};
    for (unsigned from = warp_index() * 4; from < groups; from += WARPS * 4) {
        Octet stretch[2][4];
        WholeWorth mine[2];
        if constexpr (!IS_FLOAT<F>) {
            Planes p = planes<F>(weight, outputs, columns);
            unsigned group = min(from + lane_index() % 4, groups - 1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                load_stretch<F>(p, size_t(output[half]) * (columns / 8), from * 4, columns / 8, stretch[half]);
                mine[half] = whole_worth<F>(p, size_t(output[half]) * groups + group, by);
            }
        }
        // Written out, it would be four times as much to load for drivers and caches; octets move up instead.
#pragma unroll 1
        for (unsigned u = 0; u < 4 && from + u < groups; ++u) {
            Terms<F> terms;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if constexpr (IS_FLOAT<F>) {
                    int whole[8];
                    unsigned at = (from + u) * GROUP + lane_index() % 4 * 8;
                    whole_octet<F>(weight, outputs, columns, output[half], at, by, whole);
                    set_terms<F>(terms, half, whole);
                } else {
                    set_terms<F>(terms, half, signed_codes<F>(stretch[half][0]), worth_from<F>(mine[half], u));
                    stretch[half][0] = stretch[half][1], stretch[half][1] = stretch[half][2];
                    stretch[half][2] = stretch[half][3];
                }
            }
            add_group<F>(sums, terms, x + size_t(from + u) * LANES, x_stride, batch);
        }
    }
    write_words(sums, batch, first, outputs, out, number_bytes, blockIdx.x * TILE_ROWS, stride);
}

#define RING_LINEAR(form)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                 \
        ring_##form(const void *weight, unsigned outputs, unsigned columns, float factor, float then,        \
                    const uint2 *x, unsigned rows, void *out, unsigned number_bytes, unsigned stride) {      \
        ring_linear<Form::form>(weight, outputs, columns, {factor, then}, x, rows, out, number_bytes,        \
                                stride);                                                                     \
    }

RING_LINEAR(f32)
RING_LINEAR(f16)
RING_LINEAR(bf16)
RING_LINEAR(q4_0)
RING_LINEAR(q4_1)
RING_LINEAR(q5_0)
RING_LINEAR(q5_1)
RING_LINEAR(q8_0)
RING_LINEAR(q4_k)
RING_LINEAR(q5_k)
RING_LINEAR(q6_k)

ON_CPU_KERNEL(ring_planes);
ON_CPU_KERNEL(ring_f32);
ON_CPU_KERNEL(ring_f16);
ON_CPU_KERNEL(ring_bf16);
ON_CPU_KERNEL(ring_q4_0);
ON_CPU_KERNEL(ring_q4_1);
ON_CPU_KERNEL(ring_q5_0);
ON_CPU_KERNEL(ring_q5_1);
ON_CPU_KERNEL(ring_q8_0);
ON_CPU_KERNEL(ring_q4_k);
ON_CPU_KERNEL(ring_q5_k);
ON_CPU_KERNEL(ring_q6_k);
