//! Reverse pass through a mixture of experts without adapters, to the inputs of router and experts.
//!
//! The forward pass saves nothing of a mixture. Routing and the experts' middle activations are computed
//! again from the residual stream, to the same bits. With `y = Σ_e w_e · down_e(m_e)` over the experts `e` of
//! a row, and `g` the gradient at `y`:
//!
//! ```text
//! d_e = g · W_down,e      gradient at m_e: w_e d_e        gradient at w_e: d_e · m_e, or g · down_e(m_e)
//! ```
//!
//! so an expert's output is needed only if the layer has a bias. A row's gradient sums experts by number,
//! then the router's share.

use kernels::{
    Activations, LinearPart, SumFrom, backward::elementwise::gate_mul_gradient, elementwise::gate_mul,
    linear_transposed,
};

use super::{
    error::TrainError, pass::Reverse, saved_activations::LayerActivations, trainable_site::TrainableSite,
};
use crate::{
    cpu::{
        Compute,
        experts::{add_rows, take_some},
    },
    forward::{ExpertRows, LinearGroup, NormSite, ReverseLayers, Routing},
    shape::experts::Experts,
};

fn rows(values: &[f32], width: usize) -> Activations {
    let mut rows = Activations::default();
    rows.reshape(0, width);
    rows.append(values);
    rows
}

fn some(from: &[f32], taken: ExpertRows<'_>, width: usize) -> Activations {
    let mut some = Activations::default();
    some.reshape(taken.rows.len(), width);
    take_some(from, taken.rows, width, some.values_mut());
    some
}

/// Returns the product of each row of `one` with that of `other`.
fn row_products(one: &[f32], other: &[f32], width: usize) -> Vec<f32> {
    let product = |(one, other): (&[f32], &[f32])| one.iter().zip(other).map(|(a, b)| a * b).sum();
    one.chunks_exact(width).zip(other.chunks_exact(width)).map(product).collect()
}

impl<B: ReverseLayers<Compute>> Reverse<'_, '_, B> {
    /// Reverses the mixture of a block and the norm before it. Returns false if no earlier site learns.
    pub(super) fn mixture(
        &mut self,
        layer: usize,
        experts: &Experts,
        notes: &LayerActivations,
    ) -> Result<bool, TrainError<B::Error>> {
        if !self.goes_below(TrainableSite::of(layer, LinearGroup::GateUp)) {
            return Ok(false);
        }
        let hidden = self.model.config.hidden_size;
        self.outputs_of_residual(NormSite::FeedForwardUpdate(layer), &notes.updates[1]);
        let mut x = std::mem::take(&mut self.buffers.x);
        self.normed(NormSite::FeedForward(layer), &notes.middle, &mut x);
        let normed = rows(&x, hidden);
        self.buffers.x = x;
        let probabilities = self.device.probabilities(self.model, layer, &normed);
        let mut routing = Routing::default();
        routing.sort(&probabilities, experts);
        let mut of_weights = vec![0.0; probabilities.len()];
        let mut sums = vec![0.0; normed.values().len()];
        for nth in 0..routing.experts() {
            let taken = routing.taken(nth);
            let gradient = self.expert(layer, experts.width, taken, &normed, &mut of_weights)?;
            add_rows(&gradient, taken.rows, hidden, &mut sums);
        }
        let of_logits = logit_gradients(&routing, &probabilities, &of_weights, experts);
        self.through_router(layer, &of_logits, &mut sums);
        self.buffers.inputs = sums;
        self.through_norm(NormSite::FeedForward(layer), &notes.middle);
        Ok(true)
    }

    /// Returns the gradient at an expert's inputs from that at the rows' updates, `buffers.outputs`. Writes
    /// the gradients at the expert's weights to `of_weights`, `[rows, experts]`.
    fn expert(
        &mut self,
        layer: usize,
        width: usize,
        taken: ExpertRows<'_>,
        normed: &Activations,
        of_weights: &mut [f32],
    ) -> Result<Vec<f32>, TrainError<B::Error>> {
        let (gate, hidden, count) =
            (self.model.config.traits.gate, self.model.config.hidden_size, taken.rows.len());
        let (up, down) = (LinearGroup::ExpertGateUp(taken.expert), LinearGroup::ExpertDown(taken.expert));
        let mut gate_up = vec![0.0; 2 * count * width];
        let x = &mut some(normed.values(), taken, hidden);
        self.base.linear(self.device, layer, up, x, &mut gate_up).map_err(TrainError::Base)?;
        let g = &mut some(self.buffers.outputs.values(), taken, hidden);
        let mut of_middle = vec![0.0; count * width];
        let back = self.base.linear_transposed(self.device, layer, down, g, &mut of_middle);
        back.map_err(TrainError::Base)?;
        let mut middle = vec![0.0; count * width];
        gate_mul(&mut self.device.pool, self.device.isa, gate, &gate_up, width, &mut middle);
        let experts = of_weights.len() * hidden / normed.values().len();
        let products = if self.model.config.traits.expert_biases {
            let mut outputs = vec![0.0; count * hidden];
            let linear = self.base.linear(self.device, layer, down, &mut rows(&middle, width), &mut outputs);
            linear.map_err(TrainError::Base)?;
            row_products(g.values(), &outputs, hidden)
        } else {
            row_products(&of_middle, &middle, width)
        };
        for (nth, (&row, &weight)) in taken.rows.iter().zip(taken.weights).enumerate() {
            of_weights[row as usize * experts + usize::from(taken.expert.0)] = products[nth];
            of_middle[nth * width..(nth + 1) * width].iter_mut().for_each(|g| *g *= weight);
        }
        let Compute { pool, isa } = &mut *self.device;
        let mut of_gate_up = Activations::default();
        of_gate_up.reshape(count, 2 * width);
        gate_mul_gradient(pool, *isa, gate, &gate_up, &of_middle, width, of_gate_up.values_mut());
        let mut gradient = vec![0.0; count * hidden];
        let back = self.base.linear_transposed(self.device, layer, up, &mut of_gate_up, &mut gradient);
        back.map_err(TrainError::Base)?;
        Ok(gradient)
    }

    /// Adds the gradient at the router's inputs to `sums`, from that at its logits.
    fn through_router(&mut self, layer: usize, of_logits: &[f32], sums: &mut [f32]) {
        let (router, experts) = self.model.router(layer).expect("a block with experts has a router");
        let part = LinearPart { matrix: &router.matrix, bias: None, column: 0 };
        let (Compute { pool, isa }, rows) = (&mut *self.device, of_logits.len() / experts.count);
        let mut gradient = vec![0.0; sums.len()];
        let out = &mut gradient;
        linear_transposed(pool, *isa, of_logits, rows, experts.count, &[part], SumFrom::Zero, out);
        sums.iter_mut().zip(&gradient).for_each(|(sum, g)| *sum += g);
    }
}

/// Returns the gradient at a router's logits from that at the weights of the selected experts.
fn logit_gradients(
    routing: &Routing,
    probabilities: &[f32],
    of_weights: &[f32],
    experts: &Experts,
) -> Vec<f32> {
    let mut weights = vec![0.0; probabilities.len()];
    for nth in 0..routing.experts() {
        let ExpertRows { expert, rows, weights: of_rows } = routing.taken(nth);
        for (&row, &weight) in rows.iter().zip(of_rows) {
            weights[row as usize * experts.count + usize::from(expert.0)] = weight;
        }
    }
    // Normalized weights do not depend on the probabilities of experts that were not selected.
    let shares = if experts.normalized { &weights[..] } else { probabilities };
    let mut gradients = Vec::with_capacity(weights.len());
    let of_rows = of_weights.chunks_exact(experts.count).zip(weights.chunks_exact(experts.count));
    for ((of_weights, weights), shares) in of_rows.zip(shares.chunks_exact(experts.count)) {
        let mean: f32 = of_weights.iter().zip(weights).map(|(g, weight)| g * weight).sum();
        gradients.extend(of_weights.iter().zip(shares).map(|(g, share)| share * (g - mean)));
    }
    gradients
}
