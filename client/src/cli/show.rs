//! The commands `sites` and `stats`: the executor's catalog, and the granted quota.

use serde_json::{Value, json};
use shmproto::layer::{CallClass, SitePath, control::Site};
use types::AdapterVersion;

use super::{
    connect::ConnectArguments,
    exit::CliError,
    terminal::{OutputFormat, Terminal, printable},
};
use crate::masking::{Masking, session_commitment};

const OFF: Masking = Masking::Off { path: SitePath::Fast };

#[derive(Debug, clap::Args)]
pub(super) struct SitesArguments {
    #[command(flatten)]
    connect: ConnectArguments,
}

#[derive(Debug, clap::Args)]
pub(super) struct StatsArguments {
    #[command(flatten)]
    connect: ConnectArguments,
}

pub(super) fn sites(arguments: &SitesArguments, terminal: Terminal) -> Result<(), CliError> {
    let session = arguments.connect.session(&OFF)?;
    let catalog = session.catalog();
    // A site without a modular path makes this `None`.
    let commitment = session_commitment(&session).ok().map(|hash| AdapterVersion(hash).to_string());
    if terminal.format == OutputFormat::Json {
        let sites: Vec<Value> =
            (0_u32..).zip(&catalog.sites).map(|(number, site)| site_json(number, site)).collect();
        let base = AdapterVersion(catalog.base_hash).to_string();
        let (model, architecture) = (&catalog.model, &catalog.architecture);
        terminal.print(json!({
            "model": model, "architecture": architecture, "base": base, "commitment": commitment, "sites": sites,
        }))?;
        return Ok(());
    }
    terminal.note(printable(&format!(
        "{} ({}), base {:.12}, {} sites",
        catalog.model,
        catalog.architecture,
        AdapterVersion(catalog.base_hash),
        catalog.sites.len()
    )));
    match commitment {
        Some(hash) => terminal.note(format_args!("weights: --commitment {hash}")),
        None => {
            terminal.note("weights: no commitment, so --masking pads, shares and --verify are not possible")
        }
    }
    for (number, site) in catalog.sites.iter().enumerate() {
        let parts: Vec<String> =
            site.parts.iter().map(|part| format!("{} {}", part.name, part.rows)).collect();
        let line =
            format!("{number:>5}  {:>6}  {:<11}  {}", site.columns, paths(site).join(","), parts.join(" | "));
        terminal.print(printable(&line))?;
    }
    Ok(())
}

fn paths(site: &Site) -> Vec<&'static str> {
    let all = [(SitePath::Fast, "fast"), (SitePath::Linear, "linear"), (SitePath::Ring, "ring")];
    all.into_iter().filter(|&(path, _)| site.has_path(path)).map(|(_, word)| word).collect()
}

fn site_json(number: u32, site: &Site) -> Value {
    let part = |part: &shmproto::layer::control::SiteLayer| json!({ "name": part.name, "rows": part.rows, "has_bias": part.has_bias != 0 });
    let parts: Vec<Value> = site.parts.iter().map(part).collect();
    json!({ "site": number, "columns": site.columns, "paths": paths(site), "parts": parts })
}

pub(super) fn stats(arguments: &StatsArguments, terminal: Terminal) -> Result<(), CliError> {
    let mut session = arguments.connect.session(&OFF)?;
    let stats = session.stats()?;
    let opened = session.opened();
    let rows: serde_json::Map<String, Value> = CallClass::ALL
        .iter()
        .zip(stats.rows)
        .map(|(class, rows)| (format!("{class:?}").to_lowercase(), rows.into()))
        .collect();
    let value = json!({
        "instance": format!("{:016x}", opened.instance),
        "session": opened.session,
        "tenant": opened.tenant,
        "granted": {
            "max_rows": opened.max_rows,
            "max_waiting_rows": opened.max_waiting_rows,
            "max_bytes": opened.max_bytes,
        },
        "used": {
            "calls": stats.calls,
            "refused": stats.refused,
            "rows": rows,
            "bytes_in": stats.bytes_in,
            "bytes_out": stats.bytes_out,
            "wait_us": stats.wait_us,
            "compute_us": stats.compute_us,
        },
    });
    if terminal.format == OutputFormat::Json {
        terminal.print(value)?;
        return Ok(());
    }
    terminal.print(printable(&format!(
        "tenant {}, session {} of instance {:016x}",
        opened.tenant, opened.session, opened.instance
    )))?;
    terminal.print(format_args!(
        "rows a call {}, rows waiting {}, bytes {}",
        opened.max_rows, opened.max_waiting_rows, opened.max_bytes
    ))?;
    Ok(())
}
