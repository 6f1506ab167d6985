//! Formats tables, sizes and ratios for people.

use crate::terminal::TextStyle;

/// Returns left-aligned columns, two spaces apart, with a bold head.
pub(crate) fn table<const N: usize>(ink: TextStyle, head: [&str; N], rows: &[[String; N]]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([head[column].len()]).max().unwrap_or_default()
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |cells: [&str; N]| {
        let padded = cells.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let head = ink.bold(&line(head));
    let body = rows.iter().map(|row| line(std::array::from_fn(|column| row[column].as_str())));
    std::iter::once(head).chain(body).collect::<Vec<_>>().join("\n")
}

/// Returns one line for each pair of name and value; all values start in one column.
pub(crate) fn pairs(ink: TextStyle, pairs: &[(String, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.chars().count()).max().unwrap_or_default();
    let line = |(name, value): &(String, String)| {
        let padding = " ".repeat(width - name.chars().count());
        format!("{}{padding}  {value}", ink.dim(name))
    };
    pairs.iter().map(line).collect::<Vec<_>>().join("\n")
}

pub(crate) fn size(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}

/// Returns a ratio in percent; positive ratios below 1 % become "<1 %".
pub(crate) fn percent(ratio: f64) -> String {
    match ratio * 100.0 {
        percent if percent > 0.0 && percent < 1.0 => "<1 %".into(),
        percent => format!("{percent:.0} %"),
    }
}

/// Returns the first 12 characters of an adapter version, enough to compare versions.
pub(crate) fn short_generation(generation: &str) -> String {
    generation.chars().take(12).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = vec![["a".to_owned(), "1".to_owned()], ["long".to_owned(), "2".to_owned()]];
        assert_eq!(table(TextStyle::None, ["N", "VALUE"], &rows), "N     VALUE\na     1\nlong  2");
    }

    #[test]
    fn values_of_pairs_start_in_one_column() {
        let text = pairs(TextStyle::None, &[("a".into(), "1".into()), ("long".into(), "2".into())]);
        assert_eq!(text, "a     1\nlong  2");
    }
}
