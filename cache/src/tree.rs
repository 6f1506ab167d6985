//! Which blocks hold which prefix.
//!
//! A node is a full block: its tokens, and through its parents the whole prefix before them. Equal prefixes of
//! one namespace are therefore one path. Since a block backs at most one node, a node is named by its block.
//!
//! Nodes are given up leaves first (a prefix without its beginning is worth nothing), the least recently used
//! of them before the others, and never while a sequence holds them.

use std::collections::{BTreeSet, HashMap};

use ids::{AdapterId, BlockId};

/// Who may share prefixes. The adapter is part of it whatever the gateway hashed into `sharing`: keys and values
/// computed with one adapter can never answer for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// The adapter that computes the blocks; `None` is the base model.
    pub adapter: Option<AdapterId>,
    /// H(tenant, generation), made by the gateway.
    pub sharing: [u8; 32],
}

/// A place in the tree: the end of a prefix. It may outlive its node; then nothing can be added there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    namespace: Namespace,
    at: Position,
}

impl Cursor {
    /// The empty prefix.
    #[must_use]
    pub fn root(namespace: Namespace) -> Self {
        Self { namespace, at: Position::Root }
    }

    /// What is left of a cursor whose node is gone: nothing is found or added there.
    #[must_use]
    pub fn nowhere(&self) -> Self {
        Self { namespace: self.namespace, at: Position::Nowhere }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Position {
    Root,
    /// The block of the node, and the stamp that tells it from later nodes of the same block.
    Node(BlockId, u64),
    Nowhere,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holders {
    Some,
    None,
}

type Children = HashMap<Box<[u32]>, BlockId>;

#[derive(Debug)]
struct Node {
    namespace: Namespace,
    parent: Option<BlockId>,
    tokens: Box<[u32]>,
    children: Children,
    stamp: u64,
    used_at: u64,
    holders: Holders,
}

/// Prefixes of all namespaces.
#[derive(Debug)]
pub struct PrefixTree {
    /// Indexed by block.
    nodes: Vec<Option<Node>>,
    roots: HashMap<Namespace, Children>,
    /// Leaves that nobody holds, least recently used first.
    idle_leaves: BTreeSet<(u64, BlockId)>,
    /// Counts operations; the time of `used_at` and the source of stamps.
    now: u64,
}

impl PrefixTree {
    /// An empty tree over blocks `0..blocks`.
    #[must_use]
    pub fn new(blocks: u32) -> Self {
        Self {
            nodes: (0..blocks).map(|_| None).collect(),
            roots: HashMap::new(),
            idle_leaves: BTreeSet::new(),
            now: 0,
        }
    }

    /// The block that holds `tokens` after the prefix that ends at `cursor`.
    #[must_use]
    pub fn child(&self, cursor: &Cursor, tokens: &[u32]) -> Option<BlockId> {
        let children = match cursor.at {
            Position::Root => self.roots.get(&cursor.namespace)?,
            Position::Node(block, stamp) => &self.live(block, stamp)?.children,
            Position::Nowhere => return None,
        };
        children.get(tokens).copied()
    }

    /// The cursor at the end of a block's prefix.
    ///
    /// # Panics
    /// If the block backs no node.
    #[must_use]
    pub fn cursor_of(&self, block: BlockId) -> Cursor {
        let node = self.node(block);
        Cursor { namespace: node.namespace, at: Position::Node(block, node.stamp) }
    }

    /// Adds `block`, which somebody holds, as the node for `tokens` after `cursor`. Returns its cursor, or
    /// `None` if the node at `cursor` is gone.
    ///
    /// # Panics
    /// If `cursor` has a child for these tokens, or `block` backs another node.
    pub fn add(&mut self, cursor: &Cursor, tokens: &[u32], block: BlockId) -> Option<Cursor> {
        assert!(self.child(cursor, tokens).is_none(), "the prefix is in the tree already");
        assert!(self.nodes[block.0 as usize].is_none(), "block {} backs another prefix", block.0);
        let parent = match cursor.at {
            Position::Root => None,
            Position::Node(parent, stamp) => {
                let used_at = self.live(parent, stamp)?.used_at;
                self.idle_leaves.remove(&(used_at, parent));
                Some(parent)
            }
            Position::Nowhere => return None,
        };
        self.now += 1;
        self.children_mut(cursor.namespace, parent).insert(tokens.into(), block);
        self.nodes[block.0 as usize] = Some(Node {
            namespace: cursor.namespace,
            parent,
            tokens: tokens.into(),
            children: Children::new(),
            stamp: self.now,
            used_at: self.now,
            holders: Holders::Some,
        });
        Some(self.cursor_of(block))
    }

    /// Notes that somebody holds the block of a node.
    pub fn hold(&mut self, block: BlockId) {
        let node = self.node_mut(block);
        node.holders = Holders::Some;
        let entry = (node.used_at, block);
        self.idle_leaves.remove(&entry);
    }

    /// Notes that the last holder of a node's block let go of it.
    pub fn let_go(&mut self, block: BlockId) {
        self.now += 1;
        let now = self.now;
        let node = self.node_mut(block);
        node.holders = Holders::None;
        node.used_at = now;
        self.list_if_idle_leaf(block);
    }

    /// Removes the least recently used leaf that nobody holds.
    pub fn evict(&mut self) -> Option<BlockId> {
        let (_, block) = self.idle_leaves.pop_first()?;
        let node = self.nodes[block.0 as usize].take()?;
        self.children_mut(node.namespace, node.parent).remove(&node.tokens);
        match node.parent {
            Some(parent) => self.list_if_idle_leaf(parent),
            None => self.drop_root_if_empty(node.namespace),
        }
        Some(block)
    }

    /// Removes every node of an adapter, held or not, in all its namespaces, and returns their blocks.
    pub fn remove_adapter(&mut self, adapter: AdapterId) -> Vec<BlockId> {
        let mut removed: Vec<BlockId> = self
            .roots
            .extract_if(|namespace, _| namespace.adapter == Some(adapter))
            .flat_map(|(_, children)| children.into_values())
            .collect();
        let mut visited = 0;
        while let Some(&block) = removed.get(visited) {
            visited += 1;
            if let Some(node) = self.nodes[block.0 as usize].take() {
                self.idle_leaves.remove(&(node.used_at, block));
                removed.extend(node.children.into_values());
            }
        }
        removed
    }

    fn list_if_idle_leaf(&mut self, block: BlockId) {
        let node = self.node(block);
        if node.holders == Holders::None && node.children.is_empty() {
            let entry = (node.used_at, block);
            self.idle_leaves.insert(entry);
        }
    }

    fn drop_root_if_empty(&mut self, namespace: Namespace) {
        if self.roots.get(&namespace).is_some_and(HashMap::is_empty) {
            self.roots.remove(&namespace);
        }
    }

    fn children_mut(&mut self, namespace: Namespace, parent: Option<BlockId>) -> &mut Children {
        match parent {
            Some(parent) => &mut self.node_mut(parent).children,
            None => self.roots.entry(namespace).or_default(),
        }
    }

    fn live(&self, block: BlockId, stamp: u64) -> Option<&Node> {
        self.nodes[block.0 as usize].as_ref().filter(|node| node.stamp == stamp)
    }

    fn node(&self, block: BlockId) -> &Node {
        self.nodes[block.0 as usize].as_ref().expect("the block backs a node")
    }

    fn node_mut(&mut self, block: BlockId) -> &mut Node {
        self.nodes[block.0 as usize].as_mut().expect("the block backs a node")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADAPTER: AdapterId = AdapterId([7; 32]);
    const NAMESPACE: Namespace = Namespace { adapter: Some(ADAPTER), sharing: [1; 32] };

    fn chain(tree: &mut PrefixTree, blocks: &[u32]) -> Cursor {
        let mut cursor = Cursor::root(NAMESPACE);
        for &block in blocks {
            cursor = tree.add(&cursor, &[block], BlockId(block)).unwrap();
        }
        cursor
    }

    #[test]
    fn leaves_go_before_their_parents_and_the_least_recently_used_first() {
        let mut tree = PrefixTree::new(8);
        chain(&mut tree, &[0, 1]);
        chain(&mut tree, &[2, 3]);
        assert_eq!(tree.evict(), None, "everything is held");
        for block in [2, 3, 0, 1] {
            tree.let_go(BlockId(block));
        }
        let order: Vec<_> = std::iter::from_fn(|| tree.evict()).collect();
        assert_eq!(order, [3, 2, 1, 0].map(BlockId));
        assert!(tree.roots.is_empty(), "an empty namespace leaves nothing behind");
    }

    #[test]
    fn a_parent_is_kept_as_long_as_a_child_is_held() {
        let mut tree = PrefixTree::new(4);
        chain(&mut tree, &[0, 1]);
        tree.let_go(BlockId(0));
        assert_eq!(tree.evict(), None);
        tree.let_go(BlockId(1));
        assert_eq!(tree.evict(), Some(BlockId(1)));
    }

    #[test]
    fn nothing_can_be_added_after_a_node_that_is_gone_even_if_its_block_is_used_again() {
        let mut tree = PrefixTree::new(4);
        let stale = chain(&mut tree, &[0]);
        assert_eq!(tree.remove_adapter(ADAPTER), [BlockId(0)]);
        chain(&mut tree, &[0]);
        assert_eq!(tree.add(&stale, &[9], BlockId(1)), None);
        assert_eq!(tree.child(&stale, &[9]), None);
    }

    #[test]
    fn removing_an_adapter_spares_the_others() {
        let mut tree = PrefixTree::new(4);
        chain(&mut tree, &[0, 1]);
        let other = Cursor::root(Namespace { adapter: None, ..NAMESPACE });
        tree.add(&other, &[0], BlockId(2)).unwrap();
        assert_eq!(tree.remove_adapter(ADAPTER).len(), 2);
        assert_eq!(tree.child(&Cursor::root(NAMESPACE), &[0]), None);
        assert_eq!(tree.child(&other, &[0]), Some(BlockId(2)));
    }
}
