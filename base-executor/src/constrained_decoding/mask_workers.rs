//! The threads that look: what may come next in an answer, and behind each token that was drafted for it.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc::Sender,
    },
};

use speculation::tree::{NodeId, TokenTree};
use text::{
    grammar::{MatchError, Matcher, TokenSet},
    tenant_queue::TenantQueue,
};

use super::{
    EngineWaker, GrammarStateError,
    compile_workers::{Compile, Compilers},
};

/// What may come next, and behind each drafted token.
#[derive(Debug)]
pub(crate) struct AllowedTokens {
    pub(super) next: Result<TokenSet, MatchError>,
    /// By node; `None` behind a token that may not come itself.
    behind: Vec<Option<TokenSet>>,
}

impl AllowedTokens {
    pub(super) fn new(next: Result<TokenSet, MatchError>, behind: Vec<Option<TokenSet>>) -> Self {
        Self { next, behind }
    }

    /// What may come behind `node` (`None`: behind the last token that was drawn).
    pub(crate) fn at(&self, node: Option<NodeId>) -> Result<&TokenSet, GrammarStateError> {
        match node {
            None => self.next.as_ref().map_err(|error| GrammarStateError::Match(error.clone())),
            Some(node) => {
                self.behind.get(node.index()).and_then(Option::as_ref).ok_or(GrammarStateError::Fault)
            }
        }
    }
}

/// A matcher behind the tokens that were drawn, and what may come there.
pub(super) type MaskResult = Result<(Box<Matcher>, AllowedTokens), GrammarStateError>;

/// What a thread is asked.
pub(super) enum GrammarWork {
    /// A matcher at the beginning of an answer.
    Begin(Compile),
    /// What may come behind `said`.
    Look(MaskRequest),
}

/// See [`GrammarWork::Look`].
pub(super) struct MaskRequest {
    pub(super) matcher: Box<Matcher>,
    /// Tokens that the matcher does not know of yet.
    pub(super) said: Vec<u32>,
    pub(super) tree: TokenTree,
    pub(super) reply: Sender<MaskResult>,
    /// The engine has given up waiting, and wants to be told.
    pub(super) is_late: Arc<AtomicBool>,
}

/// Works on what is asked until the queue is closed.
pub(super) fn serve(
    work: &TenantQueue<GrammarWork>,
    compiling: &TenantQueue<Compile>,
    compilers: &Compilers,
    bell: &EngineWaker,
) {
    while let Some(mut taken) = work.take() {
        // A look that panics takes its matcher along: its sequence alone ends with an error.
        let _ = catch_unwind(AssertUnwindSafe(|| match taken.item.take() {
            Some(GrammarWork::Begin(asked)) => begin(asked, compiling, compilers, bell),
            Some(GrammarWork::Look(asked)) => look_and_tell(asked, bell),
            None => {}
        }));
    }
}

/// Gives a matcher that is kept, or has it compiled.
fn begin(asked: Compile, compiling: &TenantQueue<Compile>, compilers: &Compilers, bell: &EngineWaker) {
    match compilers.kept(asked.tenant, &asked.source) {
        Some(matcher) => {
            let _ = asked.reply.send(Ok(matcher));
            bell();
        }
        // The queue has no limit.
        None => _ = compiling.push(asked.tenant, asked),
    }
}

fn look_and_tell(asked: MaskRequest, bell: &EngineWaker) {
    let MaskRequest { matcher, said, tree, reply, is_late } = asked;
    failpoint::pass("executor.grammar_look");
    let looked = catch_unwind(AssertUnwindSafe(|| compute_mask(matcher, &said, &tree)));
    // Whoever asked may be gone.
    let _ = reply.send(looked.unwrap_or(Err(GrammarStateError::Fault)));
    if is_late.load(SeqCst) {
        bell();
    }
}

fn compute_mask(mut matcher: Box<Matcher>, said: &[u32], tree: &TokenTree) -> MaskResult {
    said.iter().try_for_each(|&token| matcher.accept(token))?;
    let (next, mut behind) = (matcher.allowed(), vec![None; tree.len()]);
    if let Some(next) = next.as_ref().ok().filter(|_| !tree.is_empty()) {
        // Of a copy: a guess that the matcher cannot follow is no reason to end the answer.
        let _ = look_behind(&mut matcher.clone(), tree, None, next, &mut behind);
    }
    Ok((matcher, AllowedTokens::new(next, behind)))
}

/// Finds out what may come behind those guesses behind `at` that may come themselves. The matcher stands at `at`, before and after.
fn look_behind(
    matcher: &mut Matcher,
    tree: &TokenTree,
    at: Option<NodeId>,
    next: &TokenSet,
    behind: &mut [Option<TokenSet>],
) -> Result<(), MatchError> {
    for node in tree.children(at) {
        let token = tree.token(node);
        if !next.contains(token) || matcher.ends_with(token) {
            continue;
        }
        matcher.accept(token)?;
        if let Ok(then) = matcher.allowed() {
            look_behind(matcher, tree, Some(node), &then, behind)?;
            behind[node.index()] = Some(then);
        }
        matcher.take_back(1)?;
    }
    Ok(())
}
