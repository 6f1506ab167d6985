#![allow(missing_docs)]
mod text_support;
use std::time::Instant;
use model::tokenizer::*;
use model::sampling::*;
use text_support::*;
#[test]
fn bench() {
    for _ in 0..3 {
        let t = Instant::now();
        let f = smollm2();
        let a = t.elapsed();
        let tok = Tokenizer::from_gguf(&f).unwrap();
        println!("open {a:?} tokenizer {:?}", t.elapsed() - a);
        drop(tok);
    }
    let toks = [Tokenizer::from_gguf(&smollm2()).unwrap(), Tokenizer::from_gguf(&byte_level("llama-bpe").open()).unwrap(), Tokenizer::from_gguf(&byte_level("tekken").open()).unwrap(), Tokenizer::from_gguf(&sentencepiece().open()).unwrap()];
    let english = "The quick brown fox jumps over the lazy dog, and then it sleeps for 12 hours. ";
    for unit in [english, "a", " ", "\n", "=", "1", "é", "漢", "😀", "<|im_start|>", "a ", " \n", "\t\u{a0}", "\r", "'", "a\u{301}"] {
        for (i, tok) in toks.iter().enumerate() {
            let mut line = format!("{:?} tok{i}", &unit[..unit.len().min(12)]);
            for kib in [64, 128, 512] {
                let text = unit.repeat((kib << 10) / unit.len());
                let t = Instant::now();
                match tok.encode(&text, AddSpecial::No, ParseSpecial::Yes) { Ok(ids) => line += &format!("  {} ids {:.1?}", ids.len(), t.elapsed()), Err(e) => line += &format!(" {e}") };
            }
            println!("{line}");
        }
    }
    let text = " ".repeat(4 << 20) + "x";
    println!("4MiB spaces {:?}", toks[0].encode(&text, AddSpecial::No, ParseSpecial::Yes).map(|v| v.len()));
    println!("4MiB spaces {:?}", toks[1].encode(&text, AddSpecial::No, ParseSpecial::Yes).map(|v| v.len()));
    let mut x = 1u64;
    let mut gauss = || { let mut s = 0.0f32; for _ in 0..12 { x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407); s += (x >> 40) as f32 / (1u64 << 24) as f32; } s - 6.0 };
    let row: Vec<f32> = (0..49152).map(|_| gauss() * 3.0).collect();
    let n = SamplingRequest::default;
    for r in [SamplingRequest { temperature: 0.0, ..n() }, n(), SamplingRequest { temperature: 0.7, ..n() }, SamplingRequest { top_k: 50, ..n() }, SamplingRequest { top_p: 0.9, ..n() }, SamplingRequest { temperature: 0.3, top_p: 0.9, ..n() }, SamplingRequest { temperature: 0.7, top_k: 40, top_p: 0.9, ..n() }, SamplingRequest { min_p: 0.05, ..n() }, SamplingRequest { top_k: 10000, ..n() }] {
        let p = SamplingParams::new(r.clone(), row.len()).unwrap();
        let mut best = f64::MAX;
        let c = TokenCounts::default();
        for i in 0..50 { let mut rr = row.clone(); let t = Instant::now(); std::hint::black_box(sample(&mut rr, &p, &c, i, &[])); best = best.min(t.elapsed().as_secs_f64()); }
        println!("T{} k{} p{} m{}: {:.1} us", r.temperature, r.top_k, r.top_p, r.min_p, best * 1e6);
    }
    let t = Instant::now();
    for _ in 0..20 { std::hint::black_box(logprobs(&row, 5, 20)); }
    println!("logprobs {:?}", t.elapsed() / 20);
}
