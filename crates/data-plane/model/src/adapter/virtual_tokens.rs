//! Virtual tokens before a prompt, in memory: keys and values in each layer, or embeddings.

/// Keys and values of virtual tokens (prefix tuning). The keys are not rotated, so they do not depend on
/// position. A prompt's first token has the position after the virtual tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Prefix {
    /// Number of virtual tokens.
    pub tokens: usize,
    /// Transformer blocks of the model.
    pub layers: usize,
    /// Elements of all key heads of a token.
    pub width: usize,
    /// Key heads, then value heads, `[tokens, layers, 2, width]`.
    pub values: Vec<f32>,
}

impl Prefix {
    /// Returns keys and values of a virtual token in a layer, `[2, width]`.
    ///
    /// # Panics
    ///
    /// If there is no such token or layer.
    #[must_use]
    pub fn keys_and_values(&self, token: usize, layer: usize) -> &[f32] {
        let width = 2 * self.width;
        &self.values[(token * self.layers + layer) * width..][..width]
    }

    /// Returns mutable keys and values of each virtual token, by layer.
    pub(crate) fn by_layer_mut(&mut self) -> Vec<Vec<&mut [f32]>> {
        let mut layers: Vec<Vec<_>> = (0..self.layers).map(|_| Vec::with_capacity(self.tokens)).collect();
        for token in self.values.chunks_exact_mut(self.layers * 2 * self.width) {
            for (layer, values) in layers.iter_mut().zip(token.chunks_exact_mut(2 * self.width)) {
                layer.push(values);
            }
        }
        layers
    }

    /// Returns the bytes of all keys and values.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&self.values[..])
    }
}

/// Embeddings of virtual tokens (prompt tuning), which go through all layers like those of a prompt's tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptEmbeddings {
    /// Number of virtual tokens.
    pub tokens: usize,
    /// Whether the embeddings are scaled like those of tokens, in a model that scales embeddings.
    pub is_scaled: bool,
    /// Values of shape `[tokens, hidden]`.
    pub values: Vec<f32>,
}

impl PromptEmbeddings {
    /// Returns the embedding of a virtual token, shape `[hidden]`.
    ///
    /// # Panics
    ///
    /// If there is no such token.
    #[must_use]
    pub fn row(&self, token: usize) -> &[f32] {
        let hidden = self.values.len() / self.tokens;
        &self.values[token * hidden..][..hidden]
    }

    /// Returns the bytes of all embeddings.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&self.values[..])
    }
}
