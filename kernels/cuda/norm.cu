// The residual stream takes a sublayer's output, and is normed for the next one.
//
//     residual[r, c] += update[r, c]                                   (not where there is no update)
//     out[r, c] = residual[r, c] / sqrt(mean_c(residual[r, c]^2) + eps) * weight[c]
//
//     x[r, c] = x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * weight[c]     (norm_in_place: an output on its way there,
//                                                                        or all heads of queries or of keys)
//     residual[r, c] += update[r, c],   out[r, c] = residual[r, c]     (add_copy: nothing is normed)
//
// residual is f32, [rows, width]; update and out are of the model's kind, of the same shape; weight is f32,
// [width].
//
// One block a row. A row is read once: each thread keeps its numbers in registers between summing the squares
// and scaling, so the kernel moves what it must and no more. The order of the sum depends on the width alone,
// so a row's bits are the same in any batch. Wide loads need widths that are whole packs; other widths, and
// those beyond what the registers of a block hold, take the plain kernel, which reads the residual twice.
#include "common.cuh"

constexpr int THREADS = 256;
// What a thread keeps: rows of up to THREADS * KEPT numbers.
constexpr int KEPT = 32;

template <typename T> __device__ __forceinline__ void
add_norm(float *residual, const T *update, const float *weight, float eps, T *out, unsigned width) {
    constexpr int COUNT = Pack<T>::COUNT, PACKS = KEPT / COUNT, QUADS = COUNT / 4;
    float kept[PACKS][COUNT];
    size_t row = size_t(blockIdx.x) * width;
    await_front();
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        unsigned column = (i * THREADS + threadIdx.x) * COUNT;
        if (column >= width) break;
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            Pack<float> four = load_pack(residual + row + column + 4 * quad);
#pragma unroll
            for (int c = 0; c < 4; ++c) kept[i][4 * quad + c] = four.at[c];
        }
        if (update != nullptr) {
            Pack<T> added = load_pack(update + row + column);
#pragma unroll
            for (int c = 0; c < COUNT; ++c) kept[i][c] += to_float(added.at[c]);
#pragma unroll
            for (int quad = 0; quad < QUADS; ++quad) {
                Pack<float> four;
#pragma unroll
                for (int c = 0; c < 4; ++c) four.at[c] = kept[i][4 * quad + c];
                store_pack(residual + row + column + 4 * quad, four);
            }
        }
#pragma unroll
        for (int c = 0; c < COUNT; ++c) squares = fmaf(kept[i][c], kept[i][c], squares);
    }
    float scale = 1.0f / sqrtf(block_sum(squares) / float(width) + eps);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        unsigned column = (i * THREADS + threadIdx.x) * COUNT;
        if (column >= width) break;
        Pack<T> normed;
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            Pack<float> four = load_pack(weight + column + 4 * quad);
#pragma unroll
            for (int c = 0; c < 4; ++c)
                normed.at[4 * quad + c] = from_float<T>(kept[i][4 * quad + c] * scale * four.at[c]);
        }
        store_pack(out + row + column, normed);
    }
}

// Any width. A thread reads again only what it wrote itself, so the second pass needs no barrier of its own.
template <typename T> __device__ __forceinline__ void
add_norm_plain(float *residual, const T *update, const float *weight, float eps, T *out, unsigned width) {
    size_t row = size_t(blockIdx.x) * width;
    await_front();
    float squares = 0.0f;
    for (unsigned column = threadIdx.x; column < width; column += THREADS) {
        float value = residual[row + column];
        if (update != nullptr) {
            value += to_float(update[row + column]);
            residual[row + column] = value;
        }
        squares = fmaf(value, value, squares);
    }
    float scale = 1.0f / sqrtf(block_sum(squares) / float(width) + eps);
    for (unsigned column = threadIdx.x; column < width; column += THREADS)
        out[row + column] = from_float<T>(residual[row + column] * scale * weight[column]);
}

// update may be null. width is a multiple of Pack<T>::COUNT and at most THREADS * KEPT; pointers are 16-byte
// aligned.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_norm_f32(float *residual, const float *update, const float *weight, float eps, float *out,
                 unsigned width) {
    add_norm<float>(residual, update, weight, eps, out, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    add_norm_f16(float *residual, const f16 *update, const float *weight, float eps, f16 *out,
                 unsigned width) {
    add_norm<f16>(residual, update, weight, eps, out, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    add_norm_bf16(float *residual, const bf16 *update, const float *weight, float eps, bf16 *out,
                  unsigned width) {
    add_norm<bf16>(residual, update, weight, eps, out, width);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_norm_plain_f32(float *residual, const float *update, const float *weight, float eps, float *out,
                       unsigned width) {
    add_norm_plain<float>(residual, update, weight, eps, out, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    add_norm_plain_f16(float *residual, const f16 *update, const float *weight, float eps, f16 *out,
                       unsigned width) {
    add_norm_plain<f16>(residual, update, weight, eps, out, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    add_norm_plain_bf16(float *residual, const bf16 *update, const float *weight, float eps, bf16 *out,
                        unsigned width) {
    add_norm_plain<bf16>(residual, update, weight, eps, out, width);
}

// Some columns, normed where they lie, `stride` numbers from one row to the next: rows are few and narrow, so that
// one plain kernel does.
template <typename T> __device__ __forceinline__ void norm_in_place(T *x, unsigned stride, const float *weight, float eps,
                                                                    unsigned width) {
    T *row = x + size_t(blockIdx.x) * stride;
    await_front();
    float squares = 0.0f;
    for (unsigned column = threadIdx.x; column < width; column += THREADS) {
        float value = to_float(row[column]);
        squares = fmaf(value, value, squares);
    }
    float scale = 1.0f / sqrtf(block_sum(squares) / float(width) + eps);
    for (unsigned column = threadIdx.x; column < width; column += THREADS)
        row[column] = from_float<T>(to_float(row[column]) * scale * weight[column]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_in_place_f32(float *x, unsigned stride, const float *weight, float eps, unsigned width) {
    norm_in_place(x, stride, weight, eps, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_in_place_f16(f16 *x, unsigned stride, const float *weight, float eps, unsigned width) {
    norm_in_place(x, stride, weight, eps, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_in_place_bf16(bf16 *x, unsigned stride, const float *weight, float eps, unsigned width) {
    norm_in_place(x, stride, weight, eps, width);
}

// update may be null.
template <typename T> __device__ __forceinline__ void
add_copy(float *residual, const T *update, T *out, unsigned width) {
    size_t row = size_t(blockIdx.x) * width;
    await_front();
    for (unsigned column = threadIdx.x; column < width; column += THREADS) {
        float value = residual[row + column];
        if (update != nullptr) {
            value += to_float(update[row + column]);
            residual[row + column] = value;
        }
        out[row + column] = from_float<T>(value);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_copy_f32(float *residual, const float *update, float *out, unsigned width) {
    add_copy(residual, update, out, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    add_copy_f16(float *residual, const f16 *update, f16 *out, unsigned width) {
    add_copy(residual, update, out, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    add_copy_bf16(float *residual, const bf16 *update, bf16 *out, unsigned width) {
    add_copy(residual, update, out, width);
}

ON_CPU_KERNEL(add_copy_f32);
ON_CPU_KERNEL(add_copy_f16);
ON_CPU_KERNEL(add_copy_bf16);
ON_CPU_KERNEL(norm_in_place_f32);
ON_CPU_KERNEL(norm_in_place_f16);
ON_CPU_KERNEL(norm_in_place_bf16);
ON_CPU_KERNEL(add_norm_f32);
ON_CPU_KERNEL(add_norm_f16);
ON_CPU_KERNEL(add_norm_bf16);
ON_CPU_KERNEL(add_norm_plain_f32);
ON_CPU_KERNEL(add_norm_plain_f16);
ON_CPU_KERNEL(add_norm_plain_bf16);
