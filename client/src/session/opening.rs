//! From a connection to a session with a valid catalog.

use shmproto::{
    codec::Wire as _,
    layer::{
        LAYER_VERSION, SitePath,
        control::{
            CATALOG, Catalog, Fetch, FromLayers, MAX_CATALOG_BYTES, MAX_FETCH_BYTES, RefusalCode,
            SessionOpen, SessionOpened, ToLayers,
        },
    },
};

use super::settings::ClientSettings;
use crate::{
    error::LinkError,
    transport::{Connect, Transport},
};

/// Maximum number of features of a linear layer; larger values are refused.
const MAX_WIDTH: u32 = 1 << 24;

#[derive(Debug)]
pub(super) struct OpenedSession {
    pub(super) transport: Box<dyn Transport>,
    pub(super) opened: SessionOpened,
    pub(super) catalog: Catalog,
}

/// Connects and resumes the session `was`, or opens a new one if the executor does not know it.
pub(super) fn open(
    connector: &dyn Connect,
    settings: &ClientSettings,
    was: Option<&SessionOpened>,
) -> Result<OpenedSession, LinkError> {
    let number = was.map_or(0, |was| was.session);
    let answer = greet(connector, settings, number);
    let (mut transport, opened) = match answer {
        Err(LinkError::Refused(refused)) if number != 0 && refused.code == RefusalCode::NoSuchSession => {
            greet(connector, settings, 0)?
        }
        answer => answer?,
    };
    if opened.max_rows == 0 || opened.max_waiting_rows == 0 {
        return Err(LinkError::Protocol("the executor accepts no rows per call".to_owned()));
    }
    failpoint::pass("client.session_opened");
    let catalog = fetch_catalog(&mut *transport, opened.catalog_bytes)?;
    Ok(OpenedSession { transport, opened, catalog })
}

fn greet(
    connector: &dyn Connect,
    settings: &ClientSettings,
    session: u64,
) -> Result<(Box<dyn Transport>, SessionOpened), LinkError> {
    let mut transport = connector.connect()?;
    let open = SessionOpen {
        version: LAYER_VERSION,
        layout_hash: connector.layout_hash(),
        key: settings.key.clone().unwrap_or_default(),
        name: settings.name.clone(),
        masking: settings.masking.clone(),
        session,
    };
    match transport.ask(&ToLayers::Open(open))? {
        FromLayers::Opened(opened) => Ok((transport, opened)),
        other => Err(unexpected("Open", &other)),
    }
}

/// Returns the error for an answer of an unexpected kind.
pub(super) fn unexpected(asked: &str, answer: &FromLayers) -> LinkError {
    let what = match answer {
        FromLayers::Refused(refused) => return LinkError::Refused(refused.clone()),
        FromLayers::Draining => return LinkError::Draining,
        FromLayers::Opened(_) => "Opened",
        FromLayers::Fetched(_) => "Fetched",
        FromLayers::ChannelReady(_) => "ChannelReady",
        FromLayers::Stats(_) => "Stats",
    };
    LinkError::Protocol(format!("the answer to {asked} was {what}"))
}

/// Returns the bytes of an answer to `fetch`, if it is a valid answer with at least one byte.
pub(super) fn fetched(fetch: &Fetch, answer: FromLayers) -> Result<Vec<u8>, LinkError> {
    match answer {
        FromLayers::Fetched(got) if (got.blob, got.offset) != (fetch.blob, fetch.offset) => {
            Err(LinkError::Protocol("the received bytes differ from those requested".to_owned()))
        }
        FromLayers::Fetched(got) if got.bytes.is_empty() || got.bytes.len() > fetch.bytes as usize => {
            let (came, asked) = (got.bytes.len(), fetch.bytes);
            Err(LinkError::Protocol(format!("the executor sent {came} bytes of a file instead of {asked}")))
        }
        FromLayers::Fetched(got) => Ok(got.bytes),
        other => Err(unexpected("Fetch", &other)),
    }
}

fn fetch_catalog(transport: &mut dyn Transport, bytes: u32) -> Result<Catalog, LinkError> {
    if bytes == 0 || bytes > MAX_CATALOG_BYTES {
        return Err(LinkError::Protocol(format!("a catalog of {bytes} bytes")));
    }
    let mut encoded = Vec::new();
    while encoded.len() < bytes as usize {
        let missing = bytes - u32::try_from(encoded.len()).unwrap_or(bytes);
        let fetch =
            Fetch { blob: CATALOG, offset: encoded.len() as u64, bytes: missing.min(MAX_FETCH_BYTES) };
        let answer = transport.ask(&ToLayers::Fetch(fetch.clone()))?;
        encoded.extend(fetched(&fetch, answer)?);
    }
    let catalog = Catalog::from_bytes(&encoded)
        .map_err(|error| LinkError::Protocol(format!("cannot read the catalog: {error}")))?;
    check(&catalog)?;
    Ok(catalog)
}

/// Checks that the sites have widths in a usable range.
fn check(catalog: &Catalog) -> Result<(), LinkError> {
    for (number, site) in catalog.sites.iter().enumerate() {
        let fits = |width: u32| (1..=MAX_WIDTH).contains(&width);
        let outputs = site
            .parts
            .iter()
            .try_fold(0_u32, |sum, part| if fits(part.rows) { sum.checked_add(part.rows) } else { None });
        if !fits(site.columns) || !outputs.is_some_and(fits) {
            return Err(LinkError::Protocol(format!("site {number} of the catalog has an invalid shape")));
        }
        if site.has_path(SitePath::Ring) != site.ring.is_some() {
            return Err(LinkError::Protocol(format!("site {number} of the catalog has half a ring path")));
        }
    }
    Ok(())
}
