//! The tensors of an `adapter_model.safetensors`, taken out one by one.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::{error::AdapterError, limits::MAX_HEADER_BYTES, matrix::StoredMatrix, selection::Selected};
use crate::sources::safetensors::file::{StoredTensor, read_contents};

/// What PEFT puts before the names of the model it wraps.
const PREFIX: &str = "base_model.model.";

/// A tensor and what its file calls it.
pub(super) type Named = (String, StoredTensor);

/// The tensors of a weight file that nothing has taken yet, by their name without [`PREFIX`].
pub(super) struct WeightFile<'a> {
    path: PathBuf,
    bytes: &'a [u8],
    rest: BTreeMap<String, Named>,
}

impl<'a> WeightFile<'a> {
    pub(super) fn parse(path: &Path, bytes: &'a [u8]) -> Result<Self, AdapterError> {
        let contents = read_contents(bytes, MAX_HEADER_BYTES)
            .map_err(|source| AdapterError::Weights { path: path.to_path_buf(), source })?;
        let mut rest = BTreeMap::new();
        for (name, stored) in contents {
            let key = name.strip_prefix(PREFIX).unwrap_or(&name).to_owned();
            if rest.insert(key, (name.clone(), stored)).is_some() {
                return Err(AdapterError::Duplicate { path: path.to_path_buf(), tensor: name });
            }
        }
        Ok(Self { path: path.to_path_buf(), bytes, rest })
    }

    /// The file, for messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the tensor of this name, if there is one.
    pub(super) fn take(&mut self, name: &str) -> Option<Named> {
        self.rest.remove(name)
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

    /// Why each tensor that nothing has taken is refused.
    pub(super) fn unknown(&self) -> impl Iterator<Item = AdapterError> {
        self.rest.values().map(|(name, _)| {
            let (path, tensor) = (self.path.clone(), name.escape_debug().to_string());
            if name.ends_with(".base_layer.weight") {
                AdapterError::BaseCopy { path, tensor }
            } else {
                AdapterError::UnknownTensor { path, tensor }
            }
        })
    }
}
