// Rotary embedding of queries and keys, in place, with the norm of each head that some models have before it.
//
//     x = x / sqrt(mean(x^2) + eps) * weight                                   (where there is a norm)
//     (a, b) -> (a cos - b sin, b cos + a sin) * scale,   angle[i] = position * frequency[i]
//
// for the halves a, b of a head: element i is turned together with element i + head_dim / 2 (the convention
// of Hugging Face's models, not the interleaved one). Queries take on the scale of the scores on the way,
// keys by 1.
//
// qkv has rows of [queries: heads x head_dim | keys: kv_heads x head_dim | values], of the model's kind;
// values are left alone. positions: one a row. frequencies: head_dim / 2.
//
// A block takes a row and as many heads as it has warps. It computes the row's angles once, for all of them:
// at long positions a sine takes a hundred instructions, because its argument must be reduced exactly (never
// __sinf here). The product position * frequency is rounded to f32 first, as models do. A warp has a head,
// all of it in registers.
#include "common.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * LANES;
constexpr int MOST_HALF = 128;
constexpr int EACH = MOST_HALF / LANES;

template <typename T> __device__ __forceinline__ void turn_head(T *head, unsigned half, const float *cosines,
                                                                const float *sines, const float *norm,
                                                                float eps, float scale) {
    float a[EACH], b[EACH], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        unsigned at = i * LANES + lane_index();
        a[i] = at < half ? to_float(head[at]) : 0.0f;
        b[i] = at < half ? to_float(head[half + at]) : 0.0f;
        squares = fmaf(b[i], b[i], fmaf(a[i], a[i], squares));
    }
    float shrink = 1.0f;
    if (norm != nullptr) shrink = 1.0f / sqrtf(warp_sum(squares) / float(2 * half) + eps);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        unsigned at = i * LANES + lane_index();
        if (at >= half) break;
        float first = a[i], second = b[i];
        if (norm != nullptr) {
            first *= shrink * norm[at];
            second *= shrink * norm[half + at];
        }
        head[at] = from_float<T>((first * cosines[at] - second * sines[at]) * scale);
        head[half + at] = from_float<T>((second * cosines[at] + first * sines[at]) * scale);
    }
}

template <typename T>
__device__ __forceinline__ void rotate(T *qkv, const unsigned *positions, const float *frequencies,
                                       const float *query_norm, float query_eps, const float *key_norm,
                                       float key_eps, float query_scale, unsigned heads, unsigned kv_heads,
                                       unsigned head_dim) {
    __shared__ float cosines[MOST_HALF], sines[MOST_HALF];
    unsigned half = head_dim / 2;
    float position = float(positions[blockIdx.x]);
    for (unsigned i = threadIdx.x; i < half; i += THREADS) {
        float sine, cosine;
        sincosf(__fmul_rn(position, frequencies[i]), &sine, &cosine);
        sines[i] = sine;
        cosines[i] = cosine;
    }
    __syncthreads();
    unsigned head = blockIdx.y * WARPS + warp_index();
    if (head >= heads + kv_heads) return; // a whole warp
    size_t stride = size_t(heads + 2 * kv_heads) * head_dim;
    T *own = qkv + blockIdx.x * stride + size_t(head) * head_dim;
    if (head < heads)
        turn_head(own, half, cosines, sines, query_norm, query_eps, query_scale);
    else
        turn_head(own, half, cosines, sines, key_norm, key_eps, 1.0f);
}

// Norms may be null. head_dim is even and at most 2 * MOST_HALF. Grid: rows, then (heads + kv_heads) / WARPS.
extern "C" __global__ void __launch_bounds__(THREADS)
    rotate_f32(float *qkv, const unsigned *positions, const float *frequencies, const float *query_norm,
               float query_eps, const float *key_norm, float key_eps, float query_scale, unsigned heads,
               unsigned kv_heads, unsigned head_dim) {
    rotate(qkv, positions, frequencies, query_norm, query_eps, key_norm, key_eps, query_scale, heads,
           kv_heads, head_dim);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    rotate_f16(f16 *qkv, const unsigned *positions, const float *frequencies, const float *query_norm,
               float query_eps, const float *key_norm, float key_eps, float query_scale, unsigned heads,
               unsigned kv_heads, unsigned head_dim) {
    rotate(qkv, positions, frequencies, query_norm, query_eps, key_norm, key_eps, query_scale, heads,
           kv_heads, head_dim);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    rotate_bf16(bf16 *qkv, const unsigned *positions, const float *frequencies, const float *query_norm,
                float query_eps, const float *key_norm, float key_eps, float query_scale, unsigned heads,
                unsigned kv_heads, unsigned head_dim) {
    rotate(qkv, positions, frequencies, query_norm, query_eps, key_norm, key_eps, query_scale, heads,
           kv_heads, head_dim);
}

ON_CPU_KERNEL(rotate_f32);
ON_CPU_KERNEL(rotate_f16);
ON_CPU_KERNEL(rotate_bf16);
