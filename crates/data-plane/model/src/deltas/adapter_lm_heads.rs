//! Logits of adapters with their own head, computed on the host for every device.
//!
//! Activations enter unrounded for every base precision, and the order of sums is fixed by the weights, so
//! the bits are the same by every route.

use kernels::{Activations, LinearPart, linear_unrounded};

use crate::{
    adapter::SavedMatrix,
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
        self.head_rows.iter().any(|run| head_of(run).is_some())
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
    run.adapter.vocabulary()?.head.as_ref()
}
