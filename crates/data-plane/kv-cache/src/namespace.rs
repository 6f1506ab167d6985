//! Namespaces, in which prefixes may be shared, and chains, which name prefixes without their tokens.

use types::{AdapterId, TenantId};

/// Namespace in which prefixes may be shared. The adapter is part of it in addition to `sharing`, so KV
/// blocks computed with one adapter never serve another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// Adapter that computes the blocks; `None` is the base model.
    pub adapter: Option<AdapterId>,
    /// Hash of tenant and adapter version, made by the gateway.
    pub sharing: [u8; 32],
    /// Tenant whose share of the tiers the blocks count against.
    pub owner: TenantId,
}

/// Name of a prefix: a hash over its namespace and all its tokens. A record stores it in place of the earlier
/// blocks' tokens, which would grow with the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Chain(pub [u8; 32]);

impl Chain {
    /// Returns the chain of the empty prefix in `namespace`, with which every chain of the namespace begins.
    #[must_use]
    pub fn root(namespace: &Namespace) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 kv namespace v1");
        hasher.update(&namespace.sharing);
        // Without an adapter nothing follows, so the hashed bytes differ in length.
        if let Some(adapter) = &namespace.adapter {
            hasher.update(&adapter.0);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// Returns the chain of the prefix extended by `tokens`.
    #[must_use]
    pub fn then(&self, tokens: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 kv chain v1");
        hasher.update(&self.0);
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_tells_namespaces_tokens_and_their_order_apart() {
        let adapter = |byte| Some(AdapterId([byte; 32]));
        let namespaces = [(None, 1), (None, 2), (adapter(1), 1), (adapter(2), 1), (adapter(1), 2)].map(
            |(adapter, sharing)| Namespace { adapter, sharing: [sharing; 32], owner: TenantId::EVERYBODY },
        );
        let chains = namespaces.iter().flat_map(|namespace| {
            let root = Chain::root(namespace);
            [root, root.then(&[1]), root.then(&[2]), root.then(&[1]).then(&[2]), root.then(&[2]).then(&[1])]
        });
        let mut chains: Vec<Chain> = chains.collect();
        chains.sort_unstable();
        chains.dedup();
        assert_eq!(chains.len(), 25);
    }
}
