//! URIs of adapters: `hf://ORG/NAME[@REVISION]`, `s3://BUCKET/PREFIX` and `file:///DIRECTORY`, each with an
//! optional `#sha256=DIGEST`.
//!
//! A URI has one canonical text, which is also the name of the adapter that a request loads by it. Parts are
//! of letters, digits, `.`, `_` and `-`, so no URI has an escape, user information, a port, or a way out of
//! its prefix.
//!
//! - [`digest`]: the SHA-256 that pins the weights.
//! - [`allow_list`]: the prefixes from which adapters may be fetched.

pub mod allow_list;
pub(crate) mod digest;

use std::{fmt, str::FromStr};

use model_files::location::HubName;

use self::digest::Digest;

/// Maximum bytes of a URI.
const MAX_URI_BYTES: usize = 512;
/// Maximum bytes of one part of a path, as in file systems.
const MAX_PART_BYTES: usize = 255;
/// Maximum bytes of a URI in an error.
const MAX_TOLD_BYTES: usize = 200;
/// Text between a URI and the digest of its weights.
const DIGEST: &str = "#sha256=";
/// Text between a URI and the tenant that owns the adapter.
const OWNER: &str = "?tenant=";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UriScheme {
    /// A repository of a hub.
    Hub,
    /// A prefix of a bucket over the S3 protocol.
    Bucket,
    /// A directory inside the adapter root.
    File,
}

impl UriScheme {
    pub(crate) const EACH: [Self; 3] = [Self::Hub, Self::Bucket, Self::File];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hub => "hf",
            Self::Bucket => "s3",
            Self::File => "file",
        }
    }

    /// Returns the scheme of `text` and the rest after `://`.
    fn split(text: &str) -> Option<(Self, &str)> {
        let (name, rest) = text.split_once("://")?;
        Self::EACH.into_iter().find(|scheme| scheme.name() == name).map(|scheme| (scheme, rest))
    }
}

/// A text is no URI of an adapter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{uri}' is not the URI of an adapter: {reason}; write hf://ORG/NAME@REVISION, s3://BUCKET/PREFIX or \
     file:///DIRECTORY, of letters, digits, '.', '_' and '-', perhaps with #sha256=DIGEST"
)]
pub struct UriError {
    pub(super) uri: String,
    pub(super) reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AdapterUri {
    scheme: UriScheme,
    /// Organization and name, bucket and prefix, or the directories from `/` on.
    parts: Vec<String>,
    /// Branch, tag or commit of a repository.
    revision: Option<String>,
    /// Expected digest of the weights.
    digest: Option<Digest>,
}

/// True if `text` begins like the URI of an adapter. No other name of an adapter does, because names have no
/// colon.
#[must_use]
pub fn is_uri(text: &str) -> bool {
    UriScheme::split(text).is_some()
}

impl AdapterUri {
    pub(super) fn scheme(&self) -> UriScheme {
        self.scheme
    }

    pub(super) fn parts(&self) -> &[String] {
        &self.parts
    }

    pub(super) fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// Returns the repository with its revision; `None` unless the scheme is `hf`.
    pub(super) fn hub_name(&self) -> Option<HubName> {
        let revision = self.revision.as_deref()?;
        format!("{}@{revision}", self.parts.join("/")).parse().ok()
    }

    /// Returns the URI of the fetched bytes: with the commit of a repository, and with the digest.
    pub(super) fn pinned(&self, commit: Option<String>, digest: Digest) -> Self {
        let revision = commit.or_else(|| self.revision.clone());
        Self { revision, digest: Some(digest), ..self.clone() }
    }

    /// Adds the digest that a request expects.
    ///
    /// # Errors
    /// If the URI has another digest.
    pub(crate) fn with_digest(self, digest: Digest) -> Result<Self, UriError> {
        if self.digest.is_some_and(|own| own != digest) {
            return Err(refused(&self.to_string(), "the request expects another digest"));
        }
        Ok(Self { digest: Some(digest), ..self })
    }

    /// Name under which the adapter of `owner` is registered. Names are unique among all tenants, so the name
    /// of a tenant's adapter contains the tenant.
    #[must_use]
    pub(crate) fn name_for(&self, owner: Option<&str>) -> String {
        let owner = owner.map_or_else(String::new, |owner| format!("{OWNER}{owner}"));
        self.text(&owner)
    }

    /// Parses a URI or a name made by [`AdapterUri::name_for`]; returns the owner in the name, too.
    pub(crate) fn parse_name(text: &str) -> Result<(Self, Option<&str>), UriError> {
        let Some((before, after)) = text.split_once(OWNER) else { return Ok((text.parse()?, None)) };
        let (owner, digest) = after.split_at(after.find('#').unwrap_or(after.len()));
        Ok((format!("{before}{digest}").parse()?, Some(owner)))
    }

    fn text(&self, owner: &str) -> String {
        let path = self.parts.join("/");
        let root = if self.scheme == UriScheme::File { "/" } else { "" };
        let revision = self.revision.as_ref().map_or_else(String::new, |revision| format!("@{revision}"));
        let digest = self.digest.map_or_else(String::new, |digest| format!("{DIGEST}{digest}"));
        format!("{}://{root}{path}{revision}{owner}{digest}", self.scheme.name())
    }
}

impl fmt::Display for AdapterUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(""))
    }
}

impl FromStr for AdapterUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        let refused = |reason| refused(text, reason);
        if text.len() > MAX_URI_BYTES {
            return Err(refused("it is longer than 512 bytes"));
        }
        let (scheme, rest) =
            UriScheme::split(text).ok_or_else(|| refused("its scheme is not hf, s3 or file"))?;
        let (place, digest) = match rest.split_once('#') {
            None => (rest, None),
            Some((place, fragment)) => {
                let digest = fragment.strip_prefix(&DIGEST[1..]).and_then(Digest::of_hex);
                (place, Some(digest.ok_or_else(|| refused("its fragment is not sha256= and 64 digits"))?))
            }
        };
        let (parts, revision) = match scheme {
            UriScheme::Hub => {
                let name: HubName =
                    place.parse().map_err(|_| refused("hf:// needs an organization and a name"))?;
                (parts(&name.repository()).map_err(refused)?, Some(name.revision().to_owned()))
            }
            UriScheme::Bucket => (parts(place).map_err(refused)?, None),
            UriScheme::File => {
                let inside = place.strip_prefix('/');
                (parts(inside.ok_or_else(|| refused("file:// names no host"))?).map_err(refused)?, None)
            }
        };
        if scheme == UriScheme::Bucket && parts.len() < 2 {
            return Err(refused("s3:// needs a bucket and a prefix"));
        }
        Ok(Self { scheme, parts, revision, digest })
    }
}

/// Splits a path into its parts; one final slash is ignored.
pub(super) fn parts(path: &str) -> Result<Vec<String>, &'static str> {
    let path = path.strip_suffix('/').unwrap_or(path);
    path.split('/').map(|part| check_part(part).map(|()| part.to_owned())).collect()
}

fn check_part(part: &str) -> Result<(), &'static str> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    match part {
        "" => Err("a part of its path is empty"),
        "." | ".." => Err("a part of its path is '.' or '..'"),
        _ if part.len() > MAX_PART_BYTES => Err("a part of its path is longer than 255 bytes"),
        _ if !part.bytes().all(allowed) => Err("its path has other characters"),
        _ => Ok(()),
    }
}

pub(super) fn refused(uri: &str, reason: &'static str) -> UriError {
    UriError { uri: uri[..uri.floor_char_boundary(MAX_TOLD_BYTES)].to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    fn canonical(text: &str) -> String {
        text.parse::<AdapterUri>().unwrap_or_else(|error| panic!("{error}")).to_string()
    }

    #[test]
    fn a_uri_has_one_canonical_text() {
        assert_eq!(canonical("hf://org/Name-1.5_b"), "hf://org/Name-1.5_b@main");
        assert_eq!(canonical("hf://org/name@refs/pr/1"), "hf://org/name@refs/pr/1");
        assert_eq!(canonical("s3://bucket/team/sql/"), "s3://bucket/team/sql");
        assert_eq!(canonical("file:///srv/.adapters/sql/"), "file:///srv/.adapters/sql");
        let pinned = format!("hf://org/name@v1#sha256={}", HEX.to_uppercase());
        assert_eq!(canonical(&pinned), format!("hf://org/name@v1#sha256={HEX}"));
    }

    #[test]
    fn what_could_leave_its_prefix_or_reach_another_host_is_refused_by_name() {
        let long = format!("s3://bucket/{}", "a/".repeat(300));
        for text in [
            "",
            "sql",
            "/srv/sql",
            "https://hub.example/org/name",
            "HF://org/name",
            "hf://org",
            "hf://org/name/more",
            "hf://org/..",
            "hf://org/name@../../other",
            "hf://org/name@",
            "hf://user@org/name",
            "hf://org:8080/name",
            "hf://org/na%6de",
            "hf://org/name?rev=main",
            "s3://bucket",
            "s3://bucket/../other/x",
            "s3://bucket/a/./b",
            "s3://bucket//x",
            "s3://bucket/%2e%2e/x",
            "s3://bucket/..%2fother",
            "s3://key:secret@bucket/x",
            "s3://bucket:9000/x",
            "s3://bucket/a\\..\\b",
            "s3://bucket/a+b",
            "s3://bucket/a\0b",
            "file://srv/sql",
            "file://host/srv/sql",
            "file:///",
            "file:///srv/../etc",
            "file:///srv/./sql",
            "file:///srv/%2e%2e/etc",
            "hf://org/name#sha256=ab",
            "hf://org/name#md5=00112233",
            "hf://org/name#",
            &long,
        ] {
            let error = text.parse::<AdapterUri>().expect_err(text);
            assert!(error.to_string().contains("write hf://ORG/NAME@REVISION"), "{error}");
        }
    }

    #[test]
    fn the_name_of_a_tenants_adapter_contains_the_tenant() {
        let uri: AdapterUri = format!("hf://org/name#sha256={HEX}").parse().unwrap();
        assert_eq!(uri.name_for(None), uri.to_string());
        let name = uri.name_for(Some("alice"));
        assert_eq!(name, format!("hf://org/name@main?tenant=alice#sha256={HEX}"));
        assert_eq!(AdapterUri::parse_name(&name).unwrap(), (uri.clone(), Some("alice")));
        assert_eq!(AdapterUri::parse_name(&uri.to_string()).unwrap(), (uri, None));
    }

    #[test]
    fn a_second_digest_must_be_the_first() {
        let digest = Digest::of_hex(HEX).unwrap();
        let uri: AdapterUri = "s3://bucket/x".parse().unwrap();
        let pinned = uri.with_digest(digest).unwrap();
        assert_eq!(pinned.clone().with_digest(digest).unwrap(), pinned);
        pinned.with_digest(Digest::of_hex(&"0".repeat(64)).unwrap()).unwrap_err();
    }
}
