//! Times the forward pass of a model: `speed MODEL THREADS PROMPT GENERATE STREAMS`.
use std::time::Instant;

use model::{
    forward::{BlockId, ForwardPass, LogitRows, SequenceSlice},
    open::open,
    resident::{KvDtype, LoadedWeights, ResidentModel, ResidentOptions},
};

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let n = |i: usize| args[i].parse::<usize>().expect("a number");
    let (threads, prompt, generate, streams) = (n(2), n(3), n(4), n(5));
    let start = Instant::now();
    let source = open(std::path::Path::new(&args[1])).expect("a model");
    let weights = LoadedWeights::load(&*source, threads).expect("weights");
    println!("load {:?}, {} MB", start.elapsed(), weights.bytes() / 1_000_000);
    let options = ResidentOptions {
        cores: (0..threads).collect(),
        kv_bytes: 1 << 30,
        kv_dtype: KvDtype::Auto,
    };
    let mut model = ResidentModel::new(weights, &options).expect("a resident model");
    let per = (prompt + generate).div_ceil(16) + 1;
    let blocks: Vec<Vec<BlockId>> = (0..streams)
        .map(|s| (0..per).map(|b| BlockId((s * per + b) as u32)).collect())
        .collect();
    let vocab = model.vocab_size();
    let mut logits = Vec::new();
    let tokens: Vec<u32> = (0..prompt as u32)
        .map(|i| (i * 7919 + 13) % vocab as u32)
        .collect();
    for round in 0..3 {
        let start = Instant::now();
        for s in 0..streams {
            for (i, chunk) in tokens.chunks(512).enumerate() {
                let slice = SequenceSlice {
                    tokens: chunk,
                    start: i * 512,
                    blocks: &blocks[s],
                    adapter: None,
                    logits: LogitRows::Last,
                };
                model.forward(&[slice], &mut logits);
            }
        }
        let prefill = (prompt * streams) as f64 / start.elapsed().as_secs_f64();
        let mut last: Vec<u32> = vec![0; streams];
        let start = Instant::now();
        for step in 0..generate {
            let batch: Vec<_> = (0..streams)
                .map(|s| SequenceSlice {
                    tokens: std::slice::from_ref(&last[s]),
                    start: prompt + step,
                    blocks: &blocks[s],
                    adapter: None,
                    logits: LogitRows::Last,
                })
                .collect();
            model.forward(&batch, &mut logits);
            let next: Vec<u32> = logits
                .chunks(vocab)
                .map(|row| {
                    row.iter()
                        .enumerate()
                        .fold((0, f32::MIN), |b, (i, &v)| if v > b.1 { (i, v) } else { b })
                        .0 as u32
                })
                .collect();
            last = next;
        }
        let decode = (generate * streams) as f64 / start.elapsed().as_secs_f64();
        println!(
            "round {round}: prefill {prefill:.0} tok/s, decode {decode:.1} tok/s, last {:?}",
            &last[..1]
        );
    }
}
