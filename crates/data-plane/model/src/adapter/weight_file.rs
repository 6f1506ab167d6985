//! The tensors of an `adapter_model.safetensors`, taken out one by one.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use safetensors::Dtype;

use super::{
    error::AdapterError,
    limits::{MAX_HEADER_BYTES, MAX_HEADER_SIGNS},
    matrix::{StoredMatrix, decode},
    selection::{Selected, TrainedLayer},
    tensor_names::{TensorName, TensorNameScheme},
    warning::AdapterWarning,
};
use crate::{
    shape::{config::ModelConfig, source::Target},
    sources::{
        fused::Fused,
        hf_names::{EMBEDDING, fused_module_name, module_name},
        safetensors::file::{HeaderLimits, OtherTensor, StoredTensor, TensorTable, read_all_contents},
    },
};

const HEADER_LIMITS: HeaderLimits = HeaderLimits { bytes: MAX_HEADER_BYTES, signs: MAX_HEADER_SIGNS };

const SHORTLIST: &str = "draft.shortlist";

const PARTED: [&str; 5] = ["lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector", "ia3_l"];

/// Tensor without a dimension for the layer's outputs, which all parts of a fused layer share.
const WHOLE: &str = "lora_A.weight";

/// End of the names of tensors with positions in other tensors, and their types.
const INDICES: &str = "_indices";
const INTEGERS: [Dtype; 4] = [Dtype::U8, Dtype::I16, Dtype::I32, Dtype::I64];

/// Suffixes of base weights that PEFT copies: in a plain model, in a LoRA layer, and in a saved module.
const COPIES: [&str; 3] = ["weight", "base_layer.weight", "original_module.weight"];

pub(super) type TensorEntry = (String, StoredTensor);

/// The tensors that are not taken yet, by their names as [`TensorName`] translates them.
pub(super) struct WeightFile<'a> {
    path: PathBuf,
    bytes: &'a [u8],
    rest: BTreeMap<String, TensorEntry>,
    spelling: TensorNameScheme,
    /// Name of a tensor that fits no layer of a language model, if any.
    foreign: Option<String>,
    /// Tensors of integers that are not taken yet, by their translated names.
    integers: BTreeMap<String, OtherTensor>,
}

impl<'a> WeightFile<'a> {
    pub(super) fn parse(path: &Path, bytes: &'a [u8]) -> Result<Self, AdapterError> {
        let failed = |source| AdapterError::Weights { path: path.to_path_buf(), source };
        let TensorTable { tensors, others, .. } = read_all_contents(bytes, HEADER_LIMITS).map_err(failed)?;
        let (integers, others): (Vec<_>, Vec<_>) = others.into_iter().partition(has_integers);
        if let Some(other) = others.into_iter().next() {
            return Err(failed(other.into()));
        }
        let integers = integers.into_iter().map(|other| (TensorName::read(&other.name).key, other)).collect();
        let path = path.to_path_buf();
        let (rest, spelling) = (BTreeMap::new(), TensorNameScheme::default());
        let mut file = Self { path, bytes, rest, spelling, foreign: None, integers };
        for (name, stored) in tensors {
            file.add(name, stored)?;
        }
        Ok(file)
    }

    fn add(&mut self, name: String, stored: StoredTensor) -> Result<(), AdapterError> {
        let read = TensorName::read(&name);
        if !self.spelling.add(&read) {
            return Err(AdapterError::MixedNames { path: self.path.clone(), tensor: name });
        }
        if !read.is_known() && self.foreign.is_none() {
            self.foreign = Some(name.clone());
        }
        self.insert(read.key, (name, stored))
    }

    fn insert(&mut self, key: String, named: TensorEntry) -> Result<(), AdapterError> {
        let tensor = named.0.clone();
        match self.rest.insert(key, named) {
            None => Ok(()),
            Some((other, _)) => Err(AdapterError::Duplicate { path: self.path.clone(), tensor, other }),
        }
    }

    pub(super) fn spelling(&self) -> &TensorNameScheme {
        &self.spelling
    }

    /// Prepares the tensors for a base of this shape; see [`parted`](Self::parted). Factors of a head that is
    /// tied to the embedding may carry the embedding's name, as Tinker's converter writes them. The shapes
    /// tell such factors from those of the embedding.
    ///
    /// # Errors
    /// Two tensors belong to one layer, or no tensor belongs to a layer of a language model.
    pub(super) fn of_base(mut self, model: &ModelConfig) -> Result<Self, AdapterError> {
        let is_any_known = self.rest.keys().any(|key| TensorName::read(key).is_known());
        let adapts = |key: &String| PARTED.iter().any(|part| key.ends_with(&format!(".{part}")));
        if let Some(tensor) = self.foreign.clone().filter(|_| !is_any_known && self.rest.keys().any(adapts)) {
            return Err(AdapterError::ForeignNames { path: self.path, tensor });
        }
        let [a, b] = ["A", "B"].map(|part| format!("{EMBEDDING}.lora_{part}.weight"));
        let shape = |key: &str| self.rest.get(key).map(|(_, stored)| stored.shape.clone());
        if let (true, Some([rank, hidden]), Some([vocab, ranks])) =
            (model.tied_head, shape(&a).as_deref(), shape(&b).as_deref())
            && rank == ranks
            && [*vocab, *hidden] == [model.vocab_size, model.hidden_size]
        {
            for (key, part) in [(a, "A"), (b, "B")] {
                if let Some(named) = self.rest.remove(&key) {
                    self.insert(format!("{}.lora_{part}.weight", module_name(0, Target::LmHead)), named)?;
                }
            }
            self.spelling.head_is_at_embedding();
        }
        self.parted(model)
    }

    /// Splits the tensors of fused linear layers into those of the single layers.
    fn parted(mut self, model: &ModelConfig) -> Result<Self, AdapterError> {
        for layer in 0..model.layers {
            self.part(model, layer, &[Target::Q, Target::K, Target::V])?;
            self.part(model, layer, &[Target::Gate, Target::Up])?;
        }
        Ok(self)
    }

    /// Replaces the tensors of a fused layer by those of `targets`. Tensors with a dimension for outputs are
    /// cut to each target's rows; the others are shared.
    fn part(&mut self, model: &ModelConfig, layer: usize, targets: &[Target]) -> Result<(), AdapterError> {
        let fused = |target| Some((target, Fused::of(model, target)?));
        let parts: Vec<(Target, Fused)> = targets.iter().copied().filter_map(fused).collect();
        let Some((_, first)) = parts.first() else { return Ok(()) };
        let whole = fused_module_name(layer, first.group);
        for tensor in PARTED {
            let Some((name, stored)) = self.rest.remove(&format!("{whole}.{tensor}")) else { continue };
            for (target, part) in &parts {
                let mut stored = stored.clone();
                if tensor != WHOLE
                    && let Some(rows) = stored.shape.first_mut()
                    && *rows == part.all_rows
                {
                    let bytes = part.range_in(stored.range.len());
                    *rows = part.rows.len();
                    stored.range = stored.range.start + bytes.start..stored.range.start + bytes.end;
                }
                let own = format!("{}.{tensor}", module_name(layer, *target));
                self.insert(own, (name.clone(), stored))?;
            }
        }
        Ok(())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the names of layers with low-rank factors that are not taken yet.
    pub(super) fn adapted(&self) -> Vec<String> {
        let names = self.rest.keys().filter_map(|name| name.strip_suffix(".lora_A.weight"));
        names.map(str::to_owned).collect()
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.rest.contains_key(name)
    }

    /// Returns the names of tensors that are not taken yet.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.rest.keys().map(String::as_str)
    }

    pub(super) fn take(&mut self, name: &str) -> Option<TensorEntry> {
        self.rest.remove(name)
    }

    /// Takes the tensor `name`; its absence is an error.
    pub(super) fn required(&mut self, name: &str) -> Result<TensorEntry, AdapterError> {
        self.rest.remove(name).ok_or_else(|| self.missing(name.to_owned()))
    }

    fn missing(&self, tensor: String) -> AdapterError {
        AdapterError::Missing { path: self.path.clone(), tensor, foreign: self.foreign.clone() }
    }

    /// Takes the unused copies of the base's token embedding and head.
    ///
    /// # Errors
    /// A copy has another number of rows, so the adapter was trained on another vocabulary.
    pub(super) fn take_copies(&mut self, model: &ModelConfig) -> Result<Vec<AdapterWarning>, AdapterError> {
        let (rows, hidden) = (model.vocab_size, model.hidden_size);
        let mut notes = Vec::new();
        for module in [EMBEDDING, &module_name(0, Target::LmHead)] {
            for part in COPIES {
                let Some((tensor, stored)) = self.take(&format!("{module}.{part}")) else { continue };
                let path = self.path.clone();
                match *stored.shape {
                    [found, width] if [found, width] == [rows, hidden] => {
                        notes.push(AdapterWarning::BaseCopy { tensor });
                    }
                    [found, width] if width == hidden => {
                        return Err(AdapterError::ResizedVocabulary { path, tensor, rows, found });
                    }
                    _ => {
                        return Err(self.shape(tensor, &[rows, hidden], stored.shape));
                    }
                }
            }
        }
        Ok(notes)
    }

    /// Takes the tensors of a linear layer: all must exist if it is `selected`, and none otherwise.
    pub(super) fn take_all<const N: usize>(
        &mut self,
        module: &str,
        names: [String; N],
        selected: Selected,
    ) -> Result<Option<[TensorEntry; N]>, AdapterError> {
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
            (_, Some(tensor)) => Err(self.missing(tensor)),
            (Selected::No, None) => {
                Err(AdapterError::NotTargeted { path: self.path.clone(), module: module.to_owned() })
            }
            (Selected::Yes, None) => Ok(taken.try_into().ok()),
        }
    }

    /// Returns the contents of a tensor whose shape must be `expected`.
    pub(super) fn matrix<const N: usize>(
        &self,
        (name, stored): TensorEntry,
        expected: [usize; N],
    ) -> Result<StoredMatrix<'a>, AdapterError> {
        let StoredTensor { kind, shape, range } = stored;
        match self.bytes.get(range) {
            Some(bytes) if shape == expected => Ok(StoredMatrix { name, kind, bytes: bytes.into() }),
            _ => Err(self.shape(name, &expected, shape)),
        }
    }

    /// Returns the contents of a one-dimensional tensor with `expected` elements.
    pub(super) fn vector(
        &self,
        (name, stored): TensorEntry,
        expected: usize,
    ) -> Result<StoredMatrix<'a>, AdapterError> {
        if stored.shape.as_slice() == [expected] {
            let flat = StoredTensor { shape: vec![1, expected], ..stored };
            return self.matrix((name, flat), [1, expected]);
        }
        Err(self.shape(name, &[1, expected], stored.shape))
    }

    /// Takes the tensors of a layer in the trained model: all must exist if it is selected, and none
    /// otherwise.
    pub(super) fn take_layer<const N: usize>(
        &mut self,
        layer: &TrainedLayer,
        parts: [&str; N],
    ) -> Result<Option<[TensorEntry; N]>, AdapterError> {
        self.take_all(&layer.name, parts.map(|part| format!("{}.{part}", layer.name)), layer.selected)
    }

    /// Decodes a tensor of the shape `expected` after a check that all values are finite.
    pub(super) fn numbers(
        &self,
        (name, stored): TensorEntry,
        expected: &[usize],
    ) -> Result<Vec<f32>, AdapterError> {
        let StoredTensor { kind, shape, range } = stored;
        match self.bytes.get(range) {
            Some(bytes) if shape == expected => {
                decode(&self.path, &StoredMatrix { name, kind, bytes: bytes.into() })
            }
            _ => Err(self.shape(name, expected, shape)),
        }
    }

    fn shape(&self, tensor: String, expected: &[usize], found: Vec<usize>) -> AdapterError {
        AdapterError::Shape { path: self.path.clone(), tensor, expected: expected.to_vec(), found }
    }

    /// Takes a tensor of integers, whose shape must be `expected`.
    pub(super) fn take_integers(
        &mut self,
        name: &str,
        expected: &[usize],
    ) -> Result<Option<Vec<i64>>, AdapterError> {
        let Some(OtherTensor { name, kind, shape, range }) = self.integers.remove(name) else {
            return Ok(None);
        };
        if shape != expected {
            return Err(self.shape(name, expected, shape));
        }
        Ok(Some(integers(kind, self.bytes.get(range).unwrap_or_default())))
    }

    /// Takes the list of tokens that a draft adapter predicts.
    pub(super) fn take_shortlist(&mut self) -> Result<Option<Vec<i64>>, AdapterError> {
        let Some(entries) = self.integers.get(SHORTLIST).map(|other| other.shape.iter().product()) else {
            return Ok(None);
        };
        self.take_integers(SHORTLIST, &[entries])
    }

    /// Returns an error for each tensor that is not taken.
    pub(super) fn unknown(&self) -> impl Iterator<Item = AdapterError> {
        let names = self.rest.values().map(|(name, _)| name).chain(self.integers.values().map(|it| &it.name));
        names.map(|name| AdapterError::unknown(&self.path, name))
    }
}

/// Whether the tensor may hold integers, and does.
fn has_integers(tensor: &OtherTensor) -> bool {
    let is_shortlist = tensor.name == SHORTLIST && tensor.kind == Dtype::I64;
    is_shortlist || tensor.name.ends_with(INDICES) && INTEGERS.contains(&tensor.kind)
}

fn integers(kind: Dtype, bytes: &[u8]) -> Vec<i64> {
    match kind {
        Dtype::U8 => bytes.iter().map(|&byte| byte.into()).collect(),
        Dtype::I16 => bytes.as_chunks().0.iter().map(|&half| i16::from_le_bytes(half).into()).collect(),
        Dtype::I32 => bytes.as_chunks().0.iter().map(|&word| i32::from_le_bytes(word).into()).collect(),
        Dtype::I64 => bytes.as_chunks().0.iter().map(|&long| i64::from_le_bytes(long)).collect(),
        _ => unreachable!("tensors of other types are refused before they are decoded"),
    }
}
