//! LoRA of the token embedding, as PEFT stores it: a column of A for each token, and all of B.

/// Low-rank factors of the embedding: `embedding += scale * B a`, where `a` is the token's column of A.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingFactors {
    rank: usize,
    scale: f32,
    /// A transposed, shape `[vocab, rank]`.
    a: Vec<f32>,
    /// B transposed, shape `[rank, hidden]`.
    b: Vec<f32>,
}

impl EmbeddingFactors {
    /// Transposes A, `[rank, vocab]`, and B, `[hidden, rank]`.
    pub(super) fn new(rank: usize, scale: f32, a: &[f32], b: &[f32]) -> Self {
        Self { rank, scale, a: transposed(a, rank), b: transposed(b, b.len() / rank) }
    }

    /// Returns the number of rows of A.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the addend to the embedding of `token`, shape `[hidden]`.
    ///
    /// # Panics
    /// If the vocabulary has no such token.
    #[must_use]
    pub fn delta(&self, token: u32) -> Vec<f32> {
        let a = &self.a[token as usize * self.rank..][..self.rank];
        let mut sums = vec![0.0; self.b.len() / self.rank];
        for (a, b) in a.iter().zip(self.b.chunks_exact(sums.len())) {
            sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
        }
        sums.iter_mut().for_each(|sum| *sum *= self.scale);
        sums
    }

    /// Returns the bytes of both matrices.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&self.a[..]) + size_of_val(&self.b[..])
    }
}

fn transposed(matrix: &[f32], rows: usize) -> Vec<f32> {
    let columns = matrix.len() / rows;
    (0..columns).flat_map(|column| matrix.iter().skip(column).step_by(columns).copied()).collect()
}
