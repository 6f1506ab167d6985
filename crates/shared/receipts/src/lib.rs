//! Receipts: signed records from which a deployment can prove that its weights gave an answer.
//!
//! ```text
//! AnswerRecord --BLAKE3, part by part--> chain of links --Ed25519 over the last link--> Receipt
//! ```
//!
//! # Layout
//!
//! - `record`: what determines an answer, and the answer itself.
//! - `chain`: the hash chain over the parts of a record.
//! - `receipt`: a record with its chain and signature, and the check of both.
//! - `key`: the signing key of a deployment, in a private file.
//! - `hex`: hashes, keys and signatures as hexadecimal text.
//!
//! # Principles
//!
//! - A record holds values, not names of settings: nothing outside the record can change its meaning.
//! - Every field of a record is in the chain. The hashing code takes the structs apart field by field, so a
//!   new field does not compile until it is hashed.
//! - This crate checks signature and chain. Only an executor with the weights can replay the answer.

#![forbid(unsafe_code)]

mod chain;
mod hex;
mod key;
mod receipt;
mod record;

pub use self::{
    chain::RecordPart,
    hex::{Hash, HexError, PublicKey, Signature},
    key::{KEY_FILE, SigningKey, SigningKeyError},
    receipt::{Receipt, ReceiptFault},
    record::{
        AnswerEnd, AnswerLimits, AnswerRecord, Constraint, DecodingStart, NumericSettings, RECEIPT_FORMAT,
        Sampler, TextDecoding,
    },
};
