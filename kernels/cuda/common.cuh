// What the kernels share: number kinds, wide loads, reductions, tensor-core products, asynchronous copies, and words
// that the device and the host both write.
//
// Two compilers read this. nvcc makes PTX of it (`scripts/cuda-compile`). With -DON_CPU any C++17 compiler makes
// ordinary code of it, that runs the same kernels on the CPU to test them (`scripts/cuda-on-cpu`); where PTX is
// written by hand below, the other branch does what the PTX manual says, lane by lane.
//
// Conventions of all kernels
//   - `extern "C" __global__`, names unique across files, arguments plain scalars and pointers.
//   - One for each number kind: a template, and wrappers named `op_f32`, `op_f16`, `op_bf16`.
//   - Matrices are row-major. Sums are f32, whatever is stored.
//   - Every kernel is announced at the end of its file: `ON_CPU_KERNEL(op_f32);` (nothing, for nvcc).
#pragma once

#include <cstdint>

#ifdef ON_CPU
#include "emulator/language.hpp"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define ON_CPU_KERNEL(kernel) static_assert(true, "")
#endif

#define LANES 32
#define FULL_WARP 0xFFFFFFFFu

// ---- Number kinds -------------------------------------------------------------------------------------------------

using f16 = __half;
using bf16 = __nv_bfloat16;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }

// Rounds to the nearest, ties to even.
template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }

// Two neighbours in one register, the first in the low half: what the tensor cores read. One instruction.
template <typename T> __device__ __forceinline__ unsigned pack_pair(float low, float high);
#ifdef ON_CPU
template <> inline unsigned pack_pair<f16>(float low, float high) {
    return __half_as_ushort(__float2half_rn(low)) | unsigned(__half_as_ushort(__float2half_rn(high))) << 16;
}
template <> inline unsigned pack_pair<bf16>(float low, float high) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(low)) |
           unsigned(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}
#else
template <> __device__ __forceinline__ unsigned pack_pair<f16>(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
template <> __device__ __forceinline__ unsigned pack_pair<bf16>(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

// ---- 16 bytes at a time -------------------------------------------------------------------------------------------

// As many values as one wide load moves: 4 of f32, 8 of a 16-bit kind, 16 bytes.
template <typename T> struct __align__(16) Pack {
    static constexpr int COUNT = 16 / sizeof(T);
    T at[COUNT];
};

// `from` and `to` must be 16-byte aligned; the stand-in faults where a device would.
template <typename T> __device__ __forceinline__ Pack<T> load_pack(const T *from) {
    Pack<T> pack;
    *reinterpret_cast<uint4 *>(&pack) = *reinterpret_cast<const uint4 *>(from);
    return pack;
}
template <typename T> __device__ __forceinline__ void store_pack(T *to, const Pack<T> &pack) {
    *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(&pack);
}

// ---- Shared memory of a size known at launch ----------------------------------------------------------------------

#ifdef ON_CPU
#define DYNAMIC_SHARED(type, name) type *const name = reinterpret_cast<type *>(on_cpu::lane->block->dynamic_shared)
#else
extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
#define DYNAMIC_SHARED(type, name) type *const name = reinterpret_cast<type *>(dynamic_shared_bytes)
#endif

// ---- Sums and maxima ----------------------------------------------------------------------------------------------
// Every lane of the warp, and every thread of the block, must come; all get the same result, bit for bit.

__device__ __forceinline__ int lane_index() { return int(threadIdx.x % LANES); }
__device__ __forceinline__ int warp_index() { return int(threadIdx.x / LANES); }

#ifdef ON_CPU
// The same butterfly, in one meeting instead of five: that is where the time goes on a CPU.
template <typename Join> inline float warp_butterfly(float value, on_cpu::Place here) {
    on_cpu::Meeting meeting(FULL_WARP, &value, sizeof value, [](on_cpu::Said &said) {
        float now[LANES], next[LANES];
        for (int lane = 0; lane < LANES; ++lane) now[lane] = *reinterpret_cast<float *>(said.bytes[lane]);
        for (int flip = LANES / 2; flip > 0; flip /= 2) {
            for (int lane = 0; lane < LANES; ++lane) next[lane] = Join()(now[lane], now[lane ^ flip]);
            for (int lane = 0; lane < LANES; ++lane) now[lane] = next[lane];
        }
        for (int lane = 0; lane < LANES; ++lane) *reinterpret_cast<float *>(said.bytes[lane]) = now[lane];
    }, here);
    return *meeting.said<float>(on_cpu::lane->in_warp);
}
struct JoinSum { float operator()(float x, float y) const { return x + y; } };
struct JoinMax { float operator()(float x, float y) const { return fmaxf(x, y); } };
inline float warp_sum(float value, ON_CPU_HERE) { return warp_butterfly<JoinSum>(value, here); }
inline float warp_max(float value, ON_CPU_HERE) { return warp_butterfly<JoinMax>(value, here); }
#else
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int flip = LANES / 2; flip > 0; flip /= 2) value += __shfl_xor_sync(FULL_WARP, value, flip);
    return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int flip = LANES / 2; flip > 0; flip /= 2) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, flip));
    return value;
}
#endif

// For blocks of one dimension and whole warps, at most 32 of them. The first barrier lets a block call this twice
// in a row: the last readers of the former call have gone before anybody writes.
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float of_warp[LANES];
    value = warp_sum(value);
    __syncthreads();
    if (lane_index() == 0) of_warp[warp_index()] = value;
    __syncthreads();
    return warp_sum(lane_index() < int(blockDim.x / LANES) ? of_warp[lane_index()] : 0.0f);
}
__device__ __forceinline__ float block_max(float value) {
    __shared__ float of_warp[LANES];
    value = warp_max(value);
    __syncthreads();
    if (lane_index() == 0) of_warp[warp_index()] = value;
    __syncthreads();
    return warp_max(lane_index() < int(blockDim.x / LANES) ? of_warp[lane_index()] : -INFINITY);
}

// ---- Tensor cores -------------------------------------------------------------------------------------------------
// c[16x8] += a[16x16] b[16x8], by one whole warp; T is f16 or bf16, sums are f32. With group = lane / 4 and
// pair = 2 * (lane % 4), a lane holds (the lower index of two in the low half of a register)
//   a[0]: row group,     columns pair, pair + 1        b[0]: rows pair, pair + 1,         column group
//   a[1]: row group + 8, columns pair, pair + 1        b[1]: rows pair + 8, pair + 9,     column group
//   a[2]: row group,     columns pair + 8, pair + 9    c[0], c[1]: row group,     columns pair, pair + 1
//   a[3]: row group + 8, columns pair + 8, pair + 9    c[2], c[3]: row group + 8, columns pair, pair + 1
// so a is read row by row and b column by column: b's registers are pairs along the inner dimension.

#ifdef ON_CPU
template <typename T> inline float register_half(unsigned pair, int high) {
    return to_float(on_cpu::bits_as<T>(static_cast<uint16_t>(pair >> (16 * high))));
}
template <typename T> inline void multiply_tiles(on_cpu::Said &said) {
    float a[16][16], b[16][8], c[16][8] = {};
    for (int lane = 0; lane < LANES; ++lane) {
        int group = lane / 4, pair = 2 * (lane % 4);
        const unsigned *held = reinterpret_cast<const unsigned *>(said.bytes[lane]);
        for (int high = 0; high < 2; ++high) {
            for (int at = 0; at < 4; ++at)
                a[group + 8 * (at % 2)][pair + 8 * (at / 2) + high] = register_half<T>(held[at], high);
            for (int at = 0; at < 2; ++at) b[pair + 8 * at + high][group] = register_half<T>(held[4 + at], high);
        }
    }
    for (int row = 0; row < 16; ++row)
        for (int inner = 0; inner < 16; ++inner)
            for (int column = 0; column < 8; ++column) c[row][column] += a[row][inner] * b[inner][column];
    for (int lane = 0; lane < LANES; ++lane) {
        int group = lane / 4, pair = 2 * (lane % 4);
        float *out = reinterpret_cast<float *>(said.bytes[lane]);
        for (int at = 0; at < 4; ++at) out[at] = c[group + 8 * (at / 2)][pair + at % 2];
    }
}
template <typename T> inline void mma_16x8x16(float *c, const unsigned *a, const unsigned *b, ON_CPU_HERE) {
    unsigned held[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    on_cpu::Meeting meeting(FULL_WARP, held, sizeof held, multiply_tiles<T>, here);
    const float *product = meeting.said<float>(on_cpu::lane->in_warp);
    for (int at = 0; at < 4; ++at) c[at] += product[at];
}
#else
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]);
template <>
__device__ __forceinline__ void mma_16x8x16<f16>(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_16x8x16<bf16>(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// Four 8x8 matrices of 16-bit values from shared memory, as mma wants them. Lane 8 * m + r gives the address of row r
// of matrix m (16 bytes, 16-byte aligned); out[m] is then row lane / 4, columns 2 * (lane % 4) and the next, of
// matrix m. Transposed: rows 2 * (lane % 4) and the next, of column lane / 4.

#ifdef ON_CPU
template <int TRANSPOSED> inline void load_matrices(unsigned *out, const void *row, on_cpu::Place here) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) on_cpu::fail_lane("load_matrices: a row is not 16-byte aligned", here);
    on_cpu::Meeting meeting(FULL_WARP, &row, sizeof row, nullptr, here);
    unsigned self = on_cpu::lane->in_warp, group = self / 4, pair = 2 * (self % 4);
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
        auto value = [&](unsigned r, unsigned column) -> unsigned {
            return (*meeting.said<const uint16_t *>(8 * matrix + r))[column];
        };
        out[matrix] = TRANSPOSED ? value(pair, group) | value(pair + 1, group) << 16
                                 : value(group, pair) | value(group, pair + 1) << 16;
    }
    __syncwarp(FULL_WARP, here); // nobody may overwrite shared memory before all have read
}
inline void load_matrices_x4(unsigned *out, const void *row, ON_CPU_HERE) { load_matrices<0>(out, row, here); }
inline void load_matrices_x4_transposed(unsigned *out, const void *row, ON_CPU_HERE) {
    load_matrices<1>(out, row, here);
}
#else
__device__ __forceinline__ unsigned shared_address(const void *at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}
__device__ __forceinline__ void load_matrices_x4(unsigned (&out)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load_matrices_x4_transposed(unsigned (&out)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}
#endif

// ---- Copies into shared memory that run beside the arithmetic -----------------------------------------------------
// A thread copies 16 bytes (both addresses 16-byte aligned), commits what it has begun as a group, and waits until at
// most PENDING of its groups are unfinished. Other threads see the bytes after a barrier behind that wait. The
// stand-in copies only when waited for: whoever reads too early reads NaN.

#ifdef ON_CPU
inline void cp_async16(void *to, const void *from, ON_CPU_HERE) { on_cpu::copy_later(to, from, 16, here); }
inline void cp_async16_or_zero(void *to, const void *from, bool there, ON_CPU_HERE) {
    on_cpu::copy_later(to, from, there ? 16 : 0, here);
}
inline void cp_async_commit() { on_cpu::commit_copies(); }
template <int PENDING> inline void cp_async_wait() { on_cpu::wait_copies(PENDING); }
#else
__device__ __forceinline__ void cp_async16(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// Zeros, and `from` is not read, where `there` is false.
__device__ __forceinline__ void cp_async16_or_zero(void *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#endif

// ---- Beginning before what is in front has ended ------------------------------------------------------------------
// From capability 9.0 on, a kernel with `await_front` begins while the one in front of it in its stream still runs, as
// soon as all blocks of that have waited themselves (`kernels/src/cuda/launch.rs`): it is there, and has read what no
// kernel writes, when that ends.
//
// Until `await_front` returns, everything but the kernel in front has run: weights, factors and tables, which come by
// copies, may be read (where the kernel in front makes them, the launch says so: `Shape::in_order`). Afterwards that
// has run, too. So every thread comes, before it reads or writes anything else and before it leaves; coming again costs
// nothing. What kernels write is not read by __ldg: it may be moved.

#ifdef ON_CPU
inline void await_front(ON_CPU_HERE) { on_cpu::await_front(here); }
#else
__device__ __forceinline__ void await_front() {
    asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
}
#endif

// ---- Words that the host and the device both write ----------------------------------------------------------------
// A release store makes every earlier write *of this thread* visible to a host that acquires the word; writes of other
// threads need a barrier, and __threadfence_system() by each of them, before it.

#ifdef ON_CPU
inline unsigned load_acquire_system(const unsigned *from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
inline void store_release_system(unsigned *to, unsigned value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
inline long long now_ns() { return on_cpu_now_ns(); }
#else
__device__ __forceinline__ unsigned load_acquire_system(const unsigned *from) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ void store_release_system(unsigned *to, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
// A clock that all multiprocessors share; it may move in steps of a microsecond.
__device__ __forceinline__ long long now_ns() {
    long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
#endif
