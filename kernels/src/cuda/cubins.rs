//! Machine code of the kernels for one GPU architecture, which release packages carry beside the programs.
//!
//! `scripts/cuda-cubins` makes a file `cubins/sm_90.cubins` for each architecture from the PTX inside the
//! programs. A device of exactly that architecture loads the file, so that the driver compiles nothing. For
//! any other device, and for a file that is damaged or made from other PTX, the driver compiles the PTX.
//!
//! # Format
//!
//! ```text
//! holobiont cubins 1 sm_90
//! gemv SHA256-OF-THE-PTX SHA256-OF-THE-CODE BYTES-OF-THE-CODE
//! lora ...
//!                                  an empty line, then the code of every kernel file in this order
//! ```

use std::{
    collections::HashMap,
    env, fs, io,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

/// Folder of the files, beside the program.
const FOLDER: &str = "cubins";

/// Start of the first line; the number is that of the format.
const MAGIC: &str = "holobiont cubins 1";

/// Maximum bytes of a file. The files have about 3 MB.
const MAX_BYTES: u64 = 256 << 20;

/// Reason why machine code beside the program is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CubinError {
    /// The file exists but cannot be read.
    #[error("{path} cannot be read: {reason}")]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Description from the operating system.
        reason: String,
    },
    /// The file is cut off, or is no file of `scripts/cuda-cubins`.
    #[error("{path} is not a complete file of machine code for {architecture}")]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Architecture that the device has, for example `sm_90`.
        architecture: String,
    },
    /// The file was made from the kernels of another version of the programs.
    #[error("{path} belongs to another version: its `{module}` was made from other PTX")]
    OtherVersion {
        /// Path of the file.
        path: PathBuf,
        /// Name of the kernel source, without its extension.
        module: String,
    },
    /// The code differs from its hash.
    #[error("{path} is damaged: the code of `{module}` differs from its hash")]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Name of the kernel source, without its extension.
        module: String,
    },
    /// The driver refuses the code.
    #[error("the driver refuses the machine code of `{module}`: {reason}")]
    Refused {
        /// Name of the kernel source, without its extension.
        module: &'static str,
        /// Description from the driver.
        reason: String,
    },
}

/// Source of the machine code that a device runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KernelCode {
    /// The driver compiled the PTX of the program, or found the result in its cache.
    Ptx,
    /// The file at this path held the machine code.
    Cubins(PathBuf),
    /// The driver compiled PTX because of this fault of a file.
    PtxInstead(CubinError),
}

/// Machine code of every kernel file, checked against its hashes and the program's PTX.
#[derive(Debug)]
pub(super) struct Cubins {
    pub(super) path: PathBuf,
    images: HashMap<&'static str, Vec<u8>>,
}

/// Returns the folder in which a package puts the files, whether it exists or not.
pub(super) fn folder() -> Option<PathBuf> {
    Some(env::current_exe().ok()?.parent()?.join(FOLDER))
}

impl Cubins {
    /// Reads the file for a device of this compute capability, or returns `None` if there is none.
    pub(super) fn read(
        folder: &Path,
        (major, minor): (u32, u32),
        modules: &[(&'static str, &'static str)],
    ) -> Result<Option<Self>, CubinError> {
        let architecture = format!("sm_{major}{minor}");
        let path = folder.join(format!("{architecture}.cubins"));
        let bytes = match read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(CubinError::Unreadable { path, reason: error.to_string() }),
        };
        let Some(entries) = parse(&bytes, &architecture) else {
            return Err(CubinError::Malformed { path, architecture });
        };
        let mut images = HashMap::new();
        for &(module, ptx) in modules {
            let entry = entries.get(module).filter(|entry| entry.ptx == hash(ptx.as_bytes()));
            let Some(entry) = entry else {
                return Err(CubinError::OtherVersion { path, module: module.to_owned() });
            };
            if entry.code != hash(entry.image) {
                return Err(CubinError::Damaged { path, module: module.to_owned() });
            }
            // The driver takes what is no machine code for text, which must end in a zero.
            images.insert(module, [entry.image, &[0]].concat());
        }
        Ok(Some(Self { path, images }))
    }

    /// Returns the code of kernel file `module`, behind which a zero stands.
    pub(super) fn image(&self, module: &str) -> Option<&[u8]> {
        self.images.get(module).map(Vec::as_slice)
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let bytes = fs::metadata(path)?.len();
    if bytes > MAX_BYTES {
        return Err(io::Error::other(format!("{bytes} bytes are more than {MAX_BYTES}")));
    }
    fs::read(path)
}

struct Entry<'a> {
    ptx: &'a str,
    code: &'a str,
    image: &'a [u8],
}

/// Splits a file into its entries, or returns `None` if it does not have the format.
fn parse<'a>(bytes: &'a [u8], architecture: &str) -> Option<HashMap<&'a str, Entry<'a>>> {
    let end = bytes.windows(2).position(|pair| pair == b"\n\n")?;
    let mut lines = std::str::from_utf8(bytes.get(..end)?).ok()?.lines();
    if lines.next()? != format!("{MAGIC} {architecture}") {
        return None;
    }
    let mut rest = bytes.get(end + 2..)?;
    let mut entries = HashMap::new();
    for line in lines {
        let mut words = line.split(' ');
        let (name, ptx, code, length) = (words.next()?, words.next()?, words.next()?, words.next()?);
        let (image, behind) = rest.split_at_checked(length.parse().ok()?)?;
        rest = behind;
        entries.insert(name, Entry { ptx, code, image });
    }
    rest.is_empty().then_some(entries)
}

/// Returns the SHA-256 hash of these bytes in hexadecimal digits.
fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULES: [(&str, &str); 2] = [("gemv", ".version 8.7 gemv"), ("lora", ".version 8.7 lora")];

    /// A file of machine code, as `scripts/cuda-cubins` writes it.
    fn file(architecture: &str, modules: &[(&str, &str, &[u8])]) -> Vec<u8> {
        let line = |(name, ptx, code): &(&str, &str, &[u8])| {
            format!("{name} {} {} {}\n", hash(ptx.as_bytes()), hash(code), code.len())
        };
        let head: String = modules.iter().map(line).collect();
        let mut bytes = format!("{MAGIC} {architecture}\n{head}\n").into_bytes();
        modules.iter().for_each(|(_, _, code)| bytes.extend_from_slice(code));
        bytes
    }

    fn sound(architecture: &str) -> Vec<u8> {
        file(architecture, &[("gemv", MODULES[0].1, b"\x7fELF g\n\n"), ("lora", MODULES[1].1, b"\x7fELF l")])
    }

    fn read_of(bytes: &[u8], capability: (u32, u32)) -> Result<Option<Cubins>, CubinError> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("sm_90.cubins"), bytes).unwrap();
        Cubins::read(folder.path(), capability, &MODULES)
    }

    #[test]
    fn a_device_takes_the_file_of_exactly_its_architecture() {
        let cubins = read_of(&sound("sm_90"), (9, 0)).unwrap().unwrap();
        assert_eq!(cubins.image("gemv"), Some(&b"\x7fELF g\n\n\0"[..]));
        assert_eq!(cubins.image("lora"), Some(&b"\x7fELF l\0"[..]));
        for other in [(8, 0), (8, 9), (10, 0), (12, 1)] {
            assert!(read_of(&sound("sm_90"), other).unwrap().is_none(), "{other:?}");
        }
    }

    #[test]
    fn a_file_of_another_architecture_under_a_wrong_name_is_refused() {
        let refused = read_of(&sound("sm_80"), (9, 0)).unwrap_err();
        assert!(matches!(refused, CubinError::Malformed { .. }), "{refused}");
    }

    #[test]
    fn a_file_of_another_version_is_refused_by_the_hash_of_its_ptx() {
        let other = file("sm_90", &[("gemv", "other", b"g"), ("lora", MODULES[1].1, b"l")]);
        let missing = file("sm_90", &[("lora", MODULES[1].1, b"l")]);
        for bytes in [other, missing] {
            let refused = read_of(&bytes, (9, 0)).unwrap_err();
            assert!(matches!(&refused, CubinError::OtherVersion { module, .. } if module == "gemv"));
        }
    }

    #[test]
    fn no_damaged_byte_of_a_file_is_taken() {
        let sound = sound("sm_90");
        for at in 0..sound.len() {
            let mut damaged = sound.clone();
            damaged[at] ^= 0x10;
            assert!(read_of(&damaged, (9, 0)).is_err(), "byte {at}");
            assert!(read_of(&sound[..at], (9, 0)).is_err(), "cut at {at}");
        }
        assert!(read_of(&[&sound[..], b"x"].concat(), (9, 0)).is_err());
    }
}
