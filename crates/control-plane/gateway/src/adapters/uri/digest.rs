//! SHA-256 of an adapter's weights, by which a request or a URI pins them.

use std::fmt;

use sha2::{Digest as _, Sha256};

/// Prefix of a digest in the field `digest` of a request.
const PREFIX: &str = "sha256:";

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Digest([u8; 32]);

impl Digest {
    /// Parses 64 hexadecimal digits.
    pub(super) fn of_hex(text: &str) -> Option<Self> {
        // BLAKE3 has digests of the same length, and its crate parses them.
        blake3::Hash::from_hex(text).ok().map(|hash| Self(*hash.as_bytes()))
    }

    /// Parses `sha256:` and 64 hexadecimal digits.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        text.strip_prefix(PREFIX).and_then(Self::of_hex)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        blake3::Hash::from_bytes(self.0).to_hex().fmt(f)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// Digest of the bytes so far.
#[derive(Debug, Default)]
pub(in crate::adapters) struct DigestWriter(Sha256);

impl DigestWriter {
    pub(in crate::adapters) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(in crate::adapters) fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_that_of_sha256() {
        let mut writer = DigestWriter::default();
        writer.update(b"a");
        writer.update(b"bc");
        // FIPS 180-2, appendix B.1.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(writer.finish().to_string(), expected);
        assert_eq!(Digest::parse(&format!("sha256:{expected}")), Digest::of_hex(expected));
    }

    #[test]
    fn other_texts_are_no_digests() {
        for text in
            ["", "sha256:", "sha256:ab", "md5:00", &"0".repeat(64), &format!("sha256:{}", "g".repeat(64))]
        {
            assert_eq!(Digest::parse(text), None, "{text}");
        }
    }
}
