//! Unpacks the PTX of the CUDA kernels, and writes the table of it that `src/cuda/modules.rs` includes.
//!
//! `cuda/kernels.ptx.gz`, written by `scripts/cuda-compile`, holds the PTX of every kernel file, one after the
//! other. Each PTX begins with a line `// source HASH of NAME.cu, ...`, so the archive needs no other format.

use std::{env, error::Error, fs, io::Read, path::PathBuf};

use flate2::read::GzDecoder;

const ARCHIVE: &str = "cuda/kernels.ptx.gz";
const FIRST_LINE: &str = "// source ";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={ARCHIVE}");
    let mut all = String::new();
    GzDecoder::new(fs::File::open(ARCHIVE)?).read_to_string(&mut all)?;
    let folder = PathBuf::from(env::var("OUT_DIR")?).join("ptx");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    let mut table = String::new();
    for text in all.split(FIRST_LINE).skip(1) {
        let name =
            kernel_file(text).ok_or_else(|| format!("{ARCHIVE}: no file name in {FIRST_LINE}{text:.80}"))?;
        fs::write(folder.join(format!("{name}.ptx")), [FIRST_LINE, text].concat())?;
        table += &format!("(\"{name}\", include_str!(\"{name}.ptx\")),\n");
    }
    fs::write(folder.join("modules.rs"), format!("&[\n{table}]\n"))?;
    Ok(())
}

/// Returns `gemm` for a text that begins with `HASH of gemm.cu`.
fn kernel_file(text: &str) -> Option<&str> {
    let (_, sources) = text.lines().next()?.split_once(" of ")?;
    Some(sources.split_once(".cu")?.0)
}
