//! Maps name every module, and modules do not import each other in circles.
//!
//! A circle is between modules of one folder: `a` names an item of `b`, and `b`, directly or through others,
//! an item of `a`. A module and its submodules may name each other. Modules without circles have an order in
//! which no dependency points up.

use std::collections::{BTreeMap, BTreeSet};

use syn::{Attribute, Item, ItemMod, ItemUse, Path, UseTree, Visibility, visit::Visit};

use super::{SourceFile, members, sources};

/// Path of a module from the root of its crate: `["layers", "remote"]`.
type ModulePath = Vec<String>;

#[test]
fn the_map_of_every_crate_names_every_module() {
    for root in sources().iter().filter(|source| source.path.ends_with("/src/lib.rs")) {
        let missing = missing_in_map(root);
        assert!(missing.is_empty(), "{} has no word about {missing:?}", root.path);
    }
}

/// Modules of a crate that its map does not name, neither themselves nor an item that they export.
fn missing_in_map(root: &SourceFile) -> Vec<String> {
    let map: String = root.text.lines().filter(|line| line.starts_with("//!")).collect();
    let names: BTreeSet<&str> = map.split('`').skip(1).step_by(2).collect();
    let parsed = root.parsed();
    let modules = parsed.items.iter().filter_map(|item| match item {
        Item::Mod(module) if !is_for_tests(&module.attrs) => Some(module.ident.to_string()),
        _ => None,
    });
    let mut exported = Paths { module: Vec::new(), found: Vec::new() };
    for item in &parsed.items {
        match item {
            Item::Use(item) if matches!(item.vis, Visibility::Public(_)) => {
                exported.add_tree(&["crate".to_owned()], &item.tree);
            }
            _ => {}
        }
    }
    let is_named = |module: &String| {
        let mut items = exported.found.iter().filter(|path| path.first() == Some(module));
        names.contains(module.as_str()) || items.any(|path| names.contains(path[path.len() - 1].as_str()))
    };
    modules.filter(|module| !is_named(module)).collect()
}

#[test]
fn modules_do_not_import_each_other_in_circles() {
    let circles: Vec<String> = members().iter().flat_map(|member| circles(member)).collect();
    assert!(circles.is_empty(), "modules name each other in a circle: {circles:#?}");
}

/// Circles of a crate, for example `kernels: a b c` if these three name each other.
fn circles(member: &str) -> Vec<String> {
    let files: BTreeMap<ModulePath, &SourceFile> = sources()
        .iter()
        .filter(|source| source.member() == member && source.is_shipped())
        .filter_map(|source| Some((module(source)?, source)))
        .collect();
    let mut arrows: BTreeMap<ModulePath, BTreeSet<ModulePath>> = BTreeMap::new();
    for (from, source) in &files {
        for path in named_by(source, from) {
            // A path names an item of its innermost module that is a file.
            let Some(to) =
                (1..=path.len()).rev().map(|length| &path[..length]).find(|to| files.contains_key(*to))
            else {
                continue;
            };
            let shared = from.iter().zip(to).take_while(|(one, other)| one == other).count();
            if shared < from.len() && shared < to.len() {
                arrows.entry(from[..=shared].to_vec()).or_default().insert(to[..=shared].to_vec());
            }
        }
    }
    let reached: BTreeMap<&ModulePath, BTreeSet<&ModulePath>> =
        arrows.keys().map(|from| (from, reach(from, &arrows))).collect();
    let mut found = BTreeSet::new();
    for (from, all) in reached.iter().filter(|(from, all)| all.contains(*from)) {
        let circle = all.iter().filter(|to| reached.get(*to).is_some_and(|back| back.contains(from)));
        let names: Vec<String> = circle.map(|module| module.join("::")).collect();
        found.insert(format!("{member}: {}", names.join(" ")));
    }
    found.into_iter().collect()
}

fn reach<'a>(
    from: &ModulePath,
    arrows: &'a BTreeMap<ModulePath, BTreeSet<ModulePath>>,
) -> BTreeSet<&'a ModulePath> {
    let (mut reached, mut waiting) = (BTreeSet::new(), Vec::from_iter(arrows.get(from)));
    while let Some(next) = waiting.pop() {
        for module in next.iter().filter(|module| reached.insert(*module)).collect::<Vec<_>>() {
            waiting.extend(arrows.get(module));
        }
    }
    reached
}

/// Module path of a file; `None` for programs.
fn module(source: &SourceFile) -> Option<ModulePath> {
    let path = source.path.split_once("/src/")?.1.strip_suffix(".rs")?;
    let mut module: ModulePath = path.split('/').map(str::to_owned).collect();
    if matches!(module.last()?.as_str(), "lib" | "mod") {
        module.pop();
    }
    let is_program = module.first().is_some_and(|first| matches!(first.as_str(), "main" | "bin"));
    (!is_program).then_some(module)
}

/// Paths of a file, except in tests, that lead to its own crate, from the crate's root.
fn named_by(source: &SourceFile, module: &ModulePath) -> Vec<ModulePath> {
    let mut paths = Paths { module: module.clone(), found: Vec::new() };
    paths.visit_file(&source.parsed());
    paths.found
}

struct Paths {
    /// Module in which the paths are resolved.
    module: ModulePath,
    found: Vec<ModulePath>,
}

impl Paths {
    fn add(&mut self, path: &[String]) {
        let mut from = match path.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("super" | "self") => self.module.clone(),
            _ => return,
        };
        for part in path {
            match part.as_str() {
                "crate" | "self" => {}
                "super" => drop(from.pop()),
                _ => from.push(part.clone()),
            }
        }
        self.found.push(from);
    }

    fn add_tree(&mut self, before: &[String], tree: &UseTree) {
        let with = |ident: &syn::Ident| [before, &[ident.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.add_tree(&with(&path.ident), &path.tree),
            UseTree::Name(name) => self.add(&with(&name.ident)),
            UseTree::Rename(rename) => self.add(&with(&rename.ident)),
            UseTree::Glob(_) => self.add(before),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.add_tree(before, tree)),
        }
    }
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item(&mut self, item: &'ast Item) {
        let is_test = match item {
            Item::Mod(module) => is_for_tests(&module.attrs),
            Item::Impl(item) => is_for_tests(&item.attrs),
            Item::Fn(item) => is_for_tests(&item.attrs),
            Item::Use(item) => is_for_tests(&item.attrs),
            _ => false,
        };
        if !is_test {
            syn::visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        self.module.push(module.ident.to_string());
        syn::visit::visit_item_mod(self, module);
        self.module.pop();
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.add_tree(&[], &item.tree);
    }

    fn visit_path(&mut self, path: &'ast Path) {
        self.add(&path.segments.iter().map(|segment| segment.ident.to_string()).collect::<Vec<_>>());
        syn::visit::visit_path(self, path);
    }
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Ident>().is_ok_and(|word| word == "test")
    })
}
