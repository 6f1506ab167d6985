// CUDA C++ as far as our kernels use it, for a plain C++ compiler.
//
// `common.cuh` includes this file instead of NVIDIA's headers when ON_CPU is defined, so that an unchanged `.cu`
// file becomes an ordinary shared library. What a word of the language *does* is in `execute.hpp`: this file only
// gives the words: qualifiers, vector types, 16-bit floats, atomics, and the maths functions.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>

#include "execute.hpp"
#include "numbers.hpp"

// ---- Qualifiers -----------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// A block stays on one thread of the operating system. `execute.cpp` poisons the library's whole thread-local
// segment before each block, so nothing but shared memory may be thread-local in a library of kernels.
#define __shared__ static thread_local

#define threadIdx (on_cpu::lane->thread)
#define blockIdx (on_cpu::lane->block->index)
#define blockDim (on_cpu::lane->block->threads)
#define gridDim (on_cpu::lane->block->grid)
constexpr int warpSize = 32;

// ---- Vector types ---------------------------------------------------------------------------------------------

#define ON_CPU_VECTOR(type, name)                                                                                  \
    struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                                       \
    struct name##3 { type x, y, z; };                                                                              \
    struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; };                    \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                               \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                                    \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
ON_CPU_VECTOR(signed char, char)
ON_CPU_VECTOR(unsigned char, uchar)
ON_CPU_VECTOR(short, short)
ON_CPU_VECTOR(unsigned short, ushort)
ON_CPU_VECTOR(int, int)
ON_CPU_VECTOR(unsigned, uint)
ON_CPU_VECTOR(float, float)
#undef ON_CPU_VECTOR
struct alignas(16) longlong2 { long long x, y; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
using dim3 = on_cpu::Dim3;

// ---- Bits -----------------------------------------------------------------------------------------------------

inline int __float_as_int(float x) { return on_cpu::bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return on_cpu::bits_as<unsigned>(x); }
inline float __int_as_float(int x) { return on_cpu::bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return on_cpu::bits_as<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1u) << (31 - bit);
    return reversed;
}
// prmt: each nibble of the selector names one of the eight bytes of (high, low).
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
    unsigned out = 0;
    for (int at = 0; at < 4; ++at) {
        unsigned choice = selector >> (4 * at);
        unsigned byte = static_cast<unsigned>(bytes >> (8 * (choice & 7))) & 0xFF;
        if (choice & 8) byte = byte & 0x80 ? 0xFF : 0;
        out |= byte << (8 * at);
    }
    return out;
}
// A dot product of four signed bytes, added to c.
inline int __dp4a(int a, int b, int c) {
    for (int at = 0; at < 32; at += 8) c += static_cast<int8_t>(a >> at) * static_cast<int8_t>(b >> at);
    return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int at = 0; at < 32; at += 8) c += (a >> at & 0xFF) * (b >> at & 0xFF);
    return c;
}

// ---- 16-bit floats, rounded to the nearest, ties to even ------------------------------------------------------

struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };
struct alignas(4) __half2 { __half x, y; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };

inline float __bfloat162float(__nv_bfloat16 x) { return on_cpu::bf16_to_float(x.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {on_cpu::float_to_bf16(x)}; }
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline float __half2float(__half x) { return on_cpu::half_to_float(x.bits); }
inline __half __float2half_rn(float x) { return {on_cpu::float_to_half(x)}; }
inline __half __float2half(float x) { return __float2half_rn(x); }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short x) { return {x}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return {x}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {__bfloat162float(x.x), __bfloat162float(x.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }

// ---- Maths ----------------------------------------------------------------------------------------------------

using std::isfinite;
using std::isinf;
using std::isnan;
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
// Never contracted into a fused multiply-add, as on the device.
inline float __fmul_rn(float x, float y) { volatile float product = x * y; return product; }
inline float __fadd_rn(float x, float y) { volatile float sum = x + y; return sum; }
inline float __fsub_rn(float x, float y) { volatile float difference = x - y; return difference; }
inline float __saturatef(float x) { return x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x; }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline int __mulhi(int x, int y) { return static_cast<int>(static_cast<int64_t>(x) * y >> 32); }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(static_cast<uint64_t>(x) * y >> 32); }
#define ON_CPU_MIN_MAX(type)                                                                                       \
    inline type min(type x, type y) { return y < x ? y : x; }                                                      \
    inline type max(type x, type y) { return x < y ? y : x; }
ON_CPU_MIN_MAX(int)
ON_CPU_MIN_MAX(unsigned)
ON_CPU_MIN_MAX(long)
ON_CPU_MIN_MAX(unsigned long)
ON_CPU_MIN_MAX(long long)
ON_CPU_MIN_MAX(unsigned long long)
#undef ON_CPU_MIN_MAX
inline float min(float x, float y) { return fminf(x, y); }
inline float max(float x, float y) { return fmaxf(x, y); }
template <typename T> inline T __ldg(const T *from) { return *from; }
template <typename T> inline T __ldcs(const T *from) { return *from; }
template <typename T> inline T __ldcg(const T *from) { return *from; }
template <typename T> inline void __stcs(T *to, T value) { *to = value; }

// ---- Barriers and what lanes of a warp tell each other --------------------------------------------------------
// The line of the call travels along, so that a report can say where a lane waits.

#define ON_CPU_HERE on_cpu::Place here = {__builtin_FILE(), __builtin_LINE()}
inline void __syncthreads(ON_CPU_HERE) { on_cpu::sync_block(0, here); }
inline int __syncthreads_count(int predicate, ON_CPU_HERE) { return on_cpu::sync_block(predicate != 0, here); }
inline int __syncthreads_or(int predicate, ON_CPU_HERE) { return on_cpu::sync_block(predicate != 0, here) != 0; }
inline int __syncthreads_and(int predicate, ON_CPU_HERE) { return on_cpu::sync_block(predicate == 0, here) == 0; }
inline void __syncwarp(unsigned mask = 0xFFFFFFFF, ON_CPU_HERE) {
    on_cpu::Meeting meeting(mask, nullptr, 0, nullptr, here);
}
inline unsigned __activemask() { return on_cpu::active_mask(); }
inline unsigned __ballot_sync(unsigned mask, int predicate, ON_CPU_HERE) {
    unsigned bit = predicate != 0, bits = 0;
    on_cpu::Meeting meeting(mask, &bit, sizeof bit, nullptr, here);
    for (unsigned other = 0; other < 32; ++other)
        if (mask >> other & 1) bits |= *meeting.said<unsigned>(other) << other;
    return bits;
}
inline int __any_sync(unsigned mask, int predicate, ON_CPU_HERE) { return __ballot_sync(mask, predicate, here) != 0; }
inline int __all_sync(unsigned mask, int predicate, ON_CPU_HERE) { return __ballot_sync(mask, predicate, here) == mask; }

// Reading a lane that is not in the mask gives garbage on a device: here it is reported.
template <typename T> inline T on_cpu_shuffle(unsigned mask, T value, unsigned from, on_cpu::Place here) {
    static_assert(sizeof(T) <= on_cpu::SAID_BYTES, "too large a value for a shuffle");
    on_cpu::Meeting meeting(mask, &value, sizeof value, nullptr, here);
    if (!(mask >> from & 1)) on_cpu::fail_lane("a shuffle reads a lane that is not in its mask", here);
    return *meeting.said<T>(from);
}
template <typename T> inline T __shfl_sync(unsigned mask, T value, int from, int width = 32, ON_CPU_HERE) {
    unsigned self = on_cpu::lane->in_warp, first = self & ~static_cast<unsigned>(width - 1);
    return on_cpu_shuffle(mask, value, first + (static_cast<unsigned>(from) & static_cast<unsigned>(width - 1)), here);
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, ON_CPU_HERE) {
    unsigned self = on_cpu::lane->in_warp, from = self ^ static_cast<unsigned>(flip);
    bool inside = from < (self & ~static_cast<unsigned>(width - 1)) + static_cast<unsigned>(width);
    return on_cpu_shuffle(mask, value, inside ? from : self, here);
}
template <typename T> inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, ON_CPU_HERE) {
    unsigned self = on_cpu::lane->in_warp, end = (self & ~static_cast<unsigned>(width - 1)) + static_cast<unsigned>(width);
    return on_cpu_shuffle(mask, value, self + by < end ? self + by : self, here);
}
template <typename T> inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, ON_CPU_HERE) {
    unsigned self = on_cpu::lane->in_warp, first = self & ~static_cast<unsigned>(width - 1);
    return on_cpu_shuffle(mask, value, self >= first + by ? self - by : self, here);
}

// ---- Atomics: blocks run on several threads, so these are real ones -------------------------------------------

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// Replaces *at by change(*at), and returns what was there.
template <typename T, typename Change> inline T on_cpu_atomic(T *at, Change change) {
    T seen;
    __atomic_load(at, &seen, __ATOMIC_RELAXED);
    for (;;) {
        T wanted = change(seen);
        if (__atomic_compare_exchange(at, &seen, &wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) return seen;
    }
}
template <typename T> inline T atomicAdd(T *at, T by) { return on_cpu_atomic(at, [=](T x) { return x + by; }); }
template <typename T> inline T atomicSub(T *at, T by) { return on_cpu_atomic(at, [=](T x) { return x - by; }); }
template <typename T> inline T atomicMax(T *at, T by) { return on_cpu_atomic(at, [=](T x) { return x < by ? by : x; }); }
template <typename T> inline T atomicMin(T *at, T by) { return on_cpu_atomic(at, [=](T x) { return by < x ? by : x; }); }
template <typename T> inline T atomicAnd(T *at, T by) { return on_cpu_atomic(at, [=](T x) { return x & by; }); }
template <typename T> inline T atomicOr(T *at, T by) { return on_cpu_atomic(at, [=](T x) { return x | by; }); }
template <typename T> inline T atomicXor(T *at, T by) { return on_cpu_atomic(at, [=](T x) { return x ^ by; }); }
template <typename T> inline T atomicExch(T *at, T by) { return on_cpu_atomic(at, [=](T) { return by; }); }
template <typename T> inline T atomicCAS(T *at, T from, T to) {
    return on_cpu_atomic(at, [=](T x) { return x == from ? to : x; });
}
inline unsigned atomicInc(unsigned *at, unsigned limit) {
    return on_cpu_atomic(at, [=](unsigned x) { return x >= limit ? 0u : x + 1; });
}
inline unsigned atomicDec(unsigned *at, unsigned limit) {
    return on_cpu_atomic(at, [=](unsigned x) { return x == 0 || x > limit ? limit : x - 1; });
}
// Literals such as atomicAdd(&count, 1) for an unsigned count.
inline unsigned atomicAdd(unsigned *at, int by) { return atomicAdd(at, static_cast<unsigned>(by)); }
inline unsigned atomicMax(unsigned *at, int by) { return atomicMax(at, static_cast<unsigned>(by)); }
inline unsigned atomicExch(unsigned *at, int by) { return atomicExch(at, static_cast<unsigned>(by)); }
template <typename T> inline T atomicAdd_system(T *at, T by) { return atomicAdd(at, by); }
template <typename T> inline T atomicExch_system(T *at, T by) { return atomicExch(at, by); }

// ---- Time -----------------------------------------------------------------------------------------------------

inline long long on_cpu_now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}
inline long long clock64() { return on_cpu_now_ns(); }
inline void __nanosleep(unsigned ns) { on_cpu::sleep(ns); }
inline void __trap() { on_cpu::fail_lane("the kernel called __trap", {"", 0}); }
