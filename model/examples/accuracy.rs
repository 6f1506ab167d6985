//! What a weight format costs in exactness: the logits of a GGUF file beside those of its dequantized weights.
//!
//! ```text
//! cargo run --release -p model --example accuracy -- FILE.gguf...
//! ```
//!
//! Prints a JSON object for each file. Every token of three texts is scored, so the figures are over some hundred
//! positions and the whole vocabulary.

use std::path::Path;

use files::gguf::GgufFile;
use ids::BlockId;
use model::{
    forward::{BLOCK_TOKENS, ForwardPass, LogitRows, SequenceSlice},
    resident::{KvDtype, LoadedWeights, ResidentModel, ResidentOptions},
    shape::source::WeightSource,
    sources::{dequantized::Dequantized, gguf::GgufSource},
};
use text::tokenizer::{AddSpecial, ParseSpecial, Tokenizer};

type Failure = Box<dyn std::error::Error>;

const TEXTS: [&str; 3] = [
    "The sea covers most of the Earth. Its water is salty because rivers carry dissolved minerals into it, and \
     the sun takes only the water back.",
    "fn main() {\n    let total: u32 = (1..=10).filter(|n| n % 2 == 0).sum();\n    println!(\"{total}\");\n}\n",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital of France is \
     Paris, a city on the Seine.<|im_end|>\n",
];

fn main() -> Result<(), Failure> {
    for file in std::env::args().skip(1) {
        println!("{}", compare(Path::new(&file))?);
    }
    Ok(())
}

fn compare(path: &Path) -> Result<String, Failure> {
    let tokenizer = Tokenizer::from_gguf(&GgufFile::open(path)?)?;
    let mut ours = resident(&GgufSource::open(path)?)?;
    let mut exact = resident(&Dequantized(GgufSource::open(path)?))?;
    let vocab = ours.vocab_size();
    let (mut worst, mut squares, mut agreed, mut positions) = (0.0f32, 0.0f64, 0, 0);
    for text in TEXTS {
        let tokens = tokenizer.encode(text, AddSpecial::Yes, ParseSpecial::Yes)?;
        let (rounded, expected) = (score(&mut ours, &tokens), score(&mut exact, &tokens));
        for (a, b) in rounded.chunks(vocab).zip(expected.chunks(vocab)) {
            let errors = a.iter().zip(b).map(|(a, b)| (a - b).abs());
            worst = errors.clone().fold(worst, f32::max);
            squares += errors.map(|error| f64::from(error).powi(2)).sum::<f64>();
            agreed += usize::from(most_likely(a) == most_likely(b));
            positions += 1;
        }
    }
    let rms = (squares / (positions * vocab) as f64).sqrt();
    let agreement = f64::from(u32::try_from(agreed)?) / f64::from(u32::try_from(positions)?);
    Ok(format!(
        "{{\"file\": {:?}, \"positions\": {positions}, \"logit_error_rms\": {rms:.4}, \"logit_error_max\": {worst:.3}, \
         \"top1_agreement\": {agreement:.3}}}",
        path.file_name().unwrap_or_default()
    ))
}

fn resident(source: &(dyn WeightSource + Sync)) -> Result<ResidentModel, Failure> {
    let options = ResidentOptions { cores: vec![], kv_bytes: 64 << 20, kv_dtype: KvDtype::Auto };
    Ok(ResidentModel::new(LoadedWeights::load(source, 2)?, &options)?)
}

/// Logits of every position.
fn score(model: &mut ResidentModel, tokens: &[u32]) -> Vec<f32> {
    let blocks: Vec<BlockId> = (0..).map(BlockId).take(tokens.len().div_ceil(BLOCK_TOKENS)).collect();
    let mut logits = Vec::new();
    let slice = SequenceSlice {
        trunk: &[],
        tokens,
        start: 0,
        blocks: &blocks,
        adapter: None,
        logits: LogitRows::All,
    };
    model.forward(&[slice], &mut logits);
    logits
}

fn most_likely(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
}
