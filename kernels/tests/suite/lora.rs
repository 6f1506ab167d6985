//! Low-rank deltas against the plain product; rows of a segment against the same rows alone.

use half::f16;
use kernels::{
    ActivationForms, Activations, Isa, ThreadPool,
    lora::{LeadingSums, LoraMatrix, LoraPrecision, LoraSegment, add_deltas},
    reference,
};

use crate::support::{activations, bits, floats, lora_matrix, norm, pool, random};

/// Below, at and above the rank block that is summed at once.
const RANKS: [usize; 6] = [1, 4, 8, 16, 17, 64];

/// Inner width: one span of columns, one block and a remainder.
const WIDTH: usize = 256 + 64 + 13;

struct TestLora {
    rank: usize,
    outputs: usize,
    scale: f32,
    a: Vec<f32>,
    b: Vec<f32>,
    matrix: LoraMatrix,
}

impl TestLora {
    fn new(rank: usize, outputs: usize, precision: LoraPrecision, each: fn(f32) -> f32) -> Self {
        let random = &mut random((1000 * rank + outputs) as u64);
        let mut numbers = |count| floats(random, count).into_iter().map(each).collect::<Vec<f32>>();
        let (a, b, scale) = (numbers(rank * WIDTH), numbers(outputs * rank), 2.0 / rank as f32);
        let matrix = lora_matrix(rank, WIDTH, outputs, scale, &a, &b, precision);
        Self { rank, outputs, scale, a, b, matrix }
    }

    fn exact(rank: usize, outputs: usize) -> Self {
        Self::new(rank, outputs, LoraPrecision::Exact, |x| x)
    }

    /// Values that 16 bits hold.
    fn halves(rank: usize, outputs: usize) -> Self {
        Self::new(rank, outputs, LoraPrecision::Exact, |x| f16::from_f32(x / 64.0).to_f32())
    }

    fn segment(&self, first_row: usize, rows: usize, column: usize) -> LoraSegment<'_> {
        LoraSegment { first_row, rows, matrix: &self.matrix, column, staged: None, head: LeadingSums::None }
    }

    /// Asserts that `out - before` is the delta of `x` within `tolerance` of the product of the norms.
    fn judge(&self, x: &[f32], before: &[f32], out: &[f32], tolerance: f64, what: &str) {
        let delta = reference::lora(x, &self.a, &self.b, self.rank, self.scale);
        let shrunk = f64::from(self.scale) * norm(x) * norm(&self.a);
        for (o, b) in self.b.chunks(self.rank).enumerate() {
            let wanted = f64::from(before[o]) + f64::from(delta[o]);
            let off = (f64::from(out[o]) - wanted).abs();
            let allowed = tolerance * (shrunk * norm(b) + f64::from(before[o].abs()));
            assert!(off <= allowed, "{what}, rank {}: output {o} is {}, not {wanted}", self.rank, out[o]);
        }
    }
}

fn whole(matrix: &LoraMatrix, rows: usize) -> LoraSegment<'_> {
    LoraSegment { first_row: 0, rows, matrix, column: 0, staged: None, head: LeadingSums::None }
}

/// Rows of activations, and of an output with previous content.
struct TestBatch {
    rows: usize,
    stride: usize,
    x: Vec<f32>,
    before: Vec<f32>,
}

impl TestBatch {
    fn random(rows: usize, stride: usize) -> Self {
        let random = &mut random(5);
        Self { rows, stride, x: floats(random, rows * WIDTH), before: floats(random, rows * stride) }
    }

    fn run(&self, pool: &mut ThreadPool, isa: Isa, segments: &[LoraSegment<'_>]) -> Vec<f32> {
        let x = self.activations(pool, isa);
        let mut out = self.before.clone();
        add_deltas(pool, isa, &x, segments, &mut out, self.stride);
        out
    }

    fn activations(&self, pool: &mut ThreadPool, isa: Isa) -> Activations {
        activations(pool, isa, &self.x, self.rows, ActivationForms::default())
    }

    fn x(&self, row: usize) -> &[f32] {
        &self.x[row * WIDTH..][..WIDTH]
    }

    fn row<'a>(&self, out: &'a [f32], row: usize) -> &'a [f32] {
        &out[row * self.stride..][..self.stride]
    }
}

#[test]
fn a_delta_is_the_plain_product_for_every_rank_and_width_of_output() {
    for isa in Isa::available() {
        for rank in RANKS {
            for outputs in [1, 15, 16, 17, 63, 64, 65, 150] {
                for adapter in [TestLora::exact(rank, outputs), TestLora::halves(rank, outputs)] {
                    let batch = TestBatch::random(7, outputs);
                    let out = batch.run(&mut pool(1), isa, &[adapter.segment(0, 7, 0)]);
                    for row in 0..7 {
                        let (before, out) = (batch.row(&batch.before, row), batch.row(&out, row));
                        adapter.judge(
                            batch.x(row),
                            before,
                            out,
                            1e-6,
                            &format!("{isa:?}, {outputs} outputs"),
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn compact_numbers_are_rounded_to_eleven_bits_and_take_half_the_memory() {
    for isa in Isa::available() {
        for rank in RANKS {
            let exact = TestLora::exact(rank, 50);
            let compact = TestLora::new(rank, 50, LoraPrecision::Compact, |x| x);
            assert_eq!(2 * compact.matrix.bytes(), exact.matrix.bytes());
            let batch = TestBatch::random(1, 50);
            let out = batch.run(&mut pool(1), isa, &[compact.segment(0, 1, 0)]);
            compact.judge(batch.x(0), &batch.before, &out, 1e-3, &format!("{isa:?}"));
        }
    }
}

#[test]
fn bf16_rounds_inputs_and_numbers_to_eight_bits_and_takes_half_the_memory() {
    for isa in Isa::available() {
        for rank in RANKS {
            let adapter = TestLora::new(rank, 50, LoraPrecision::Bf16, |x| x);
            // An odd number of columns or ranks is padded to pairs.
            assert_eq!(adapter.matrix.bytes(), 2 * (rank * (WIDTH + 1) + rank.next_multiple_of(2) * 50));
            let batch = TestBatch::random(7, 50);
            let out = batch.run(&mut pool(1), isa, &[adapter.segment(0, 7, 0)]);
            for row in 0..7 {
                let (before, out) = (batch.row(&batch.before, row), batch.row(&out, row));
                adapter.judge(batch.x(row), before, out, 1e-2, &format!("{isa:?}"));
            }
        }
    }
}

#[test]
fn numbers_that_fit_in_halves_take_half_the_memory_and_give_the_same_bits_either_way() {
    for rank in RANKS {
        let exact = TestLora::halves(rank, 50);
        let compact = TestLora::new(rank, 50, LoraPrecision::Compact, |x| f16::from_f32(x / 64.0).to_f32());
        assert_eq!(exact.matrix.bytes(), 2 * rank * (WIDTH + 50));
        let batch = TestBatch::random(3, 50);
        for isa in Isa::available() {
            let pool = &mut pool(1);
            let out = batch.run(pool, isa, &[exact.segment(0, 3, 0)]);
            assert_eq!(
                bits(&out),
                bits(&batch.run(pool, isa, &[compact.segment(0, 3, 0)])),
                "{isa:?}, rank {rank}"
            );
        }
    }
}

#[test]
fn a_matrix_b_of_zeroes_beside_any_a_changes_nothing() {
    let a = floats(&mut random(6), 8 * WIDTH);
    for precision in [LoraPrecision::Exact, LoraPrecision::Compact] {
        let matrix = lora_matrix(8, WIDTH, 50, 2.0, &a, &[0.0; 8 * 50], precision);
        let batch = TestBatch::random(4, 50);
        for isa in Isa::available() {
            let segment = whole(&matrix, 4);
            assert_eq!(batch.run(&mut pool(1), isa, &[segment]), batch.before, "{isa:?}");
        }
    }
}

#[test]
fn numbers_of_any_size_give_a_finite_delta() {
    for size in [1e-44f32, 1e-38, 1e-36, 1e-30, 1e-8, 1e8, 1e18] {
        for precision in [LoraPrecision::Exact, LoraPrecision::Compact] {
            let a: Vec<f32> = floats(&mut random(7), 4 * WIDTH).iter().map(|x| x * size).collect();
            let b = floats(&mut random(8), 50 * 4);
            let matrix = lora_matrix(4, WIDTH, 50, 1.0, &a, &b, precision);
            let batch = TestBatch::random(1, 50);
            for isa in Isa::available() {
                let segment = whole(&matrix, 1);
                let out = batch.run(&mut pool(1), isa, &[segment]);
                let delta = reference::lora(&batch.x, &a, &b, 4, 1.0);
                for ((out, before), delta) in out.iter().zip(&batch.before).zip(delta) {
                    let off = (out - (before + delta)).abs();
                    assert!(
                        off <= 2e-2 * size.max(1e-5),
                        "{isa:?}, {precision:?}, {size:e}: {out} is off by {off}"
                    );
                }
            }
        }
    }
}

/// Segments of a batch of many adapters: mixed ranks, gaps, single rows, two layers of one adapter.
struct MixedSegments {
    adapters: Vec<TestLora>,
    /// Adapter, first row, rows, column.
    places: Vec<(usize, usize, usize, usize)>,
    batch: TestBatch,
}

impl MixedSegments {
    fn new() -> Self {
        let adapters = RANKS.iter().map(|&rank| TestLora::exact(rank, 40)).collect();
        // Rows 0, 21..25 and 90 on are in no segment; columns 40..43 and 83.. belong to no layer.
        let places = vec![
            (0, 1, 1, 0),
            (1, 2, 19, 0),
            (2, 2, 19, 43),
            (4, 25, 33, 0),
            (3, 25, 33, 43),
            (5, 58, 31, 0),
            (0, 89, 1, 43),
        ];
        Self { adapters, places, batch: TestBatch::random(95, 90) }
    }

    fn segments(&self) -> Vec<LoraSegment<'_>> {
        let segment = |&(adapter, first, rows, column): &(usize, usize, usize, usize)| {
            self.adapters[adapter].segment(first, rows, column)
        };
        self.places.iter().map(segment).collect()
    }
}

#[test]
fn segments_of_mixed_ranks_in_one_call_are_each_right() {
    let mixed = MixedSegments::new();
    for isa in Isa::available() {
        let out = mixed.batch.run(&mut pool(2), isa, &mixed.segments());
        for &(adapter, first, rows, column) in &mixed.places {
            for row in first..first + rows {
                let (before, out) = (mixed.batch.row(&mixed.batch.before, row), mixed.batch.row(&out, row));
                let adapter = &mixed.adapters[adapter];
                let range = column..column + adapter.outputs;
                let what = format!("{isa:?}, row {row}");
                adapter.judge(mixed.batch.x(row), &before[range.clone()], &out[range], 1e-6, &what);
            }
        }
    }
}

#[test]
fn what_lies_in_no_segment_is_untouched_bit_for_bit() {
    let mut mixed = MixedSegments::new();
    // NaN has bits too, and -0.0 would not survive the addition of a zero.
    let (rows, stride) = (mixed.batch.rows, mixed.batch.stride);
    let mut inside = vec![false; rows * stride];
    for &(adapter, first, count, column) in &mixed.places {
        for row in first..first + count {
            inside[row * stride + column..][..mixed.adapters[adapter].outputs].fill(true);
        }
    }
    for (i, before) in mixed.batch.before.iter_mut().enumerate().filter(|(i, _)| !inside[*i]) {
        *before = if i % 2 == 0 { f32::NAN } else { -0.0 };
    }
    for isa in Isa::available() {
        let out = mixed.batch.run(&mut pool(2), isa, &mixed.segments());
        for (i, inside) in inside.iter().enumerate() {
            let changed = out[i].to_bits() != mixed.batch.before[i].to_bits();
            assert_eq!(changed, *inside, "{isa:?}: row {}, column {}", i / stride, i % stride);
        }
    }
}

#[test]
fn a_row_has_the_bits_alone_that_it_has_among_others_on_any_number_of_threads() {
    let mixed = MixedSegments::new();
    for isa in Isa::available() {
        let together = mixed.batch.run(&mut pool(1), isa, &mixed.segments());
        let on_two = mixed.batch.run(&mut pool(2), isa, &mixed.segments());
        assert_eq!(bits(&together), bits(&on_two), "{isa:?}");
        for row in 0..mixed.batch.rows {
            let own = mixed.places.iter().filter(|(_, first, rows, _)| (*first..first + rows).contains(&row));
            let segments: Vec<_> =
                own.map(|&(a, _, _, column)| mixed.adapters[a].segment(0, 1, column)).collect();
            let (x, before) =
                (mixed.batch.x(row).to_vec(), mixed.batch.row(&mixed.batch.before, row).to_vec());
            let alone = TestBatch { rows: 1, stride: mixed.batch.stride, x, before }.run(
                &mut pool(1),
                isa,
                &segments,
            );
            assert_eq!(bits(&alone), bits(mixed.batch.row(&together, row)), "{isa:?}, row {row}");
        }
    }
}

#[test]
fn no_segments_are_nothing_to_do() {
    let batch = TestBatch::random(3, 10);
    assert_eq!(batch.run(&mut pool(2), Isa::best(), &[]), batch.before);
}

#[test]
#[should_panic(expected = "the segment's rows exist")]
fn a_segment_beyond_the_batch_is_refused() {
    let adapter = TestLora::exact(4, 10);
    TestBatch::random(3, 10).run(&mut pool(1), Isa::best(), &[adapter.segment(2, 2, 0)]);
}

#[test]
#[should_panic(expected = "B's outputs lie within a row of out")]
fn a_segment_beyond_the_outputs_is_refused() {
    let adapter = TestLora::exact(4, 10);
    TestBatch::random(3, 10).run(&mut pool(1), Isa::best(), &[adapter.segment(0, 2, 1)]);
}

#[test]
#[should_panic(expected = "segments are disjoint and in order")]
fn two_segments_that_add_to_one_element_are_refused() {
    let adapter = TestLora::exact(4, 10);
    TestBatch::random(3, 10).run(
        &mut pool(1),
        Isa::best(),
        &[adapter.segment(0, 2, 0), adapter.segment(1, 2, 0)],
    );
}
