//! The tensors of an `adapter_model.safetensors`, taken out one by one.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use safetensors::Dtype;

use super::{error::AdapterError, limits::MAX_HEADER_BYTES, matrix::StoredMatrix, selection::Selected};
use crate::{
    shape::{config::ModelConfig, source::Target},
    sources::{
        fused::Fused,
        hf_names::{fused_module_name, module_name},
        safetensors::file::{Contents, OtherTensor, StoredTensor, read_all_contents},
    },
};

/// What PEFT puts before the names of the model it wraps.
const PREFIX: &str = "base_model.model.";

/// The tensor with the ids of the tokens that a draft guesses among.
const SHORTLIST: &str = "draft.shortlist";

/// The tensors of a linear layer.
const PARTED: [&str; 6] =
    ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector", "ia3_l", "vera_lambda_d", "vera_lambda_b"];

/// Those that have nothing to do with its outputs.
const WHOLE: [&str; 2] = ["lora_A.weight", "vera_lambda_d"];

/// A tensor and what its file calls it.
pub(super) type Named = (String, StoredTensor);

/// The tensors of a weight file that nothing has taken yet, by their name without [`PREFIX`].
pub(super) struct WeightFile<'a> {
    path: PathBuf,
    bytes: &'a [u8],
    rest: BTreeMap<String, Named>,
    /// The one tensor that may be of whole numbers.
    shortlist: Option<OtherTensor>,
}

impl<'a> WeightFile<'a> {
    /// Reads the table of contents.
    pub(super) fn parse(path: &Path, bytes: &'a [u8]) -> Result<Self, AdapterError> {
        let failed = |source| AdapterError::Weights { path: path.to_path_buf(), source };
        let Contents { tensors, mut others, .. } =
            read_all_contents(bytes, MAX_HEADER_BYTES).map_err(failed)?;
        let is_shortlist = |other: &mut OtherTensor| other.name == SHORTLIST && other.kind == Dtype::I64;
        let shortlist = others.extract_if(.., is_shortlist).next();
        if let Some(other) = others.into_iter().next() {
            return Err(failed(other.into()));
        }
        let mut rest = BTreeMap::new();
        for (name, stored) in tensors {
            let key = name.strip_prefix(PREFIX).unwrap_or(&name).to_owned();
            if rest.insert(key, (name.clone(), stored)).is_some() {
                return Err(AdapterError::Duplicate { path: path.to_path_buf(), tensor: name });
            }
        }
        Ok(Self { path: path.to_path_buf(), bytes, rest, shortlist })
    }

    /// Parts the tensors of linear layers that are one in the files of such a base, and several here.
    pub(super) fn parted(mut self, model: &ModelConfig) -> Result<Self, AdapterError> {
        for layer in 0..model.layers {
            self.part(model, layer, &[Target::Q, Target::K, Target::V])?;
            self.part(model, layer, &[Target::Gate, Target::Up])?;
        }
        Ok(self)
    }

    /// Gives the linear layers that are one in the files their parts of its tensors: their rows of those that have its outputs as
    /// rows, and the whole of others.
    fn part(&mut self, model: &ModelConfig, layer: usize, targets: &[Target]) -> Result<(), AdapterError> {
        let fused = |target| Some((target, Fused::of(model, target)?));
        let parts: Vec<(Target, Fused)> = targets.iter().copied().filter_map(fused).collect();
        let Some((_, first)) = parts.first() else { return Ok(()) };
        let whole = fused_module_name(layer, first.group);
        for tensor in PARTED {
            let Some((name, stored)) = self.rest.remove(&format!("{whole}.{tensor}")) else { continue };
            for (target, part) in &parts {
                let mut stored = stored.clone();
                if !WHOLE.contains(&tensor)
                    && let Some(rows) = stored.shape.first_mut()
                    && *rows == part.all_rows
                {
                    let bytes = part.range_in(stored.range.len());
                    *rows = part.rows.len();
                    stored.range = stored.range.start + bytes.start..stored.range.start + bytes.end;
                }
                let own = format!("{}.{tensor}", module_name(layer, *target));
                if self.rest.insert(own, (name.clone(), stored)).is_some() {
                    return Err(AdapterError::Duplicate { path: self.path.clone(), tensor: name });
                }
            }
        }
        Ok(())
    }

    /// The file, for messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Names of the layers that have low-rank factors which nothing has taken.
    pub(super) fn adapted(&self) -> Vec<String> {
        let names = self.rest.keys().filter_map(|name| name.strip_suffix(".lora_A.weight"));
        names.map(str::to_owned).collect()
    }

    /// Whether there is a tensor of this name that nothing has taken.
    pub(super) fn has(&self, name: &str) -> bool {
        self.rest.contains_key(name)
    }

    /// Takes the tensor of this name, if there is one.
    pub(super) fn take(&mut self, name: &str) -> Option<Named> {
        self.rest.remove(name)
    }

    /// Takes the tensor of this name, which there has to be.
    pub(super) fn required(&mut self, name: &str) -> Result<Named, AdapterError> {
        let missing = || AdapterError::Missing { path: self.path.clone(), tensor: name.to_owned() };
        self.rest.remove(name).ok_or_else(missing)
    }

    /// Takes the tensors of a linear layer: all are there if the configuration selects the layer, none if it does not.
    pub(super) fn take_all<const N: usize>(
        &mut self,
        module: &str,
        names: [String; N],
        selected: Selected,
    ) -> Result<Option<[Named; N]>, AdapterError> {
        let path = self.path.clone();
        let mut missing = None;
        let mut taken = Vec::with_capacity(N);
        for tensor in names {
            match self.rest.remove(&tensor) {
                Some(named) => taken.push(named),
                None => missing = missing.or(Some(tensor)),
            }
        }
        match (selected, missing) {
            (Selected::No, _) if taken.is_empty() => Ok(None),
            (_, Some(tensor)) => Err(AdapterError::Missing { path, tensor }),
            (Selected::No, None) => Err(AdapterError::NotTargeted { path, module: module.to_owned() }),
            (Selected::Yes, None) => Ok(taken.try_into().ok()),
        }
    }

    /// The numbers of a tensor that must be `expected`.
    pub(super) fn matrix(
        &self,
        (name, stored): Named,
        expected: [usize; 2],
    ) -> Result<StoredMatrix<'a>, AdapterError> {
        let StoredTensor { kind, shape, range } = stored;
        match self.bytes.get(range) {
            Some(bytes) if shape == expected => Ok(StoredMatrix { name, kind, bytes: bytes.into() }),
            _ => Err(AdapterError::Shape { path: self.path.clone(), tensor: name, expected, found: shape }),
        }
    }

    /// The numbers of a tensor that must have one dimension, of `expected`.
    pub(super) fn vector(
        &self,
        (name, stored): Named,
        expected: usize,
    ) -> Result<StoredMatrix<'a>, AdapterError> {
        if stored.shape.as_slice() == [expected] {
            let flat = StoredTensor { shape: vec![1, expected], ..stored };
            return self.matrix((name, flat), [1, expected]);
        }
        let (path, found) = (self.path.clone(), stored.shape);
        Err(AdapterError::Shape { path, tensor: name, expected: [1, expected], found })
    }

    /// Takes the shortlist of a draft, if there is one: its numbers.
    pub(super) fn take_shortlist(&mut self) -> Result<Option<Vec<i64>>, AdapterError> {
        let Some(OtherTensor { name, shape, range, .. }) = self.shortlist.take() else { return Ok(None) };
        let (words, _) = self.bytes.get(range).unwrap_or_default().as_chunks();
        match shape.as_slice() {
            &[count] if count == words.len() => {
                Ok(Some(words.iter().map(|&word| i64::from_le_bytes(word)).collect()))
            }
            _ => {
                let expected = [1, words.len()];
                Err(AdapterError::Shape { path: self.path.clone(), tensor: name, expected, found: shape })
            }
        }
    }

    /// Why each tensor that nothing has taken is refused.
    pub(super) fn unknown(&self) -> impl Iterator<Item = AdapterError> {
        let shortlist = self.shortlist.iter().map(|other| &other.name);
        let names = self.rest.values().map(|(name, _)| name).chain(shortlist);
        names.map(|name| AdapterError::unknown(&self.path, name))
    }
}
