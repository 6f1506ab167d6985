// out[m, n] = sum_k x[m, k] W[n, k] (+ bias[n]): linear layers of many rows without cuBLASLt. See `gemm.cuh`.

#include "gemm.cuh"

extern "C" __global__ void __launch_bounds__(GEMM_THREADS) gemm_f32(GEMM_TAKEN(float)) {
    multiply_tiles_f32<false>(GEMM_OPERANDS, GEMM_TARGET);
}
extern "C" __global__ void __launch_bounds__(GEMM_THREADS) gemm_f16(GEMM_TAKEN(f16)) {
    multiply_tiles_of<f16, false>(GEMM_OPERANDS, GEMM_TARGET);
}
extern "C" __global__ void __launch_bounds__(GEMM_THREADS) gemm_bf16(GEMM_TAKEN(bf16)) {
    multiply_tiles_of<bf16, false>(GEMM_OPERANDS, GEMM_TARGET);
}

ON_CPU_KERNEL(gemm_f32);
ON_CPU_KERNEL(gemm_f16);
ON_CPU_KERNEL(gemm_bf16);
