//! The prefixes of URIs from which adapters may be fetched.
//!
//! A prefix ends at a border of parts: `hf://my-org` allows `hf://my-org/name`, but not
//! `hf://my-org-evil/name`. The part `{tenant}` stands for the tenant that will own the adapter.

use super::{AdapterUri, UriError, UriScheme};

/// Part of a prefix that stands for the adapter's owner.
const TENANT: &str = "{tenant}";
/// Maximum number of prefixes, because each URI is compared with all of them.
const MAX_PREFIXES: usize = 64;

/// The list is empty by default, which allows nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowList(Vec<AllowedPrefix>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct AllowedPrefix {
    scheme: UriScheme,
    parts: Vec<PrefixPart>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum PrefixPart {
    Exactly(String),
    Tenant,
}

/// A prefix is malformed, or there are too many.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{prefix}' {reason}; write prefixes as hf://ORG, hf://ORG/NAME, s3://BUCKET/PREFIX or file:///DIRECTORY"
)]
pub struct AllowListError {
    prefix: String,
    reason: &'static str,
}

impl AllowList {
    /// Parses the prefixes.
    ///
    /// # Errors
    /// Names the first malformed prefix.
    pub fn parse(prefixes: &[String]) -> Result<Self, AllowListError> {
        if let Some(prefix) = prefixes.get(MAX_PREFIXES) {
            let prefix = prefix.clone();
            return Err(AllowListError { prefix, reason: "exceeds the limit of 64 prefixes" });
        }
        prefixes.iter().map(|prefix| AllowedPrefix::parse(prefix.trim())).collect::<Result<_, _>>().map(Self)
    }

    pub(in crate::adapters) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `owner` may get an adapter from `uri`; `None` means that all tenants will see the adapter.
    pub(in crate::adapters) fn allows(&self, uri: &AdapterUri, owner: Option<&str>) -> bool {
        self.0.iter().any(|prefix| prefix.covers(uri, owner))
    }
}

impl AllowedPrefix {
    fn parse(text: &str) -> Result<Self, AllowListError> {
        let failed = |reason| AllowListError { prefix: text.to_owned(), reason };
        let of_uri = |error: UriError| failed(error.reason);
        let scheme =
            UriScheme::EACH.into_iter().find(|scheme| text.starts_with(&format!("{}://", scheme.name())));
        let scheme = scheme.ok_or_else(|| failed("has no scheme of an adapter"))?;
        let path = &text[scheme.name().len() + "://".len()..];
        let path = if scheme == UriScheme::File {
            path.strip_prefix('/').ok_or_else(|| failed("names a host, but files are on this one"))?
        } else {
            path
        };
        // The placeholder is no valid part, so a word takes its place for the check.
        super::parts(&path.replace(TENANT, "tenant"))
            .map_err(|reason| of_uri(super::refused(text, reason)))?;
        let parts: Vec<_> = path.trim_end_matches('/').split('/').map(PrefixPart::of).collect();
        let is_mixed = |part: &PrefixPart| matches!(part, PrefixPart::Exactly(text) if text.contains(TENANT));
        if parts.iter().any(is_mixed) {
            return Err(failed("has '{tenant}' beside other text in one part of its path"));
        }
        if scheme == UriScheme::Hub && parts.len() > 2 {
            return Err(failed("has more parts than an organization and a name"));
        }
        Ok(Self { scheme, parts })
    }

    fn covers(&self, uri: &AdapterUri, owner: Option<&str>) -> bool {
        let fits = |(part, given): (&PrefixPart, &String)| match part {
            PrefixPart::Exactly(text) => text == given,
            PrefixPart::Tenant => owner == Some(given),
        };
        let given = uri.parts();
        self.scheme == uri.scheme()
            && self.parts.len() <= given.len()
            && self.parts.iter().zip(given).all(fits)
    }
}

impl PrefixPart {
    fn of(part: &str) -> Self {
        if part == TENANT { Self::Tenant } else { Self::Exactly(part.to_owned()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(prefixes: &[&str]) -> Result<AllowList, AllowListError> {
        AllowList::parse(&prefixes.iter().map(|&prefix| prefix.to_owned()).collect::<Vec<_>>())
    }

    fn allows(prefixes: &[&str], uri: &str, owner: Option<&str>) -> bool {
        list(prefixes).unwrap().allows(&uri.parse().unwrap(), owner)
    }

    #[test]
    fn a_prefix_ends_at_a_border_of_parts() {
        for prefix in ["hf://my-org", "hf://my-org/"] {
            assert!(allows(&[prefix], "hf://my-org/name@v1", None));
            assert!(!allows(&[prefix], "hf://my-org-evil/name", None));
            assert!(!allows(&[prefix], "s3://my-org/name", None));
        }
        assert!(allows(&["hf://org/name"], "hf://org/name@refs/pr/1", None));
        assert!(!allows(&["hf://org/name"], "hf://org/name2", None));
        assert!(allows(&["hf://a", "s3://bucket/adapters/"], "s3://bucket/adapters/team/sql", None));
        assert!(!allows(&["s3://bucket/adapters/"], "s3://bucket/adapters-private/x", None));
        assert!(!allows(&["s3://bucket/adapters/x"], "s3://bucket/adapters", None));
        assert!(allows(&["file:///srv/adapters"], "file:///srv/adapters/sql", None));
        assert!(!allows(&["file:///srv/adapters"], "file:///srv/adapters2/sql", None));
        assert!(!allows(&[], "hf://org/name", None));
    }

    #[test]
    fn the_placeholder_is_the_owner_and_nobody_else() {
        let own = &["s3://bucket/{tenant}/"];
        assert!(allows(own, "s3://bucket/alice/sql", Some("alice")));
        assert!(!allows(own, "s3://bucket/alice/sql", Some("bob")));
        assert!(!allows(own, "s3://bucket/alice/sql", None));
    }

    #[test]
    fn a_malformed_prefix_is_named() {
        for prefix in [
            "",
            "hf://",
            "s3://",
            "file:///",
            "file://host/x",
            "https://hub/x",
            "hf://a/b/c",
            "hf://org/name@v1",
            "s3://b/../c",
            "s3://b/x*",
            "s3://b/x{tenant}",
            "s3://key@b/x",
            "hf:/org",
        ] {
            let error = list(&["hf://org", prefix]).expect_err(prefix).to_string();
            assert!(error.starts_with(&format!("'{prefix}'")), "{error}");
        }
        list(&["hf://org"; MAX_PREFIXES + 1]).unwrap_err();
    }
}
