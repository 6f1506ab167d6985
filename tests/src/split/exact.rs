//! Executors of exact arithmetic, each in a process that can be killed, behind a socket that shows their
//! input.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Stdio},
};

use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::{
    clean,
    tap::{self, CallObserver},
};
use crate::{chaos::FailpointDirectory, fixtures::program, watchdog::eventually};

/// Writes a tiny model that computes fast, with a tokenizer that has a distinct text for every token.
///
/// # Panics
/// If the files cannot be written.
pub fn write_model(into: &Path) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/models/llama-tied");
    fs::create_dir_all(into).expect("a directory for the model");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden.join(name), into.join(name)).expect("the golden model");
    }
    let config: Value = serde_json::from_slice(&fs::read(into.join("config.json")).expect("its shape"))
        .expect("its shape is JSON");
    let size = config["vocab_size"].as_u64().expect("a number of tokens");
    let tokenizer = tokenizer(u32::try_from(size).expect("few tokens"));
    fs::write(into.join("tokenizer.json"), tokenizer.to_string()).expect("a tokenizer");
}

/// Returns a tokenizer of the visible ASCII characters, and of words that no prompt of these yields.
fn tokenizer(size: u32) -> Value {
    let spelling = |id: u32| match char::from_u32(u32::from(b'!') + id).filter(char::is_ascii_graphic) {
        Some(letter) => letter.to_string(),
        None => format!("<{id}>"),
    };
    let vocab: Map<String, Value> = (0..size).map(|id| (spelling(id), id.into())).collect();
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    json!({
        "version": "1.0",
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": bytes,
        "post_processor": null,
        "decoder": bytes,
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    })
}

/// An executor of exact arithmetic in a separate process.
#[derive(Debug)]
pub struct ExactExecutor {
    directory: TempDir,
    model: PathBuf,
    /// Failpoints of the process.
    pub places: FailpointDirectory,
    child: Child,
}

impl ExactExecutor {
    /// Starts an executor of the model at `model`; `witness` sees each call before the executor.
    ///
    /// # Panics
    /// If the executor does not start.
    #[must_use]
    pub fn start(model: &Path, witness: CallObserver) -> Self {
        let (directory, places) =
            (tempfile::tempdir().expect("a temporary directory"), FailpointDirectory::new());
        let child = spawn(directory.path(), model, &places);
        let executor = Self { directory, model: model.to_owned(), places, child };
        tap::listen(&executor.path("tap"), executor.path("run/layers.zmq"), witness);
        executor
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the socket for clients.
    #[must_use]
    pub fn address(&self) -> String {
        format!("ipc://{}", self.path("tap").display())
    }

    /// Waits until the process has failed at `place`.
    pub fn await_death(&mut self, place: &str) {
        eventually(place, || self.places.has_fired(place));
        self.places.clear(place);
        self.child.wait().expect("it was started here");
    }

    /// Starts another executor in its place.
    pub fn return_from_death(&mut self) {
        self.child = spawn(self.directory.path(), &self.model, &self.places);
    }
}

impl Drop for ExactExecutor {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the executor's log:\n{}", fs::read_to_string(self.path("log")).unwrap_or_default());
        }
    }
}

fn spawn(directory: &Path, model: &Path, places: &FailpointDirectory) -> Child {
    let log = File::options().append(true).create(true).open(directory.join("log")).expect("a log file");
    let socket = directory.join("run/layers.zmq");
    let _ = fs::remove_file(&socket);
    let mut command = clean(&program("base-executor"));
    command.args(["--engine", "none", "--layer-exact", "--exit-with-stdin", "--model"]).arg(model);
    command.arg("--layers").arg(directory.join("run/layers.sock"));
    command.env("HOLOBIONT_FAILPOINTS", places.directory());
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log);
    let child = command.spawn().expect("base-executor starts");
    eventually("the executor listens", || socket.exists());
    child
}
