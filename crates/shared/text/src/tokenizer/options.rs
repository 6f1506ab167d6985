//! What is done with special tokens, on the way in and out.

/// Whether the tokens a model expects around a text (its beginning-of-sequence token) are put there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddSpecial {
    /// Put them there: for a text of its own, as prompts of the completions API are.
    Yes,
    /// Leave them out: for what a chat template rendered, which holds them already.
    No,
}

/// Whether the name of a special token within the text means that token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParseSpecial {
    /// `<|im_end|>` in the text is the token. For rendered chat templates, and for prompts of the completions API
    /// as vLLM and llama.cpp have it.
    Yes,
    /// The text is only text: no control token comes out of it. For anything a user typed that is not a prompt.
    /// (Added tokens that are not special, `<tool_call>` in Qwen, are recognised always.)
    No,
}

/// Whether decoding leaves special tokens out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkipSpecial {
    /// They are no text.
    Yes,
    /// They appear by their names.
    No,
}
