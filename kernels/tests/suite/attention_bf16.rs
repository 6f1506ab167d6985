//! Attention in bf16 against its definition, bit for bit, on every set and with numbers at the ends of the
//! range.

use half::bf16;
use kernels::{
    Isa,
    attention::{KvPrecision, KvRows},
};
use rand::{Rng, rngs::StdRng};

use crate::{
    attention::{KnownSequences, PoolFill, Slice, cut},
    support::{bits, pool, random},
};

const LANES: usize = 16;
const SPAN: usize = 256;
const LOG2_E: f32 = std::f32::consts::LOG2_E;

fn rounded(x: f32) -> f32 {
    let nearest = bf16::from_f32(x).to_f32();
    if nearest.abs() < 2.0f32.powi(-54) { 0.0 } else { nearest }
}

/// Adds the products of pairs of numbers in two chains.
fn add_products(sum: f32, pairs: impl Iterator<Item = ([f32; 2], [f32; 2])>) -> f32 {
    let (mut even, mut odd) = (0.0, 0.0);
    for (a, b) in pairs {
        even = a[0].mul_add(b[0], even);
        odd = a[1].mul_add(b[1], odd);
    }
    flushed(sum + (even + odd))
}

fn flushed(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0 } else { x }
}

/// `e^x` as `simd` computes it with fused multiply-adds.
fn exp(x: f32) -> f32 {
    let x = if x > -87.0 { x.min(88.0) } else { -87.0 };
    let n = (x * LOG2_E).round_ties_even();
    let r = n.mul_add(2.121_944_4e-4, n.mul_add(-0.693_359_4, x));
    let mut p: f32 = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5.000_000_3e-1] {
        p = p.mul_add(r, c);
    }
    p.mul_add(r * r, r + 1.0) * 2.0f32.powi(n as i32)
}

fn weight(x: f32) -> f32 {
    if x.is_nan() || x < -37.0 {
        return 0.0;
    }
    let n = x.mul_add(LOG2_E, 12_582_912.0) - 12_582_912.0;
    let f = x.mul_add(-LOG2_E, n);
    let power = (-0.055_008_933f32).mul_add(f, 0.242_211_03).mul_add(f, -0.693_283).mul_add(f, 1.0);
    rounded(power * 2.0f32.powi(n as i32))
}

fn sum_of_lanes(v: [f32; LANES]) -> f32 {
    let eight: [f32; 8] = std::array::from_fn(|i| v[i] + v[i + 8]);
    let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Sums over some positions.
#[derive(Clone)]
struct PlainSum {
    largest: f32,
    weight: f32,
    values: Vec<f32>,
}

impl PlainSum {
    fn rescale(&mut self, largest: f32) {
        let by = exp(self.largest - largest);
        self.largest = largest;
        self.weight *= by;
        self.values.iter_mut().for_each(|v| *v *= by);
    }

    fn join(&mut self, later: &Self) {
        if later.largest == f32::NEG_INFINITY {
            return;
        }
        if self.largest == f32::NEG_INFINITY {
            *self = later.clone();
            return;
        }
        self.rescale(self.largest.max(later.largest));
        let by = exp(later.largest - self.largest);
        self.weight += later.weight * by;
        for (v, more) in self.values.iter_mut().zip(&later.values) {
            *v = more.mul_add(by, *v);
        }
    }
}

/// One head of a token, by the words of `attention/bf16.rs`.
struct PlainHead<'a> {
    world: &'a KnownSequences,
    sequence: usize,
    token: usize,
    head: usize,
}

impl PlainHead<'_> {
    /// A head of a row, rounded, with zeros up to whole groups.
    fn row(&self, token: usize, head: usize) -> Vec<f32> {
        let layout = self.world.layout;
        let at = token * layout.stride() + head * layout.head_dim;
        let mut row: Vec<f32> = self.world.sequences[self.sequence][at..at + layout.head_dim]
            .iter()
            .map(|&x| rounded(x))
            .collect();
        row.resize(layout.head_dim.next_multiple_of(32), 0.0);
        row
    }

    fn kv_head(&self) -> usize {
        self.head / (self.world.layout.heads / self.world.layout.kv_heads)
    }

    fn score(&self, query: &[f32], position: usize) -> f32 {
        let key = self.row(position, self.world.layout.heads + self.kv_head());
        let score = query.chunks(32).zip(key.chunks(32)).fold(0.0, |sum, (q, k)| {
            add_products(sum, q.chunks(2).zip(k.chunks(2)).map(|(q, k)| ([q[0], q[1]], [k[0], k[1]])))
        });
        self.world.limits.cap.map_or(score, |cap| (1.0 - 2.0 / (1.0 + exp(score * (2.0 / cap)))) * cap)
    }

    /// Adds the positions of a span that the token sees.
    fn add_span(&self, query: &[f32], span: usize, sum: &mut PlainSum) {
        let first = self.world.limits.window.map_or(0, |window| (self.token + 1).saturating_sub(window));
        let seen = first.max(span)..(self.token + 1).min(span + SPAN).max(span);
        if first.max(span) >= seen.end {
            return;
        }
        let scores: Vec<f32> = seen.clone().map(|position| self.score(query, position)).collect();
        let largest = scores.iter().fold(sum.largest, |largest, &score| largest.max(score));
        let mut weights = [0.0; SPAN];
        seen.clone().zip(scores).for_each(|(at, score)| weights[at - span] = weight(score - largest));
        let mut total = [0.0; LANES];
        for weights in weights.chunks(2 * LANES) {
            (0..LANES).for_each(|i| total[i] = (total[i] + weights[2 * i + 1]) + weights[2 * i]);
        }
        if largest != sum.largest {
            sum.rescale(largest);
            sum.values.iter_mut().for_each(|v| *v = flushed(*v));
        }
        sum.weight += sum_of_lanes(total);
        let layout = self.world.layout;
        for block in (seen.start / LANES * LANES..seen.end).step_by(LANES) {
            let values: Vec<_> = (block..block + LANES)
                .map(|at| {
                    let head = layout.heads + layout.kv_heads + self.kv_head();
                    if seen.contains(&at) { self.row(at, head) } else { vec![0.0; layout.head_dim] }
                })
                .collect();
            for (d, sum) in sum.values.iter_mut().enumerate() {
                *sum = add_products(
                    *sum,
                    (0..8).map(|i| {
                        let at = block - span + 2 * i;
                        ([weights[at], weights[at + 1]], [values[2 * i][d], values[2 * i + 1][d]])
                    }),
                );
            }
        }
    }

    fn out(&self) -> Vec<f32> {
        let query = self.row(self.token, self.head);
        let empty = PlainSum {
            largest: f32::NEG_INFINITY,
            weight: 0.0,
            values: vec![0.0; self.world.layout.head_dim],
        };
        let mut all = empty.clone();
        for segment in (0..=self.token).step_by(2 * SPAN) {
            let mut sum = empty.clone();
            self.add_span(&query, segment, &mut sum);
            self.add_span(&query, segment + SPAN, &mut sum);
            all.join(&sum);
        }
        let inverse = 1.0 / all.weight;
        all.values.iter().map(|v| v * inverse).collect()
    }
}

fn expected(world: &KnownSequences, sequence: usize, token: usize) -> Vec<f32> {
    (0..world.layout.heads).flat_map(|head| PlainHead { world, sequence, token, head }.out()).collect()
}

fn world(lengths: &[usize], group: usize, head_dim: usize, window: Option<usize>) -> KnownSequences {
    KnownSequences::new(lengths, group, head_dim, KvPrecision::Bf16, window)
}

/// Compares the outputs of `slices` with the definition; whole sequences are in the pool.
fn judge(world: &KnownSequences, slices: &[Slice], what: &str) {
    let wanted: Vec<f32> = slices
        .iter()
        .flat_map(|&(sequence, from, to)| (from..to).flat_map(move |token| expected(world, sequence, token)))
        .collect();
    for isa in Isa::available() {
        let mut kv = world.empty(isa, PoolFill::NotANumber);
        for (sequence, rows) in world.sequences.iter().enumerate() {
            world.append(&mut kv, isa, &[(sequence, 0, rows.len() / world.layout.stride())]);
        }
        for threads in [1, 3] {
            let got = world.attend(&kv, &mut pool(threads), isa, slices);
            assert_same(&got, &wanted, world.out_width(), &format!("{isa:?}, {threads} threads, {what}"));
        }
    }
}

/// Asserts equal bits; a NaN equals a NaN.
#[track_caller]
fn assert_same(got: &[f32], wanted: &[f32], width: usize, what: &str) {
    assert_eq!(got.len(), wanted.len());
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        assert!(
            got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan(),
            "{what}: row {}, column {}: {got:e}, not {wanted:e}",
            i / width,
            i % width
        );
    }
}

#[test]
fn every_set_gives_the_bits_of_the_definition_for_every_shape() {
    for group in [1, 3, 7, 8, 16, 20] {
        for head_dim in [8, 20, 64, 80] {
            let world = world(&[40, 7], group, head_dim, None);
            judge(&world, &[(0, 0, 40), (1, 0, 7)], &format!("group of {group}, width {head_dim}"));
        }
    }
    judge(&world(&[21], 2, 256, None), &[(0, 0, 21)], "the widest heads");
    judge(&world(&[3], 71, 64, None), &[(0, 0, 3)], "more heads than rows of a tile");
}

#[test]
fn every_set_gives_the_bits_of_the_definition_around_spans_and_behind_windows() {
    for window in [None, Some(1), Some(17), Some(100), Some(300)] {
        for cap in [None, Some(2.0)] {
            let mut world = world(&[1100], 3, 24, window);
            world.limits.cap = cap;
            for tokens in [0..2, 14..18, 254..259, 299..302, 510..530, 1022..1030, 1099..1100] {
                let what = format!("window {window:?}, cap {cap:?}, {tokens:?}");
                judge(&world, &[(0, tokens.start, tokens.end)], &what);
            }
        }
    }
}

/// Draws queries, keys and values.
type Distribution = (&'static str, [fn(&mut StdRng) -> f32; 3]);

fn plain(random: &mut StdRng) -> f32 {
    random.random_range(-1.0..1.0)
}

fn of_power(random: &mut StdRng, powers: std::ops::Range<i32>) -> f32 {
    random.random_range(-1.0f32..1.0) * 2.0f32.powi(random.random_range(powers))
}

const EXTREMES: [Distribution; 6] = [
    ("tiny values", [plain, plain, |random| of_power(random, -62..-50)]),
    (
        "tiny queries and keys",
        [|random| of_power(random, -60..-50), |random| of_power(random, -60..-50), plain],
    ),
    ("far scores", [|random| of_power(random, 0..6), |random| of_power(random, 0..5), plain]),
    ("huge scores", [|random| of_power(random, 0..70), |random| of_power(random, 0..60), plain]),
    ("huge values", [plain, plain, |random| of_power(random, 100..127)]),
    (
        "values of all sizes",
        [
            |random| of_power(random, -70..8),
            |random| of_power(random, -70..8),
            |random| f32::from_bits(random.random::<u32>() & 0xbfff_ffff),
        ],
    ),
];

#[test]
fn every_set_gives_the_bits_of_the_definition_with_extreme_numbers() {
    for seed in 0..3 {
        for (what, draws) in EXTREMES {
            let mut world = world(&[600], 3, 40, None);
            let (layout, random) = (world.layout, &mut random(seed));
            for row in world.sequences[0].chunks_mut(layout.stride()) {
                for (at, x) in row.iter_mut().enumerate() {
                    let head = at / layout.head_dim;
                    let part = usize::from(head >= layout.heads)
                        + usize::from(head >= layout.heads + layout.kv_heads);
                    *x = draws[part](random);
                }
            }
            judge(&world, &[(0, 250, 260), (0, 590, 600)], what);
        }
    }
}

#[test]
fn infinite_keys_of_later_positions_change_no_bit() {
    let mut world = world(&[300], 7, 64, None);
    let layout = world.layout;
    let wanted: Vec<_> = (285..291).map(|token| expected(&world, 0, token)).collect();
    for row in world.sequences[0].chunks_mut(layout.stride()).skip(291) {
        row[layout.heads * layout.head_dim..(layout.heads + layout.kv_heads) * layout.head_dim]
            .fill(f32::INFINITY);
    }
    for isa in Isa::available() {
        let mut kv = world.empty(isa, PoolFill::NotANumber);
        world.append(&mut kv, isa, &[(0, 0, 300)]);
        let got = world.attend(&kv, &mut pool(1), isa, &[(0, 285, 291)]);
        assert_eq!(bits(&got), bits(&wanted.concat()), "{isa:?}");
    }
}

#[test]
fn a_prompt_a_chunk_and_a_token_have_the_same_bits_on_any_number_of_threads() {
    for (group, head_dim, window) in [(7, 64, None), (20, 20, Some(300)), (1, 80, None)] {
        let world = world(&[1100], group, head_dim, window);
        let isa = Isa::best();
        let whole = world.run(&mut pool(1), isa, PoolFill::Zero, &cut(0, 0, 1100, 1100));
        for (threads, step) in [(2, 1100), (3, 1), (1, 1), (2, 100), (20, 1100), (1, 37)] {
            let got = world.run(&mut pool(threads), isa, PoolFill::NotANumber, &cut(0, 0, 1100, step));
            assert!(got == whole, "group of {group}, {step} at a time on {threads} threads");
        }
    }
}

#[test]
fn the_mean_of_equal_values_is_that_value() {
    let mut world = world(&[600], 2, 16, None);
    let layout = world.layout;
    for row in world.sequences[0].chunks_mut(layout.stride()) {
        row[(layout.heads + layout.kv_heads) * layout.head_dim..].fill(1.0);
    }
    for isa in Isa::available() {
        let mut kv = world.empty(isa, PoolFill::NotANumber);
        world.append(&mut kv, isa, &[(0, 0, 600)]);
        for (row, value) in world.attend(&kv, &mut pool(1), isa, &[(0, 0, 600)]).into_iter().enumerate() {
            assert!((value - 1.0).abs() < 1e-6, "{isa:?}: {row}: {value}");
        }
    }
}

#[test]
fn a_query_that_is_not_a_number_gives_none() {
    let mut world = world(&[20], 2, 16, None);
    world.sequences[0][0] = f32::NAN;
    let (qkv, layout) = (&world.sequences[0], world.layout);
    for isa in Isa::available() {
        let mut kv = world.empty(isa, PoolFill::Zero);
        let batch = [KvRows { first_row: 0, rows: 20, position: 0, blocks: &world.tables[0] }];
        kv.append(isa, 1, qkv, layout, &batch);
        let mut out = vec![0.0; 20 * world.out_width()];
        kv.attend(&mut pool(1), isa, 1, qkv, layout, &batch, world.limits, &[], &mut out);
        assert!(out[..16].iter().all(|x| x.is_nan()), "{isa:?}");
        assert!(out[16..].iter().all(|x| x.is_finite()), "{isa:?}");
    }
}
