//! The identity of an adapter: a content hash, never a name.

use std::fmt;

/// 256-bit content hash of an adapter's weights and configuration (DESIGN: adapter identity).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(pub [u8; 32]);

impl fmt::Display for Generation {
    /// Lower-case hexadecimal, 64 characters; `{:.12}` shortens it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write as _;
        let mut text = String::with_capacity(64);
        for byte in self.0 {
            write!(text, "{byte:02x}")?;
        }
        f.pad(&text)
    }
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Generation({self:.12})")
    }
}
