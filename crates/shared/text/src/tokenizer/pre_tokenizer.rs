//! Splits text into words for byte-level tokenizers, by the name in `tokenizer.ggml.pre`.
//!
//! Names and expressions are those of llama.cpp's `llm_tokenizer_bpe` (src/llama-vocab.cpp), which come
//! from the `tokenizer.json` of each model. Where llama.cpp rewrote an expression for its own engine, this
//! module uses the original. The expressions of a list apply in order, each to the pieces that the previous
//! ones left; text between matches stays a piece.

use tokenizers::{
    PreTokenizerWrapper, SplitDelimiterBehavior,
    pre_tokenizers::{
        byte_level::ByteLevel,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

/// Definition of a pre-tokenizer name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PreTokenizer {
    /// Regular expressions in the order of application.
    splits: &'static [&'static str],
    /// Encodes a word that is itself a token without merges.
    pub(super) ignore_merges: bool,
    /// Whether texts begin with the beginning-of-sequence token if the file does not say.
    pub(super) add_bos: bool,
}

/// Names that [`PreTokenizer::by_name`] knows, for error messages.
pub(super) const SUPPORTED: &str = "default, gpt-2, smollm, starcoder, refact, command-r, llama-bpe, falcon3, dbrx, \
     smaug-bpe, qwen2, deepseek-r1-qwen, stablelm2, tekken, gpt-4o, llama4, glm4, falcon, deepseek-llm, \
     deepseek-coder, deepseek-v3";

/// GPT-2's expression. The last alternative takes the single space characters that the previous one leaves.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Makes every digit a word.
const DIGIT: &str = r"\p{N}";
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Letters of scripts with cases, as DeepSeek lists them. The characters are escaped because tools may
/// replace some of them by a canonical equivalent.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}",
    r"\x{295}-\x{2af}\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}",
    r"\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}",
    r"\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}",
    r"\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}",
    r"\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}",
    r"\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}",
    r"\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}",
    r"\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}",
    r"\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}",
    r"\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-\x{a76f}",
    r"\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}",
    r"\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}",
    r"\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}]+"
);
const DEEPSEEK_IDEOGRAPHS: &str = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+";
const DEEPSEEK_V3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

impl PreTokenizer {
    const fn new(splits: &'static [&'static str]) -> Self {
        Self { splits, ignore_merges: false, add_bos: false }
    }

    /// Returns the definition of `name`; `None` if the name is unknown.
    pub(super) fn by_name(name: &str) -> Option<Self> {
        Some(match name {
            "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling" | "gigachat"
            | "a.x-4.0" | "mellum" => Self::new(&[GPT2]),
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" => {
                Self::new(&[DIGIT, GPT2])
            }
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0"
            | "lfm2" => Self { ignore_merges: true, add_bos: true, ..Self::new(&[LLAMA3]) },
            "dbrx" | "smaug-bpe" | "chatglm-bpe" => Self::new(&[LLAMA3]),
            "glm4" => Self { ignore_merges: true, ..Self::new(&[LLAMA3]) },
            "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "stablelm2" | "hunyuan" | "megrez" => {
                Self::new(&[QWEN2])
            }
            "tekken" => Self { ignore_merges: true, add_bos: true, ..Self::new(&[TEKKEN]) },
            "gpt-4o" | "llama4" | "kanana2" => Self::new(&[GPT4O]),
            "deepseek-llm" => Self::new(&[
                r"[\r\n]",
                DEEPSEEK_LETTERS,
                r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
                r"\s+$",
                DEEPSEEK_IDEOGRAPHS,
                r"\p{N}+",
            ]),
            "deepseek-coder" => {
                Self::new(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_IDEOGRAPHS, DIGIT])
            }
            "deepseek-v3" => Self::new(&[
                r"\p{N}{1,3}",
                r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
                DEEPSEEK_V3,
            ]),
            "falcon" => Self::new(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"]),
            // The name stands in files from before the key existed.
            "default" => Self::new(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]),
            _ => return None,
        })
    }

    /// Builds the `tokenizers` pre-tokenizer, which at the end spells the bytes of every word in GPT-2's
    /// alphabet. The error describes an invalid expression.
    pub(super) fn build(self) -> Result<PreTokenizerWrapper, String> {
        let split = |expression: &&str| {
            let pattern = SplitPattern::Regex((*expression).to_owned());
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .map(PreTokenizerWrapper::Split)
                .map_err(|error| error.to_string())
        };
        let mut steps: Vec<PreTokenizerWrapper> = self.splits.iter().map(split).collect::<Result<_, _>>()?;
        steps.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, false)));
        Ok(PreTokenizerWrapper::Sequence(Sequence::new(steps)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_in_the_message_is_known_and_builds() {
        for name in SUPPORTED.split(", ") {
            PreTokenizer::by_name(name).unwrap_or_else(|| panic!("{name}")).build().unwrap();
        }
        assert_eq!(PreTokenizer::by_name("bloom"), None);
    }
}
