//! Selects the byte ranges of a model's files for clients. Of linear layers only the biases of keys are among
//! them, which a client subtracts before it stores keys.

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
        layout::{norm_tensors, router, router_bias, sinks},
        source::{Target, TensorId, WeightSource},
    },
    site_model::{LinearFiles, SiteModelError},
    sources::{
        gguf::{self, GgufSource},
        open::OpenError,
        safetensors::{SafetensorsSource, shards::Shards},
    },
};

/// Files of a model directory that are sent completely, if present.
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

/// Maximum bytes of a file that is sent completely; tokenizers are the largest.
const MAX_WHOLE_BYTES: u64 = 1 << 28;

/// Reasons why client weights cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum ClientWeightsError {
    /// The model is missing or broken.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The linear layers cannot be identified.
    #[error(transparent)]
    Sites(#[from] SiteModelError),
    /// A file could not be opened.
    #[error("cannot open {}: {source}; make it readable or remove it", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file is larger than the limit for its kind.
    #[error("{} has {bytes} bytes, and the limit is {MAX_WHOLE_BYTES}; fetch the model \
             again", path.display())]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
        /// Size of the file.
        bytes: u64,
    },
    /// The file has too many ranges for the list.
    #[error("{} would be sent in {found} parts, and the limit is {MAX_RANGES}; convert the model \
             again", path.display())]
    TooManyRanges {
        /// Path of the file.
        path: PathBuf,
        /// Number of ranges found.
        found: usize,
    },
    /// A file's name is not UTF-8, so clients cannot be told it.
    #[error("the name of {} is not UTF-8; rename it", path.display())]
    Name {
        /// Path of the file.
        path: PathBuf,
    },
}

/// Reasons why a part of a file is not sent.
#[derive(Debug, thiserror::Error)]
pub enum ClientWeightsReadError {
    /// The file number is out of range.
    #[error("there is no file number {file}; the model has {files} files")]
    NoSuchFile {
        /// Requested number of the file.
        file: usize,
        /// Number of files in the plan.
        files: usize,
    },
    /// The requested part is outside all planned ranges.
    #[error("byte {offset} of `{name}` is not served; request the ranges of the catalog")]
    NotPlanned {
        /// Name of the file.
        name: String,
        /// First byte of the request.
        offset: u64,
    },
    /// The file changed since the model was loaded.
    #[error(
        "`{name}` was written after it was opened; restart the executor, and replace model files by renaming"
    )]
    Changed {
        /// Name of the file.
        name: String,
    },
    /// The file could not be read.
    #[error("cannot read `{name}`: {source}; check the executor's disk")]
    Read {
        /// Name of the file.
        name: String,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// The client weights of a model, with open files to read them from.
///
/// Files that are replaced by renaming are still read in their old version. Nothing is mapped, so a truncated
/// file causes an error and does not end the process.
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

/// Metadata that identifies one state of a file.
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
    /// Plans the client weights of the model at `path`.
    ///
    /// # Errors
    /// The model is missing, or a file cannot be opened or is larger than the limit for its kind.
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

    /// Returns the files, in the order of their numbers.
    #[must_use]
    pub fn files(&self) -> &[ClientWeightsFile] {
        &self.files
    }

    /// Returns the bytes of all planned ranges.
    #[must_use]
    pub fn planned_bytes(&self) -> u64 {
        self.files.iter().map(ClientWeightsFile::planned_bytes).fold(0, u64::saturating_add)
    }

    /// True if the files at their paths are still the opened ones, unchanged. A caller that plans before it
    /// reads the weights, and checks this afterwards, knows that both belong to one model.
    #[must_use]
    pub fn is_current(&self) -> bool {
        let is_there = |open: &OpenFile| {
            std::fs::metadata(&open.path).is_ok_and(|metadata| Stamp::of(&metadata) == open.stamp)
        };
        self.open.iter().all(is_there)
    }

    /// Reads at most `bytes` bytes of a file from `offset` on, and fewer at the end of a range.
    ///
    /// # Errors
    /// `offset` is in no planned range, or the file changed since it was opened.
    pub fn read(&self, file: usize, offset: u64, bytes: u32) -> Result<Vec<u8>, ClientWeightsReadError> {
        let (Some(planned), Some(open)) = (self.files.get(file), self.open.get(file)) else {
            return Err(ClientWeightsReadError::NoSuchFile { file, files: self.files.len() });
        };
        let name = || planned.name.clone();
        let after = planned.ranges.partition_point(|range| range.end <= offset);
        let Some(range) = planned.ranges.get(after).filter(|range| range.contains(&offset)) else {
            return Err(ClientWeightsReadError::NotPlanned { name: name(), offset });
        };
        // The length is at most `bytes`, which has 32 bits.
        let length = (range.end - offset).min(bytes.into()) as usize;
        let mut part = vec![0; length];
        let read = open.file.read_exact_at(&mut part, offset);
        // The check follows the read, because a change during the read could mix two models.
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
        let small = small_tensors(source.config()).map(|id| gguf::tensor_name(source.config(), id));
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

    /// Adds a mapped file's first `header_bytes` bytes and `ranges` of the rest.
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
        // The map must show the current state of the file, or the plan would be invalid.
        if !map.unchanged() {
            return Err(read(io::Error::other("it was written while it was opened")));
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

/// Returns the tensors of a known architecture that are no linear layers.
fn small_tensors(config: &ModelConfig) -> impl Iterator<Item = TensorId> {
    let of_layer = |layer| {
        let key_bias = TensorId::Bias(layer, Target::K);
        let routing = router(config, layer).into_iter().chain(router_bias(config, layer));
        norm_tensors(config, layer).chain(sinks(config, layer)).chain(routing).chain([key_bias])
    };
    [TensorId::TokenEmbedding, TensorId::OutputNorm].into_iter().chain((0..config.layers).flat_map(of_layer))
}

/// Sorts `ranges` and joins touching ones.
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
