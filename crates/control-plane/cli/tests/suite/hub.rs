//! Downloads of models by name, from a server that answers like a hub.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::{Arc, Mutex},
    thread,
};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Files of the repository `org/name`, by path.
fn files() -> BTreeMap<&'static str, Vec<u8>> {
    BTreeMap::from([
        ("README.md", b"not needed".to_vec()),
        ("config.json", br#"{"model_type": "llama"}"#.to_vec()),
        ("model.safetensors", b"weights ".repeat(20_000)),
        ("onnx/model.onnx", b"another format".to_vec()),
    ])
}

/// A server that answers like a hub with one repository.
struct FakeHub {
    url: String,
    /// Names of the files whose bytes were requested, in order.
    requested: Arc<Mutex<Vec<String>>>,
    /// File whose connections break off in the middle.
    broken: Arc<Mutex<Option<&'static str>>>,
}

impl FakeHub {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let hub = Self {
            url: format!("http://{}", listener.local_addr().unwrap()),
            requested: Arc::default(),
            broken: Arc::default(),
        };
        let (requested, broken) = (Arc::clone(&hub.requested), Arc::clone(&hub.broken));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let broken = *broken.lock().unwrap();
                requested.lock().unwrap().extend(answer(&stream, broken));
            }
        });
        hub
    }

    fn pull(&self, home: &Path, name: &str, offline: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_holobiont"));
        command.args(["pull", name, "--json"]).env("HF_ENDPOINT", &self.url).env("HF_HOME", home);
        command.env("HF_HUB_OFFLINE", offline).env_remove("HF_HUB_CACHE").output().unwrap()
    }

    fn take_requested(&self) -> Vec<String> {
        std::mem::take(&mut self.requested.lock().unwrap())
    }
}

/// Answers one request; returns the name of the file whose bytes it requests.
fn answer(mut stream: &TcpStream, broken: Option<&str>) -> Option<String> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let headers: Vec<_> = lines.map(|line| line.to_lowercase()).collect();
    let range = headers.iter().find_map(|line| line.strip_prefix("range: bytes="));
    let files = files();
    let mut respond = |status: &str, headers: &str, length: usize, body: &[u8]| {
        let head =
            format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n");
        _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    };
    if path == "/api/models/org/name/revision/main" {
        let siblings: Vec<_> = files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
        let body = serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string();
        respond("200 OK", "", body.len(), body.as_bytes());
        return None;
    }
    let name = path.strip_prefix("/org/name/resolve/main/");
    let Some((name, bytes)) = name.and_then(|name| files.get_key_value(name)) else {
        respond("404 Not Found", "", 0, b"");
        return None;
    };
    let size = bytes.len();
    if range == Some("0-0") {
        let headers =
            format!("x-repo-commit: {COMMIT}\r\netag: \"{name}-1\"\r\nContent-Range: bytes 0-0/{size}\r\n");
        respond("206 Partial Content", &headers, 1, &bytes[..1]);
        return None;
    }
    let from: usize = range?.strip_suffix('-')?.parse().ok()?;
    let rest = &bytes[from..];
    let sent = if broken == Some(name) { &rest[..rest.len() / 2] } else { rest };
    let headers = format!("Content-Range: bytes {from}-{}/{size}\r\n", size - 1);
    respond("206 Partial Content", &headers, rest.len(), sent);
    Some((*name).to_owned())
}

fn snapshot(output: &Output) -> PathBuf {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    PathBuf::from(shown["paths"][0].as_str().unwrap())
}

#[test]
fn a_name_of_a_hub_is_downloaded_once_with_what_the_model_needs() {
    let (hub, home) = (FakeHub::start(), tempfile::tempdir().unwrap());
    let snapshot_path = snapshot(&hub.pull(home.path(), "org/name", "0"));
    assert_eq!(snapshot_path, home.path().join("hub/models--org--name/snapshots").join(COMMIT));
    assert_eq!(hub.take_requested(), ["config.json", "model.safetensors"]);
    for name in ["config.json", "model.safetensors"] {
        assert_eq!(fs::read(snapshot_path.join(name)).unwrap(), files()[name], "{name}");
    }
    assert_eq!(
        snapshot(&hub.pull(home.path(), "org/name", "1")),
        snapshot_path,
        "the cache suffices offline"
    );
    assert!(hub.take_requested().is_empty());
}

#[test]
fn an_interrupted_download_is_no_model_and_the_next_one_completes_it() {
    let (hub, home) = (FakeHub::start(), tempfile::tempdir().unwrap());
    *hub.broken.lock().unwrap() = Some("model.safetensors");
    let failed = hub.pull(home.path(), "org/name", "0");
    assert_eq!(failed.status.code(), Some(5), "{}", String::from_utf8_lossy(&failed.stderr));
    assert_eq!(hub.take_requested()[0], "config.json");
    let offline = hub.pull(home.path(), "org/name", "1");
    assert_eq!(offline.status.code(), Some(3), "{}", String::from_utf8_lossy(&offline.stderr));

    *hub.broken.lock().unwrap() = None;
    let snapshot_path = snapshot(&hub.pull(home.path(), "org/name", "0"));
    assert_eq!(hub.take_requested(), ["model.safetensors"], "a complete file is not requested again");
    assert_eq!(fs::read(snapshot_path.join("model.safetensors")).unwrap(), files()["model.safetensors"]);
}

#[test]
fn a_name_that_the_hub_does_not_know_is_refused_with_what_to_do() {
    let (hub, home) = (FakeHub::start(), tempfile::tempdir().unwrap());
    let unknown = hub.pull(home.path(), "org/other", "0");
    let said = String::from_utf8_lossy(&unknown.stderr);
    assert_eq!(unknown.status.code(), Some(5), "{said}");
    assert!(said.contains("org/other@main") && said.contains("404") && said.contains("HF_TOKEN"), "{said}");
}
