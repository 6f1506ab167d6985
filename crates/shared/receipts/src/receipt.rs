//! A record with its chain and signature.

use serde::{Deserialize, Serialize};

use crate::{
    chain::{RecordPart, links},
    hex::{Hash, PublicKey, Signature},
    key::{SigningKey, is_signed},
    record::{AnswerRecord, Constraint, RECEIPT_FORMAT},
};

/// Signed record of an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    /// Everything that determined the answer, and the answer.
    pub record: AnswerRecord,
    /// One link for each part of the record.
    pub chain: Vec<Hash>,
    /// Key of the deployment that gave the answer.
    pub public_key: PublicKey,
    /// Signature over the last link.
    pub signature: Signature,
}

/// The reason why signature and chain do not confirm a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReceiptFault {
    /// The record has another format than this program knows.
    #[error(
        "the receipt has format {0}, and this program knows format {RECEIPT_FORMAT}; use the program's version that the receipt names"
    )]
    Format(u32),
    /// The receipt names another key than the expected one.
    #[error("the receipt is signed with the key {found}, not with the key {expected} of the deployment")]
    Key {
        /// Key of the receipt.
        found: PublicKey,
        /// Key that was expected.
        expected: PublicKey,
    },
    /// The signature does not belong to the last link and the key.
    #[error("the signature does not belong to the receipt's chain: signature, chain or key was changed")]
    Signature,
    /// The chain has another number of links than a record has parts.
    #[error("the chain has {0} links, and a record has {parts} parts", parts = RecordPart::ALL.len())]
    Length(usize),
    /// A part of the record does not match its link.
    #[error("the part '{}' of the record was changed after it was signed", .0.name())]
    Part(RecordPart),
    /// The grammar does not match its own hash.
    #[error("the source of the constraint does not have the constraint's hash")]
    Constraint,
}

impl ReceiptFault {
    /// Returns the part of a receipt that failed, as verdicts name it.
    #[must_use]
    pub fn part(&self) -> &'static str {
        match self {
            Self::Format(_) => "format",
            Self::Key { .. } | Self::Signature => "signature",
            Self::Length(_) | Self::Part(_) | Self::Constraint => "chain",
        }
    }
}

impl Receipt {
    /// Signs `record` with the key of the deployment.
    #[must_use]
    pub fn sign(record: AnswerRecord, key: &SigningKey) -> Self {
        let chain = links(&record);
        let signature = key.sign(last(&chain));
        Self { record, chain, public_key: key.public_key(), signature }
    }

    /// Checks signature and chain against the receipt's own key, and against `expected` if that is known.
    ///
    /// # Errors
    /// The first part that does not hold.
    pub fn check(&self, expected: Option<PublicKey>) -> Result<(), ReceiptFault> {
        if self.record.format != RECEIPT_FORMAT {
            return Err(ReceiptFault::Format(self.record.format));
        }
        if let Some(expected) = expected.filter(|expected| *expected != self.public_key) {
            return Err(ReceiptFault::Key { found: self.public_key, expected });
        }
        if !is_signed(last(&self.chain), self.public_key, self.signature) {
            return Err(ReceiptFault::Signature);
        }
        self.check_chain()
    }

    fn check_chain(&self) -> Result<(), ReceiptFault> {
        if self.chain.len() != RecordPart::ALL.len() {
            return Err(ReceiptFault::Length(self.chain.len()));
        }
        let computed = links(&self.record);
        let parts = RecordPart::ALL.into_iter().zip(computed.iter().zip(&self.chain));
        if let Some((part, _)) = parts.into_iter().find(|(_, (computed, recorded))| computed != recorded) {
            return Err(ReceiptFault::Part(part));
        }
        let fits = |constraint: &Constraint| *constraint == Constraint::of(&constraint.source);
        match self.record.constraint.as_ref().is_none_or(fits) {
            true => Ok(()),
            false => Err(ReceiptFault::Constraint),
        }
    }
}

/// Returns the last link of a chain, which is zero if there is none.
fn last(chain: &[Hash]) -> Hash {
    chain.last().copied().unwrap_or(Hash([0; 32]))
}

#[cfg(test)]
mod tests;
