//! Selection of linear layers by name in PEFT's configuration.
//!
//! Patterns are regular expressions from an untrusted file. Number, length, compiled size and
//! backtracking are bounded, and a pattern that exceeds a bound is an error, not a mismatch. Most patterns
//! are plain names, sometimes hundreds, which need no regex engine.

use std::collections::BTreeSet;

use fancy_regex::{Regex, RegexBuilder};

use super::limits::MAX_PATTERN_BYTES;

/// Maximum backtracking steps for one name; an honest pattern needs a few dozen for the short names.
const MAX_BACKTRACKS: usize = 10_000;
/// Maximum bytes of a compiled part; the length of a pattern bounds the number of its parts.
const MAX_COMPILED_BYTES: usize = 1 << 15;

#[derive(Debug)]
pub(super) enum Pattern {
    Expression(Regex),
    /// A name in which a dot matches any character.
    Name {
        name: String,
        anchor: Anchor,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Anchor {
    Whole,
    /// The last dotted parts.
    Ending,
}

impl Pattern {
    /// Matches whole names, like Python's `re.fullmatch`.
    pub(super) fn whole(pattern: &str) -> Result<Self, String> {
        if is_plain(pattern) {
            return Ok(Self::Name { name: pattern.to_owned(), anchor: Anchor::Whole });
        }
        // The pattern must compile alone first; an unbalanced bracket could otherwise close the added group.
        Self::compile(pattern, pattern)?;
        Self::compile(pattern, &format!("^(?:{pattern})$"))
    }

    /// Matches the last parts of a name, as `rank_pattern` and `alpha_pattern` do.
    pub(super) fn ending(pattern: &str) -> Result<Self, String> {
        if is_plain(pattern) {
            return Ok(Self::Name { name: pattern.to_owned(), anchor: Anchor::Ending });
        }
        Self::compile(pattern, &format!(r"^(.*\.)?({pattern})$"))
    }

    /// Finds the number after a part of a name, as `layers_pattern` does.
    pub(super) fn numbered(pattern: &str) -> Result<Self, String> {
        Self::compile(pattern, &format!(r"^(?:(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.)"))
    }

    fn compile(pattern: &str, full: &str) -> Result<Self, String> {
        if pattern.len() > MAX_PATTERN_BYTES {
            return Err(format!("has a pattern of more than {MAX_PATTERN_BYTES} bytes"));
        }
        RegexBuilder::new(full)
            .backtrack_limit(MAX_BACKTRACKS)
            .delegate_size_limit(MAX_COMPILED_BYTES)
            .delegate_dfa_size_limit(MAX_COMPILED_BYTES)
            .build()
            .map(Self::Expression)
            .map_err(|error| format!("has a pattern that cannot be compiled: {error}"))
    }

    pub(super) fn matches(&self, name: &str) -> Result<bool, String> {
        match self {
            Self::Expression(regex) => regex.is_match(name).map_err(|error| too_long(&error)),
            Self::Name { name: pattern, anchor } => Ok(name_matches(pattern, *anchor, name)),
        }
    }

    fn number(&self, name: &str) -> Result<Option<usize>, String> {
        let Self::Expression(regex) = self else { return Ok(None) };
        let captures = regex.captures(name).map_err(|error| too_long(&error))?;
        Ok(captures.and_then(|captures| captures.name("idx")?.as_str().parse().ok()))
    }
}

fn too_long(error: &fancy_regex::Error) -> String {
    format!("has a pattern that takes too long: {error}")
}

/// True for patterns within the length limit whose only special characters are dots.
pub(super) fn is_plain(pattern: &str) -> bool {
    pattern.len() <= MAX_PATTERN_BYTES
        && pattern.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.'))
}

fn name_matches(pattern: &str, anchor: Anchor, name: &str) -> bool {
    let Some(front) = name.len().checked_sub(pattern.len()) else { return false };
    let (front, tail) = name.as_bytes().split_at(front);
    let anchored = match anchor {
        Anchor::Whole => front.is_empty(),
        Anchor::Ending => front.is_empty() || front.ends_with(b"."),
    };
    anchored && pattern.bytes().zip(tail).all(|(wanted, &found)| wanted == b'.' || wanted == found)
}

/// A list of names, or one pattern for whole names.
#[derive(Debug)]
pub(super) enum ModuleNames {
    /// Names, or last dotted parts of names.
    List(Vec<String>),
    Pattern(Pattern),
    /// Every linear layer for which the weights have factors. PEFT writes explicit layer names on saving;
    /// Tinker writes `all-linear`, even for adapters of the head, or of attention or feed-forward alone.
    AllLinear,
}

impl ModuleNames {
    pub(super) fn select(&self, name: &str) -> Result<bool, String> {
        match self {
            Self::List(list) => Ok(list.iter().any(|entry| is_tail(name, entry))),
            Self::Pattern(pattern) => pattern.matches(name),
            Self::AllLinear => Ok(true),
        }
    }

    /// Selects a name as [`select`](Self::select) does; list entries may also match the end of a part.
    pub(super) fn select_by_ending(&self, name: &str) -> Result<bool, String> {
        match self {
            Self::List(list) => Ok(list.iter().any(|entry| name.ends_with(entry))),
            Self::Pattern(_) | Self::AllLinear => self.select(name),
        }
    }
}

/// True if `tail` equals `name` or its last dotted parts.
pub(super) fn is_tail(name: &str, tail: &str) -> bool {
    name.strip_suffix(tail).is_some_and(|front| front.is_empty() || front.ends_with('.'))
}

#[derive(Debug)]
pub(super) struct LayerFilter {
    pub(super) indices: Vec<usize>,
    /// Patterns before a layer's number; an empty list accepts any prefix.
    pub(super) patterns: Vec<Pattern>,
}

impl LayerFilter {
    pub(super) fn select(&self, name: &str) -> Result<bool, String> {
        Ok(self.number(name)?.is_some_and(|layer| self.indices.contains(&layer)))
    }

    /// Returns the layer number from the first pattern that matches.
    fn number(&self, name: &str) -> Result<Option<usize>, String> {
        if self.patterns.is_empty() {
            return Ok(first_number(name));
        }
        for pattern in &self.patterns {
            if let Some(number) = pattern.number(name)? {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }
}

/// Returns the first numeric part of a name that has two or more parts before it and one after it.
fn first_number(name: &str) -> Option<usize> {
    let mut parts = name.split('.').skip(2).peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_some() && !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            return part.parse().ok();
        }
    }
    None
}

/// Values by pattern, each with the pattern's text; the first match decides.
#[derive(Debug)]
pub(super) struct ByPattern<T>(pub(super) Vec<(String, Pattern, T)>);

impl<T: Copy> ByPattern<T> {
    pub(super) fn get(&self, name: &str, otherwise: T) -> Result<T, String> {
        for (_, pattern, value) in &self.0 {
            if pattern.matches(name)? {
                return Ok(*value);
            }
        }
        Ok(otherwise)
    }

    /// Returns the texts of patterns that match none of `names`; exceeded bounds count as a match here.
    pub(super) fn unused<'a>(&'a self, names: &'a BTreeSet<String>) -> impl Iterator<Item = &'a str> {
        let is_used = |pattern: &Pattern| names.iter().any(|name| pattern.matches(name).unwrap_or(true));
        self.0.iter().filter(move |(_, pattern, _)| !is_used(pattern)).map(|(text, ..)| text.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q0: &str = "model.layers.0.self_attn.q_proj";

    #[test]
    fn a_listed_name_matches_whole_parts_only() {
        let names = ModuleNames::List(vec!["q_proj".into(), "layers.1.mlp.up_proj".into()]);
        assert!(names.select(Q0).unwrap());
        assert!(names.select("model.layers.1.mlp.up_proj").unwrap());
        assert!(!names.select("model.layers.11.mlp.up_proj").unwrap());
        assert!(!names.select("model.layers.0.self_attn.fq_proj").unwrap());
    }

    #[test]
    fn a_pattern_for_targets_must_match_the_whole_name() {
        let matches = |pattern, name| Pattern::whole(pattern).unwrap().matches(name).unwrap();
        assert!(matches(r".*\.q_proj", Q0));
        assert!(!matches("q_proj", Q0));
        assert!(matches(r"a|model.*q_proj", Q0), "alternatives are anchored together");
        assert!(matches(r"(?!.*layers\.0\.).*", "model.layers.1.mlp.up_proj"));
        assert!(!matches(r"(?!.*layers\.0\.).*", Q0));
    }

    #[test]
    fn a_pattern_for_ranks_matches_the_end_of_a_name_and_the_first_match_wins() {
        let entry = |text: &str, rank| (text.to_owned(), Pattern::ending(text).unwrap(), rank);
        let ranks = ByPattern(vec![entry(r"layers\.0\..*q_proj", 4), entry("q_proj", 8), entry("proj", 16)]);
        assert_eq!(ranks.get(Q0, 1), Ok(4));
        assert_eq!(ranks.get("model.layers.1.self_attn.q_proj", 1), Ok(8));
        assert_eq!(ranks.get("model.layers.1.self_attn.v_proj", 1), Ok(1), "`proj` is no whole part");
        assert_eq!(ranks.unused(&[Q0.to_owned()].into()).collect::<Vec<_>>(), ["proj"]);
    }

    #[test]
    fn a_plain_name_means_what_the_expression_would() {
        for pattern in
            ["q_proj", "model.layers.0.self_attn.q_proj", "self_attn.q_proj", "attn.q_proj", "0.", "", "...."]
        {
            for name in [Q0, "q_proj", "model.layers.00.q_proj", "lm_head", "xself_attn.q_proj"] {
                let expression = |full: String| Pattern::compile(pattern, &full).unwrap().matches(name);
                let whole = expression(format!("^(?:{pattern})$"));
                assert_eq!(Pattern::whole(pattern).unwrap().matches(name), whole, "{pattern} {name}");
                let ending = expression(format!(r"^(.*\.)?({pattern})$"));
                assert_eq!(Pattern::ending(pattern).unwrap().matches(name), ending, "{pattern} {name}");
            }
        }
    }

    #[test]
    fn layers_are_found_by_the_first_number_or_by_their_pattern() {
        let any = LayerFilter { indices: vec![3], patterns: vec![] };
        assert!(any.select("model.layers.3.self_attn.q_proj").unwrap());
        assert!(!any.select(Q0).unwrap());
        assert!(!any.select("lm_head").unwrap());
        let named =
            |pattern| LayerFilter { indices: vec![3], patterns: vec![Pattern::numbered(pattern).unwrap()] };
        assert!(named("layers").select("model.layers.3.mlp.up_proj").unwrap());
        assert!(!named("blocks").select("model.layers.3.mlp.up_proj").unwrap());
        assert!(!named("ayers").select("model.layers.3.mlp.up_proj").unwrap());
    }

    #[test]
    fn a_pattern_that_backtracks_without_end_is_an_error() {
        let bomb = Pattern::whole(r"(?=(.*.*.*.*.*.*.*.*)*z)\1").unwrap();
        assert!(bomb.matches(Q0).is_err());
        assert!(Pattern::whole("(").is_err());
        assert!(Pattern::whole(&"a*".repeat(MAX_PATTERN_BYTES)).is_err());
        assert!(Pattern::whole("(?:a{1000}){1000}").is_err(), "too large when compiled");
    }
}
