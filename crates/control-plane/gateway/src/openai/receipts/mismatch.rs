//! The part of a receipt that does not hold.

use receipts::{AnswerEnd, Hash, ReceiptFault};
use serde_json::{Value, json};

/// The first part of a receipt that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReceiptMismatch {
    #[error(transparent)]
    Fault(#[from] ReceiptFault),
    #[error("the answer came from the base {recorded}, and this base is {served}")]
    Base { recorded: Hash, served: Hash },
    #[error(
        "the answer was computed with other numbers ({recorded}) than this deployment computes with ({served})"
    )]
    Settings { recorded: String, served: String },
    #[error("the answer came from an adapter version that you cannot use here: {0}")]
    Adapter(String),
    /// The record asks for something that no request can ask for.
    #[error("no request can have this record: {0}")]
    Request(String),
    #[error("token {position} of the answer is {recorded}, and the replay sampled {}", sampled(*drawn))]
    Token {
        /// Index of the token in the answer.
        position: usize,
        recorded: u32,
        /// Token of the replay; `None` if the replay ended before.
        drawn: Option<u32>,
    },
    #[error("the receipt says that the answer ended by {}, and its tokens end otherwise", .0.name())]
    End(AnswerEnd),
}

fn sampled(drawn: Option<u32>) -> String {
    drawn.map_or_else(|| "none".to_owned(), |token| token.to_string())
}

impl ReceiptMismatch {
    /// Returns the name of the part.
    fn part(&self) -> &'static str {
        match self {
            Self::Fault(fault) => fault.part(),
            Self::Base { .. } => "base",
            Self::Settings { .. } => "precision",
            Self::Adapter(_) => "adapter",
            Self::Request(_) => "request",
            Self::Token { .. } => "token",
            Self::End(_) => "end",
        }
    }

    /// Returns the answer of the route.
    pub(super) fn body(&self) -> Value {
        let mut body = json!({
            "object": "receipt.verdict",
            "valid": false,
            "part": self.part(),
            "message": self.to_string(),
        });
        if let Self::Token { position, recorded, drawn } = self {
            body["position"] = (*position).into();
            body["recorded"] = (*recorded).into();
            body["drawn"] = (*drawn).into();
        }
        body
    }
}
