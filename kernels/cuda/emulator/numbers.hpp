// 16-bit floats on a plain CPU, rounded to the nearest, ties to even; every NaN becomes the canonical one.
#pragma once

#include <cstdint>
#include <cstring>
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace on_cpu {

template <typename To, typename From> inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits can only be read as a type of the same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float bf16_to_float(uint16_t bits) { return bits_as<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bf16(float x) {
    uint32_t bits = bits_as<uint32_t>(x);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

#ifdef __F16C__
inline float half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t float_to_half(float x) {
    return x == x ? static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)) : 0x7FFF;
}
#else
inline float half_to_float(uint16_t bits) {
    uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    uint32_t exponent = bits >> 10 & 0x1F, fraction = bits & 0x3FF;
    if (exponent == 31) return bits_as<float>(sign | 0x7F800000 | fraction << 13);
    if (exponent != 0) return bits_as<float>(sign | (exponent + 112) << 23 | fraction << 13);
    float tiny = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -tiny : tiny;
}
inline uint16_t float_to_half(float x) {
    uint32_t bits = bits_as<uint32_t>(x), sign = bits >> 16 & 0x8000;
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return 0x7FFF;
    if (bits >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);
    if (bits < 0x38800000) { // subnormal: the unit in the last place is 2^-24, that of a float near 0.5
        float shifted = bits_as<float>(bits) + 0.5f;
        return static_cast<uint16_t>(sign | (bits_as<uint32_t>(shifted) - 0x3F000000));
    }
    return static_cast<uint16_t>(sign | ((bits - 0x38000000 + 0xFFF + (bits >> 13 & 1)) >> 13));
}
#endif

} // namespace on_cpu
