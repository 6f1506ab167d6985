//! The trees that EdgeLLM is compared with (L-17): of a fixed length, and of a fixed shape. They are grown by the same draft and
//! verified the same way; that they do not look at confidences is all that is different.

use crate::{
    draft::Draft,
    growth::Growth,
    tree::{NodeId, TokenTree},
};

/// SP: a chain of so many tokens, whatever their confidence.
#[derive(Debug, Clone, Copy)]
pub struct FixedLength {
    /// Tokens of each draft.
    pub tokens: usize,
}

impl Growth for FixedLength {
    fn step<D: Draft + ?Sized>(&mut self, tree: &mut TokenTree, draft: &mut D) -> Result<bool, D::Error> {
        let tip = tree.nodes().next_back();
        Ok(tree.len() < self.tokens && lengthen(tree, tip, draft)?)
    }
}

/// SI (SpecInfer): so many branches from the root, each of the same length.
#[derive(Debug, Clone, Copy)]
pub struct FixedTree {
    /// Branches; at most [`MAX_GUESSES`](crate::draft::MAX_GUESSES) come of one draft.
    pub width: usize,
    /// Tokens of each.
    pub depth: usize,
}

impl Growth for FixedTree {
    fn step<D: Draft + ?Sized>(&mut self, tree: &mut TokenTree, draft: &mut D) -> Result<bool, D::Error> {
        if self.depth == 0 || tree.is_full() {
            return Ok(false);
        }
        if tree.is_empty() {
            for guess in draft.guesses(tree, None)?.iter().take(self.width) {
                tree.push(None, guess.token, guess.probability);
            }
            return Ok(!tree.is_empty());
        }
        // Breadth first: the first leaf that is not at its depth is of the shallowest.
        let short: Vec<NodeId> = tree.leaves().filter(|&leaf| tree.depth(Some(leaf)) < self.depth).collect();
        for tip in short {
            if lengthen(tree, Some(tip), draft)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Puts the likeliest token behind `tip`; false if there is none, or no room.
fn lengthen<D: Draft + ?Sized>(
    tree: &mut TokenTree,
    tip: Option<NodeId>,
    draft: &mut D,
) -> Result<bool, D::Error> {
    let guesses = draft.guesses(tree, tip)?;
    Ok(guesses.first().and_then(|guess| tree.push(tip, guess.token, guess.probability)).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{draft::tests::Hashed, growth::grow};

    #[test]
    fn fixed_trees_have_their_shape() {
        let mut draft = Hashed { width: 4, runs: Vec::new() };
        let mut chain = TokenTree::new();
        grow(&mut chain, (&mut FixedLength { tokens: 5 }, &mut draft), 64, |_| false).unwrap();
        assert_eq!((chain.len(), chain.leaves().count()), (5, 1));
        let mut tree = TokenTree::new();
        grow(&mut tree, (&mut FixedTree { width: 3, depth: 4 }, &mut draft), 64, |_| false).unwrap();
        assert_eq!((tree.len(), tree.leaves().count()), (12, 3));
        assert!(tree.leaves().all(|leaf| tree.depth(Some(leaf)) == 4));
    }
}
