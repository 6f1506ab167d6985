//! Dependency tree: the adapter and prefix on which every block depends, and its tiers (E-02 to E-05).
//!
//! ```text
//! root -> adapter (none is the base model) -> blocks of its prefixes, namespace by namespace
//! ```
//!
//! A node below an adapter is a full block: its tokens, and through its parents the whole prefix before them.
//! So equal prefixes of one namespace are one path. A node exists while some tier holds it. A node may be in
//! several tiers, and a block that is also in a slower tier can be dropped without a write.
//!
//! A lookup compares the tokens themselves, never only their hash.

mod index;
mod namespaces;
mod node;

use std::collections::HashMap;

use types::{AdapterId, TenantId};

pub(crate) use self::node::{Node, NodeKind, RETURNING};
use self::{
    index::ChildIndex,
    namespaces::Namespaces,
    node::{Links, NONE},
};
use crate::{
    namespace::Namespace,
    tier::{Tier, TierSlot},
};

/// Id of a node; the id of a removed node is never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId {
    pub(crate) index: u32,
    stamp: u32,
}

/// End of a prefix in the tree. A cursor may outlive its node; then nothing can be added there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    namespace: Namespace,
    at: Position,
}

impl Cursor {
    /// Returns the cursor of the empty prefix.
    #[must_use]
    pub fn root(namespace: Namespace) -> Self {
        Self { namespace, at: Position::Root }
    }

    /// Returns a cursor without a node, where nothing can be found or added.
    #[must_use]
    pub fn nowhere(&self) -> Self {
        Self { namespace: self.namespace, at: Position::Nowhere }
    }
}

impl From<Namespace> for Cursor {
    fn from(namespace: Namespace) -> Self {
        Self::root(namespace)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Position {
    Root,
    Node(NodeId),
    Nowhere,
}

/// Nodes and their links. The owner decides about evictions and places.
#[derive(Debug, Default)]
pub(crate) struct DependencyTree {
    nodes: Vec<Node>,
    /// Indices of removed nodes.
    free: Vec<u32>,
    index: ChildIndex,
    adapters: HashMap<Option<AdapterId>, u32>,
    namespaces: Namespaces,
}

impl DependencyTree {
    /// Returns the node that holds `tokens` after the prefix that ends at `cursor`.
    pub(crate) fn child(&self, cursor: &Cursor, tokens: &[u32]) -> Option<NodeId> {
        let namespace = self.namespaces.find(&cursor.namespace)?;
        let parent = match cursor.at {
            Position::Root => *self.adapters.get(&cursor.namespace.adapter)?,
            Position::Node(id) => self.get(id).map(|_| id.index)?,
            Position::Nowhere => return None,
        };
        self.index.find(&self.nodes, (parent, namespace), tokens).map(|index| self.id(index))
    }

    pub(crate) fn cursor_of(&self, id: NodeId) -> Cursor {
        let namespace = *self.namespaces.get(self.node(id.index).namespace);
        Cursor { namespace, at: Position::Node(id) }
    }

    /// Whether the node at `cursor` is on the device, or the prefix is empty.
    pub(crate) fn is_on_device(&self, cursor: &Cursor) -> bool {
        match cursor.at {
            Position::Root => true,
            Position::Node(id) => self.get(id).is_some_and(|node| node.place(Tier::Device).is_here()),
            Position::Nowhere => false,
        }
    }

    /// Adds a node without a place for `tokens` after `cursor`; `None` if the node at `cursor` is gone.
    ///
    /// # Panics
    /// Panics if the node exists already.
    pub(crate) fn add(&mut self, cursor: &Cursor, tokens: &[u32]) -> Option<NodeId> {
        assert!(self.child(cursor, tokens).is_none(), "the prefix is in the tree already");
        let parent = match cursor.at {
            Position::Root => self.adapter_or_new(cursor.namespace.adapter),
            Position::Node(id) => self.get(id).map(|_| id.index)?,
            Position::Nowhere => return None,
        };
        let namespace = self.namespaces.add_node(cursor.namespace);
        let index = self.push(Node::new(NodeKind::Block(tokens.into()), parent, namespace));
        self.link(index);
        self.index.insert(&self.nodes, index);
        Some(self.id(index))
    }

    /// Returns the node of an adapter, which is created if it does not exist.
    pub(crate) fn adapter_or_new(&mut self, adapter: Option<AdapterId>) -> u32 {
        if let Some(&index) = self.adapters.get(&adapter) {
            return index;
        }
        let index = self.push(Node::new(NodeKind::Adapter(adapter.map(Box::new)), NONE, NONE));
        self.adapters.insert(adapter, index);
        index
    }

    pub(crate) fn adapter(&self, adapter: Option<AdapterId>) -> Option<u32> {
        self.adapters.get(&adapter).copied()
    }

    /// Sets a node's place in a tier, and updates the count of its parent.
    pub(crate) fn set_place(&mut self, index: u32, tier: Tier, place: TierSlot) {
        let node = &mut self.nodes[index as usize];
        let (parent, had) = (node.links.parent, node.place(tier).index().is_some());
        node.set_place(tier, place);
        let has = place.index().is_some();
        if parent != NONE && had != has {
            let children = &mut self.nodes[parent as usize].children_in[tier as usize];
            *children = if has { *children + 1 } else { *children - 1 };
        }
    }

    /// Removes a node that has neither a place nor children.
    pub(crate) fn remove(&mut self, index: u32) {
        let node = self.node(index);
        assert!(node.links.first_child == NONE, "a node with children is not removed");
        debug_assert!(!node.is_somewhere(), "its places were given back");
        let (namespace, adapter) = (node.namespace, node.adapter());
        match adapter {
            Some(adapter) => _ = self.adapters.remove(&adapter),
            None => {
                self.index.remove(&self.nodes, index);
                self.unlink(index);
                self.namespaces.remove_node(namespace);
            }
        }
        let node = &mut self.nodes[index as usize];
        // The new stamp invalidates all ids of the removed node.
        let stamp = node.stamp.wrapping_add(1);
        *node = Node::default();
        node.stamp = stamp;
        self.free.push(index);
    }

    /// Returns a node and all its descendants, parents before their children.
    pub(crate) fn subtree(&self, index: u32) -> Vec<u32> {
        let mut found = vec![index];
        let mut visited = 0;
        while let Some(&index) = found.get(visited) {
            visited += 1;
            found.extend(self.children(index));
        }
        found
    }

    pub(crate) fn children(&self, index: u32) -> impl Iterator<Item = u32> + '_ {
        let some = |index: u32| (index != NONE).then_some(index);
        let first = some(self.node(index).links.first_child);
        std::iter::successors(first, move |&index| some(self.node(index).links.next))
    }

    /// Returns the node on which a node depends; `None` for an adapter.
    pub(crate) fn parent(&self, index: u32) -> Option<u32> {
        let parent = self.node(index).links.parent;
        (parent != NONE).then_some(parent)
    }

    /// Returns the adapter of a node, which may be the node itself.
    pub(crate) fn adapter_of(&self, index: u32) -> Option<AdapterId> {
        match self.node(index).adapter() {
            Some(adapter) => adapter,
            None => self.namespaces.get(self.node(index).namespace).adapter,
        }
    }

    pub(crate) fn namespace(&self, index: u32) -> Namespace {
        *self.namespaces.get(self.node(index).namespace)
    }

    /// Returns the tenant whose share a node counts against.
    pub(crate) fn owner(&self, index: u32) -> TenantId {
        match self.node(index).kind {
            NodeKind::Block(_) => self.namespaces.get(self.node(index).namespace).owner,
            NodeKind::Adapter(_) => TenantId::EVERYBODY,
        }
    }

    /// Returns the node with an id, if it still exists.
    pub(crate) fn get(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.index as usize).filter(|node| node.stamp == id.stamp)
    }

    pub(crate) fn id(&self, index: u32) -> NodeId {
        NodeId { index, stamp: self.node(index).stamp }
    }

    pub(crate) fn node(&self, index: u32) -> &Node {
        &self.nodes[index as usize]
    }

    pub(crate) fn node_mut(&mut self, index: u32) -> &mut Node {
        &mut self.nodes[index as usize]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.adapters.values().flat_map(|&root| self.subtree(root))
    }

    /// Returns the number of node indices, including those of removed nodes.
    pub(crate) fn capacity(&self) -> u32 {
        u32::try_from(self.nodes.len()).unwrap_or(u32::MAX)
    }

    fn push(&mut self, mut node: Node) -> u32 {
        if let Some(index) = self.free.pop() {
            node.stamp = self.nodes[index as usize].stamp;
            self.nodes[index as usize] = node;
            return index;
        }
        self.nodes.push(node);
        self.capacity() - 1
    }

    fn link(&mut self, index: u32) {
        let parent = self.node(index).links.parent;
        let first = std::mem::replace(&mut self.node_mut(parent).links.first_child, index);
        if first != NONE {
            self.node_mut(first).links.previous = index;
        }
        self.node_mut(index).links.next = first;
    }

    fn unlink(&mut self, index: u32) {
        let Links { parent, previous, next, .. } = self.node(index).links;
        match previous {
            NONE => self.node_mut(parent).links.first_child = next,
            _ => self.node_mut(previous).links.next = next,
        }
        if next != NONE {
            self.node_mut(next).links.previous = previous;
        }
    }
}
