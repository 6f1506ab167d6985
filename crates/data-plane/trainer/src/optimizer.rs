//! AdamW as torch defines it: weight decay separate from the gradient (Loshchilov, Hutter 2019), moments
//! corrected for their start at zero (Kingma, Ba 2015).
//!
//! The operations and their order are those of `torch.optim.AdamW` with one tensor at a time, in f32 with
//! scalars computed in f64. A hundred steps therefore end where torch's end.

/// Hyperparameters of a step, by torch's names; each step may have others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyperparameters {
    pub learning_rate: f64,
    /// Decay rate of the moving mean of gradients.
    pub beta1: f64,
    /// Decay rate of the moving mean of squared gradients.
    pub beta2: f64,
    /// Term added to the denominator, the root of the second mean.
    pub eps: f64,
    /// Weight decay: a step multiplies the parameters by `1 - learning_rate * weight_decay` first.
    pub weight_decay: f64,
}

impl Default for Hyperparameters {
    /// Returns the default values of torch.
    fn default() -> Self {
        Self { learning_rate: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2 }
    }
}

/// Moving means of one tensor's gradients.
#[derive(Debug, Clone, PartialEq)]
pub struct Moments {
    /// Moving mean of the gradients.
    pub exp_avg: Vec<f32>,
    /// Moving mean of the squared gradients.
    pub exp_avg_sq: Vec<f32>,
}

/// State of the optimizer.
#[derive(Debug, Clone, PartialEq)]
pub struct OptimizerState {
    /// Number of steps so far.
    pub step: u64,
    /// Moments in the order of the tensors.
    pub moments: Vec<Moments>,
}

impl OptimizerState {
    /// Returns the state before the first step; `elements` are the lengths of the tensors.
    #[must_use]
    pub fn new(elements: &[usize]) -> Self {
        let zeros = |&len: &usize| Moments { exp_avg: vec![0.0; len], exp_avg_sq: vec![0.0; len] };
        Self { step: 0, moments: elements.iter().map(zeros).collect() }
    }

    /// Updates `tensors` with a step against their `gradients`.
    ///
    /// # Panics
    /// Panics if number or lengths of the tensors are not those of the state.
    pub fn step(
        &mut self,
        hyper: &Hyperparameters,
        tensors: &mut [impl AsMut<[f32]>],
        gradients: &[impl AsRef<[f32]>],
    ) {
        assert_eq!(tensors.len(), self.moments.len(), "as many tensors as before");
        assert_eq!(gradients.len(), self.moments.len(), "a gradient for each tensor");
        self.step += 1;
        let scalars = Scalars::of(hyper, self.step);
        for ((moments, tensor), gradient) in self.moments.iter_mut().zip(tensors).zip(gradients) {
            moments.step(&scalars, tensor.as_mut(), gradient.as_ref());
        }
    }
}

/// Factors of a step, computed in f64.
struct Scalars {
    decay: f32,
    gradient_share: f32,
    beta2: f32,
    square_share: f32,
    root_correction: f32,
    eps: f32,
    step_size: f32,
}

impl Scalars {
    #[expect(clippy::cast_possible_truncation, reason = "torch rounds a scalar to the tensor's type")]
    fn of(hyper: &Hyperparameters, step: u64) -> Self {
        let &Hyperparameters { learning_rate, beta1, beta2, eps, weight_decay } = hyper;
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        Self {
            decay: (1.0 - learning_rate * weight_decay) as f32,
            gradient_share: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            square_share: (1.0 - beta2) as f32,
            root_correction: correction(beta2).sqrt() as f32,
            eps: eps as f32,
            step_size: (learning_rate / correction(beta1)) as f32,
        }
    }
}

impl Moments {
    fn step(&mut self, scalars: &Scalars, tensor: &mut [f32], gradient: &[f32]) {
        assert_eq!(tensor.len(), self.exp_avg.len(), "a tensor of its old size");
        assert_eq!(gradient.len(), tensor.len(), "a gradient of the tensor's size");
        let means = self.exp_avg.iter_mut().zip(&mut self.exp_avg_sq);
        for ((value, &gradient), (mean, square)) in tensor.iter_mut().zip(gradient).zip(means) {
            *value *= scalars.decay;
            *mean = lerp(*mean, gradient, scalars.gradient_share);
            *square = *square * scalars.beta2 + scalars.square_share * gradient * gradient;
            let root = square.sqrt() / scalars.root_correction + scalars.eps;
            *value -= scalars.step_size * *mean / root;
        }
    }
}

/// Interpolates from `start` to `end` by `share`, computed from the nearer end, as torch does.
fn lerp(start: f32, end: f32, share: f32) -> f32 {
    if share < 0.5 { start + share * (end - start) } else { end - (end - start) * (1.0 - share) }
}

/// Returns the norm of all gradients as one vector; squares are summed in f64, in the order of elements.
#[must_use]
pub fn global_norm(gradients: &[impl AsRef<[f32]>]) -> f64 {
    let elements = gradients.iter().flat_map(AsRef::as_ref);
    elements.map(|&element| f64::from(element) * f64::from(element)).sum::<f64>().sqrt()
}

/// Clips `gradients` together to the norm `max_norm`, as `torch.nn.utils.clip_grad_norm_` does, and returns
/// the norm before. If the norm is not finite, the gradients are left unchanged, and the caller must not use
/// them.
#[expect(clippy::cast_possible_truncation, reason = "torch rounds a scalar to the tensor's type")]
pub fn clip_global_norm(gradients: &mut [impl AsMut<[f32]> + AsRef<[f32]>], max_norm: f64) -> f64 {
    let norm = global_norm(gradients);
    // The term is torch's and avoids a division by a norm of zero.
    let factor = max_norm / (norm + 1e-6);
    if norm.is_finite() && factor < 1.0 {
        gradients.iter_mut().flat_map(AsMut::as_mut).for_each(|element| *element *= factor as f32);
    }
    norm
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_are_clipped_together_and_only_if_they_are_long() {
        let mut gradients = vec![vec![3.0, 0.0], vec![-4.0]];
        assert!((clip_global_norm(&mut gradients, 10.0) - 5.0).abs() < 1e-12);
        assert_eq!(gradients, [vec![3.0, 0.0], vec![-4.0]]);
        clip_global_norm(&mut gradients, 1.0);
        assert!(
            (gradients[0][0] - 0.6).abs() < 1e-6 && (gradients[1][0] + 0.8).abs() < 1e-6,
            "{gradients:?}"
        );
    }

    #[test]
    fn what_is_not_finite_is_said_and_left_alone() {
        let mut gradients = vec![vec![f32::NAN, 1.0], vec![f32::INFINITY]];
        assert!(!clip_global_norm(&mut gradients, 1.0).is_finite());
        assert!(gradients[0][0].is_nan() && gradients[0][1] == 1.0);
        // A gradient whose norm exceeds f32 can still be clipped.
        let mut long = vec![vec![1e30, 1e30]];
        clip_global_norm(&mut long, 1.0);
        assert!((long[0][0] - 0.5f32.sqrt()).abs() < 1e-6, "{long:?}");
    }
}
