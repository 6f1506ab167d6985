//! How an answer travels: as one body, or as a stream.

use shmproto::message::ProvisionalMode;

use super::strict_fields::StrictFields;
use crate::errors::ApiError;

const NAME: &str = "stream_options";

/// When usage is reported in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamUsage {
    /// No chunk has usage.
    Never,
    /// In a last chunk of its own.
    Last,
    /// In every chunk, and in a last one.
    Always,
}

/// How the answer travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResponseMode {
    /// As one body.
    Whole,
    /// As server-sent events.
    Stream(StreamOptions),
}

/// What a stream has besides text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamOptions {
    /// Counts of tokens.
    pub usage: StreamUsage,
    /// Drafted tokens, before they are verified.
    pub provisional: ProvisionalMode,
}

impl StreamOptions {
    /// Text alone.
    pub const PLAIN: Self = Self { usage: StreamUsage::Never, provisional: ProvisionalMode::Unwanted };
}

impl ResponseMode {
    /// Whether drafted tokens are told before they are verified.
    #[must_use]
    pub fn provisional(self) -> ProvisionalMode {
        match self {
            Self::Whole => ProvisionalMode::Unwanted,
            Self::Stream(options) => options.provisional,
        }
    }
}

/// Reads the fields about it.
pub fn read(fields: &mut StrictFields) -> Result<ResponseMode, ApiError> {
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

/// Reads the fields about it of the Responses API, which tells usage in its last event.
pub fn read_response(fields: &mut StrictFields) -> Result<ResponseMode, ApiError> {
    let stream = fields.flag("stream", false)?;
    if let Some(options) = fields.take(NAME) {
        let mut options = StrictFields::of(options, NAME)?;
        obfuscation(&mut options).and_then(|()| options.finish()).map_err(|error| error.within(NAME))?;
    }
    Ok(if stream { ResponseMode::Stream(StreamOptions::PLAIN) } else { ResponseMode::Whole })
}

/// Nothing is added to hide the lengths of pieces, so a caller may ask for just that.
fn obfuscation(options: &mut StrictFields) -> Result<(), ApiError> {
    const NAME: &str = "include_obfuscation";
    if options.flag(NAME, false)? { Err(ApiError::unsupported(NAME)) } else { Ok(()) }
}
