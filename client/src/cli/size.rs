//! Parsing of byte sizes.

use std::str::FromStr;

/// A number of bytes: `1048576`, `512KiB`, `256MiB`, `4GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ByteSize(pub(super) u64);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let shift = match &text[digits.len()..] {
            "" | "B" => 0,
            "KiB" | "K" => 10,
            "MiB" | "M" => 20,
            "GiB" | "G" => 30,
            unit => return Err(format!("`{unit}` is not a unit: use KiB, MiB or GiB")),
        };
        let number: u64 = digits.parse().map_err(|_| format!("`{digits}` is not a whole number"))?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(|| format!("{text} is too large"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_with_and_without_units() {
        for (text, bytes) in
            [("17", 17), ("0B", 0), ("3KiB", 3 << 10), ("256MiB", 256 << 20), ("4G", 4 << 30)]
        {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in ["", "MiB", "1.5GiB", "-1", "3 parsec", "99999999999GiB"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }
}
