//! The places where a test may make this process die, stop or wait: see the crate `failpoint`.

/// All of them.
pub const FAILPOINTS: &[&str] =
    &["client.session_opened", "client.before_call", "client.call_waits", "client.after_call"];

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::FAILPOINTS;

    /// Every name that a call of `failpoint` mentions in a source file below `folder`.
    fn mentioned(folder: &Path, found: &mut BTreeSet<String>) {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                mentioned(&path, found);
            } else if path.file_name().is_some_and(|name| name != "failpoints.rs") {
                let source = fs::read_to_string(&path).unwrap();
                let literals = source.split('"').filter(|literal| literal.starts_with("client."));
                found.extend(literals.map(str::to_owned));
            }
        }
    }

    #[test]
    fn the_table_of_failpoints_names_what_is_in_the_source_and_nothing_else() {
        let mut found = BTreeSet::new();
        mentioned(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
        assert_eq!(found, FAILPOINTS.iter().map(|&name| name.to_owned()).collect());
    }
}
