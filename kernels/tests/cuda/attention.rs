//! Attention over the paged KV cache against plain softmax in double precision, and a row's bits independent
//! of other rows and cache content.

use half::f16;
use kernels::{
    attention::{AttentionLimits, BLOCK_TOKENS, KvPrecision, KvRows, KvShape, QkvLayout},
    cuda::{
        CudaStream, Graph, Matrix, Replay,
        attention::{KvPool, RowTable},
    },
    lora::ElementKind,
    reference::capped,
};

use crate::support::{KINDS, SeededNumbers, distance, matrix, rounded, stream, unwritten};

const LAYERS: usize = 2;

/// The layer under test; the other one holds NaN.
const LAYER: usize = 1;

#[derive(Debug, Clone, Copy)]
struct Slice {
    sequence: usize,
    from: usize,
    to: usize,
}

fn slice(sequence: usize, from: usize, to: usize) -> Slice {
    Slice { sequence, from, to }
}

#[derive(Debug, Clone, Copy)]
struct AttentionCase {
    precision: KvPrecision,
    kind: ElementKind,
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    limits: AttentionLimits,
}

const PLAIN: AttentionCase = AttentionCase {
    precision: KvPrecision::F16,
    kind: ElementKind::F16,
    kv_heads: 2,
    group: 1,
    head_dim: 64,
    limits: AttentionLimits { window: None, cap: None },
};

impl AttentionCase {
    fn layout(&self) -> QkvLayout {
        QkvLayout { heads: self.kv_heads * self.group, kv_heads: self.kv_heads, head_dim: self.head_dim }
    }

    fn shape(&self) -> KvShape {
        let Self { kv_heads, head_dim, precision, .. } = *self;
        KvShape { layers: LAYERS, kv_heads, head_dim, precision }
    }

    /// Maximum error by norm: the rounding of the factors and of the output.
    fn tolerance(&self) -> f64 {
        match (self.precision, self.kind) {
            (_, ElementKind::Bf16) => 1e-2,
            (KvPrecision::F32, ElementKind::F32) => 1e-5,
            _ => 2e-3,
        }
    }

    fn kept(&self, x: f32) -> f64 {
        match self.precision {
            KvPrecision::F32 => f64::from(x),
            KvPrecision::F16 => f64::from(f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32()),
            KvPrecision::Int8 | KvPrecision::Bf16 => unreachable!("no pool on a device has these"),
        }
    }
}

/// Sequences with known rows, and their blocks: unordered, with foreign blocks between.
struct CudaSequences {
    case: AttentionCase,
    sequences: Vec<Vec<f32>>,
    tables: Vec<Vec<u32>>,
    blocks: usize,
}

impl CudaSequences {
    fn new(case: AttentionCase, lengths: &[usize], seed: u64) -> Self {
        let random = &mut SeededNumbers::new(seed);
        let stride = case.layout().stride();
        let numbers = |&rows: &usize| rounded(case.kind, &random.normals(rows * stride));
        let sequences = lengths.iter().map(numbers).collect();
        let blocks: usize = lengths.iter().map(|rows| rows.div_ceil(BLOCK_TOKENS)).sum::<usize>() + 3;
        let mut free: Vec<u32> = (0..blocks as u32).collect();
        for at in (1..blocks).rev() {
            free.swap(at, random.below(at + 1));
        }
        let table = |rows: &usize| free.split_off(free.len() - rows.div_ceil(BLOCK_TOKENS));
        let tables = lengths.iter().map(table).collect();
        Self { case, sequences, tables, blocks }
    }

    /// Replaces rows `from..to` of `sequence` by those of `of`, in the same blocks if they are full.
    fn share(&mut self, sequence: usize, of: usize, rows: usize) {
        let numbers = rows * self.case.layout().stride();
        let (blocks, shared) = (rows / BLOCK_TOKENS, self.sequences[of][..numbers].to_vec());
        self.sequences[sequence][..numbers].copy_from_slice(&shared);
        let shared = self.tables[of][..blocks].to_vec();
        self.tables[sequence][..blocks].copy_from_slice(&shared);
    }

    /// A pool in which every slot of every layer and block holds NaN, and a table for it.
    fn empty(&self, stream: &CudaStream) -> (KvPool, RowTable) {
        let (layout, rows) = (self.case.layout(), self.blocks * BLOCK_TOKENS);
        let mut pool = KvPool::new(stream.cuda(), self.case.shape(), self.blocks).unwrap();
        let garbage = unwritten(stream, self.case.kind, rows, layout.stride());
        let blocks: Vec<u32> = (0..self.blocks as u32).collect();
        let mut table = RowTable::new(pool.memory(), layout).unwrap();
        table.upload(stream, &[KvRows { first_row: 0, rows, position: 0, blocks: &blocks }]).unwrap();
        for layer in 0..LAYERS {
            pool.append(stream, layer, &garbage, layout, &table).unwrap();
        }
        (pool, table)
    }

    /// Rows of `slices`, in sequence, and their positions.
    fn batch(&self, slices: &[Slice]) -> (Vec<f32>, Vec<KvRows<'_>>) {
        let (mut qkv, mut batch) = (Vec::new(), Vec::new());
        let stride = self.case.layout().stride();
        for &Slice { sequence, from, to } in slices {
            let (first_row, blocks) = (qkv.len() / stride, self.tables[sequence].as_slice());
            batch.push(KvRows { first_row, rows: to - from, position: from, blocks });
            qkv.extend_from_slice(&self.sequences[sequence][from * stride..to * stride]);
        }
        (qkv, batch)
    }

    fn qkv(&self, stream: &CudaStream, rows: &[f32]) -> Matrix {
        matrix(stream, self.case.kind, self.case.layout().stride(), rows)
    }

    fn append(&self, stream: &CudaStream, pool: &mut KvPool, table: &mut RowTable, slices: &[Slice]) {
        let (qkv, batch) = self.batch(slices);
        table.upload(stream, &batch).unwrap();
        pool.append(stream, LAYER, &self.qkv(stream, &qkv), self.case.layout(), table).unwrap();
    }

    fn attend(
        &self,
        stream: &CudaStream,
        pool: &mut KvPool,
        table: &mut RowTable,
        slices: &[Slice],
    ) -> Vec<f32> {
        let (layout, (qkv, batch)) = (self.case.layout(), self.batch(slices));
        let qkv = self.qkv(stream, &qkv);
        let mut out = unwritten(stream, self.case.kind, qkv.rows(), layout.heads * layout.head_dim);
        table.upload(stream, &batch).unwrap();
        pool.append(stream, LAYER, &qkv, layout, table).unwrap();
        pool.attend(stream, LAYER, &qkv, layout, table, self.case.limits, &mut out).unwrap();
        out.to_vec(stream).unwrap()
    }

    /// As [`CudaSequences::attend`], from a fresh pool that holds all rows before the slices.
    fn attend_after_all_before(&self, stream: &CudaStream, slices: &[Slice]) -> Vec<f32> {
        let (mut pool, mut table) = self.empty(stream);
        let before: Vec<Slice> = slices.iter().map(|it| slice(it.sequence, 0, it.from)).collect();
        self.append(stream, &mut pool, &mut table, &before);
        self.attend(stream, &mut pool, &mut table, slices)
    }

    fn plain(&self, slices: &[Slice]) -> Vec<f32> {
        let QkvLayout { heads, .. } = self.case.layout();
        let mut out = Vec::new();
        for it in slices {
            for row in it.from..it.to {
                (0..heads).for_each(|head| out.extend(self.plain_head(it.sequence, row, head)));
            }
        }
        out
    }

    fn plain_head(&self, sequence: usize, row: usize, head: usize) -> Vec<f32> {
        let (layout, case) = (self.case.layout(), &self.case);
        let (width, rows) = (layout.head_dim, self.sequences[sequence].chunks(layout.stride()));
        let rows: Vec<&[f32]> = rows.collect();
        let key_column = (layout.heads + head / case.group) * width;
        let value_column = key_column + layout.kv_heads * width;
        let first = case.limits.window.map_or(0, |window| (row + 1).saturating_sub(window));
        let query = &rows[row][head * width..][..width];
        let product =
            |key: &[f32]| -> f64 { query.iter().zip(key).map(|(&q, &k)| case.kept(q) * case.kept(k)).sum() };
        let score = |key| case.limits.cap.map_or(product(key), |cap| capped(product(key), cap));
        let seen = &rows[first..=row];
        let scores: Vec<f64> = seen.iter().map(|row| score(&row[key_column..][..width])).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        let value = |feature: usize| {
            let values = seen.iter().map(|row| case.kept(row[value_column + feature]));
            (values.zip(&weights).map(|(value, weight)| value * weight).sum::<f64>() / total) as f32
        };
        (0..width).map(value).collect()
    }

    fn assert_plain(&self, slices: &[Slice], got: &[f32]) {
        let (off, case) = (distance(got, &self.plain(slices)), self.case);
        assert!(off <= case.tolerance(), "off by {off:e}: {case:?} {slices:?}");
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A mixed batch: one row deep in a context, a whole prompt, draft tokens, and a chunk in the middle of a
/// prompt.
const MIXED: [Slice; 4] = [
    Slice { sequence: 0, from: 36, to: 37 },
    Slice { sequence: 1, from: 0, to: 70 },
    Slice { sequence: 2, from: 150, to: 153 },
    Slice { sequence: 3, from: 33, to: 60 },
];

fn assert_mixed_batch(case: AttentionCase, seed: u64) {
    let Some(stream) = stream() else { return };
    let world = CudaSequences::new(case, &[37, 70, 153, 60], seed);
    world.assert_plain(&MIXED, &world.attend_after_all_before(&stream, &MIXED));
}

#[test]
fn attention_in_halves_is_the_plain_softmax_for_every_width_of_a_head() {
    for (at, head_dim) in [32, 64, 80, 96, 112, 128, 256].into_iter().enumerate() {
        assert_mixed_batch(AttentionCase { head_dim, kv_heads: 1, group: 2, ..PLAIN }, at as u64);
    }
}

#[test]
fn attention_in_halves_is_the_plain_softmax_for_every_size_of_a_group() {
    for group in [1, 3, 4, 7, 8, 9] {
        assert_mixed_batch(AttentionCase { group, ..PLAIN }, 100 + group as u64);
    }
}

#[test]
fn a_group_of_more_heads_than_a_tile_is_cut() {
    assert_mixed_batch(AttentionCase { group: 71, kv_heads: 1, ..PLAIN }, 171);
}

#[test]
fn attention_takes_and_gives_every_kind_of_numbers() {
    for (at, kind) in KINDS.into_iter().enumerate() {
        assert_mixed_batch(AttentionCase { kind, group: 3, ..PLAIN }, 200 + at as u64);
        assert_mixed_batch(
            AttentionCase { kind, group: 3, precision: KvPrecision::F32, ..PLAIN },
            210 + at as u64,
        );
    }
}

#[test]
fn attention_in_singles_is_the_plain_softmax() {
    for (at, (group, head_dim)) in [(1, 32), (4, 80), (8, 64), (2, 256)].into_iter().enumerate() {
        let case =
            AttentionCase { group, head_dim, precision: KvPrecision::F32, kind: ElementKind::F32, ..PLAIN };
        assert_mixed_batch(case, 300 + at as u64);
    }
}

#[test]
fn a_window_hides_what_lies_before_it() {
    for (at, window) in [1, 5, 16, 50, 130].into_iter().enumerate() {
        for precision in [KvPrecision::F16, KvPrecision::F32] {
            let limits = AttentionLimits { window: Some(window), cap: None };
            assert_mixed_batch(AttentionCase { limits, group: 3, precision, ..PLAIN }, 400 + at as u64);
        }
    }
}

#[test]
fn capped_scores_are_those_of_the_plain_form() {
    for (at, cap) in [1.0, 5.0, 50.0].into_iter().enumerate() {
        for precision in [KvPrecision::F16, KvPrecision::F32] {
            let limits = AttentionLimits { window: (at == 1).then_some(50), cap: Some(cap) };
            assert_mixed_batch(AttentionCase { limits, group: 3, precision, ..PLAIN }, 430 + at as u64);
        }
    }
}

#[test]
fn blocks_that_went_as_bytes_to_other_places_of_another_pool_have_the_same_bits() {
    let Some(stream) = stream() else { return };
    for (precision, head_dim) in [(KvPrecision::F16, 64), (KvPrecision::F16, 80), (KvPrecision::F32, 40)] {
        let mut world =
            CudaSequences::new(AttentionCase { precision, head_dim, group: 2, ..PLAIN }, &[70, 33], 450);
        let slices = [slice(0, 40, 70), slice(1, 32, 33)];
        let expected = world.attend_after_all_before(&stream, &slices);
        let ((mut pool, mut table), (mut other, mut table_of_other)) =
            (world.empty(&stream), world.empty(&stream));
        world.append(&stream, &mut pool, &mut table, &[slice(0, 0, 40), slice(1, 0, 32)]);
        let (mut bytes, last) = (vec![0; KvPool::block_bytes(pool.shape())], world.blocks as u32 - 1);
        for block in world.tables.iter_mut().flatten() {
            pool.read_block(&stream, *block, &mut bytes).unwrap();
            *block = last - *block;
            other.write_block(&stream, *block, &bytes).unwrap();
        }
        let moved = world.attend(&stream, &mut other, &mut table_of_other, &slices);
        assert_eq!(bits(&moved), bits(&expected), "{precision:?} {head_dim}");
    }
}

#[test]
fn long_contexts_are_joined_from_their_spans() {
    let Some(stream) = stream() else { return };
    for (at, context) in [1, 16, 17, 127, 128, 129, 1000, 4096, 5000].into_iter().enumerate() {
        let world =
            CudaSequences::new(AttentionCase { kv_heads: 1, group: 4, ..PLAIN }, &[context], 500 + at as u64);
        let last = [slice(0, context - context.min(3), context)];
        world.assert_plain(&last, &world.attend_after_all_before(&stream, &last));
    }
}

#[test]
fn spans_before_the_window_are_not_joined() {
    let Some(stream) = stream() else { return };
    for window in [1, 100, 128, 300] {
        let case = AttentionCase {
            kv_heads: 1,
            group: 4,
            limits: AttentionLimits { window: Some(window), cap: None },
            ..PLAIN
        };
        let world = CudaSequences::new(case, &[700], 600 + window as u64);
        let last = [slice(0, 693, 700)];
        world.assert_plain(&last, &world.attend_after_all_before(&stream, &last));
    }
}

#[test]
fn a_prompt_in_chunks_gives_what_it_gives_whole() {
    let Some(stream) = stream() else { return };
    for (at, precision) in [KvPrecision::F16, KvPrecision::F32].into_iter().enumerate() {
        let world =
            CudaSequences::new(AttentionCase { group: 3, precision, ..PLAIN }, &[150], 700 + at as u64);
        let (mut pool, mut table) = world.empty(&stream);
        let mut got = Vec::new();
        for (from, to) in [(0, 13), (13, 14), (14, 80), (80, 84), (84, 150)] {
            got.extend(world.attend(&stream, &mut pool, &mut table, &[slice(0, from, to)]));
        }
        world.assert_plain(&[slice(0, 0, 150)], &got);
    }
}

#[test]
fn sequences_may_share_the_blocks_of_a_prefix() {
    let Some(stream) = stream() else { return };
    let mut world = CudaSequences::new(AttentionCase { group: 3, ..PLAIN }, &[100, 90, 120], 800);
    world.share(1, 0, 64);
    world.share(2, 0, 80);
    let (mut pool, mut table) = world.empty(&stream);
    world.append(&stream, &mut pool, &mut table, &[slice(0, 0, 99), slice(1, 64, 80), slice(2, 80, 118)]);
    let batch = [slice(0, 99, 100), slice(1, 80, 90), slice(2, 118, 120)];
    let got = world.attend(&stream, &mut pool, &mut table, &batch);
    world.assert_plain(&batch, &got);
}

#[test]
fn a_rows_bits_do_not_depend_on_other_sequences() {
    let Some(stream) = stream() else { return };
    for (at, precision) in [KvPrecision::F16, KvPrecision::F32].into_iter().enumerate() {
        let world = CudaSequences::new(
            AttentionCase { group: 3, precision, ..PLAIN },
            &[37, 70, 303, 60],
            900 + at as u64,
        );
        let all = [slice(0, 36, 37), slice(1, 0, 70), slice(2, 300, 303), slice(3, 33, 60)];
        let together = world.attend_after_all_before(&stream, &all);
        let width = together.len() / (1 + 70 + 3 + 27);
        let mut rest = together.as_slice();
        for alone in all {
            let (mine, others) = rest.split_at((alone.to - alone.from) * width);
            let result = world.attend_after_all_before(&stream, &[alone]);
            assert_eq!(bits(mine), bits(&result), "{precision:?} {alone:?}");
            rest = others;
        }
    }
}

#[test]
fn numbers_beyond_the_largest_half_are_limited_to_it() {
    let Some(stream) = stream() else { return };
    let mut world = CudaSequences::new(AttentionCase { kind: ElementKind::F32, ..PLAIN }, &[40, 20], 1000);
    let stride = world.case.layout().stride();
    let value_column = 3 * world.case.head_dim;
    for (row, outlier) in [(3, 1e6), (7, -3e38), (20, 70_000.0)] {
        world.sequences[0][row * stride + value_column] = outlier;
        world.sequences[1][row / 2 * stride + value_column + 5] = outlier;
    }
    let batch = [slice(0, 39, 40), slice(1, 0, 20)];
    world.assert_plain(&batch, &world.attend_after_all_before(&stream, &batch));
}

#[test]
fn rows_of_no_sequence_are_left_alone() {
    let Some(stream) = stream() else { return };
    for precision in [KvPrecision::F16, KvPrecision::F32] {
        let world = CudaSequences::new(AttentionCase { precision, ..PLAIN }, &[5, 20], 1100);
        let (layout, stride) = (world.case.layout(), world.case.layout().stride());
        let (mut pool, mut table) = world.empty(&stream);
        // Rows 0, 4, and those from 25 on belong to no slice.
        let mut rows = vec![f32::NAN; 30 * stride];
        let mut batch = world.batch(&[slice(0, 2, 5), slice(1, 0, 20)]).1;
        world.append(&stream, &mut pool, &mut table, &[slice(0, 0, 2)]);
        (batch[0].first_row, batch[1].first_row) = (1, 5);
        rows[stride..4 * stride].copy_from_slice(&world.sequences[0][2 * stride..]);
        rows[5 * stride..25 * stride].copy_from_slice(&world.sequences[1]);
        let qkv = world.qkv(&stream, &rows);
        let width = layout.heads * layout.head_dim;
        let mut out = unwritten(&stream, world.case.kind, 30, width);
        table.upload(&stream, &batch).unwrap();
        pool.append(&stream, LAYER, &qkv, layout, &table).unwrap();
        pool.attend(&stream, LAYER, &qkv, layout, &table, AttentionLimits::default(), &mut out).unwrap();
        let out = out.to_vec(&stream).unwrap();
        world.assert_plain(&[slice(0, 2, 5)], &out[width..4 * width]);
        world.assert_plain(&[slice(1, 0, 20)], &out[5 * width..25 * width]);
        for nobodys in [0, 4, 25, 29] {
            assert!(out[nobodys * width..][..width].iter().all(|value| value.is_nan()), "row {nobodys}");
        }
    }
}

#[test]
fn a_table_tells_positions_and_what_is_longest() {
    let Some(stream) = stream() else { return };
    let world = CudaSequences::new(PLAIN, &[5, 20], 1200);
    let (_pool, mut table) = world.empty(&stream);
    let batch = world.batch(&[slice(0, 2, 5), slice(1, 19, 20)]).1;
    table.upload(&stream, &batch).unwrap();
    assert_eq!((table.rows(), table.sequences(), table.longest()), (4, 2, 20));
    let positions = table.positions().to_vec(&stream).unwrap();
    assert_eq!(positions[..4], [2, 3, 4, 19]);
    assert!(positions[4..].iter().all(|&position| position == 0) && positions.len() >= table.capacity());
}

#[test]
fn a_recorded_step_serves_every_table_of_its_shape() {
    let Some(stream) = stream() else { return };
    for precision in [KvPrecision::F16, KvPrecision::F32] {
        let world = CudaSequences::new(AttentionCase { group: 3, precision, ..PLAIN }, &[150, 300], 1300);
        let layout = world.case.layout();
        let (mut pool, mut table) = world.empty(&stream);
        world.append(&stream, &mut pool, &mut table, &[slice(0, 0, 140), slice(1, 0, 290)]);
        let step = |at: usize| [slice(0, 140 + at, 141 + at), slice(1, 290 + at, 291 + at)];
        // The first step is not captured, since the table allocates its memory.
        world.attend(&stream, &mut pool, &mut table, &step(0));
        let mut qkv = world.qkv(&stream, &world.batch(&step(1)).0);
        let mut out = unwritten(&stream, world.case.kind, 2, layout.heads * layout.head_dim);
        let shape = table.shape();
        let record = |pool: &mut KvPool, qkv: &Matrix, table: &RowTable, out: &mut Matrix| {
            Graph::capture(&stream, || {
                pool.append(&stream, LAYER, qkv, layout, table)?;
                pool.attend(&stream, LAYER, qkv, layout, table, AttentionLimits::default(), out)
            })
        };
        let mut graph = record(&mut pool, &qkv, &table, &mut out).unwrap();
        for at in 1..6 {
            let (rows, batch) = world.batch(&step(at));
            qkv.upload(&stream, 0, &rows).unwrap();
            table.upload(&stream, &batch).unwrap();
            assert_eq!(table.shape(), shape, "step {at}");
            // Another test of this process may free memory at any time.
            while graph.launch(&stream).unwrap() == Replay::Stale {
                graph = record(&mut pool, &qkv, &table, &mut out).unwrap();
            }
            world.assert_plain(&step(at), &out.to_vec(&stream).unwrap());
        }
    }
}
