//! Finds the other programs of this installation.

use std::path::{Path, PathBuf};

/// Searches the program `name` first in this program's directory, because both come from one build. The next
/// directories are `../lib/holobiont`, where a wheel puts programs that people do not run themselves, and
/// then `PATH`.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent);
    let in_lib = beside.and_then(Path::parent).map(|prefix| prefix.join("lib/holobiont"));
    let search_path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&search_path).filter(|directory| directory.is_absolute());
    let folders = beside.map(Path::to_owned).into_iter().chain(in_lib).chain(on_path);
    folders.map(|folder| folder.join(name)).find(|path| is_executable(path))
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}
