//! GPT-2's alphabet, in which byte-level vocabularies are spelled: a printable character for every byte.

/// The characters from U+0100 on represent the bytes without a printable Latin-1 character, in order.
const FIRST_STAND_IN: u32 = 0x100;

/// True if the byte's Latin-1 character represents the byte.
fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// Returns the byte of `character`; `None` if the alphabet lacks it.
fn byte_of(character: char) -> Option<u8> {
    let code = u32::from(character);
    match u8::try_from(code) {
        Ok(byte) => is_printable(byte).then_some(byte),
        Err(_) => {
            let index = usize::try_from(code.checked_sub(FIRST_STAND_IN)?).ok()?;
            (0..=u8::MAX).filter(|&byte| !is_printable(byte)).nth(index)
        }
    }
}

/// Appends the bytes of `spelling`; a spelling with other characters is appended as its UTF-8 bytes.
pub(super) fn append_bytes(spelling: &str, out: &mut Vec<u8>) {
    let start = out.len();
    for character in spelling.chars() {
        match byte_of(character) {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                out.extend_from_slice(spelling.as_bytes());
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let mut bytes: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
        assert_eq!(byte_of('Ń'), Some(0xad));
    }

    #[test]
    fn a_spelling_outside_of_the_alphabet_stands_for_itself() {
        let mut out = b"x".to_vec();
        append_bytes("Ġé", &mut out);
        assert_eq!(out, b"x \xe9");
        append_bytes("a日", &mut out);
        assert_eq!(out, [b"x \xe9".as_slice(), "a日".as_bytes()].concat());
    }
}
