//! The compiled kernels that the program carries: PTX that `scripts/cuda-compile` makes of `kernels/cuda/*.cu`.

/// Name and PTX of each kernel file, which `build.rs` unpacks. `tests/cuda_ptx.rs` checks that each PTX belongs to its source.
pub(super) const MODULES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/ptx/modules.rs"));

/// The first compute capability at which a kernel may begin before the one in front of it has ended.
const EARLY_CAPABILITY: (u32, u32) = (9, 0);

/// How the instructions begin by which a kernel does so (`await_front` in `common.cuh`). They stand on lines of their own.
const EARLY: &str = "griddepcontrol.";

/// A kernel in a PTX text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct KernelEntry {
    pub(super) name: &'static str,
    /// Bytes of each.
    pub(super) parameters: Vec<u32>,
    /// Whether it waits for what is in front of it, so that it may begin before that has ended.
    pub(super) begins_early: bool,
}

/// The kernels in a PTX text, as a device of this compute capability runs them.
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

/// The text that a device of this compute capability takes: one text serves all, but for the instructions that the oldest do
/// not have.
pub(super) fn text_for(ptx: &str, capability: (u32, u32)) -> String {
    if capability >= EARLY_CAPABILITY {
        return ptx.replacen(".target sm_80", ".target sm_90", 1);
    }
    ptx.lines().filter(|line| !line.starts_with(EARLY)).flat_map(|line| [line, "\n"]).collect()
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
