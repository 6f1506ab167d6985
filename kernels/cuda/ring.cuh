// Weights as whole numbers times a power of two, for products modulo 2^64 or 2^48 (`ring.cu`, `ring_transposed.cu`),
// and numbers of rows.
//
//   block formats   code * scale + minimum      scales and minima to 11 bits, as whole numbers of at most 31 bits
//   floats          round(w * 2^24) * 2^n, rounded again
//
// These are, to the last bit, the whole numbers that the CPU multiplies with (`linear/ring`): its packed
// matrices keep scales as halves relative to a power of two that all of them share, and so they are rounded
// here. All rounding is to the nearest, ties to even. A word is 64 bits, and whatever does not fit is lost:
// the order of a sum does not matter, and sums may meet in atomic additions.
#pragma once

#include "quant.cuh"

using Word = unsigned long long;

// Number `at` of rows, which has eight bytes or six, the lowest first, as a word: the bytes that it lacks are zeros.
// Numbers of six begin at even addresses.
__device__ __forceinline__ Word load_number(const void *rows, unsigned bytes, size_t at) {
    if (bytes == 8) return static_cast<const Word *>(rows)[at];
    auto half = static_cast<const unsigned short *>(rows) + 3 * at;
    return half[0] | Word(half[1]) << 16 | Word(half[2]) << 32;
}
// Writes as many of the lower bytes of a word.
__device__ __forceinline__ void store_number(void *rows, unsigned bytes, size_t at, Word word) {
    if (bytes == 8) {
        static_cast<Word *>(rows)[at] = word;
        return;
    }
    auto half = static_cast<unsigned short *>(rows) + 3 * at;
#pragma unroll
    for (int i = 0; i < 3; ++i) half[i] = static_cast<unsigned short>(word >> (16 * i));
}

// What weights are multiplied with: those of block formats by `first` before they are halves, and by `then`
// behind that; floats by `first` before they are whole numbers, and by `then` behind that.
struct Factors {
    float first, then;
};

template <Form F> constexpr bool IS_FLOAT = F == Form::f32 || F == Form::f16 || F == Form::bf16;

__device__ __forceinline__ int whole_number(float number, Factors by) {
    return __float2int_rn(to_float(from_float<f16>(number * by.first)) * by.then);
}
__device__ __forceinline__ int whole_float(float weight, Factors by) {
    return __float2int_rn(rintf(weight * by.first) * by.then);
}

// What the codes of a group are worth: of its two halves of 16, which differ only if HALVES.
struct WholeWorth {
    int scale[2], minimum;
};

template <Form F> __device__ __forceinline__ WholeWorth whole_worth(const Planes &p, size_t group, Factors by) {
    Worth w = worth<F>(p, group);
    int scale = whole_number(w.scale[0], by);
    return {{scale, Of<F>::HALVES ? whole_number(w.scale[1], by) : scale},
            Of<F>::MINIMUM ? whole_number(w.minimum, by) : 0};
}

// Codes of an octet less ZERO, bytes with signs: elements 0, 4, 1, 5 of it in the first word, 2, 6, 3, 7 in
// the second, which is how the planes of codes have them.
template <Form F> __device__ __forceinline__ uint2 signed_codes(const Octet &octet) {
    uint2 bytes;
    if constexpr (Of<F>::CODE_BYTES == 8) {
        bytes.x = __byte_perm(octet.codes.x, octet.codes.y, 0x5140) ^ 0x80808080;
        bytes.y = __byte_perm(octet.codes.x, octet.codes.y, 0x7362) ^ 0x80808080;
    } else {
        bytes.x = octet.codes.x & 0x0F0F0F0F;
        bytes.y = octet.codes.x >> 4 & 0x0F0F0F0F;
        if constexpr (Of<F>::HIGH_BITS == 1) {
            unsigned spread = octet.high | octet.high << 12;
            spread |= spread << 6;
            bytes.x |= (spread & 0x01010101) << 4;
            bytes.y |= (spread >> 1 & 0x01010101) << 4;
        }
        if constexpr (Of<F>::HIGH_BITS == 2) {
            unsigned spread = __byte_perm(octet.high, 0, 0x4140);
            spread |= spread << 4;
            bytes.x |= (spread & 0x03030303) << 4;
            bytes.y |= (spread >> 2 & 0x03030303) << 4;
        }
        if constexpr (Of<F>::ZERO != 0) {
            // No byte borrows of the next one, as the highest bit of each is set.
            bytes.x = ((bytes.x | 0x80808080) - Of<F>::ZERO * 0x01010101u) ^ 0x80808080;
            bytes.y = ((bytes.y | 0x80808080) - Of<F>::ZERO * 0x01010101u) ^ 0x80808080;
        }
    }
    return bytes;
}

// Elements `at` .. `at + 7` of a row of float weights, zeros behind its end.
template <Form F>
__device__ __forceinline__ void float_octet(const void *weight, unsigned columns, unsigned row, unsigned at,
                                            float (&values)[8]) {
    if (columns % 8 == 0 && at < columns) {
        octet<F>(weight, 0, columns, row, at, values);
        return;
    }
    size_t first = size_t(row) * columns + at;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        values[i] = 0.0f;
        if (at + i >= columns) continue;
        if constexpr (F == Form::f32) values[i] = static_cast<const float *>(weight)[first + i];
        if constexpr (F == Form::f16) values[i] = to_float(static_cast<const f16 *>(weight)[first + i]);
        if constexpr (F == Form::bf16) values[i] = to_float(static_cast<const bf16 *>(weight)[first + i]);
    }
}

// Elements `at` .. `at + 7` of row `row`; of floats zeros behind its end.
template <Form F>
__device__ __forceinline__ void whole_octet(const void *weight, unsigned rows, unsigned columns, unsigned row,
                                            unsigned at, Factors by, int (&whole)[8]) {
    if constexpr (IS_FLOAT<F>) {
        float values[8];
        float_octet<F>(weight, columns, row, at, values);
#pragma unroll
        for (int i = 0; i < 8; ++i) whole[i] = whole_float(values[i], by);
    } else {
        Planes p = planes<F>(weight, rows, columns);
        unsigned octets = columns / 8;
        uint2 codes = signed_codes<F>(load_octet<F>(p, size_t(row) * octets + octet_place(at / 8, octets)));
        WholeWorth w = whole_worth<F>(p, (size_t(row) * columns + at) / 32, by);
        int scale = at & 16 ? w.scale[1] : w.scale[0];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            unsigned word = i & 2 ? codes.y : codes.x;
            int code = static_cast<signed char>(word >> (8 * (2 * (i & 1) + i / 4)));
            whole[i] = code * scale + w.minimum;
        }
    }
}
