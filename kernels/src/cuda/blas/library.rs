//! Finds the library. The loader's crate aborts the process on a call of a missing function, so this module
//! first checks that the library has every function that we call.

use std::{
    env,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use cudarc::cublaslt::sys;
use libloading::Library;

use super::BlasError;

/// Names of the library, newest first.
const NAMES: [&str; 2] = ["libcublasLt.so.13", "libcublasLt.so.12"];

/// Folder where CUDA's installers put libraries.
const INSTALLED: &str = "/usr/local/cuda/lib64";

/// Variable with the folders to search before the loader's own.
const FOLDERS_VARIABLE: &str = "HOLOBIONT_CUDA_LIBRARIES";

/// Every function that we call.
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

/// Loads the library once per process and checks that it has every function that we call.
pub(super) fn load() -> Result<(), BlasError> {
    static LOADED: OnceLock<Result<(), BlasError>> = OnceLock::new();
    LOADED.get_or_init(find).clone()
}

fn find() -> Result<(), BlasError> {
    if let Some(library) = folders().iter().find_map(|folder| open_in(folder)) {
        // A loaded library is found by name from now on, at any path. The library stays loaded until the process ends.
        std::mem::forget(library);
    }
    // SAFETY: looking for the library runs only its initialisers.
    if !unsafe { sys::is_culib_present() } {
        return Err(BlasError::NotFound);
    }
    // SAFETY: the library is present, so `culib` finds it.
    let library = unsafe { sys::culib() };
    for symbol in SYMBOLS {
        // SAFETY: the symbol is only looked up, never called through this type.
        if unsafe { library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_err() {
            return Err(BlasError::TooOld { symbol: symbol.to_owned() });
        }
    }
    Ok(())
}

/// Returns the folders to search, the user's first.
fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = env::var_os(FOLDERS_VARIABLE).iter().flat_map(env::split_paths).collect();
    folders.extend(env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("lib64")));
    folders.push(PathBuf::from(INSTALLED));
    folders
}

fn open_in(folder: &Path) -> Option<Library> {
    // SAFETY: the user or NVIDIA's installer keeps CUDA's libraries in this folder; loading one runs its initialisers,
    // as loading it by name does.
    NAMES.iter().find_map(|name| unsafe { Library::new(folder.join(name)) }.ok())
}
