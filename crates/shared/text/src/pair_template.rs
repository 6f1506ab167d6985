//! Prompts that ask a model whether a document fits a query, as rerankers are trained with.
//!
//! A template is text with the fields `{instruction}`, `{query}` and `{document}`. Names of special tokens in
//! the template become those tokens. Names in a field's value stay text, so a document cannot end its turn.

use crate::{
    chat::ChatError,
    tokenizer::{AddSpecial, ParseSpecial, Tokenizer},
};

/// Maximum bytes of a template.
pub const MAX_TEMPLATE_BYTES: usize = 1 << 16;

/// Template of Qwen3-Reranker, as in its model card.
pub const QWEN3_RERANKER: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based \
    on the Query and the Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n\
    <|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n\
    <|im_start|>assistant\n<think>\n\n</think>\n\n";

/// Default instruction of Qwen3-Reranker.
pub const DEFAULT_INSTRUCTION: &str =
    "Given a web search query, retrieve relevant passages that answer the query";

/// Values of a template's fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryAndDocument<'a> {
    /// Statement of when a document is relevant.
    pub instruction: &'a str,
    /// The query that the document may answer.
    pub query: &'a str,
    /// The document to judge.
    pub document: &'a str,
}

/// Template of a prompt, split at its fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairTemplate {
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Text(String),
    Value(Field),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Instruction,
    Query,
    Document,
}

const FIELDS: [(&str, Field); 3] =
    [("{instruction}", Field::Instruction), ("{query}", Field::Query), ("{document}", Field::Document)];

/// Why a template is not usable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PairTemplateError {
    /// The template does not show the query, or the document.
    #[error("the template has no {0}; add the field where the text belongs")]
    Missing(&'static str),
    /// The document would count several times against the context.
    #[error("the template has {{document}} {0} times; keep one")]
    Repeated(usize),
    /// The template exceeds its limit.
    #[error("the template has {0} bytes, and the limit is {MAX_TEMPLATE_BYTES}; shorten it")]
    TooLong(usize),
}

impl PairTemplate {
    /// Parses a template.
    ///
    /// # Errors
    /// See [`PairTemplateError`].
    pub fn parse(source: &str) -> Result<Self, PairTemplateError> {
        Self::check_length(source.len())?;
        let (mut pieces, mut rest) = (Vec::new(), source);
        while let Some((at, name, field)) = first_field(rest) {
            pieces.extend((at > 0).then(|| Piece::Text(rest[..at].to_owned())));
            pieces.push(Piece::Value(field));
            rest = &rest[at + name.len()..];
        }
        pieces.extend((!rest.is_empty()).then(|| Piece::Text(rest.to_owned())));
        let count = |field| pieces.iter().filter(|piece| **piece == Piece::Value(field)).count();
        match (count(Field::Query), count(Field::Document)) {
            (0, _) => Err(PairTemplateError::Missing("{query}")),
            (_, 0) => Err(PairTemplateError::Missing("{document}")),
            (_, 1) => Ok(Self { pieces }),
            (_, times) => Err(PairTemplateError::Repeated(times)),
        }
    }

    /// Returns the template of Qwen3-Reranker.
    ///
    /// # Panics
    /// Never, because the template is valid.
    #[must_use]
    pub fn qwen3_reranker() -> Self {
        Self::parse(QWEN3_RERANKER).expect("a valid template")
    }

    /// Checks the length of a template before the template is read.
    ///
    /// # Errors
    /// The template is too long.
    pub fn check_length(bytes: usize) -> Result<(), PairTemplateError> {
        if bytes > MAX_TEMPLATE_BYTES { Err(PairTemplateError::TooLong(bytes)) } else { Ok(()) }
    }

    /// Whether the prompt shows an instruction.
    #[must_use]
    pub fn shows_instruction(&self) -> bool {
        self.pieces.contains(&Piece::Value(Field::Instruction))
    }

    /// Returns the prompt as text, in which nothing is quoted.
    #[must_use]
    pub fn render(&self, values: &QueryAndDocument<'_>) -> String {
        self.filled(values, str::to_owned)
    }

    /// Returns the tokens of the prompt. The template has all special tokens that the prompt needs.
    ///
    /// # Errors
    /// If the tokenizer refuses the text, or the values use all characters that could quote them.
    pub fn encode(
        &self,
        values: &QueryAndDocument<'_>,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<u32>, ChatError> {
        let texts = [values.instruction, values.query, values.document];
        if !texts.iter().any(|text| tokenizer.names_control_token(text)) {
            return Ok(tokenizer.encode(&self.render(values), AddSpecial::No, ParseSpecial::Yes)?);
        }
        let source = self.pieces.iter().filter_map(|piece| match piece {
            Piece::Text(text) => Some(text.as_str()),
            Piece::Value(_) => None,
        });
        let all: Vec<&str> = source.chain(texts).collect();
        let mark = tokenizer.mark_absent_from(&all).ok_or(ChatError::NoMark)?;
        let quoted = self.filled(values, |text| tokenizer.quote(text, mark));
        Ok(tokenizer.encode_quoted(&quoted, mark)?)
    }

    fn filled(&self, values: &QueryAndDocument<'_>, write: impl Fn(&str) -> String) -> String {
        let mut filled = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => filled.push_str(text),
                Piece::Value(Field::Instruction) => filled.push_str(&write(values.instruction)),
                Piece::Value(Field::Query) => filled.push_str(&write(values.query)),
                Piece::Value(Field::Document) => filled.push_str(&write(values.document)),
            }
        }
        filled
    }
}

/// Returns the place, the name and the kind of the first field in `text`.
fn first_field(text: &str) -> Option<(usize, &'static str, Field)> {
    let places = FIELDS.iter().filter_map(|&(name, field)| Some((text.find(name)?, name, field)));
    places.min_by_key(|(at, ..)| *at)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: QueryAndDocument<'static> =
        QueryAndDocument { instruction: "i{query}", query: "q", document: "d" };

    #[test]
    fn fields_are_filled_once_and_braces_of_values_stay_text() {
        let template = PairTemplate::parse("{query}<{instruction}>{query}: {document}{x}").unwrap();
        assert_eq!(template.render(&VALUES), "q<i{query}>q: d{x}");
    }

    #[test]
    fn the_default_template_is_that_of_the_model_card() {
        let rendered =
            PairTemplate::qwen3_reranker().render(&QueryAndDocument { instruction: "i", ..VALUES });
        let expected = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and \
             the Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n\
             <Instruct>: i\n<Query>: q\n<Document>: d<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
        assert_eq!(rendered, expected);
    }

    #[test]
    fn a_template_without_its_texts_is_refused() {
        let refused = |source: &str| PairTemplate::parse(source).unwrap_err();
        assert_eq!(refused("{document}"), PairTemplateError::Missing("{query}"));
        assert_eq!(refused("{query} {Document}"), PairTemplateError::Missing("{document}"));
        assert_eq!(refused("{query}{document}{document}"), PairTemplateError::Repeated(2));
        let long = "x".repeat(MAX_TEMPLATE_BYTES + 1);
        assert_eq!(refused(&long), PairTemplateError::TooLong(MAX_TEMPLATE_BYTES + 1));
    }
}
