//! All adapter types of PEFT (`peft.PeftType`), with what happens to an adapter of each.

/// Treatment of adapters of a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeftTreatment {
    /// A pass computes the adapter as PEFT does.
    Served,
    /// The adapter is read as a LoRA.
    Converted,
    /// The adapter is refused.
    Refused,
}

/// An adapter type of PEFT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeftAdapterType {
    /// Value of `peft_type` in the configuration.
    pub name: &'static str,
    /// Treatment of adapters of this type.
    pub treatment: PeftTreatment,
    /// Conditions and exactness of a served type, or reason and remedy for a refused one.
    pub about: &'static str,
}

const fn served(name: &'static str, about: &'static str) -> PeftAdapterType {
    PeftAdapterType { name, treatment: PeftTreatment::Served, about }
}

const fn converted(name: &'static str, about: &'static str) -> PeftAdapterType {
    PeftAdapterType { name, treatment: PeftTreatment::Converted, about }
}

const fn refused(name: &'static str, about: &'static str) -> PeftAdapterType {
    PeftAdapterType { name, treatment: PeftTreatment::Refused, about }
}

/// Reason for refusing changes that depend on the base's weights.
const OVER_BASE: &str =
    "its change of a layer depends on the base's weights; merge it into the base (in PEFT: merge_and_unload)";

/// Reason for refusing changes that depend on the input.
const BY_INPUT: &str = "its change depends on the input, as no LoRA's does; train a LoRA instead";

/// All types of PEFT 0.21.2, by name.
pub const PEFT_TYPES: [PeftAdapterType; 45] = [
    converted("ADALORA", "exactly, with the ranks that training kept"),
    refused("ADAMSS", "its subspaces are not read; merge it into the base (in PEFT: merge_and_unload)"),
    refused(
        "ADAPTION_PROMPT",
        "its attention over prompts has a gate that no pass computes; train a LoRA instead",
    ),
    served("BEFT", "as biases alone, on executors with the base in host memory"),
    refused("BOFT", OVER_BASE),
    converted("C3A", "exactly, with the rank of a layer's shorter side; refused if that is above 1024"),
    served("CARTRIDGE", "as prefix tuning"),
    served("CPT", "as prompt tuning"),
    refused("DEFT", OVER_BASE),
    converted("DELORA", "exactly, with the adapter's ranks"),
    converted("FOURIERFT", "exactly up to rank 1024, which is twice the number of row frequencies or less"),
    refused("FROD", OVER_BASE),
    refused("GLORA", OVER_BASE),
    converted("GRALORA", "exactly, with `gralora_k` times the adapter's ranks"),
    refused("HIRA", OVER_BASE),
    refused("HRA", OVER_BASE),
    served("IA3", "with scaled inputs only of o_proj, down_proj and lm_head"),
    refused("LILY", BY_INPUT),
    refused("LN_TUNING", "it replaces norms, which all adapters of a batch share; merge it into the base"),
    converted("LOHA", "exactly up to rank 32, with the square of the adapter's ranks"),
    converted("LOKR", "exactly up to rank 1024, and otherwise by singular values"),
    served("LORA", "with the options that the table of kinds lists"),
    converted("MISS", "exactly, with the adapter's ranks; not with `init_weights=\"bat\"`"),
    served("MULTITASK_PROMPT_TUNING", "as prompt tuning, with one task"),
    refused("OFT", OVER_BASE),
    refused("OSF", OVER_BASE),
    refused("PEANUT", OVER_BASE),
    converted("POLY", "exactly, with one task"),
    served("PREFIX_TUNING", "with up to 1024 virtual tokens"),
    served("PROMPT_TUNING", "with up to 1024 virtual tokens"),
    refused("PSOFT", OVER_BASE),
    converted("PVERA", "exactly, by its means; not with `sample_at_inference=True`"),
    served("P_TUNING", "as prompt tuning; PEFT saves the encoder's outputs"),
    converted(
        "RANDLORA",
        "exactly if the shorter side of each layer has up to 1024 features, and otherwise refused",
    ),
    refused(
        "ROAD",
        "it rotates pairs of outputs, as no LoRA does; merge it into the base (in PEFT: merge_and_unload)",
    ),
    refused("SHADOW", "it runs a second model beside the base; train a LoRA instead"),
    converted("SHIRA", "exactly if the trained elements lie in up to 1024 rows or columns of a layer"),
    converted("SUPERTUNING", "exactly if the trained elements lie in up to 1024 rows or columns of a layer"),
    refused(
        "TINYLORA",
        "its trained vectors carry no layer names; merge it into the base (in PEFT: merge_and_unload)",
    ),
    served("TRAINABLE_TOKENS", "as rows of embedding or head"),
    refused(
        "UNILORA",
        "its factors are drawn again from a seed; merge it into the base (in PEFT: merge_and_unload)",
    ),
    converted("VBLORA", "exactly, with the adapter's ranks"),
    converted("VERA", "exactly, with the adapter's ranks"),
    refused(
        "WAVEFT",
        "it is a wavelet transform of full rank; merge it into the base (in PEFT: merge_and_unload)",
    ),
    refused("XLORA", BY_INPUT),
];

/// Returns why adapters of the type `name` are refused, or `None` if they are not, or if PEFT has no such
/// type.
pub(super) fn refusal(name: &str) -> Option<&'static str> {
    let is_refused = |it: &&PeftAdapterType| it.name == name && it.treatment == PeftTreatment::Refused;
    PEFT_TYPES.iter().find(is_refused).map(|it| it.about)
}
