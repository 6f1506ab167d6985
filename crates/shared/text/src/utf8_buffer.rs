//! Decodes UTF-8 from bytes that arrive in pieces.

/// Buffers bytes until they form complete characters.
#[derive(Debug, Clone, Default)]
pub(crate) struct Utf8Buffer {
    /// An incomplete character: at most three bytes between calls.
    pending: Vec<u8>,
}

impl Utf8Buffer {
    /// Takes `bytes` and appends all complete characters to `out`.
    pub(crate) fn push(&mut self, bytes: &[u8], out: &mut String) {
        self.pending.extend_from_slice(bytes);
        let mut done = 0;
        loop {
            let rest = &self.pending[done..];
            let Err(error) = std::str::from_utf8(rest).map(|text| out.push_str(text)) else {
                done = self.pending.len();
                break;
            };
            let (valid, after) = rest.split_at(error.valid_up_to());
            out.push_str(&String::from_utf8_lossy(valid));
            done += valid.len();
            // No error length means that the bytes begin a character that may still be completed.
            let Some(invalid) = error.error_len() else { break };
            debug_assert!(invalid <= after.len());
            out.push(char::REPLACEMENT_CHARACTER);
            done += invalid;
        }
        self.pending.drain(..done);
    }

    /// Ends the text; pending bytes become a replacement character.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes_in_pieces_become_the_text_of_the_whole(
            pieces in proptest::collection::vec(
                proptest::collection::vec(
                    prop_oneof![any::<u8>(), Just(0xf0), Just(0x9f), Just(0x98), Just(0x80), Just(b'a')],
                    0..5,
                ),
                0..12,
            ),
        ) {
            let mut buffer = Utf8Buffer::default();
            let mut out = String::new();
            for piece in &pieces {
                buffer.push(piece, &mut out);
                prop_assert!(buffer.pending.len() <= 3);
            }
            buffer.finish(&mut out);
            prop_assert_eq!(out, String::from_utf8_lossy(&pieces.concat()).into_owned());
        }
    }
}
