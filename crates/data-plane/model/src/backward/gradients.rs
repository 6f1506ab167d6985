//! Gradients of an adapter, in the same layout as its weights.

use std::sync::Arc;

use crate::adapter::{LoraModule, MethodWeights, Scales};

/// Gradient sums, one for each value of an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients(pub(super) MethodWeights);

impl Gradients {
    /// Returns zero gradients for the weights `method`.
    #[must_use]
    pub fn zero(method: &MethodWeights) -> Self {
        let mut gradients = Self(method.clone());
        gradients.clear();
        gradients
    }

    /// Sets all sums to zero.
    pub fn clear(&mut self) {
        self.0.tensors_mut().into_iter().for_each(|tensor| tensor.fill(0.0));
    }

    /// Returns the sums by tensor, in the order of `MethodWeights`.
    #[must_use]
    pub fn tensors(&self) -> Vec<&[f32]> {
        self.0.tensors()
    }

    /// Returns mutable sums by tensor, for scaling.
    pub fn tensors_mut(&mut self) -> Vec<&mut [f32]> {
        self.0.tensors_mut()
    }
}

impl MethodWeights {
    /// Returns all values by tensor: A and B of each low-rank layer, each scaling vector, the prefix or the
    /// prompt.
    #[must_use]
    pub fn tensors(&self) -> Vec<&[f32]> {
        match self {
            Self::Lora(modules) | Self::Activated(modules, _) => {
                modules.iter().flat_map(|module| [&module.a[..], &module.b[..]]).collect()
            }
            Self::Ia3(scales) => scales.vectors().iter().map(|vector| &vector.values[..]).collect(),
            Self::Prefix(prefix) => vec![&prefix.values[..]],
            Self::Prompt(prompt) => vec![&prompt.values[..]],
        }
    }

    /// Returns mutable values by tensor, in the order of [`tensors`](Self::tensors).
    pub fn tensors_mut(&mut self) -> Vec<&mut [f32]> {
        match self {
            Self::Lora(modules) | Self::Activated(modules, _) => {
                modules.iter_mut().flat_map(|module| [&mut module.a[..], &mut module.b[..]]).collect()
            }
            Self::Ia3(scales) => {
                let vectors = Arc::make_mut(scales).vectors_mut();
                vectors.iter_mut().map(|vector| &mut vector.values[..]).collect()
            }
            Self::Prefix(prefix) => vec![&mut Arc::make_mut(prefix).values[..]],
            Self::Prompt(prompt) => vec![&mut Arc::make_mut(prompt).values[..]],
        }
    }

    pub(super) fn as_lora(&self) -> &[LoraModule] {
        if let Self::Lora(modules) | Self::Activated(modules, _) = self { modules } else { &[] }
    }

    pub(super) fn as_scales(&self) -> Option<&Scales> {
        if let Self::Ia3(scales) = self { Some(scales) } else { None }
    }
}
