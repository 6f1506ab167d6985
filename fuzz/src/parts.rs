//! Encodes several files in one input: each after its length as 32 little-endian bits.
//!
//! Mutations sometimes break the lengths. Remaining bytes belong to the next part, and missing parts are
//! empty, so every input is valid.

/// Joins `parts` to one input.
///
/// # Panics
/// If a part has 4 GiB or more.
#[must_use]
pub fn join(parts: &[&[u8]]) -> Vec<u8> {
    let mut joined = Vec::new();
    for part in parts {
        let length = u32::try_from(part.len()).expect("a part is shorter than 4 GiB");
        joined.extend_from_slice(&length.to_le_bytes());
        joined.extend_from_slice(part);
    }
    joined
}

/// Returns the first `N` parts of `input`.
#[must_use]
pub fn split<const N: usize>(input: &[u8]) -> [&[u8]; N] {
    let mut rest = input;
    std::array::from_fn(|_| {
        let Some((length, behind)) = rest.split_first_chunk() else {
            return std::mem::take(&mut rest);
        };
        let length = u32::from_le_bytes(*length) as usize;
        let (part, behind) = behind.split_at(length.min(behind.len()));
        rest = behind;
        part
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_joined_is_split_again_and_anything_can_be_split() {
        let joined = join(&[b"one", b"", b"three"]);
        assert_eq!(split::<4>(&joined), [b"one".as_slice(), b"", b"three", b""]);
        assert_eq!(split::<2>(&[255, 255, 255, 255, 7]), [[7].as_slice(), b""]);
        assert_eq!(split::<2>(b"ab"), [b"ab".as_slice(), b""]);
    }
}
