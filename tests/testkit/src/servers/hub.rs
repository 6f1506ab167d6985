//! A server that answers like a hub with the repository `org/name`.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

/// Commit of the revision `main`.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Files of the repository, by path.
type RepositoryFiles = BTreeMap<String, Vec<u8>>;

/// A running server, which serves until the test program ends.
#[derive(Debug)]
pub struct FakeHub {
    /// Address for `HF_ENDPOINT`.
    pub url: String,
    shared: Arc<(Mutex<HubState>, Condvar)>,
}

#[derive(Debug, Default)]
struct HubState {
    files: RepositoryFiles,
    requests: Vec<HubRequest>,
    broken: Option<String>,
    redirect: Option<String>,
    is_held: bool,
}

/// A request that the server received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubRequest {
    /// Path of the request.
    pub path: String,
    /// Name of the file whose bytes are requested.
    pub file: Option<String>,
    /// Value of the header `Authorization`.
    pub authorization: Option<String>,
}

impl FakeHub {
    /// Starts a server with these files.
    #[must_use]
    pub fn start(files: &[(&str, &[u8])]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("it is bound"));
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
        let shared = Arc::new((Mutex::new(HubState { files, ..HubState::default() }), Condvar::new()));
        let hub = Self { url, shared: Arc::clone(&shared) };
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                thread::spawn(move || answer(&stream, &shared));
            }
        });
        hub
    }

    /// Breaks connections off in the middle of the file `name`; `None` serves all files.
    pub fn set_broken(&self, name: Option<&str>) {
        self.state().broken = name.map(str::to_owned);
    }

    /// Redirects downloads to this prefix of an address.
    pub fn redirect_to(&self, prefix: &str) {
        self.state().redirect = Some(prefix.to_owned());
    }

    /// Holds downloads back until [`FakeHub::release`].
    pub fn hold(&self) {
        self.state().is_held = true;
    }

    /// Serves the downloads that were held back.
    pub fn release(&self) {
        self.state().is_held = false;
        self.shared.1.notify_all();
    }

    /// Returns the requests so far.
    #[must_use]
    pub fn requests(&self) -> Vec<HubRequest> {
        self.state().requests.clone()
    }

    /// Returns the names of the files whose bytes were requested since the last call, in order.
    #[must_use]
    pub fn take_downloads(&self) -> Vec<String> {
        std::mem::take(&mut self.state().requests).into_iter().filter_map(|request| request.file).collect()
    }

    fn state(&self) -> MutexGuard<'_, HubState> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn answer(mut stream: &TcpStream, (state, released): &(Mutex<HubState>, Condvar)) -> Option<()> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let headers: Vec<_> = lines.filter_map(|line| split_header(&line)).collect();
    let header = |name: &str| headers.iter().find(|(own, _)| own == name).map(|(_, value)| value.clone());
    let range = header("range").and_then(|range| range.strip_prefix("bytes=").map(str::to_owned));
    let mut respond = |status: &str, headers: &str, length: usize, body: &[u8]| {
        let head =
            format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)).ok()
    };
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    let is_probe = range.as_deref() == Some("0-0");
    let file = file_of(&path).filter(|_| !is_probe).map(str::to_owned);
    state.requests.push(HubRequest { path: path.clone(), file, authorization: header("authorization") });
    if is_info(&path) {
        let siblings = state.files.keys().map(|name| format!(r#"{{"rfilename":"{name}"}}"#));
        let siblings = siblings.collect::<Vec<_>>().join(",");
        let body = format!(r#"{{"sha":"{COMMIT}","siblings":[{siblings}]}}"#);
        return respond("200 OK", "", body.len(), body.as_bytes());
    }
    let Some((name, bytes)) =
        file_of(&path).and_then(|name| state.files.get(name).map(|bytes| (name.to_owned(), bytes.clone())))
    else {
        return respond("404 Not Found", "", 0, b"");
    };
    let size = bytes.len();
    if is_probe {
        let headers =
            format!("x-repo-commit: {COMMIT}\r\netag: \"{name}-1\"\r\nContent-Range: bytes 0-0/{size}\r\n");
        return respond("206 Partial Content", &headers, 1, &bytes[..1]);
    }
    if let Some(prefix) = &state.redirect {
        let headers = format!("Location: {prefix}/{name}\r\n");
        return respond("302 Found", &headers, 0, b"");
    }
    let state = released.wait_while(state, |state| state.is_held).unwrap_or_else(PoisonError::into_inner);
    let is_broken = state.broken.as_deref() == Some(&name);
    drop(state);
    let from: usize = range.as_deref().map_or(Some(0), |range| range.strip_suffix('-')?.parse().ok())?;
    let rest = &bytes[from..];
    let sent = if is_broken { &rest[..rest.len() / 2] } else { rest };
    match range {
        None => respond("200 OK", "", rest.len(), sent),
        Some(_) => {
            let headers = format!("Content-Range: bytes {from}-{}/{size}\r\n", size - 1);
            respond("206 Partial Content", &headers, rest.len(), sent)
        }
    }
}

fn split_header(line: &str) -> Option<(String, String)> {
    let (name, value) = line.split_once(": ")?;
    Some((name.to_lowercase(), value.to_owned()))
}

fn is_info(path: &str) -> bool {
    let revision = path.strip_prefix("/api/models/org/name/revision/");
    revision.is_some_and(|revision| revision == "main" || revision == COMMIT)
}

/// Returns the file that a path names, of the repository or behind a redirect.
fn file_of(path: &str) -> Option<&str> {
    let resolved = ["main", COMMIT].into_iter().find_map(|revision| {
        path.strip_prefix("/org/name/resolve/")?.strip_prefix(revision)?.strip_prefix('/')
    });
    resolved.or_else(|| path.strip_prefix("/moved/"))
}
