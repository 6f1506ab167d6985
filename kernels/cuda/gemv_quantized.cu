// Few rows of bf16 through weights of block formats: `gemv.cuh` says what and how, `quant.cuh` how the
// weights lie.
//
// The tensor cores multiply x with the *codes*, which bf16 holds exactly; scales and minima are applied to
// the sums of each group of 32 elements, in f32. So nothing is rounded that the CPU does not round:
//
//   group g:  s[o, r] = sum over 32 of (code[o, k] - ZERO) x[r, k]        two mma
//             t[r]    = sum over 32 of x[r, k]       two mma with a matrix of ones; of formats with minima
//   sum[o, r] += scale[o, g] s[o, r] + minimum[o, g] t[r]
//
// Formats with a scale for each 16 elements (Q6_K) take each mma twice, the other lanes' x set to zero: lanes
// t < 2 of a quad hold the first 16 elements of a group.
//
// Codes become bf16 by their bits: 0x4300 is 128 with a unit of 1 in its last place, so 0x4300 | code is 128
// + code, and one fused multiply-add takes 128 + ZERO off two of them, exactly. That is three instructions
// for two weights. Bytes: 4.5 to 8.5 bits a weight, once. A lane takes 16 bytes of codes of two rows at a
// time, of a stretch to multiply and one or two that are on their way.

#include "gemv.cuh"
#include "quant.cuh"

constexpr unsigned ONES = 0x3F803F80; // two bf16

// a - b of two bf16 at once, for small integers.
__device__ __forceinline__ unsigned subtract_pairs(unsigned a, unsigned b) {
#ifdef ON_CPU
    float low = __uint_as_float(a << 16) - __uint_as_float(b << 16);
    float high = __uint_as_float(a & 0xFFFF0000) - __uint_as_float(b & 0xFFFF0000);
    return pack_pair<bf16>(low, high);
#else
    unsigned difference;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(difference) : "r"(b), "r"(0xBF80BF80u), "r"(a));
    return difference;
#endif
}

// Codes 2 * pair and 2 * pair + 1 of an octet, less ZERO, as two bf16.
template <Form F> __device__ __forceinline__ unsigned signed_pair(const Octet &octet, int pair) {
    if constexpr (F == Form::q8_0) {
        unsigned word = pair < 2 ? octet.codes.x : octet.codes.y, at = 2 * (pair & 1);
        // 0x4B000000 is 2^23 with a unit of 1 in its last place.
        float low = __uint_as_float(__byte_perm(word, 0x4B000000, 0x7440 | at)) - 8388736.0f;
        float high = __uint_as_float(__byte_perm(word, 0x4B000000, 0x7441 | at)) - 8388736.0f;
        return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632); // eight bits: exact in bf16
    } else {
        // 0x4300 + n is 128 + n.
        constexpr unsigned BIAS = 0x43004300 + Of<F>::ZERO * 0x00010001;
        return subtract_pairs(code_pair<F>(octet, pair) | 0x43004300, BIAS);
    }
}

// A lane's octets of a stretch of one row: four, one of each group; behind the row's end zeros.
template <Form F> struct Stretch {
    uint4 codes[Of<F>::CODE_BYTES / 4];
    unsigned high[2];
};

// The stretch from element `from` of row `row`.
template <Form F>
__device__ __forceinline__ Stretch<F> load_stretch(const Planes &p, size_t row, unsigned octets,
                                                   unsigned from, int t) {
    Stretch<F> s = {};
    size_t place = row * octets + from / 8;
    if (from + STRETCH <= octets * 8) {
        place += 4 * t;
#pragma unroll
        for (int i = 0; i < Of<F>::CODE_BYTES / 4; ++i)
            s.codes[i] = load_once(p.codes + place * Of<F>::CODE_BYTES + 16 * i);
        if (Of<F>::HIGH_BITS == 1) s.high[0] = __ldg(reinterpret_cast<const unsigned *>(p.high + place));
        if (Of<F>::HIGH_BITS == 2) {
            uint2 high = __ldg(reinterpret_cast<const uint2 *>(p.high + 2 * place));
            s.high[0] = high.x, s.high[1] = high.y;
        }
        return s;
    }
    unsigned words[4 * Of<F>::CODE_BYTES / 4] = {};
#pragma unroll
    for (int u = 0; u < 3; ++u) {
        if (from / 8 + 4 * u + t >= octets) continue;
        Octet octet = load_octet<F>(p, place + 4 * u + t);
        words[u * (Of<F>::CODE_BYTES / 4)] = octet.codes.x;
        if (Of<F>::CODE_BYTES == 8) words[2 * u + 1] = octet.codes.y;
        if (Of<F>::HIGH_BITS == 1) s.high[0] |= octet.high << (8 * u);
        if (Of<F>::HIGH_BITS == 2) s.high[u / 2] |= octet.high << (16 * (u % 2));
    }
#pragma unroll
    for (int i = 0; i < Of<F>::CODE_BYTES / 4; ++i)
        s.codes[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    return s;
}

// The lane's octet of group u of a stretch.
template <Form F> __device__ __forceinline__ Octet octet_of(const Stretch<F> &s, int u) {
    Octet octet;
    if (Of<F>::CODE_BYTES == 8) {
        uint4 two = s.codes[u / 2 % (Of<F>::CODE_BYTES / 4)];
        octet.codes = u % 2 == 0 ? make_uint2(two.x, two.y) : make_uint2(two.z, two.w);
    } else {
        uint4 four = s.codes[0];
        octet.codes = make_uint2(u == 0 ? four.x : u == 1 ? four.y : u == 2 ? four.z : four.w, 0);
    }
    octet.high = 0;
    if (Of<F>::HIGH_BITS == 1) octet.high = s.high[0] >> (8 * u) & 0xFF;
    if (Of<F>::HIGH_BITS == 2) octet.high = s.high[u / 2] >> (16 * (u % 2)) & 0xFFFF;
    return octet;
}

// Adds to `sums` what one group of 32 elements contributes. a[0] and a[1] are the codes of the group as the
// tensor cores take them, x the lane's eight elements of x.
template <Form F>
__device__ __forceinline__ void add_group(float (&sums)[4], const unsigned (&a)[2][4], const uint4 &x,
                                          const Worth &upper, const Worth &lower, int t) {
    constexpr int HALVES = Of<F>::HALVES ? 2 : 1;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        bool take = HALVES == 1 || t / 2 == half;
        unsigned first[2] = {take ? x.x : 0, take ? x.y : 0}, second[2] = {take ? x.z : 0, take ? x.w : 0};
        float s[4] = {};
        mma_16x8x16<bf16>(s, a[0], first);
        mma_16x8x16<bf16>(s, a[1], second);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sums[i] = fmaf(i < 2 ? upper.scale[half] : lower.scale[half], s[i], sums[i]);
    }
    if (Of<F>::MINIMUM) {
        unsigned ones[4] = {ONES, ONES, ONES, ONES}, first[2] = {x.x, x.y}, second[2] = {x.z, x.w};
        float t_sums[4] = {};
        mma_16x8x16<bf16>(t_sums, ones, first);
        mma_16x8x16<bf16>(t_sums, ones, second);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = fmaf(i < 2 ? upper.minimum : lower.minimum, t_sums[i], sums[i]);
    }
}

// What a warp reads, and which of it is this lane's.
struct Reader {
    Planes p;
    size_t upper, lower; // rows of W
    unsigned columns, batch;
    const bf16 *x;
    int group, t;
};

// The stretches from element `from` of the lane's two rows; zeros behind their ends.
template <Form F> struct StretchPair {
    Stretch<F> upper, lower;
};
template <Form F>
__device__ __forceinline__ StretchPair<F> load_pair(const Reader &r, unsigned octets, unsigned from) {
    StretchPair<F> pair = {};
    if (from < r.columns) {
        pair.upper = load_stretch<F>(r.p, r.upper, octets, from, r.t);
        pair.lower = load_stretch<F>(r.p, r.lower, octets, from, r.t);
    }
    return pair;
}

template <Form F, int TILES>
__device__ __forceinline__ void add_stretch(float (&sums)[TILES][4], const Reader &r, unsigned from,
                                            const Stretch<F> &upper, const Stretch<F> &lower) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        unsigned k = from + 32 * u;
        if (k >= r.columns) break; // all lanes of the warp alike
        Octet of_upper = octet_of<F>(upper, u), of_lower = octet_of<F>(lower, u);
        unsigned a[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i / 2][i % 2 * 2] = signed_pair<F>(of_upper, i);
            a[i / 2][i % 2 * 2 + 1] = signed_pair<F>(of_lower, i);
        }
        Worth worth_upper = worth<F>(r.p, (r.upper * r.columns + k) / 32);
        Worth worth_lower = worth<F>(r.p, (r.lower * r.columns + k) / 32);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            unsigned row = tile * 8 + r.group;
            uint4 x = make_uint4(0, 0, 0, 0);
            const bf16 *from = r.x + size_t(row) * r.columns + k + 8 * r.t;
            if (row < r.batch) x = __ldg(reinterpret_cast<const uint4 *>(from));
            add_group<F>(sums[tile], a, x, worth_upper, worth_lower, r.t);
        }
    }
}

template <Form F, int TILES>
__device__ __forceinline__ void gemv_quantized(const Part &part, unsigned columns, const bf16 *x,
                                               unsigned batch, void *out, unsigned out_stride,
                                               unsigned out_is_f32) {
    Reader r;
    r.p = planes<F>(part.weight, part.rows, columns);
    r.group = lane_index() / 4, r.t = lane_index() % 4;
    // Rows behind the last one are read as the last one; what comes of them is not written.
    r.upper = min(part.first + r.group, part.rows - 1);
    r.lower = min(part.first + r.group + 8, part.rows - 1);
    r.columns = columns, r.batch = batch, r.x = x;
    unsigned octets = columns / 8;
    float sums[TILES][4] = {};
    // Stretches that are on their way while one is multiplied.
    constexpr int AHEAD = TILES == 1 ? 2 : 1;
    constexpr unsigned STEP = WARPS * STRETCH;
    unsigned from = warp_index() * STRETCH;
    StretchPair<F> held[AHEAD + 1];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) held[i] = load_pair<F>(r, octets, from + i * STEP);
#pragma unroll 1
    for (; from < columns; from += STEP) {
        held[AHEAD] = load_pair<F>(r, octets, from + AHEAD * STEP);
        add_stretch<F, TILES>(sums, r, from, held[0].upper, held[0].lower);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) held[i] = held[i + 1];
    }
    write_sums<bf16, TILES>(sums, part, batch, out, out_stride, out_is_f32);
}

#define GEMV_QUANTIZED(name, form, tiles)                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                     \
        name(PARTS_TAKEN, unsigned columns, const void *x, unsigned batch, void *out, unsigned out_stride,   \
             unsigned out_is_f32) {                                                                          \
        Part part = part_of_block(PARTS_GIVEN);                                                              \
        gemv_quantized<Form::form, tiles>(part, columns, static_cast<const bf16 *>(x), batch, out,           \
                                          out_stride, out_is_f32);                                           \
    }

GEMV_QUANTIZED(gemv_q4_0_8, q4_0, 1)
GEMV_QUANTIZED(gemv_q4_0_16, q4_0, 2)
GEMV_QUANTIZED(gemv_q4_0_32, q4_0, 4)
GEMV_QUANTIZED(gemv_q4_1_8, q4_1, 1)
GEMV_QUANTIZED(gemv_q4_1_16, q4_1, 2)
GEMV_QUANTIZED(gemv_q4_1_32, q4_1, 4)
GEMV_QUANTIZED(gemv_q5_0_8, q5_0, 1)
GEMV_QUANTIZED(gemv_q5_0_16, q5_0, 2)
GEMV_QUANTIZED(gemv_q5_0_32, q5_0, 4)
GEMV_QUANTIZED(gemv_q5_1_8, q5_1, 1)
GEMV_QUANTIZED(gemv_q5_1_16, q5_1, 2)
GEMV_QUANTIZED(gemv_q5_1_32, q5_1, 4)
GEMV_QUANTIZED(gemv_q8_0_8, q8_0, 1)
GEMV_QUANTIZED(gemv_q8_0_16, q8_0, 2)
GEMV_QUANTIZED(gemv_q8_0_32, q8_0, 4)
GEMV_QUANTIZED(gemv_q4_k_8, q4_k, 1)
GEMV_QUANTIZED(gemv_q4_k_16, q4_k, 2)
GEMV_QUANTIZED(gemv_q4_k_32, q4_k, 4)
GEMV_QUANTIZED(gemv_q5_k_8, q5_k, 1)
GEMV_QUANTIZED(gemv_q5_k_16, q5_k, 2)
GEMV_QUANTIZED(gemv_q5_k_32, q5_k, 4)
GEMV_QUANTIZED(gemv_q6_k_8, q6_k, 1)
GEMV_QUANTIZED(gemv_q6_k_16, q6_k, 2)
GEMV_QUANTIZED(gemv_q6_k_32, q6_k, 4)

ON_CPU_KERNEL(gemv_q4_0_8);
ON_CPU_KERNEL(gemv_q4_0_16);
ON_CPU_KERNEL(gemv_q4_0_32);
ON_CPU_KERNEL(gemv_q4_1_8);
ON_CPU_KERNEL(gemv_q4_1_16);
ON_CPU_KERNEL(gemv_q4_1_32);
ON_CPU_KERNEL(gemv_q5_0_8);
ON_CPU_KERNEL(gemv_q5_0_16);
ON_CPU_KERNEL(gemv_q5_0_32);
ON_CPU_KERNEL(gemv_q5_1_8);
ON_CPU_KERNEL(gemv_q5_1_16);
ON_CPU_KERNEL(gemv_q5_1_32);
ON_CPU_KERNEL(gemv_q8_0_8);
ON_CPU_KERNEL(gemv_q8_0_16);
ON_CPU_KERNEL(gemv_q8_0_32);
ON_CPU_KERNEL(gemv_q4_k_8);
ON_CPU_KERNEL(gemv_q4_k_16);
ON_CPU_KERNEL(gemv_q4_k_32);
ON_CPU_KERNEL(gemv_q5_k_8);
ON_CPU_KERNEL(gemv_q5_k_16);
ON_CPU_KERNEL(gemv_q5_k_32);
ON_CPU_KERNEL(gemv_q6_k_8);
ON_CPU_KERNEL(gemv_q6_k_16);
ON_CPU_KERNEL(gemv_q6_k_32);
