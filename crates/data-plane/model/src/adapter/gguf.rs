//! Adapters in llama.cpp's GGUF format, with `blk.N.attn_q.weight.lora_a` and `.lora_b` for each layer.

use std::{collections::HashSet, path::Path};

use kernels::TensorType;
use model_files::{
    gguf::{GgufFile, TensorView},
    whole_file,
};

use super::{
    error::AdapterError,
    invocation::Invocation,
    limits::{MAX_RANK, MAX_WEIGHT_BYTES},
    matrix::{StoredMatrix, StoredMethod, StoredModule, assemble},
    method::AnyAdapter,
};
use crate::{
    shape::{
        config::ModelConfig,
        layout::{self, layer_targets},
        source::Target,
    },
    sources::{
        fused::Fused,
        gguf::{fused_name, half_rotation_rows, is_interleaved, linear_name},
    },
};

pub(super) fn read(path: &Path, model: &ModelConfig) -> Result<AnyAdapter, AdapterError> {
    let bytes = whole_file::read(path, MAX_WEIGHT_BYTES)
        .map_err(|source| AdapterError::Read { path: path.to_path_buf(), source })?;
    let file = GgufFile::from_bytes(path, bytes)?;
    let reader = GgufAdapterReader { path, model, alpha: check_metadata(path, &file, model)?, file: &file };
    let mut known = HashSet::new();
    let mut modules = Vec::new();
    for layer in 0..model.layers {
        for &target in layer_targets(model, layer) {
            modules.extend(reader.module(layer, target, &mut known)?);
        }
    }
    modules.extend(reader.module(0, Target::LmHead, &mut known)?);
    if let Some((name, _)) = file.tensors().find(|(name, _)| !known.contains(*name)) {
        return Err(AdapterError::unknown(path, name));
    }
    let base_model = file.str("general.base_model.0.name")?.map(str::to_owned);
    let method = match invocation(path, &file, model)? {
        None => StoredMethod::Lora(modules),
        Some(invocation) => StoredMethod::Activated(modules, invocation),
    };
    assemble(path, method, base_model)
}

fn invocation(path: &Path, file: &GgufFile, model: &ModelConfig) -> Result<Option<Invocation>, AdapterError> {
    const KEY: &str = "adapter.alora.invocation_tokens";
    let Some(ids) = file.i64s(KEY)? else { return Ok(None) };
    Invocation::new(Some(ids), model.vocab_size).map(Some).map_err(|problem| AdapterError::Option {
        path: path.to_path_buf(),
        option: KEY.to_owned(),
        problem,
    })
}

/// Checks that the file is a LoRA for a model like this one, and returns its alpha.
fn check_metadata(path: &Path, file: &GgufFile, model: &ModelConfig) -> Result<f32, AdapterError> {
    let unsupported = |option: &str, value: &str| AdapterError::Unsupported {
        path: path.to_path_buf(),
        option: option.to_owned(),
        value: format!("{value:?}"),
    };
    let expect = |option: &str, expected: &str| match file.str(option)? {
        Some(value) if value == expected => Ok(()),
        value => Err(unsupported(option, value.unwrap_or_default())),
    };
    // llama.cpp stores models of Mistral under the architecture name "llama".
    let is_mistral = ["mistral", "mixtral"].contains(&model.architecture.as_str());
    let architecture = if is_mistral { "llama" } else { &model.architecture };
    expect("general.type", "adapter")?;
    expect("adapter.type", "lora")?;
    expect("general.architecture", architecture)?;
    let alpha = file.f32("adapter.lora.alpha")?.unwrap_or(0.0);
    if alpha.is_finite() {
        return Ok(alpha);
    }
    Err(AdapterError::Option {
        path: path.to_path_buf(),
        option: "adapter.lora.alpha".to_owned(),
        problem: format!("is {alpha}"),
    })
}

struct GgufAdapterReader<'a> {
    path: &'a Path,
    model: &'a ModelConfig,
    alpha: f32,
    file: &'a GgufFile,
}

impl<'a> GgufAdapterReader<'a> {
    /// Returns the adapted linear layer if the file has it, and adds the names of its tensors to `known`.
    fn module(
        &self,
        layer: usize,
        target: Target,
        known: &mut HashSet<String>,
    ) -> Result<Option<StoredModule<'a>>, AdapterError> {
        let fused = Fused::of(self.model, target);
        let module = match &fused {
            Some(fused) => fused_name(layer, fused.group),
            None => linear_name(layer, target),
        };
        let [a_name, b_name] = ["a", "b"].map(|part| format!("{module}.weight.lora_{part}"));
        known.extend([a_name.clone(), b_name.clone()]);
        let missing =
            |tensor| Err(AdapterError::Missing { path: self.path.to_path_buf(), tensor, foreign: None });
        let (a, b) = match (self.file.tensor(&a_name), self.file.tensor(&b_name)) {
            (None, None) => return Ok(None),
            (Some(a), Some(b)) => (a, b),
            (None, Some(_)) => return missing(a_name),
            (Some(_), None) => return missing(b_name),
        };
        let rank = a.rows();
        if rank > MAX_RANK {
            return Err(AdapterError::Rank { path: self.path.to_path_buf(), module, rank });
        }
        let [rows, cols] = layout::linear_shape(self.model, target);
        let a = self.matrix(a_name, a, [rank, cols])?;
        let mut b = match &fused {
            Some(fused) => self.matrix(b_name, b, [fused.all_rows, rank])?,
            None => self.matrix(b_name, b, [rows, rank])?,
        };
        if let Some(fused) = &fused {
            b.bytes = fused.part_of(&b.bytes).to_vec().into();
        }
        // The rows of B are output features, in the row order of the base model.
        let is_interleaved = self.file.str("general.architecture")?.is_some_and(is_interleaved);
        if is_interleaved && matches!(target, Target::Q | Target::K) {
            b.bytes = half_rotation_rows(&b.bytes, b.bytes.len() / rows, self.model.head_dim).into();
        }
        Ok(Some(StoredModule { layer, target, rank, scale: self.scale(rank), a, b }))
    }

    /// Returns the scale; llama.cpp treats a missing alpha as scale 1.
    fn scale(&self, rank: usize) -> f32 {
        #[expect(clippy::cast_precision_loss, reason = "ranks are small")]
        if self.alpha == 0.0 { 1.0 } else { self.alpha / rank as f32 }
    }

    fn matrix(
        &self,
        name: String,
        view: TensorView<'a>,
        expected: [usize; 2],
    ) -> Result<StoredMatrix<'a>, AdapterError> {
        if !matches!(view.kind, TensorType::F32 | TensorType::F16 | TensorType::Bf16) {
            return Err(AdapterError::Unsupported {
                path: self.path.to_path_buf(),
                option: name,
                value: format!("of type {:?}", view.kind),
            });
        }
        if [view.rows(), view.cols()] != expected {
            let found = vec![view.rows(), view.cols()];
            let (path, expected) = (self.path.to_path_buf(), expected.to_vec());
            return Err(AdapterError::Shape { path, tensor: name, expected, found });
        }
        Ok(StoredMatrix { name, kind: view.kind, bytes: view.data.into() })
    }
}
