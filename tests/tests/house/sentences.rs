//! Names and docs say something.

use std::collections::BTreeMap;

use super::sources;

/// Whole docs that say nothing.
const EMPTY: [&str; 9] = ["Which", "What", "What for", "How", "Where", "Who", "When", "Its own", "The other"];

/// Type names that an engineer of the field would not understand. A type uses the glossary's word, usually
/// with a second one.
const BANNED_TYPES: &[&str] = &[
    "Agency",
    "Ahead",
    "Allowance",
    "Alone",
    "Answering",
    "Apart",
    "Aside",
    "Ask",
    "Asked",
    "Asks",
    "Assistant",
    "Attendant",
    "Author",
    "Begin",
    "Beginning",
    "Bell",
    "Below",
    "Bench",
    "Books",
    "Broken",
    "By",
    "Calling",
    "Carrier",
    "Charge",
    "Choices",
    "Chunks",
    "Claim",
    "Combined",
    "Commission",
    "Common",
    "Company",
    "Computing",
    "Console",
    "Counted",
    "Courier",
    "Course",
    "Crowd",
    "Curve",
    "Cut",
    "Deaths",
    "Deference",
    "Desk",
    "Door",
    "Doors",
    "Draw",
    "Ears",
    "Effort",
    "Elevator",
    "Ending",
    "Ends",
    "Far",
    "Fate",
    "FileCopies",
    "First",
    "Foreseen",
    "Fork",
    "Frontier",
    "Full",
    "Gathered",
    "Gave",
    "Given",
    "Giving",
    "Gone",
    "Grant",
    "Growing",
    "Grown",
    "Guess",
    "Guesser",
    "Guide",
    "Halted",
    "HangUp",
    "Happening",
    "Headroom",
    "Heard",
    "Help",
    "Helpers",
    "Hold",
    "Home",
    "Hub",
    "Itself",
    "Joined",
    "Judge",
    "Kept",
    "Lane",
    "Lanes",
    "Learned",
    "Learner",
    "Learning",
    "Leaving",
    "Lent",
    "Lifeline",
    "Live",
    "Made",
    "Mark",
    "Means",
    "Meanwhile",
    "Met",
    "Moment",
    "NotHad",
    "Notes",
    "OpenedSelf",
    "Opening",
    "Outgoing",
    "Overtime",
    "OwnAdapter",
    "OwnedAsk",
    "Pace",
    "Pacer",
    "Pages",
    "Patience",
    "Place",
    "Places",
    "Plane",
    "Portion",
    "Post",
    "PostEnd",
    "Poster",
    "Price",
    "Questions",
    "Ran",
    "Rehearsal",
    "Removal",
    "RentArguments",
    "Rented",
    "Room",
    "Said",
    "Seat",
    "SeatOffer",
    "Seating",
    "Seen",
    "Settled",
    "Shape",
    "Shelved",
    "Shelves",
    "Signs",
    "Spelling",
    "Squares",
    "Standing",
    "Stretch",
    "Sums",
    "Survival",
    "Sweeps",
    "Tally",
    "Texts",
    "Timed",
    "Told",
    "Trail",
    "Transit",
    "Travel",
    "Trial",
    "Turn",
    "Turns",
    "Uptake",
    "Urgency",
    "Waits",
    "Walk",
    "Wanted",
    "Way",
    "Whereabouts",
    "Whole",
    "Word",
    "Worded",
    "World",
    "Worth",
    "Writers",
    "XSlab",
];

/// File names that an engineer of the field would not search for.
const BANNED_FILES: &[&str] = &[
    "alone",
    "apart",
    "arriving",
    "asking",
    "assistant",
    "attendant",
    "author",
    "bell",
    "below",
    "books",
    "carrier",
    "ceilings",
    "choosing",
    "company",
    "computing",
    "contest",
    "courier",
    "deference",
    "desk",
    "door",
    "elevator",
    "ending",
    "found",
    "gather",
    "greet",
    "growing",
    "grown",
    "growth",
    "holding",
    "inside",
    "joined",
    "kept",
    "lane",
    "learn",
    "lending",
    "litter",
    "looking",
    "many",
    "meanwhile",
    "neighbour",
    "others",
    "ours",
    "outbox",
    "outboxes",
    "overtime",
    "past",
    "patience",
    "place",
    "planted",
    "post",
    "poster",
    "pulse",
    "quoted",
    "reality",
    "rent",
    "rest",
    "said",
    "saved",
    "seat",
    "seen",
    "share",
    "showing",
    "sibling",
    "signs",
    "small_json",
    "squares",
    "talk",
    "thought",
    "through",
    "told",
    "trip",
    "turns",
    "uncancelled",
    "visible",
    "waits",
    "whole",
    "worded",
    "world",
    "worlds",
    "worth",
    "xslab",
];

/// Metaphoric function names: a function's name says what it does to which object.
const BANNED_FUNCTIONS: &[&str] = &[
    "bring",
    "calmest",
    "depart",
    "figures",
    "foresee",
    "foretell",
    "furnish",
    "go_on",
    "hand_out",
    "hasten",
    "hear_out",
    "join_here",
    "lend",
    "let_go",
    "look",
    "look_into_rings",
    "make_way",
    "owe",
    "owes",
    "put_off",
    "say",
    "settle",
    "stand",
    "take_in",
    "tell",
    "teller",
    "told",
    "told_as",
    "turn",
];

/// Beginnings of a doc comment without a subject: rustdoc shows an item without its neighbours.
const NO_SUBJECT: &[&str] = &[
    "It",
    "Its",
    "They",
    "Their",
    "Those",
    "These",
    "The same",
    "The other",
    "So do",
    "So does",
    "So is",
    "So are",
    "What",
    "Who",
    "Whom",
    "Whose",
    "Whoever",
    "Whatever",
    "Which",
    "Likewise",
    "As asked",
    "See the module",
];

/// Words that hide the actor, such as the caller, the tenant or the thread.
const NO_ACTOR: [&str; 6] = ["somebody", "nobody", "whoever", "whatever", "everybody", "anybody"];

const MAX_DOC_COLUMNS: usize = 110;

/// Minimum number of words of a doc comment in a library.
const MIN_DOC_WORDS: usize = 4;

/// Programs, whose items need no docs and may have short ones.
const PROGRAMS: [&str; 9] = [
    "fuzz",
    "lab/simulator",
    "tests",
    "base-executor",
    "lora-worker",
    "crates/control-plane/gateway",
    "crates/control-plane/endpoint-picker",
    "crates/control-plane/cli",
    "crates/data-plane/trainer",
];

const MAX_HOMONYMS: usize = 3;

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

fn defined_type(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.trim_start(),
        None => line,
    };
    let name = ["struct ", "enum ", "trait ", "union "].iter().find_map(|kind| line.strip_prefix(kind))?;
    name.split(|c: char| !c.is_alphanumeric() && c != '_').next().filter(|name| !name.is_empty())
}

#[test]
fn a_type_has_a_name_of_the_field_and_few_share_one() {
    let mut types: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for source in sources() {
        for name in source.text.lines().filter_map(defined_type) {
            types.entry(name).or_default().push(&source.path);
        }
    }
    assert!(types.len() > 2000, "the sources were read");
    let banned: Vec<_> = types.iter().filter(|(name, _)| BANNED_TYPES.contains(name)).collect();
    assert!(banned.is_empty(), "take a word of docs/GLOSSARY.md: {banned:#?}");
    let homonyms: Vec<_> = types.iter().filter(|(_, files)| files.len() > MAX_HOMONYMS).collect();
    assert!(homonyms.is_empty(), "give each a second word that says which one it is: {homonyms:#?}");
}

#[test]
fn a_file_has_a_name_of_the_field() {
    let stem =
        |path: &str| path.rsplit('/').next().and_then(|name| name.strip_suffix(".rs")).map(str::to_owned);
    let is_banned = |path: &str| stem(path).is_some_and(|stem| BANNED_FILES.contains(&stem.as_str()));
    let banned: Vec<_> = sources().iter().map(|source| &source.path).filter(|path| is_banned(path)).collect();
    assert!(banned.is_empty(), "take a word of docs/GLOSSARY.md: {banned:#?}");
}

#[test]
fn a_function_says_what_it_does() {
    let defined = |line: &str| {
        let (_, name) = line.trim_start().split_once("fn ").filter(|(before, _)| !before.contains("//"))?;
        name.split(|c: char| !c.is_alphanumeric() && c != '_').next().map(str::to_owned)
    };
    let is_banned = |line: &str| defined(line).is_some_and(|name| BANNED_FUNCTIONS.contains(&name.as_str()));
    let banned: Vec<_> = sources()
        .iter()
        .flat_map(|source| {
            source.text.lines().filter(|line| is_banned(line)).map(|line| (&source.path, line))
        })
        .collect();
    assert!(banned.is_empty(), "name what it does, and to what: {banned:#?}");
}

/// Number of the first line of a doc comment, and its lines with indentation.
type DocComment<'a> = (usize, Vec<&'a str>);

fn doc_comments(text: &str) -> Vec<DocComment<'_>> {
    let is_doc = |line: &str| {
        let line = line.trim_start();
        line.starts_with("//!") || (line.starts_with("///") && !line.starts_with("////"))
    };
    let lines: Vec<(usize, &str)> = text.lines().enumerate().collect();
    let blocks = lines.chunk_by(|(_, one), (_, next)| is_doc(one) == is_doc(next));
    let docs = blocks.filter(|block| is_doc(block[0].1));
    docs.map(|block| (block[0].0 + 1, block.iter().map(|(_, line)| *line).collect())).collect()
}

fn words(line: &str) -> &str {
    line.trim_start().trim_start_matches(['/', '!']).trim()
}

fn broken_rules((_, lines): &DocComment<'_>, is_library: bool) -> Vec<&'static str> {
    let begins_with = |word: &&str| {
        let rest = words(lines[0]).strip_prefix(*word);
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '\''))
    };
    let hides_actor = |line: &&str| {
        let line = line.to_lowercase();
        line.split(|c: char| !c.is_alphabetic()).any(|word| NO_ACTOR.contains(&word))
    };
    let count: usize = lines.iter().map(|line| words(line).split_whitespace().count()).sum();
    let is_short = is_library && count < MIN_DOC_WORDS && !lines[0].trim_start().starts_with("//!");
    let rules = [
        (NO_SUBJECT.iter().any(begins_with), "begins without a subject"),
        (lines.iter().any(hides_actor), "hides who acts"),
        (lines.iter().any(|line| line.chars().count() > MAX_DOC_COLUMNS), "is wider than 110 columns"),
        (is_short, "has three words or fewer: delete it, or say more than the name"),
    ];
    rules.into_iter().filter(|(is_broken, _)| *is_broken).map(|(_, rule)| rule).collect()
}

#[test]
fn a_doc_comment_names_its_subject_and_says_more_than_the_name() {
    let is_ours = |source: &&super::SourceFile| !["tests/testkit", "benches"].contains(&source.member());
    let mut read = 0;
    let mut bad = Vec::new();
    for source in sources().iter().filter(|source| source.is_shipped()).filter(is_ours) {
        let is_library = !PROGRAMS.contains(&source.member());
        for comment in doc_comments(&source.text) {
            read += 1;
            let rules = broken_rules(&comment, is_library);
            bad.extend(rules.into_iter().map(|rule| format!("{}:{} {rule}", source.path, comment.0)));
        }
    }
    assert!(read > 5000, "the sources were read");
    assert!(bad.is_empty(), "CONTRIBUTING.md, Sentences: {bad:#?}");
}
