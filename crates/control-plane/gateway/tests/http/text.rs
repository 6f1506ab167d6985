//! A tokenizer of bytes, whose tokens tests can read.

use std::sync::Arc;

use gateway::{
    lifecycle::LoadText,
    text::{ChatMessage, Decoder, LoadedText, TemplateOptions, Text, TextError, TextInfo},
};
use model_files::{model_summary::ModelSummary, text_hash::TextHash};
use text::{
    chat_template::{ChatTemplate, GenerationPrompt, Limits, TemplateError, TemplateTokens},
    detokenize::TextStart,
    grammar::{TokenBytes, Tokens},
    pair_template::{PairTemplate, QueryAndDocument},
    tokenizer::AddSpecial,
};

pub(crate) const END: u32 = 256;
/// Token id before a prompt with special tokens.
pub(crate) const BEGIN: u32 = 257;
pub(crate) const VOCAB_SIZE: u32 = 258;
pub(crate) const PARAMETERS: u64 = 134_515_008;
pub(crate) const TEXT_HASH: [u8; 32] = [2; 32];

pub(crate) fn bytes() -> LoadText {
    always(Arc::new(ByteText::default()))
}

pub(crate) fn always(text: Arc<dyn Text>) -> LoadText {
    Arc::new(move |_| Ok(LoadedText { text: Arc::clone(&text), hash: TextHash(TEXT_HASH) }))
}

#[derive(Debug)]
pub(crate) struct ByteText {
    bytes: Vec<Vec<u8>>,
    info: TextInfo,
    /// Text before every conversation, from an adapter's own chat template.
    heading: String,
}

impl Default for ByteText {
    fn default() -> Self {
        Self::ending_in("<end>")
    }
}

impl ByteText {
    pub(crate) fn ending_in(end: &str) -> Self {
        let mut bytes: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
        bytes.extend([end.as_bytes().to_vec(), b"<begin>".to_vec()]);
        let info = TextInfo {
            end_tokens: vec![END],
            eos_token: Some(end.to_owned()),
            description: ModelSummary { parameters: Some(PARAMETERS), ..ModelSummary::default() },
            ..TextInfo::default()
        };
        Self { bytes, info, heading: String::new() }
    }
}

impl ByteText {
    /// Tokenizer whose model reports this chat template. Conversations are rendered as usual, after the names
    /// of tools if the template contains `{{ tools }}`.
    pub(crate) fn with_template(template: &str) -> Self {
        let mut text = Self::default();
        text.info.chat_template = Some(template.to_owned());
        text
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

    fn special_token(&self, _name: &str) -> Option<u32> {
        None
    }

    fn decoder(&self, _start: TextStart, _shown: &[&str]) -> Box<dyn Decoder> {
        Box::new(ByteDecoder::default())
    }

    fn encode_chat(
        &self,
        messages: &[ChatMessage],
        showing: &TemplateOptions,
    ) -> Result<Vec<u32>, TextError> {
        let line = |message: &ChatMessage| {
            let calls =
                message.calls.iter().map(|call| format!("{}();", call["function"]["name"].as_str().unwrap()));
            let answers = message.answers.as_ref();
            let answers = answers
                .map_or(String::new(), |to| format!("={}/{}", to.id, to.name.as_deref().unwrap_or("")));
            let thought = message.reasoning.as_ref().map_or(String::new(), |thought| format!("({thought})"));
            format!("{}:{thought}{}{answers};{}", message.role, message.content, calls.collect::<String>())
        };
        let shows_tools =
            self.info.chat_template.as_ref().is_some_and(|template| template.contains("{{ tools }}"));
        let tools = showing.tools.iter().filter(|_| shows_tools);
        let tools = tools.map(|tool| format!("tool {};", tool["function"]["name"].as_str().unwrap()));
        let lines = [self.heading.clone()].into_iter().chain(tools).chain(messages.iter().map(line));
        let is_harmony =
            self.info.chat_template.as_ref().is_some_and(|template| template.contains("<|start|>assistant"));
        let begin = if is_harmony { "<|start|>assistant" } else { "assistant:" };
        let mut rendered: String = lines.chain([begin.to_owned()]).collect();
        if showing.prompt == GenerationPrompt::Continue {
            rendered.truncate(rendered.len() - ";assistant:".len());
        }
        self.encode(&rendered, AddSpecial::No)
    }

    fn encode_pair(
        &self,
        template: &PairTemplate,
        values: &QueryAndDocument<'_>,
    ) -> Result<Vec<u32>, TextError> {
        self.encode(&template.render(values), AddSpecial::No)
    }

    fn tokens(&self) -> Tokens {
        let texts = self.bytes[..256].iter().map(|bytes| TokenBytes::Text(bytes));
        let special = self.bytes[256..].iter().map(|bytes| TokenBytes::Special(bytes));
        Tokens::new(texts.chain(special), &self.info.end_tokens)
    }

    fn info(&self) -> &TextInfo {
        &self.info
    }

    fn with_chat_template(&self, source: &Arc<str>) -> Arc<dyn Text> {
        let info = TextInfo { chat_template: Some(source.to_string()), ..self.info.clone() };
        Arc::new(Self { bytes: self.bytes.clone(), info, heading: format!("[{source}]") })
    }

    fn check_chat_template(&self, source: &Arc<str>) -> Result<(), TemplateError> {
        ChatTemplate::new(source, TemplateTokens::default(), Limits::default()).map(|_| ())
    }

    fn is_sandboxed(&self) -> bool {
        !self.heading.is_empty()
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

pub(crate) fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}
