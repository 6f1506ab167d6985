//! T0: the first activations are embeddings, so they reveal the prompt.

use std::collections::HashMap;

use model::{client_weights::client_base::ClientBase, forward::LinearGroup};

use crate::{
    algebra::{dot, norm, to_f64},
    executor::{CuriousExecutor, FloatRows},
    scene::site,
    subspace::OrthogonalResidual,
};

/// Candidate tokens per row if only parts of rows are visible.
const SHORTLIST: usize = 48;

/// Rows of all tokens at the first site: their embeddings, normed.
pub(crate) struct Dictionary<'a> {
    base: &'a ClientBase,
    curious: &'a CuriousExecutor,
    /// Norm of each token's embedding after the gain of the norm layer.
    lengths: Vec<f32>,
}

impl<'a> Dictionary<'a> {
    pub(crate) fn new(base: &'a ClientBase, curious: &'a CuriousExecutor) -> Self {
        let mut row = vec![0.0; base.config().hidden_size];
        let length = |token| {
            base.embedding.embed(&mut std::iter::once(token), &mut row);
            let scaled = row.iter().zip(&base.frame.norms.attention[0]).map(|(x, gain)| x * gain);
            scaled.map(|x| x * x).sum::<f32>().sqrt()
        };
        let lengths = (0..u32::try_from(base.config().vocab_size).unwrap()).map(length).collect();
        Self { base, curious, lengths }
    }

    /// For each of `rows`, the `count` tokens with the most similar rows, best first.
    pub(crate) fn nearest(&self, rows: &FloatRows, count: usize) -> Vec<Vec<u32>> {
        let (config, gains) = (self.base.config(), &self.base.frame.norms.attention[0]);
        let scaled = rows.iter().flat_map(|row| row.iter().zip(gains).map(|(x, gain)| x * gain));
        let scaled = FloatRows { width: rows.width, values: scaled.collect() };
        // The base's head is its embedding, so the executor can score all tokens with its usual product.
        let head = site(self.base, 0, LinearGroup::Head);
        let scores = self.curious.evaluate(head, &scaled, config.vocab_size);
        let best = |scores: &[f32]| {
            let cosine = |token: u32| scores[token as usize] / self.lengths[token as usize].max(1e-12);
            let mut tokens: Vec<u32> = (0..u32::try_from(config.vocab_size).unwrap()).collect();
            tokens.select_nth_unstable_by(count, |&a, &b| cosine(b).total_cmp(&cosine(a)));
            tokens.truncate(count);
            tokens.sort_by(|&a, &b| cosine(b).total_cmp(&cosine(a)));
            tokens
        };
        scores.iter().map(best).collect()
    }

    pub(crate) fn read(&self, rows: &FloatRows) -> Vec<u32> {
        self.nearest(rows, 1).into_iter().map(|tokens| tokens[0]).collect()
    }

    /// Reads the prompt from the parts of rows that `uncovered` leaves visible.
    pub(crate) fn read_parts(&self, parts: &FloatRows, uncovered: &OrthogonalResidual) -> Vec<u32> {
        let mut known: HashMap<u32, Vec<f64>> = HashMap::new();
        let read = |(part, tokens): (&[f32], Vec<u32>)| {
            let part = to_f64(part);
            let mut cosine = |token: u32| {
                let own = known.entry(token).or_insert_with(|| uncovered.of(&self.row(token)));
                dot(own, &part) / norm(own)
            };
            let scores = tokens.iter().map(|&token| (cosine(token), token));
            scores.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap().1
        };
        parts.iter().zip(self.nearest(parts, SHORTLIST)).map(read).collect()
    }

    fn row(&self, token: u32) -> Vec<f32> {
        let mut row = vec![0.0; self.base.config().hidden_size];
        self.base.embedding.embed(&mut std::iter::once(token), &mut row);
        kernels::reference::rms_norm(&row, &self.base.frame.norms.attention[0], self.base.config().norm_eps)
    }
}
