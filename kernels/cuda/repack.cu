// Takes the blocks of a weight file apart into the planes of `quant.cuh`.
//
// raw holds `count` whole rows, from row `first` of the weight on, as in the file (layouts: ggml-common.h). A
// thread takes an octet, and with the first octet of a group or a block of 256 also its scales. Blocks begin
// at odd addresses, so raw is read by the byte: each is read once, and the time is that of the copy from the
// host, beside which this runs.

#include "quant.cuh"

template <Form F> struct Raw;
template <> struct Raw<Form::q4_0> { static constexpr unsigned BYTES = 18, LOW = 2; };
template <> struct Raw<Form::q4_1> { static constexpr unsigned BYTES = 20, LOW = 4; };
template <> struct Raw<Form::q5_0> { static constexpr unsigned BYTES = 22, LOW = 6, HIGH = 2; };
template <> struct Raw<Form::q5_1> { static constexpr unsigned BYTES = 24, LOW = 8, HIGH = 4; };
template <> struct Raw<Form::q8_0> { static constexpr unsigned BYTES = 34, LOW = 2; };
template <> struct Raw<Form::q4_k> { static constexpr unsigned BYTES = 144, LOW = 16; };
template <> struct Raw<Form::q5_k> { static constexpr unsigned BYTES = 176, LOW = 48, HIGH = 16; };
template <> struct Raw<Form::q6_k> { static constexpr unsigned BYTES = 210, LOW = 0, HIGH = 128; };

// Code of element i of a block, without the sign: see ZERO.
template <Form F> __device__ __forceinline__ unsigned raw_code(const unsigned char *block, unsigned i) {
    const unsigned char *low = block + Raw<F>::LOW;
    if constexpr (F == Form::q8_0) {
        return low[i] ^ 0x80;
    } else if constexpr (F == Form::q4_k || F == Form::q5_k) {
        unsigned group = i / 32, byte = low[32 * (group / 2) + i % 32];
        unsigned code = group % 2 == 0 ? byte & 15 : byte >> 4;
        if constexpr (F == Form::q5_k) code |= (block[Raw<F>::HIGH + i % 32] >> group & 1u) << 4;
        return code;
    } else if constexpr (F == Form::q6_k) {
        unsigned half = i / 128, quarter = i % 128 / 32, byte = low[64 * half + 32 * (quarter % 2) + i % 32];
        unsigned top = block[Raw<F>::HIGH + 32 * half + i % 32] >> (2 * quarter) & 3u;
        return (quarter < 2 ? byte & 15 : byte >> 4) | top << 4;
    } else {
        unsigned code = i < 16 ? low[i] & 15 : low[i - 16] >> 4;
        if constexpr (Of<F>::HIGH_BITS == 1) code |= (block[Raw<F>::HIGH + i / 8] >> (i % 8) & 1u) << 4;
        return code;
    }
}

// Bytes of a block's or group's scales, from place `from` of raw to place `to`.
__device__ __forceinline__ void copy_bytes(unsigned char *to, const unsigned char *from, int bytes) {
    for (int i = 0; i < bytes; ++i) to[i] = from[i];
}

template <Form F>
__device__ __forceinline__ void repack(const unsigned char *raw, unsigned first, unsigned count,
                                       unsigned rows, unsigned columns, unsigned char *weight) {
    unsigned octets = columns / 8;
    size_t index = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= size_t(count) * octets) return;
    unsigned at = index % octets;
    size_t row = first + index / octets;
    constexpr unsigned OCTETS = Of<F>::BLOCK / 8;
    const unsigned char *block = raw + index / OCTETS * Raw<F>::BYTES; // a row is whole blocks
    Planes p = planes<F>(weight, rows, columns);
    size_t place = row * octets + octet_place(at, octets), group = (row * octets + at) / 4;

    unsigned low[2] = {0, 0}, high = 0;
    for (unsigned i = 0; i < 8; ++i) {
        unsigned code = raw_code<F>(block, at % OCTETS * 8 + i), pair = i / 2, odd = i % 2;
        if constexpr (Of<F>::CODE_BYTES == 8) {
            low[i / 4] |= code << (8 * (i % 4));
        } else {
            low[0] |= (code & 15) << (4 * pair + 16 * odd);
            if constexpr (Of<F>::HIGH_BITS == 1) high |= code >> 4 << (pair + 4 * odd);
            if constexpr (Of<F>::HIGH_BITS == 2) high |= code >> 4 << (2 * pair + 8 * odd);
        }
    }
    unsigned char *to_codes = const_cast<unsigned char *>(p.codes) + place * Of<F>::CODE_BYTES;
    unsigned *codes = reinterpret_cast<unsigned *>(to_codes);
    codes[0] = low[0];
    if constexpr (Of<F>::CODE_BYTES == 8) codes[1] = low[1];
    unsigned char *to_high = const_cast<unsigned char *>(p.high) + place * Of<F>::HIGH_BITS;
    if constexpr (Of<F>::HIGH_BITS >= 1) to_high[0] = static_cast<unsigned char>(high & 255);
    if constexpr (Of<F>::HIGH_BITS == 2) to_high[1] = static_cast<unsigned char>(high >> 8);

    unsigned char *scales = const_cast<unsigned char *>(p.scales);
    unsigned char *super = const_cast<unsigned char *>(p.super);
    if constexpr (F == Form::q6_k) {
        if (at % 4 == 0) copy_bytes(scales + group * 2, block + 192 + group % 8 * 2, 2);
        if (at % OCTETS == 0) copy_bytes(super + group / 8 * 2, block + 208, 2);
    } else if constexpr (Of<F>::SUPER) {
        if (at % OCTETS == 0) copy_bytes(scales + group / 8 * 16, block, 16);
    } else {
        constexpr int BYTES = Of<F>::MINIMUM ? 4 : 2;
        if (at % 4 == 0) copy_bytes(scales + group * BYTES, block, BYTES);
    }
}

#define REPACK(name, form)                                                                                   \
    extern "C" __global__ void name(const unsigned char *raw, unsigned first, unsigned count, unsigned rows, \
                                    unsigned columns, unsigned char *weight) {                               \
        repack<Form::form>(raw, first, count, rows, columns, weight);                                        \
    }

REPACK(repack_q4_0, q4_0)
REPACK(repack_q4_1, q4_1)
REPACK(repack_q5_0, q5_0)
REPACK(repack_q5_1, q5_1)
REPACK(repack_q8_0, q8_0)
REPACK(repack_q4_k, q4_k)
REPACK(repack_q5_k, q5_k)
REPACK(repack_q6_k, q6_k)

ON_CPU_KERNEL(repack_q4_0);
ON_CPU_KERNEL(repack_q4_1);
ON_CPU_KERNEL(repack_q5_0);
ON_CPU_KERNEL(repack_q5_1);
ON_CPU_KERNEL(repack_q8_0);
ON_CPU_KERNEL(repack_q4_k);
ON_CPU_KERNEL(repack_q5_k);
ON_CPU_KERNEL(repack_q6_k);
