//! Writes every seed that may be mutated to `FOLDER/TARGET/`, as a start for cargo-fuzz, and prints the names
//! of all targets.
//!
//! cargo run -p fuzz --example write_seeds FOLDER
//!
//! Longer seeds are left out: they slow a fuzzer down without new coverage, and the tests replay them.
#![forbid(unsafe_code)]

use std::{env, fs, io, path::PathBuf};

use fuzz::{
    TARGETS,
    seeds::{self, Seed},
};

fn main() -> io::Result<()> {
    let folder = env::args_os().nth(1).map(PathBuf::from);
    let folder = folder.ok_or_else(|| io::Error::other("name the folder to write to"))?;
    for target in TARGETS {
        fs::create_dir_all(folder.join(target.name))?;
        println!("{}", target.name);
    }
    for (index, seed) in seeds::all().filter(Seed::may_be_mutated).enumerate() {
        fs::write(folder.join(seed.target).join(format!("seed-{index:03}")), &seed.bytes)?;
    }
    Ok(())
}
