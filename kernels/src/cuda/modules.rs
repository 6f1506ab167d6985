//! The compiled kernels inside the binary: PTX that `scripts/cuda-compile` makes of `kernels/cuda/*.cu`.

/// Name and PTX of each kernel file, which `build.rs` unpacks. `tests/cuda_ptx.rs` checks that each PTX
/// belongs to its source.
pub(super) const MODULES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/ptx/modules.rs"));

/// First compute capability at which a kernel may begin before the preceding kernel has ended.
const EARLY_CAPABILITY: (u32, u32) = (9, 0);

/// Prefix of the instructions for an early start (`await_front` in `common.cuh`). Each has a line of its own.
const EARLY: &str = "griddepcontrol.";

#[derive(Debug, PartialEq, Eq)]
pub(super) struct KernelEntry {
    pub(super) name: &'static str,
    pub(super) parameters: Vec<u32>,
    /// Whether the kernel waits itself for earlier work, so that it may begin before that has ended.
    pub(super) begins_early: bool,
}

/// Returns the kernels in a PTX text, as a device of this compute capability runs them.
pub(super) fn entries(ptx: &'static str, capability: (u32, u32)) -> impl Iterator<Item = KernelEntry> {
    ptx.split(".entry ").skip(1).filter_map(move |rest| {
        let (name, rest) = rest.split_once('(')?;
        let (parameters, body) = rest.split_once(')')?;
        Some(KernelEntry {
            name: name.trim(),
            parameters: parameters.split(".param ").skip(1).map(parameter_bytes).collect(),
            begins_early: capability >= EARLY_CAPABILITY && body.contains(EARLY),
        })
    })
}

/// Returns the PTX text for this compute capability, without instructions that older devices lack.
pub(super) fn text_for(ptx: &str, capability: (u32, u32)) -> String {
    if capability >= EARLY_CAPABILITY {
        return ptx.replacen(".target sm_80", ".target sm_90", 1);
    }
    ptx.lines().filter(|line| !line.starts_with(EARLY)).flat_map(|line| [line, "\n"]).collect()
}

/// Returns the bytes of a parameter declared like `.u64 name`, or 0 if it is not a plain number.
fn parameter_bytes(declared: &str) -> u32 {
    let bits = declared.split_whitespace().next().and_then(|kind| kind.get(2..)?.parse::<u32>().ok());
    bits.map_or(0, |bits| bits / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_takes_plain_numbers_and_pointers_alone() {
        let kernels = kernels((9, 0));
        assert!(kernels.len() > MODULES.len());
        for KernelEntry { name, parameters, .. } in &kernels {
            assert!(
                !parameters.is_empty() && parameters.iter().all(|bytes| [4, 8].contains(bytes)),
                "{name}"
            );
        }
        let signal = KernelEntry { name: "await_signal", parameters: vec![8, 4, 8, 4], begins_early: false };
        assert!(kernels.contains(&signal), "nobody begins in front of who waits for the host");
    }

    #[test]
    fn kernels_begin_early_where_the_device_can_and_others_are_not_told() {
        for (capability, target, begin) in [((9, 0), "sm_90", true), ((8, 9), "sm_80", false)] {
            let early =
                |name| kernels(capability).iter().any(|entry| entry.name == name && entry.begins_early);
            for name in
                ["gemv_bf16_8", "gemv_q4_k_8", "add_norm_bf16", "lora_shrink_bf16", "lora_expand_bf16"]
            {
                assert_eq!(early(name), begin, "{name} at {capability:?}");
            }
            for (name, ptx) in MODULES {
                let text = text_for(ptx, capability);
                assert!(text.contains(&format!("\n.target {target}\n")), "{name}");
                assert!(begin || !text.contains(EARLY), "{name} at {capability:?}");
            }
        }
    }

    fn kernels(capability: (u32, u32)) -> Vec<KernelEntry> {
        MODULES.iter().flat_map(|(_, ptx)| entries(ptx, capability)).collect()
    }
}
