//! The weight files of a Hugging Face directory, mapped and checked: a single one, or a sharded set of them.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use model_files::weight_files::weight_files;
use safetensors::Dtype;
use shmproto::file::MappedFile;

use crate::sources::safetensors::{
    error::SafetensorsSourceError,
    file::{OtherTensor, StoredTensor, TensorTable, read_all_contents},
};

/// Bytes of a weight file's header.
const MAX_HEADER_BYTES: u64 = 1 << 24;

/// What is done about tensors of types that are not computed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OtherTypes {
    /// They make the directory unusable.
    Refused,
    /// They are listed: masks and position numbers, which nobody needs, and the words of quantized layers.
    Listed,
}

/// A weight file.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) map: MappedFile,
    /// Where the tensors' data begin.
    pub(crate) header_bytes: usize,
}

/// All weight files of a directory and what is in them.
#[derive(Debug)]
pub(crate) struct Shards {
    directory: PathBuf,
    files: Vec<Shard>,
    /// Which shard a tensor is in, and where.
    tensors: BTreeMap<String, (usize, StoredTensor)>,
    others: BTreeMap<String, (usize, OtherTensor)>,
}

impl Shards {
    /// Maps the weight files in `directory`.
    ///
    /// # Errors
    /// If one is missing or broken, or a tensor is in two of them.
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
        let TensorTable { tensors, others, header_bytes } = read_all_contents(&map, MAX_HEADER_BYTES)
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

    /// The files, in the order of their names.
    pub(crate) fn files(&self) -> &[Shard] {
        &self.files
    }

    /// The tensors' names in ascending order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensors of other types, if they were not refused.
    pub(crate) fn others(&self) -> impl Iterator<Item = &OtherTensor> {
        self.others.values().map(|(_, other)| other)
    }

    /// Shape and data of a tensor of 32-bit integers, if they were not refused.
    pub(crate) fn integers(&self, name: &str) -> Option<(&[usize], &[u8])> {
        let (shard, other) = self.others.get(name)?;
        let bytes = self.files.get(*shard)?.map.get(other.range.clone())?;
        (other.kind == Dtype::I32).then_some((&other.shape, bytes))
    }

    /// What is known of a tensor without reading it.
    pub(crate) fn tensor(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.get(name).map(|(_, stored)| stored)
    }

    /// Which of [`files`](Self::files) a tensor is in.
    pub(crate) fn file_of(&self, name: &str) -> Option<usize> {
        self.tensors.get(name).map(|(shard, _)| *shard)
    }

    /// A tensor's data.
    pub(crate) fn bytes(&self, name: &str) -> Option<&[u8]> {
        let (shard, stored) = self.tensors.get(name)?;
        self.files.get(*shard)?.map.get(stored.range.clone())
    }

    /// Gives back the memory that caches a tensor; see [`MappedFile::release`].
    pub(crate) fn release(&self, name: &str) {
        let number = self.tensors.get(name).map(|(shard, stored)| (shard, &stored.range));
        let other = self.others.get(name).map(|(shard, other)| (shard, &other.range));
        if let Some((shard, range)) = number.or(other) {
            self.files[*shard].map.release(range.clone());
        }
    }

    /// False if a file was written to since it was opened.
    pub(crate) fn unchanged(&self) -> bool {
        self.files.iter().all(|file| file.map.unchanged())
    }
}
