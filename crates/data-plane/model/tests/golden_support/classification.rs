//! Golden values of classification heads, and of tokens compared after a prompt.

use std::{path::Path, sync::Arc};

use model::{
    adapter::AnyAdapter, deltas::prepared::PreparedAdapter, forward::ForwardPass, sources::open::open,
};
use serde::Deserialize;

use super::{GoldenAdapter, error, generate, read, states};

#[derive(Deserialize)]
struct Classifications {
    heads: Vec<ClassifiedPrompt>,
    tokens: Vec<ComparedTokens>,
}

#[derive(Deserialize)]
struct ClassifiedPrompt {
    model: String,
    adapter: String,
    prompt: Vec<u32>,
    logits: Vec<f32>,
}

#[derive(Deserialize)]
struct ComparedTokens {
    model: String,
    adapter: Option<String>,
    tokens: [usize; 2],
    prompt: Vec<u32>,
    logits: Vec<f32>,
}

/// Checks the logits of classification heads and of single tokens. `load` and `prepare` as for
/// [`check_all`](super::check_all).
pub(crate) fn check_classification<P: ForwardPass<Adapter = PreparedAdapter>>(
    golden: &Path,
    tolerance: f32,
    load: impl Fn(&Path) -> P,
    prepare: impl Fn(&P, &Path, GoldenAdapter) -> Arc<PreparedAdapter>,
) {
    let Classifications { heads, tokens } = read(&golden.join("expected/classification.json"));
    assert!(!heads.is_empty() && !tokens.is_empty());
    for ClassifiedPrompt { model, adapter, prompt, logits } in &heads {
        let path = golden.join("models").join(model);
        let files = golden.join("adapters/classification").join(model).join(adapter);
        let read = AnyAdapter::read(&files, open(&path).unwrap().config()).unwrap();
        let head = Arc::clone(read.classification_head().unwrap());
        let mut pass = load(&path);
        let prepared = prepare(&pass, &path, read.adapter().clone().into());
        let states = states(&mut pass, Some(&prepared), prompt);
        let found = head.logits(&states[states.len() - pass.hidden_size()..]);
        let error = error(&found, logits);
        println!("{model} {adapter}: error of class logits {error:.2e}");
        assert!(error <= tolerance, "{model} {adapter}, prompt of {}: {error}", prompt.len());
    }
    for ComparedTokens { model, adapter, tokens, prompt, logits } in &tokens {
        let path = golden.join("models").join(model);
        let mut pass = load(&path);
        let prepared = adapter.as_ref().map(|name| {
            let files = golden.join("adapters").join(model).join(name);
            let read = AnyAdapter::read(&files, open(&path).unwrap().config()).unwrap();
            prepare(&pass, &path, read.adapter().clone().into())
        });
        let (all, _) = generate(&mut pass, prepared.as_ref(), prompt, 1);
        let error = error(&tokens.map(|token| all[token]), logits);
        println!("{model} {adapter:?}: error of token logits {error:.2e}");
        assert!(error <= tolerance, "{model} {adapter:?}, prompt of {}: {error}", prompt.len());
    }
}
