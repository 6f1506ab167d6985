//! Table of the bytes of every token.

use super::{byte_level, limits, names::Names};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The vocabulary has no token with this id.
    Absent,
    Text,
    /// Stands for text that the vocabulary cannot spell; decodes to no text.
    Unknown,
    /// Controls the model; decodes to no text.
    Control,
}

/// How the spellings of tokens encode bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenEncoding {
    /// Bytes are spelled in GPT-2's alphabet.
    ByteLevel,
    /// U+2581 is a space, `<0x0A>` a byte.
    SentencePiece,
}

impl TokenEncoding {
    fn append_bytes(self, spelling: &str, out: &mut Vec<u8>) {
        match self {
            Self::ByteLevel => byte_level::append_bytes(spelling, out),
            Self::SentencePiece => match byte_piece(spelling) {
                Some(byte) => out.push(byte),
                None => out.extend_from_slice(spelling.replace(super::sentencepiece::SPACE, " ").as_bytes()),
            },
        }
    }
}

/// Returns the byte of a byte-fallback piece: `<0x0A>` gives 10.
pub(super) fn byte_piece(spelling: &str) -> Option<u8> {
    let digits = spelling.strip_prefix("<0x")?.strip_suffix('>')?;
    let hexadecimal = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    hexadecimal.then(|| u8::from_str_radix(digits, 16).ok())?
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Token<'a> {
    pub(super) id: u32,
    pub(super) spelling: &'a str,
    pub(super) kind: Kind,
    /// True for an added token, whose spelling is its text.
    pub(super) literal: bool,
}

/// Bytes and kinds of all tokens, by id.
#[derive(Debug)]
pub(super) struct Vocabulary {
    bytes: Vec<u8>,
    /// End offset of each token's bytes; the previous end is the start.
    ends: Vec<u32>,
    kinds: Vec<Kind>,
}

impl Vocabulary {
    /// Builds the table from `tokens` in any order; of duplicate ids the later one counts. The error
    /// describes an id or spelling beyond the limits.
    pub(super) fn new<'a>(
        tokens: impl Iterator<Item = Token<'a>>,
        encoding: TokenEncoding,
    ) -> Result<Self, String> {
        let mut sorted = Vec::new();
        for token in tokens {
            if token.id as usize >= limits::MAX_TOKENS {
                return Err(format!("token id {} is beyond the limit of {}", token.id, limits::MAX_TOKENS));
            }
            check_length(token.spelling)?;
            sorted.push(token);
        }
        // Sorting avoids an index by id, in which one large id would cost as much as all ids below it.
        sorted.sort_by_key(|token| token.id);
        let ids = sorted.last().map_or(0, |token| token.id as usize + 1);
        let mut table =
            Self { bytes: Vec::new(), ends: Vec::with_capacity(ids), kinds: Vec::with_capacity(ids) };
        for (index, token) in sorted.iter().enumerate() {
            if sorted.get(index + 1).is_some_and(|next| next.id == token.id) {
                continue;
            }
            while table.len() < token.id as usize {
                table.push(None, encoding);
            }
            table.push(Some(*token), encoding);
        }
        Ok(table)
    }

    fn push(&mut self, token: Option<Token<'_>>, encoding: TokenEncoding) {
        if let Some(token) = token {
            if token.literal {
                self.bytes.extend_from_slice(token.spelling.as_bytes());
            } else {
                encoding.append_bytes(token.spelling, &mut self.bytes);
            }
        }
        self.kinds.push(token.map_or(Kind::Absent, |token| token.kind));
        // The total is at most MAX_TOKENS x MAX_TOKEN_BYTES, so saturation is beyond any file.
        self.ends.push(u32::try_from(self.bytes.len()).unwrap_or(u32::MAX));
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    fn kind(&self, token: u32) -> Kind {
        self.kinds.get(token as usize).copied().unwrap_or(Kind::Absent)
    }

    pub(super) fn bytes(&self, token: u32) -> Option<&[u8]> {
        if self.kind(token) == Kind::Absent {
            return None;
        }
        let index = token as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        self.bytes.get(start as usize..self.ends[index] as usize)
    }

    pub(super) fn is_special(&self, token: u32) -> bool {
        matches!(self.kind(token), Kind::Control | Kind::Unknown)
    }

    /// Returns the names of all control tokens whose bytes are UTF-8 text.
    pub(super) fn control_names(&self) -> Names {
        let ids = (0..self.len()).filter_map(|id| u32::try_from(id).ok()).filter(|id| self.is_control(*id));
        Names::new(ids.filter_map(|id| Some((String::from_utf8(self.bytes(id)?.to_vec()).ok()?, id))))
    }

    pub(super) fn is_control(&self, token: u32) -> bool {
        self.kind(token) == Kind::Control
    }
}

/// Refuses a spelling longer than `MAX_TOKEN_BYTES`.
pub(super) fn check_length(spelling: &str) -> Result<(), String> {
    let bytes = spelling.len();
    if bytes > limits::MAX_TOKEN_BYTES {
        return Err(format!("a token of {bytes} bytes is beyond the limit of {}", limits::MAX_TOKEN_BYTES));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(id: u32, spelling: &str) -> Token<'_> {
        Token { id, spelling, kind: Kind::Text, literal: false }
    }

    #[test]
    fn pieces_stand_for_spaces_and_bytes() {
        let pieces = [text(0, "▁a▁"), text(1, "<0x0A>"), text(3, "<0xZZ>"), text(2, "<0x0a")];
        let table = Vocabulary::new(pieces.into_iter(), TokenEncoding::SentencePiece).unwrap();
        let bytes: Vec<_> = (0..5).map(|id| table.bytes(id)).collect();
        let expected: [Option<&[u8]>; 5] = [Some(b" a "), Some(b"\n"), Some(b"<0x0a"), Some(b"<0xZZ>"), None];
        assert_eq!(bytes, expected);
    }

    #[test]
    fn ids_without_a_token_have_no_bytes() {
        let table = Vocabulary::new([text(2, "a")].into_iter(), TokenEncoding::ByteLevel).unwrap();
        assert_eq!((table.len(), table.bytes(1), table.bytes(2)), (3, None, Some(b"a".as_slice())));
    }

    #[test]
    fn of_two_tokens_of_one_id_the_later_counts() {
        let tokens = [text(1, "b"), text(0, "a"), text(1, "c")];
        let table = Vocabulary::new(tokens.into_iter(), TokenEncoding::ByteLevel).unwrap();
        assert_eq!(
            (table.len(), table.bytes(0), table.bytes(1)),
            (2, Some(b"a".as_slice()), Some(b"c".as_slice()))
        );
    }

    #[test]
    fn an_id_beyond_the_limit_is_refused_before_anything_is_allocated_for_it() {
        let error = Vocabulary::new([text(u32::MAX, "a")].into_iter(), TokenEncoding::ByteLevel).unwrap_err();
        assert!(error.contains("4294967295"), "{error}");
    }
}
