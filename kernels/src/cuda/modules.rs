//! The compiled kernels that the program carries: PTX that `scripts/cuda-compile` makes of `kernels/cuda/*.cu`.

/// Each kernel file's name and its PTX. `tests/cuda_ptx.rs` sees to it that the PTX belongs to the source.
pub(super) const MODULES: &[(&str, &str)] = &[
    ("attention_decode", include_str!("../../cuda/ptx/attention_decode.ptx")),
    ("attention_exact", include_str!("../../cuda/ptx/attention_exact.ptx")),
    ("attention_prefill", include_str!("../../cuda/ptx/attention_prefill.ptx")),
    ("bias", include_str!("../../cuda/ptx/bias.ptx")),
    ("board", include_str!("../../cuda/ptx/board.ptx")),
    ("dequantize", include_str!("../../cuda/ptx/dequantize.ptx")),
    ("embed", include_str!("../../cuda/ptx/embed.ptx")),
    ("gate", include_str!("../../cuda/ptx/gate.ptx")),
    ("gemm", include_str!("../../cuda/ptx/gemm.ptx")),
    ("gemm_transposed", include_str!("../../cuda/ptx/gemm_transposed.ptx")),
    ("gemv", include_str!("../../cuda/ptx/gemv.ptx")),
    ("gemv_f32", include_str!("../../cuda/ptx/gemv_f32.ptx")),
    ("gemv_quantized", include_str!("../../cuda/ptx/gemv_quantized.ptx")),
    ("kv_append", include_str!("../../cuda/ptx/kv_append.ptx")),
    ("lora", include_str!("../../cuda/ptx/lora.ptx")),
    ("norm", include_str!("../../cuda/ptx/norm.ptx")),
    ("repack", include_str!("../../cuda/ptx/repack.ptx")),
    ("rope", include_str!("../../cuda/ptx/rope.ptx")),
    ("rows", include_str!("../../cuda/ptx/rows.ptx")),
    ("sample", include_str!("../../cuda/ptx/sample.ptx")),
];
