//! Addresses of the layer service of an executor.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

use security::address::{HostPort, NotHostPort};

const LOCAL_SOCKET: &str = "layers.sock";

const IPC_SOCKET: &str = "layers.zmq";

/// Address of a layer server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// Shared memory on this host: path of the control socket, or of its directory.
    Local(PathBuf),
    /// ZeroMQ over a private Unix socket on this host.
    Ipc(PathBuf),
    /// ZeroMQ inside TLS 1.3.
    Tls(HostPort),
}

/// Reason why a text is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The text or its path is empty.
    #[error("the executor's address is empty: name its directory, or tls://HOST:PORT")]
    Empty,
    /// The scheme is not supported.
    #[error("`{0}://` is not supported: use a path, ipc://PATH or tls://HOST:PORT")]
    Scheme(String),
    /// Host or port is missing or malformed.
    #[error(transparent)]
    HostPort(#[from] NotHostPort),
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        match text.split_once("://") {
            None if text.is_empty() => Err(AddressError::Empty),
            None => Ok(Self::Local(text.into())),
            Some((_, "")) => Err(AddressError::Empty),
            Some(("ipc", path)) => Ok(Self::Ipc(path.into())),
            Some(("tls", rest)) => Ok(Self::Tls(rest.parse()?)),
            Some((scheme, _)) => Err(AddressError::Scheme(scheme.to_owned())),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(path) => write!(f, "{}", path.display()),
            Self::Ipc(path) => write!(f, "ipc://{}", path.display()),
            Self::Tls(address) => write!(f, "tls://{address}"),
        }
    }
}

impl Address {
    /// Returns the kind of transport, for messages.
    #[must_use]
    pub fn transport(&self) -> &'static str {
        match self {
            Self::Local(_) => "shared memory",
            Self::Ipc(_) => "a Unix socket",
            Self::Tls(_) => "TLS",
        }
    }

    /// Returns a plain file name for cached data of this executor, which no other executor shares.
    #[must_use]
    pub fn cache_name(&self) -> String {
        match self {
            Self::Local(_) | Self::Ipc(_) => "this-host".to_owned(),
            Self::Tls(HostPort { host, port }) => format!("{}-{port}", host.to_ascii_lowercase()),
        }
    }

    /// Returns the path of the socket, unless the address is a TLS address.
    #[must_use]
    pub fn socket(&self) -> Option<PathBuf> {
        let within = |path: &Path, name| if path.is_dir() { path.join(name) } else { path.to_owned() };
        match self {
            Self::Local(path) => Some(within(path, LOCAL_SOCKET)),
            Self::Ipc(path) => Some(within(path, IPC_SOCKET)),
            Self::Tls(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_path_or_names_its_scheme() {
        let tls = |host: &str, port| Address::Tls(HostPort { host: host.to_owned(), port });
        for (text, address) in [
            ("run/executor", Address::Local("run/executor".into())),
            ("/run/layers.sock", Address::Local("/run/layers.sock".into())),
            ("ipc:///run/layers.zmq", Address::Ipc("/run/layers.zmq".into())),
            ("tls://gpu.example.org:7443", tls("gpu.example.org", 7443)),
            ("tls://127.0.0.1:1", tls("127.0.0.1", 1)),
            ("tls://[::1]:7443", tls("::1", 7443)),
        ] {
            assert_eq!(text.parse(), Ok(address.clone()), "{text}");
            assert_eq!(address.to_string(), text);
        }
    }

    #[test]
    fn what_is_no_address_is_refused_with_what_one_looks_like() {
        for text in ["", "tls://", "ipc://"] {
            assert_eq!(text.parse::<Address>(), Err(AddressError::Empty), "{text}");
        }
        assert_eq!("tcp://host:1".parse::<Address>(), Err(AddressError::Scheme("tcp".to_owned())));
        assert!(matches!("tls://host".parse::<Address>(), Err(AddressError::HostPort(_))));
    }

    #[test]
    fn a_directory_stands_for_the_socket_in_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path();
        assert_eq!(Address::Local(path.into()).socket(), Some(path.join("layers.sock")));
        assert_eq!(Address::Ipc(path.into()).socket(), Some(path.join("layers.zmq")));
        assert_eq!(Address::Local(path.join("x.sock")).socket(), Some(path.join("x.sock")));
    }
}
