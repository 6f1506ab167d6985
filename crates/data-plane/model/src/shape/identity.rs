//! What tells one base from another: adapters, keys and values of one are worth nothing with the other.
//!
//! It covers all that answers depend on: the configuration, every tensor whole, norms and biases too, and what tokenizer
//! and chat template are made of. Files of many gigabytes are not read twice for it: a loader reads through [`HashedWeights`],
//! which hashes each tensor on the thread that reads it.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, PoisonError},
};

use kernels::TensorType;
use model_files::text_hash::TextHash;

use crate::shape::{
    config::ModelConfig,
    layout::{block_weights, router, tensor_shape},
    source::{Target, Tensor, TensorId, WeightSource},
};

/// What an identity is a hash of, and in which form.
pub(crate) const CONTEXT: &str = "holobiont base identity 2";

/// A source that knows which base its weights are.
pub trait Identified: WeightSource {
    /// The identity of the base, beside this text. Reads what has not been read yet.
    fn identity(&self, text: TextHash) -> [u8; 32];
}

/// Weights that are hashed as they are read, each once, by whichever thread reads them first.
#[derive(Debug)]
pub struct HashedWeights<S> {
    source: S,
    hashes: Hashes<TensorId>,
}

impl<S: WeightSource> HashedWeights<S> {
    /// The weights of `source`, of which nothing has been read.
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

impl<S: WeightSource> Identified for HashedWeights<S> {
    fn identity(&self, text: TextHash) -> [u8; 32] {
        let mut identity = Identity::new(text);
        let config = self.source.config();
        identity.add(&format!("{config:?}"));
        for id in every_tensor(config) {
            // What has been read was given back, and would be read from the file once more: its hash is known.
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

/// Every tensor that a model of this shape may have.
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
            _ => [Some(weight), None],
        };
        let linear = block_weights(config, layer).flat_map(linear).flatten();
        norms.map(|norm| norm(layer)).into_iter().chain(router(config, layer)).chain(linear)
    };
    let head = Target::LmHead;
    let ends =
        [TensorId::Weight(0, head), TensorId::Bias(0, head), TensorId::TokenEmbedding, TensorId::OutputNorm];
    (0..config.layers).flat_map(block).chain(ends)
}

/// Hashes of what has been read, each made once.
#[derive(Debug)]
pub(crate) struct Hashes<K>(Mutex<HashMap<K, blake3::Hash>>);

impl<K> Default for Hashes<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Clone + Eq + Hash> Hashes<K> {
    /// The hash of what `key` names, if it has been read.
    pub(crate) fn known(&self, key: &K) -> Option<blake3::Hash> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(key).copied()
    }

    /// The hash of `data`, which is what `key` names.
    pub(crate) fn of(&self, key: &K, data: &[u8]) -> blake3::Hash {
        self.known(key).unwrap_or_else(|| {
            // Beside the lock: other threads hash other tensors.
            let hash = blake3::hash(data);
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key.clone(), hash);
            hash
        })
    }
}

/// An identity in the making.
pub(crate) struct Identity(blake3::Hasher);

impl Identity {
    /// The identity of a base beside this text.
    pub(crate) fn new(text: TextHash) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
        hasher.update(&text.0);
        Self(hasher)
    }

    /// Adds what is said of the base or of a part of it.
    pub(crate) fn add(&mut self, said: &str) {
        self.0.update(&(said.len() as u64).to_le_bytes()).update(said.as_bytes());
    }

    /// Adds a tensor: its name and shape, and the hash of all of it.
    pub(crate) fn add_tensor(&mut self, shape: &str, hash: blake3::Hash) {
        self.add(shape);
        self.0.update(hash.as_bytes());
    }

    pub(crate) fn finish(&self) -> [u8; 32] {
        *self.0.finalize().as_bytes()
    }
}
