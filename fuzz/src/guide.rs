//! Writes the table of seeds in `docs/guides/bad-input.md` from the seeds themselves.

use std::{collections::BTreeMap, fmt::Write as _};

use crate::{
    TARGETS,
    seeds::{self, Expected, Seed},
};

/// Line of the guide before the table.
pub const BEGIN: &str = "<!-- written by the test `the_guide_lists_every_seed` -->";
/// Line of the guide after the table.
pub const END: &str = "<!-- end of what is written -->";

/// Returns the table, with a heading for each target.
#[must_use]
pub fn table() -> String {
    let mut out = String::new();
    for target in TARGETS {
        let mut classes: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for seed in seeds::of(target.name).iter().filter(|seed| seed.class != "valid") {
            classes.entry(seed.class).or_default().push(cell(seed));
        }
        let _ = write!(
            out,
            "\n### `{}`: {}\n\n| Class | Shapes, and the answer each gets |\n|---|---|\n",
            target.name, target.reads
        );
        for (class, cells) in classes {
            let _ = writeln!(out, "| {class} | {} |", cells.join("; "));
        }
    }
    out
}

fn cell(seed: &Seed) -> String {
    match seed.expected {
        Expected::Accepted => format!("{} (accepted)", seed.name),
        Expected::Refused("") => format!("{} (refused)", seed.name),
        Expected::Refused(why) => format!("{} (\"{}\")", seed.name, why.replace('|', "\\|")),
        Expected::Bounded => format!("{} (bounded)", seed.name),
    }
}
