// Attention over keys and values of 32 bits, without tensor cores: for models that are computed exactly.
//
//     out[row, head] = sum_t w[t] values[t] / sum_t w[t],   w[t] = exp(capped(q . keys[t]) - max)
//     over the positions t that the row sees: its own, and those before it as far as the window reaches
//
// A block of threads has one row and one head; a warp takes 32 positions at a time, every fourth such step. A
// lane scores one position, reading its key 16 bytes at a time against the query in shared memory (which all
// lanes read at one address), then the lanes share the weights and each sums some of the features. Warps are
// joined at the end. Steps begin at multiples of 32, so bits depend on the row's own context alone.
//
// Bytes: 8 * head_dim a position, for each head and each row: the heads of a group and the rows of a prompt
// read the same keys again, through the caches. That is the price of one plain kernel; models that are to be
// fast keep halves.
#include "attention.cuh"

#define WARPS 4
#define THREADS (WARPS * LANES)
#define MAX_HEAD_DIM 256
// Features that a lane sums.
#define PARTS (MAX_HEAD_DIM / LANES)

struct Softmax {
    float largest, sum;
    float values[PARTS];
};

struct Shared {
    float query[MAX_HEAD_DIM];
    float values[WARPS][MAX_HEAD_DIM];
    float largest[WARPS], sum[WARPS];
};

template <typename T>
__device__ __forceinline__ void take_query(float *query, const void *from, size_t at, unsigned head_dim,
                                           unsigned padded) {
    for (unsigned i = threadIdx.x; i < padded; i += THREADS) {
        query[i] = i < head_dim ? to_float(static_cast<const T *>(from)[at + i]) : 0.0f;
    }
}

__device__ __forceinline__ float dot(const float *query, const float *key, unsigned padded) {
    float sum = 0.0f;
    for (unsigned i = 0; i < padded; i += 4) {
        Pack<float> q = load_pack(query + i), k = load_pack(key + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum = fmaf(q.at[j], k.at[j], sum);
    }
    return sum;
}

// Takes in positions first .. first + 32, as far as they are in `seen`.
__device__ __forceinline__ void take_step(Softmax &softmax, const float *query, const float *head,
                                          size_t block_elements, const unsigned *ids, unsigned first, uint2 seen,
                                          unsigned padded, float cap) {
    unsigned position = first + lane_index();
    float score = -INFINITY;
    if (position >= seen.x && position < seen.y) {
        const float *keys = head + size_t(ids[position / BLOCK_TOKENS]) * block_elements;
        score = dot(query, keys + position % BLOCK_TOKENS * padded, padded);
        if (cap != 0.0f) score = cap * tanhf(score / cap);
    }
    float largest = fmaxf(softmax.largest, warp_max(score));
    float by = expf(softmax.largest - base_of(largest)), weight = expf(score - base_of(largest));
    softmax.largest = largest;
    softmax.sum = softmax.sum * by + warp_sum(weight);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) softmax.values[part] *= by;
    unsigned end = min(seen.y, first + LANES);
#pragma unroll 1
    for (unsigned at = max(seen.x, first); at < end; ++at) {
        const float *keys = head + size_t(ids[at / BLOCK_TOKENS]) * block_elements;
        const float *value = keys + (BLOCK_TOKENS + at % BLOCK_TOKENS) * padded;
        float w = __shfl_sync(FULL_WARP, weight, int(at - first));
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            unsigned feature = part * LANES + lane_index();
            if (feature < padded) softmax.values[part] = fmaf(w, value[feature], softmax.values[part]);
        }
    }
}

// Blocks of threads: rows x heads.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_exact(const void *qkv, void *out, unsigned kind, unsigned stride, unsigned heads, unsigned kv_heads,
                    unsigned head_dim, unsigned padded, const unsigned *positions, const unsigned *row_blocks,
                    const unsigned *blocks, const float *pool, size_t block_elements, size_t layer_offset,
                    unsigned window, float cap) {
    __shared__ __align__(16) Shared shared;
    unsigned row = blockIdx.x / heads, head = blockIdx.x % heads;
    if (row_blocks[row] == NONE) return;
#define TAKE_QUERY(T) take_query<T>(shared.query, qkv, size_t(row) * stride + head * head_dim, head_dim, padded)
    WITH_KIND(kind, TAKE_QUERY);
    __syncthreads();

    unsigned position = positions[row], kv_head = head / (heads / kv_heads);
    uint2 seen = make_uint2(first_seen(position, window), position + 1);
    const float *tiles = pool + layer_offset + size_t(2 * kv_head) * BLOCK_TOKENS * padded;
    Softmax softmax;
    softmax.largest = -INFINITY;
    softmax.sum = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) softmax.values[part] = 0.0f;
    for (unsigned first = (seen.x / LANES + warp_index()) * LANES; first < seen.y; first += THREADS) {
        take_step(softmax, shared.query, tiles, block_elements, blocks + row_blocks[row], first, seen, padded,
                  cap);
    }

#pragma unroll
    for (int part = 0; part < PARTS; ++part) shared.values[warp_index()][part * LANES + lane_index()] = softmax.values[part];
    if (lane_index() == 0) {
        shared.largest[warp_index()] = softmax.largest;
        shared.sum[warp_index()] = softmax.sum;
    }
    __syncthreads();
    float largest = -INFINITY, sum = 0.0f, factor[WARPS];
    for (int warp = 0; warp < WARPS; ++warp) largest = fmaxf(largest, shared.largest[warp]);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        factor[warp] = expf(shared.largest[warp] - base_of(largest));
        sum += factor[warp] * shared.sum[warp];
    }
    for (unsigned i = threadIdx.x; i < head_dim; i += THREADS) {
        float value = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) value += factor[warp] * shared.values[warp][i];
        store_one(out, (size_t(row) * heads + head) * head_dim + i, kind, value / sum);
    }
}

ON_CPU_KERNEL(attention_exact);
