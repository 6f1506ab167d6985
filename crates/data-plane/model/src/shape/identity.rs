//! Identity of a base. Adapters, keys and values of one base are useless with another.
//!
//! The identity covers everything that outputs depend on: the configuration, every complete tensor, and the
//! sources of tokenizer and chat template. Files of many gigabytes need not be read twice: loaders read
//! through [`HashedWeights`], which hashes each tensor on the reading thread.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, PoisonError},
};

use kernels::TensorType;
use model_files::text_hash::TextHash;

use crate::shape::{
    config::ModelConfig,
    layout::{block_weights, router, router_bias, sinks, tensor_shape},
    source::{Target, Tensor, TensorId, WeightSource},
};

/// Domain and version of the identity hash.
pub(crate) const CONTEXT: &str = "holobiont base identity 2";

/// A source that can compute the identity of its base.
pub trait HasIdentity: WeightSource {
    /// Returns the identity of the base with the given text hash; reads all tensors not read before.
    fn identity(&self, text: TextHash) -> [u8; 32];
}

/// Weights whose tensors are hashed on their first read, on the reading thread.
#[derive(Debug)]
pub struct HashedWeights<S> {
    source: S,
    hashes: Hashes<TensorId>,
}

impl<S: WeightSource> HashedWeights<S> {
    /// Wraps `source`, of which nothing has been read yet.
    pub fn new(source: S) -> Self {
        Self { source, hashes: Hashes::default() }
    }
}

impl<S: WeightSource> WeightSource for HashedWeights<S> {
    fn config(&self) -> &ModelConfig {
        self.source.config()
    }

    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>> {
        let tensor = self.source.tensor(id)?;
        self.hashes.of(&id, &tensor.data);
        Some(tensor)
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        self.source.kind(id)
    }

    fn release(&self, id: TensorId) {
        self.source.release(id);
    }

    fn unchanged(&self) -> bool {
        self.source.unchanged()
    }
}

impl<S: WeightSource> HasIdentity for HashedWeights<S> {
    fn identity(&self, text: TextHash) -> [u8; 32] {
        let mut identity = Identity::new(text);
        let config = self.source.config();
        identity.add(&format!("{config:?}"));
        for id in every_tensor(config) {
            // A tensor that was read has been released, so its known hash avoids a second read.
            let hash = self.hashes.known(&id).or_else(|| {
                let hash = self.source.tensor(id).map(|tensor| self.hashes.of(&id, &tensor.data));
                self.source.release(id);
                hash
            });
            let [rows, cols] = tensor_shape(config, id);
            if let Some(hash) = hash {
                identity.add_tensor(&format!("{id:?} {:?} {rows} {cols}", self.source.kind(id)), hash);
            }
        }
        identity.finish()
    }
}

fn every_tensor(config: &ModelConfig) -> impl Iterator<Item = TensorId> {
    let norms = [
        TensorId::AttentionNorm,
        TensorId::FeedForwardNorm,
        TensorId::QueryNorm,
        TensorId::KeyNorm,
        TensorId::AttentionUpdateNorm,
        TensorId::FeedForwardUpdateNorm,
    ];
    let block = move |layer| {
        let linear = move |weight| match weight {
            TensorId::Weight(_, target) => [Some(weight), Some(TensorId::Bias(layer, target))],
            TensorId::Expert(_, expert, part) if config.traits.expert_biases => {
                [Some(weight), Some(TensorId::ExpertBias(layer, expert, part))]
            }
            _ => [Some(weight), None],
        };
        let linear = block_weights(config, layer).flat_map(linear).flatten();
        let routing = router(config, layer).into_iter().chain(router_bias(config, layer));
        norms.map(|norm| norm(layer)).into_iter().chain(sinks(config, layer)).chain(routing).chain(linear)
    };
    let head = Target::LmHead;
    let ends =
        [TensorId::Weight(0, head), TensorId::Bias(0, head), TensorId::TokenEmbedding, TensorId::OutputNorm];
    (0..config.layers).flat_map(block).chain(ends)
}

#[derive(Debug)]
pub(crate) struct Hashes<K>(Mutex<HashMap<K, blake3::Hash>>);

impl<K> Default for Hashes<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Clone + Eq + Hash> Hashes<K> {
    /// Returns the hash of `key`'s data, if it is known.
    pub(crate) fn known(&self, key: &K) -> Option<blake3::Hash> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(key).copied()
    }

    pub(crate) fn of(&self, key: &K, data: &[u8]) -> blake3::Hash {
        self.known(key).unwrap_or_else(|| {
            // Hashing happens outside the lock, so threads hash different tensors in parallel.
            let hash = blake3::hash(data);
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key.clone(), hash);
            hash
        })
    }
}

pub(crate) struct Identity(blake3::Hasher);

impl Identity {
    pub(crate) fn new(text: TextHash) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
        hasher.update(&text.0);
        Self(hasher)
    }

    pub(crate) fn add(&mut self, said: &str) {
        self.0.update(&(said.len() as u64).to_le_bytes()).update(said.as_bytes());
    }

    pub(crate) fn add_tensor(&mut self, shape: &str, hash: blake3::Hash) {
        self.add(shape);
        self.0.update(hash.as_bytes());
    }

    pub(crate) fn finish(&self) -> [u8; 32] {
        *self.0.finalize().as_bytes()
    }
}
