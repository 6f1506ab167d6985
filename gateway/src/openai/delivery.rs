//! How an answer travels: as one body, or as a stream.

use shmproto::message::Provisional;

use super::fields::Fields;
use crate::errors::ApiError;

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
pub enum Delivery {
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
    pub provisional: Provisional,
}

impl Delivery {
    /// Whether drafted tokens are told before they are verified.
    #[must_use]
    pub fn provisional(self) -> Provisional {
        match self {
            Self::Whole => Provisional::Unwanted,
            Self::Stream(options) => options.provisional,
        }
    }
}

/// Reads the fields about it.
pub fn read(fields: &mut Fields) -> Result<Delivery, ApiError> {
    let stream = fields.flag("stream", false)?;
    let Some(options) = fields.take("stream_options") else {
        let options = StreamOptions { usage: StreamUsage::Never, provisional: Provisional::Unwanted };
        return Ok(if stream { Delivery::Stream(options) } else { Delivery::Whole });
    };
    if !stream {
        return Err(ApiError::invalid(
            "stream_options",
            "'stream_options' is only allowed together with 'stream': true",
        ));
    }
    let mut options = Fields::of(options, "stream_options")?;
    let last = options.flag("include_usage", false)?;
    let always = options.flag("continuous_usage_stats", false)?;
    let provisional = options.flag("provisional", false)?;
    options.finish()?;
    let usage = match (last, always) {
        (false, _) => StreamUsage::Never,
        (true, false) => StreamUsage::Last,
        (true, true) => StreamUsage::Always,
    };
    let provisional = if provisional { Provisional::Wanted } else { Provisional::Unwanted };
    Ok(Delivery::Stream(StreamOptions { usage, provisional }))
}
