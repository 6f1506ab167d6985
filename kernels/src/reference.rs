//! Plain implementations of all operations in 64-bit floats, with which the tests compare the kernels.

/// Computes `out[r, o] = sum_k x[r, k] w[o, k]`.
#[must_use]
pub fn linear(x: &[f32], w: &[f32], rows: usize, outputs: usize, width: usize) -> Vec<f32> {
    let dot = |r: usize, o: usize| {
        (0..width).map(|k| f64::from(x[r * width + k]) * f64::from(w[o * width + k])).sum::<f64>()
    };
    (0..rows * outputs).map(|i| dot(i / outputs, i % outputs) as f32).collect()
}

/// Computes one output of [`linear_bf16`](crate::linear_bf16) without bias, from values that are bf16. The
/// columns are a multiple of 32.
#[must_use]
pub fn linear_bf16(x: &[f32], w: &[f32]) -> f32 {
    let add = |a: f32, b: f32| flushed(a + b);
    x.chunks(32).zip(w.chunks(32)).fold(0.0, |sum, (x, w)| {
        let (mut even, mut odd) = (0.0, 0.0);
        for (x, w) in x.chunks(2).zip(w.chunks(2)) {
            even = multiply_add(x[0], w[0], even);
            odd = multiply_add(x[1], w[1], odd);
        }
        add(sum, add(even, odd))
    })
}

/// Computes `a * b + c`, rounded once; denormals are taken and given as zero.
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    let [a, b, c] = [a, b, c].map(flushed);
    let sum = a.mul_add(b, c);
    // Whether a result is a denormal is decided after rounding to 24 bits, far from where these end.
    let scale = 2.0f32.powi(100);
    let (large, small) = if a.abs() > b.abs() { (a, b) } else { (b, a) };
    let is_tiny = sum.abs() <= f32::MIN_POSITIVE
        && c.abs() < 1.0
        && large.mul_add(small * scale, c * scale).abs() < f32::MIN_POSITIVE * scale;
    if is_tiny { 0.0f32.copysign(sum) } else { sum }
}

fn flushed(v: f32) -> f32 {
    if v.abs() < f32::MIN_POSITIVE { 0.0f32.copysign(v) } else { v }
}

/// Computes `out[r, k] = sum_o g[r, o] w[o, k]`: the gradient at the inputs of [`linear`].
#[must_use]
pub fn linear_transposed(g: &[f32], w: &[f32], rows: usize, outputs: usize, width: usize) -> Vec<f32> {
    let dot = |r: usize, k: usize| {
        (0..outputs).map(|o| f64::from(g[r * outputs + o]) * f64::from(w[o * width + k])).sum::<f64>()
    };
    (0..rows * width).map(|i| dot(i / width, i % width) as f32).collect()
}

/// Computes `out[r, o] = sum_k x[r, k] w[o, k]`, modulo 2^64.
#[must_use]
pub fn linear_ring(x: &[u64], w: &[i32], rows: usize, outputs: usize, width: usize) -> Vec<u64> {
    let dot = |r: usize, o: usize| {
        (0..width).map(|k| i128::from(x[r * width + k]) * i128::from(w[o * width + k])).sum::<i128>()
    };
    (0..rows * outputs).map(|i| dot(i / outputs, i % outputs) as u64).collect()
}

/// Computes `out[r, k] = sum_o g[r, o] w[o, k]`, modulo 2^64.
#[must_use]
pub fn linear_ring_transposed(g: &[u64], w: &[i32], rows: usize, outputs: usize, width: usize) -> Vec<u64> {
    let dot = |r: usize, k: usize| {
        (0..outputs).map(|o| i128::from(g[r * outputs + o]) * i128::from(w[o * width + k])).sum::<i128>()
    };
    (0..rows * width).map(|i| dot(i / width, i % width) as u64).collect()
}

/// Computes `x / sqrt(mean(x^2) + eps) * weight` of one row.
#[must_use]
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(&v, &w)| (f64::from(v) * scale * f64::from(w)) as f32).collect()
}

/// Computes `e^x / Σ e^x` of one row.
#[must_use]
pub fn softmax(x: &[f32]) -> Vec<f32> {
    let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = x.iter().map(|&v| (f64::from(v) - f64::from(largest)).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|power| (power / sum) as f32).collect()
}

/// Computes `gate / (1 + e^-gate) * up`.
#[must_use]
pub fn silu_mul(gate: f32, up: f32) -> f32 {
    let gate = f64::from(gate);
    (gate / (1.0 + (-gate).exp()) * f64::from(up)) as f32
}

/// Computes `gate (1 + tanh(√(2/π) (gate + 0.044715 gate³))) / 2 * up`.
#[must_use]
pub fn gelu_mul(gate: f32, up: f32) -> f32 {
    let gate = f64::from(gate);
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
    (gate / (1.0 + (-2.0 * inner).exp()) * f64::from(up)) as f32
}

/// Computes `g / (1 + e^(-1.702 g)) * (u + 1)` with `g = min(gate, limit)` and `u` as `up` within
/// `-limit..=limit`.
#[must_use]
pub fn swiglu_oai(gate: f32, up: f32, limit: f32) -> f32 {
    let (gate, up) = (f64::from(gate.min(limit)), f64::from(up.clamp(-limit, limit)));
    (gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)) as f32
}

/// Computes `cap tanh(x / cap)`.
#[must_use]
pub fn capped(x: f64, cap: f32) -> f64 {
    let cap = f64::from(cap);
    cap * (x / cap).tanh()
}

/// Computes `softmax(q · keys) values` of one query with an optional [cap](capped) on scores, and an
/// optional sink, a score without a value; `keys` and `values` are `[positions, q.len()]`.
#[must_use]
pub fn attention(q: &[f32], keys: &[f32], values: &[f32], cap: Option<f32>, sink: Option<f32>) -> Vec<f32> {
    let width = q.len();
    let dot = |key: &[f32]| key.iter().zip(q).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    let score = |key| cap.map_or(dot(key), |cap| capped(dot(key), cap));
    let scores: Vec<f64> = keys.chunks(width).map(score).collect();
    let sink = sink.map(f64::from);
    let largest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
    let total: f64 = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - largest).exp());
    (0..width)
        .map(|d| {
            let mixed: f64 = weights.iter().zip(values.chunks(width)).map(|(w, v)| w * f64::from(v[d])).sum();
            (mixed / total) as f32
        })
        .collect()
}

/// Computes `scale * B (A x)` of one row; `a` is `[rank, x.len()]`, `b` is `[outputs, rank]`.
#[must_use]
pub fn lora(x: &[f32], a: &[f32], b: &[f32], rank: usize, scale: f32) -> Vec<f32> {
    let dot = |u: &[f32], v: &[f64]| u.iter().zip(v).map(|(&p, &q)| f64::from(p) * q).sum::<f64>();
    let x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
    let shrunk: Vec<f64> = a.chunks(x.len()).map(|row| dot(row, &x)).collect();
    b.chunks(rank).map(|row| (f64::from(scale) * dot(row, &shrunk)) as f32).collect()
}
