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
