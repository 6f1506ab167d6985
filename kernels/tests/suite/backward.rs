//! Gradients against differences of the plain forward functions in 64 bits, and bitwise equal in other
//! batches and on more threads.

use half::bf16;
use kernels::{
    Isa,
    attention::{AttentionLimits, KvPrecision, QkvLayout},
    backward::{
        attention::{AttentionInputs, SequenceRows, attention_gradient},
        elementwise::{cap_gradient, gate_mul_gradient, norm_gradient, rotate_gradient},
        lora::{DeltaGradient, FactorGradients, Factors, LoraScratch, lora_gradients},
        softmax::{LogProbability, log_probability_gradients},
    },
    elementwise::{Gate, Heads, Norm, Rotation, cap_in_place},
    reference,
};

use crate::support::{assert_close, bits, floats, pool, random};

const EPS: f32 = 1e-5;

/// Gradient at `x` of `g · forward(x)`, by central differences.
fn differences(x: &[f32], g: &[f32], forward: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f32> {
    const STEP: f64 = 1e-5;
    let mut x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
    let along = |x: &[f64]| -> f64 { forward(x).iter().zip(g).map(|(y, &g)| y * f64::from(g)).sum() };
    (0..x.len())
        .map(|i| {
            let at = x[i];
            x[i] = at + STEP;
            let above = along(&x);
            x[i] = at - STEP;
            let below = along(&x);
            x[i] = at;
            ((above - below) / (2.0 * STEP)) as f32
        })
        .collect()
}

fn norm(x: &[f64], weight: &[f32]) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
    x.iter().zip(weight).map(|(v, &w)| v * scale * f64::from(w)).collect()
}

#[test]
fn a_norms_gradient_is_what_the_norm_changes_by_and_is_added() {
    for width in [1, 7, 16, 33] {
        let random = &mut random(width as u64);
        let (x, g, weight) = (floats(random, 3 * width), floats(random, 3 * width), floats(random, width));
        let wanted = differences(&x, &g, |x| x.chunks(width).flat_map(|x| norm(x, &weight)).collect());
        for isa in Isa::available() {
            let mut gradient = vec![1.0; x.len()];
            norm_gradient(&mut pool(2), isa, &x, &g, Norm { weight: &weight, eps: EPS }, &mut gradient);
            let gradient: Vec<f32> = gradient.iter().map(|v| v - 1.0).collect();
            assert_close(&gradient, &wanted, 1e-4, &format!("{isa:?}, width {width}"));
        }
    }
}

#[test]
fn a_gates_gradient_is_what_the_gate_changes_by() {
    for width in [1, 16, 21] {
        let random = &mut random(width as u64);
        let (x, g) = (floats(random, 4 * width), floats(random, 2 * width));
        for gate in [Gate::Silu, Gate::GeluTanh, Gate::SwigluOai { limit: 0.6 }] {
            let limited = |gate_in: f64, up: f64| match gate {
                Gate::Silu | Gate::GeluTanh => (gate_in, up),
                Gate::SwigluOai { limit } => {
                    let limit = f64::from(limit);
                    (gate_in.min(limit), up.clamp(-limit, limit) + 1.0)
                }
            };
            let argument = |x: f64| match gate {
                Gate::Silu => x,
                Gate::SwigluOai { .. } => 1.702 * x,
                Gate::GeluTanh => 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3)),
            };
            let mul = |x: &[f64]| -> Vec<f64> {
                let row = |x: &[f64]| {
                    let (gates, up) = x.split_at(width);
                    let open = |(gate, up): (&f64, &f64)| {
                        let (gate, up) = limited(*gate, *up);
                        gate / (1.0 + (-argument(gate)).exp()) * up
                    };
                    gates.iter().zip(up).map(open).collect::<Vec<_>>()
                };
                x.chunks(2 * width).flat_map(row).collect()
            };
            let wanted = differences(&x, &g, mul);
            for isa in Isa::available() {
                let mut gradient = vec![f32::NAN; x.len()];
                gate_mul_gradient(&mut pool(2), isa, gate, &x, &g, width, &mut gradient);
                assert_close(&gradient, &wanted, 1e-5, &format!("{isa:?}, {gate:?}, width {width}"));
            }
        }
    }
}

#[test]
fn a_rotations_gradient_is_what_norm_rotation_and_scale_change_by() {
    for (turned, wide) in [(10, false), (10, true), (6, false), (6, true)] {
        a_rotations_gradient(turned, wide);
    }
}

/// Rotation of `turned` features of each head; queries are normed per head or all at once.
fn a_rotations_gradient(turned: usize, wide: bool) {
    let (head_dim, stride, rows) = (10, 33, 3);
    let half = turned / 2;
    let random = &mut random(3);
    let (x, g) = (floats(random, rows * stride), floats(random, rows * stride));
    let weight = floats(random, if wide { 2 * head_dim } else { head_dim });
    let angles = floats(random, rows * half);
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
    let normed = Some(Norm { weight: &weight, eps: EPS });
    let heads = [
        Heads { column: 0, count: 2, norm: normed, scale: 0.25 },
        Heads { column: 2 * head_dim, count: 1, norm: None, scale: 1.0 },
    ];
    let rotate = |x: &[f64]| -> Vec<f64> {
        let mut out = x.to_vec();
        for (row, out) in out.chunks_mut(stride).enumerate() {
            for normed in out[..2 * head_dim].chunks_mut(weight.len()) {
                let values = norm(normed, &weight);
                normed.copy_from_slice(&values);
            }
            for (head, out) in out[..3 * head_dim].chunks_mut(head_dim).enumerate() {
                let of = &heads[head / 2];
                let x = out.to_vec();
                out.iter_mut().for_each(|value| *value *= f64::from(of.scale));
                for i in 0..half {
                    let (cos, sin) = (f64::from(cos[row * half + i]), f64::from(sin[row * half + i]));
                    out[i] = (x[i] * cos - x[half + i] * sin) * f64::from(of.scale);
                    out[half + i] = (x[half + i] * cos + x[i] * sin) * f64::from(of.scale);
                }
            }
        }
        out
    };
    let wanted = differences(&x, &g, rotate);
    for isa in Isa::available() {
        let mut gradient = g.clone();
        let by = Rotation { width: turned, cos: &cos, sin: &sin };
        rotate_gradient(&mut pool(2), isa, &mut gradient, &x, stride, head_dim, by, &heads);
        assert_close(&gradient, &wanted, 1e-4, &format!("{isa:?}, {turned} features, {wide}"));
    }
}

#[test]
fn a_caps_gradient_is_what_the_cap_changes_by() {
    let (random, cap) = (&mut random(12), 1.5);
    let (x, g) = (floats(random, 50), floats(random, 50));
    let x: Vec<f32> = x.iter().map(|x| 4.0 * x).collect();
    let wanted = differences(&x, &g, |x| x.iter().map(|&x| reference::capped(x, cap)).collect());
    for isa in Isa::available() {
        let (mut capped, mut gradient) = (x.clone(), g.clone());
        cap_in_place(&mut pool(1), isa, &mut capped, cap);
        cap_gradient(&mut pool(2), isa, &capped, &mut gradient, cap);
        assert_close(&gradient, &wanted, 1e-5, &format!("{isa:?}"));
    }
}

/// Attention of one sequence, rows `[q | k | v]`, with a sink for each head or none.
fn attend(x: &[f64], layout: QkvLayout, limits: AttentionLimits, sinks: &[f32]) -> Vec<f64> {
    let window = limits.window.unwrap_or(usize::MAX);
    let QkvLayout { heads, kv_heads, head_dim } = layout;
    let rows: Vec<&[f64]> = x.chunks(layout.stride()).collect();
    let mut out = Vec::new();
    for (row, q) in rows.iter().enumerate() {
        for head in 0..heads {
            let q = &q[head * head_dim..][..head_dim];
            let of = head / (heads / kv_heads);
            let seen = &rows[(row + 1).saturating_sub(window)..=row];
            let part = |row: &[f64], first: usize| row[(first + of) * head_dim..][..head_dim].to_vec();
            let product = |row: &&[f64]| -> f64 { part(row, heads).iter().zip(q).map(|(k, q)| k * q).sum() };
            let score = |row: &&[f64]| {
                let product = product(row);
                limits.cap.map_or(product, |cap| reference::capped(product, cap))
            };
            let weights: Vec<f64> = seen.iter().map(|row| score(row).exp()).collect();
            let of_sink = sinks.get(head).map_or(0.0, |&sink| f64::from(sink).exp());
            let total: f64 = weights.iter().sum::<f64>() + of_sink;
            out.extend((0..head_dim).map(|d| {
                let values = seen.iter().map(|row| part(row, heads + kv_heads)[d]);
                values.zip(&weights).map(|(v, w)| v * w / total).sum::<f64>()
            }));
        }
    }
    out
}

/// The outputs of `sequences`, in 32 bits.
fn attended(
    qkv: &[f32],
    layout: QkvLayout,
    limits: AttentionLimits,
    sinks: &[f32],
    sequences: &[SequenceRows],
) -> Vec<f32> {
    let wide: Vec<f64> = qkv.iter().map(|&v| f64::from(v)).collect();
    let rows = |of: &SequenceRows| &wide[of.first * layout.stride()..(of.first + of.count) * layout.stride()];
    sequences.iter().flat_map(|of| attend(rows(of), layout, limits, sinks)).map(|v| v as f32).collect()
}

#[test]
fn the_gradient_of_attention_is_what_attention_changes_by() {
    for (heads, kv_heads, head_dim) in [(1, 1, 4), (4, 2, 6), (3, 1, 18)] {
        let layout = QkvLayout { heads, kv_heads, head_dim };
        let cases = [
            (None, None, 1, false),
            (None, None, 9, false),
            (Some(3), None, 9, false),
            (Some(5), Some(0.5), 9, false),
            (None, Some(2.0), 4, false),
            (None, None, 9, true),
            (Some(3), None, 9, true),
        ];
        for (window, cap, tokens, has_sinks) in cases {
            let limits = AttentionLimits { window, cap };
            let sinks = if has_sinks { &[0.5, -1.0, 3.0, -60.0][..heads] } else { &[] };
            let random = &mut random((heads * tokens) as u64);
            let mut rounded = |len| floats(random, len).iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
            let [qkv, g]: [Vec<f32>; 2] =
                [tokens * layout.stride(), tokens * heads * head_dim].map(&mut rounded);
            let sequences = [SequenceRows { first: 0, count: tokens }];
            let wanted = differences(&qkv, &g, |x| attend(x, layout, limits, sinks));
            let out = attended(&qkv, layout, limits, sinks, &sequences);
            for (precision, tolerance) in [(KvPrecision::F32, 2e-5), (KvPrecision::Bf16, 1e-2)] {
                let from = AttentionInputs { qkv: &qkv, layout, precision, limits, sinks, out: &out };
                for isa in Isa::available() {
                    let mut gradient = vec![f32::NAN; qkv.len()];
                    attention_gradient(&mut pool(2), isa, from, &sequences, &g, &mut gradient);
                    let what = format!("{isa:?}, {precision:?}, {layout:?}, {limits:?}, {sinks:?}, {tokens}");
                    assert_close(&gradient, &wanted, tolerance, &what);
                }
            }
        }
    }
}

#[test]
fn a_sequences_gradient_does_not_depend_on_its_company_nor_on_threads() {
    let layout = QkvLayout { heads: 4, kv_heads: 2, head_dim: 8 };
    let random = &mut random(9);
    let (counts, limits) = ([130, 1, 70], AttentionLimits { window: Some(50), cap: Some(3.0) });
    let rows: usize = counts.iter().sum();
    let (qkv, g) = (floats(random, rows * layout.stride()), floats(random, rows * 32));
    let mut first = 0;
    let sequences = counts.map(|count| {
        first += count;
        SequenceRows { first: first - count, count }
    });
    let sinks: &[f32] = &[0.5, -1.0, 3.0, -60.0];
    let out = attended(&qkv, layout, limits, sinks, &sequences);
    for precision in [KvPrecision::F16, KvPrecision::Bf16] {
        let gradient = |isa: Isa, threads: usize, rows: std::ops::Range<usize>, of: &[SequenceRows]| {
            let part = |values: &[f32], width: usize| values[rows.start * width..rows.end * width].to_vec();
            let (qkv, g, out) = (part(&qkv, layout.stride()), part(&g, 32), part(&out, 32));
            let from = AttentionInputs { qkv: &qkv, layout, precision, limits, sinks, out: &out };
            let mut gradient = vec![0.0; qkv.len()];
            attention_gradient(&mut pool(threads), isa, from, of, &g, &mut gradient);
            gradient
        };
        let all = gradient(Isa::best(), 1, 0..rows, &sequences);
        // Each set that fuses multiply and add gives the same bits, the matrix unit included.
        for isa in Isa::available().into_iter().filter(|&isa| isa != Isa::Portable) {
            assert_eq!(bits(&all), bits(&gradient(isa, 2, 0..rows, &sequences)), "{isa:?}, {precision:?}");
        }
        for of in sequences {
            let rows = of.first..of.first + of.count;
            let alone = gradient(Isa::best(), 2, rows, &[SequenceRows { first: 0, count: of.count }]);
            let stride = layout.stride();
            assert_eq!(bits(&alone), bits(&all[of.first * stride..(of.first + of.count) * stride]));
        }
    }
}

#[test]
fn the_gradient_is_that_of_the_keys_and_values_that_were_kept() {
    let layout = QkvLayout { heads: 4, kv_heads: 2, head_dim: 8 };
    let random = &mut random(10);
    let rows = 20;
    let (qkv, g) = (floats(random, rows * layout.stride()), floats(random, rows * 32));
    let mut kept = qkv.clone();
    for row in kept.chunks_mut(layout.stride()) {
        for head in row[4 * 8..].chunks_mut(8) {
            let largest = head.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            head.iter_mut().for_each(|x| *x = (*x * (127.0 / largest)).round_ties_even() * (largest / 127.0));
        }
    }
    let sequences = [SequenceRows { first: 0, count: rows }];
    let limits = AttentionLimits::default();
    let out = attended(&kept, layout, limits, &[], &sequences);
    let gradient = |qkv: &[f32], precision: KvPrecision| {
        let from = AttentionInputs { qkv, layout, precision, limits, sinks: &[], out: &out };
        let mut gradient = vec![0.0; qkv.len()];
        attention_gradient(&mut pool(1), Isa::best(), from, &sequences, &g, &mut gradient);
        gradient
    };
    // In bf16 queries are rounded too.
    let in_bf16: Vec<f32> = qkv.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    let of_bf16 = gradient(&in_bf16, KvPrecision::Bf16);
    assert_eq!(bits(&gradient(&qkv, KvPrecision::Bf16)), bits(&of_bf16));
    let of_kept = gradient(&kept, KvPrecision::F32);
    assert_eq!(bits(&gradient(&qkv, KvPrecision::Int8)), bits(&of_kept));
    assert_ne!(bits(&gradient(&qkv, KvPrecision::F32)), bits(&of_kept));
}

struct DeltaCase {
    rank: usize,
    inputs: usize,
    outputs: usize,
    counts: Vec<usize>,
}

struct DeltaInputs {
    x: Vec<f32>,
    g: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
    stride: usize,
    column: usize,
}

const SCALE: f32 = 0.5;

impl DeltaCase {
    fn rows(&self) -> usize {
        self.counts.iter().sum()
    }

    fn numbers(&self) -> DeltaInputs {
        let random = &mut random((self.rank * self.inputs) as u64);
        let (rows, column) = (self.rows(), 5);
        let stride = self.outputs + 9;
        DeltaInputs {
            x: floats(random, rows * self.inputs),
            g: floats(random, rows * stride),
            a: floats(random, self.rank * self.inputs),
            b: floats(random, self.outputs * self.rank),
            stride,
            column,
        }
    }

    /// Gradients at A, B and x, of sequences in batches of `together`.
    fn gradients(&self, isa: Isa, threads: usize, together: usize, of: &DeltaInputs) -> [Vec<f32>; 3] {
        let (mut a, mut b) = (vec![0.0; of.a.len()], vec![0.0; of.b.len()]);
        let mut gx = vec![0.0; of.x.len()];
        let (mut first, mut scratch) = (0, LoraScratch::default());
        for counts in self.counts.chunks(together) {
            let rows: usize = counts.iter().sum();
            let mut row = 0;
            let place = |&count: &usize| {
                row += count;
                SequenceRows { first: row - count, count }
            };
            let sequences: Vec<SequenceRows> = counts.iter().map(place).collect();
            let (from, to) = (first * self.inputs, (first + rows) * self.inputs);
            lora_gradients(
                &mut pool(threads),
                isa,
                Factors { rank: self.rank, scale: SCALE, a: &of.a, b: &of.b },
                DeltaGradient {
                    x: &of.x[from..to],
                    g: &of.g[first * of.stride..],
                    stride: of.stride,
                    column: of.column,
                },
                &sequences,
                &mut scratch,
                &mut FactorGradients { a: &mut a, b: &mut b },
                Some(&mut gx[from..to]),
            );
            first += rows;
        }
        [a, b, gx]
    }
}

/// Product `scale * B (A x)` of all rows.
fn delta(case: &DeltaCase, x: &[f64], a: &[f64], b: &[f64]) -> Vec<f64> {
    let dot = |u: &[f64], v: &[f64]| u.iter().zip(v).map(|(u, v)| u * v).sum::<f64>();
    let row = |x: &[f64]| {
        let shrunk: Vec<f64> = a.chunks(case.inputs).map(|a| dot(a, x)).collect();
        b.chunks(case.rank).map(|b| f64::from(SCALE) * dot(b, &shrunk)).collect::<Vec<_>>()
    };
    x.chunks(case.inputs).flat_map(row).collect()
}

#[test]
fn gradients_of_a_low_rank_delta_are_what_it_changes_by() {
    for (rank, inputs, outputs) in [(1, 3, 2), (3, 17, 5), (8, 20, 33)] {
        let case = DeltaCase { rank, inputs, outputs, counts: vec![3, 1, 2] };
        let of = case.numbers();
        let g: Vec<f32> =
            of.g.chunks(of.stride).flat_map(|row| row[of.column..of.column + outputs].to_vec()).collect();
        let wide = |values: &[f32]| values.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
        let (x, a, b) = (wide(&of.x), wide(&of.a), wide(&of.b));
        let wanted = [
            differences(&of.a, &g, |a| delta(&case, &x, a, &b)),
            differences(&of.b, &g, |b| delta(&case, &x, &a, b)),
            differences(&of.x, &g, |x| delta(&case, x, &a, &b)),
        ];
        for isa in Isa::available() {
            let got = case.gradients(isa, 2, 3, &of);
            for (got, wanted) in got.iter().zip(&wanted) {
                assert_close(got, wanted, 1e-5, &format!("{isa:?}, rank {rank}"));
            }
        }
    }
}

#[test]
fn gradients_of_a_low_rank_delta_do_not_depend_on_batches_nor_on_threads() {
    let case = DeltaCase { rank: 5, inputs: 200, outputs: 400, counts: vec![130, 1, 1, 64, 70] };
    let of = case.numbers();
    for isa in Isa::available() {
        let all = case.gradients(isa, 1, 5, &of);
        for (threads, together) in [(2, 5), (1, 1), (2, 2)] {
            let others = case.gradients(isa, threads, together, &of);
            assert!(
                all.iter().zip(&others).all(|(a, b)| bits(a) == bits(b)),
                "{isa:?}, {threads}, {together}"
            );
        }
    }
}

#[test]
fn the_gradient_of_a_log_probability_is_the_token_less_its_probability() {
    let (vocabulary, tokens) = (37, [0u32, 36, 5]);
    let random = &mut random(1);
    let logits = floats(random, tokens.len() * vocabulary);
    let g = [1.0, -0.25, 0.0];
    let log_sum = |row: &[f64]| row.iter().map(|v| v.exp()).sum::<f64>().ln();
    let log_probabilities = |x: &[f64]| -> Vec<f64> {
        x.chunks(vocabulary).zip(tokens).map(|(row, token)| row[token as usize] - log_sum(row)).collect()
    };
    let wanted = differences(&logits, &g, log_probabilities);
    let of: Vec<LogProbability> = logits
        .chunks(vocabulary)
        .zip(tokens)
        .zip(g)
        .map(|((row, token), gradient)| {
            let row: Vec<f64> = row.iter().map(|&v| f64::from(v)).collect();
            LogProbability { token, log_sum: log_sum(&row) as f32, gradient }
        })
        .collect();
    for isa in Isa::available() {
        let mut got = logits.clone();
        log_probability_gradients(&mut pool(2), isa, &mut got, vocabulary, &of);
        assert_close(&got, &wanted, 1e-6, &format!("{isa:?}"));
    }
}
