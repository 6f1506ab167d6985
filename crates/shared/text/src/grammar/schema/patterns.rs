//! Rewrites string patterns for the library, and answers questions about them.

use std::fmt::Write as _;

use llguidance::{
    derivre::{Regex, RegexAst, RegexBuilder, StateID},
    regex_to_lark,
};

/// Maximum number of names that a pattern is expanded to.
const MAX_NAMES: usize = 128;
/// Maximum length of such a name in bytes.
const MAX_NAME_BYTES: usize = 64;
/// Maximum number of steps of a query on a pattern, equal to the library's limit.
const FUEL: u64 = 10_000;
/// Maximum number of digits of a decimal number in a string, before the point and after it.
const MAX_DIGITS: usize = 32;

/// Returns patterns without look-around whose conjunction equals `pattern`.
///
/// # Errors
/// If the library does not support the pattern, with the reason.
pub(super) fn plain(pattern: &str) -> Result<Vec<String>, String> {
    let plain = match decimal(pattern) {
        Some(plain) => vec![plain],
        None => without_look_ahead(pattern),
    };
    plain.iter().try_for_each(|pattern| ast(pattern).map(|_| ()))?;
    Ok(plain)
}

/// Parses the pattern in search semantics, as the library does.
fn ast(pattern: &str) -> Result<RegexAst, String> {
    let ast = RegexAst::SearchRegex(regex_to_lark(pattern, "dw"));
    match RegexBuilder::new().mk(&ast) {
        Ok(_) => Ok(ast),
        Err(error) => Err(format!("{}; write it without", super::super::words_of(&error))),
    }
}

fn compiled(ast: &RegexAst) -> Option<Regex> {
    let mut builder = RegexBuilder::new();
    let expression = builder.mk(ast).ok()?;
    builder.to_regex_limited(expression, FUEL).ok()
}

/// Whether `pattern` matches somewhere in `text`; false for an invalid pattern.
pub(super) fn finds(pattern: &str, text: &str) -> bool {
    ast(pattern).ok().and_then(|ast| compiled(&ast)).is_some_and(|mut regex| regex.is_match(text))
}

/// True if certainly no text matches both patterns.
pub(super) fn exclude_each_other(first: &str, second: &str) -> bool {
    let (Ok(first), Ok(second)) = (ast(first), ast(second)) else { return false };
    compiled(&RegexAst::And(vec![first, second])).is_some_and(|mut regex| regex.always_empty())
}

/// Returns all texts that `pattern` matches, if they are few and short.
pub(super) fn names(pattern: &str) -> Option<Vec<String>> {
    let mut regex = compiled(&ast(pattern).ok()?)?;
    let (start, mut found) = (regex.initial_state(), Vec::new());
    collect(&mut regex, start, &mut Vec::new(), &mut found)?;
    found.into_iter().map(|name| String::from_utf8(name).ok()).collect()
}

fn collect(regex: &mut Regex, state: StateID, so_far: &mut Vec<u8>, found: &mut Vec<Vec<u8>>) -> Option<()> {
    if regex.is_accepting(state) {
        found.push(so_far.clone());
    }
    if found.len() > MAX_NAMES || so_far.len() > MAX_NAME_BYTES {
        return None;
    }
    for byte in 0..=u8::MAX {
        let next = regex.transition(state, byte);
        if !next.is_dead() {
            so_far.push(byte);
            collect(regex, next, so_far, found)?;
            so_far.pop();
        }
    }
    Some(())
}

/// True for the common patterns that match every text.
pub(super) fn finds_all(pattern: &str) -> bool {
    matches!(pattern, "" | "^" | "$" | ".*" | "^.*" | ".*$" | "^.*$" | r"^[\s\S]*$" | r"[\s\S]*")
}

/// Returns a pattern for texts of `least` to `most` characters.
pub(super) fn of_length(least: usize, most: Option<usize>) -> String {
    format!("^(?s:.{{{least},{}}})$", most.map_or_else(String::new, |most| most.to_string()))
}

/// Returns a pattern for all texts except `words`.
pub(super) fn all_but(words: &[&str]) -> String {
    format!("^{}$", others(words))
}

/// Builds an expression for all texts except `words`, letter by letter: another first letter with any rest,
/// or a letter of `words` with a rest that differs.
fn others(words: &[&str]) -> String {
    if words.is_empty() {
        return "(?s:.*)".to_owned();
    }
    let mut letters: Vec<char> = words.iter().filter_map(|word| word.chars().next()).collect();
    letters.sort_unstable();
    letters.dedup();
    let list: String = letters.iter().map(|letter| quoted(*letter)).collect();
    let mut choices = if letters.is_empty() { "(?s:.+)".to_owned() } else { format!("[^{list}](?s:.*)") };
    for letter in &letters {
        let rests: Vec<&str> = words.iter().filter_map(|word| word.strip_prefix(*letter)).collect();
        let _ = write!(choices, "|{}{}", quoted(*letter), others(&rests));
    }
    let may_be_empty = if words.contains(&"") { "" } else { "?" };
    format!("(?:{choices}){may_be_empty}")
}

fn quoted(letter: char) -> String {
    format!(r"\x{{{:X}}}", u32::from(letter))
}

/// Splits a pattern that begins with look-aheads into patterns that must all match; without look-ahead
/// returns `pattern`.
fn without_look_ahead(pattern: &str) -> Vec<String> {
    let mut all = Vec::new();
    let mut rest = pattern.strip_prefix('^').unwrap_or(pattern);
    while let Some((sign, inner, behind)) = look_ahead(rest) {
        let inner = inner.strip_prefix('^').unwrap_or(inner);
        let said = match sign {
            '=' if inner.contains('|') => Some(format!("^(?:{inner})")),
            '=' => Some(format!("^{inner}")),
            _ => refused_class(inner).map(|class| format!("[^{class}]")),
        };
        let Some(said) = said else { return vec![pattern.to_owned()] };
        all.push(said);
        rest = behind;
    }
    if all.is_empty() || !pattern.starts_with('^') {
        return vec![pattern.to_owned()];
    }
    all.insert(0, format!("^{rest}"));
    all
}

/// Splits `text` into its first look-ahead's sign, the look-ahead's expression, and the rest.
fn look_ahead(text: &str) -> Option<(char, &str, &str)> {
    let inner = text.strip_prefix("(?")?;
    let sign = inner.chars().next().filter(|sign| matches!(sign, '=' | '!'))?;
    let inner = &inner[1..];
    let (mut depth, mut in_class, mut is_escaped) = (0_usize, false, false);
    for (at, letter) in inner.char_indices() {
        match letter {
            _ if is_escaped => {
                is_escaped = false;
                continue;
            }
            '\\' => is_escaped = true,
            '[' => in_class = true,
            ']' => in_class = false,
            '(' if !in_class => depth += 1,
            ')' if !in_class && depth == 0 => return Some((sign, &inner[..at], &inner[at + 1..])),
            ')' if !in_class => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Returns the class of characters that a text may not consist of: `[-+.]` of `[-+.]*$`.
fn refused_class(inner: &str) -> Option<&str> {
    let class = inner.strip_suffix("*$")?;
    match class {
        r"\s" | r"\d" | r"\w" | " " => Some(class),
        _ => {
            let class = class.strip_prefix('[')?.strip_suffix(']')?;
            (!class.starts_with('^') && !class.contains(['[', ']'])).then_some(class)
        }
    }
}

/// Rewrites Pydantic's pattern for `Decimal`, with or without `max_digits` and `decimal_places`: without
/// look-aheads and with bounded digits. Zeros at the beginning and the end are left out.
fn decimal(pattern: &str) -> Option<String> {
    let rest = pattern.strip_prefix(r"^(?!^[-+.]*$)[+-]?0*")?;
    let counts: Vec<usize> =
        rest.split(|sign: char| !sign.is_ascii_digit()).filter_map(|count| count.parse().ok()).collect();
    let at_most = |most: usize, fraction: usize| {
        let whole = if most == 0 { "0".to_owned() } else { format!("[0-9]{{1,{most}}}") };
        match fraction {
            0 => whole,
            _ => format!(r"{whole}(?:\.[0-9]{{1,{fraction}}})?|\.[0-9]{{1,{fraction}}}"),
        }
    };
    let said = if rest == r"\d*\.?\d*$" {
        at_most(MAX_DIGITS, MAX_DIGITS)
    } else if let [0, places, ..] = counts[..]
        && rest == format!(r"\d*\.?\d{{0,{places}}}0*$")
    {
        at_most(MAX_DIGITS, places)
    } else if let [0, most, 1, ..] = counts[..]
        && most <= MAX_DIGITS
        && rest == format!(r"(?:\d{{0,{most}}}|(?=[\d.]{{1,{}}}0*$)\d*\.\d*0*$)", most + 1)
    {
        let split = |whole: usize| format!(r"[0-9]{{{whole}}}\.[0-9]{{1,{}}}", most - whole);
        let with_point: Vec<String> = (0..most).map(split).collect();
        format!("[0-9]{{1,{most}}}|{}", with_point.join("|"))
    } else if let [0, whole, 1, all, _, _, _, _, places, ..] = counts[..]
        && rest == format!(r"(?:\d{{0,{whole}}}|(?=[\d.]{{1,{all}}}0*$)\d{{0,{whole}}}\.\d{{0,{places}}}0*$)")
    {
        at_most(whole, places.min(all.checked_sub(1)?))
    } else {
        return None;
    };
    Some(format!("^[+-]?(?:{said})$"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_pydantic_writes_for_decimals_is_said_without_look_around() {
        let start = r"^(?!^[-+.]*$)[+-]?0*";
        for (rest, taken, refused) in [
            (r"\d*\.?\d*$", &["0", "-12.50", ".5", "+7"][..], &["", "-", ".", "+.", "1e5"][..]),
            (r"\d*\.?\d{0,2}0*$", &["0", "12", "1.25", ".5"], &["1.255", "."]),
            (
                r"(?:\d{0,5}|(?=[\d.]{1,6}0*$)\d*\.\d*0*$)",
                &["12345", "1.2345", ".12345"],
                &["123456", "1.23456"],
            ),
            (
                r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)",
                &["123", "123.45", ".4", "-9.1"],
                &["1234", "1.234", "-"],
            ),
            (r"(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,4}0*$)", &["0", "0.12", ".1"], &["1", "0.123"]),
        ] {
            let plain = plain(&format!("{start}{rest}")).unwrap();
            let is_found = |text: &&str| plain.iter().all(|pattern| finds(pattern, text));
            assert!(taken.iter().all(is_found), "{rest}: {plain:?}");
            assert!(!refused.iter().any(is_found), "{rest}: {plain:?}");
        }
    }

    #[test]
    fn looks_ahead_at_the_beginning_become_patterns_of_their_own() {
        let password = plain(r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{4,8}$").unwrap();
        let is_found = |text: &str| password.iter().all(|pattern| finds(pattern, text));
        assert!(is_found("Abc1") && !is_found("abc1") && !is_found("Abcd") && !is_found("A1"));
        let no_blank = plain(r"^(?!\s*$).+").unwrap();
        let is_found = |text: &str| no_blank.iter().all(|pattern| finds(pattern, text));
        assert!(is_found(" a ") && !is_found("  ") && !is_found(""));
        for refused in [r"^(?!abc).*$", r"a(?<=b)", r"(a)\1"] {
            assert!(plain(refused).is_err(), "{refused}");
        }
    }

    #[test]
    fn few_names_are_written_out_and_many_are_not() {
        assert_eq!(names("^score$"), Some(vec!["score".to_owned()]));
        assert_eq!(names("^(a|b)[01]?$").map(|names| names.len()), Some(6));
        for many in ["^s", "a", "", "^[0-9]{3}$", "^x+$"] {
            assert_eq!(names(many), None, "{many}");
        }
    }

    #[test]
    fn all_but_some_texts_can_be_said() {
        let pattern = all_but(&["", "ab", "abc", "a\"", "ü"]);
        for (text, is_found) in [
            ("", false),
            ("ab", false),
            ("abc", false),
            ("a\"", false),
            ("ü", false),
            ("a", true),
            ("abd", true),
            ("x", true),
        ] {
            assert_eq!(finds(&pattern, text), is_found, "{text:?} {pattern}");
        }
    }

    #[test]
    fn patterns_that_no_text_has_both_of_exclude_each_other() {
        assert!(exclude_each_other("^a", "^b"));
        assert!(!exclude_each_other("^a", "b$"));
    }
}
