//! Norms, rotation and gating against their plain forms, for widths that do not fill a vector, and row by
//! row.

use kernels::{
    Isa, ThreadPool,
    elementwise::{
        Gate, Heads, Norm, Rotation, add_norm, cap_in_place, gate_mul, norm_in_place, rotate,
        softmax_in_place,
    },
    reference,
};
use rand::Rng;

use crate::support::{assert_close, bits, floats, pool, random};

/// Around one, two and many vectors.
const WIDTHS: [usize; 9] = [1, 7, 15, 16, 17, 31, 33, 100, 576];

const EPS: f32 = 1e-5;

#[test]
fn a_norm_with_an_update_adds_it_to_the_residual_first() {
    for width in WIDTHS {
        let random = &mut random(width as u64);
        let (before, update, weight) =
            (floats(random, 5 * width), floats(random, 5 * width), floats(random, width));
        let sums: Vec<f32> = before.iter().zip(&update).map(|(a, b)| a + b).collect();
        for isa in Isa::available() {
            let (mut residual, mut out) = (before.clone(), vec![0.0; before.len()]);
            let norm = Norm { weight: &weight, eps: EPS };
            add_norm(&mut pool(1), isa, &mut residual, Some(&update), norm, &mut out);
            assert_eq!(bits(&residual), bits(&sums), "{isa:?}, width {width}");
            judge_norm(&sums, &weight, &out, &format!("{isa:?}, width {width}"));
        }
    }
}

#[test]
fn a_norm_without_an_update_leaves_the_residual_alone() {
    for width in WIDTHS {
        let random = &mut random(width as u64);
        let (before, weight) = (floats(random, 5 * width), floats(random, width));
        for isa in Isa::available() {
            let (mut residual, mut out) = (before.clone(), vec![0.0; before.len()]);
            add_norm(&mut pool(1), isa, &mut residual, None, Norm { weight: &weight, eps: EPS }, &mut out);
            assert_eq!(bits(&residual), bits(&before), "{isa:?}, width {width}");
            judge_norm(&before, &weight, &out, &format!("{isa:?}, width {width}"));
        }
    }
}

fn judge_norm(x: &[f32], weight: &[f32], out: &[f32], what: &str) {
    for (x, out) in x.chunks(weight.len()).zip(out.chunks(weight.len())) {
        // The elements of a normed row are at most sqrt(width) times the weight.
        assert_close(out, &reference::rms_norm(x, weight, EPS), 1e-6 * (weight.len() as f64).sqrt(), what);
    }
}

#[test]
fn a_norm_of_zeroes_is_zero() {
    for isa in Isa::available() {
        let mut out = [1.0; 33];
        add_norm(&mut pool(1), isa, &mut [0.0; 33], None, Norm { weight: &[1.0; 33], eps: EPS }, &mut out);
        assert_eq!(out, [0.0; 33], "{isa:?}");
    }
}

type PlainGateFn = fn(f32, f32) -> f32;

const GATES: [(Gate, PlainGateFn); 3] = [
    (Gate::Silu, reference::silu_mul),
    (Gate::GeluTanh, reference::gelu_mul),
    (Gate::SwigluOai { limit: 0.75 }, |gate, up| reference::swiglu_oai(gate, up, 0.75)),
];

#[test]
fn gating_follows_the_plain_form_also_far_from_zero() {
    for width in WIDTHS {
        let random = &mut random(width as u64);
        let mut gate_up = floats(random, 6 * width);
        for gate in gate_up.chunks_mut(2 * width).flat_map(|row| &mut row[..width]) {
            *gate *= random.random_range(0.0f32..2.0).exp2().powi(6);
        }
        gate_up[0] = -200.0;
        for (isa, gate) in Isa::available().into_iter().flat_map(|isa| GATES.map(|gate| (isa, gate))) {
            let mut out = vec![f32::NAN; 3 * width];
            gate_mul(&mut pool(1), isa, gate.0, &gate_up, width, &mut out);
            for (row, out) in gate_up.chunks(2 * width).zip(out.chunks(width)) {
                for (i, &got) in out.iter().enumerate() {
                    let (opened, up) = (row[i], row[width + i]);
                    let wanted = gate.1(opened, up);
                    // A nearly closed gate is an exponential of a rounded argument.
                    let tolerance = 1e-6 * wanted.abs() + if gate.0 == Gate::Silu { 1e-30 } else { 1e-6 };
                    assert!(
                        (got - wanted).abs() <= tolerance,
                        "{isa:?}: {gate:?} of {opened} * {up} is {got}, not {wanted}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_gelu_gate_is_closed_or_open_far_from_zero() {
    for isa in Isa::available() {
        let mut out = [f32::NAN; 4];
        let gate_up = [-1e30, -200.0, 200.0, 1e30, 3.0, 3.0, 3.0, 1.0];
        gate_mul(&mut pool(1), isa, Gate::GeluTanh, &gate_up, 4, &mut out);
        assert!(out[0].abs() < 1e-6 && out[1].abs() < 1e-6, "{isa:?}: {out:?}");
        assert_eq!(out[2..], [600.0, 1e30], "{isa:?}");
    }
}

#[test]
fn a_norm_in_place_has_the_bits_of_one_to_somewhere_else() {
    for width in WIDTHS {
        let random = &mut random(width as u64);
        let (x, weight) = (floats(random, 11 * width), floats(random, width));
        let norm = Norm { weight: &weight, eps: EPS };
        for isa in Isa::available() {
            let (mut here, mut there) = (x.clone(), vec![f32::NAN; x.len()]);
            norm_in_place(&mut pool(2), isa, &mut here, norm);
            add_norm(&mut pool(1), isa, &mut x.clone(), None, norm, &mut there);
            assert_eq!(bits(&here), bits(&there), "{isa:?}, width {width}");
        }
    }
}

#[test]
fn a_cap_bends_numbers_towards_it_wherever_they_stand() {
    for cap in [0.7, 30.0] {
        let random = &mut random(11);
        let mut x: Vec<f32> = floats(random, 5000).iter().map(|x| 4.0 * cap * x).collect();
        x[..4].copy_from_slice(&[1e30, -1e30, 0.0, f32::INFINITY]);
        let wanted: Vec<f32> = x.iter().map(|&x| reference::capped(f64::from(x), cap) as f32).collect();
        for isa in Isa::available() {
            let mut got = x.clone();
            cap_in_place(&mut pool(2), isa, &mut got, cap);
            assert_close(&got, &wanted, 1e-6 * f64::from(cap), &format!("{isa:?}, cap {cap}"));
            for at in [0, 1, 17, 4095, 4096, 4999] {
                let mut alone = [x[at]];
                cap_in_place(&mut pool(1), isa, &mut alone, cap);
                assert_eq!(bits(&alone), bits(&got[at..=at]), "{isa:?}, cap {cap}, number {at}");
            }
        }
    }
}

/// Rows `[queries | keys | values]` with an angle for each row and frequency.
struct RotaryRows {
    rows: usize,
    head_dim: usize,
    /// Rotated features of a head.
    turned: usize,
    stride: usize,
    x: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Norm weights of a head, and of all heads of keys.
    weight: Vec<f32>,
    wide_weight: Vec<f32>,
}

const QUERIES: usize = 3;
const KEYS: usize = 2;

impl RotaryRows {
    fn random(rows: usize, head_dim: usize, turned: usize) -> Self {
        let random = &mut random(head_dim as u64);
        let stride = (QUERIES + 2 * KEYS) * head_dim;
        let angles: Vec<f32> = floats(random, rows * turned / 2).iter().map(|x| 3.0 * x).collect();
        Self {
            rows,
            head_dim,
            turned,
            stride,
            x: floats(random, rows * stride),
            cos: angles.iter().map(|angle| angle.cos()).collect(),
            sin: angles.iter().map(|angle| angle.sin()).collect(),
            weight: floats(random, head_dim),
            wide_weight: floats(random, KEYS * head_dim),
        }
    }

    /// Queries are normed per head and scaled, keys all at once.
    fn heads(&self) -> [Heads<'_>; 2] {
        let norm = |weight| Some(Norm { weight, eps: EPS });
        let keys = QUERIES * self.head_dim;
        [
            Heads { column: 0, count: QUERIES, norm: norm(&self.weight), scale: 0.125 },
            Heads { column: keys, count: KEYS, norm: norm(&self.wide_weight), scale: 1.0 },
        ]
    }

    fn run(&self, pool: &mut ThreadPool, isa: Isa) -> Vec<f32> {
        let mut x = self.x.clone();
        let by = Rotation { width: self.turned, cos: &self.cos, sin: &self.sin };
        rotate(pool, isa, &mut x, self.stride, self.head_dim, by, &self.heads());
        x
    }

    /// Reference: row by row, head by head, pair by pair.
    fn plain(&self) -> Vec<f32> {
        let mut x = self.x.clone();
        let half = self.turned / 2;
        for row in 0..self.rows {
            for group in self.heads() {
                let Norm { weight, eps } = group.norm.expect("a norm of a kind");
                let all = &mut x[row * self.stride + group.column..][..group.count * self.head_dim];
                for part in all.chunks_mut(weight.len()) {
                    let normed = reference::rms_norm(part, weight, eps);
                    part.copy_from_slice(&normed);
                }
                for head in 0..group.count {
                    let at = row * self.stride + group.column + head * self.head_dim;
                    let head = &mut x[at..at + self.head_dim];
                    for i in 0..half {
                        let (cos, sin) = (self.cos[row * half + i], self.sin[row * half + i]);
                        let (a, b) = (head[i], head[half + i]);
                        head[i] = (a * cos - b * sin) * group.scale;
                        head[half + i] = (b * cos + a * sin) * group.scale;
                    }
                    head[2 * half..].iter_mut().for_each(|value| *value *= group.scale);
                }
            }
        }
        x
    }
}

#[test]
fn heads_turn_by_their_rows_angles_and_values_stay() {
    let whole = [2, 6, 16, 30, 32, 34, 64, 80, 128, 256].map(|head_dim| (head_dim, head_dim));
    for (head_dim, turned) in whole.into_iter().chain([(16, 12), (80, 32), (128, 96), (34, 2)]) {
        let rotation = RotaryRows::random(5, head_dim, turned);
        let plain = rotation.plain();
        for isa in Isa::available() {
            let got = rotation.run(&mut pool(1), isa);
            assert_close(
                &got,
                &plain,
                2e-6 * (head_dim as f64).sqrt(),
                &format!("{isa:?}, {turned} features of heads of {head_dim}"),
            );
            let values = (QUERIES + KEYS) * head_dim;
            for (got, x) in got.chunks(rotation.stride).zip(rotation.x.chunks(rotation.stride)) {
                assert_eq!(bits(&got[values..]), bits(&x[values..]), "{isa:?}: values are not rotated");
            }
        }
    }
}

#[test]
fn a_row_of_many_has_the_bits_it_has_alone_whatever_works_on_it() {
    let (rows, width) = (37, 100);
    let random = &mut random(3);
    let (residual, update) = (floats(random, rows * width), floats(random, rows * width));
    let (weight, gate_up) = (floats(random, width), floats(random, 2 * rows * width));
    let norm = Norm { weight: &weight, eps: EPS };
    let normed = |pool: &mut ThreadPool, isa, rows: std::ops::Range<usize>| {
        let range = rows.start * width..rows.end * width;
        let (mut residual, mut out) = (residual[range.clone()].to_vec(), vec![0.0; range.len()]);
        add_norm(pool, isa, &mut residual, Some(&update[range]), norm, &mut out);
        bits(&out)
    };
    let gated = |pool: &mut ThreadPool, isa, rows: std::ops::Range<usize>| {
        let mut out = vec![0.0; rows.len() * width];
        gate_mul(
            pool,
            isa,
            Gate::GeluTanh,
            &gate_up[2 * width * rows.start..2 * width * rows.end],
            width,
            &mut out,
        );
        bits(&out)
    };
    for isa in Isa::available() {
        for threads in [1, 2] {
            let pool = &mut pool(threads);
            let (all_normed, all_gated) = (normed(pool, isa, 0..rows), gated(pool, isa, 0..rows));
            for row in 0..rows {
                let range = row * width..(row + 1) * width;
                assert_eq!(
                    all_normed[range.clone()],
                    normed(pool, isa, row..row + 1),
                    "{isa:?}: norm of row {row}"
                );
                assert_eq!(all_gated[range], gated(pool, isa, row..row + 1), "{isa:?}: gating of row {row}");
            }
        }
    }
}

#[test]
fn probabilities_are_those_of_the_softmax_and_a_row_has_the_bits_it_has_alone() {
    for width in WIDTHS {
        let random = &mut random(width as u64);
        let rows: Vec<f32> = floats(random, 19 * width).iter().map(|x| 20.0 * x).collect();
        for isa in Isa::available() {
            for threads in [1, 2] {
                let pool = &mut pool(threads);
                let mut all = rows.clone();
                softmax_in_place(pool, isa, &mut all, width);
                for (row, all) in rows.chunks(width).zip(all.chunks(width)) {
                    let mut alone = row.to_vec();
                    softmax_in_place(pool, isa, &mut alone, width);
                    assert_eq!(bits(all), bits(&alone), "{isa:?}, width {width}");
                    assert_close(all, &reference::softmax(row), 1e-6, &format!("{isa:?}, width {width}"));
                }
            }
        }
    }
}

#[test]
fn a_rotated_row_has_the_bits_it_has_alone() {
    let all = RotaryRows::random(19, 64, 64);
    for isa in Isa::available() {
        for threads in [1, 2] {
            let pool = &mut pool(threads);
            let together = all.run(pool, isa);
            for (row, together) in together.chunks(all.stride).enumerate() {
                let alone = RotaryRows {
                    rows: 1,
                    x: all.x[row * all.stride..][..all.stride].to_vec(),
                    cos: all.cos[row * 32..][..32].to_vec(),
                    sin: all.sin[row * 32..][..32].to_vec(),
                    weight: all.weight.clone(),
                    wide_weight: all.wide_weight.clone(),
                    ..all
                };
                assert_eq!(
                    bits(together),
                    bits(&alone.run(pool, isa)),
                    "{isa:?}, row {row} on {threads} threads"
                );
            }
        }
    }
}

#[test]
#[should_panic(expected = "an angle for each row and frequency")]
fn rows_without_angles_are_refused() {
    let by = Rotation { width: 16, cos: &[1.0; 8], sin: &[0.0; 8] };
    rotate(&mut pool(1), Isa::best(), &mut [0.0; 32], 16, 16, by, &[]);
}
