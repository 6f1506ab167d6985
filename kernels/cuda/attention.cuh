// What the kernels of attention share: where keys and values lie, numbers of a kind known at run time, and
// which positions a query sees.
//
// The pool. A block holds 16 positions of a sequence, for all layers:
//     block = layers x kv_heads x { keys [16][padded] | values [16][padded] }
// A position's key is one row of consecutive features, padded with zeros to a width that the kernels are made
// for, so a warp reads whole rows 16 bytes a lane, and one head of one layer of a block is one run of 64 *
// padded bytes (f16). Unused slots may hold anything, NaN too: scores are chosen away where a query does not
// look, and values of such slots are replaced by zero before they are multiplied.
//
// Kinds. Queries, new keys and values, and the output are of the model's kind (0: f32, 1: f16, 2: bf16),
// which is an argument: they are few beside the keys and values, so one kernel serves all three. What becomes
// f16 is limited to +-65504, its largest number: an outlier of bf16 or f32 stays a large number and does not
// turn a row into NaN. A NaN stays one.
#pragma once

#include "common.cuh"

#define BLOCK_TOKENS 16
// Written where a table's entry stands for nothing.
#define NONE 0xFFFFFFFFu

#define KIND_F32 0
#define KIND_F16 1

// Numbers `at` and `at + 1`; `at` is even.
__device__ __forceinline__ float2 load_two(const float *from, size_t at) {
    return *reinterpret_cast<const float2 *>(from + at);
}
template <typename T> __device__ __forceinline__ float2 load_two(const T *from, size_t at) {
    __align__(4) T two[2];
    *reinterpret_cast<unsigned *>(two) = *reinterpret_cast<const unsigned *>(from + at);
    return make_float2(to_float(two[0]), to_float(two[1]));
}

// CALL(T) with the type of a kind's numbers: once, outside of loops, so that their loads go together.
#define WITH_KIND(kind, CALL)                                                                                \
    do {                                                                                                     \
        if (kind == KIND_F32) {                                                                              \
            CALL(float);                                                                                     \
        } else if (kind == KIND_F16) {                                                                       \
            CALL(f16);                                                                                       \
        } else {                                                                                             \
            CALL(bf16);                                                                                      \
        }                                                                                                    \
    } while (false)

__device__ __forceinline__ void store_two(void *to, size_t at, unsigned kind, float x, float y) {
    if (kind == KIND_F32) {
        *reinterpret_cast<float2 *>(static_cast<float *>(to) + at) = make_float2(x, y);
    } else {
        unsigned both = kind == KIND_F16 ? pack_pair<f16>(x, y) : pack_pair<bf16>(x, y);
        *reinterpret_cast<unsigned *>(static_cast<unsigned short *>(to) + at) = both;
    }
}

__device__ __forceinline__ void store_one(void *to, size_t at, unsigned kind, float x) {
    if (kind == KIND_F32) {
        static_cast<float *>(to)[at] = x;
    } else {
        unsigned short bits = kind == KIND_F16 ? __half_as_ushort(from_float<f16>(x))
                                               : __bfloat16_as_ushort(from_float<bf16>(x));
        static_cast<unsigned short *>(to)[at] = bits;
    }
}

// Within f16's range; comparisons, so that NaN stays NaN.
__device__ __forceinline__ float limited(float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }

// The same of two, as a pair: beyond the range they round to infinity, which two more instructions bring back.
__device__ __forceinline__ unsigned limited_pair(float2 two) {
#ifdef ON_CPU
    return pack_pair<f16>(limited(two.x), limited(two.y));
#else
    unsigned pair = pack_pair<f16>(two.x, two.y);
    asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x7BFF7BFFu));
    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0xFBFFFBFFu));
    return pair;
#endif
}

// Features `feature` and the next of a head that begins at number `head`, as a pair of f16; zeros behind its
// width. FLOATS: numbers are f32, else of the 16-bit kind given.
template <bool FLOATS>
__device__ __forceinline__ unsigned load_halves(const void *from, unsigned kind, size_t head, unsigned feature,
                                                unsigned head_dim) {
    if (feature >= head_dim) return 0;
    if constexpr (FLOATS) return limited_pair(load_two(static_cast<const float *>(from), head + feature));
    unsigned both = *reinterpret_cast<const unsigned *>(static_cast<const unsigned short *>(from) + head + feature);
    f16 low = __ushort_as_half(both & 0xFFFF), high = __ushort_as_half(both >> 16);
    float2 as_bf16 = make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u));
    return limited_pair(kind == KIND_F16 ? make_float2(to_float(low), to_float(high)) : as_bf16);
}

// Scores are kept in units of log2: a weight is then one instruction.
#define LOG2_E 1.4426950408889634f

// 2^x; 0 for minus infinity.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef ON_CPU
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// A score within plus and minus `cap`, smoothly: cap * tanh(score / cap) = cap - 2 cap / (1 + e^(2 score / cap)). 0 stands for
// no cap.
__device__ __forceinline__ float capped(float score, float cap) {
    if (cap == 0.0f) return score;
    return cap - __fdividef(2.0f * cap, 1.0f + exp2_fast(score * (2.0f * LOG2_E / cap)));
}

// What scores are set against: the largest so far, or anything finite where nothing was seen yet.
__device__ __forceinline__ float base_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }

// The first position that a query at `position` sees, if it reaches back `window` positions, its own among
// them.
__device__ __forceinline__ unsigned first_seen(unsigned position, unsigned window) {
    return position >= window ? position + 1 - window : 0;
}
