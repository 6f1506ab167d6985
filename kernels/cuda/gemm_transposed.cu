// out[m, n] (+)= sum_k g[m, k] W[k, n]: the gradient at the inputs of a linear layer, without cuBLASLt. W is
// [outputs, inputs] as for `gemm.cu`, now summed over its rows; out is f32, so that parts and tiles of W may
// be added to it. See `gemm.cuh`.

#include "gemm.cuh"

extern "C" __global__ void __launch_bounds__(GEMM_THREADS) gemm_transposed_f32(GEMM_TAKEN(float)) {
    multiply_tiles_f32<true>(GEMM_OPERANDS, GEMM_TARGET);
}
extern "C" __global__ void __launch_bounds__(GEMM_THREADS) gemm_transposed_f16(GEMM_TAKEN(f16)) {
    multiply_tiles_of<f16, true>(GEMM_OPERANDS, GEMM_TARGET);
}
extern "C" __global__ void __launch_bounds__(GEMM_THREADS) gemm_transposed_bf16(GEMM_TAKEN(bf16)) {
    multiply_tiles_of<bf16, true>(GEMM_OPERANDS, GEMM_TARGET);
}

ON_CPU_KERNEL(gemm_transposed_f32);
ON_CPU_KERNEL(gemm_transposed_f16);
ON_CPU_KERNEL(gemm_transposed_bf16);
