//! `holobiont adapters pull`: downloads the files of an adapter from a running gateway.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::json;

use super::AdaptersError;
use crate::{
    client::{ClientError, GatewayClient},
    terminal::{
        PrintFormat, Terminal,
        table::{short_generation, size},
    },
};

/// Arguments of the subcommand `adapters pull`.
#[derive(Debug, clap::Args)]
pub(crate) struct PullArguments {
    /// Name of the adapter in requests
    name: String,
    /// Directory for the files; it must not exist
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// File list of an adapter in the gateway's answer.
#[derive(Debug, Deserialize)]
struct AdapterFileList {
    generation: String,
    data: Vec<ListedFile>,
}

#[derive(Debug, Deserialize)]
struct ListedFile {
    name: String,
    bytes: u64,
}

/// Route of adapter files on the gateway.
const ROUTE: &str = "/v1/lora_adapter_files";

/// Downloads an adapter completely, or leaves no directory.
pub(super) fn run(
    arguments: &PullArguments,
    client: &GatewayClient,
    terminal: Terminal,
) -> Result<(), AdaptersError> {
    let PullArguments { name, directory } = arguments;
    if directory.exists() {
        return Err(AdaptersError::Exists(directory.clone()));
    }
    let mut listed = String::new();
    let read = |error| AdaptersError::Download { name: name.clone(), source: error };
    client.read(ROUTE, &[("lora_name", name)])?.read_to_string(&mut listed).map_err(read)?;
    let files: AdapterFileList = serde_json::from_str(&listed).map_err(ClientError::Garbled)?;
    let parent = directory.parent().filter(|parent| !parent.as_os_str().is_empty());
    let partial = tempfile::tempdir_in(parent.unwrap_or(Path::new("."))).map_err(read)?;
    for file in &files.data {
        let progress = terminal.spinner(format!("downloading {}, {}", file.name, size(file.bytes)));
        let fetched = fetch(client, name, &files.generation, file, partial.path());
        progress.finish_and_clear();
        fetched?;
    }
    fs::rename(partial.keep(), directory).map_err(read)?;
    let bytes: u64 = files.data.iter().map(|file| file.bytes).sum();
    match terminal.format {
        PrintFormat::Json => terminal.print(json!({
            "name": name, "generation": files.generation, "directory": directory, "bytes": bytes,
        })),
        PrintFormat::Human => terminal.print(format!(
            "{name} is in {}: generation {}, {}",
            directory.display(),
            short_generation(&files.generation),
            size(bytes)
        )),
    }
    Ok(())
}

/// Downloads one file of an adapter version into a directory.
fn fetch(
    client: &GatewayClient,
    adapter: &str,
    generation: &str,
    file: &ListedFile,
    into: &Path,
) -> Result<(), AdaptersError> {
    let failed = |source| AdaptersError::Download { name: adapter.to_owned(), source };
    // The gateway must not choose paths outside the directory.
    let is_plain = !file.name.starts_with('.') && !file.name.contains(['/', '\\']) && !file.name.is_empty();
    if !is_plain {
        return Err(failed(io::Error::other(format!(
            "the gateway sent the invalid file name '{}'",
            file.name.escape_debug()
        ))));
    }
    let query = [("lora_name", adapter), ("expected_generation", generation)];
    let body = client.read(&format!("{ROUTE}/{}", file.name), &query)?;
    let mut to = File::create_new(into.join(&file.name)).map_err(failed)?;
    // Reading one byte more than listed detects a file that is too long.
    let copied = io::copy(&mut body.take(file.bytes.saturating_add(1)), &mut to).map_err(failed)?;
    if copied != file.bytes {
        let said = format!("'{}' has {copied} bytes, not {}; try again", file.name, file.bytes);
        return Err(failed(io::Error::other(said)));
    }
    to.sync_all().map_err(failed)
}
