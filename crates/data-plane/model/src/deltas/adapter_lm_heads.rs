//! Logits of adapters with their own head, or own rows of it, computed on the host for every device.
//!
//! Activations enter unrounded for every base precision, and the order of sums is fixed by the weights, so
//! the bits are the same by every route.

use kernels::{Activations, LinearPart, linear_unrounded};

use crate::{
    adapter::{SavedMatrix, TokenRows},
    cpu::Compute,
    deltas::adapter_rows::{AdapterRows, AdapterRun},
};

#[derive(Debug)]
struct AdapterLmHead<'a> {
    head: &'a SavedMatrix,
    rows: Vec<usize>,
}

impl AdapterRows {
    pub(crate) fn have_own_heads(&self) -> bool {
        self.head_rows.iter().any(|run| head_of(run).is_some() || rows_of(run).is_some())
    }

    /// Computes the logits of tokens with own rows in the head, `inputs` as for
    /// [`own_logits`](Self::own_logits). `put` takes the row with its tokens and their logits.
    ///
    /// # Errors
    /// The errors of `put`.
    pub(crate) fn token_logits<E>(
        &self,
        inputs: &[f32],
        width: usize,
        mut put: impl FnMut(usize, &[(usize, f32)]) -> Result<(), E>,
    ) -> Result<(), E> {
        for run in &self.head_rows {
            let Some(own) = rows_of(run) else { continue };
            for row in run.first_row..run.first_row + run.rows {
                let x = &inputs[row * width..][..width];
                let logits: Vec<_> =
                    own.iter().map(|(token, weights)| (token as usize, dot(weights, x))).collect();
                put(row, &logits)?;
            }
        }
        Ok(())
    }

    /// Computes the logits of rows whose adapter has its own head and passes each row's logits to `put`.
    /// `inputs` are those of all rows at the head, `[rows, hidden]`. A head is read once for all of its rows.
    ///
    /// # Errors
    /// The errors of `put`.
    pub(crate) fn own_logits<E>(
        &self,
        compute: &mut Compute,
        inputs: &[f32],
        mut put: impl FnMut(usize, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut x, mut logits) = (Activations::default(), Vec::new());
        for AdapterLmHead { head, rows } in self.own_heads() {
            let weights = head.weights();
            let (outputs, width) = (weights.rows(), weights.columns());
            x.reshape(0, width);
            rows.iter().for_each(|row| x.append(&inputs[row * width..][..width]));
            logits.resize(rows.len() * outputs, 0.0);
            let part = LinearPart { matrix: weights, bias: None, column: 0 };
            linear_unrounded(&mut compute.pool, compute.isa, &x, &[part], &mut logits, outputs);
            for (row, logits) in rows.iter().zip(logits.chunks_exact(outputs)) {
                put(*row, logits)?;
            }
        }
        Ok(())
    }

    fn own_heads(&self) -> Vec<AdapterLmHead<'_>> {
        let mut heads: Vec<AdapterLmHead<'_>> = Vec::new();
        for run in self.head_rows.iter().filter(|run| run.rows > 0) {
            let Some(head) = head_of(run) else { continue };
            let rows = run.first_row..run.first_row + run.rows;
            match heads.iter_mut().find(|known| known.head.is(head)) {
                Some(known) => known.rows.extend(rows),
                None => heads.push(AdapterLmHead { head, rows: rows.collect() }),
            }
        }
        heads
    }
}

fn head_of(run: &AdapterRun) -> Option<&SavedMatrix> {
    run.adapter.vocabulary()?.own_head()
}

fn rows_of(run: &AdapterRun) -> Option<&TokenRows> {
    run.adapter.vocabulary()?.head_rows()
}

/// Returns the dot product, summed in 64 bits in the order of the elements.
#[expect(clippy::cast_possible_truncation, reason = "logits have 32 bits")]
fn dot(weights: &[f32], x: &[f32]) -> f32 {
    weights.iter().zip(x).map(|(weight, x)| f64::from(*weight) * f64::from(*x)).sum::<f64>() as f32
}
