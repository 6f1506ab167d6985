//! Writes every seed of at most 64 KiB to `FOLDER/TARGET/`, for cargo-fuzz to start from.
//!
//!   cargo run -p fuzz --example write_seeds FOLDER
#![forbid(unsafe_code)]

use std::{env, fs, io, path::PathBuf};

/// Longer inputs slow a fuzzer down and teach it nothing: the tests replay them.
const LONGEST: usize = 1 << 16;

fn main() -> io::Result<()> {
    let folder = env::args_os().nth(1).map(PathBuf::from);
    let folder = folder.ok_or_else(|| io::Error::other("name the folder to write to"))?;
    for (index, seed) in fuzz::seeds::all().enumerate().filter(|(_, seed)| seed.bytes.len() <= LONGEST) {
        let target = folder.join(seed.target);
        fs::create_dir_all(&target)?;
        fs::write(target.join(format!("seed-{index:03}")), &seed.bytes)?;
    }
    Ok(())
}
