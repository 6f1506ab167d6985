//! GGUF files: llama.cpp's and Ollama's advisories (CVE-2024-21802, -23605, CVE-2025-53630, its bypass
//! CVE-2026-27940, CVE-2026-33298, CVE-2026-7482) concern counts, lengths, offsets and the alignment.

use super::{Maker, Seed};

const COUNTS: &str = "CVE-2024-23605 (counts and lengths)";
pub(super) const OFFSETS: &str = "CVE-2025-53630, CVE-2026-27940 (sums that wrap)";
const SHAPES: &str = "CVE-2024-21802, CVE-2026-33298 (shapes and types)";
const PADDING: &str = "GGML_PAD, alignment 2^31, division by ne = 0";
const GROWTH: &str = "limits after allocation";

mod kind {
    pub(super) const U8: u32 = 0;
    pub(super) const U32: u32 = 4;
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const STRING: u32 = 8;
    pub(super) const ARRAY: u32 = 9;
}

#[derive(Default, Clone)]
struct File {
    entries: u64,
    metadata: Vec<u8>,
    tensors: u64,
    table: Vec<u8>,
    data: Vec<u8>,
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl File {
    fn entry(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.entries += 1;
        self.metadata.extend([&string(key)[..], &kind.to_le_bytes(), value].concat());
        self
    }

    fn text(self, key: &str, value: &str) -> Self {
        self.entry(key, kind::STRING, &string(value))
    }

    fn number(self, key: &str, value: u32) -> Self {
        self.entry(key, kind::U32, &value.to_le_bytes())
    }

    fn float(self, key: &str, value: f32) -> Self {
        self.entry(key, kind::F32, &value.to_le_bytes())
    }

    fn array(self, key: &str, kind: u32, count: u64, elements: &[u8]) -> Self {
        self.entry(key, kind::ARRAY, &[&kind.to_le_bytes()[..], &count.to_le_bytes(), elements].concat())
    }

    fn texts<'a>(self, key: &str, texts: impl IntoIterator<Item = &'a str>) -> Self {
        let texts: Vec<Vec<u8>> = texts.into_iter().map(string).collect();
        self.array(key, kind::STRING, texts.len() as u64, &texts.concat())
    }

    fn tensor(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        self.tensors += 1;
        let dims_bytes: Vec<u8> = dims.iter().flat_map(|dim| dim.to_le_bytes()).collect();
        let count = u32::try_from(dims.len()).unwrap_or(u32::MAX).to_le_bytes();
        let entry = [&string(name)[..], &count, &dims_bytes, &kind.to_le_bytes(), &offset.to_le_bytes()];
        self.table.extend(entry.concat());
        self
    }

    fn zeros(mut self, name: &str, dims: &[u64]) -> Self {
        let offset = self.data.len() as u64;
        let bytes = usize::try_from(dims.iter().product::<u64>() * 4).unwrap_or(0);
        self.data.resize((self.data.len() + bytes).next_multiple_of(32), 0);
        self.tensor(name, dims, 0, offset)
    }

    fn bytes(&self) -> Vec<u8> {
        self.declaring(self.tensors, self.entries)
    }

    /// Returns the file with false counts.
    fn declaring(&self, tensors: u64, entries: u64) -> Vec<u8> {
        let counts = [&tensors.to_le_bytes()[..], &entries.to_le_bytes()].concat();
        let mut bytes = [b"GGUF", &3u32.to_le_bytes()[..], &counts, &self.metadata, &self.table].concat();
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(&self.data);
        bytes
    }
}

fn llama() -> File {
    let mut file = File::default()
        .text("general.architecture", "llama")
        .number("llama.embedding_length", 8)
        .number("llama.attention.head_count", 2)
        .number("llama.attention.head_count_kv", 1)
        .number("llama.feed_forward_length", 16)
        .number("llama.block_count", 1)
        .number("llama.context_length", 64)
        .float("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .zeros("token_embd.weight", &[8, 32])
        .zeros("output_norm.weight", &[8]);
    for (name, dims) in [
        ("attn_norm", &[8][..]),
        ("ffn_norm", &[8]),
        ("attn_q", &[8, 8]),
        ("attn_k", &[8, 4]),
        ("attn_v", &[8, 4]),
        ("attn_output", &[8, 8]),
        ("ffn_gate", &[8, 16]),
        ("ffn_up", &[8, 16]),
        ("ffn_down", &[16, 8]),
    ] {
        file = file.zeros(&format!("blk.0.{name}.weight"), dims);
    }
    file
}

pub(super) fn files() -> Vec<Seed> {
    let mut make = Maker::new("gguf");
    make.valid("a whole model", llama().bytes());
    counts(&mut make);
    arrays(&mut make);
    offsets(&mut make);
    shapes(&mut make);
    alignments(&mut make);
    make.seeds
}

fn counts(make: &mut Maker) {
    let empty = File::default();
    make.refused("2^64 - 1 tensors", COUNTS, empty.declaring(u64::MAX, 0), "tensors, and the limit");
    make.refused("2^64 - 1 entries", COUNTS, empty.declaring(0, u64::MAX), "entries, and the limit");
    make.refused("more tensors than bytes", COUNTS, empty.declaring(1 << 16, 0), "ends in the middle");
    let long = |bytes: u64| [&File::default().declaring(0, 1)[..24], &bytes.to_le_bytes(), b"key"].concat();
    make.refused("a key of 2^64 - 1 bytes", COUNTS, long(u64::MAX), "ends in the middle of a metadata key");
    make.refused("a key of 2^63 bytes", COUNTS, long(1 << 63), "ends in the middle of a metadata key");
    let value = [kind::STRING.to_le_bytes().as_slice(), &u64::MAX.to_le_bytes()].concat();
    let text = [&File::default().declaring(0, 1)[..24], &string("k"), &value].concat();
    make.refused("a text of 2^64 - 1 bytes", COUNTS, text, "ends in the middle of a metadata value");
    let whole = llama().bytes();
    make.refused("cut in its metadata", COUNTS, whole[..100].to_vec(), "ends in the middle");
    let twice = File::default().number("a", 1).number("a", 2).bytes();
    make.refused("a key that comes twice", SHAPES, twice, "appears twice");
    let big_endian = [b"GGUF", &3u32.to_be_bytes()[..], &[0; 16]].concat();
    make.refused("a big-endian file", SHAPES, big_endian, "big-endian");
}

fn arrays(make: &mut Maker) {
    let array = |kind, count| File::default().array("a", kind, count, &[]).bytes();
    make.refused("an array of 2^64 - 1 bytes", COUNTS, array(kind::U8, u64::MAX), "ends in the middle");
    make.refused("an array of 2^61 texts", COUNTS, array(kind::STRING, 1 << 61), "ends in the middle");
    let nested = |depth: usize| {
        let one = [kind::ARRAY.to_le_bytes().as_slice(), &1u64.to_le_bytes()].concat();
        let none = [kind::U8.to_le_bytes().as_slice(), &0u64.to_le_bytes()].concat();
        File::default().entry("a", kind::ARRAY, &[one.repeat(depth), none].concat()).bytes()
    };
    make.refused("100,000 arrays in one another", COUNTS, nested(100_000), "arrays inside each other");
    make.refused("five arrays in one another", COUNTS, nested(5), "arrays inside each other");
    let unknown = File::default().entry("a", 13, &[0; 8]).bytes();
    make.refused("a value of an unknown kind", SHAPES, unknown, "unknown type 13");
    // A byte of the file must not become a word of memory.
    let bytes = File::default().array("a", kind::U8, 4_000_000, &vec![7; 4_000_000]).bytes();
    make.refused("four million bytes", GROWTH, bytes, "general.architecture");
    let empty = vec![0; 8 * 1_000_000];
    let texts = File::default().array("a", kind::STRING, 1_000_000, &empty).bytes();
    make.refused("a million empty texts", GROWTH, texts, "general.architecture");
    let inner = [kind::U8.to_le_bytes().as_slice(), &0u64.to_le_bytes()].concat().repeat(300_000);
    let arrays = File::default().array("a", kind::ARRAY, 300_000, &inner).bytes();
    make.refused("300,000 empty arrays", GROWTH, arrays, "general.architecture");
    let mut many = File::default();
    for index in 0..60_000u32 {
        many = many.entry(&format!("{index:x}"), kind::U8, &[0]);
    }
    make.refused("60,000 entries", GROWTH, many.bytes(), "general.architecture");
}

fn offsets(make: &mut Maker) {
    let at = |offset| File::default().tensor("t", &[32], 0, offset).bytes();
    make.refused("an offset at the end of 64 bits", OFFSETS, at(u64::MAX - 31), "beyond the end");
    make.refused("an offset of 2^63", OFFSETS, at(1 << 63), "beyond the end");
    make.refused("an offset behind the file", OFFSETS, at(1 << 20), "beyond the end");
    make.refused("an offset within a block", OFFSETS, at(1), "multiple of the alignment");
    let sized = |dims: &[u64], offset| File::default().tensor("t", dims, 0, offset).bytes();
    make.refused("offset and size that wrap to 0", OFFSETS, sized(&[1 << 61], 1 << 63), "beyond the end");
    make.refused("sizes whose sum wraps", OFFSETS, sized(&[(1 << 61) - 8], 32), "beyond the end");
    let many =
        (0..64).fold(File::default(), |file, index| file.tensor(&format!("{index}"), &[1 << 56], 0, 0));
    make.refused("64 tensors that sum to 2^64", OFFSETS, many.bytes(), "beyond the end");
    let mut table = File::default();
    for index in 0..60_000u32 {
        table = table.tensor(&format!("{index:x}"), &[1], 0, 0);
    }
    table.data = vec![0; 32];
    make.refused("60,000 tensors at one place", GROWTH, table.bytes(), "general.architecture");
}

fn shapes(make: &mut Maker) {
    let tensor = |dims: &[u64], kind| File::default().tensor("t", dims, kind, 0).bytes();
    make.refused(
        "dimensions whose product wraps",
        SHAPES,
        tensor(&[1 << 32, 1 << 32], 0),
        "too many elements",
    );
    let wraps_to_4 = tensor(&[(1 << 62) + 1, 4, 1], 0);
    make.refused("dimensions whose product wraps to 4", SHAPES, wraps_to_4, "too many elements");
    make.refused("an empty dimension", PADDING, tensor(&[0, 4], 0), "empty dimension");
    make.refused("no dimension at all", PADDING, tensor(&[], 0), "empty dimension");
    make.refused("five dimensions", SHAPES, tensor(&[1; 5], 0), "dimensions of a tensor");
    make.refused("half a quantized block", SHAPES, tensor(&[31], 2), "incomplete blocks");
    make.refused("a tensor type out of range", SHAPES, tensor(&[32], u32::MAX), "type number 4294967295");
    make.refused("a tensor type that was removed", SHAPES, tensor(&[32], 4), "type number 4");
    let twice = File::default().zeros("t", &[8]).zeros("t", &[8]).bytes();
    make.refused("a tensor that comes twice", SHAPES, twice, "appears twice");
    let cut = llama().bytes();
    make.refused("cut in its data", SHAPES, cut[..cut.len() - 64].to_vec(), "beyond the end");
    let heads = |count| llama_with("llama.attention.head_count", count);
    make.refused("a model of no heads", PADDING, heads(0), "number of heads is 0");
    make.refused("a model of 2^32 - 1 heads", SHAPES, heads(u32::MAX), "not between 1 and");
    let blocks = llama_with("llama.block_count", u32::MAX);
    make.refused("a model of 2^32 - 1 blocks", SHAPES, blocks, "number of layers");
}

fn llama_with(key: &str, value: u32) -> Vec<u8> {
    let mut file = llama();
    let place = string(key);
    let at = file.metadata.windows(place.len()).position(|window| window == place);
    let at = at.expect("the model has the key") + place.len() + 4;
    file.metadata[at..at + 4].copy_from_slice(&value.to_le_bytes());
    file.bytes()
}

fn alignments(make: &mut Maker) {
    let aligned = |value| File::default().number("general.alignment", value).zeros("t", &[8]).bytes();
    make.refused("an alignment of 2^31", PADDING, aligned(1 << 31), "general.alignment");
    make.refused("an alignment of 0", PADDING, aligned(0), "general.alignment");
    make.refused("an alignment of 3", PADDING, aligned(3), "general.alignment");
    let text = File::default().text("general.alignment", "32").bytes();
    make.refused("an alignment that is a text", PADDING, text, "general.alignment");
}

/// Builds a byte-level vocabulary of `texts` with these merges.
fn vocabulary(texts: &[String], merges: &[String]) -> File {
    split_as(texts, merges, "gpt-2")
}

/// Returns the bytes of a byte-level vocabulary whose pre-tokenizer is `pre`.
pub(super) fn byte_level(texts: &[String], merges: &[String], pre: &str) -> Vec<u8> {
    split_as(texts, merges, pre).bytes()
}

/// Builds a vocabulary with one token for each byte, one for two line ends, and the tokens that begin and end
/// a turn.
pub(super) fn chat_vocabulary() -> Vec<u8> {
    let mut tokens: Vec<String> = (0..0x144).filter_map(char::from_u32).map(String::from).collect();
    let start = tokens.len() as u32;
    tokens.extend(words(&["<|im_start|>", "<|im_end|>", "ĊĊ"]));
    split_as(&tokens, &words(&["Ċ Ċ"]), "gpt-2")
        .number("tokenizer.ggml.bos_token_id", start)
        .number("tokenizer.ggml.eos_token_id", start + 1)
        .bytes()
}

fn split_as(texts: &[String], merges: &[String], pre: &str) -> File {
    File::default()
        .text("general.architecture", "llama")
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", pre)
        .texts("tokenizer.ggml.tokens", texts.iter().map(String::as_str))
        .texts("tokenizer.ggml.merges", merges.iter().map(String::as_str))
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

pub(super) fn tokenizers() -> Vec<Seed> {
    const MERGES: &str = "tokenizer bombs";
    let mut make = Maker::new("gguf_tokenizer");
    let tokens = words(&["a", "b", "Ġ", "ab", "aba", "<|im_end|>"]);
    make.valid("a vocabulary", vocabulary(&tokens, &words(&["a b", "ab a"])).bytes());
    let missing = vocabulary(&tokens, &words(&["a c"])).bytes();
    make.refused("a merge of an unknown token", MERGES, missing, "");
    let long = vocabulary(&tokens, &words(&["<|im_end|> aba"])).bytes();
    make.refused("a merge longer than any token", MERGES, long, "longer than any token");
    make.refused(
        "a merge of one token",
        MERGES,
        vocabulary(&tokens, &words(&["ab"])).bytes(),
        "not two tokens",
    );
    make.refused("no tokens", MERGES, vocabulary(&[], &[]).bytes(), "has 0 tokens");
    let huge = vocabulary(&["x".repeat(1 << 20)], &[]).bytes();
    make.refused("a token of a mebibyte", MERGES, huge, "beyond the limit");
    make.bounded("the same token 1,000 times", MERGES, vocabulary(&vec!["a".to_owned(); 1_000], &[]).bytes());
    let types = vocabulary(&tokens, &[]).array("tokenizer.ggml.token_type", kind::I32, 1, &[1, 0, 0, 0]);
    make.refused("fewer types than tokens", MERGES, types.bytes(), "token types");
    let end = vocabulary(&tokens, &[]).number("tokenizer.ggml.bos_token_id", u32::MAX).bytes();
    make.refused(
        "a special token beyond the vocabulary",
        "CVE-2026-93840 (ids beyond)",
        end,
        "which is not a token",
    );
    let chain: Vec<String> = (1..=512).map(|length| "a".repeat(length)).collect();
    let merges: Vec<String> = (1..512).map(|length| format!("{} a", "a".repeat(length))).collect();
    make.valid("a chain of 511 merges", vocabulary(&chain, &merges).bytes());
    let million = vec!["a a".to_owned(); 1_000_000];
    make.bounded("a million merges", MERGES, vocabulary(&words(&["a", "aa"]), &million).bytes());
    let pieces = vocabulary(&words(&["<unk>", "▁", "a", "▁a"]), &[]);
    let scores = [0f32, f32::NAN, f32::INFINITY, -1.0].map(f32::to_le_bytes).concat();
    let pieces = pieces.array("tokenizer.ggml.scores", kind::F32, 4, &scores);
    let mut sentencepiece = pieces.bytes();
    let at = sentencepiece.windows(4).position(|window| window == b"gpt2").expect("a model");
    sentencepiece.splice(at - 8..at + 4, string("llama"));
    make.bounded("scores that are not numbers", MERGES, sentencepiece);
    make.seeds
}

fn lora() -> File {
    File::default()
        .text("general.type", "adapter")
        .text("adapter.type", "lora")
        .text("general.architecture", "llama")
        .float("adapter.lora.alpha", 8.0)
}

pub(super) fn adapters() -> Vec<Seed> {
    let mut make = Maker::new("gguf_adapter");
    let pair = |file: File, rank| {
        file.zeros("blk.0.attn_q.weight.lora_a", &[8, rank]).zeros("blk.0.attn_q.weight.lora_b", &[rank, 8])
    };
    make.valid("an adapter", pair(lora(), 4).bytes());
    make.refused("a rank of 2,000", GROWTH, pair(lora(), 2_000).bytes(), "has rank 2000");
    make.refused("no tensor", GROWTH, lora().bytes(), "no tensor adapts");
    let nan = pair(File::default().text("general.type", "adapter").text("adapter.type", "lora"), 4)
        .text("general.architecture", "llama")
        .float("adapter.lora.alpha", f32::NAN);
    make.refused("an alpha that is not a number", "vllm#42008", nan.bytes(), "adapter.lora.alpha");
    let mut weights = pair(lora(), 4);
    weights.data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    make.refused("a weight that is not a number", "vllm#42008", weights.bytes(), "the training went wrong");
    let vector =
        lora().zeros("blk.0.attn_q.weight.lora_a", &[8]).zeros("blk.0.attn_q.weight.lora_b", &[1, 8]);
    make.bounded("an A that is a vector", SHAPES, vector.bytes());
    let rest = pair(lora(), 4).zeros("other", &[1]).bytes();
    make.refused("a tensor of no layer", "silent ignorance", rest, "adapters cannot change");
    make.seeds
}
