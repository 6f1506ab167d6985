//! Address of the adapter files that many hosts share.

use std::{fmt, path::PathBuf};

use object_store::aws::AmazonS3ConfigKey;

const BUCKET: &str = "s3://";
const DIRECTORY: &str = "file://";

/// A bucket or a directory, with the credentials for access.
#[derive(Clone, PartialEq, Eq)]
pub struct BucketAddress {
    pub(super) place: BucketLocation,
    prefix: String,
}

#[derive(Clone, PartialEq, Eq)]
pub(super) enum BucketLocation {
    /// A bucket; its settings contain keys and are never shown.
    Bucket { name: String, settings: Vec<(AmazonS3ConfigKey, String)> },
    /// A directory that is the same on all hosts.
    Directory(PathBuf),
}

impl BucketAddress {
    /// Parses `s3://BUCKET/PREFIX` or `file:///DIRECTORY`; `None` for any other text. Server and credentials
    /// of a bucket come from the usual `variables`: `AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID` and
    /// so on.
    #[must_use]
    pub fn parse(text: &str, variables: impl IntoIterator<Item = (String, String)>) -> Option<Self> {
        if let Some(path) = text.strip_prefix(DIRECTORY) {
            let is_one = path.len() > 1 && path.starts_with('/') && !path.chars().any(char::is_control);
            return is_one
                .then(|| Self { place: BucketLocation::Directory(path.into()), prefix: String::new() });
        }
        let (name, prefix) =
            text.strip_prefix(BUCKET).map(|rest| rest.split_once('/').unwrap_or((rest, "")))?;
        let plain = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c));
        let is_one = !name.is_empty() && plain(name) && plain(prefix);
        let ours = variables.into_iter().filter(|(name, _)| name.starts_with("AWS_"));
        let settings =
            ours.filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value)));
        is_one.then(|| Self {
            place: BucketLocation::Bucket { name: name.to_owned(), settings: settings.collect() },
            prefix: prefix.trim_matches('/').to_owned(),
        })
    }

    /// Prefix of all object names.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }
}

/// Environment variables that are valid Unicode.
pub(crate) fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

impl fmt::Display for BucketAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            BucketLocation::Bucket { name, .. } => write!(f, "{BUCKET}{name}/{}", self.prefix),
            BucketLocation::Directory(path) => write!(f, "{DIRECTORY}{}", path.display()),
        }
    }
}

impl fmt::Debug for BucketAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BucketAddress({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_named_with_or_without_a_prefix_a_directory_by_its_path_and_nothing_else_is_one() {
        let shown = |text| BucketAddress::parse(text, []).map(|address| address.to_string());
        assert_eq!(shown("s3://fleet/adapters/eu/").as_deref(), Some("s3://fleet/adapters/eu"));
        assert_eq!(shown("s3://fleet").as_deref(), Some("s3://fleet/"));
        assert_eq!(shown("file:///srv/the adapters").as_deref(), Some("file:///srv/the adapters"));
        for text in [
            "",
            "s3://",
            "s3:///x",
            "fleet",
            "https://fleet/x",
            "s3://fl eet",
            "s3://key:secret@fleet/x",
            "file://",
            "file:///",
            "file://host/x",
            "/srv/adapters",
        ] {
            assert_eq!(shown(text), None, "{text}");
        }
    }

    #[test]
    fn keys_come_from_the_usual_variables_and_are_never_shown() {
        let variables = [("AWS_SECRET_ACCESS_KEY", "secret"), ("AWS_NONSENSE", "x"), ("HOME", "y")];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let address = BucketAddress::parse("s3://fleet", variables).unwrap();
        let BucketLocation::Bucket { settings, .. } = &address.place else { panic!("it is a bucket") };
        assert_eq!(*settings, [(AmazonS3ConfigKey::SecretAccessKey, "secret".to_owned())]);
        assert_eq!(format!("{address:?} {address}"), "BucketAddress(s3://fleet/) s3://fleet/");
    }
}
