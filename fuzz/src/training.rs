//! Target for training data: files of users who train adapters.

use std::{path::Path, sync::LazyLock, time::UNIX_EPOCH};

use model_files::gguf::GgufFile;
use text::{
    chat_template::{ChatTemplate, Limits, TemplateTokens},
    tokenizer::Tokenizer,
};
use trainer::data::{self, DataItems, Dataset, Encoder};

use crate::{Outcome, seeds, targets::refused};

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

static MODEL: LazyLock<(Tokenizer, ChatTemplate)> = LazyLock::new(|| {
    let file = GgufFile::from_bytes(Path::new("chat.gguf"), seeds::chat_vocabulary());
    let tokenizer = Tokenizer::from_gguf(&file.expect("a file of our own")).expect("its vocabulary");
    let template = ChatTemplate::new(TEMPLATE, TemplateTokens::default(), Limits::default());
    (tokenizer, template.expect("a template of our own"))
});

/// Parses training data; each learned token follows another token, and the count is within the limit.
pub(crate) fn data(input: &[u8]) -> Outcome {
    let (tokenizer, template) = &*MODEL;
    let encoder = Encoder::new(tokenizer, Some(template), UNIX_EPOCH);
    let limits = data::DataLimits::default();
    // Prompts must be separable for any input.
    drop(data::prompts(input, &limits));
    if let Ok(Dataset { items: DataItems::Prompts(prompts), .. }) =
        data::rollout_prompts(input, &encoder, &limits)
    {
        assert!(prompts.iter().all(|prompt| (1..=limits.max_tokens).contains(&prompt.tokens.len())));
    }
    let dataset = data::read(input, &encoder, &limits).map_err(refused)?;
    let examples = match dataset.items {
        DataItems::Examples(examples) => examples,
        DataItems::Pairs(pairs) => pairs.into_iter().flat_map(|pair| [pair.chosen, pair.rejected]).collect(),
        DataItems::Rated(rated) => rated.into_iter().map(|rated| rated.example).collect(),
        DataItems::Said(said) => said.into_iter().map(|said| said.example).collect(),
        DataItems::Prompts(_) => unreachable!("these lines are read as prompts above"),
    };
    for example in examples {
        assert!(example.tokens.len() <= limits.max_tokens);
        assert_eq!(example.weights.len() + 1, example.tokens.len());
        assert!(example.weights.contains(&1.0), "something is learned");
    }
    Ok(())
}
