//! Hashes, keys and signatures as lower-case hexadecimal text.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// The reason why a text is not the expected hexadecimal number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected {digits} hexadecimal digits")]
pub struct HexError {
    /// Number of digits that the value has.
    pub digits: usize,
}

/// Defines an array of bytes that is written as hexadecimal text.
macro_rules! hexadecimal {
    ($(#[$doc:meta])* $name:ident, $bytes:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq)]
        pub struct $name(pub [u8; $bytes]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = HexError;

            fn from_str(text: &str) -> Result<Self, HexError> {
                let mut bytes = [0; $bytes];
                decode(text, &mut bytes).map(|()| Self(bytes))
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
            }
        }
    };
}

hexadecimal! {
    /// BLAKE3 hash of a content, or a link of a chain.
    Hash, 32
}

hexadecimal! {
    /// Ed25519 public key of a deployment.
    PublicKey, 32
}

hexadecimal! {
    /// Ed25519 signature over the last link of a chain.
    Signature, 64
}

fn decode(text: &str, bytes: &mut [u8]) -> Result<(), HexError> {
    let error = HexError { digits: 2 * bytes.len() };
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if text.len() != error.digits || !text.bytes().all(is_digit) {
        return Err(error);
    }
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let pair = std::str::from_utf8(pair).map_err(|_| error)?;
        *byte = u8::from_str_radix(pair, 16).map_err(|_| error)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_64_lower_case_digits_and_nothing_else() {
        let hash = Hash([0xab; 32]);
        assert_eq!(hash.to_string().parse(), Ok(hash));
        for bad in ["", "ab", &"AB".repeat(32), &"ab".repeat(33), &"+a".repeat(32), &"é".repeat(32)] {
            assert_eq!(bad.parse::<Hash>(), Err(HexError { digits: 64 }), "{bad}");
        }
    }
}
