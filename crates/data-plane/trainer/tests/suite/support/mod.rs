//! Support of the data tests: a byte tokenizer, chat templates, and a view of the tokens with loss.
#![allow(dead_code, reason = "every test binary uses a part of it")]

use std::{
    fs,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use model_files::gguf::GgufFile;
use serde_json::{Map, Value, json};
use text::{
    chat_template::{ChatTemplate, Limits},
    tokenizer::{SkipSpecial, Tokenizer},
};
use trainer::data::{self, DataError, DataItems, Dataset, Encoder, Example};

pub(crate) const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                                 {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A template that shows tools, calls and reasoning content, and a switch, in the manner of Qwen3.
pub(crate) const AGENTS: &str = "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n\
    {% if m.reasoning_content is defined and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\
    {% for call in m.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}\
    <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking == false %}-{% endif %}{% endif %}";

/// First token id after the bytes.
const FIRST_NAMED: u32 = 256;

/// Character that byte-level tokenizers use for a byte.
fn spelling(byte: u8) -> char {
    let shows = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if shows(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&byte| !shows(byte)).count();
    char::from_u32(256 + u32::try_from(before).unwrap()).unwrap()
}

/// One token for each byte, one for two line ends, and the special tokens of ChatML.
pub(crate) fn tokenizer() -> Tokenizer {
    let mut vocab: Map<String, Value> =
        (0..=255).map(|byte| (spelling(byte).to_string(), json!(byte))).collect();
    vocab.insert("ĊĊ".to_owned(), json!(FIRST_NAMED));
    let added = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"].iter().zip(FIRST_NAMED + 1..);
    let added: Vec<Value> = added
        .map(|(name, id)| {
            json!({"id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        })
        .collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let json = json!({
        "added_tokens": added, "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [["Ċ", "Ċ"]]},
    });
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    let config = json!({"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"});
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    Tokenizer::from_directory(folder.path()).unwrap()
}

pub(crate) struct TemplateTokenizer {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: Option<ChatTemplate>,
}

impl TemplateTokenizer {
    pub(crate) fn new(template: &str) -> Self {
        let tokenizer = tokenizer();
        let template = ChatTemplate::new(template, tokenizer.template_tokens(), Limits::default()).unwrap();
        Self { tokenizer, template: Some(template) }
    }

    pub(crate) fn smollm2() -> Self {
        let path = testkit::paths::real_model();
        let file =
            GgufFile::open(&path).unwrap_or_else(|error| panic!("{error}\nrun ./scripts/fetch-model first"));
        let tokenizer = Tokenizer::from_gguf(&file).unwrap();
        let source = tokenizer.chat_template().unwrap();
        let template = ChatTemplate::new(source, tokenizer.template_tokens(), Limits::default()).unwrap();
        Self { tokenizer, template: Some(template) }
    }

    pub(crate) fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_700_000_000)
    }

    pub(crate) fn read_within(&self, file: &[u8], limits: &data::DataLimits) -> Result<Dataset, DataError> {
        data::read(file, &Encoder::new(&self.tokenizer, self.template.as_ref(), Self::now()), limits)
    }

    pub(crate) fn read(&self, file: &str) -> Result<Dataset, DataError> {
        self.read_within(file.as_bytes(), &data::DataLimits::default())
    }

    /// Examples of a file of these lines, as [`shown`](Self::shown).
    pub(crate) fn examples(&self, lines: &[Value]) -> Vec<String> {
        match self.read(&file(lines)).unwrap_or_else(|error| panic!("{error}")).items {
            DataItems::Examples(examples) => examples.iter().map(|example| self.shown(example)).collect(),
            other => panic!("these are no examples: {other:?}"),
        }
    }

    pub(crate) fn pairs(&self, lines: &[Value]) -> Vec<[String; 2]> {
        match self.read(&file(lines)).unwrap_or_else(|error| panic!("{error}")).items {
            DataItems::Pairs(pairs) => {
                pairs.iter().map(|pair| [&pair.chosen, &pair.rejected].map(|one| self.shown(one))).collect()
            }
            other => panic!("these are no pairs: {other:?}"),
        }
    }

    /// Example as text, with brackets around the tokens with loss.
    pub(crate) fn shown(&self, example: &Example) -> String {
        assert_eq!(example.weights.len(), example.tokens.len() - 1);
        let weights: Vec<f32> = [0.0].into_iter().chain(example.weights.iter().copied()).collect();
        let mut rest = example.tokens.as_slice();
        let mut shown = String::new();
        for same in weights.chunk_by(|one, next| one == next) {
            let (run, behind) = rest.split_at(same.len());
            let text = self.tokenizer.decode(run, SkipSpecial::No);
            shown += &if same[0] == 1.0 { format!("[{text}]") } else { text };
            rest = behind;
        }
        shown
    }

    pub(crate) fn fault(&self, line: &Value) -> String {
        let error = self.read(&line.to_string()).unwrap_err().to_string();
        let fault = error.strip_prefix("1 line is wrong, so nothing was trained:\n  line 1: ");
        fault.unwrap_or_else(|| panic!("{error}")).to_owned()
    }
}

pub(crate) fn file(lines: &[Value]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}
