//! Network addresses in the form HOST:PORT.

use std::{fmt, net::Ipv6Addr, str::FromStr};

/// Maximum length of a host name in DNS.
const MAX_HOST_BYTES: usize = 253;

/// A host and a TCP port of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostPort {
    /// Name or IP address of the host, without brackets; its certificate must be for it.
    pub host: String,
    /// TCP port, never 0.
    pub port: u16,
}

/// Host or port is missing or malformed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not HOST:PORT: write for instance gpu.example.org:7443, or [::1]:7443")]
pub struct NotHostPort(String);

impl FromStr for HostPort {
    type Err = NotHostPort;

    fn from_str(text: &str) -> Result<Self, NotHostPort> {
        let wrong = || NotHostPort(text.to_owned());
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let is_plain = |host: &str| !host.contains(|c: char| c == '/' || c == '@' || c.is_whitespace());
        let (host, fits) = match bare {
            Some(bare) => (bare, bare.parse::<Ipv6Addr>().is_ok()),
            None => (host, !host.contains(':') && is_plain(host)),
        };
        let port = port.parse::<u16>().map_err(|_| wrong())?;
        if !fits || host.is_empty() || host.len() > MAX_HOST_BYTES || port == 0 {
            return Err(wrong());
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_shown_again() {
        for (text, host, port) in [
            ("gpu.example.org:7443", "gpu.example.org", 7443),
            ("127.0.0.1:1", "127.0.0.1", 1),
            ("[::1]:2", "::1", 2),
        ] {
            let address = HostPort { host: host.to_owned(), port };
            assert_eq!((text.parse(), address.to_string().as_str()), (Ok(address.clone()), text));
        }
    }

    #[test]
    fn what_is_no_host_and_port_is_refused() {
        for text in [
            "",
            "host",
            "host:",
            ":1",
            "host:0",
            "host:65536",
            "::1:7443",
            "[::1:1",
            "a b:1",
            "u@h:1",
            "h/p:1",
        ] {
            assert_eq!(text.parse::<HostPort>(), Err(NotHostPort(text.to_owned())), "{text}");
        }
    }
}
