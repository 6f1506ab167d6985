//! `POST /tokenize`, `POST /detokenize`, `GET /tokenizer_info`: the tokenizer for callers without one.

use std::sync::Arc;

use axum::{Extension, Json, extract::State};
use serde_json::{Value, json};
use settings::ToolCallParser;
use text::tokenizer::AddSpecial;

use super::{
    completions::add_special,
    logprobs::name,
    messages::messages,
    named_uris::fetch_named,
    strict_fields::{StrictFields, token_id},
    target::ModelRef,
    template_options,
    tools::{
        self, RequestTools,
        tool_params::{self, Tools},
    },
};
use crate::{
    app::App,
    body::JsonBody,
    body_workers::BodyWork,
    caller::Caller,
    errors::ApiError,
    lifecycle::ServingState,
    text::{ChatMessage, TemplateOptions, Text},
};

#[derive(Debug)]
enum TokenizeSource {
    Prompt(String, AddSpecial),
    Chat(Box<TokenizeConversation>),
}

/// A conversation, encoded as a chat completion would encode it.
#[derive(Debug)]
struct TokenizeConversation {
    messages: Vec<ChatMessage>,
    showing: TemplateOptions,
    tools: Option<Tools>,
}

#[derive(Debug)]
pub struct TokenizeBody {
    wanted: Option<ModelRef>,
    source: TokenizeSource,
    wants_strings: bool,
}

#[derive(Debug)]
pub struct DetokenizeBody {
    wanted: Option<ModelRef>,
    tokens: Vec<u32>,
}

impl TokenizeBody {
    pub fn read(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        let wanted = wanted(&mut fields)?;
        let (add, wants_strings) = (add_special(&mut fields)?, fields.flag("return_token_strs", false)?);
        let (prompt, chat) = (fields.text("prompt")?, fields.array("messages")?);
        let (showing, tools) = (template_options::read(&mut fields)?, tool_params::read(&mut fields)?);
        fields.finish()?;
        let source = match (prompt, chat) {
            (Some(_), None) if tools.is_some() => {
                let message = "'tools' need 'messages'; send 'messages' instead of 'prompt'";
                return Err(ApiError::invalid("tools", message));
            }
            (Some(prompt), None) => TokenizeSource::Prompt(prompt, add),
            (None, Some(chat)) => TokenizeSource::Chat(Box::new(TokenizeConversation {
                messages: messages(Some(chat))?,
                showing,
                tools,
            })),
            _ => return Err(ApiError::missing("prompt", "send either 'prompt', a string, or 'messages'")),
        };
        Ok(Self { wanted, source, wants_strings })
    }

    /// Writes the answer with the tokenizer and template `text`.
    fn answer(
        self,
        parser: ToolCallParser,
        serving: &ServingState,
        text: &dyn Text,
    ) -> Result<Value, ApiError> {
        let tokens = match self.source {
            TokenizeSource::Prompt(prompt, add) => text.encode(&prompt, add)?,
            TokenizeSource::Chat(chat) => chat.tokens(parser, text)?,
        };
        let mut answer =
            json!({ "count": tokens.len(), "max_model_len": serving.context_tokens, "tokens": tokens });
        if self.wants_strings {
            let strings = tokens.iter().map(|token| name(text.token_bytes(*token)));
            answer["token_strs"] = strings.collect::<Vec<_>>().into();
        }
        Ok(answer)
    }
}

impl TokenizeConversation {
    fn tokens(self, parser: ToolCallParser, text: &dyn Text) -> Result<Vec<u32>, ApiError> {
        let Self { messages, mut showing, tools } = self;
        tools::check_history(&messages, text).map_err(|error| error.of("messages"))?;
        if let Some(tools) = tools {
            showing.tools = RequestTools::new(tools, parser, text)?.shown();
        }
        Ok(text.encode_chat(&messages, &showing)?)
    }
}

impl DetokenizeBody {
    pub fn read(body: &[u8], vocab_size: u32) -> Result<Self, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        let wanted = wanted(&mut fields)?;
        let items = fields.array("tokens")?;
        let items = items
            .ok_or_else(|| ApiError::missing("tokens", "'tokens' is required: an array of token ids"))?;
        fields.finish()?;
        let tokens = items.iter().map(|id| token_id("tokens", id, vocab_size)).collect::<Result<_, _>>()?;
        Ok(Self { wanted, tokens })
    }
}

/// `POST /tokenize`: `{prompt, add_special_tokens}` or `{messages, tools}` to `{tokens, count,
/// max_model_len}`.
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<Value>, ApiError> {
    let (serving, shared) = (app.serving()?, Arc::clone(&app));
    let body = fetch_named(&app, &caller, body).await?;
    app.bodies
        .run_blocking(body.origin(), move || {
            let mut body = TokenizeBody::read(&body)?;
            let text = text(&shared, &caller, &serving, body.wanted.take())?;
            BodyWork::rendering(text, move |text| body.answer(shared.parsers.calls, &serving, text).map(Json))
        })
        .await
}

/// `POST /detokenize`: `{tokens}` to `{prompt}`.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<Value>, ApiError> {
    let (serving, shared) = (app.serving()?, Arc::clone(&app));
    let body = fetch_named(&app, &caller, body).await?;
    app.bodies
        .run(body.origin(), move || {
            let body = DetokenizeBody::read(&body, serving.welcome.vocab_size)?;
            let text = text(&shared, &caller, &serving, body.wanted)?;
            Ok(Json(json!({ "prompt": text.decode(&body.tokens) })))
        })
        .await
}

/// Returns the tokenizer properties that evaluation tools need.
pub(crate) async fn info(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let serving = app.last_serving()?;
    let info = serving.text.info();
    Ok(Json(json!({
        "model": serving.base_name,
        "vocab_size": serving.welcome.vocab_size,
        "model_max_length": serving.context_tokens,
        "bos_token": info.bos_token,
        "eos_token": info.eos_token,
        "pad_token": info.pad_token,
        "chat_template": info.chat_template,
    })))
}

/// Reads `model`, which is optional here.
fn wanted(fields: &mut StrictFields) -> Result<Option<ModelRef>, ApiError> {
    Ok(fields.text("model")?.map(|model| ModelRef { model, adapter: None }))
}

/// Returns the text of the requested model. All models share one tokenizer, but an adapter may have its own
/// chat template, and an unknown name is an error.
fn text(
    app: &App,
    caller: &Caller,
    serving: &ServingState,
    wanted: Option<ModelRef>,
) -> Result<Arc<dyn Text>, ApiError> {
    match wanted {
        None => Ok(Arc::clone(&serving.text)),
        Some(wanted) => Ok(wanted.find(app, serving, caller)?.text(serving)),
    }
}
