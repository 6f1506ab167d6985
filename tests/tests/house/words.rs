//! Names and docs that say something.

use super::sources;

/// What a doc says that only repeats that there is something.
const EMPTY: [&str; 9] = ["Which", "What", "What for", "How", "Where", "Who", "When", "Its own", "The other"];

/// Files in which a line `is_bad`.
fn with(is_bad: impl Fn(&str) -> bool) -> Vec<&'static str> {
    let bad = sources().iter().filter(|source| source.text.lines().any(&is_bad));
    bad.map(|source| source.path.as_str()).collect()
}

#[test]
fn docs_say_something() {
    let says_nothing = |line: &str| {
        let words = line.trim_start().trim_start_matches('/').trim();
        line.trim_start().starts_with("//") && EMPTY.contains(&words.trim_end_matches('.'))
    };
    let empty = with(says_nothing);
    assert!(empty.is_empty(), "a doc says what a thing is, its shape, its unit: {empty:#?}");
}

#[test]
fn the_largest_is_called_max() {
    let is_private = |line: &str| {
        line.split(|c: char| !c.is_alphanumeric() && c != '_')
            .any(|word| word.starts_with(concat!("MOST", "_")))
    };
    let private = with(is_private);
    assert!(private.is_empty(), "a limit's name begins with MAX_: {private:#?}");
}
