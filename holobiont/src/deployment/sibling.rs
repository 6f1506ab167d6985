//! The programs this one drives.

use std::path::{Path, PathBuf};

/// Where the program `name` is: beside this program first, because what was built together belongs together.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|path| path.parent().map(Path::to_owned));
    let search_path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&search_path).filter(|directory| directory.is_absolute());
    let mut candidates = beside.into_iter().chain(on_path).map(|directory| directory.join(name));
    candidates.find(|path| is_executable(path))
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}
