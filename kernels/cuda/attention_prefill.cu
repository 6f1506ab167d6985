// Attention of sequences with many new rows, in tiles (FlashAttention-2, Dao 2023).
//
//     out[row, head] = sum_t w[t] values[t] / sum_t w[t],   w[t] = exp(capped(q . keys[t]) - max)
//     over the positions t that the row sees: its own, and those before it as far as the window reaches
//
// A block of threads has one tile: up to 64 queries that read the same keys, the heads of a group times
// neighbouring rows, in rows of the product (query m is row m / width, head m % width of the tile). It walks
// over the context in steps of 64 positions (32 for heads wider than 128), that begin at multiples of that,
// and leaves out the steps that none of its queries sees. Each of 4 warps has 16 queries:
//     scores[16 x 64] = queries keys^T     the softmax goes on in registers     sums[16 x head_dim] +=
//     weights values
// The accumulators of the first product are, pair by pair, the left operand of the second.
//
// While a step is computed the next one's keys and values come from the pool, 16 bytes a thread and copy,
// through the table of blocks. Rows in shared memory are 16 bytes longer than they need be: eight rows of a
// matrix load then lie in different banks. Queries stay in registers; those of heads wider than 128 do not
// fit and are kept in shared memory, each lane's own, in the order it reads them. Positions past the end
// arrive as zeros.
//
// The first tiles of the table are those with the longest context, all heads of a tile follow one another.
//
// Operations: 4 * head_dim a query and position it sees, on tensor cores; half a step at the diagonal is
// wasted. Bytes: 4 * head_dim a position, tile and key head, 2 * head_dim / 64 a query and position: the
// second-level cache serves most of it. Shared memory gives a warp 256 bytes * head_dim a step for 4096 *
// head_dim operations: at 128 bytes a clock and multiprocessor that is 2048 operations a clock, which is what
// mma reaches: the two are in balance.
#include "attention.cuh"

#define WARPS 4
#define THREADS (WARPS * LANES)
// Queries of a tile, and of a warp.
#define TILE 64
#define WARP_ROWS 16
// Words of a tile.
#define TILE_WORDS 4

template <int PADDED> struct Sizes {
    static constexpr int STEP = PADDED <= 128 ? 64 : 32;
    // Numbers between rows in shared memory, and of the keys of a step.
    static constexpr int ROW = PADDED + 8, MATRIX = STEP * ROW;
    static constexpr bool QUERIES_SHARED = PADDED > 128;
    // Steps of 16 features written out: all, where queries are in registers.
    static constexpr int UNROLLED = QUERIES_SHARED ? 4 : PADDED / 16;
};

// A tile of the table, and the part of a group that this block of threads has.
struct Tile {
    unsigned first_row, rows, position, first_block, first_head, width;

    // Query m: its row of the tile (the last one for queries that do not exist), and whether it exists.
    __device__ __forceinline__ unsigned row(unsigned m) const { return min(m / width, rows - 1); }
    __device__ __forceinline__ bool has(unsigned m) const { return m < rows * width; }
    __device__ __forceinline__ unsigned head(unsigned m) const { return first_head + m % width; }
    // Where it begins.
    __device__ __forceinline__ size_t query(unsigned m, unsigned stride, unsigned head_dim) const {
        return size_t(first_row + row(m)) * stride + size_t(head(m)) * head_dim;
    }
    __device__ __forceinline__ uint2 seen(unsigned m, unsigned window) const {
        unsigned at = position + row(m);
        return make_uint2(first_seen(at, window), at + 1);
    }
};

// Begins to copy keys and values of the positions from `first` on; those from `end` on become zeros.
template <int PADDED>
__device__ __forceinline__ void fetch(f16 *keys, const f16 *tiles, size_t block_elements, const unsigned *ids,
                                      unsigned first, unsigned end) {
    using S = Sizes<PADDED>;
    constexpr int PARTS = PADDED / 8;
#pragma unroll
    for (int begin = 0; begin < S::STEP * PARTS; begin += THREADS) {
        unsigned at = begin + threadIdx.x, row = at / PARTS, part = at % PARTS, position = first + row;
        bool there = position < end;
        const f16 *from = tiles;
        if (there) {
            from += size_t(ids[position / BLOCK_TOKENS]) * block_elements + position % BLOCK_TOKENS * PADDED + part * 8;
        }
        f16 *to = keys + row * S::ROW + part * 8;
        cp_async16_or_zero(to, from, there);
        cp_async16_or_zero(to + S::MATRIX, from + BLOCK_TOKENS * PADDED, there);
    }
    cp_async_commit();
}

// A warp's queries: in registers, or each lane's in shared memory.
template <int PADDED, bool SHARED> struct Queries;
template <int PADDED> struct Queries<PADDED, false> {
    unsigned held[PADDED / 16][4];
    __device__ __forceinline__ void set(int k, const unsigned (&a)[4]) {
        for (int i = 0; i < 4; ++i) held[k][i] = a[i];
    }
    __device__ __forceinline__ void get(int k, unsigned (&a)[4]) const {
        for (int i = 0; i < 4; ++i) a[i] = held[k][i];
    }
};
template <int PADDED> struct Queries<PADDED, true> {
    uint4 *own;
    __device__ __forceinline__ void set(int k, const unsigned (&a)[4]) {
        own[k * LANES] = make_uint4(a[0], a[1], a[2], a[3]);
    }
    __device__ __forceinline__ void get(int k, unsigned (&a)[4]) const {
        uint4 all = own[k * LANES];
        a[0] = all.x, a[1] = all.y, a[2] = all.z, a[3] = all.w;
    }
};

// Loads a lane's parts of its warp's 16 queries: the left operands of products, 16 features each.
template <bool FLOATS, int PADDED, typename Q>
__device__ __forceinline__ void load_queries(Q &queries, const void *qkv, unsigned kind, unsigned stride,
                                             unsigned head_dim, const Tile &tile) {
    unsigned m = warp_index() * WARP_ROWS + lane_index() / 4;
    const bool has[2] = {tile.has(m), tile.has(m + 8)};
    const size_t at[2] = {tile.query(m, stride, head_dim), tile.query(m + 8, stride, head_dim)};
#pragma unroll(Sizes<PADDED>::UNROLLED)
    for (int k = 0; k < PADDED / 16; ++k) {
        unsigned a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unsigned feature = k * 16 + 2 * (lane_index() % 4) + i / 2 * 8;
            a[i] = has[i % 2] ? load_halves<FLOATS>(qkv, kind, at[i % 2], feature, head_dim) : 0;
        }
        queries.set(k, a);
    }
}

// What a warp has summed for its 16 queries. A lane has rows lane / 4 and lane / 4 + 8.
template <int PADDED> struct Softmax {
    float largest[2], sum[2];
    float values[PADDED / 8][4];
};

template <int PADDED, typename Q>
__device__ __forceinline__ void score(float (&scores)[Sizes<PADDED>::STEP / 8][4], const Q &queries, const f16 *keys) {
    using S = Sizes<PADDED>;
    int matrix = lane_index() / 8, row = lane_index() % 8;
    const f16 *from = keys + (matrix / 2 * 8 + row) * S::ROW + matrix % 2 * 8;
#pragma unroll(S::UNROLLED)
    for (int k = 0; k < PADDED / 16; ++k) {
        unsigned a[4];
        queries.get(k, a);
#pragma unroll
        for (int n = 0; n < S::STEP / 8; n += 2) {
            unsigned b[4];
            load_matrices_x4(b, from + n * 8 * S::ROW + k * 16);
            const unsigned low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
            mma_16x8x16<f16>(scores[n], a, low);
            mma_16x8x16<f16>(scores[n + 1], a, high);
        }
    }
}

// Scores become weights; what was summed before is set against the new largest score.
template <int PADDED>
__device__ __forceinline__ void soften(float (&scores)[Sizes<PADDED>::STEP / 8][4], Softmax<PADDED> &softmax) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = softmax.largest[half];
#pragma unroll
        for (int n = 0; n < Sizes<PADDED>::STEP / 8; ++n) {
            largest = fmaxf(largest, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
        float base = base_of(largest) * LOG2_E;
        float by = exp2_fast(softmax.largest[half] * LOG2_E - base), sum = 0.0f;
#pragma unroll
        for (int n = 0; n < Sizes<PADDED>::STEP / 8; ++n) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
                scores[n][i] = exp2_fast(fmaf(scores[n][i], LOG2_E, -base));
                sum += scores[n][i];
            }
        }
        softmax.largest[half] = largest;
        softmax.sum[half] = softmax.sum[half] * by + sum;
#pragma unroll
        for (int n = 0; n < PADDED / 8; ++n) {
            softmax.values[n][2 * half] *= by;
            softmax.values[n][2 * half + 1] *= by;
        }
    }
}

template <int PADDED>
__device__ __forceinline__ void mix(Softmax<PADDED> &softmax, const float (&weights)[Sizes<PADDED>::STEP / 8][4],
                                    const f16 *values) {
    using S = Sizes<PADDED>;
    int matrix = lane_index() / 8, row = lane_index() % 8;
    const f16 *from = values + (matrix % 2 * 8 + row) * S::ROW + matrix / 2 * 8;
#pragma unroll
    for (int k = 0; k < S::STEP / 16; ++k) {
        const float *low = weights[2 * k], *high = weights[2 * k + 1];
        const unsigned a[4] = {pack_pair<f16>(low[0], low[1]), pack_pair<f16>(low[2], low[3]),
                               pack_pair<f16>(high[0], high[1]), pack_pair<f16>(high[2], high[3])};
#pragma unroll
        for (int n = 0; n < PADDED / 8; n += 2) {
            unsigned b[4];
            load_matrices_x4_transposed(b, from + k * 16 * S::ROW + n * 8);
            const unsigned left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
            mma_16x8x16<f16>(softmax.values[n], a, left);
            mma_16x8x16<f16>(softmax.values[n + 1], a, right);
        }
    }
}

// One step by one warp. Keys of the step that a query does not see get no weight.
template <int PADDED, typename Q>
__device__ __forceinline__ void take_step(Softmax<PADDED> &softmax, const Q &queries, const f16 *keys,
                                          const Tile &tile, unsigned first, unsigned window, float cap) {
    using S = Sizes<PADDED>;
    unsigned m = warp_index() * WARP_ROWS;
    uint2 top = tile.seen(m, window), bottom = tile.seen(m + WARP_ROWS - 1, window);
    if (!tile.has(m) || first >= bottom.y || first + S::STEP <= top.x) return;
    float scores[S::STEP / 8][4] = {};
    score<PADDED>(scores, queries, keys);
    if (cap != 0.0f) {
#pragma unroll
        for (int n = 0; n < S::STEP / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[n][i] = capped(scores[n][i], cap);
        }
    }
    if (first + S::STEP > top.y || first < bottom.x) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint2 seen = tile.seen(m + lane_index() / 4 + i / 2 * 8, window);
#pragma unroll
            for (int n = 0; n < S::STEP / 8; ++n) {
                unsigned position = first + n * 8 + 2 * (lane_index() % 4) + i % 2;
                if (position < seen.x || position >= seen.y) scores[n][i] = -INFINITY;
            }
        }
    }
    soften<PADDED>(scores, softmax);
    mix<PADDED>(softmax, scores, keys + S::MATRIX);
}

template <int PADDED>
__device__ __forceinline__ void finish(const Softmax<PADDED> &softmax, void *out, unsigned kind, unsigned heads,
                                       unsigned head_dim, const Tile &tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = softmax.sum[half] + __shfl_xor_sync(FULL_WARP, softmax.sum[half], 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        unsigned m = warp_index() * WARP_ROWS + lane_index() / 4 + half * 8;
        if (!tile.has(m)) continue;
        float inverse = 1.0f / sum;
        size_t to = (size_t(tile.first_row + tile.row(m)) * heads + tile.head(m)) * head_dim;
#pragma unroll
        for (int n = 0; n < PADDED / 8; ++n) {
            unsigned feature = n * 8 + 2 * (lane_index() % 4);
            const float *v = softmax.values[n] + 2 * half;
            if (feature < head_dim) store_two(out, to + feature, kind, v[0] * inverse, v[1] * inverse);
        }
    }
}

// tiles[tile]: {first_row, rows, position, first_block}, or NONE. Blocks of threads: tiles x key heads x
// parts of a group of more than 64.
template <int PADDED>
__device__ __forceinline__ void prefill(const void *qkv, void *out, unsigned kind, unsigned rows, unsigned stride,
                                        unsigned heads, unsigned kv_heads, unsigned head_dim, const unsigned *tiles,
                                        const unsigned *blocks, const f16 *pool, size_t block_elements,
                                        size_t layer_offset, unsigned window, float cap) {
    using S = Sizes<PADDED>;
    DYNAMIC_SHARED(f16, stages);
    unsigned group = heads / kv_heads, parts = (group + TILE - 1) / TILE;
    unsigned part = blockIdx.x % parts, kv_head = blockIdx.x / parts % kv_heads;
    const unsigned *words = tiles + size_t(blockIdx.x / (parts * kv_heads)) * TILE_WORDS;
    if (words[0] == NONE || words[0] + words[1] > rows) return;
    const Tile tile = {words[0], words[1], words[2], words[3], kv_head * group + part * TILE,
                       min(group - part * TILE, unsigned(TILE))};

    const f16 *head = pool + layer_offset + size_t(2 * kv_head) * BLOCK_TOKENS * PADDED;
    const unsigned *ids = blocks + tile.first_block;
    unsigned end = tile.position + tile.rows, first = first_seen(tile.position, window) / S::STEP * S::STEP;
    fetch<PADDED>(stages, head, block_elements, ids, first, end);

    Queries<PADDED, S::QUERIES_SHARED> queries;
    if constexpr (S::QUERIES_SHARED) {
        uint4 *all = reinterpret_cast<uint4 *>(stages + 4 * S::MATRIX);
        queries.own = all + warp_index() * (PADDED / 16) * LANES + lane_index();
    }
    if (kind == KIND_F32) {
        load_queries<true, PADDED>(queries, qkv, kind, stride, head_dim, tile);
    } else {
        load_queries<false, PADDED>(queries, qkv, kind, stride, head_dim, tile);
    }
    Softmax<PADDED> softmax;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        softmax.largest[half] = -INFINITY;
        softmax.sum[half] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < PADDED / 8; ++n) {
        for (int i = 0; i < 4; ++i) softmax.values[n][i] = 0.0f;
    }

    for (unsigned stage = 0; first < end; first += S::STEP, stage ^= 1) {
        f16 *here = stages + stage * 2 * S::MATRIX, *there = stages + (stage ^ 1) * 2 * S::MATRIX;
        if (first + S::STEP < end) {
            fetch<PADDED>(there, head, block_elements, ids, first + S::STEP, end);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads(); // what every thread has fetched is there
        take_step<PADDED>(softmax, queries, here, tile, first, window, cap);
        __syncthreads(); // nobody reads this stage any more: the next turn fills it
    }
    finish<PADDED>(softmax, out, kind, heads, head_dim, tile);
}

#define PREFILL(name, padded)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                    \
        name(const void *qkv, void *out, unsigned kind, unsigned rows, unsigned stride, unsigned heads,      \
             unsigned kv_heads, unsigned head_dim, const unsigned *tiles, const unsigned *blocks, const f16 *pool, \
             size_t block_elements, size_t layer_offset, unsigned window, float cap) {                       \
        prefill<padded>(qkv, out, kind, rows, stride, heads, kv_heads, head_dim, tiles, blocks, pool,        \
                        block_elements, layer_offset, window, cap);                                          \
    }

PREFILL(attention_prefill_64, 64)
PREFILL(attention_prefill_96, 96)
PREFILL(attention_prefill_128, 128)
PREFILL(attention_prefill_256, 256)

ON_CPU_KERNEL(attention_prefill_64);
ON_CPU_KERNEL(attention_prefill_96);
ON_CPU_KERNEL(attention_prefill_128);
ON_CPU_KERNEL(attention_prefill_256);
