//! The weight files of a Hugging Face directory, mapped and checked: a single file or several shards.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use model_files::{bounded_json::MAX_SIGNS, weight_files::weight_files};
use safetensors::Dtype;
use shmproto::file::MappedFile;

use crate::sources::safetensors::{
    error::SafetensorsSourceError,
    file::{HeaderLimits, OtherTensor, StoredTensor, TensorTable, read_all_contents},
};

const HEADER_LIMITS: HeaderLimits = HeaderLimits { bytes: 1 << 24, signs: MAX_SIGNS };

/// Treatment of tensors with element types without arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OtherTypes {
    Refused,
    /// Such tensors are listed: unneeded masks and position numbers, and the words of quantized layers.
    Listed,
}

#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) map: MappedFile,
    /// Offset of the first tensor's data.
    pub(crate) header_bytes: usize,
}

#[derive(Debug)]
pub(crate) struct Shards {
    directory: PathBuf,
    files: Vec<Shard>,
    /// Shard number and place of each tensor.
    tensors: BTreeMap<String, (usize, StoredTensor)>,
    others: BTreeMap<String, (usize, OtherTensor)>,
}

impl Shards {
    /// Maps the weight files in `directory`.
    ///
    /// # Errors
    /// A file is missing or broken, or two files have the same tensor.
    pub(crate) fn open(directory: &Path, types: OtherTypes) -> Result<Self, SafetensorsSourceError> {
        let mut shards = Self {
            directory: directory.to_path_buf(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
            others: BTreeMap::new(),
        };
        for file in weight_files(directory)? {
            shards.add(&directory.join(file), types)?;
        }
        Ok(shards)
    }

    fn add(&mut self, path: &Path, types: OtherTypes) -> Result<(), SafetensorsSourceError> {
        let map = MappedFile::open(path)
            .map_err(|source| SafetensorsSourceError::Read { path: path.to_path_buf(), source })?;
        let TensorTable { tensors, others, header_bytes } = read_all_contents(&map, HEADER_LIMITS)
            .map_err(|source| SafetensorsSourceError::Weights { path: path.to_path_buf(), source })?;
        if let Some(other) = others.first().filter(|_| types == OtherTypes::Refused) {
            let (path, source) = (path.to_path_buf(), other.clone().into());
            return Err(SafetensorsSourceError::Weights { path, source });
        }
        let shard = self.files.len();
        self.files.push(Shard { map, header_bytes });
        let twice = |tensor| SafetensorsSourceError::Duplicate { path: self.directory.clone(), tensor };
        for (name, stored) in tensors {
            if self.tensors.insert(name.clone(), (shard, stored)).is_some() {
                return Err(twice(name));
            }
        }
        for other in others {
            if let Some((_, other)) = self.others.insert(other.name.clone(), (shard, other)) {
                return Err(twice(other.name));
            }
        }
        Ok(())
    }

    pub(crate) fn files(&self) -> &[Shard] {
        &self.files
    }

    /// Returns the tensors' names in ascending order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the tensors of other element types, if they are listed.
    pub(crate) fn others(&self) -> impl Iterator<Item = &OtherTensor> {
        self.others.values().map(|(_, other)| other)
    }

    /// Returns shape and data of a 32-bit integer tensor, if such tensors are listed.
    pub(crate) fn integers(&self, name: &str) -> Option<(&[usize], &[u8])> {
        let (shard, other) = self.others.get(name)?;
        let bytes = self.files.get(*shard)?.map.get(other.range.clone())?;
        (other.kind == Dtype::I32).then_some((&other.shape, bytes))
    }

    /// Returns shape and data of a tensor of bytes, if such tensors are listed.
    pub(crate) fn octets(&self, name: &str) -> Option<(&[usize], &[u8])> {
        let (shard, other) = self.others.get(name)?;
        let bytes = self.files.get(*shard)?.map.get(other.range.clone())?;
        (other.kind == Dtype::U8).then_some((&other.shape, bytes))
    }

    pub(crate) fn tensor(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.get(name).map(|(_, stored)| stored)
    }

    /// Returns the index in [`files`](Self::files) of a tensor's file.
    pub(crate) fn file_of(&self, name: &str) -> Option<usize> {
        self.tensors.get(name).map(|(shard, _)| *shard)
    }

    pub(crate) fn bytes(&self, name: &str) -> Option<&[u8]> {
        let (shard, stored) = self.tensors.get(name)?;
        self.files.get(*shard)?.map.get(stored.range.clone())
    }

    /// Releases memory that caches a tensor; see [`MappedFile::release`].
    pub(crate) fn release(&self, name: &str) {
        let number = self.tensors.get(name).map(|(shard, stored)| (shard, &stored.range));
        let other = self.others.get(name).map(|(shard, other)| (shard, &other.range));
        if let Some((shard, range)) = number.or(other) {
            self.files[*shard].map.release(range.clone());
        }
    }

    /// Returns false if a file changed since it was opened.
    pub(crate) fn unchanged(&self) -> bool {
        self.files.iter().all(|file| file.map.unchanged())
    }
}
