//! `holobiont adapters push`: sends an adapter's files to a running gateway, which need not see this disk.

use std::{
    fmt::Write as _,
    fs::{self, File},
    path::{Path, PathBuf},
};

use super::{AdaptersError, load};
use crate::{
    client::{GatewayClient, PushedFile},
    terminal::Terminal,
};

/// Arguments of the subcommand `adapters push`.
#[derive(Debug, clap::Args)]
pub(crate) struct PushArguments {
    /// Name of the adapter in requests
    name: String,
    /// Directory of a PEFT adapter on this machine
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Keeps the adapter in the gateway's memory alone, until the gateway ends
    #[arg(long)]
    ephemeral: bool,
    /// Tenant of the adapter; only this tenant and administrators see and use it
    #[arg(long, value_name = "TENANT")]
    tenant: Option<String>,
    /// Only if this generation is there now: its first 12 digits, as tables show them, or more
    #[arg(long, value_name = "GENERATION")]
    expect: Option<String>,
}

/// Pushes an adapter, and prints it.
pub(super) fn run(
    arguments: &PushArguments,
    client: &GatewayClient,
    terminal: Terminal,
) -> Result<(), AdaptersError> {
    let PushArguments { name, directory, ephemeral, tenant, expect } = arguments;
    let config_path = directory.join("adapter_config.json");
    if !config_path.is_file() {
        return Err(AdaptersError::NoAdapter(directory.clone()));
    }
    let config = fs::read_to_string(&config_path).map_err(unread(&config_path))?;
    let weights_path = directory.join("adapter_model.safetensors");
    let weights = File::open(&weights_path).map_err(unread(&weights_path))?;
    let mut query = vec![("durable", if *ephemeral { "false" } else { "true" })];
    query.extend(tenant.as_deref().map(|tenant| ("tenant", tenant)));
    query.extend(expect.as_deref().map(|expected| ("expected_generation", expected)));
    let file = PushedFile { config: header_value(&config), weights };
    load::report(name, terminal, || client.push(name, &query, file))
}

fn unread(path: &Path) -> impl FnOnce(std::io::Error) -> AdaptersError + use<> {
    let path = path.to_owned();
    move |source| AdaptersError::Unread { path, source }
}

/// Returns JSON as the value of an HTTP header: in one line, with escapes for characters outside of ASCII.
fn header_value(json: &str) -> String {
    let mut value = String::with_capacity(json.len());
    for character in json.chars() {
        match character {
            // Strings contain no control characters, so these stand between tokens.
            character if character.is_control() => value.push(' '),
            character if character.is_ascii() => value.push(character),
            character => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    // Writing to a string never fails.
                    let _ = write!(value, "\\u{unit:04x}");
                }
            }
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_configuration_is_the_same_json_in_one_line_of_ascii() {
        let config =
            json!({ "r": 8, "base_model_name_or_path": "Käfer-\u{1f41e}\n", "target_modules": ["q_proj"] });
        let value = header_value(&serde_json::to_string_pretty(&config).unwrap());
        assert!(value.bytes().all(|byte| (b' '..0x7f).contains(&byte)), "{value}");
        assert_eq!(serde_json::from_str::<Value>(&value).unwrap(), config);
    }
}
