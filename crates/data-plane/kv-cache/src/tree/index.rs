//! Finds the child of a node by its tokens.

use std::hash::{BuildHasher as _, RandomState};

use hashbrown::HashTable;

use super::node::Node;

/// Key of a parent: a node and a namespace.
type Parent = (u32, u32);

/// Index of the children of all nodes. The table stores node indices only and compares tokens in the nodes,
/// so no token is stored twice. The hash is keyed, so no client can make prefixes collide.
#[derive(Debug, Default)]
pub(super) struct ChildIndex {
    children: HashTable<u32>,
    hasher: RandomState,
}

impl ChildIndex {
    pub(super) fn find(&self, nodes: &[Node], parent: Parent, tokens: &[u32]) -> Option<u32> {
        let is_meant = |&index: &u32| {
            let node = &nodes[index as usize];
            (node.links.parent, node.namespace) == parent && node.tokens() == tokens
        };
        self.children.find(self.hash(parent, tokens), is_meant).copied()
    }

    pub(super) fn insert(&mut self, nodes: &[Node], index: u32) {
        let hash = |index: u32| self.hash_of(&nodes[index as usize]);
        let of_new = hash(index);
        // The closure borrows the hasher alone, because the table is borrowed mutably.
        let (children, hasher) = (&mut self.children, &self.hasher);
        children.insert_unique(of_new, index, |&other| hash_with(hasher, &nodes[other as usize]));
    }

    pub(super) fn remove(&mut self, nodes: &[Node], index: u32) {
        let hash = self.hash_of(&nodes[index as usize]);
        if let Ok(entry) = self.children.find_entry(hash, |&other| other == index) {
            entry.remove();
        }
    }

    fn hash(&self, parent: Parent, tokens: &[u32]) -> u64 {
        self.hasher.hash_one((parent, tokens))
    }

    fn hash_of(&self, node: &Node) -> u64 {
        hash_with(&self.hasher, node)
    }
}

fn hash_with(hasher: &RandomState, node: &Node) -> u64 {
    hasher.hash_one(((node.links.parent, node.namespace), node.tokens()))
}
