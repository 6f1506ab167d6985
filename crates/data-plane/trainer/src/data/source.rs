//! Files of training data, each read as lines of JSON: JSON lines, arrays of JSON, tables of Parquet and
//! Arrow, and text compressed by gzip.

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader, Read},
    path::{Path, PathBuf},
};

use flate2::read::MultiGzDecoder;

use super::{fault::DataError, json_array::JsonArray, table};

/// Maximum number of files.
const MAX_FILES: usize = 4096;

/// Maximum depth of directories below a data directory.
const MAX_DEPTH: usize = 4;

/// Ends of the names of data files.
const EXTENSIONS: [&str; 6] = [".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet", ".arrow"];

/// Words in the names of files and directories that hold other splits than that for training, as the library
/// `datasets` knows them.
const OTHER_SPLITS: [&str; 6] = ["test", "testing", "eval", "validation", "valid", "dev"];

/// Returns the files that `paths` name: files, directories with data files, and patterns such as
/// `data/*.jsonl`. The files of a directory or pattern are in the order of their names.
///
/// # Errors
/// Fails if a path names no file, or if there are too many files.
pub fn find_files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, DataError> {
    let mut found = Vec::new();
    for path in paths {
        let before = found.len();
        if path.is_dir() {
            directory(path, &mut found)?;
        } else if path.exists() {
            found.push(path.clone());
        } else {
            pattern(path, &mut found)?;
        }
        if found.len() == before {
            return Err(DataError::NoFiles { path: path.clone() });
        }
        if found.len() > MAX_FILES {
            return Err(DataError::TooManyFiles { limit: MAX_FILES });
        }
    }
    Ok(found)
}

fn pattern(path: &Path, found: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let missing = || DataError::Read { path: path.to_owned(), source: io::ErrorKind::NotFound.into() };
    let text = path.to_str().filter(|text| text.contains(['*', '?', '['])).ok_or_else(missing)?;
    let matches = glob::glob(text).map_err(|error| DataError::Read {
        path: path.to_owned(),
        source: io::Error::new(io::ErrorKind::InvalidInput, error.msg),
    })?;
    // Entries that cannot be read are none of the files that the pattern names.
    found.extend(matches.flatten().filter(|path| path.is_file()).take(MAX_FILES + 1));
    Ok(())
}

/// Finds the files of the training split in a directory, which may be a copy of a data set from the hub or
/// written by `save_to_disk`.
fn directory(path: &Path, found: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let mut all = Vec::new();
    below(path, MAX_DEPTH, &mut all).map_err(|source| DataError::Read { path: path.to_owned(), source })?;
    all.sort_unstable();
    let is_other = |file: &PathBuf| {
        let inside = file.strip_prefix(path).unwrap_or(file).to_string_lossy().to_lowercase();
        inside.split(|letter: char| !letter.is_alphanumeric()).any(|word| OTHER_SPLITS.contains(&word))
    };
    found.extend(all.into_iter().filter(|file| !is_other(file)));
    Ok(())
}

fn below(path: &Path, depth: usize, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in path.read_dir()? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        // Caches and the descriptions that `datasets` writes beside the data are no data.
        if name.starts_with('.')
            || ["dataset_info.json", "state.json", "dataset_dict.json"].contains(&name.as_str())
        {
            continue;
        }
        if path.is_dir() {
            if depth > 0 {
                below(&path, depth - 1, found)?;
            }
        } else if EXTENSIONS.iter().any(|extension| name.ends_with(extension)) && found.len() <= MAX_FILES {
            found.push(path);
        }
    }
    Ok(())
}

/// A file's lines of JSON, before they are read.
pub(super) struct DataSource<'a> {
    /// Path of the file for faults, if there are several files.
    pub(super) name: Option<String>,
    /// Path of the file; `None` for a stream.
    pub(super) path: Option<PathBuf>,
    pub(super) lines: Box<dyn Read + 'a>,
}

/// Opens a file as lines of JSON.
///
/// # Errors
/// Fails if the file cannot be opened or is not of the format that its name says.
pub(super) fn open(path: &Path) -> io::Result<Box<dyn Read>> {
    let file = File::open(path)?;
    let name = path.to_string_lossy();
    if name.ends_with(".parquet") {
        return table::parquet(file);
    }
    if name.ends_with(".arrow") {
        return table::arrow(file);
    }
    if name.ends_with(".gz") {
        return json(BufReader::new(MultiGzDecoder::new(file)));
    }
    // Files that tenants upload have no such name: a small table may unpack to more memory than there is.
    let mut file = BufReader::new(file);
    if file.fill_buf()?.starts_with(b"PAR1") {
        let problem = "a Parquet file has a name that ends with .parquet, and jobs take lines of JSON";
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    json(file)
}

/// Returns lines as they are, and the items of an array as lines.
fn json(mut text: BufReader<impl Read + 'static>) -> io::Result<Box<dyn Read>> {
    let begin = text.fill_buf()?;
    let begin = begin.strip_prefix("\u{feff}".as_bytes()).unwrap_or(begin);
    let is_array = begin.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
    Ok(if is_array { Box::new(JsonArray::new(text)) } else { Box::new(text) })
}
