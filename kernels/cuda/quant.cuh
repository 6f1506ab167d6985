// How weights lie on the device, and what they are worth.
//
// Float weights (f32, f16, bf16) lie as in their file: [rows, columns], row after row.
//
// A block format is taken apart when it is uploaded (`repack.cu`), because its blocks of 18 to 210 bytes
// begin at odd addresses: what a warp reads together comes to lie together, in planes, each from a multiple
// of 256 bytes:
//
//   codes   an octet is eight codes: 4 bytes, of 8-bit codes 8 bytes
//   high    the fifth bits of an octet: 1 byte; fifth and sixth bits: 2 bytes
//   scales  for each group of 32: f16 scale (Q4_0, Q5_0, Q8_0); f16 scale, f16 minimum (Q4_1, Q5_1);
//           two int8 (Q6_K). For each 256: f16 scale, f16 minimum, twelve bytes of six-bit pairs (Q4_K, Q5_K)
//   super   for each 256 the f16 scale of the scales (Q6_K)
//
//   value = scale * (code - ZERO) + minimum
//
// It takes as many bytes as in the file. Within a row, each 128 elements (16 octets) are transposed: octet u
// * 4 + t lies at place t * 4 + u, so that the lane t of a quad, which multiplies elements 8t .. 8t + 7 of
// each group of 32 (`gemv.cuh`), finds its four octets in 16 consecutive bytes. A rest of a row below 128
// lies in order.
//
// The pairs of an octet lie as tensor cores take them: with 4i bits shifted off, the two 16-bit halves of the
// word end in elements 2i and 2i + 1. Their high bits do so with i bits (2i bits, of six-bit codes) shifted
// off.
#pragma once

#include "common.cuh"

enum class Form { f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k };

template <Form F> struct Of {
    static constexpr bool SUPER = F == Form::q4_k || F == Form::q5_k || F == Form::q6_k;
    static constexpr int BLOCK = SUPER ? 256 : 32;
    static constexpr int HIGH_BITS = F == Form::q6_k                                                  ? 2
                                     : F == Form::q5_0 || F == Form::q5_1 || F == Form::q5_k ? 1
                                                                                              : 0;
    static constexpr int CODE_BYTES = F == Form::q8_0 ? 8 : 4;
    static constexpr bool MINIMUM =
        F == Form::q4_1 || F == Form::q5_1 || F == Form::q4_k || F == Form::q5_k;
    static constexpr int ZERO =
        F == Form::q4_0 ? 8 : F == Form::q5_0 ? 16 : F == Form::q6_k ? 32 : F == Form::q8_0 ? 128 : 0;
    static constexpr bool HALVES = F == Form::q6_k; // two scales a group
};

struct Planes {
    const unsigned char *codes, *high, *scales, *super;
};

__device__ __forceinline__ size_t plane_bytes(size_t bytes) { return (bytes + 255) / 256 * 256; }

template <Form F>
__device__ __forceinline__ Planes planes(const void *weight, unsigned rows, unsigned columns) {
    size_t octets = size_t(rows) * (columns / 8), groups = octets / 4;
    size_t scale_bytes = Of<F>::MINIMUM ? 4 : 2;
    if (Of<F>::SUPER) scale_bytes = 2;
    Planes p;
    p.codes = static_cast<const unsigned char *>(weight);
    p.high = p.codes + plane_bytes(octets * Of<F>::CODE_BYTES);
    p.scales = p.high + plane_bytes(octets * Of<F>::HIGH_BITS);
    p.super = p.scales + plane_bytes(groups * scale_bytes);
    return p;
}

// Where octet `at` of a row of `octets` lies in that row.
__device__ __forceinline__ unsigned octet_place(unsigned at, unsigned octets) {
    return at < (octets & ~15u) ? (at & ~15u) | (at & 3) << 2 | (at >> 2 & 3) : at;
}

__device__ __forceinline__ float half_bits(unsigned bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits & 0xFFFF)));
}

// What the codes of a group are worth: of its two halves of 16, which differ only if HALVES.
struct Worth {
    float scale[2], minimum;
};

// `group` counts over all rows.
template <Form F> __device__ __forceinline__ Worth worth(const Planes &p, size_t group) {
    Worth w;
    w.minimum = 0.0f;
    if (F == Form::q4_k || F == Form::q5_k) {
        uint4 head = __ldg(reinterpret_cast<const uint4 *>(p.scales) + group / 8);
        unsigned shift = 8 * (group & 3), scale, minimum;
        if ((group & 4) == 0) {
            scale = head.y >> shift & 63;
            minimum = head.z >> shift & 63;
        } else {
            unsigned both = head.w >> shift & 255;
            scale = (both & 15) | (head.y >> shift >> 6 & 3) << 4;
            minimum = both >> 4 | (head.z >> shift >> 6 & 3) << 4;
        }
        w.scale[0] = w.scale[1] = half_bits(head.x) * float(scale);
        w.minimum = -half_bits(head.x >> 16) * float(minimum);
    } else if (F == Form::q6_k) {
        unsigned two = __ldg(reinterpret_cast<const unsigned short *>(p.scales) + group);
        float super = half_bits(__ldg(reinterpret_cast<const unsigned short *>(p.super) + group / 8));
        w.scale[0] = super * float(static_cast<signed char>(two & 255));
        w.scale[1] = super * float(static_cast<signed char>(two >> 8));
    } else if (Of<F>::MINIMUM) {
        unsigned both = __ldg(reinterpret_cast<const unsigned *>(p.scales) + group);
        w.scale[0] = w.scale[1] = half_bits(both);
        w.minimum = half_bits(both >> 16);
    } else {
        unsigned scale = __ldg(reinterpret_cast<const unsigned short *>(p.scales) + group);
        w.scale[0] = w.scale[1] = half_bits(scale);
    }
    return w;
}

// An octet's codes, as its planes hold them; `codes.y` only of 8-bit codes.
struct Octet {
    uint2 codes;
    unsigned high;
};

// `place` counts over all rows.
template <Form F> __device__ __forceinline__ Octet load_octet(const Planes &p, size_t place) {
    Octet octet = {};
    if (Of<F>::CODE_BYTES == 8) {
        octet.codes = __ldg(reinterpret_cast<const uint2 *>(p.codes) + place);
    } else {
        octet.codes.x = __ldg(reinterpret_cast<const unsigned *>(p.codes) + place);
    }
    if (Of<F>::HIGH_BITS == 1) octet.high = __ldg(p.high + place);
    if (Of<F>::HIGH_BITS == 2) octet.high = __ldg(reinterpret_cast<const unsigned short *>(p.high) + place);
    return octet;
}

// Codes 2 * pair and 2 * pair + 1 of an octet in the low and the high half of a word. Not for 8-bit codes.
template <Form F> __device__ __forceinline__ unsigned code_pair(const Octet &octet, int pair) {
    unsigned codes = octet.codes.x >> (4 * pair) & 0x000F000F;
    if (Of<F>::HIGH_BITS == 1) codes |= ((octet.high | octet.high << 12) >> pair & 0x00010001) << 4;
    if (Of<F>::HIGH_BITS == 2) codes |= ((octet.high | octet.high << 8) >> (2 * pair) & 0x00030003) << 4;
    return codes;
}

// Elements `at` .. `at + 7` of row `row` of a weight of [rows, columns], as f32; `at` and `columns` are
// multiples of 8.
template <Form F>
__device__ __forceinline__ void octet(const void *weight, unsigned rows, unsigned columns, unsigned row,
                                      unsigned at, float (&values)[8]) {
    size_t first = size_t(row) * columns + at;
    if constexpr (F == Form::f32) {
        for (int i = 0; i < 8; ++i) values[i] = static_cast<const float *>(weight)[first + i];
    } else if constexpr (F == Form::f16) {
        Pack<f16> pack = load_pack(static_cast<const f16 *>(weight) + first);
        for (int i = 0; i < 8; ++i) values[i] = to_float(pack.at[i]);
    } else if constexpr (F == Form::bf16) {
        Pack<bf16> pack = load_pack(static_cast<const bf16 *>(weight) + first);
        for (int i = 0; i < 8; ++i) values[i] = to_float(pack.at[i]);
    } else {
        Planes p = planes<F>(weight, rows, columns);
        unsigned octets = columns / 8;
        Octet packed = load_octet<F>(p, size_t(row) * octets + octet_place(at / 8, octets));
        Worth w = worth<F>(p, first / 32);
        float scale = at & 16 ? w.scale[1] : w.scale[0];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int code;
            if (Of<F>::CODE_BYTES == 8) {
                code = (i < 4 ? packed.codes.x : packed.codes.y) >> (8 * (i & 3)) & 255;
            } else {
                code = code_pair<F>(packed, i / 2) >> (16 * (i & 1)) & 255;
            }
            values[i] = fmaf(scale, float(code - Of<F>::ZERO), w.minimum);
        }
    }
}
