//! The request field `adapter_switches`: other adapters for the later stages of an answer.
//!
//! An answer with switches has the same tokens as separate requests in sequence. Each stage is a request of
//! its own under its own adapter. The prompt of a stage is all that precedes it: the prompt, the generated
//! tokens, and the text that the switch appends.
//!
//! A switch happens after a number of generated tokens, or when the model generates a marker. A marker is one
//! token, which is a stop token of the stage before it.

use std::sync::Arc;

use serde_json::Value;
use shmproto::message::{Finish, Generate};
use text::tokenizer::AddSpecial;

use super::{
    namespace::namespace,
    strict_fields::StrictFields,
    target::{ModelRef, ModelTarget},
};
use crate::{app::App, caller::Caller, errors::ApiError, lifecycle::ServingState, text::Text};

const FIELD: &str = "adapter_switches";
pub(super) const MAX_SWITCHES: usize = 16;
const MAX_MARKER_CHARS: usize = 256;
const MAX_APPENDED_CHARS: usize = 4096;

/// A switch as requested, checked without looking up the model.
#[derive(Debug, Clone)]
pub struct RequestedSwitch {
    wanted: ModelRef,
    at: RequestedPoint,
    append: String,
}

#[derive(Debug, Clone)]
enum RequestedPoint {
    Tokens(u32),
    Marker(String),
}

/// When a switch happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwitchPoint {
    /// The answer has this many generated tokens.
    Tokens(u32),
    /// The model generated this token.
    Marker(u32),
}

/// A switch to another model during an answer.
#[derive(Debug)]
pub struct AdapterSwitch {
    pub at: SwitchPoint,
    /// Model of the stage after the switch, with a lease of its own.
    pub target: ModelTarget,
    /// Prefix cache namespace of that model.
    pub namespace: [u8; 32],
    /// Tokens between the stages, which are part of the prompt only.
    pub appended: Vec<u32>,
}

/// Reads the field `adapter_switches`.
///
/// # Errors
/// Names the part of the field that is missing, malformed or unknown.
pub(crate) fn read(fields: &mut StrictFields) -> Result<Vec<RequestedSwitch>, ApiError> {
    let items = fields.array(FIELD)?.unwrap_or_default();
    if items.len() > MAX_SWITCHES {
        let message = format!("'{FIELD}' may hold at most {MAX_SWITCHES} switches, not {}", items.len());
        return Err(ApiError::invalid(FIELD, message));
    }
    let mut last = 0;
    let read = |(index, item): (usize, Value)| {
        let place = format!("{FIELD}[{index}]");
        let switch = RequestedSwitch::read(item, &place)?;
        if let RequestedPoint::Tokens(at) = switch.at {
            if at <= last {
                let field = format!("{place}.after_tokens");
                let message = format!(
                    "'{field}' is {at}, and must be more than the {last} of an earlier switch: all counts \
                     begin at the start of the answer"
                );
                return Err(ApiError::invalid(&field, message));
            }
            last = at;
        }
        Ok(switch)
    };
    items.into_iter().enumerate().map(read).collect()
}

impl RequestedSwitch {
    fn read(item: Value, place: &str) -> Result<Self, ApiError> {
        let mut inside = StrictFields::of(item, place)?;
        Self::read_fields(&mut inside)
            .and_then(|switch| inside.finish().map(|()| switch))
            .map_err(|error| error.within(place))
    }

    fn read_fields(inside: &mut StrictFields) -> Result<Self, ApiError> {
        let wanted = ModelRef::read(inside)?;
        let after_tokens = inside.count("after_tokens", 1..=u32::MAX)?;
        let at = match (after_tokens, bounded(inside, "marker", MAX_MARKER_CHARS)?) {
            (Some(count), None) => RequestedPoint::Tokens(count),
            (None, Some(marker)) if !marker.is_empty() => RequestedPoint::Marker(marker),
            (None, _) => {
                let message = "'after_tokens' is missing: a switch needs a number of tokens there, or a \
                               token's text in 'marker'";
                return Err(ApiError::missing("after_tokens", message));
            }
            (Some(_), Some(_)) => {
                let message = "'marker' is not allowed beside 'after_tokens'; send one of them";
                return Err(ApiError::invalid("marker", message));
            }
        };
        let append = bounded(inside, "append", MAX_APPENDED_CHARS)?.unwrap_or_default();
        Ok(Self { wanted, at, append })
    }

    fn resolve(&self, app: &App, serving: &ServingState, caller: &Caller) -> Result<AdapterSwitch, ApiError> {
        let at = match &self.at {
            RequestedPoint::Tokens(count) => SwitchPoint::Tokens(*count),
            RequestedPoint::Marker(marker) => SwitchPoint::Marker(marker_token(marker, serving)?),
        };
        let target = self.wanted.clone().find(app, serving, caller)?;
        if let Some(lease) = &target.lease {
            lease.allow_eviction();
        }
        let namespace = namespace(caller, &target, serving).hash;
        let appended = match self.append.as_str() {
            "" => Vec::new(),
            text => serving.text.encode(text, AddSpecial::No)?,
        };
        Ok(AdapterSwitch { at, target, namespace, appended })
    }
}

fn bounded(inside: &mut StrictFields, name: &str, most: usize) -> Result<Option<String>, ApiError> {
    let text = inside.text(name)?;
    if text.as_ref().is_some_and(|text| text.chars().count() > most) {
        return Err(ApiError::invalid(name, format!("'{name}' may have at most {most} characters")));
    }
    Ok(text)
}

/// Returns the token whose text is exactly `marker`.
fn marker_token(marker: &str, serving: &ServingState) -> Result<u32, ApiError> {
    let tokens = serving.text.encode(marker, AddSpecial::No)?;
    match tokens[..] {
        [token] if is_spelled(&*serving.text, token, marker) && token < serving.welcome.vocab_size => {
            Ok(token)
        }
        _ => {
            let message = format!(
                "'marker' must be the text of exactly one token of the model, and this text becomes {} tokens; \
                 send a special token, or look for one with POST /tokenize and 'add_special_tokens': false",
                tokens.len()
            );
            Err(ApiError::invalid("marker", message))
        }
    }
}

/// Whether `marker` is the whole text of `token`: tokenizers of some models put a space before a text.
fn is_spelled(text: &dyn Text, token: u32, marker: &str) -> bool {
    text.token_bytes(token) == marker.as_bytes()
}

/// Looks up the models that `caller` requested, and leases their adapters until the request ends.
pub(crate) fn resolve(
    requested: &[RequestedSwitch],
    app: &App,
    serving: &ServingState,
    caller: &Caller,
) -> Result<Arc<[AdapterSwitch]>, ApiError> {
    let resolve = |(index, switch): (usize, &RequestedSwitch)| {
        switch.resolve(app, serving, caller).map_err(|error| error.within(&format!("{FIELD}[{index}]")))
    };
    requested.iter().enumerate().map(resolve).collect()
}

impl AdapterSwitch {
    /// Bounds `stage`, which begins after `done` generated tokens, so that it ends at this switch.
    pub(crate) fn bound(&self, stage: &mut Generate, done: u32) {
        match self.at {
            SwitchPoint::Tokens(count) => stage.max_tokens = stage.max_tokens.min(count.saturating_sub(done)),
            SwitchPoint::Marker(token) if stage.stop_tokens.contains(&token) => {}
            SwitchPoint::Marker(token) => stage.stop_tokens.push(token),
        }
    }

    /// Whether the switch follows a stage that ended by `finish` with the token `last`, after `done` tokens
    /// of the answer.
    #[must_use]
    pub(crate) fn follows(&self, finish: Finish, last: Option<u32>, done: u32) -> bool {
        match (self.at, finish) {
            (SwitchPoint::Tokens(count), Finish::Length) => count == done,
            (SwitchPoint::Marker(token), Finish::Stop) => last == Some(token),
            (SwitchPoint::Tokens(_), Finish::Stop) | (SwitchPoint::Marker(_), Finish::Length) => false,
        }
    }

    /// Whether the switch is due after `done` tokens without a token of the stage before it, because that
    /// stage began at a later marker.
    #[must_use]
    pub(crate) fn is_due(&self, done: u32) -> bool {
        matches!(self.at, SwitchPoint::Tokens(count) if count <= done)
    }
}
