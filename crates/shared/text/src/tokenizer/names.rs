//! Finds the names of control tokens in a text.

/// Names of control tokens, longer before shorter.
#[derive(Debug)]
pub(super) struct Names {
    names: Vec<(String, u32)>,
    /// First bytes of the names; nearly always one byte, so the search skips most of a text quickly.
    firsts: Vec<u8>,
}

impl Names {
    pub(super) fn new(tokens: impl Iterator<Item = (String, u32)>) -> Self {
        let mut names: Vec<_> = tokens.filter(|(name, _)| name.chars().nth(1).is_some()).collect();
        names.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
        let mut firsts: Vec<u8> = names.iter().filter_map(|(name, _)| name.bytes().next()).collect();
        firsts.sort_unstable();
        firsts.dedup();
        Self { names, firsts }
    }

    /// Returns the name at the start of `text`, with its token id.
    pub(super) fn at_start_of(&self, text: &str) -> Option<(&str, u32)> {
        let found = self.names.iter().find(|(name, _)| text.starts_with(name.as_str()));
        found.map(|(name, token)| (name.as_str(), *token))
    }

    /// Returns the first name in `text` with its byte position and token id.
    pub(super) fn first_in(&self, text: &str) -> Option<(usize, &str, u32)> {
        let may_begin = |at: &usize| self.firsts.contains(&text.as_bytes()[*at]);
        (0..text.len()).filter(may_begin).find_map(|at| {
            // The first byte of a name always begins a character.
            let (name, token) = self.at_start_of(text.get(at..)?)?;
            Some((at, name, token))
        })
    }
}
