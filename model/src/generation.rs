//! The identity of an adapter: a content hash, never a name.

use std::fmt;

/// 256-bit content hash of an adapter's weights and configuration (DESIGN: adapter identity).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(pub [u8; 32]);

impl fmt::Display for Generation {
    /// Lower-case hexadecimal, 64 characters; `{:.12}` shortens it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hexadecimal(&self.0, f)
    }
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Generation({self:.12})")
    }
}

/// What an adapter is called inside an executor: its generation under its owner. The same weights under two owners
/// are two adapters, so that neither can tell by time or memory what the other has loaded (RELIABILITY T2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterId(pub [u8; 32]);

impl AdapterId {
    /// The id of `generation` under `owner`, a hash of the tenant it belongs to (zeros: everybody's).
    #[must_use]
    pub fn new(owner: &[u8; 32], generation: Generation) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 adapter id v1");
        hasher.update(owner).update(&generation.0);
        Self(*hasher.finalize().as_bytes())
    }
}

impl fmt::Display for AdapterId {
    /// Lower-case hexadecimal, 64 characters; `{:.12}` shortens it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hexadecimal(&self.0, f)
    }
}

impl fmt::Debug for AdapterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AdapterId({self:.12})")
    }
}

fn hexadecimal(bytes: &[u8; 32], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    use fmt::Write as _;
    let mut text = String::with_capacity(64);
    for byte in bytes {
        write!(text, "{byte:02x}")?;
    }
    f.pad(&text)
}
