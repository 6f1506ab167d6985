// Keys and values of new rows go to their sequences' blocks.
//
//     pool[block of position][layer][head] keys[position % 16] = key of the row, values[position % 16] = its
//     value
//
// The layout is drawn in attention.cuh. A thread writes 8 features: 16 bytes of f16, 32 of f32; a key's
// padding is written too, as zeros, so that nothing that is read later was never written. Rows without a
// sequence are left out: a recorded batch may have more rows than are in use.
//
// Bytes: a row's 2 * kv_heads * head_dim numbers are read once and written once (Llama-2-7B: 16 KiB read, 16
// KiB written a row and layer, against 2.6 MB of weights a row at batch 64): nothing to gain beyond
// whole-width accesses.
//
// positions[row]: the row's position. row_blocks[row]: where its sequence's block ids begin in `blocks`, or
// NONE.
#include "attention.cuh"

#define FEATURES 8

__device__ __forceinline__ void put(f16 *to, const float (&x)[FEATURES]) {
    Pack<f16> pack;
#pragma unroll
    for (int i = 0; i < FEATURES; ++i) pack.at[i] = from_float<f16>(limited(x[i]));
    store_pack(to, pack);
}
__device__ __forceinline__ void put(float *to, const float (&x)[FEATURES]) {
    Pack<float> low, high;
#pragma unroll
    for (int i = 0; i < FEATURES / 2; ++i) {
        low.at[i] = x[i];
        high.at[i] = x[i + FEATURES / 2];
    }
    store_pack(to, low);
    store_pack(to + FEATURES / 2, high);
}

// Up to 8 of `count` numbers, which are even in number.
template <typename T>
__device__ __forceinline__ void take(float (&x)[FEATURES], const void *from, size_t at, unsigned count) {
#pragma unroll
    for (int i = 0; i < FEATURES; i += 2) {
        if (i >= int(count)) break;
        float2 two = load_two(static_cast<const T *>(from), at + i);
        x[i] = two.x;
        x[i + 1] = two.y;
    }
}

template <typename E>
__device__ __forceinline__ void kv_append(const void *qkv, unsigned kind, unsigned rows, unsigned stride,
                                          unsigned key_column, unsigned kv_heads, unsigned head_dim, unsigned padded,
                                          const unsigned *positions, const unsigned *row_blocks,
                                          const unsigned *blocks, E *pool, size_t block_elements,
                                          size_t layer_offset) {
    unsigned parts = padded / FEATURES, in_row = 2 * kv_heads * parts;
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned row = at / in_row;
    await_front();
    if (row >= rows || row_blocks[row] == NONE) return;
    // Heads in the order they have in a row: all keys, then all values.
    unsigned head = at % in_row / parts, feature = at % parts * FEATURES;
    unsigned position = positions[row], slot = position % BLOCK_TOKENS;
    float x[FEATURES] = {};
    size_t from = size_t(row) * stride + key_column + head * head_dim + feature;
#define TAKE(T) take<T>(x, qkv, from, feature < head_dim ? head_dim - feature : 0)
    WITH_KIND(kind, TAKE);
    size_t block = blocks[row_blocks[row] + position / BLOCK_TOKENS];
    unsigned place = head < kv_heads ? 2 * head : 2 * (head - kv_heads) + 1;
    E *tile = pool + block * block_elements + layer_offset + size_t(place) * BLOCK_TOKENS * padded;
    put(tile + slot * padded + feature, x);
}

#define KV_APPEND(name, element)                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                        \
        name(const void *qkv, unsigned kind, unsigned rows, unsigned stride, unsigned key_column,            \
             unsigned kv_heads, unsigned head_dim, unsigned padded, const unsigned *positions,               \
             const unsigned *row_blocks, const unsigned *blocks, element *pool, size_t block_elements,       \
             size_t layer_offset) {                                                                          \
        kv_append(qkv, kind, rows, stride, key_column, kv_heads, head_dim, padded, positions, row_blocks, blocks, \
                  pool, block_elements, layer_offset);                                                       \
    }

KV_APPEND(kv_append_f32, float)
KV_APPEND(kv_append_f16, f16)

ON_CPU_KERNEL(kv_append_f32);
ON_CPU_KERNEL(kv_append_f16);
