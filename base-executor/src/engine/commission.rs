//! Who drafts for a sequence.

use std::{convert::Infallible, fmt};

use speculation::draft::Draft as _;

use crate::author::Author;

/// An author, and how much of its sequence it knows.
pub(super) struct Commission {
    pub(super) author: Box<dyn Author>,
    pub(super) known: usize,
}

impl fmt::Debug for Commission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Commission").field("known", &self.known).finish_non_exhaustive()
    }
}

impl Commission {
    /// Tells the author what of `text` it does not know.
    pub(super) fn take_in(&mut self, text: &[u32]) {
        let Ok::<(), Infallible>(()) = self.author.accept(&text[self.known..]);
        self.known = text.len();
    }
}
