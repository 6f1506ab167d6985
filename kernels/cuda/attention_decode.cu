// Attention of sequences with few new rows: the context is cut into spans, one block of threads each
// (flash-decoding).
//
//     out[row, head] = sum_t w[t] values[t] / sum_t w[t],   w[t] = exp(capped(q . keys[t]) - max)
//     over the positions t that the row sees: its own, and those before it as far as the window reaches
//
// Pass 1, attention_decode: (one unit = one span of one item) x (key head). An *item* is up to 8 queries that
// read the same keys: the heads of a group, of as many rows of one sequence as fit. Its result is out itself
// if the context is one span, else a partial: the weighted sum, the largest score, and the sum of weights.
// Pass 2, attention_combine: joins an item's spans in ascending order.
//
// Where spans begin depends on the item's own context alone (row_table.rs), and units are found through a
// table, so the grid may be larger than what there is to do, and a sequence's bits do not depend on its
// company.
//
// Tensor cores do the arithmetic, and a lane reads exactly those keys and values that its own registers take:
// nothing is exchanged and there is no barrier in the loop. Two liberties make that possible. A product may
// sum in any order of the inner dimension if both sides agree; and rows of the result may stand for any
// feature.
//   - Scores. a = queries (rows 0..7; rows 8..15 are zero), b = keys of 8 positions. A lane loads 16 bytes of
//     the key of position lane / 4: features 8 * (lane % 4) .. + 8 of every 32. They are its b registers of
//     two products whose inner dimension is permuted; queries are loaded in the same order.
//   - Sums. a = values, transposed: 16 features x 16 positions, b = weights: 16 positions x 8 queries, which
//     is what a lane holds of the scores already. A lane loads features 8 * (lane / 4) .. + 8 of every 64 at
//     its four positions and pairs positions by byte permutation. Registers 2u and 2u + 1 of these 8 features
//     are rows lane / 4 and lane / 4 + 8 of product u.
//
// A warp takes every fourth block of 16 positions of the span. Loads need somewhere to arrive while others
// are on their way, and registers are too few (the compiler would rather wait): each lane has slots of its
// own in shared memory, of 16 bytes a load, side by side with its neighbours', for two blocks of positions.
// For 128 features that is 16 KiB in flight a warp, 64 KiB a block of threads, three of which share a
// multiprocessor: by Little's law some 20 KiB are needed to fill 3.3 TB/s at 800 ns.
//
// Bytes: 4 * head_dim a position and key head, read once whatever the group (padding counts: 80 is kept as
// 96). Partials add 4 * (head_dim + 2) * group a span of at least 128 positions, written and read: 1.6 % of
// the bytes for single heads, 6 % for groups of 4. Operations: 8 products of 16x8x16 for 16 positions and 64
// features, of which 4 are half empty: about a tenth of what the tensor cores could do in the time that the
// bytes take.
#include "attention.cuh"

#define WARPS 4
#define THREADS (WARPS * LANES)
// Queries that share the loads of keys and values.
#define QUERIES 8
// Words of an item.
#define ITEM 8

struct Item {
    unsigned first_row, rows, position, first_block, first_slot, splits, span;
};

__device__ __forceinline__ Item load_item(const unsigned *items, unsigned at) {
    const unsigned *item = items + size_t(at) * ITEM;
    return {item[0], item[1], item[2], item[3], item[4], item[5], item[6]};
}

// How a head's features are shared out. Of values, a lane has 8 of every 64, and 4 of what is left.
template <int PADDED> struct Parts {
    static constexpr int WIDE = PADDED / 64, NARROW = PADDED % 64 / 32;
    static constexpr int PRODUCTS = 4 * WIDE + 2 * NARROW;
    // Loads of a lane for 16 positions, and blocks of 16 positions that are under way at a time.
    static constexpr int KEY_LOADS = 2 * (PADDED / 32), LOADS = KEY_LOADS + 4 * (WIDE + NARROW);
    static constexpr int STAGES = PADDED <= 128 ? 2 : 1;
};

// Begins to copy a lane's part of 16 positions' keys and values to its slots. `there[i]`: whether the lane's
// i-th position is seen by the item at all; values of others become zeros.
template <int PADDED>
__device__ __forceinline__ void fetch(uint4 *slots, const f16 *keys, const bool (&there)[4]) {
    using P = Parts<PADDED>;
    int group = lane_index() / 4, quarter = lane_index() % 4;
#pragma unroll
    for (int i = 0; i < P::KEY_LOADS; ++i) {
        constexpr int PER_TILE = P::KEY_LOADS / 2;
        cp_async16(slots + i * LANES, keys + (i / PER_TILE * 8 + group) * PADDED + i % PER_TILE * 32 + quarter * 8);
    }
    const f16 *values = keys + BLOCK_TOKENS * PADDED;
    slots += P::KEY_LOADS * LANES;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const f16 *from = values + (2 * quarter + i / 2 * 8 + i % 2) * PADDED;
#pragma unroll
        for (int part = 0; part < P::WIDE; ++part, slots += LANES) {
            cp_async16_or_zero(slots, from + part * 64 + group * 8, there[i]);
        }
        if constexpr (P::NARROW != 0) { // two lanes load the same 8 features; each has half of them
            cp_async16_or_zero(slots, from + P::WIDE * 64 + group / 2 * 8, there[i]);
            slots += LANES;
        }
    }
    cp_async_commit();
}

// Four positions' words with the same two features become the registers of one product.
__device__ __forceinline__ void add_values(float (&sum)[4], unsigned v0, unsigned v1, unsigned v8, unsigned v9,
                                           const unsigned (&weights)[2]) {
    unsigned a[4] = {__byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v8, v9, 0x5410),
                     __byte_perm(v8, v9, 0x7632)};
    mma_16x8x16<f16>(sum, a, weights);
}

// A lane's parts of query lane / 4, in the order in which it loads keys.
template <bool FLOATS, int PADDED>
__device__ __forceinline__ void load_query(unsigned (&query)[PADDED / 8], const void *qkv, unsigned kind, size_t at,
                                           unsigned head_dim, bool exists) {
#pragma unroll
    for (int i = 0; i < PADDED / 8; ++i) {
        unsigned feature = lane_index() % 4 * 8 + i / 4 * 32 + i % 4 * 2;
        query[i] = exists ? load_halves<FLOATS>(qkv, kind, at, feature, head_dim) : 0;
    }
}

// sums += weights * values of 16 positions.
template <int PADDED>
__device__ __forceinline__ void add_page(float (&sums)[Parts<PADDED>::PRODUCTS][4], const uint4 *slots,
                                         const unsigned (&weights)[2]) {
    using P = Parts<PADDED>;
    constexpr int EACH = P::WIDE + P::NARROW;
    slots += P::KEY_LOADS * LANES;
#pragma unroll
    for (int part = 0; part < P::WIDE; ++part) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = slots[(i * EACH + part) * LANES];
        add_values(sums[part * 4 + 0], v[0].x, v[1].x, v[2].x, v[3].x, weights);
        add_values(sums[part * 4 + 1], v[0].y, v[1].y, v[2].y, v[3].y, weights);
        add_values(sums[part * 4 + 2], v[0].z, v[1].z, v[2].z, v[3].z, weights);
        add_values(sums[part * 4 + 3], v[0].w, v[1].w, v[2].w, v[3].w, weights);
    }
    if constexpr (P::NARROW != 0) {
        uint2 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 *slot = slots + (i * EACH + P::WIDE) * LANES;
            v[i] = reinterpret_cast<const uint2 *>(slot)[lane_index() / 4 % 2];
        }
        add_values(sums[P::WIDE * 4 + 0], v[0].x, v[1].x, v[2].x, v[3].x, weights);
        add_values(sums[P::WIDE * 4 + 1], v[0].y, v[1].y, v[2].y, v[3].y, weights);
    }
}

// scores[tile] = queries . keys of positions 8 * tile .. + 8; rows 8..15 of the products are nobody's.
template <int PADDED>
__device__ __forceinline__ void score_page(float (&scores)[2][4], const uint4 *slots,
                                           const unsigned (&queries)[PADDED / 8]) {
#pragma unroll
    for (int i = 0; i < Parts<PADDED>::KEY_LOADS; ++i) {
        constexpr int PER_TILE = Parts<PADDED>::KEY_LOADS / 2;
        int tile = i / PER_TILE, part = i % PER_TILE;
        uint4 k = slots[i * LANES];
        const unsigned low[4] = {queries[4 * part], 0, queries[4 * part + 1], 0};
        const unsigned high[4] = {queries[4 * part + 2], 0, queries[4 * part + 3], 0};
        const unsigned b_low[2] = {k.x, k.y}, b_high[2] = {k.z, k.w};
        mma_16x8x16<f16>(scores[tile], low, b_low);
        mma_16x8x16<f16>(scores[tile], high, b_high);
    }
}

// What a warp has summed for its 8 queries: largest score and this lane's part of the sum of weights for
// query lane / 4, weighted values for queries 2 * (lane % 4) and the next.
template <int PADDED> struct Softmax {
    float largest, sum;
    float values[Parts<PADDED>::PRODUCTS][4];
};

template <int PADDED>
__device__ __forceinline__ void rescale(Softmax<PADDED> &softmax, float largest) {
    float by = exp2_fast(softmax.largest - base_of(largest));
    softmax.largest = largest;
    softmax.sum *= by;
    // Query q's factor is with lanes 4 * q .. + 4.
    float even = __shfl_sync(FULL_WARP, by, lane_index() % 4 * 8);
    float odd = __shfl_sync(FULL_WARP, by, lane_index() % 4 * 8 + 4);
#pragma unroll
    for (int i = 0; i < Parts<PADDED>::PRODUCTS; ++i) {
        softmax.values[i][0] *= even;
        softmax.values[i][1] *= odd;
        softmax.values[i][2] *= even;
        softmax.values[i][3] *= odd;
    }
}

// Takes in 16 positions from `first` on, of which this lane's query sees those in `seen`.
template <int PADDED>
__device__ __forceinline__ void take_page(Softmax<PADDED> &softmax, const uint4 *slots, unsigned first,
                                          const unsigned (&queries)[PADDED / 8], uint2 seen, float cap) {
    float scores[2][4] = {};
    score_page<PADDED>(scores, slots, queries);
    float largest = softmax.largest;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        unsigned position = first + 2 * (lane_index() % 4) + i / 2 * 8 + i % 2;
        float &score = scores[i / 2][i % 2];
        score = position >= seen.x && position < seen.y ? capped(score, cap) * LOG2_E : -INFINITY;
        largest = fmaxf(largest, score);
    }
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
    rescale(softmax, largest);
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        weight[i] = exp2_fast(scores[i / 2][i % 2] - base_of(largest));
        softmax.sum += weight[i];
    }
    unsigned weights[2] = {pack_pair<f16>(weight[0], weight[1]), pack_pair<f16>(weight[2], weight[3])};
    add_page<PADDED>(softmax.values, slots, weights);
}

// The blocks of 16 positions that a warp takes, every fourth, fetched in their order.
template <int PADDED> struct Pages {
    const f16 *tiles;
    size_t block_elements;
    const unsigned *blocks;
    uint4 *slots;
    uint2 seen;
    unsigned next, end, step, ids;

    __device__ __forceinline__ uint4 *stage(unsigned step) const {
        return slots + step % Parts<PADDED>::STAGES * Parts<PADDED>::LOADS * LANES;
    }

    // Begins the next one's copies, if there is one; counts as a group of copies in any case.
    __device__ __forceinline__ void begin() {
        if (next >= end) {
            cp_async_commit();
            return;
        }
        if (step % LANES == 0) { // the ids of the next 32, a lane each
            unsigned mine = next + WARPS * lane_index();
            ids = mine < end ? blocks[mine] : 0;
        }
        size_t block = __shfl_sync(FULL_WARP, ids, int(step % LANES));
        bool there[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unsigned position = next * BLOCK_TOKENS + 2 * (lane_index() % 4) + i / 2 * 8 + i % 2;
            there[i] = position >= seen.x && position < seen.y;
        }
        fetch<PADDED>(stage(step), tiles + block * block_elements, there);
        next += WARPS;
        ++step;
    }
};

// What the warps of a block tell each other. Rows are two numbers longer than they need be: against bank
// conflicts.
template <int PADDED> struct Shared {
    float values[WARPS][QUERIES][PADDED + 2];
    float largest[WARPS][QUERIES], sum[WARPS][QUERIES];
};

template <int PADDED>
__device__ __forceinline__ void tell(Shared<PADDED> &shared, const Softmax<PADDED> &softmax, int queries) {
    using P = Parts<PADDED>;
    int warp = warp_index(), group = lane_index() / 4, pair = 2 * (lane_index() % 4);
    float sum = softmax.sum + __shfl_xor_sync(FULL_WARP, softmax.sum, 1);
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    if (pair == 0) {
        shared.largest[warp][group] = softmax.largest;
        shared.sum[warp][group] = sum;
    }
#pragma unroll
    for (int i = 0; i < P::PRODUCTS; ++i) {
        int feature = i < 4 * P::WIDE ? i / 4 * 64 + group * 8 + i % 4 * 2 : P::WIDE * 64 + group * 4 + i % 4 * 2;
        const float *v = softmax.values[i];
        if (pair < queries) {
            *reinterpret_cast<float2 *>(&shared.values[warp][pair][feature]) = make_float2(v[0], v[2]);
        }
        if (pair + 1 < queries) {
            *reinterpret_cast<float2 *>(&shared.values[warp][pair + 1][feature]) = make_float2(v[1], v[3]);
        }
    }
}

// A query's softmax over all warps: the factor of each, the largest score, the sum.
struct Joined {
    float factor[WARPS], largest, sum;
};

template <int PADDED> __device__ __forceinline__ Joined join(const Shared<PADDED> &shared, int query) {
    Joined joined;
    joined.largest = -INFINITY;
    joined.sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) joined.largest = fmaxf(joined.largest, shared.largest[warp][query]);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        joined.factor[warp] = exp2_fast(shared.largest[warp][query] - base_of(joined.largest));
        joined.sum += joined.factor[warp] * shared.sum[warp][query];
    }
    return joined;
}

// units[unit]: {item, split}, or NONE. Blocks of threads: units x (key heads x parts of a group of more than
// 8).
template <int PADDED>
__device__ __forceinline__ void decode(const void *qkv, void *out, unsigned kind, unsigned rows, unsigned stride,
                                       unsigned heads, unsigned kv_heads, unsigned head_dim, const unsigned *units,
                                       const unsigned *items, const unsigned *blocks, const f16 *pool,
                                       size_t block_elements, size_t layer_offset, unsigned window, float cap,
                                       float *stats, float *partials) {
    using P = Parts<PADDED>;
    static_assert(sizeof(Shared<PADDED>) <= WARPS * P::STAGES * P::LOADS * LANES * 16, "one memory serves both");
    unsigned item_index = units[2 * blockIdx.x], split = units[2 * blockIdx.x + 1];
    await_front();
    if (item_index == NONE) return;
    const Item item = load_item(items, item_index);
    if (item.first_row + item.rows > rows) return;
    unsigned group = heads / kv_heads, width = group < QUERIES ? group : QUERIES;
    unsigned parts = (group + QUERIES - 1) / QUERIES;
    unsigned kv_head = blockIdx.y / parts, first_head = blockIdx.y % parts * QUERIES;
    width = min(width, group - first_head);
    int queries = int(item.rows * width);

    // What any of the queries sees of this span.
    uint2 item_seen = make_uint2(max(first_seen(item.position, window), split * item.span),
                                 min(item.position + item.rows, (split + 1) * item.span));
    if (item_seen.x >= item_seen.y) return;

    DYNAMIC_SHARED(uint4, slots);
    Pages<PADDED> pages;
    pages.tiles = pool + layer_offset + size_t(2 * kv_head) * BLOCK_TOKENS * PADDED;
    pages.block_elements = block_elements;
    pages.blocks = blocks + item.first_block;
    pages.slots = slots + warp_index() * P::STAGES * P::LOADS * LANES + lane_index();
    pages.seen = item_seen;
    pages.next = item_seen.x / BLOCK_TOKENS + warp_index();
    pages.end = (item_seen.y + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    pages.step = pages.ids = 0;
    unsigned first_page = pages.next;
    for (int stage = 0; stage < P::STAGES; ++stage) pages.begin();

    unsigned query = lane_index() / 4;
    bool exists = int(query) < queries;
    unsigned query_row = exists ? query / width : 0, head = kv_head * group + first_head + query % width;
    unsigned position = item.position + query_row;
    uint2 seen = make_uint2(first_seen(position, window), min(position + 1, item_seen.y));
    unsigned q[PADDED / 8];
    size_t query_at = size_t(item.first_row + query_row) * stride + size_t(head) * head_dim;
    if (kind == KIND_F32) {
        load_query<true, PADDED>(q, qkv, kind, query_at, head_dim, exists);
    } else {
        load_query<false, PADDED>(q, qkv, kind, query_at, head_dim, exists);
    }

    Softmax<PADDED> softmax;
    softmax.largest = -INFINITY;
    softmax.sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Parts<PADDED>::PRODUCTS; ++i) {
        for (int j = 0; j < 4; ++j) softmax.values[i][j] = 0.0f;
    }
    // What a lane reads it has fetched itself: its own wait is enough, and its next copies may follow its
    // reads.
    for (unsigned page = first_page, step = 0; page < pages.end; page += WARPS, ++step) {
        cp_async_wait<P::STAGES - 1>();
        take_page<PADDED>(softmax, pages.stage(step), page * BLOCK_TOKENS, q, seen, cap);
        pages.begin();
    }
    cp_async_wait<0>();

    __syncthreads(); // all slots are read: the memory now serves what warps tell each other
    Shared<PADDED> &shared = *reinterpret_cast<Shared<PADDED> *>(slots);
    tell(shared, softmax, queries);
    __syncthreads();
    unsigned total = unsigned(queries) * head_dim;
    for (unsigned at = threadIdx.x; at < total; at += THREADS) {
        unsigned query = at / head_dim, feature = at % head_dim;
        unsigned row = query / width, head = kv_head * group + first_head + query % width;
        Joined joined = join(shared, query);
        float value = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) value += joined.factor[warp] * shared.values[warp][query][feature];
        if (item.splits == 1) {
            size_t to = (size_t(item.first_row + row) * heads + head) * head_dim + feature;
            store_one(out, to, kind, value / joined.sum);
            continue;
        }
        size_t slot = size_t(item.first_slot + split * item.rows + row) * heads + head;
        partials[slot * PADDED + feature] = value;
        if (feature == 0) {
            stats[2 * slot] = joined.largest;
            stats[2 * slot + 1] = joined.sum;
        }
    }
}

#define DECODE(name, padded)                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                    \
        name(const void *qkv, void *out, unsigned kind, unsigned rows, unsigned stride, unsigned heads,      \
             unsigned kv_heads, unsigned head_dim, const unsigned *units, const unsigned *items,             \
             const unsigned *blocks, const f16 *pool, size_t block_elements, size_t layer_offset, unsigned window, \
             float cap, float *stats, float *partials) {                                                     \
        decode<padded>(qkv, out, kind, rows, stride, heads, kv_heads, head_dim, units, items, blocks, pool,  \
                       block_elements, layer_offset, window, cap, stats, partials);                          \
    }

DECODE(attention_decode_64, 64)
DECODE(attention_decode_96, 96)
DECODE(attention_decode_128, 128)
DECODE(attention_decode_256, 256)

// Items x heads. There are at most 32 spans: a lane of each warp knows the largest score and the sum of one.
// A thread sums a feature; eight partials are asked for at once.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_combine(void *out, unsigned kind, unsigned rows, unsigned heads, unsigned head_dim, unsigned padded,
                      const unsigned *items, unsigned window, const float *stats, const float *partials) {
    const Item item = load_item(items, blockIdx.x);
    await_front();
    if (item.first_row == NONE || item.splits < 2 || item.first_row + item.rows > rows) return;
    unsigned head = blockIdx.y, split = lane_index();
    // Spans that no row of the item sees were not written.
    bool written = split < item.splits && (split + 1) * item.span > first_seen(item.position, window);
    size_t next = size_t(item.rows) * heads;
    for (unsigned row = 0; row < item.rows; ++row) {
        size_t slot = (size_t(item.first_slot) + row) * heads + head;
        float mine = written ? stats[2 * (slot + split * next)] : -INFINITY;
        float sum = written ? stats[2 * (slot + split * next) + 1] : 0.0f;
        float factor = exp2_fast(mine - base_of(warp_max(mine)));
        float inverse = 1.0f / warp_sum(factor * sum);
        for (unsigned first = LANES * warp_index(); first < head_dim; first += THREADS) {
            unsigned feature = first + lane_index();
            float value = 0.0f;
#pragma unroll 8
            for (unsigned s = 0; s < item.splits; ++s) {
                float by = __shfl_sync(FULL_WARP, factor, int(s)), partial = 0.0f;
                if (by > 0.0f && feature < head_dim) partial = partials[(slot + s * next) * padded + feature];
                value += by * partial;
            }
            if (feature < head_dim) {
                size_t to = (size_t(item.first_row + row) * heads + head) * head_dim + feature;
                store_one(out, to, kind, value * inverse);
            }
        }
    }
}

ON_CPU_KERNEL(attention_decode_64);
ON_CPU_KERNEL(attention_decode_96);
ON_CPU_KERNEL(attention_decode_128);
ON_CPU_KERNEL(attention_decode_256);
ON_CPU_KERNEL(attention_combine);
