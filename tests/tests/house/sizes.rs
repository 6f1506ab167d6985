//! Files and functions stay short enough to be read at once.

use syn::{Block, ImplItemFn, ItemFn, Signature, TraitItemFn, visit::Visit};

use super::{SourceFile, sources};

const MAX_FILE_LINES: usize = 600;
const MAX_FUNCTION_LINES: usize = 70;

/// Fails if an item is longer than `max_lines` and than its exception, or if an exception is not needed.
fn assert_short(found: &[(String, usize)], max_lines: usize, exceptions: &[(&str, usize)]) {
    assert!(found.len() > 100, "the sources were read");
    let allowed =
        |name: &str| exceptions.iter().find(|(long, _)| *long == name).map_or(max_lines, |long| long.1);
    let long: Vec<_> = found.iter().filter(|(name, lines)| *lines > allowed(name)).collect();
    assert!(long.is_empty(), "longer than {max_lines} lines, or than they were: {long:#?}");
    let is_long = |name: &str| found.iter().any(|(long, lines)| long == name && *lines > max_lines);
    let old: Vec<_> = exceptions.iter().filter(|(name, _)| !is_long(name)).collect();
    assert!(old.is_empty(), "take these off the list of exceptions: {old:#?}");
}

#[test]
fn no_file_is_longer_than_can_be_overlooked() {
    let files = sources().iter().filter(|source| source.is_shipped());
    let files: Vec<_> = files.map(|source| (source.path.clone(), source.text.lines().count())).collect();
    assert_short(&files, MAX_FILE_LINES, &[]);
}

#[test]
fn no_function_is_longer_than_can_be_overlooked() {
    let functions: Vec<_> = sources().iter().flat_map(functions).collect();
    assert_short(&functions, MAX_FUNCTION_LINES, &[]);
}

/// Name and line count of every function of a file, from its signature to its last brace.
fn functions(source: &SourceFile) -> Vec<(String, usize)> {
    struct Functions<'a> {
        path: &'a str,
        found: Vec<(String, usize)>,
    }
    impl Functions<'_> {
        fn add(&mut self, signature: &Signature, block: &Block) {
            let lines = 1 + block.brace_token.span.close().end().line - signature.fn_token.span.start().line;
            self.found.push((format!("{} {}", self.path, signature.ident), lines));
        }
    }
    impl<'ast> Visit<'ast> for Functions<'_> {
        fn visit_item_fn(&mut self, function: &'ast ItemFn) {
            self.add(&function.sig, &function.block);
            syn::visit::visit_item_fn(self, function);
        }
        fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
            self.add(&function.sig, &function.block);
            syn::visit::visit_impl_item_fn(self, function);
        }
        fn visit_trait_item_fn(&mut self, function: &'ast TraitItemFn) {
            if let Some(block) = &function.default {
                self.add(&function.sig, block);
            }
            syn::visit::visit_trait_item_fn(self, function);
        }
    }
    let mut functions = Functions { path: &source.path, found: Vec::new() };
    functions.visit_file(&source.parsed());
    functions.found
}
