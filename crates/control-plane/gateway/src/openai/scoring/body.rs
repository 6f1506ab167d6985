//! Reads the bodies of `/v1/score` and `/v1/rerank`, in the shapes of vLLM, Jina and Cohere.

use std::sync::Arc;

use serde_json::Value;
use shmproto::message::Pooling;
use text::{
    pair_template::{DEFAULT_INSTRUCTION, PairTemplate},
    tokenizer::AddSpecial,
};

use super::classifier::ClassifierOptions;
use crate::{
    errors::ApiError,
    openai::{
        completions::add_special,
        embeddings,
        pooling::MAX_INPUTS,
        strict_fields::{StrictFields, wrong},
        target::ModelRef,
    },
};

/// Names of the two lists of texts of `/v1/score`; a body has one pair of them.
const LISTS: [(&str, &str); 4] =
    [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")];

/// Texts to compare, checked without looking up the model.
#[derive(Debug)]
pub struct ScoringInput {
    pub(crate) wanted: ModelRef,
    /// One query, or one for each document.
    pub(crate) queries: TextList,
    pub(crate) documents: TextList,
    pub(crate) options: ScoringOptions,
}

/// Texts of one field.
#[derive(Debug)]
pub(crate) struct TextList {
    pub(crate) field: &'static str,
    pub(crate) texts: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct ScoringOptions {
    /// Whether to add the tokenizer's special tokens to each text.
    pub(crate) add: AddSpecial,
    /// How the hidden states of a text become its embedding; `None` if the request does not say.
    pub(crate) pooling: Option<Pooling>,
    pub(crate) classes: ClassifierOptions,
    /// Prompt of a query and a document.
    pub(crate) template: Option<Arc<PairTemplate>>,
    /// Text of the template's field `{instruction}`.
    instruction: Option<String>,
    pub(crate) truncation: Truncation,
}

/// Treatment of prompts that are too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Truncation {
    /// A prompt that is longer than the context is refused.
    None,
    /// Text is cut to the length of the context.
    Context,
    /// Text is cut to this number of tokens.
    Tokens(u32),
}

/// The documents that an answer of `/v1/rerank` repeats.
#[derive(Debug)]
pub(crate) struct RankedDocuments {
    /// All documents, or none if the answer repeats none.
    pub(crate) texts: Vec<String>,
    /// Maximum number of results; `None` for all.
    pub(crate) top_n: Option<usize>,
}

/// Reads a body of `/v1/score`.
pub(super) fn score(body: &[u8]) -> Result<(ScoringInput, ()), ApiError> {
    ScoringInput::read_score(body).map(|input| (input, ()))
}

/// Reads a body of `/v1/rerank`.
pub(super) fn rerank(body: &[u8]) -> Result<(ScoringInput, RankedDocuments), ApiError> {
    let mut fields = StrictFields::parse(body)?;
    let wanted = ModelRef::read(&mut fields)?;
    let query = text_list(&mut fields, "query")?;
    let documents = text_list(&mut fields, "documents")?;
    let top_n = fields.count("top_n", 0..=u32::MAX)?.filter(|most| *most > 0);
    let repeats = fields.flag("return_documents", true)?;
    let options = options(&mut fields)?;
    fields.finish()?;
    let queries = query.ok_or_else(|| ApiError::missing("query", "'query' is required: a string"))?;
    if queries.texts.len() > 1 {
        return Err(ApiError::invalid("query", "'query' must be one text, not an array"));
    }
    let documents = documents.ok_or_else(|| {
        ApiError::missing("documents", "'documents' is required: an array of strings or {\"text\": ...}")
    })?;
    let texts = if repeats { documents.texts.clone() } else { Vec::new() };
    let ranked = RankedDocuments { texts, top_n: top_n.map(|most| most as usize) };
    Ok((ScoringInput { wanted, queries, documents, options }, ranked))
}

impl ScoringInput {
    /// Reads a body of `/v1/rerank`.
    ///
    /// # Errors
    /// Names the field that is missing, malformed or unknown.
    pub fn read_rerank(body: &[u8]) -> Result<Self, ApiError> {
        rerank(body).map(|(input, _)| input)
    }

    /// Reads a body of `/v1/score`.
    ///
    /// # Errors
    /// Names the field that is missing, malformed or unknown.
    pub fn read_score(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        let wanted = ModelRef::read(&mut fields)?;
        let mut lists = Vec::new();
        for name in ["text_1", "text_2", "data_1", "data_2", "queries", "documents", "items"] {
            lists.extend(text_list(&mut fields, name)?);
        }
        let options = options(&mut fields)?;
        fields.finish()?;
        let names: Vec<&str> = lists.iter().map(|list| list.field).collect();
        if !LISTS.iter().any(|&(first, second)| names == [first, second]) {
            let message = "send two lists of texts: 'text_1' and 'text_2', 'data_1' and 'data_2', or 'queries' and \
                 'documents'";
            return Err(ApiError::missing("text_1", message));
        }
        let [queries, documents] =
            <[TextList; 2]>::try_from(lists).map_err(|_| ApiError::internal("two lists became others"))?;
        let (first, second) = (queries.texts.len(), documents.texts.len());
        if first != 1 && first != second {
            let message = format!(
                "'{}' has {first} texts and '{}' has {second}; send one query, or one for each document",
                queries.field, documents.field
            );
            return Err(ApiError::invalid(queries.field, message));
        }
        Ok(Self { wanted, queries, documents, options })
    }
}

fn options(fields: &mut StrictFields) -> Result<ScoringOptions, ApiError> {
    fields.labels()?;
    let names_pooling = fields.peek("pooling").is_some();
    let pooling = embeddings::pooling(fields)?;
    let parse = |source: String| {
        PairTemplate::parse(&source).map_err(|error| ApiError::invalid("template", error.to_string()))
    };
    Ok(ScoringOptions {
        add: add_special(fields)?,
        pooling: names_pooling.then_some(pooling),
        classes: ClassifierOptions::read(fields)?,
        template: fields.text("template")?.map(parse).transpose()?.map(Arc::new),
        instruction: fields.text("instruction")?,
        truncation: Truncation::read(fields)?,
    })
}

impl ScoringOptions {
    /// Returns the text of the template's field `{instruction}`.
    pub(super) fn instruction(&self) -> &str {
        self.instruction.as_deref().unwrap_or(DEFAULT_INSTRUCTION)
    }

    /// Refuses options that scores from embeddings do not follow.
    pub(super) fn check_embedded(&self) -> Result<(), ApiError> {
        let given = [("template", self.template.is_some()), ("instruction", self.instruction.is_some())];
        match given.iter().find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((field, _)) => {
                let message = format!(
                    "'{field}' has no meaning for scores from embeddings; remove it, use an adapter with a \
                     classification head, or send 'classifier_from_token'"
                );
                Err(ApiError::invalid(field, message))
            }
        }
    }

    /// Refuses options that scores from classes do not follow.
    pub(super) fn check_classified(&self) -> Result<(), ApiError> {
        if self.pooling.is_none() {
            return Ok(());
        }
        let message = "'pooling' has no meaning for a model that scores by classes; remove it";
        Err(ApiError::invalid("pooling", message))
    }

    /// Refuses an instruction that the prompt would not show.
    pub(super) fn check_instruction(&self, template: Option<&PairTemplate>) -> Result<(), ApiError> {
        let is_shown = template.is_some_and(PairTemplate::shows_instruction);
        if self.instruction.is_none() || is_shown {
            return Ok(());
        }
        let message = "'instruction' needs a template with {instruction}; send one as 'template'";
        Err(ApiError::invalid("instruction", message))
    }
}

impl Truncation {
    /// Reads `truncate_prompt_tokens`: a number of tokens, or -1 for the length of the context.
    pub(crate) fn read(fields: &mut StrictFields) -> Result<Self, ApiError> {
        const FIELD: &str = "truncate_prompt_tokens";
        match fields.integer(FIELD, -1..=u32::MAX.into())? {
            None => Ok(Self::None),
            Some(-1) => Ok(Self::Context),
            Some(0) => Err(ApiError::invalid(FIELD, "'truncate_prompt_tokens' must be -1 or at least 1")),
            Some(tokens) => Ok(Self::Tokens(u32::try_from(tokens).unwrap_or(u32::MAX))),
        }
    }

    /// Returns the maximum number of tokens of a prompt for a context of `context` tokens, if any.
    pub(crate) fn limit(self, context: usize) -> Result<Option<usize>, ApiError> {
        match self {
            Self::None => Ok(None),
            Self::Context => Ok(Some(context)),
            Self::Tokens(tokens) if tokens as usize <= context => Ok(Some(tokens as usize)),
            Self::Tokens(tokens) => {
                let message = format!(
                    "'truncate_prompt_tokens' is {tokens}, and the model's context has {context} tokens; \
                     request fewer, or -1 for the context"
                );
                Err(ApiError::invalid("truncate_prompt_tokens", message))
            }
        }
    }
}

/// Reads a text or an array of texts, each a string or an object with the string `text`.
pub(crate) fn text_list(
    fields: &mut StrictFields,
    field: &'static str,
) -> Result<Option<TextList>, ApiError> {
    let Some(value) = fields.take(field) else { return Ok(None) };
    let items = if let Value::Array(items) = value { items } else { vec![value] };
    if items.is_empty() {
        return Err(ApiError::missing(field, format!("'{field}' is empty; send at least one text")));
    }
    if items.len() > MAX_INPUTS {
        let message = format!("'{field}' may hold at most {MAX_INPUTS} texts, not {}", items.len());
        return Err(ApiError::invalid(field, message));
    }
    let texts = items.into_iter().map(|item| text(field, item)).collect::<Result<_, _>>()?;
    Ok(Some(TextList { field, texts }))
}

fn text(field: &str, item: Value) -> Result<String, ApiError> {
    match item {
        Value::String(text) => Ok(text),
        Value::Object(_) => {
            let mut inside = StrictFields::of(item, field)?;
            let text = inside.text("text").map_err(|error| error.within(field))?;
            inside.finish().map_err(|error| error.within(field))?;
            text.ok_or_else(|| ApiError::missing(field, format!("an object in '{field}' has no 'text'")))
        }
        other => Err(wrong(field, "a string, {\"text\": \"...\"}, or an array of these", &other)),
    }
}
