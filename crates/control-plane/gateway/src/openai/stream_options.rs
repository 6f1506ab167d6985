//! Options of delivery: one body or a stream, and what a stream contains.

use shmproto::message::ProvisionalMode;

use super::strict_fields::StrictFields;
use crate::errors::ApiError;

const NAME: &str = "stream_options";

/// When a stream reports usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamUsage {
    /// No chunk has usage.
    Never,
    /// A separate last chunk has usage.
    Last,
    /// Every chunk and a separate last chunk have usage.
    Always,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResponseMode {
    Whole,
    /// Server-sent events; lines of JSON on Ollama's routes.
    Stream(StreamOptions),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamOptions {
    pub usage: StreamUsage,
    /// Whether draft tokens are shown before verification.
    pub provisional: ProvisionalMode,
}

impl StreamOptions {
    pub(crate) const PLAIN: Self = Self { usage: StreamUsage::Never, provisional: ProvisionalMode::Unwanted };
}

impl ResponseMode {
    #[must_use]
    pub fn provisional(self) -> ProvisionalMode {
        match self {
            Self::Whole => ProvisionalMode::Unwanted,
            Self::Stream(options) => options.provisional,
        }
    }
}

pub(crate) fn read(fields: &mut StrictFields) -> Result<ResponseMode, ApiError> {
    let stream = fields.flag("stream", false)?;
    let Some(options) = fields.take(NAME) else {
        return Ok(if stream { ResponseMode::Stream(StreamOptions::PLAIN) } else { ResponseMode::Whole });
    };
    if !stream {
        return Err(ApiError::invalid(NAME, "'stream_options' is only allowed together with 'stream': true"));
    }
    let options = StrictFields::of(options, NAME)?;
    stream_options(options).map(ResponseMode::Stream).map_err(|error| error.within(NAME))
}

fn stream_options(mut options: StrictFields) -> Result<StreamOptions, ApiError> {
    let last = options.flag("include_usage", false)?;
    let always = options.flag("continuous_usage_stats", false)?;
    let provisional = options.flag("provisional", false)?;
    obfuscation(&mut options)?;
    options.finish()?;
    let usage = match (last, always) {
        (false, _) => StreamUsage::Never,
        (true, false) => StreamUsage::Last,
        (true, true) => StreamUsage::Always,
    };
    let provisional = if provisional { ProvisionalMode::Wanted } else { ProvisionalMode::Unwanted };
    Ok(StreamOptions { usage, provisional })
}

/// Reads `stream` and `stream_options` of the Responses API, whose last event always has usage.
pub(crate) fn read_response(fields: &mut StrictFields) -> Result<ResponseMode, ApiError> {
    let stream = fields.flag("stream", false)?;
    if let Some(options) = fields.take(NAME) {
        let mut options = StrictFields::of(options, NAME)?;
        obfuscation(&mut options).and_then(|()| options.finish()).map_err(|error| error.within(NAME))?;
    }
    Ok(if stream { ResponseMode::Stream(StreamOptions::PLAIN) } else { ResponseMode::Whole })
}

/// Refuses `include_obfuscation`: this server adds no padding that hides the lengths of chunks.
fn obfuscation(options: &mut StrictFields) -> Result<(), ApiError> {
    const NAME: &str = "include_obfuscation";
    if options.flag(NAME, false)? { Err(ApiError::unsupported(NAME)) } else { Ok(()) }
}
