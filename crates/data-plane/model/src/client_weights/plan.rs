//! Which parts of a model's files clients are given: never a byte of a linear layer's own.

use std::{
    collections::BTreeSet,
    fs::{File, Metadata},
    io, iter,
    ops::Range,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
};

use model_files::model_files::{CONFIG_FILE, INDEX_FILE, ModelFiles};
use shmproto::file::{MappedFile, open_regular};

use super::{ClientWeightsFile, MAX_RANGES};
use crate::{
    shape::{
        config::ModelConfig,
        layout::{norm_tensors, router},
        source::{TensorId, WeightSource},
    },
    site_model::{LinearFiles, SiteModelError},
    sources::{
        gguf::{self, GgufSource},
        open::OpenError,
        safetensors::{SafetensorsSource, shards::Shards},
    },
};

/// Files of a model directory that are given out whole, if they are there.
const WHOLE: [&str; 8] = [
    CONFIG_FILE,
    INDEX_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Bytes of a file that is given out whole; tokenizers are the largest.
const MAX_WHOLE_BYTES: u64 = 1 << 28;

/// Why clients cannot be given what they need.
#[derive(Debug, thiserror::Error)]
pub enum ClientWeightsError {
    /// There is no model, or one that is broken.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The linear layers cannot be told from the rest.
    #[error(transparent)]
    Sites(#[from] SiteModelError),
    /// A file could not be opened.
    #[error("cannot open {}: {source}; make it readable or remove it", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is larger than its kind ever is.
    #[error("{} has {bytes} bytes, and {MAX_WHOLE_BYTES} are given out; fetch the model again", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// How large it is.
        bytes: u64,
    },
    /// The parts are too many to be listed.
    #[error("{} would be given out in {found} parts, and the limit is {MAX_RANGES}; convert the model again", path.display())]
    TooManyRanges {
        /// The file.
        path: PathBuf,
        /// How many there are.
        found: usize,
    },
    /// A file has a name that cannot be told to clients.
    #[error("{} has no name in UTF-8; rename it", path.display())]
    Name {
        /// The file.
        path: PathBuf,
    },
}

/// Why a part of a file is not given out.
#[derive(Debug, thiserror::Error)]
pub enum ClientWeightsReadError {
    /// There is no such file.
    #[error("there is no file number {file}; there are {files}")]
    NoSuchFile {
        /// What was asked for.
        file: usize,
        /// How many there are.
        files: usize,
    },
    /// The part is not one of those that are given out.
    #[error("byte {offset} of `{name}` is not given out; ask for the ranges of the catalog")]
    NotPlanned {
        /// The file.
        name: String,
        /// The first byte asked for.
        offset: u64,
    },
    /// The file is not what it was when the model was loaded.
    #[error(
        "`{name}` was written to since it was opened; restart the executor, and replace model files by renaming"
    )]
    Changed {
        /// The file.
        name: String,
    },
    /// The file could not be read.
    #[error("cannot read `{name}`: {source}; see the executor's disk")]
    Read {
        /// The file.
        name: String,
        /// What the system said.
        source: io::Error,
    },
}

/// What clients are given of a model, and the open files to read it from.
///
/// Files that are replaced by renaming are read as they were. Nothing is mapped, so that a file that is cut short is an
/// error and not the end of the process.
#[derive(Debug)]
pub struct ClientWeightsPlan {
    files: Vec<ClientWeightsFile>,
    open: Vec<OpenFile>,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: File,
    stamp: Stamp,
}

/// What tells one state of a file from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    bytes: u64,
    modified: (i64, i64),
    inode: (u64, u64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            inode: (metadata.dev(), metadata.ino()),
        }
    }
}

impl ClientWeightsPlan {
    /// Plans what is given out of the model at `path`.
    ///
    /// # Errors
    /// If there is no model, or a file cannot be opened or is larger than its kind ever is.
    pub fn of(path: &Path) -> Result<Self, ClientWeightsError> {
        let mut plan = Self { files: Vec::new(), open: Vec::new() };
        match ModelFiles::at(path).map_err(OpenError::from)? {
            ModelFiles::Gguf(path) => plan.add_gguf(&path)?,
            ModelFiles::Directory(directory) => {
                for name in WHOLE {
                    plan.add_whole(&directory.join(name))?;
                }
                plan.add_safetensors(&directory)?;
            }
        }
        Ok(plan)
    }

    /// The files, in the order of their numbers.
    #[must_use]
    pub fn files(&self) -> &[ClientWeightsFile] {
        &self.files
    }

    /// Bytes that are given out, of all files.
    #[must_use]
    pub fn planned_bytes(&self) -> u64 {
        self.files.iter().map(ClientWeightsFile::planned_bytes).fold(0, u64::saturating_add)
    }

    /// True if the files at their paths are still those that were opened, as they were. Who plans before he reads the
    /// weights, and asks this afterwards, knows that both are of one model.
    #[must_use]
    pub fn is_current(&self) -> bool {
        let is_there = |open: &OpenFile| {
            std::fs::metadata(&open.path).is_ok_and(|metadata| Stamp::of(&metadata) == open.stamp)
        };
        self.open.iter().all(is_there)
    }

    /// At most `bytes` bytes of a file from `offset` on: less at the end of a range.
    ///
    /// # Errors
    /// If `offset` is in no range that is given out, or the file was written to since it was opened.
    pub fn read(&self, file: usize, offset: u64, bytes: u32) -> Result<Vec<u8>, ClientWeightsReadError> {
        let (Some(planned), Some(open)) = (self.files.get(file), self.open.get(file)) else {
            return Err(ClientWeightsReadError::NoSuchFile { file, files: self.files.len() });
        };
        let name = || planned.name.clone();
        let after = planned.ranges.partition_point(|range| range.end <= offset);
        let Some(range) = planned.ranges.get(after).filter(|range| range.contains(&offset)) else {
            return Err(ClientWeightsReadError::NotPlanned { name: name(), offset });
        };
        // What is there is at most what was asked for, which is 32 bits.
        let length = (range.end - offset).min(bytes.into()) as usize;
        let mut part = vec![0; length];
        let read = open.file.read_exact_at(&mut part, offset);
        // Asked after reading: what was read meanwhile may be of two models.
        match open.is_unchanged() {
            Ok(true) => {}
            Ok(false) => return Err(ClientWeightsReadError::Changed { name: name() }),
            Err(source) => return Err(ClientWeightsReadError::Read { name: name(), source }),
        }
        read.map(|()| part).map_err(|source| ClientWeightsReadError::Read { name: name(), source })
    }

    fn add_gguf(&mut self, path: &Path) -> Result<(), ClientWeightsError> {
        let source = GgufSource::open(path).map_err(OpenError::from)?;
        let file = source.file();
        let small = small_tensors(source.config()).map(gguf::tensor_name);
        let names = small.chain([gguf::ROPE_FACTORS, gguf::ROPE_SHORT_FACTORS].map(str::to_owned));
        let ranges = names.filter_map(|name| file.range(&name)).collect();
        let map = file.map().ok_or_else(|| unmapped(path))?;
        self.add_parts(map, file.header_bytes(), ranges)
    }

    fn add_safetensors(&mut self, directory: &Path) -> Result<(), ClientWeightsError> {
        match SafetensorsSource::open(directory) {
            Ok(source) => {
                let config = source.config();
                let names: BTreeSet<String> =
                    small_tensors(config).map(|id| source.place(id).tensor).collect();
                self.add_shards(source.shards(), |name| names.contains(name))
            }
            Err(error) => {
                let error = OpenError::from(error);
                if !error.is_of_configuration() {
                    return Err(error.into());
                }
                let files = LinearFiles::open(directory)?;
                let names: BTreeSet<&str> = files.rest().collect();
                self.add_shards(files.shards(), |name| names.contains(name))
            }
        }
    }

    fn add_shards(
        &mut self,
        shards: &Shards,
        given: impl Fn(&str) -> bool,
    ) -> Result<(), ClientWeightsError> {
        let names: Vec<&str> = shards.names().filter(|name| given(name)).collect();
        for (number, shard) in shards.files().iter().enumerate() {
            let here = names.iter().filter(|name| shards.file_of(name) == Some(number));
            let ranges = here.filter_map(|name| Some(shards.tensor(name)?.range.clone())).collect();
            self.add_parts(&shard.map, shard.header_bytes, ranges)?;
        }
        Ok(())
    }

    /// Adds a mapped file's first bytes and `ranges` of the rest.
    fn add_parts(
        &mut self,
        map: &MappedFile,
        header_bytes: usize,
        ranges: Vec<Range<usize>>,
    ) -> Result<(), ClientWeightsError> {
        let path = map.path();
        let read = |source| ClientWeightsError::Read { path: path.to_path_buf(), source };
        let file = map.file().try_clone().map_err(read)?;
        let ranges = joined(ranges.into_iter().chain(iter::once(0..header_bytes)).collect());
        if ranges.len() > MAX_RANGES {
            return Err(ClientWeightsError::TooManyRanges { path: path.to_path_buf(), found: ranges.len() });
        }
        // The map was made of the file as it is now, or the plan is worth nothing.
        if !map.unchanged() {
            return Err(read(io::Error::other("it was written to while it was opened")));
        }
        self.add(path, file, ranges)
    }

    fn add_whole(&mut self, path: &Path) -> Result<(), ClientWeightsError> {
        let read = |source| ClientWeightsError::Read { path: path.to_path_buf(), source };
        let file = match open_regular(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(read)?,
        };
        let bytes = file.metadata().map_err(read)?.len();
        if bytes > MAX_WHOLE_BYTES {
            return Err(ClientWeightsError::TooLarge { path: path.to_path_buf(), bytes });
        }
        let whole = (bytes > 0).then_some(0..bytes);
        self.add(path, file, whole.into_iter().collect())
    }

    fn add(&mut self, path: &Path, file: File, ranges: Vec<Range<u64>>) -> Result<(), ClientWeightsError> {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(|| ClientWeightsError::Name { path: path.to_path_buf() })?.to_owned();
        let metadata = file.metadata();
        let metadata =
            metadata.map_err(|source| ClientWeightsError::Read { path: path.to_path_buf(), source })?;
        let stamp = Stamp::of(&metadata);
        self.files.push(ClientWeightsFile { name, bytes: stamp.bytes, ranges });
        self.open.push(OpenFile { path: path.to_path_buf(), file, stamp });
        Ok(())
    }
}

impl OpenFile {
    fn is_unchanged(&self) -> io::Result<bool> {
        Ok(Stamp::of(&self.file.metadata()?) == self.stamp)
    }
}

/// The tensors of a known architecture that are no linear layers.
fn small_tensors(config: &ModelConfig) -> impl Iterator<Item = TensorId> {
    let of_layer = |layer| norm_tensors(config, layer).chain(router(config, layer));
    [TensorId::TokenEmbedding, TensorId::OutputNorm].into_iter().chain((0..config.layers).flat_map(of_layer))
}

/// `ranges` in ascending order, those that touch made one.
fn joined(mut ranges: Vec<Range<usize>>) -> Vec<Range<u64>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        let range = range.start as u64..range.end as u64;
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

fn unmapped(path: &Path) -> ClientWeightsError {
    let source = io::Error::other("it is not mapped");
    ClientWeightsError::Read { path: path.to_path_buf(), source }
}
