// Rotary embedding of queries and keys, in place, with the norm of each head that some models have before it.
//
//     x = x / sqrt(mean(x^2) + eps) * weight                                   (where there is a norm)
//     (a, b) -> (a cos - b sin, b cos + a sin) * scale,   angle[i] = position * frequency[i]
//
// for the halves a, b of the first `turned` elements of a head: element i is turned together with element
// i + turned / 2 (the convention of Hugging Face's models, not the interleaved one). Cosines and sines are
// multiplied with `magnitude` (longrope). The rest of a head stays, but for its scale. Queries take on the
// scale of the scores on the way, keys 1.
//
// qkv has rows of [queries: heads x head_dim | keys: kv_heads x head_dim | values], of the model's kind;
// values are left alone. positions: one a row. frequencies: turned / 2.
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

// Where a head is normed, how it is scaled, and what of it is turned.
struct Turn {
    const float *cosines, *sines;
    unsigned half, head_dim;
};

template <typename T> __device__ __forceinline__ void turn_head(T *head, Turn turn, const float *norm, float eps,
                                                                float scale) {
    float a[EACH], b[EACH], squares = 0.0f;
    unsigned half = turn.half, rest = 2 * half + lane_index();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        unsigned at = i * LANES + lane_index();
        a[i] = at < half ? to_float(head[at]) : 0.0f;
        b[i] = at < half ? to_float(head[half + at]) : 0.0f;
        squares = fmaf(b[i], b[i], fmaf(a[i], a[i], squares));
    }
    float shrink = 1.0f;
    if (norm != nullptr) {
        for (unsigned at = rest; at < turn.head_dim; at += LANES)
            squares = fmaf(to_float(head[at]), to_float(head[at]), squares);
        shrink = 1.0f / sqrtf(warp_sum(squares) / float(turn.head_dim) + eps);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        unsigned at = i * LANES + lane_index();
        if (at >= half) break;
        float first = a[i], second = b[i];
        if (norm != nullptr) {
            first *= shrink * norm[at];
            second *= shrink * norm[half + at];
        }
        head[at] = from_float<T>((first * turn.cosines[at] - second * turn.sines[at]) * scale);
        head[half + at] = from_float<T>((second * turn.cosines[at] + first * turn.sines[at]) * scale);
    }
    for (unsigned at = rest; at < turn.head_dim; at += LANES) {
        float value = to_float(head[at]);
        if (norm != nullptr) value *= shrink * norm[at];
        head[at] = from_float<T>(value * scale);
    }
}

template <typename T>
__device__ __forceinline__ void rotate(T *qkv, const unsigned *positions, const float *frequencies, float magnitude,
                                       const float *query_norm, float query_eps, const float *key_norm,
                                       float key_eps, float query_scale, unsigned heads, unsigned kv_heads,
                                       unsigned head_dim, unsigned turned) {
    __shared__ float cosines[MOST_HALF], sines[MOST_HALF];
    unsigned half = turned / 2;
    float position = float(positions[blockIdx.x]);
    for (unsigned i = threadIdx.x; i < half; i += THREADS) {
        float sine, cosine;
        sincosf(__fmul_rn(position, frequencies[i]), &sine, &cosine);
        sines[i] = sine * magnitude;
        cosines[i] = cosine * magnitude;
    }
    await_front();
    __syncthreads();
    unsigned head = blockIdx.y * WARPS + warp_index();
    if (head >= heads + kv_heads) return; // a whole warp
    size_t stride = size_t(heads + 2 * kv_heads) * head_dim;
    T *own = qkv + blockIdx.x * stride + size_t(head) * head_dim;
    Turn turn = {cosines, sines, half, head_dim};
    if (head < heads)
        turn_head(own, turn, query_norm, query_eps, query_scale);
    else
        turn_head(own, turn, key_norm, key_eps, 1.0f);
}

// Norms may be null. head_dim is at most 2 * MOST_HALF; turned is even and at most head_dim. Grid: rows, then
// (heads + kv_heads) / WARPS.
#define ROTATE(name, type)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                    \
        name(type *qkv, const unsigned *positions, const float *frequencies, float magnitude,                \
             const float *query_norm, float query_eps, const float *key_norm, float key_eps,                 \
             float query_scale, unsigned heads, unsigned kv_heads, unsigned head_dim, unsigned turned) {     \
        rotate(qkv, positions, frequencies, magnitude, query_norm, query_eps, key_norm, key_eps,             \
               query_scale, heads, kv_heads, head_dim, turned);                                              \
    }

ROTATE(rotate_f32, float)
ROTATE(rotate_f16, f16)
ROTATE(rotate_bf16, bf16)

ON_CPU_KERNEL(rotate_f32);
ON_CPU_KERNEL(rotate_f16);
ON_CPU_KERNEL(rotate_bf16);
