//! Links between pages have targets, and the site contains every page below `docs`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Component, Path, PathBuf},
};

use super::root;

/// Every page of the tree by its path from the root.
fn pages() -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    collect(Path::new(""), &mut found);
    found
}

fn collect(folder: &Path, found: &mut BTreeMap<PathBuf, String>) {
    for entry in fs::read_dir(root().join(folder)).unwrap().map(Result::unwrap) {
        let (name, kind) = (entry.file_name(), entry.file_type().unwrap());
        let path = folder.join(&name);
        let is_others = name.to_string_lossy().starts_with('.') || name == "target";
        if kind.is_dir() && !is_others {
            collect(&path, found);
        } else if kind.is_file() && path.extension().is_some_and(|ending| ending == "md") {
            found.insert(path.clone(), fs::read_to_string(root().join(&path)).unwrap());
        }
    }
}

/// Lines of a page outside code blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// Links of a page within the tree, as written.
fn links(text: &str) -> Vec<&str> {
    let targets = |line| str::split(line, "](").skip(1).filter_map(|rest| rest.split(')').next());
    let is_link =
        |target: &&str| !target.contains("://") && !target.contains([' ', '`']) && !target.is_empty();
    prose(text).flat_map(targets).filter(is_link).collect()
}

/// Anchors of a page's headings: lower case, without punctuation, dashes for spaces.
fn headings(text: &str) -> BTreeSet<String> {
    let heading = |line: &str| {
        let words = line.trim_start_matches('#');
        let is_heading = words.len() < line.len() && words.starts_with(' ');
        let letters = words.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_' | ' '));
        is_heading.then(|| letters.collect::<String>().to_lowercase().replace(' ', "-"))
    };
    prose(text).filter_map(heading).collect()
}

/// Target of a link on the page `from`: path from the root, and heading.
fn target<'a>(from: &Path, link: &'a str) -> (PathBuf, &'a str) {
    let (file, heading) = link.split_once('#').unwrap_or((link, ""));
    if file.is_empty() {
        return (from.to_owned(), heading);
    }
    let mut path = from.parent().unwrap().to_owned();
    for part in Path::new(file).components() {
        match part {
            Component::ParentDir => drop(path.pop()),
            part => path.push(part),
        }
    }
    (path, heading)
}

#[test]
fn every_link_leads_to_a_file_and_a_heading_that_are_there() {
    let pages = pages();
    let (mut wrong, mut followed) = (Vec::new(), 0);
    for (from, text) in &pages {
        for link in links(text) {
            followed += 1;
            let (path, heading) = target(from, link);
            let is_there = root().join(&path).exists();
            let has_heading = || pages.get(&path).is_some_and(|page| headings(page).contains(heading));
            if !is_there || !(heading.is_empty() || has_heading()) {
                wrong.push(format!("{}: {link}", from.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "links that lead nowhere: {wrong:#?}");
    assert!(followed > 150, "only {followed} links were found");
}

#[test]
fn the_site_has_every_page_of_docs_once_and_no_link_that_leads_out_of_it() {
    let pages = pages();
    let contents = Path::new("docs/SUMMARY.md");
    let mut listed: Vec<PathBuf> =
        links(&pages[contents]).into_iter().map(|link| target(contents, link).0).collect();
    listed.sort();
    let site: Vec<&PathBuf> =
        pages.keys().filter(|page| page.starts_with("docs") && *page != contents).collect();
    assert_eq!(listed.iter().collect::<Vec<_>>(), site, "docs/SUMMARY.md has them all, once");
    let leads_out = |page: &PathBuf| {
        let links = links(&pages[page]).into_iter();
        let out = links.filter(|link| !target(page, link).0.starts_with("docs"));
        out.map(|link| format!("{}: {link}", page.display())).collect::<Vec<_>>()
    };
    let out: Vec<String> = site.into_iter().flat_map(leads_out).collect();
    assert!(out.is_empty(), "name it instead, as `scripts/test`: {out:#?}");
}

/// Maximum number of lines of the README, which is a landing page.
const README_LINES: usize = 180;

/// Words that people search for. Each stands in the README, or in its pages, and in a heading or the contents.
const SEARCH_WORDS: [&str; 24] = [
    "autoscaling",
    "benchmarks",
    "continuous batching",
    "determinism",
    "fault tolerance",
    "fine-tuning",
    "hot-swap",
    "installation",
    "kubernetes",
    "kv cache",
    "multi-gpu",
    "multi-lora",
    "multi-tenancy",
    "ollama",
    "openai-compatible",
    "prefix caching",
    "quantization",
    "quickstart",
    "rate limit",
    "speculative decoding",
    "structured output",
    "tool calling",
    "troubleshooting",
    "vllm",
];

/// Words of [`SEARCH_WORDS`] for features that are not there, or that have no page of their own.
const WITHOUT_HEADING: [&str; 2] = ["continuous batching", "multi-lora"];

fn plain(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase()
}

#[test]
fn the_readme_is_a_landing_page() {
    let text = fs::read_to_string(root().join("README.md")).unwrap();
    let lines = text.lines().count();
    assert!(lines <= README_LINES, "README.md has {lines} lines; move what only some readers need to docs/");
}

#[test]
fn the_words_that_people_search_for_stand_where_they_look() {
    let pages = pages();
    let of_users = |path: &&PathBuf| path.starts_with("docs") || *path == Path::new("README.md");
    let texts: BTreeMap<&PathBuf, String> =
        pages.keys().filter(of_users).map(|path| (path, plain(&pages[path]))).collect();
    let is_heading = |line: &&str| line.starts_with('#') || line.trim_start().starts_with("- [");
    let headings: Vec<String> = pages
        .iter()
        .filter(|(path, _)| of_users(path))
        .flat_map(|(_, text)| prose(text).filter(is_heading).map(str::to_lowercase))
        .collect();
    for word in SEARCH_WORDS {
        assert!(texts.values().any(|text| text.contains(word)), "no page says {word}");
        let has_heading = headings.iter().any(|heading| heading.contains(word));
        assert!(has_heading || WITHOUT_HEADING.contains(&word), "no heading says {word}");
    }
}

#[test]
fn paths_that_pages_name_are_there() {
    const FOLDERS: [&str; 9] = [
        "base-executor/",
        "benches/",
        "crates/",
        "deploy/",
        "docs/",
        "examples/",
        "kernels/",
        "scripts/",
        "tests/",
    ];
    let is_path = |span: &&str| {
        FOLDERS.iter().any(|folder| span.starts_with(folder))
            && !span.contains(['*', '{', '<', '.', ':', ' '])
            && !span.chars().any(|c| c.is_ascii_uppercase())
    };
    let mut wrong = Vec::new();
    for (page, text) in
        pages().iter().filter(|(page, _)| page.starts_with("docs") || page.components().count() == 1)
    {
        let spans = prose(text).flat_map(|line| line.split('`').skip(1).step_by(2));
        let absent = spans.filter(is_path).filter(|span| !root().join(span).exists());
        wrong.extend(absent.map(|span| format!("{}: {span}", page.display())));
    }
    assert!(wrong.is_empty(), "paths that are not there: {wrong:#?}");
}

#[test]
fn addresses_in_the_first_pages_have_the_default_port() {
    let pages = pages();
    for page in ["README.md", "docs/quickstart.md", "docs/tutorial.md", "docs/guides/migrating.md"] {
        let ports = pages[Path::new(page)].match_indices("127.0.0.1:").map(|(at, host)| {
            let port = &pages[Path::new(page)][at + host.len()..];
            port.chars().take_while(char::is_ascii_digit).collect::<String>()
        });
        assert_eq!(ports.filter(|port| port != "8080").collect::<Vec<_>>(), Vec::<String>::new(), "{page}");
    }
}

/// Maximum number of words of a sentence for users, and of all sentences of a page on average.
const SENTENCE_WORDS: usize = 40;
const MEAN_WORDS: usize = 18;

/// Numbers of words of a page's sentences. A code span is a word; headings and tables have no sentences.
fn sentence_words(text: &str) -> Vec<usize> {
    let mut paragraphs = vec![String::new()];
    for line in prose(text) {
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', '|', '>', '!']) || line.starts_with("- ") {
            paragraphs.push(String::new());
        }
        if let (false, Some(paragraph)) = (line.starts_with(['#', '|', '>', '!']), paragraphs.last_mut()) {
            paragraph.push_str(line.trim_start_matches("- "));
            paragraph.push(' ');
        }
    }
    let spans_as_words = |paragraph: &String| {
        let parts = paragraph.split('`').enumerate();
        parts.map(|(index, part)| if index % 2 == 1 { "code" } else { part }).collect::<String>()
    };
    let ends = |word: &&str| word.ends_with(['.', '!', '?', ':', ';']);
    let mut lengths = Vec::new();
    for paragraph in paragraphs.iter().map(spans_as_words) {
        let words: Vec<&str> = paragraph.split_whitespace().collect();
        lengths.extend(words.split_inclusive(ends).map(<[&str]>::len));
    }
    lengths
}

#[test]
fn sentences_for_users_are_short() {
    let of_users = |page: &Path| {
        let folder = page.parent().unwrap_or(page);
        [Path::new(""), Path::new("docs/guides"), Path::new("docs/reference")].contains(&folder)
            && !page.ends_with("CHANGELOG.md")
            || page == Path::new("docs/quickstart.md")
            || page == Path::new("docs/tutorial.md")
    };
    let mut wrong = Vec::new();
    for (page, text) in pages().iter().filter(|(page, _)| of_users(page)) {
        let lengths = sentence_words(text);
        let mean = lengths.iter().sum::<usize>() / lengths.len().max(1);
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if mean > MEAN_WORDS || longest > SENTENCE_WORDS {
            wrong.push(format!("{}: {mean} words on average, at most {longest}", page.display()));
        }
    }
    assert!(wrong.is_empty(), "split long sentences: {wrong:#?}");
    assert_eq!(
        sentence_words("One two `three four`. Five:\n\n- six\n- seven [eight](x) nine."),
        [3, 1, 1, 3]
    );
}
