//! `holobiont verify`: checks a receipt's signature and chain here, and lets the deployment replay the
//! answer.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use receipts::{HexError, PublicKey, Receipt, ReceiptFault};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    client::{ClientError, GatewayClient},
    exit::{Exit, Explain},
    terminal::{PrintFormat, Terminal, printable},
};

#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArguments {
    /// Receipt, or answer that carries one, as JSON; without a file, prints the deployment's public key
    file: Option<PathBuf>,
    /// Public key that must have signed the receipt [default: the deployment's own]
    #[arg(long, value_name = "HEX", requires = "file", value_parser = public_key)]
    public_key: Option<PublicKey>,
}

fn public_key(text: &str) -> Result<PublicKey, HexError> {
    text.parse()
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum VerifyError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} holds no receipt", path.display())]
    NoReceipt { path: PathBuf, source: serde_json::Error },
    /// The receipt does not hold; the verdict is printed.
    #[error("the receipt does not hold")]
    Invalid,
    #[error(transparent)]
    Client(#[from] ClientError),
}

impl Explain for VerifyError {
    fn exit(&self) -> Exit {
        match self {
            Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => Exit::NotFound,
            Self::Read { .. } | Self::NoReceipt { .. } | Self::Invalid => Exit::Failed,
            Self::Client(error) => error.exit(),
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::NoReceipt { .. } => {
                Some("save the object `receipt` of an answer to a request with \"receipt\": true".into())
            }
            Self::Client(error) => error.next(),
            Self::Read { .. } | Self::Invalid => None,
        }
    }

    fn is_said(&self) -> bool {
        matches!(self, Self::Invalid)
    }
}

/// Answer of `/v1/receipts/verify`.
#[derive(Debug, Deserialize)]
struct Verdict {
    valid: bool,
    part: Option<String>,
    message: Option<String>,
}

pub(crate) fn run(arguments: &VerifyArguments, url: &str, terminal: Terminal) -> Result<(), VerifyError> {
    let client = GatewayClient::new(url, terminal);
    let Some(file) = &arguments.file else { return Ok(print_key(&client, terminal)?) };
    let receipt = read(file)?;
    // Signature and chain need no deployment, so a changed receipt is found without one.
    if let Err(fault) = receipt.check(arguments.public_key) {
        print_fault(&fault, terminal);
        return Err(VerifyError::Invalid);
    }
    let progress = terminal.spinner(format!("replaying {} tokens", receipt.record.answer.len()));
    let body = json!({ "model": receipt.record.model, "receipt": receipt });
    let said = client.post_text("/v1/receipts/verify", &body)?;
    progress.finish_and_clear();
    let verdict: Verdict = serde_json::from_str(&said).map_err(ClientError::Garbled)?;
    match terminal.format {
        PrintFormat::Json => terminal.print(&said),
        PrintFormat::Human => terminal.print(sentence(&verdict, &receipt)),
    }
    if verdict.valid { Ok(()) } else { Err(VerifyError::Invalid) }
}

fn print_key(client: &GatewayClient, terminal: Terminal) -> Result<(), ClientError> {
    let body = client.get_text("/v1/receipts/key")?;
    let key: Value = serde_json::from_str(&body).map_err(ClientError::Garbled)?;
    match terminal.format {
        PrintFormat::Json => terminal.print(body),
        PrintFormat::Human => terminal.print(printable(key["public_key"].as_str().unwrap_or_default())),
    }
    Ok(())
}

/// Reads a receipt, or the receipt of a whole answer.
fn read(path: &Path) -> Result<Receipt, VerifyError> {
    let text =
        fs::read_to_string(path).map_err(|source| VerifyError::Read { path: path.to_owned(), source })?;
    parse(&text).map_err(|source| VerifyError::NoReceipt { path: path.to_owned(), source })
}

fn parse(text: &str) -> Result<Receipt, serde_json::Error> {
    let mut document: Value = serde_json::from_str(text)?;
    let inside = document.get_mut("receipt").map(Value::take);
    serde_json::from_value(inside.unwrap_or(document))
}

fn print_fault(fault: &ReceiptFault, terminal: Terminal) {
    let (part, message) = (fault.part(), fault.to_string());
    match terminal.format {
        PrintFormat::Json => {
            terminal.print(json!({
                "object": "receipt.verdict", "valid": false, "part": part, "message": message,
            }));
        }
        PrintFormat::Human => terminal.print(format_args!("The receipt does not hold ({part}): {message}.")),
    }
}

/// Returns the verdict in words.
fn sentence(verdict: &Verdict, receipt: &Receipt) -> String {
    if !verdict.valid {
        let text = |value: &Option<String>| printable(value.as_deref().unwrap_or("unknown"));
        return format!("The receipt does not hold ({}): {}.", text(&verdict.part), text(&verdict.message));
    }
    let record = &receipt.record;
    let weights = match record.adapter {
        Some(adapter) => format!("the base {} with the adapter {adapter}", record.base),
        None => format!("the base {}", record.base),
    };
    format!(
        "The receipt holds: {weights} gave exactly these {} tokens to a prompt of {} tokens.",
        record.answer.len(),
        record.prompt.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_receipt_is_told_with_its_part() {
        let said = r#"{"valid":false,"part":"token","message":"token 3 of the answer is 1, not 2"}"#;
        let verdict: Verdict = serde_json::from_str(said).unwrap();
        assert!(!verdict.valid);
        assert_eq!(verdict.part.as_deref(), Some("token"));
    }

    #[test]
    fn what_is_no_receipt_is_refused_by_the_field_that_is_missing() {
        for text in ["{}", r#"{"receipt":{}}"#] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains("record"), "{error}");
        }
    }
}
