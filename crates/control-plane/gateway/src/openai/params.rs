//! The sampling and output options that chat and completions share.

use model_files::generation_defaults::GenerationDefaults;
use serde_json::Value;
use shmproto::message::{Precision, Sampling};
use text::stop::StopStrings;

use super::{
    adapter_switches::{self, RequestedSwitch},
    logprobs::TokenNames,
    stops::{self, stop_tokens},
    stream_options::{self, ResponseMode},
    strict_fields::{StrictFields, whole, wrong},
    structured::{self, Structure},
};
use crate::{errors::ApiError, lifecycle::ServingState};

const MAX_CHOICES: u32 = 128;
pub(crate) const MAX_LOGPROBS: u32 = 20;
/// Maximum number of entries in `logit_bias`.
const MAX_BIASES: usize = 1024;

/// Properties of the model against which options are checked.
#[derive(Debug, Clone, Copy)]
pub struct ParamLimits<'a> {
    /// Exclusive upper bound of token ids.
    pub vocab_size: u32,
    /// Seed of a request that sets none.
    pub default_seed: u64,
    /// Defaults of the model's generation configuration, which replace OpenAI's.
    pub defaults: &'a GenerationDefaults,
}

impl<'a> ParamLimits<'a> {
    #[must_use]
    pub fn of(serving: &'a ServingState, default_seed: u64) -> Self {
        let defaults = &serving.text.info().defaults;
        Self { vocab_size: serving.welcome.vocab_size, default_seed, defaults }
    }
}

#[derive(Debug, Clone)]
pub struct Params {
    /// Sampling options; the seed is the request's or the default seed.
    pub sampling: Sampling,
    /// The requested maximum; `None` leaves the maximum to the route.
    pub max_tokens: Option<u32>,
    /// Number of tokens before which the text cannot stop.
    pub min_tokens: u32,
    /// Strings that end the text and are not part of it.
    pub stop: Option<StopStrings>,
    /// Tokens that end the text beside the model's own end tokens.
    pub stop_tokens: Vec<u32>,
    pub end_tokens: EndTokens,
    pub choices: u32,
    pub delivery: ResponseMode,
    /// Deadline in milliseconds; 0 means none.
    pub deadline_ms: u32,
    pub token_names: TokenNames,
    /// Precision of the activations in the base's linear layers.
    pub precision: Precision,
    /// The structured output that the request requires.
    pub structure: Option<Structure>,
    /// Whether the answer contains the token ids of prompt and choices (vLLM's `return_token_ids`).
    pub returns_token_ids: bool,
    /// Alternatives to report for each prompt token; `None` reports no log-probabilities of the prompt.
    pub prompt_logprobs: Option<u32>,
    /// Changes of the adapter during the answer, in order.
    pub switches: Vec<RequestedSwitch>,
    /// Whether the answer carries a signed receipt.
    pub with_receipt: bool,
    /// Tokens that a replay expects; empty for every other request.
    pub expected: Vec<u32>,
}

impl Params {
    /// Returns the options of one choice from the model's own distribution, limited only by the context.
    #[must_use]
    pub fn plain(seed: u64) -> Self {
        Self {
            sampling: Sampling { seed, ..Sampling::default() },
            max_tokens: None,
            min_tokens: 0,
            stop: None,
            stop_tokens: Vec::new(),
            end_tokens: EndTokens::Stop,
            choices: 1,
            delivery: ResponseMode::Whole,
            deadline_ms: 0,
            token_names: TokenNames::Text,
            precision: Precision::Serving,
            structure: None,
            returns_token_ids: false,
            prompt_logprobs: None,
            switches: Vec::new(),
            with_receipt: false,
            expected: Vec::new(),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndTokens {
    /// End tokens end the text.
    Stop,
    /// End tokens are ordinary tokens (`ignore_eos`).
    Ignore,
}

/// Options whose field names differ between routes.
#[derive(Debug, Clone)]
pub(crate) struct RouteOptions {
    /// Maximum number of tokens to generate; `None` leaves the maximum to the route.
    pub max_tokens: Option<u32>,
    pub delivery: ResponseMode,
    /// The structured output that the request requires.
    pub structure: Option<Structure>,
    pub stop: Option<StopStrings>,
}

pub(crate) fn read(fields: &mut StrictFields, limits: &ParamLimits<'_>) -> Result<Params, ApiError> {
    fields.labels()?;
    let max_tokens = max_tokens(fields)?;
    let (structure, delivery) = (structured::read(fields)?, stream_options::read(fields)?);
    let stop = stops::read(fields)?;
    let asked = RouteOptions { max_tokens, delivery, structure, stop };
    let params = read_beside(asked, fields, limits)?;
    let choices = fields.count("n", 1..=MAX_CHOICES)?.unwrap_or(1);
    let names = fields.flag("return_tokens_as_token_ids", false)?;
    let token_names = if names { TokenNames::Ids } else { TokenNames::Text };
    let returns_token_ids = fields.flag("return_token_ids", false)?;
    let prompt_logprobs = prompt_logprobs(fields, params.delivery)?;
    let switches = adapter_switches::read(fields)?;
    let with_receipt = fields.flag("receipt", false)?;
    Ok(Params { choices, token_names, returns_token_ids, prompt_logprobs, switches, with_receipt, ..params })
}

fn prompt_logprobs(fields: &mut StrictFields, delivery: ResponseMode) -> Result<Option<u32>, ApiError> {
    let asked = fields.count("prompt_logprobs", 0..=MAX_LOGPROBS)?;
    if asked.is_some() && delivery != ResponseMode::Whole {
        let message = "'prompt_logprobs' is not available with 'stream'; remove one of them";
        return Err(ApiError::invalid("prompt_logprobs", message));
    }
    Ok(asked)
}

/// Reads the options that have the same names on all routes; `asked` holds the route's other options.
pub(crate) fn read_beside(
    asked: RouteOptions,
    fields: &mut StrictFields,
    limits: &ParamLimits<'_>,
) -> Result<Params, ApiError> {
    let RouteOptions { max_tokens, delivery, structure, stop } = asked;
    let min_tokens = fields.count("min_tokens", 0..=u32::MAX)?.unwrap_or(0);
    if let Some(max_tokens) = max_tokens.filter(|max_tokens| *max_tokens < min_tokens) {
        let message = format!("'min_tokens' is {min_tokens}, which is more than max_tokens, {max_tokens}");
        return Err(ApiError::invalid("min_tokens", message));
    }
    let end_tokens = end_tokens(fields, structure.as_ref())?;
    Ok(Params {
        sampling: sampling(fields, limits)?,
        max_tokens,
        min_tokens,
        stop,
        stop_tokens: stop_tokens(fields, limits.vocab_size)?,
        end_tokens,
        delivery,
        deadline_ms: fields.count("deadline_ms", 0..=u32::MAX)?.unwrap_or(0),
        precision: precision(fields)?,
        structure,
        ..Params::plain(limits.default_seed)
    })
}

fn end_tokens(fields: &mut StrictFields, structure: Option<&Structure>) -> Result<EndTokens, ApiError> {
    match (fields.flag("ignore_eos", false)?, structure) {
        (false, _) => Ok(EndTokens::Stop),
        (true, None) => Ok(EndTokens::Ignore),
        (true, Some(Structure { field, .. })) => {
            let message =
                format!("'ignore_eos' excludes '{field}', which defines the answer's end; send one of them");
            Err(ApiError::invalid("ignore_eos", message))
        }
    }
}

fn precision(fields: &mut StrictFields) -> Result<Precision, ApiError> {
    match fields.text("precision")?.as_deref() {
        None | Some("serving") => Ok(Precision::Serving),
        Some("exact") => Ok(Precision::Exact),
        Some(other) => {
            let message = format!("'precision' must be 'serving' or 'exact', not '{other}'");
            Err(ApiError::invalid("precision", message))
        }
    }
}

/// Reads `max_tokens` or OpenAI's newer name `max_completion_tokens`.
fn max_tokens(fields: &mut StrictFields) -> Result<Option<u32>, ApiError> {
    let old = fields.count("max_tokens", 0..=u32::MAX)?;
    let new = fields.count("max_completion_tokens", 0..=u32::MAX)?;
    match (old, new) {
        (Some(old), Some(new)) if old != new => Err(ApiError::invalid(
            "max_completion_tokens",
            format!("max_tokens is {old} and max_completion_tokens is {new}; send one of them"),
        )),
        (old, new) => Ok(old.or(new)),
    }
}

fn sampling(fields: &mut StrictFields, limits: &ParamLimits<'_>) -> Result<Sampling, ApiError> {
    let defaults = limits.defaults;
    let top_p = fields.number("top_p", 0.0..=1.0)?.or(defaults.top_p).unwrap_or(1.0);
    let repetition_penalty = fields.number("repetition_penalty", 0.0..=10.0)?;
    if repetition_penalty == Some(0.0) {
        return Err(ApiError::invalid(
            "repetition_penalty",
            "'repetition_penalty' must be above 0; 1 is off",
        ));
    }
    Ok(Sampling {
        temperature: fields.number("temperature", 0.0..=2.0)?.or(defaults.temperature).unwrap_or(1.0),
        top_k: top_k(fields)?.or(defaults.top_k).unwrap_or(0),
        // A nucleus holds at least the most likely token, so 0 keeps exactly that token.
        top_p: top_p.max(f32::MIN_POSITIVE),
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(0.0),
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        repetition_penalty: repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
        logit_bias: logit_bias(fields, limits)?,
        seed: seed(fields, limits)?,
    })
}

/// Reads `top_k`; -1 and 0 both keep all tokens.
fn top_k(fields: &mut StrictFields) -> Result<Option<u32>, ApiError> {
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?;
    Ok(top_k.map(|top_k| u32::try_from(top_k).unwrap_or(0)))
}

fn seed(fields: &mut StrictFields, limits: &ParamLimits<'_>) -> Result<u64, ApiError> {
    match fields.take("seed") {
        None => Ok(limits.default_seed),
        Some(value) => {
            let seed = whole(&value).and_then(|number| {
                let signed = || i64::try_from(number).map(i64::cast_unsigned);
                u64::try_from(number).or_else(|_| signed()).ok()
            });
            seed.ok_or_else(|| wrong("seed", "a 64-bit integer", &value))
        }
    }
}

fn logit_bias(fields: &mut StrictFields, limits: &ParamLimits<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(value) = fields.take("logit_bias") else {
        return Ok(Vec::new());
    };
    let Value::Object(map) = value else {
        return Err(wrong("logit_bias", "an object", &value));
    };
    if map.len() > MAX_BIASES {
        return Err(ApiError::invalid(
            "logit_bias",
            format!("'logit_bias' may name at most {MAX_BIASES} tokens"),
        ));
    }
    map.iter().map(|(token, bias)| bias_of(token, bias, limits)).collect()
}

fn bias_of(token: &str, bias: &Value, limits: &ParamLimits<'_>) -> Result<(u32, f32), ApiError> {
    // Only one spelling per token: `5`, `05` and `+5` would be three biases of one token.
    let is_plain = |id: &u32| *id < limits.vocab_size && id.to_string() == token;
    let id = token.parse().ok().filter(is_plain).ok_or_else(|| {
        let message = format!(
            "'logit_bias' has '{token}', which is not a token id below {} in plain digits",
            limits.vocab_size
        );
        ApiError::invalid("logit_bias", message)
    })?;
    match bias.as_f64() {
        #[expect(clippy::cast_possible_truncation, reason = "rounding to single precision is meant")]
        Some(number) if (-100.0..=100.0).contains(&number) => Ok((id, number as f32)),
        _ => Err(wrong("logit_bias", "a map from token id to a number from -100 to 100", bias)),
    }
}

#[cfg(test)]
mod tests {
    use shmproto::message::ProvisionalMode;

    use super::{
        super::stream_options::{StreamOptions, StreamUsage},
        *,
    };

    fn parse(text: &str) -> Result<Params, ApiError> {
        let mut fields = StrictFields::parse(text.as_bytes())?;
        let limits =
            ParamLimits { vocab_size: 300, default_seed: 7, defaults: &GenerationDefaults::default() };
        let params = read(&mut fields, &limits)?;
        fields.finish()?;
        Ok(params)
    }

    #[test]
    fn nothing_asked_is_openais_defaults() {
        let params = parse("{}").unwrap();
        assert_eq!(
            (params.sampling.temperature, params.sampling.top_p, params.sampling.top_k),
            (1.0, 1.0, 0)
        );
        assert_eq!((params.choices, params.delivery, params.max_tokens), (1, ResponseMode::Whole, None));
    }

    #[test]
    fn a_precision_is_one_of_two_words() {
        assert_eq!(parse("{}").unwrap().precision, Precision::Serving);
        assert_eq!(parse(r#"{"precision":"exact"}"#).unwrap().precision, Precision::Exact);
        assert!(parse(r#"{"precision":"int8"}"#).unwrap_err().to_string().contains("not 'int8'"));
    }

    #[test]
    fn a_seed_stands_before_the_one_there_is_without_it() {
        assert_eq!(parse("{}").unwrap().sampling.seed, 7);
        assert_eq!(parse(r#"{"seed":8}"#).unwrap().sampling.seed, 8);
    }

    #[test]
    fn more_tokens_at_least_than_at_most_are_refused() {
        assert!(parse(r#"{"min_tokens":5,"max_tokens":4}"#).unwrap_err().to_string().contains("min_tokens"));
        parse(r#"{"min_tokens":4,"max_tokens":4}"#).unwrap();
    }

    #[test]
    fn a_stop_string_that_is_too_long_is_refused() {
        parse(&format!(r#"{{"stop":"{}"}}"#, "é".repeat(256))).unwrap();
        parse(&format!(r#"{{"stop":["{}"]}}"#, "é".repeat(257))).unwrap_err();
    }

    #[test]
    fn a_negative_seed_is_a_seed() {
        assert_eq!(parse(r#"{"seed":-1}"#).unwrap().sampling.seed, u64::MAX);
    }

    #[test]
    fn a_bias_on_a_token_outside_the_vocabulary_is_refused() {
        assert_eq!(parse(r#"{"logit_bias":{"299":1.5}}"#).unwrap().sampling.logit_bias, vec![(299, 1.5)]);
        parse(r#"{"logit_bias":{"300":1.5}}"#).unwrap_err();
    }

    #[test]
    fn a_token_has_one_spelling_in_a_logit_bias() {
        for spelling in ["05", "+5", " 5", "5.0", "0x5"] {
            let body = serde_json::json!({ "logit_bias": { "5": 100, spelling: 100 } }).to_string();
            let error = parse(&body).unwrap_err();
            assert!(error.to_string().contains(&format!("'{spelling}'")), "{error}");
        }
    }

    #[test]
    fn a_seed_is_a_whole_number_of_64_bits_with_or_without_a_sign() {
        for (written, seed) in [("1.0", 1), ("-1", u64::MAX), ("18446744073709551615", u64::MAX)] {
            assert_eq!(parse(&format!("{{\"seed\":{written}}}")).unwrap().sampling.seed, seed, "{written}");
        }
        for written in ["0.5", "18446744073709551616", "-9223372036854775809"] {
            parse(&format!("{{\"seed\":{written}}}")).unwrap_err();
        }
    }

    #[test]
    fn seventeen_stop_strings_are_refused() {
        let stops: Vec<String> = (0..17).map(|i| format!("{i}")).collect();
        let body = serde_json::json!({ "stop": stops }).to_string();
        assert_eq!(parse(&body).unwrap_err().code(), "invalid_value");
    }

    #[test]
    fn stream_options_without_a_stream_are_refused() {
        parse(r#"{"stream_options":{"include_usage":true}}"#).unwrap_err();
        let params = parse(r#"{"stream":true,"stream_options":{"include_usage":true}}"#).unwrap();
        let options = StreamOptions { usage: StreamUsage::Last, provisional: ProvisionalMode::Unwanted };
        assert_eq!(params.delivery, ResponseMode::Stream(options));
    }

    #[test]
    fn what_is_drafted_is_told_in_a_stream_that_asks_for_it_and_nowhere_else() {
        let error = parse(r#"{"stream_options":{"provisional":true}}"#).unwrap_err();
        assert!(error.to_string().contains("'stream': true"), "{error}");
        let asked = parse(r#"{"stream":true,"stream_options":{"provisional":true}}"#).unwrap();
        assert_eq!(asked.delivery.provisional(), ProvisionalMode::Wanted);
        assert_eq!(parse(r#"{"stream":true}"#).unwrap().delivery.provisional(), ProvisionalMode::Unwanted);
    }
}
