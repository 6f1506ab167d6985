//! A tokenizer whose tokens are bytes, so that tests can read them.

use std::sync::Arc;

use files::text_hash::TextHash;
use gateway::{
    lifecycle::LoadText,
    text::{ChatMessage, Decoder, Facts, LoadedText, Text, TextError},
};
use text::{detokenize::TextStart, tokenizer::AddSpecial};

/// Ends an answer.
pub(crate) const END: u32 = 256;
/// Put in front of a prompt when special tokens are asked for.
pub(crate) const BEGIN: u32 = 257;
pub(crate) const VOCAB_SIZE: u32 = 258;
/// What it is made of.
pub(crate) const TEXT_HASH: [u8; 32] = [2; 32];

/// Finds this tokenizer at every path.
pub(crate) fn bytes() -> LoadText {
    always(Arc::new(ByteText::default()))
}

/// Finds `text` at every path.
pub(crate) fn always(text: Arc<dyn Text>) -> LoadText {
    Arc::new(move |_| Ok(LoadedText { text: Arc::clone(&text), hash: TextHash(TEXT_HASH) }))
}

#[derive(Debug)]
pub(crate) struct ByteText {
    bytes: Vec<Vec<u8>>,
    facts: Facts,
}

impl Default for ByteText {
    fn default() -> Self {
        Self::ending_in("<end>")
    }
}

impl ByteText {
    /// One whose end token is called `end`.
    pub(crate) fn ending_in(end: &str) -> Self {
        let mut bytes: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
        bytes.extend([end.as_bytes().to_vec(), b"<begin>".to_vec()]);
        let facts = Facts { end_tokens: vec![END], eos_token: Some(end.to_owned()), ..Facts::default() };
        Self { bytes, facts }
    }
}

impl Text for ByteText {
    fn encode(&self, text: &str, add: AddSpecial) -> Result<Vec<u32>, TextError> {
        let begin = (add == AddSpecial::Yes).then_some(BEGIN);
        Ok(begin.into_iter().chain(text.bytes().map(u32::from)).collect())
    }

    fn decode(&self, tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| self.token_bytes(*token).to_vec()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn token_bytes(&self, token: u32) -> &[u8] {
        self.bytes.get(token as usize).map_or(&[], Vec::as_slice)
    }

    fn decoder(&self, _start: TextStart) -> Box<dyn Decoder> {
        Box::new(ByteDecoder::default())
    }

    fn encode_chat(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, TextError> {
        let lines = messages.iter().map(|message| format!("{}:{};", message.role, message.content));
        let rendered: String = lines.chain(["assistant:".to_owned()]).collect();
        self.encode(&rendered, AddSpecial::No)
    }

    fn facts(&self) -> &Facts {
        &self.facts
    }
}

#[derive(Clone, Default)]
struct ByteDecoder {
    pending: Vec<u8>,
    out: String,
}

impl Decoder for ByteDecoder {
    fn push(&mut self, token: u32) -> &str {
        self.out.clear();
        if let Ok(byte) = u8::try_from(token) {
            self.pending.push(byte);
        }
        if let Ok(text) = std::str::from_utf8(&self.pending) {
            self.out.push_str(text);
            self.pending.clear();
        }
        &self.out
    }

    fn finish(&mut self) -> &str {
        self.out = String::from_utf8_lossy(&self.pending).into_owned();
        &self.out
    }

    fn fork(&self) -> Box<dyn Decoder> {
        Box::new(self.clone())
    }
}

/// Text as tokens.
pub(crate) fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}
