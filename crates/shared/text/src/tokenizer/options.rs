//! Options for special tokens in encoding and decoding.

/// Whether encoding adds the tokens that a model expects around a text, such as beginning-of-sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddSpecial {
    /// Adds the tokens; for a stand-alone text, such as a prompt of the completions API.
    Yes,
    /// Leaves the tokens out; for rendered chat templates, which contain them already.
    No,
}

/// Whether the name of a special token in the text becomes that token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParseSpecial {
    /// `< im_end >` in the text becomes the token. For rendered chat templates, and for prompts of the
    /// completions API, as in vLLM and llama.cpp.
    Yes,
    /// The text yields no control token; for any user text that is not a prompt. Added tokens that are not
    /// special (`<tool_call>` in Qwen) are always recognized.
    No,
}

/// Whether decoding omits special tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkipSpecial {
    /// Special tokens produce no text.
    Yes,
    /// Special tokens appear by name.
    No,
}
