//! Replay of a completion that the caller gives: its tokens are verified like draft tokens.
//!
//! At each position the sequence samples from the logits with its own keyed generator, exactly as in the
//! original request. The replay confirms a token by sampling it again, so one pass confirms many tokens. The
//! first sampled token that differs ends the sequence.

use speculation::tree::TokenTree;

use super::Sequence;

impl<A> Sequence<A> {
    pub(in crate::engine) fn is_replay(&self) -> bool {
        !self.task.expected.is_empty()
    }

    /// Returns the next expected tokens, at most `max_tokens`, as a tree with one branch. The sequence's last
    /// token is sampled after the tree, so the tree leaves one token to sample.
    pub(in crate::engine) fn expected_tree(&self, max_tokens: usize) -> TokenTree {
        let count = max_tokens.min(self.left().saturating_sub(1));
        let next = self.task.expected.iter().skip(self.generated()).take(count);
        let (mut tree, mut end) = (TokenTree::new(), None);
        for &token in next {
            end = tree.push(end, token, 1.0);
        }
        tree
    }

    /// Whether the latest token of a replay differs from the expected one.
    pub(super) fn deviates(&self) -> bool {
        let latest = self.generated().checked_sub(1).and_then(|index| self.task.expected.get(index));
        self.is_replay() && latest != self.tokens.last()
    }
}
