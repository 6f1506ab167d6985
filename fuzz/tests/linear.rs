//! Tokenization time grows linearly with the text, for any text.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{fs, path::Path, time::Duration};

use model_files::gguf::GgufFile;
use rustix::time::{ClockId, clock_gettime};
use text::tokenizer::{AddSpecial, ParseSpecial, Tokenizer};

/// Texts at which pre-tokenization, merges or the search for special tokens have been quadratic elsewhere.
const UNITS: [&str; 8] = ["a", " ", "\n", " \n", "1", "!", "<|im_", "日"];
/// Length ratio of the two texts. Quadratic growth (16 times) is far from linear growth (4 times, and some
/// for cache misses of the longer text or by other processes).
const LONGER: usize = 4;
const GROWTH: f64 = 8.0;
/// Repetitions: other processes do not count as time, but they can empty the caches in some measurements.
const ATTEMPTS: usize = 24;
const BYTES: usize = 1 << 16;

/// Tokenizers with a merge for every doubling of a letter, so that long words merge completely.
fn tokenizer(pre: &str) -> Tokenizer {
    let mut tokens: Vec<String> = (0..=255u32).filter_map(char::from_u32).map(String::from).collect();
    tokens.extend((0x100..0x144).filter_map(char::from_u32).map(String::from));
    let mut merges = Vec::new();
    for letter in ["a", "Ġ", "Ċ", "1", "!"] {
        for length in (0..6).map(|power| 1usize << power) {
            merges.push(format!("{0} {0}", letter.repeat(length)));
            tokens.push(letter.repeat(2 * length));
        }
    }
    tokens.push("<|im_end|>".to_owned());
    let file = fuzz::seeds::byte_level(&tokens, &merges, pre);
    Tokenizer::from_gguf(&GgufFile::from_bytes(Path::new("linear.gguf"), file).unwrap()).unwrap()
}

/// CPU time of this thread, without that of others.
fn computed() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap()
}

/// Time of tokenization; `None` if the text is refused, which is also valid.
fn time(tokenizer: &Tokenizer, text: &str) -> Option<Duration> {
    let started = computed();
    tokenizer.encode(text, AddSpecial::Yes, ParseSpecial::Yes).ok().map(|_| computed() - started)
}

fn grows_linearly(tokenizer: &Tokenizer, unit: &str) -> Result<(), f64> {
    let texts = [1, LONGER].map(|times| unit.repeat(times * BYTES / unit.len()));
    let mut least = [Duration::MAX; 2];
    for _ in 0..ATTEMPTS {
        for (least, text) in least.iter_mut().zip(&texts) {
            let Some(time) = time(tokenizer, text) else { return Ok(()) };
            *least = time.min(*least);
        }
        if least[1].as_secs_f64() < GROWTH * least[0].as_secs_f64() {
            return Ok(());
        }
    }

    Err(least[1].as_secs_f64() / least[0].as_secs_f64())
}

#[test]
fn four_times_the_text_takes_at_most_eight_times_as_long() {
    for pre in
        ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o", "falcon", "deepseek-llm", "deepseek-v3"]
    {
        let tokenizer = tokenizer(pre);
        for unit in UNITS {
            let grown = grows_linearly(&tokenizer, unit);
            assert!(grown.is_ok(), "{pre}: {LONGER} times {unit:?} takes {grown:?} times as long");
        }
    }
}

#[test]
fn a_mebibyte_of_one_character_is_tokenized_or_refused() {
    let tokenizer = tokenizer("llama-bpe");
    for unit in UNITS {
        let text = unit.repeat((1 << 20) / unit.len());
        if let Ok(ids) = tokenizer.encode(&text, AddSpecial::No, ParseSpecial::No) {
            let bytes: Vec<u8> =
                ids.iter().flat_map(|&id| tokenizer.token_bytes(id).unwrap()).copied().collect();
            assert!(bytes == text.as_bytes(), "{unit:?} is not what comes back");
        }
    }
    // The seeds' vocabularies are linear too, but tiny; this tests a real one.
    if let Some(path) = std::env::var_os("HOLOBIONT_TEST_MODEL") {
        let file = GgufFile::open(&fs::canonicalize(path).unwrap()).unwrap();
        let real = Tokenizer::from_gguf(&file).unwrap();
        for unit in UNITS {
            assert_eq!(grows_linearly(&real, unit), Ok(()), "{unit:?}");
        }
    }
}
