//! Finding the library: whoever calls a function of a library that is not there is aborted by the loader's crate, so it is made
//! sure first that it is there with all we call.

use std::{
    env,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use cudarc::cublaslt::sys;
use libloading::Library;

use super::BlasError;

/// The names the library goes by, newest first.
const NAMES: [&str; 2] = ["libcublasLt.so.13", "libcublasLt.so.12"];

/// Where CUDA's installers put libraries.
const INSTALLED: &str = "/usr/local/cuda/lib64";

/// Folders to look in before the loader's own.
const FOLDERS_VARIABLE: &str = "HOLOBIONT_CUDA_LIBRARIES";

/// Everything we call.
const SYMBOLS: [&str; 12] = [
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
];

/// Loads the library once for the process, and checks that it has all we call.
pub(super) fn load() -> Result<(), BlasError> {
    static LOADED: OnceLock<Result<(), BlasError>> = OnceLock::new();
    LOADED.get_or_init(find).clone()
}

fn find() -> Result<(), BlasError> {
    if let Some(library) = folders().iter().find_map(|folder| open_in(folder)) {
        // Loaded, it is found by name from now on, wherever it lies. It stays for as long as the process.
        std::mem::forget(library);
    }
    // SAFETY: looking for the library runs only its initialisers.
    if !unsafe { sys::is_culib_present() } {
        return Err(BlasError::NotFound);
    }
    // SAFETY: it is present, so this finds it.
    let library = unsafe { sys::culib() };
    for symbol in SYMBOLS {
        // SAFETY: the symbol is only looked for, never called through this type.
        if unsafe { library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_err() {
            return Err(BlasError::TooOld { symbol: symbol.to_owned() });
        }
    }
    Ok(())
}

/// Folders to look in, the user's first.
fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = env::var_os(FOLDERS_VARIABLE).iter().flat_map(env::split_paths).collect();
    folders.extend(env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("lib64")));
    folders.push(PathBuf::from(INSTALLED));
    folders
}

fn open_in(folder: &Path) -> Option<Library> {
    // SAFETY: the folder is one that the user, or NVIDIA's installer, keeps CUDA's libraries in: loading one runs its
    // initialisers, as it would by name.
    NAMES.iter().find_map(|name| unsafe { Library::new(folder.join(name)) }.ok())
}
