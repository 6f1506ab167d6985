//! Writes every seed that may be mutated to `FOLDER/TARGET/`, for cargo-fuzz to start from.
//!
//!   cargo run -p fuzz --example write_seeds FOLDER
//!
//! Longer ones slow a fuzzer down and teach it nothing: the tests replay them.
#![forbid(unsafe_code)]

use std::{env, fs, io, path::PathBuf};

use fuzz::seeds::{self, Seed};

fn main() -> io::Result<()> {
    let folder = env::args_os().nth(1).map(PathBuf::from);
    let folder = folder.ok_or_else(|| io::Error::other("name the folder to write to"))?;
    for (index, seed) in seeds::all().filter(Seed::may_be_mutated).enumerate() {
        let target = folder.join(seed.target);
        fs::create_dir_all(&target)?;
        fs::write(target.join(format!("seed-{index:03}")), &seed.bytes)?;
    }
    Ok(())
}
