//! Failpoints, where a test may kill, stop or delay this process: see the crate `failpoint`.

/// Failpoints of every client.
pub const FAILPOINTS: &[&str] =
    &["client.session_opened", "client.before_call", "client.call_waits", "client.after_call"];

/// Failpoints of pads: making them passes the first three, using them the rest and the two of the journal.
pub const PAD_FAILPOINTS: &[&str] = &[
    "client.pads_written",
    "client.pads_before_note",
    "client.pads_noted",
    "client.pad_read",
    "client.pad_erased",
    "client.effects_read",
    "client.effects_erased",
];

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::{FAILPOINTS, PAD_FAILPOINTS};

    /// Collects every name in a call of `failpoint` in source files below `folder`.
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
    fn the_tables_of_failpoints_name_what_is_in_the_source_and_nothing_else() {
        let mut found = BTreeSet::new();
        mentioned(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
        assert_eq!(found, [FAILPOINTS, PAD_FAILPOINTS].concat().into_iter().map(str::to_owned).collect());
    }
}
