//! Metadata of a GGUF file, and the shape that it declares.

use kernels::TensorType;
use model_files::gguf::GgufFile;

use super::{GgufSourceError, ROPE_FACTORS, ROPE_SHORT_FACTORS};
use crate::{
    shape::{
        config::{ArchFlags, ModelConfig, Rope, RopeScaling},
        experts::Experts,
        rope::yarn_magnitude,
    },
    sources::{families, family::Family, gemma},
};

/// Metadata keys without the architecture's prefix.
const WINDOW: &str = "attention.sliding_window";
const SCORE_CAP: &str = "attn_logit_softcapping";
const LOGIT_CAP: &str = "final_logit_softcapping";
const FEED_FORWARD: &str = "feed_forward_length";
const EXPERTS: &str = "expert_count";

/// llama.cpp's code of a softmax router.
const GATED_BY_SOFTMAX: usize = 1;

/// The supported part of longrope.
struct Longrope {
    /// Divisors of the frequencies for sequences within the context.
    factors: Vec<f32>,
    context: usize,
    magnitude: f32,
}

/// Reads a file's metadata, whose keys have the architecture's name as prefix.
pub(super) struct GgufMetadata<'a> {
    file: &'a GgufFile,
    prefix: &'a str,
    pub(super) family: Family,
}

impl<'a> GgufMetadata<'a> {
    pub(super) fn new(file: &'a GgufFile) -> Result<Self, GgufSourceError> {
        const KEY: &str = "general.architecture";
        let path = || file.path().to_path_buf();
        let prefix = file
            .str(KEY)?
            .ok_or_else(|| GgufSourceError::MissingKey { path: path(), key: KEY.to_owned() })?;
        let family = Family::of_gguf(prefix).ok_or_else(|| GgufSourceError::Unsupported {
            path: path(),
            what: format!("the architecture \"{}\"", prefix.escape_debug()),
        })?;
        let mut reader = Self { file, prefix, family };
        if family == Family::Llama && reader.count(EXPERTS)?.is_some_and(|count| count > 0) {
            reader.family = Family::Mixtral;
        }
        Ok(reader)
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    fn count(&self, name: &str) -> Result<Option<usize>, GgufSourceError> {
        Ok(self.file.usize(&self.key(name))?)
    }

    fn required(&self, name: &str) -> Result<usize, GgufSourceError> {
        self.count(name)?.ok_or_else(|| self.missing(self.key(name)))
    }

    fn number(&self, name: &str) -> Result<Option<f32>, GgufSourceError> {
        Ok(self.file.f32(&self.key(name))?)
    }

    fn missing(&self, key: String) -> GgufSourceError {
        GgufSourceError::MissingKey { path: self.file.path().to_path_buf(), key }
    }

    fn unsupported(&self, what: impl Into<String>) -> GgufSourceError {
        GgufSourceError::Unsupported { path: self.file.path().to_path_buf(), what: what.into() }
    }

    pub(super) fn refuse_unsupported(&self) -> Result<(), GgufSourceError> {
        if let Some(kind) = self.file.str("general.type")?.filter(|kind| *kind != "model") {
            return Err(self.unsupported(format!("a file of type \"{}\" as a model", kind.escape_debug())));
        }
        if self.file.u32("split.count")?.unwrap_or(1) > 1 {
            return Err(
                self.unsupported("a model split over several files (llama-gguf-split --merge joins them)")
            );
        }
        self.refuse_experts()?;
        for cap in [SCORE_CAP, LOGIT_CAP] {
            if self.family != Family::Gemma2 && self.number(cap)?.is_some_and(|cap| cap > 0.0) {
                return Err(self.unsupported(format!("`{}`", self.key(cap))));
            }
        }
        // OLMo 3 files use the same architecture name, but have sliding windows.
        if self.family == Family::Olmo2 && self.window()?.is_some() {
            return Err(self.unsupported(format!("`{}`", self.key(WINDOW))));
        }
        if self.file.bool(&self.key("attention.causal"))? == Some(false) {
            return Err(self.unsupported("attention that is not causal"));
        }
        Ok(())
    }

    /// Refuses experts in families without them, and routers other than a plain softmax.
    fn refuse_experts(&self) -> Result<(), GgufSourceError> {
        if !self.family.has_experts() && self.count(EXPERTS)?.unwrap_or(0) > 0 {
            return Err(
                self.unsupported(format!("a mixture of experts of the architecture \"{}\"", self.prefix))
            );
        }
        let usual = [
            ("expert_shared_count", 0),
            ("expert_group_count", 1),
            ("leading_dense_block_count", 0),
            ("expert_gating_func", GATED_BY_SOFTMAX),
        ];
        for (name, most) in usual {
            if self.count(name)?.is_some_and(|count| count > most) {
                return Err(self.unsupported(format!("`{}`", self.key(name))));
            }
        }
        const SCALE: &str = "expert_weights_scale";
        // llama.cpp treats 0 as absent.
        match self.number(SCALE)?.filter(|scale| ![0.0, 1.0].contains(scale)) {
            Some(_) => Err(self.unsupported(format!("`{}`", self.key(SCALE)))),
            None => Ok(()),
        }
    }

    /// Returns the experts, which all blocks have.
    fn experts(&self) -> Result<Option<Experts>, GgufSourceError> {
        if !self.family.has_experts() {
            return Ok(None);
        }
        let width = match self.count("expert_feed_forward_length")? {
            None if self.family == Family::Mixtral => self.required(FEED_FORWARD)?,
            None => return Err(self.missing(self.key("expert_feed_forward_length"))),
            Some(width) => width,
        };
        Ok(Some(Experts {
            count: self.required(EXPERTS)?,
            chosen: self.required("expert_used_count")?,
            width,
            // llama.cpp assumes true if the file has no value, and gpt-oss weighs its chosen experts alone.
            normalized: self.family == Family::GptOss
                || self.file.bool(&self.key("expert_weights_norm"))?.unwrap_or(true),
            dense_layers: Vec::new(),
        }))
    }

    pub(super) fn config(&self) -> Result<ModelConfig, GgufSourceError> {
        let embedding = self.file.tensor("token_embd.weight");
        let hidden_size = self.required("embedding_length")?;
        let heads = self.required("attention.head_count")?;
        let head_dim = self.head_dim(hidden_size, heads)?;
        let layers = self.required("block_count")?;
        let is_gemma3 = self.family == Family::Gemma3;
        let longrope = self.longrope()?;
        Ok(ModelConfig {
            architecture: self.prefix.to_owned(),
            vocab_size: embedding.ok_or_else(|| self.missing("token_embd.weight".to_owned()))?.rows(),
            hidden_size,
            intermediate_size: self.required(FEED_FORWARD)?,
            layers,
            heads,
            kv_heads: self.count("attention.head_count_kv")?.unwrap_or(heads),
            head_dim,
            norm_eps: self
                .number("attention.layer_norm_rms_epsilon")?
                .ok_or_else(|| self.missing(self.key("attention.layer_norm_rms_epsilon")))?,
            rope: Rope {
                theta: self.number("rope.freq_base")?.unwrap_or(if is_gemma3 { 1e6 } else { 1e4 }),
                scaling: match &longrope {
                    Some(longrope) => RopeScaling::Factors(longrope.factors.clone()),
                    None if self.family == Family::GptOss => self.yarn()?,
                    None => self.scaling()?,
                },
            },
            qk_norm: self.family.norms_queries(),
            tied_head: self.file.tensor("output.weight").is_none(),
            context_length: match &longrope {
                Some(longrope) => longrope.context,
                None => self.required("context_length")?,
            },
            sliding_window: match self.family {
                Family::Gemma2 => Some(self.window()?.unwrap_or(4096)),
                Family::GptOss => Some(self.window()?.unwrap_or(families::GPT_OSS_WINDOW)),
                _ => self.window()?,
            },
            traits: match self.family {
                Family::Granite => self.granite()?,
                Family::Olmo2 => families::olmo2(),
                Family::Phi3 => {
                    let rotary_dim = self.count("rope.dimension_count")?.unwrap_or(head_dim);
                    families::phi3(head_dim, rotary_dim, longrope.map_or(1.0, |longrope| longrope.magnitude))
                }
                Family::Gemma2 => self.gemma2(hidden_size, heads, layers)?,
                Family::Gemma3 => self.gemma3(hidden_size, heads, layers)?,
                Family::GptOss => self.gpt_oss(layers)?,
                _ => ArchFlags::default(),
            },
            experts: self.experts()?,
        })
    }

    fn granite(&self) -> Result<ArchFlags, GgufSourceError> {
        // llama.cpp treats 0 as absent.
        let given = |name| Ok::<_, GgufSourceError>(self.number(name)?.filter(|&scale| scale != 0.0));
        Ok(families::granite([
            given("embedding_scale")?,
            given("attention.scale")?,
            given("residual_scale")?,
            given("logit_scale")?,
        ]))
    }

    fn gpt_oss(&self, layers: usize) -> Result<ArchFlags, GgufSourceError> {
        let traits = families::gpt_oss(families::SWIGLU_LIMIT, gemma::every(gemma::PATTERN_2, layers));
        let magnitude = yarn_magnitude(self.number("rope.scaling.factor")?.unwrap_or(1.0));
        Ok(ArchFlags { rotary_magnitude: Some(magnitude).filter(|&magnitude| magnitude != 1.0), ..traits })
    }

    /// Returns the scaling of gpt-oss. Files do not state the turns of the ramp, which are those of the
    /// published configuration.
    fn yarn(&self) -> Result<RopeScaling, GgufSourceError> {
        let required = |name: &str| self.number(name)?.ok_or_else(|| self.missing(self.key(name)));
        match self.file.str(&self.key("rope.scaling.type"))? {
            Some("yarn") => {}
            other => {
                let found = other.unwrap_or("none").escape_debug();
                return Err(self.unsupported(format!("rope scaling of type \"{found}\" in gpt-oss")));
            }
        }
        Ok(RopeScaling::Yarn {
            factor: required("rope.scaling.factor")?,
            beta_fast: self.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: self.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            // Counts in metadata are far below 2^24, up to which f32 is exact.
            original_context: self.required("rope.scaling.original_context_length")? as f32,
            truncate: false,
        })
    }

    fn gemma3(&self, hidden_size: usize, heads: usize, layers: usize) -> Result<ArchFlags, GgufSourceError> {
        let scaled_by = gemma::query_scalar(hidden_size, heads, self.head_dim(hidden_size, heads)?, layers);
        let theta = self.number("rope.freq_base_swa")?.unwrap_or(gemma::LOCAL_THETA);
        let local_rope = Some(Rope { theta, scaling: RopeScaling::None });
        let traits = gemma::traits(hidden_size, scaled_by, gemma::every(gemma::PATTERN_3, layers));
        Ok(ArchFlags { local_rope, ..traits })
    }

    fn gemma2(&self, hidden_size: usize, heads: usize, layers: usize) -> Result<ArchFlags, GgufSourceError> {
        let scaled_by = gemma::query_scalar(hidden_size, heads, self.head_dim(hidden_size, heads)?, layers);
        // llama.cpp treats 0 as absent.
        let cap = |name, usual| {
            let cap = self.number(name)?.unwrap_or(usual);
            Ok::<_, GgufSourceError>(Some(cap).filter(|&cap| cap != 0.0))
        };
        let (score_cap, logit_cap) = (cap(SCORE_CAP, gemma::SCORE_CAP)?, cap(LOGIT_CAP, gemma::LOGIT_CAP)?);
        let traits = gemma::traits(hidden_size, scaled_by, gemma::every(gemma::PATTERN_2, layers));
        Ok(ArchFlags { score_cap, logit_cap, ..traits })
    }

    fn window(&self) -> Result<Option<usize>, GgufSourceError> {
        Ok(self.count(WINDOW)?.filter(|&window| window > 0))
    }

    /// Returns a Phi model's longrope parameters. Sequences beyond the original context would need other
    /// frequencies at all positions, so the context is limited to the original one.
    fn longrope(&self) -> Result<Option<Longrope>, GgufSourceError> {
        if self.family != Family::Phi3 {
            return Ok(None);
        }
        let Some(factors) = self.factors(ROPE_SHORT_FACTORS)? else { return Ok(None) };
        let whole = self.required("context_length")?;
        let context = self.required("rope.scaling.original_context_length")?.min(whole);
        let magnitude = self.number("rope.scaling.attn_factor")?;
        let stretched = whole as f32 / context as f32;
        let magnitude = magnitude.unwrap_or_else(|| families::longrope_magnitude(stretched, context));
        Ok(Some(Longrope { factors, context, magnitude }))
    }

    fn head_dim(&self, hidden_size: usize, heads: usize) -> Result<usize, GgufSourceError> {
        let by_width = hidden_size.checked_div(heads).unwrap_or(0);
        let head_dim = self.count("attention.key_length")?.unwrap_or(by_width);
        if self.count("attention.value_length")?.is_some_and(|width| width != head_dim) {
            return Err(self.unsupported("a width of value heads other than that of key heads"));
        }
        let is_partial = self.count("rope.dimension_count")?.is_some_and(|width| width != head_dim);
        if is_partial && self.family != Family::Phi3 {
            return Err(self.unsupported("a rotary embedding of a part of each head"));
        }
        Ok(head_dim)
    }

    fn scaling(&self) -> Result<RopeScaling, GgufSourceError> {
        let kind = self.file.str(&self.key("rope.scaling.type"))?;
        // Old files declare linear scaling by its factor alone.
        let factor = match self.number("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.number("rope.scale_linear")?,
        };
        let linear = match (kind, factor) {
            (None | Some("none"), None) => RopeScaling::None,
            (Some("none"), Some(_)) => RopeScaling::None,
            (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
            (Some("linear"), None) => return Err(self.missing(self.key("rope.scaling.factor"))),
            (Some(other), _) => {
                return Err(self.unsupported(format!("rope scaling of type \"{}\"", other.escape_debug())));
            }
        };
        match (self.factors(ROPE_FACTORS)?, linear) {
            (None, linear) => Ok(linear),
            (Some(factors), RopeScaling::None) => Ok(RopeScaling::Factors(factors)),
            (Some(_), _) => Err(self.unsupported(format!("linear rope scaling beside `{ROPE_FACTORS}`"))),
        }
    }

    fn factors(&self, tensor: &str) -> Result<Option<Vec<f32>>, GgufSourceError> {
        let Some(view) = self.file.tensor(tensor) else {
            return Ok(None);
        };
        if view.kind != TensorType::F32 {
            return Err(self.unsupported(format!("{:?} for `{tensor}`", view.kind)));
        }
        let (numbers, _) = view.data.as_chunks();
        Ok(Some(numbers.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()))
    }
}
