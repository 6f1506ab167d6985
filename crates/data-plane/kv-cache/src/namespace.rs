//! Who may share prefixes, and what a prefix is called where its tokens are not at hand.

use types::{AdapterId, TenantId};

/// Who may share prefixes. The adapter is part of it whatever the gateway hashed into `sharing`: keys and values
/// computed with one adapter can never answer for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// The adapter that computes the blocks; `None` is the base model.
    pub adapter: Option<AdapterId>,
    /// H(tenant, generation), made by the gateway.
    pub sharing: [u8; 32],
    /// Whose share of the tiers the blocks are counted against.
    pub owner: TenantId,
}

/// Names a prefix: a hash over its namespace and all of its tokens. It is what a record has of the blocks before its
/// own, whose tokens would grow with the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Chain(pub [u8; 32]);

impl Chain {
    /// The empty prefix of `namespace`. Every chain begins with one, so no two namespaces have a chain in common.
    #[must_use]
    pub fn root(namespace: &Namespace) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("holobiont 2026 kv namespace v1");
        hasher.update(&namespace.sharing);
        // Without an adapter nothing follows: what is hashed is shorter then.
        if let Some(adapter) = &namespace.adapter {
            hasher.update(&adapter.0);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// The prefix that goes on with `tokens`.
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
