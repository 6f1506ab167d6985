//! A hub as a source of adapters: resolves a revision to its commit, and reads files of that commit.
//!
//! The hub redirects downloads to other hosts. The token goes only to the hub's own origin, and never again
//! once a redirect has left that origin. A redirect from https to http is refused.

use std::str::FromStr as _;

use axum::body::Bytes;
use futures::TryStreamExt as _;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{
    Request, Response, StatusCode, Uri,
    body::Incoming,
    header::{AUTHORIZATION, HeaderValue, LOCATION, USER_AGENT},
};
use model_files::{hub_access::HubAccess, location::HubName};
use serde::Deserialize;
use tokio::time::timeout;

use super::byte_stream::{ByteStream, PATIENCE, with_patience};
use crate::adapters::{
    errors::FetchError,
    store::transport::{HttpsClient, https_client},
};

const MAX_REDIRECTS: usize = 5;
/// Maximum bytes of a repository's description; one with 10,000 files has about 1 MB.
const MAX_INFO_BYTES: usize = 8 << 20;
const COMMIT_DIGITS: usize = 40;

/// Files of one commit of a repository.
pub(super) struct HubSnapshot {
    uri: String,
    access: HubAccess,
    client: HttpsClient<Empty<Bytes>>,
    repository: String,
    pub(super) commit: String,
    files: Vec<String>,
}

/// Description of a revision, as the hub's API sends it.
#[derive(Deserialize)]
struct RevisionInfo {
    sha: String,
    siblings: Vec<RepositoryFile>,
}

#[derive(Deserialize)]
struct RepositoryFile {
    rfilename: String,
}

impl HubSnapshot {
    /// Resolves the revision of `name`. Errors name the adapter `uri`.
    pub(super) async fn open(uri: &str, name: &HubName, access: &HubAccess) -> Result<Self, FetchError> {
        if access.is_offline {
            return Err(FetchError::Offline { uri: uri.to_owned() });
        }
        let client = https_client().map_err(|error| failed(uri, &error))?;
        let repository = name.repository();
        let mut snapshot = Self {
            uri: uri.to_owned(),
            access: access.clone(),
            client,
            repository,
            commit: String::new(),
            files: Vec::new(),
        };
        // A revision with slashes, such as refs/pr/1, is one part of the path here.
        let revision = name.revision().replace('/', "%2F");
        let path = format!("/api/models/{}/revision/{revision}", snapshot.repository);
        let Some(answer) = snapshot.get(&path).await? else {
            return Err(snapshot.missing("repository or revision"));
        };
        let info = timeout(PATIENCE, Limited::new(answer.into_body(), MAX_INFO_BYTES).collect()).await;
        let info = info.map_err(|_| snapshot.broken("the description of the repository did not arrive"))?;
        let info = info.map_err(|error| failed(uri, &*error))?.to_bytes();
        let info: RevisionInfo = serde_json::from_slice(&info).map_err(|error| failed(uri, &error))?;
        let is_commit =
            info.sha.len() == COMMIT_DIGITS && info.sha.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !is_commit {
            return Err(snapshot.broken("the hub sent no commit for the revision"));
        }
        snapshot.commit = info.sha.to_ascii_lowercase();
        snapshot.files = info.siblings.into_iter().map(|file| file.rfilename).collect();
        Ok(snapshot)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.files.iter().any(|file| file == name)
    }

    /// Returns the bytes of the file `name`; `None` if the commit has no such file.
    pub(super) async fn file(&self, name: &str) -> Result<Option<ByteStream>, FetchError> {
        if !self.has(name) {
            return Ok(None);
        }
        let path = format!("/{}/resolve/{}/{name}", self.repository, self.commit);
        let Some(answer) = self.get(&path).await? else { return Ok(None) };
        let uri = self.uri.clone();
        let bytes = answer.into_body().into_data_stream().map_err(move |error| failed(&uri, &error));
        Ok(Some(with_patience(&self.uri, bytes)))
    }

    /// Requests a path of the hub, and follows redirects; `None` if the hub has nothing there.
    async fn get(&self, path: &str) -> Result<Option<Response<Incoming>>, FetchError> {
        let endpoint = self.address(&self.access.endpoint)?;
        let mut address = self.address(&format!("{}{path}", self.access.endpoint))?;
        let mut is_trusted = true;
        for _ in 0..=MAX_REDIRECTS {
            is_trusted &= has_origin_of(&address, &endpoint);
            let answer = self.send(address.clone(), is_trusted).await?;
            match answer.status() {
                StatusCode::OK => return Ok(Some(answer)),
                status if status.is_redirection() => address = self.next(&address, &answer)?,
                // A hub hides a private repository behind 401.
                StatusCode::NOT_FOUND | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Ok(None),
                status => return Err(self.broken(&format!("the hub answered {status}"))),
            }
        }
        Err(self.broken("the hub redirected too often"))
    }

    async fn send(&self, address: Uri, is_trusted: bool) -> Result<Response<Incoming>, FetchError> {
        let mut request = Request::get(address).header(USER_AGENT, "holobiont");
        if let Some(token) = self.access.token.as_ref().filter(|_| is_trusted) {
            let bearer = HeaderValue::try_from(format!("Bearer {token}"));
            let mut bearer = bearer.map_err(|_| self.broken("HF_TOKEN is no valid token"))?;
            bearer.set_sensitive(true);
            request = request.header(AUTHORIZATION, bearer);
        }
        let request = request.body(Empty::new()).map_err(|error| failed(&self.uri, &error))?;
        let answer = timeout(PATIENCE, self.client.request(request)).await;
        let answer = answer.map_err(|_| self.broken("the hub did not answer"))?;
        answer.map_err(|error| failed(&self.uri, &error))
    }

    /// Returns the address to which `answer` redirects.
    fn next(&self, from: &Uri, answer: &Response<Incoming>) -> Result<Uri, FetchError> {
        let to = answer.headers().get(LOCATION).and_then(|to| to.to_str().ok());
        redirected(from, to.unwrap_or_default())
            .ok_or_else(|| self.broken("the hub redirected to an address that is not allowed"))
    }

    fn address(&self, text: &str) -> Result<Uri, FetchError> {
        Uri::from_str(text).map_err(|_| self.broken("HF_ENDPOINT is no valid address"))
    }

    fn missing(&self, what: &str) -> FetchError {
        FetchError::Missing { uri: self.uri.clone(), what: what.to_owned() }
    }

    fn broken(&self, reason: &str) -> FetchError {
        FetchError::Failed { uri: self.uri.clone(), reason: reason.to_owned() }
    }
}

fn failed(uri: &str, error: &(dyn std::error::Error + 'static)) -> FetchError {
    FetchError::Failed { uri: uri.to_owned(), reason: settings::exit::in_one_line(error) }
}

fn has_origin_of(address: &Uri, endpoint: &Uri) -> bool {
    address.scheme() == endpoint.scheme() && address.authority() == endpoint.authority()
}

/// Returns the address `to`, relative to `from`; `None` if a redirect may not lead there.
fn redirected(from: &Uri, to: &str) -> Option<Uri> {
    let is_absolute = to.starts_with("https://") || to.starts_with("http://");
    let text = match to.starts_with('/') && !to.starts_with("//") {
        true => format!("{}://{}{to}", from.scheme()?, from.authority()?),
        false if is_absolute => to.to_owned(),
        false => return None,
    };
    let address = Uri::from_str(&text).ok()?;
    let is_downgrade = from.scheme_str() == Some("https") && address.scheme_str() != Some("https");
    let has_user = address.authority()?.as_str().contains('@');
    (!is_downgrade && !has_user).then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_leads_to_a_path_or_another_host_but_not_out_of_https() {
        let from = Uri::from_static("https://hub.example/org/name/resolve/main/x");
        let next = |to| redirected(&from, to).map(|address| address.to_string());
        assert_eq!(next("/cache/x?y=z").as_deref(), Some("https://hub.example/cache/x?y=z"));
        assert_eq!(next("https://cdn.example/x").as_deref(), Some("https://cdn.example/x"));
        for to in
            ["", "x", "//evil/x", "http://cdn.example/x", "https://u:p@cdn.example/x", "file:///etc/passwd"]
        {
            assert_eq!(next(to), None, "{to}");
        }
    }

    #[test]
    fn another_scheme_host_or_port_is_another_origin() {
        let endpoint = Uri::from_static("https://hub.example");
        assert!(has_origin_of(&Uri::from_static("https://hub.example/x"), &endpoint));
        for other in ["http://hub.example/x", "https://hub.example:444/x", "https://hub.example.evil/x"] {
            assert!(!has_origin_of(&Uri::from_static(other), &endpoint), "{other}");
        }
    }
}
