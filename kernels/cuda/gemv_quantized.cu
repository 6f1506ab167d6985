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
// for two weights.
//
// Instructions, not bytes, are what a multiprocessor of an H100 runs short of here: a stretch of 16 rows of
// Q4_K is 1152 bytes, which memory brings in 80 clocks, and in them 320 instructions are issued. So scales
// are read once a stretch, up to 16 bytes a row, beside the codes; their bytes become numbers by their bits
// too; places are counted in 32 bits; and a row's rest that is no whole stretch is left to a loop of its own.
// A lane takes 16 bytes of codes of two rows at a time, of a stretch to multiply and one or two that are on
// their way.

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

// (word & mask) | bits in one instruction: written out, the compiler takes two.
__device__ __forceinline__ unsigned and_or(unsigned word, unsigned mask, unsigned bits) {
#ifdef ON_CPU
    return (word & mask) | bits;
#else
    unsigned both;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(both) : "r"(word), "r"(mask), "r"(bits));
    return both;
#endif
}

// Codes 2 * pair and 2 * pair + 1 of an octet as two bf16, above 128.
template <Form F> __device__ __forceinline__ unsigned pair_above_128(const Octet &octet, int pair) {
    constexpr unsigned ONE_EACH = 0x00010001, BASE = 0x43004300;
    unsigned codes = and_or(octet.codes.x >> (4 * pair), 15 * ONE_EACH, BASE);
    if (Of<F>::HIGH_BITS == 1) {
        unsigned spread = octet.high | octet.high << 12;
        codes = and_or(pair == 0 ? spread << 4 : spread << 4 >> pair, 16 * ONE_EACH, codes);
    }
    if (Of<F>::HIGH_BITS == 2) {
        unsigned spread = octet.high << 4 | octet.high << 12;
        codes = and_or(spread >> (2 * pair), 48 * ONE_EACH, codes);
    }
    return codes;
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
        return subtract_pairs(pair_above_128<F>(octet, pair), BIAS);
    }
}

// What a lane needs of a stretch of one row: four octets, one of each group, and the groups' scales as they
// are stored.
template <Form F> struct Stretch {
    uint4 codes[Of<F>::CODE_BYTES / 4];
    unsigned high[2];
    uint4 scales;
    unsigned super;
};

// Scales of groups `group` .. `group + 3` of all rows. Only where rows are whole stretches are they aligned.
template <Form F>
__device__ __forceinline__ void load_scales(Stretch<F> &s, const Planes &p, unsigned group, bool aligned) {
    s.super = 0;
    s.scales = make_uint4(0, 0, 0, 0);
    if constexpr (Of<F>::SUPER && Of<F>::MINIMUM) {
        s.scales = __ldg(reinterpret_cast<const uint4 *>(p.scales) + group / 8);
    } else if constexpr (Of<F>::SUPER) {
        uint2 eight = __ldg(reinterpret_cast<const uint2 *>(p.scales) + group / 4);
        s.scales.x = eight.x, s.scales.y = eight.y;
        s.super = __ldg(reinterpret_cast<const unsigned short *>(p.super) + group / 8);
    } else if constexpr (Of<F>::MINIMUM) {
        const unsigned *from = reinterpret_cast<const unsigned *>(p.scales) + group;
        if (aligned) {
            s.scales = __ldg(reinterpret_cast<const uint4 *>(from));
        } else {
            s.scales = make_uint4(__ldg(from), __ldg(from + 1), __ldg(from + 2), __ldg(from + 3));
        }
    } else {
        const unsigned short *from = reinterpret_cast<const unsigned short *>(p.scales) + group;
        if (aligned) {
            uint2 four = __ldg(reinterpret_cast<const uint2 *>(from));
            s.scales.x = four.x, s.scales.y = four.y;
        } else {
            s.scales.x = __ldg(from) | __ldg(from + 1) << 16;
            s.scales.y = __ldg(from + 2) | __ldg(from + 3) << 16;
        }
    }
}

// Byte `at` of `bytes` as 2^23 + byte: a float whose unit is 1.
__device__ __forceinline__ float above_2_23(unsigned bytes, int at) {
    return __uint_as_float(__byte_perm(bytes, 0x4B000000, 0x7440 | at));
}

// base * byte: one multiply-add, and exact, as the product of 11 bits and 8 is.
__device__ __forceinline__ float times_byte(float base, unsigned bytes, int at) {
    return fmaf(base, above_2_23(bytes, at), base * -8388608.0f);
}

// Scales and minima of blocks of 256 are taken apart once a stretch: into the scale's and the minimum's unit,
// and four bytes of each. `second`: the stretch is a block's second half.
template <Form F> __device__ __forceinline__ void take_apart(Stretch<F> &s, bool second) {
    if constexpr (Of<F>::SUPER && Of<F>::MINIMUM) {
        // The first four are six bits of a byte each. Of the last four the upper two bits lie above those,
        // and the lower four in the last word.
        unsigned scales = s.scales.y & 0x3F3F3F3F, minima = s.scales.z & 0x3F3F3F3F;
        unsigned last_scales = (s.scales.w & 0x0F0F0F0F) | (s.scales.y >> 2 & 0x30303030);
        unsigned last_minima = (s.scales.w >> 4 & 0x0F0F0F0F) | (s.scales.z >> 2 & 0x30303030);
        float unit = half_bits(s.scales.x), minimum = -half_bits(s.scales.x >> 16);
        s.scales = make_uint4(__float_as_uint(unit), __float_as_uint(minimum), second ? last_scales : scales,
                              second ? last_minima : minima);
    } else if constexpr (Of<F>::SUPER) {
        s.super = __float_as_uint(half_bits(s.super));
        s.scales.x ^= 0x80808080, s.scales.y ^= 0x80808080; // 128 + scale
    }
}

// What group u of a stretch is worth.
template <Form F> __device__ __forceinline__ Worth worth_of(const Stretch<F> &s, int u) {
    Worth w;
    w.minimum = 0.0f;
    if constexpr (Of<F>::SUPER && Of<F>::MINIMUM) {
        w.scale[0] = w.scale[1] = times_byte(__uint_as_float(s.scales.x), s.scales.z, u);
        w.minimum = times_byte(__uint_as_float(s.scales.y), s.scales.w, u);
    } else if constexpr (Of<F>::SUPER) {
        unsigned bytes = u < 2 ? s.scales.x : s.scales.y;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            w.scale[half] = __uint_as_float(s.super) * (above_2_23(bytes, 2 * (u % 2) + half) - 8388736.0f);
    } else if constexpr (Of<F>::MINIMUM) {
        unsigned both = u == 0 ? s.scales.x : u == 1 ? s.scales.y : u == 2 ? s.scales.z : s.scales.w;
        w.scale[0] = w.scale[1] = half_bits(both);
        w.minimum = half_bits(both >> 16);
    } else {
        w.scale[0] = w.scale[1] = half_bits((u < 2 ? s.scales.x : s.scales.y) >> (16 * (u % 2)));
    }
    return w;
}

// What a warp reads, and which of it is this lane's.
struct Reader {
    Planes p;
    unsigned groups[2]; // the first one of its two rows of W
    unsigned columns, batch;
    const bf16 *x;
    unsigned x_at; // of the lane's eight elements of its row of the first tile
    int group, t;
};

// The whole stretch that begins with group `group` of all rows.
template <Form F> __device__ __forceinline__ Stretch<F> load_stretch(const Reader &r, unsigned group) {
    Stretch<F> s;
    unsigned place = 4 * (group + r.t);
#pragma unroll
    for (int i = 0; i < Of<F>::CODE_BYTES / 4; ++i)
        s.codes[i] = load_once(r.p.codes + size_t(place) * Of<F>::CODE_BYTES + 16 * i);
    s.high[0] = s.high[1] = 0;
    if (Of<F>::HIGH_BITS == 1) s.high[0] = __ldg(reinterpret_cast<const unsigned *>(r.p.high + place));
    if (Of<F>::HIGH_BITS == 2) {
        uint2 high = __ldg(reinterpret_cast<const uint2 *>(r.p.high + 2 * size_t(place)));
        s.high[0] = high.x, s.high[1] = high.y;
    }
    load_scales<F>(s, r.p, group, r.columns % STRETCH == 0);
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

// a[0] first + a[1] second.
__device__ __forceinline__ void product(float (&sums)[4], const unsigned (&a)[2][4],
                                        const unsigned (&first)[2], const unsigned (&second)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
    mma_16x8x16<bf16>(sums, a[0], first);
    mma_16x8x16<bf16>(sums, a[1], second);
}

// Adds to `sums` what one group of 32 elements contributes. a[0] and a[1] are the codes of the group as the
// tensor cores take them, x the lane's eight elements of x.
template <Form F>
__device__ __forceinline__ void add_group(float (&sums)[4], const unsigned (&a)[2][4], const uint4 &x,
                                          const Worth (&worth)[2], int t) {
    constexpr int HALVES = Of<F>::HALVES ? 2 : 1;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        bool take = HALVES == 1 || t / 2 == half;
        unsigned first[2] = {take ? x.x : 0, take ? x.y : 0}, second[2] = {take ? x.z : 0, take ? x.w : 0};
        float s[4];
        product(s, a, first, second);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = fmaf(worth[i / 2].scale[half], s[i], sums[i]);
    }
    if (Of<F>::MINIMUM) {
        unsigned ones[2][4] = {{ONES, ONES, ONES, ONES}, {ONES, ONES, ONES, ONES}};
        unsigned first[2] = {x.x, x.y}, second[2] = {x.z, x.w};
        float t_sums[4];
        product(t_sums, ones, first, second);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = fmaf(worth[i / 2].minimum, t_sums[i], sums[i]);
    }
}

// One group for all rows of x: the octets of the lane's two rows of W, and the group's first element.
template <Form F, int TILES>
__device__ __forceinline__ void add_octets(float (&sums)[TILES][4], const Reader &r, unsigned k,
                                           const Octet &upper, const Octet &lower, const Worth (&worth)[2]) {
    uint4 x[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        x[tile] = make_uint4(0, 0, 0, 0);
        if (tile * 8 + r.group < int(r.batch))
            x[tile] = *reinterpret_cast<const uint4 *>(r.x + (r.x_at + tile * 8 * r.columns + k));
    }
    unsigned a[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        a[i / 2][i % 2 * 2] = signed_pair<F>(upper, i);
        a[i / 2][i % 2 * 2 + 1] = signed_pair<F>(lower, i);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        if (tile > 0 && tile * 8 >= int(r.batch)) break; // all lanes alike
        add_group<F>(sums[tile], a, x[tile], worth, r.t);
    }
}

// What is left of rows that are not whole stretches, group by group: for the warp whose turn it is.
template <Form F, int TILES>
__device__ __forceinline__ void add_rest(float (&sums)[TILES][4], const Reader &r, unsigned from) {
#pragma unroll 1
    for (unsigned k = from; k < r.columns; k += 32) {
        Octet octets[2];
        Worth worths[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unsigned group = r.groups[i] + k / 32;
            octets[i] = load_octet<F>(r.p, 4 * size_t(group) + r.t);
            worths[i] = worth<F>(r.p, group);
        }
        add_octets<F, TILES>(sums, r, k, octets[0], octets[1], worths);
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
#pragma unroll
    for (int i = 0; i < 2; ++i)
        r.groups[i] = min(part.first + r.group + 8 * i, part.rows - 1) * (columns / 32);
    r.columns = columns, r.batch = batch, r.x = x, r.x_at = r.group * columns + 8 * r.t;
    float sums[1][TILES][4] = {};
    // Stretches that are on their way while one is multiplied.
    constexpr int AHEAD = TILES == 1 ? 2 : 1;
    constexpr unsigned STEP = WARPS * STRETCH;
    unsigned from = warp_index() * STRETCH, whole = columns / STRETCH * STRETCH;
    bool second = warp_index() % 2 == 1; // a turn is four blocks of 256
    Stretch<F> held[AHEAD + 1][2];
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (from + ahead * STEP < whole)
                held[ahead][i] = load_stretch<F>(r, r.groups[i] + (from + ahead * STEP) / 32);
    await_front();
#pragma unroll 1
    for (; from < whole; from += STEP) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (from + AHEAD * STEP < whole)
                held[AHEAD][i] = load_stretch<F>(r, r.groups[i] + (from + AHEAD * STEP) / 32);
#pragma unroll
        for (int i = 0; i < 2; ++i) take_apart(held[0][i], second);
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            Worth worths[2] = {worth_of<F>(held[0][0], u), worth_of<F>(held[0][1], u)};
            add_octets<F, TILES>(sums[0], r, from + 32 * u, octet_of<F>(held[0][0], u),
                                 octet_of<F>(held[0][1], u), worths);
        }
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ++ahead)
#pragma unroll
            for (int i = 0; i < 2; ++i) held[ahead][i] = held[ahead + 1][i];
    }
    if constexpr (!Of<F>::SUPER) {
        if (from == whole) add_rest<F, TILES>(sums[0], r, whole);
    }
    write_sums<bf16>(sums, part, batch, out, out_stride, out_is_f32);
}

#define GEMV_QUANTIZED(name, form, tiles)                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                     \
        name(PARTS_TAKEN, unsigned columns, const void *x, unsigned batch, void *out, unsigned out_stride,   \
             unsigned out_is_f32) {                                                                          \
        Part part = part_of_block<BAND>(PARTS_GIVEN);                                                        \
        gemv_quantized<Form::form, tiles>(part, columns, static_cast<const bf16 *>(x), batch, out,           \
                                          out_stride, out_is_f32);                                           \
    }

GEMV_QUANTIZED(gemv_q4_0_8, q4_0, 1)
GEMV_QUANTIZED(gemv_q4_0_32, q4_0, 4)
GEMV_QUANTIZED(gemv_q4_1_8, q4_1, 1)
GEMV_QUANTIZED(gemv_q4_1_32, q4_1, 4)
GEMV_QUANTIZED(gemv_q5_0_8, q5_0, 1)
GEMV_QUANTIZED(gemv_q5_0_32, q5_0, 4)
GEMV_QUANTIZED(gemv_q5_1_8, q5_1, 1)
GEMV_QUANTIZED(gemv_q5_1_32, q5_1, 4)
GEMV_QUANTIZED(gemv_q8_0_8, q8_0, 1)
GEMV_QUANTIZED(gemv_q8_0_32, q8_0, 4)
GEMV_QUANTIZED(gemv_q4_k_8, q4_k, 1)
GEMV_QUANTIZED(gemv_q4_k_32, q4_k, 4)
GEMV_QUANTIZED(gemv_q5_k_8, q5_k, 1)
GEMV_QUANTIZED(gemv_q5_k_32, q5_k, 4)
GEMV_QUANTIZED(gemv_q6_k_8, q6_k, 1)
GEMV_QUANTIZED(gemv_q6_k_32, q6_k, 4)

ON_CPU_KERNEL(gemv_q4_0_8);
ON_CPU_KERNEL(gemv_q4_0_32);
ON_CPU_KERNEL(gemv_q4_1_8);
ON_CPU_KERNEL(gemv_q4_1_32);
ON_CPU_KERNEL(gemv_q5_0_8);
ON_CPU_KERNEL(gemv_q5_0_32);
ON_CPU_KERNEL(gemv_q5_1_8);
ON_CPU_KERNEL(gemv_q5_1_32);
ON_CPU_KERNEL(gemv_q8_0_8);
ON_CPU_KERNEL(gemv_q8_0_32);
ON_CPU_KERNEL(gemv_q4_k_8);
ON_CPU_KERNEL(gemv_q4_k_32);
ON_CPU_KERNEL(gemv_q5_k_8);
ON_CPU_KERNEL(gemv_q5_k_32);
ON_CPU_KERNEL(gemv_q6_k_8);
ON_CPU_KERNEL(gemv_q6_k_32);
