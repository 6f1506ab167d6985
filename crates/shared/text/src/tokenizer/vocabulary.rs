//! What every token stands for, in bytes.

use super::{byte_level, limits, names::Names};

/// What a token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// No token has this id.
    Absent,
    /// Text.
    Text,
    /// Stands for text that the vocabulary cannot spell; no text itself.
    Unknown,
    /// Steers the model; no text.
    Control,
}

/// How spellings stand for bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// In GPT-2's alphabet of bytes.
    ByteLevel,
    /// U+2581 is a space, `<0x0A>` a byte.
    SentencePiece,
}

impl Spelling {
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

/// The byte of a byte-fallback piece: `<0x0A>` is 10.
pub(super) fn byte_piece(spelling: &str) -> Option<u8> {
    let digits = spelling.strip_prefix("<0x")?.strip_suffix('>')?;
    let hexadecimal = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    hexadecimal.then(|| u8::from_str_radix(digits, 16).ok())?
}

/// One token, as its file has it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Token<'a> {
    pub(super) id: u32,
    pub(super) spelling: &'a str,
    pub(super) kind: Kind,
    /// An added token: its spelling is its text.
    pub(super) literal: bool,
}

/// The bytes and kinds of all tokens, by id.
#[derive(Debug)]
pub(super) struct Vocabulary {
    bytes: Vec<u8>,
    /// Where the bytes of a token end; they begin where those of the token before end.
    ends: Vec<u32>,
    kinds: Vec<Kind>,
}

impl Vocabulary {
    /// The table of `tokens`, in any order. Where an id comes twice the later one counts. Says what is wrong if an
    /// id or a spelling is beyond the limits.
    pub(super) fn new<'a>(
        tokens: impl Iterator<Item = Token<'a>>,
        spelling: Spelling,
    ) -> Result<Self, String> {
        let mut sorted = Vec::new();
        for token in tokens {
            if token.id as usize >= limits::MAX_TOKENS {
                return Err(format!("token id {} is beyond the limit of {}", token.id, limits::MAX_TOKENS));
            }
            check_length(token.spelling)?;
            sorted.push(token);
        }
        // Sorted and not indexed: one large id must not cost as much as the tokens that would be below it.
        sorted.sort_by_key(|token| token.id);
        let ids = sorted.last().map_or(0, |token| token.id as usize + 1);
        let mut table =
            Self { bytes: Vec::new(), ends: Vec::with_capacity(ids), kinds: Vec::with_capacity(ids) };
        for (index, token) in sorted.iter().enumerate() {
            if sorted.get(index + 1).is_some_and(|next| next.id == token.id) {
                continue;
            }
            while table.len() < token.id as usize {
                table.push(None, spelling);
            }
            table.push(Some(*token), spelling);
        }
        Ok(table)
    }

    fn push(&mut self, token: Option<Token<'_>>, spelling: Spelling) {
        if let Some(token) = token {
            if token.literal {
                self.bytes.extend_from_slice(token.spelling.as_bytes());
            } else {
                spelling.append_bytes(token.spelling, &mut self.bytes);
            }
        }
        self.kinds.push(token.map_or(Kind::Absent, |token| token.kind));
        // At most MAX_TOKENS x MAX_TOKEN_BYTES: saturation is beyond any file.
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

    /// Every control token whose bytes are text.
    pub(super) fn control_names(&self) -> Names {
        let ids = (0..self.len()).filter_map(|id| u32::try_from(id).ok()).filter(|id| self.is_control(*id));
        Names::new(ids.filter_map(|id| Some((String::from_utf8(self.bytes(id)?.to_vec()).ok()?, id))))
    }

    pub(super) fn is_control(&self, token: u32) -> bool {
        self.kind(token) == Kind::Control
    }
}

/// Refuses a spelling that is longer than any vocabulary needs.
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
        let table = Vocabulary::new(pieces.into_iter(), Spelling::SentencePiece).unwrap();
        let bytes: Vec<_> = (0..5).map(|id| table.bytes(id)).collect();
        let expected: [Option<&[u8]>; 5] = [Some(b" a "), Some(b"\n"), Some(b"<0x0a"), Some(b"<0xZZ>"), None];
        assert_eq!(bytes, expected);
    }

    #[test]
    fn ids_without_a_token_have_no_bytes() {
        let table = Vocabulary::new([text(2, "a")].into_iter(), Spelling::ByteLevel).unwrap();
        assert_eq!((table.len(), table.bytes(1), table.bytes(2)), (3, None, Some(b"a".as_slice())));
    }

    #[test]
    fn of_two_tokens_of_one_id_the_later_counts() {
        let tokens = [text(1, "b"), text(0, "a"), text(1, "c")];
        let table = Vocabulary::new(tokens.into_iter(), Spelling::ByteLevel).unwrap();
        assert_eq!(
            (table.len(), table.bytes(0), table.bytes(1)),
            (2, Some(b"a".as_slice()), Some(b"c".as_slice()))
        );
    }

    #[test]
    fn an_id_beyond_the_limit_is_refused_before_anything_is_allocated_for_it() {
        let error = Vocabulary::new([text(u32::MAX, "a")].into_iter(), Spelling::ByteLevel).unwrap_err();
        assert!(error.contains("4294967295"), "{error}");
    }
}
