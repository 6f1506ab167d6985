//! Prompts of a query and a document, for models that see both.

use std::sync::Arc;

use text::{
    pair_template::{PairTemplate, QueryAndDocument},
    tokenizer::AddSpecial,
};

use super::body::{ScoringInput, ScoringOptions};
use crate::{
    errors::ApiError, lifecycle::ServingState, openai::generation_request::PromptInput, text::TextError,
};

/// Maximum number of tokens of all prompts of a request, because each document repeats the query.
const MAX_PAIR_TOKENS: usize = 1 << 20;

/// Number of times that a document is cut by as many tokens as are too many; then half of it is cut.
const EXACT_CUTS: usize = 32;

/// Makes the prompts of one request.
pub(super) struct PairPrompts<'a> {
    pub(super) serving: &'a ServingState,
    /// Template of the prompts; `None` joins the tokens of both texts.
    pub(super) template: Option<Arc<PairTemplate>>,
    /// Maximum number of tokens, to which documents are cut.
    pub(super) limit: Option<usize>,
}

impl PairPrompts<'_> {
    /// Returns a prompt for each document.
    pub(super) fn all(&self, input: &ScoringInput) -> Result<Vec<PromptInput>, ApiError> {
        let ScoringInput { queries, documents, options, .. } = input;
        let pairs = queries.texts.iter().cycle().zip(&documents.texts);
        let (mut prompts, mut total) = (Vec::with_capacity(documents.texts.len()), 0);
        for (query, document) in pairs {
            let tokens = match &self.template {
                None => self.joined(query, document, options.add)?,
                Some(template) => self.filled(template, query, document, options)?,
            };
            self.check_length(tokens.len()).map_err(|error| error.of(documents.field))?;
            total += tokens.len();
            prompts.push(PromptInput { tokens, text: None });
            check_total(total, prompts.len()).map_err(|error| error.of(documents.field))?;
        }
        Ok(prompts)
    }

    /// Refuses a prompt that is too long at once, before those of other documents are made.
    fn check_length(&self, tokens: usize) -> Result<(), ApiError> {
        let limit = self.limit.unwrap_or(self.serving.context_tokens);
        if tokens > limit { Err(ApiError::context_length(tokens, limit)) } else { Ok(()) }
    }

    /// Joins the tokens of both texts, as transformers' tokenizers do without a template of pairs.
    fn joined(&self, query: &str, document: &str, add: AddSpecial) -> Result<Vec<u32>, ApiError> {
        let mut tokens = self.serving.text.encode(query, add)?;
        let mut rest = self.serving.text.encode(document, add)?;
        if let Some(limit) = self.limit {
            rest.truncate(limit.saturating_sub(tokens.len()));
        }
        tokens.extend(rest);
        Ok(tokens)
    }

    /// Fills the template. A document that makes the prompt too long is cut at its end, so that the end of
    /// the template stays.
    fn filled(
        &self,
        template: &PairTemplate,
        query: &str,
        document: &str,
        options: &ScoringOptions,
    ) -> Result<Vec<u32>, ApiError> {
        let text = &self.serving.text;
        let encode = |document: &str| {
            text.encode_pair(
                template,
                &QueryAndDocument { instruction: options.instruction(), query, document },
            )
        };
        let tokens = encode(document)?;
        match self.limit {
            Some(limit) if tokens.len() > limit => {
                let whole = text.encode(document, AddSpecial::No)?;
                Ok(cut(&whole, tokens, limit, |kept| encode(decoded(&text.decode(kept))))?)
            }
            _ => Ok(tokens),
        }
    }
}

/// Checks the number of tokens of the first `pairs` prompts.
fn check_total(total: usize, pairs: usize) -> Result<(), ApiError> {
    if total <= MAX_PAIR_TOKENS {
        return Ok(());
    }
    let message = format!(
        "the first {pairs} pairs of texts have {total} tokens together, and the limit of a request is \
         {MAX_PAIR_TOKENS}; send fewer documents"
    );
    Err(ApiError::invalid("documents", message))
}

/// Removes the rest of a character whose other bytes were cut.
fn decoded(text: &str) -> &str {
    text.trim_end_matches(char::REPLACEMENT_CHARACTER)
}

/// Shortens the document `whole` until the prompt that `encode` makes of it has at most `limit` tokens, or
/// the document is empty. `tokens` is the prompt with the whole document.
fn cut(
    whole: &[u32],
    mut tokens: Vec<u32>,
    limit: usize,
    encode: impl Fn(&[u32]) -> Result<Vec<u32>, TextError>,
) -> Result<Vec<u32>, TextError> {
    let (mut kept, mut tries) = (whole.len(), 0);
    while tokens.len() > limit && kept > 0 {
        // A cut text may have other tokens than those that were kept, so the exact cut may fail.
        let half = kept.div_ceil(2);
        kept -= if tries < EXACT_CUTS { half.min(tokens.len() - limit) } else { half };
        tokens = encode(&whole[..kept])?;
        tries += 1;
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompts_of_a_request_have_a_limit_together() {
        check_total(MAX_PAIR_TOKENS, 7).unwrap();
        let refused = check_total(MAX_PAIR_TOKENS + 1, 7).unwrap_err().to_string();
        assert!(refused.contains("first 7 pairs") && refused.contains("1048577"), "{refused}");
    }

    #[test]
    fn a_document_is_cut_to_the_limit_even_if_its_rest_has_more_tokens() {
        let whole: Vec<u32> = (0..100).collect();
        let around = |kept: &[u32]| Ok([&[1000], kept, &[1001]].concat());
        let tokens = cut(&whole, around(&whole).unwrap(), 60, around).unwrap();
        assert_eq!((tokens.len(), tokens[58], tokens[59]), (60, 57, 1001));
        let doubled = |kept: &[u32]| Ok([kept, kept, &[1001]].concat());
        let tokens = cut(&whole, doubled(&whole).unwrap(), 60, doubled).unwrap();
        assert!(tokens.len() <= 60 && tokens.len() > 1, "{}", tokens.len());
        let hopeless = cut(&whole, around(&whole).unwrap(), 1, around).unwrap();
        assert_eq!(hopeless, [1000, 1001], "the document is empty, and the prompt still too long");
    }
}
