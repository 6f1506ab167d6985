//! Derives the SentencePiece BPE merges that pieces and scores imply.
//!
//! A SentencePiece model has no list of merges: any two pieces whose concatenation is a piece may merge,
//! the best score first. A ranked list of these merges (transformers' `generate_merges`) gives byte pair
//! encoding the same result.

use std::collections::HashMap;

/// The character U+2581, with which pieces spell a space.
pub(super) const SPACE: &str = "\u{2581}";

#[derive(Debug, Clone, Copy)]
pub(super) struct Piece<'a> {
    pub(super) id: u32,
    pub(super) text: &'a str,
    /// Score; pieces with larger scores are merged earlier.
    pub(super) score: f32,
}

struct Merge<'a> {
    score: f32,
    left: &'a str,
    right: &'a str,
    left_length: usize,
    right_length: usize,
}

/// Returns the merges of `pieces` in order: by score, then by longer left part, then by longer right part,
/// in characters.
pub(super) fn merges(pieces: &[Piece<'_>]) -> Vec<(String, String)> {
    let ids: HashMap<&str, u32> = pieces.iter().map(|piece| (piece.text, piece.id)).collect();
    let mut merges = Vec::new();
    for piece in pieces {
        let first = merges.len();
        let length = piece.text.chars().count();
        for (before, (at, _)) in piece.text.char_indices().enumerate().skip(1) {
            let (left, right) = piece.text.split_at(at);
            if ids.contains_key(left) && ids.contains_key(right) {
                let (left_length, right_length) = (before, length - before);
                merges.push(Merge { score: piece.score, left, right, left_length, right_length });
            }
        }
        merges[first..].sort_by_key(|merge| (ids.get(merge.left), ids.get(merge.right)));
    }
    merges.sort_by(|a, b| {
        b.score
            .total_cmp(&a.score)
            .then(b.left_length.cmp(&a.left_length))
            .then(b.right_length.cmp(&a.right_length))
    });
    merges.into_iter().map(|merge| (merge.left.to_owned(), merge.right.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_are_ranked_by_score_and_length() {
        let texts = [("a", 0.0), ("b", 0.0), ("ab", -2.0), ("ba", -1.0), ("aba", -3.0)];
        let pieces: Vec<Piece<'_>> =
            (0..).zip(texts).map(|(id, (text, score))| Piece { id, text, score }).collect();
        let merges = merges(&pieces);
        let expected = [("b", "a"), ("a", "b"), ("ab", "a"), ("a", "ba")];
        let merges: Vec<(&str, &str)> = merges.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(merges, expected);
    }
}
