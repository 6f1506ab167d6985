//! Attention against plain softmax, and a query's bits independent of other rows and cache content.

use half::{bf16, f16};
use kernels::{
    Isa, ThreadPool,
    attention::{AttentionLimits, BLOCK_TOKENS, KvPool, KvPrecision, KvRows, KvShape, QkvLayout},
    reference,
};
use rand::seq::SliceRandom;

use crate::support::{assert_close, bits, floats, pool, random};

const PRECISIONS: [KvPrecision; 4] =
    [KvPrecision::F32, KvPrecision::F16, KvPrecision::Int8, KvPrecision::Bf16];

/// Query heads per key head.
const GROUPS: [usize; 6] = [1, 2, 3, 4, 7, 8];

const LAYERS: usize = 2;

/// The layer under test; the other one holds NaN.
const LAYER: usize = 1;

/// Sequences with known tokens, and their blocks.
pub(crate) struct KnownSequences {
    pub(crate) layout: QkvLayout,
    pub(crate) shape: KvShape,
    pub(crate) limits: AttentionLimits,
    /// Sink of each query head, or empty.
    pub(crate) sinks: Vec<f32>,
    /// Rows `[q | k | v]` of each sequence.
    pub(crate) sequences: Vec<Vec<f32>>,
    /// Block tables: unordered, with foreign blocks between.
    pub(crate) tables: Vec<Vec<u32>>,
    blocks: usize,
}

pub(crate) type Slice = (usize, usize, usize);

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum PoolFill {
    Zero,
    NotANumber,
}

impl KnownSequences {
    pub(crate) fn new(
        lengths: &[usize],
        group: usize,
        head_dim: usize,
        precision: KvPrecision,
        window: Option<usize>,
    ) -> Self {
        let kv_heads = 2;
        let layout = QkvLayout { heads: group * kv_heads, kv_heads, head_dim };
        let random = &mut random((1000 * group + head_dim) as u64);
        let sequences = lengths.iter().map(|tokens| floats(random, tokens * layout.stride())).collect();
        let blocks: usize = lengths.iter().map(|tokens| tokens.div_ceil(BLOCK_TOKENS)).sum::<usize>() + 3;
        let mut free: Vec<u32> = (0..blocks as u32).collect();
        free.shuffle(random);
        let table = |tokens: &usize| free.split_off(free.len() - tokens.div_ceil(BLOCK_TOKENS));
        let tables = lengths.iter().map(table).collect();
        let shape = KvShape { layers: LAYERS, kv_heads, head_dim, precision };
        let limits = AttentionLimits { window, cap: None };
        Self { layout, shape, limits, sinks: Vec::new(), sequences, tables, blocks }
    }

    fn tokens(&self, sequence: usize) -> usize {
        self.sequences[sequence].len() / self.layout.stride()
    }

    pub(crate) fn out_width(&self) -> usize {
        self.layout.heads * self.layout.head_dim
    }

    /// A pool in which every slot of every layer and block holds `unused`.
    pub(crate) fn empty(&self, isa: Isa, unused: PoolFill) -> KvPool {
        let mut kv = KvPool::new(self.shape, self.blocks).expect("memory for the blocks");
        if unused == PoolFill::NotANumber {
            let blocks: Vec<u32> = (0..self.blocks as u32).collect();
            let rows = self.blocks * BLOCK_TOKENS;
            let garbage = vec![f32::NAN; rows * self.layout.stride()];
            for layer in 0..LAYERS {
                let batch = [KvRows { first_row: 0, rows, position: 0, blocks: &blocks }];
                kv.append(isa, layer, &garbage, self.layout, &batch);
            }
        }
        kv
    }

    /// Rows of `slices`, in sequence, and their positions.
    fn batch(&self, slices: &[Slice]) -> (Vec<f32>, Vec<KvRows<'_>>) {
        let (mut qkv, mut batch) = (Vec::new(), Vec::new());
        let stride = self.layout.stride();
        for &(sequence, from, to) in slices {
            let (first_row, blocks) = (qkv.len() / stride, self.tables[sequence].as_slice());
            batch.push(KvRows { first_row, rows: to - from, position: from, blocks });
            qkv.extend_from_slice(&self.sequences[sequence][from * stride..to * stride]);
        }
        (qkv, batch)
    }

    pub(crate) fn append(&self, kv: &mut KvPool, isa: Isa, slices: &[Slice]) {
        let (qkv, batch) = self.batch(slices);
        kv.append(isa, LAYER, &qkv, self.layout, &batch);
    }

    pub(crate) fn attend(&self, kv: &KvPool, pool: &mut ThreadPool, isa: Isa, slices: &[Slice]) -> Vec<f32> {
        let (qkv, batch) = self.batch(slices);
        // NaN shows unwritten values.
        let mut out = vec![f32::NAN; qkv.len() / self.layout.stride() * self.out_width()];
        kv.attend(pool, isa, LAYER, &qkv, self.layout, &batch, self.limits, &self.sinks, &mut out);
        out
    }

    /// Runs `steps`, each one batch of slices, from an empty pool; returns the bits of every token's output.
    pub(crate) fn run(
        &self,
        pool: &mut ThreadPool,
        isa: Isa,
        unused: PoolFill,
        steps: &[Vec<Slice>],
    ) -> Vec<Vec<u32>> {
        let mut kv = self.empty(isa, unused);
        let width = self.out_width();
        let mut all: Vec<Vec<u32>> =
            (0..self.sequences.len()).map(|sequence| vec![0; self.tokens(sequence) * width]).collect();
        for slices in steps {
            self.append(&mut kv, isa, slices);
            let out = self.attend(&kv, pool, isa, slices);
            let mut rest = out.as_slice();
            for &(sequence, from, to) in slices {
                let (these, others) = rest.split_at((to - from) * width);
                all[sequence][from * width..to * width].copy_from_slice(&bits(these));
                rest = others;
            }
        }
        all
    }

    /// Output of one token by plain softmax, from the KV cache as the pool stores it.
    fn plain(&self, sequence: usize, token: usize) -> Vec<f32> {
        let QkvLayout { heads, kv_heads, head_dim } = self.layout;
        let stride = self.layout.stride();
        let first = self.limits.window.map_or(0, |window| (token + 1).saturating_sub(window));
        let at = |row: usize, column: usize| &self.sequences[sequence][row * stride + column..][..head_dim];
        let mut out = Vec::new();
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let kept = |from: usize| -> Vec<f32> {
                (first..=token).flat_map(|row| self.keep(at(row, (from + kv_head) * head_dim))).collect()
            };
            let q = at(token, head * head_dim);
            let rounded = self.keep(q);
            let q = if self.shape.precision == KvPrecision::Bf16 { &rounded } else { q };
            let (keys, values) = (kept(heads), kept(heads + kv_heads));
            let sink = self.sinks.get(head).copied();
            out.extend(reference::attention(q, &keys, &values, self.limits.cap, sink));
        }
        out
    }

    /// A key or a value as the pool stores it.
    fn keep(&self, head: &[f32]) -> Vec<f32> {
        let each = |keep: &dyn Fn(f32) -> f32| head.iter().map(|&x| keep(x)).collect();
        match self.shape.precision {
            KvPrecision::F32 => head.to_vec(),
            KvPrecision::F16 => each(&|x| f16::from_f32(x).to_f32()),
            KvPrecision::Bf16 => each(&|x| bf16::from_f32(x).to_f32()),
            KvPrecision::Int8 => {
                let largest = head.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                each(&|x| (x * (127.0 / largest)).round_ties_even() * (largest / 127.0))
            }
        }
    }
}

pub(crate) fn cut(sequence: usize, from: usize, to: usize, step: usize) -> Vec<Vec<Slice>> {
    (from..to).step_by(step).map(|at| vec![(sequence, at, to.min(at + step))]).collect()
}

#[test]
fn blocks_that_went_as_bytes_to_other_places_of_another_pool_have_the_same_bits() {
    let pool = &mut pool(1);
    for (isa, precision) in Isa::available().into_iter().flat_map(|isa| PRECISIONS.map(|kind| (isa, kind))) {
        for head_dim in [8, 40, 64] {
            let mut world = KnownSequences::new(&[40, 7], 2, head_dim, precision, None);
            let (mut kv, mut other) =
                (world.empty(isa, PoolFill::Zero), world.empty(isa, PoolFill::NotANumber));
            let all = [(0, 0, 40), (1, 0, 7)];
            world.append(&mut kv, isa, &all);
            let expected = world.attend(&kv, pool, isa, &all);
            let (mut bytes, last) = (vec![0; world.shape.block_bytes()], world.blocks as u32 - 1);
            for block in world.tables.iter_mut().flatten() {
                kv.read_block(*block, &mut bytes);
                *block = last - *block;
                other.write_block(*block, &bytes);
            }
            let moved = world.attend(&other, pool, isa, &all);
            assert_eq!(bits(&moved), bits(&expected), "{isa:?} {precision:?} {head_dim}");
        }
    }
}

#[test]
#[should_panic(expected = "block 12 of 12")]
fn a_block_that_does_not_exist_is_not_read() {
    let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 8, precision: KvPrecision::F32 };
    let kv = KvPool::new(shape, 12).expect("memory for the blocks");
    kv.read_block(12, &mut vec![0; shape.block_bytes()]);
}

#[test]
#[should_panic(expected = "bytes of one block")]
fn half_a_block_is_not_written() {
    let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 8, precision: KvPrecision::F32 };
    let mut kv = KvPool::new(shape, 12).expect("memory for the blocks");
    kv.write_block(0, &vec![0; shape.block_bytes() / 2]);
}

#[test]
fn attention_is_the_plain_softmax_for_every_shape() {
    for isa in Isa::available() {
        for precision in PRECISIONS {
            for group in GROUPS {
                for head_dim in [8, 16, 40, 64, 80] {
                    let world = KnownSequences::new(&[40, 7], group, head_dim, precision, None);
                    judge(&world, isa, &[(0, 0, 40), (1, 0, 7)]);
                }
            }
            judge(&KnownSequences::new(&[20], 4, 256, precision, None), isa, &[(0, 0, 20)]);
        }
    }
}

#[test]
fn attention_is_the_plain_softmax_around_blocks_and_spans_and_behind_windows() {
    for isa in Isa::available() {
        for precision in PRECISIONS {
            for window in [None, Some(1), Some(2), Some(16), Some(100), Some(256), Some(300), Some(1000)] {
                let world = KnownSequences::new(&[600], 3, 24, precision, window);
                for tokens in [0..3, 14..18, 30..34, 254..259, 299..302, 354..358, 510..514, 598..600] {
                    judge(&world, isa, &[(0, tokens.start, tokens.end)]);
                }
            }
        }
    }
}

#[test]
fn capped_scores_are_those_of_the_plain_form_whatever_lies_in_unused_slots() {
    for (isa, precision) in Isa::available().into_iter().flat_map(|isa| PRECISIONS.map(|kind| (isa, kind))) {
        for (group, cap) in [(1, 0.5), (3, 2.0), (8, 50.0)] {
            let mut world = KnownSequences::new(&[300, 7], group, 24, precision, Some(100));
            world.limits.cap = Some(cap);
            judge(&world, isa, &[(0, 254, 259), (1, 0, 7)]);
            let capped = world.plain(0, 200);
            world.limits.cap = None;
            assert_ne!(bits(&capped), bits(&world.plain(0, 200)));
        }
    }
}

/// Sinks of 16 heads, far below the scores of the tests, among them and far above.
const SINKS: [f32; 16] =
    [0.0, 1.5, -2.0, 8.0, -90.0, 3.0, 100.0, 0.5, -0.5, 2.0, -8.0, 20.0, 1.0, -1.0, 4.0, 0.25];

#[test]
fn a_sink_takes_its_share_of_the_softmax_and_gives_no_value() {
    for (isa, precision) in Isa::available().into_iter().flat_map(|isa| PRECISIONS.map(|kind| (isa, kind))) {
        for (group, window) in [(1, None), (3, Some(100)), (8, Some(1)), (8, None)] {
            let mut world = KnownSequences::new(&[600, 7], group, 24, precision, window);
            world.sinks = SINKS[..world.layout.heads].to_vec();
            judge(&world, isa, &[(0, 254, 259), (0, 590, 600), (1, 0, 7)]);
            let with_sinks = world.plain(0, 200);
            world.sinks.clear();
            assert_ne!(bits(&with_sinks), bits(&world.plain(0, 200)));
        }
    }
}

/// Checks the outputs of `slices` with whole sequences in the pool.
fn judge(world: &KnownSequences, isa: Isa, slices: &[Slice]) {
    let mut kv = world.empty(isa, PoolFill::NotANumber);
    for sequence in 0..world.sequences.len() {
        world.append(&mut kv, isa, &[(sequence, 0, world.tokens(sequence))]);
    }
    let out = world.attend(&kv, &mut pool(1), isa, slices);
    let mut rows = out.chunks(world.out_width());
    for &(sequence, from, to) in slices {
        for token in from..to {
            let what = format!("{isa:?}, {:?}, {:?}, token {token}", world.shape, world.limits);
            // Values are at most 1, and so is every mean of them. Weights in bf16 are off by 2^-9, some up, some down.
            let tolerance = if world.shape.precision == KvPrecision::Bf16 { 4e-3 } else { 1e-5 };
            let row = rows.next().expect("a row for each token");
            assert_close(row, &world.plain(sequence, token), tolerance, &what);
        }
    }
}

#[test]
fn a_query_has_the_same_bits_however_its_prompt_is_cut() {
    let windows = [Some(100), Some(300), Some(1), None, None, Some(16)];
    for isa in Isa::available() {
        for precision in PRECISIONS {
            for (group, window) in GROUPS.into_iter().zip(windows) {
                let mut world = KnownSequences::new(&[600], group, 16, precision, window);
                if group % 2 == 0 {
                    world.sinks = SINKS[..world.layout.heads].to_vec();
                }
                let whole = world.run(&mut pool(1), isa, PoolFill::Zero, &cut(0, 0, 600, 600));
                let same = |pool: &mut ThreadPool, steps: &[Vec<Slice>], how: &str| {
                    let got = world.run(pool, isa, PoolFill::NotANumber, steps);
                    assert_same(&world, &got[0], &whole[0], &format!("{isa:?}, {precision:?}, {how}"));
                };
                for step in [1, 5, 16, 17, 255, 256, 257] {
                    same(&mut pool(1), &cut(0, 0, 600, step), &format!("{step} at a time"));
                }
                same(&mut pool(2), &cut(0, 0, 600, 600), "on two threads");
                let prompt_and_decode =
                    [cut(0, 0, 250, 250), cut(0, 250, 265, 1), cut(0, 265, 600, 335)].concat();
                same(&mut pool(2), &prompt_and_decode, "prompt, tokens and a prompt again");
            }
        }
    }
}

#[track_caller]
fn assert_same(world: &KnownSequences, got: &[u32], wanted: &[u32], what: &str) {
    let width = world.out_width();
    for (token, (got, wanted)) in got.chunks(width).zip(wanted.chunks(width)).enumerate() {
        assert_eq!(
            got,
            wanted,
            "{what}: group of {}, token {token}",
            world.layout.heads / world.layout.kv_heads
        );
    }
}

#[test]
fn a_query_has_the_same_bits_whoever_else_is_there() {
    let lengths = [15, 16, 17, 255, 256, 257, 300];
    for isa in Isa::available() {
        for precision in PRECISIONS {
            for (group, window) in [(1, None), (3, Some(40)), (4, None), (8, Some(256))] {
                let world = KnownSequences::new(&lengths, group, 24, precision, window);
                let all: Vec<Slice> = lengths.iter().enumerate().map(|(i, &tokens)| (i, 0, tokens)).collect();
                let together = world.run(&mut pool(2), isa, PoolFill::NotANumber, &[all]);
                // Decode of sequences of different lengths in one batch.
                let mut steps: Vec<Vec<Slice>> =
                    vec![lengths.iter().enumerate().rev().map(|(i, &tokens)| (i, 0, tokens - 9)).collect()];
                steps.extend((1..=9).rev().map(|back| {
                    lengths
                        .iter()
                        .enumerate()
                        .map(|(i, &tokens)| (i, tokens - back, tokens - back + 1))
                        .collect()
                }));
                let decoded = world.run(&mut pool(1), isa, PoolFill::Zero, &steps);
                for (sequence, &tokens) in lengths.iter().enumerate() {
                    let alone =
                        world.run(&mut pool(1), isa, PoolFill::Zero, &cut(sequence, 0, tokens, tokens));
                    let what = format!("{isa:?}, {precision:?}, sequence {sequence}");
                    assert_same(
                        &world,
                        &together[sequence],
                        &alone[sequence],
                        &format!("{what} in one batch"),
                    );
                    assert_same(&world, &decoded[sequence], &alone[sequence], &format!("{what} decoded"));
                }
            }
        }
    }
}

#[test]
fn what_follows_a_query_in_its_own_blocks_changes_no_bit() {
    for isa in Isa::available() {
        for precision in PRECISIONS {
            let world = KnownSequences::new(&[600], 7, 40, precision, None);
            let mut kv = world.empty(isa, PoolFill::NotANumber);
            world.append(&mut kv, isa, &[(0, 0, 600)]);
            let whole = world.attend(&kv, &mut pool(1), isa, &[(0, 0, 600)]);
            for token in [0, 1, 14, 15, 16, 17, 254, 255, 256, 257, 599] {
                let mut kv = world.empty(isa, PoolFill::NotANumber);
                world.append(&mut kv, isa, &[(0, 0, token + 1)]);
                let alone = world.attend(&kv, &mut pool(1), isa, &[(0, token, token + 1)]);
                let within = &whole[token * world.out_width()..][..world.out_width()];
                assert_eq!(bits(&alone), bits(within), "{isa:?}, {precision:?}, token {token}");
            }
        }
    }
}

#[test]
fn a_block_shared_by_two_sequences_serves_both() {
    // Both start with the same sixteen tokens and read them from one block.
    let mut world = KnownSequences::new(&[40, 40], 2, 32, KvPrecision::F16, None);
    let shared = 16 * world.layout.stride();
    let start = world.sequences[0][..shared].to_vec();
    world.sequences[1][..shared].copy_from_slice(&start);
    for isa in Isa::available() {
        let apart = world.run(&mut pool(1), isa, PoolFill::Zero, &[vec![(0, 0, 40), (1, 0, 40)]]);
        let mut world = KnownSequences {
            sequences: world.sequences.clone(),
            tables: world.tables.clone(),
            sinks: Vec::new(),
            ..world
        };
        world.tables[1][0] = world.tables[0][0];
        let steps = [vec![(0, 0, 16)], vec![(0, 16, 40), (1, 16, 40)]];
        let together = world.run(&mut pool(1), isa, PoolFill::NotANumber, &steps);
        let rest = 16 * world.out_width();
        assert_eq!(together[0], apart[0], "{isa:?}");
        assert_eq!(together[1][rest..], apart[1][rest..], "{isa:?}");
    }
}

#[test]
fn scores_far_apart_neither_overflow_nor_vanish() {
    // Keys are a hundred times as long: one position outside of the first span takes all the weight.
    for precision in PRECISIONS {
        let mut world = KnownSequences::new(&[600], 2, 32, precision, None);
        let (stride, head_dim) = (world.layout.stride(), world.layout.head_dim);
        let key_column = world.layout.heads * head_dim;
        for (token, row) in world.sequences[0].chunks_mut(stride).enumerate() {
            let length = if token % 100 == 50 { 1000.0 } else { 100.0 };
            row[key_column..key_column + 2 * head_dim].iter_mut().for_each(|x| *x *= length);
        }
        for isa in Isa::available() {
            let mut kv = world.empty(isa, PoolFill::Zero);
            world.append(&mut kv, isa, &[(0, 0, 600)]);
            let out = world.attend(&kv, &mut pool(1), isa, &[(0, 590, 600)]);
            for (i, out) in out.chunks(world.out_width()).enumerate() {
                // Scores near 10^4 are off by 10^-3, and so are the weights.
                assert_close(
                    out,
                    &world.plain(0, 590 + i),
                    5e-3,
                    &format!("{isa:?}, {precision:?}, token {i}"),
                );
            }
        }
    }
}

#[test]
fn a_block_takes_the_bytes_it_says() {
    let shape = KvShape { layers: 3, kv_heads: 2, head_dim: 20, precision: KvPrecision::F16 };
    // Keys are not padded; values are, to whole vectors.
    assert_eq!(shape.block_bytes(), 3 * 2 * 16 * (20 + 32) * 2);
    assert_eq!(KvShape { precision: KvPrecision::F32, ..shape }.block_bytes(), 2 * shape.block_bytes());
    // Plus a scale for each of sixteen keys and sixteen values.
    let bytes = KvShape { precision: KvPrecision::Int8, ..shape }.block_bytes();
    assert_eq!(bytes, 3 * 2 * (16 * (20 + 32) + 2 * 16 * 4));
    // Keys are padded to whole groups.
    let bytes = KvShape { precision: KvPrecision::Bf16, ..shape }.block_bytes();
    assert_eq!(bytes, 3 * 2 * 16 * (32 + 32) * 2);
    assert_eq!(KvPool::new(shape, 4).unwrap().shape(), shape);
}

#[test]
fn a_pool_larger_than_any_memory_is_an_error() {
    let shape = KvShape { layers: 30, kv_heads: 8, head_dim: 128, precision: KvPrecision::F32 };
    for blocks in [usize::MAX, usize::MAX / shape.block_bytes(), 1 << 40] {
        assert!(KvPool::new(shape, blocks).is_err(), "{blocks} blocks");
    }
}

/// Writes `rows` tokens at `position` of a pool of four blocks.
fn append(rows: usize, position: usize, blocks: &[u32]) {
    let layout = QkvLayout { heads: 1, kv_heads: 1, head_dim: 16 };
    let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 16, precision: KvPrecision::F32 };
    let mut kv = KvPool::new(shape, 4).expect("memory for four blocks");
    let qkv = vec![0.0; 8 * layout.stride()];
    kv.append(Isa::best(), 0, &qkv, layout, &[KvRows { first_row: 0, rows, position, blocks }]);
}

#[test]
#[should_panic(expected = "blocks of this pool")]
fn a_block_that_does_not_exist_is_refused() {
    append(1, 0, &[4]);
}

#[test]
#[should_panic(expected = "enough blocks")]
fn a_position_without_a_block_is_refused() {
    append(3, 14, &[0]);
}

#[test]
#[should_panic(expected = "the slice's rows exist")]
fn rows_that_do_not_exist_are_refused() {
    append(9, 0, &[0]);
}
