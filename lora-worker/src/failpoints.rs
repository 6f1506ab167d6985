//! Failpoints of this process; see the crate `failpoint`.

pub const FAILPOINTS: &[&str] = &[
    // Worker slots.
    "worker.connected",
    "worker.hello",
    "worker.seated",
    "worker.left",
    // Adapters.
    "worker.image_received",
    "worker.image_mapped",
    "worker.image_withdrawn",
    // Slices.
    "worker.parked",
    "worker.after_claim",
    "worker.mid_slice",
    "worker.before_done",
    "worker.after_done",
    // Exit.
    "worker.leaving",
];

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::FAILPOINTS;

    /// Returns every failpoint name in the source files of `folder`.
    fn mentioned(folder: &Path) -> BTreeSet<String> {
        let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let sources = files.filter(|path| path.file_name().is_some_and(|name| name != "failpoints.rs"));
        let mut found = BTreeSet::new();
        for source in sources.map(|path| fs::read_to_string(path).unwrap()) {
            let literals = source.split('"').filter(|literal| {
                let name = literal.strip_prefix("worker.");
                name.is_some_and(|name| name.bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase()))
            });
            found.extend(literals.map(str::to_owned));
        }
        found
    }

    #[test]
    fn the_table_of_failpoints_names_what_is_in_the_source_and_nothing_else() {
        let found = mentioned(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
        let table: BTreeSet<String> = FAILPOINTS.iter().map(|&name| name.to_owned()).collect();
        assert_eq!(found, table);
        assert_eq!(table.len(), FAILPOINTS.len(), "each is named once");
    }
}
