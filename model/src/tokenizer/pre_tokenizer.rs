//! How byte-level tokenizers split text into words before they merge bytes, by the name in
//! `tokenizer.ggml.pre`.
//!
//! Names and expressions are those of llama.cpp's `llm_tokenizer_bpe` (src/llama-vocab.cpp), which in turn come
//! from the `tokenizer.json` of each model; where llama.cpp rewrote an expression for its own engine the
//! original is used. A list of expressions applies one after another, each to the pieces that those before it left;
//! what an expression does not match stays a piece.

use tokenizers::{
    PreTokenizerWrapper, SplitDelimiterBehavior,
    pre_tokenizers::{
        byte_level::ByteLevel,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PreTokenizer {
    /// Regular expressions, in order.
    splits: &'static [&'static str],
    /// A word that is a token as a whole is not merged.
    pub(super) ignore_merges: bool,
    /// Texts begin with the beginning-of-sequence token where the file does not say.
    pub(super) add_bos: bool,
}

/// The names [`PreTokenizer::by_name`] knows, for messages.
pub(super) const SUPPORTED: &str = "default, gpt-2, smollm, starcoder, refact, command-r, llama-bpe, falcon3, dbrx, \
     smaug-bpe, qwen2, deepseek-r1-qwen, stablelm2, tekken, gpt-4o, llama4, glm4, falcon, deepseek-llm, \
     deepseek-coder, deepseek-v3";

/// GPT-2. Its last alternative takes the single space characters that the one before leaves.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Every digit is a word.
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
/// The letters of scripts with cases, as DeepSeek lists them.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼι",
    r"ῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
);
const DEEPSEEK_V3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

impl PreTokenizer {
    const fn new(splits: &'static [&'static str]) -> Self {
        Self { splits, ignore_merges: false, add_bos: false }
    }

    /// What `name` stands for; `None` if it is not known.
    pub(super) fn by_name(name: &str) -> Option<Self> {
        Some(match name {
            "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling" | "gigachat" | "a.x-4.0"
            | "mellum" => Self::new(&[GPT2]),
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" => {
                Self::new(&[DIGIT, GPT2])
            }
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" => {
                Self { ignore_merges: true, add_bos: true, ..Self::new(&[LLAMA3]) }
            }
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
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                r"[一-龥ࠀ-一가-퟿]+",
                r"\p{N}+",
            ]),
            "deepseek-coder" => {
                Self::new(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", DIGIT])
            }
            "deepseek-v3" => Self::new(&[r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_V3]),
            "falcon" => Self::new(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"]),
            // Files from before the key existed.
            "default" => Self::new(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]),
            _ => return None,
        })
    }

    /// As the `tokenizers` crate has it, with the bytes of every word spelled in GPT-2's alphabet at the end. Says
    /// what is wrong with an expression.
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
