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
    ("ring", include_str!("../../cuda/ptx/ring.ptx")),
    ("ring_transposed", include_str!("../../cuda/ptx/ring_transposed.ptx")),
    ("rope", include_str!("../../cuda/ptx/rope.ptx")),
    ("rows", include_str!("../../cuda/ptx/rows.ptx")),
    ("sample", include_str!("../../cuda/ptx/sample.ptx")),
];

/// The kernels in a PTX text: their names, and the bytes of each parameter.
pub(super) fn entries(ptx: &'static str) -> impl Iterator<Item = (&'static str, Vec<u32>)> {
    ptx.split(".entry ").skip(1).filter_map(|rest| {
        let (name, rest) = rest.split_once('(')?;
        let (parameters, _) = rest.split_once(')')?;
        Some((name.trim(), parameters.split(".param ").skip(1).map(parameter_bytes).collect()))
    })
}

/// Bytes of a parameter that is declared as `.u64 name`, say; 0 for what is no plain number.
fn parameter_bytes(declared: &str) -> u32 {
    let bits = declared.split_whitespace().next().and_then(|kind| kind.get(2..)?.parse::<u32>().ok());
    bits.map_or(0, |bits| bits / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_takes_plain_numbers_and_pointers_alone() {
        let kernels: Vec<_> = MODULES.iter().flat_map(|(_, ptx)| entries(ptx)).collect();
        assert!(kernels.len() > MODULES.len());
        for (name, parameters) in &kernels {
            assert!(
                !parameters.is_empty() && parameters.iter().all(|bytes| [4, 8].contains(bytes)),
                "{name}"
            );
        }
        assert!(kernels.contains(&("await_signal", vec![8, 4, 8, 4])));
    }
}
