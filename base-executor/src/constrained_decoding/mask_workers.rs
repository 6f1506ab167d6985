//! The threads that compute masks: the tokens that may come next, and after each draft token.

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

/// Masks for the next token, and after each draft token.
#[derive(Debug)]
pub(crate) struct AllowedTokens {
    pub(super) next: Result<TokenSet, MatchError>,
    /// Masks by node; `None` after a token that is not allowed itself.
    behind: Vec<Option<TokenSet>>,
}

impl AllowedTokens {
    pub(super) fn new(next: Result<TokenSet, MatchError>, behind: Vec<Option<TokenSet>>) -> Self {
        Self { next, behind }
    }

    /// Returns the mask after `node` (`None`: after the last drawn token).
    pub(crate) fn at(&self, node: Option<NodeId>) -> Result<&TokenSet, GrammarStateError> {
        match node {
            None => self.next.as_ref().map_err(|error| GrammarStateError::Match(error.clone())),
            Some(node) => {
                self.behind.get(node.index()).and_then(Option::as_ref).ok_or(GrammarStateError::Fault)
            }
        }
    }
}

/// A matcher after the drawn tokens, and the masks there.
pub(super) type MaskResult = Result<(Box<Matcher>, AllowedTokens), GrammarStateError>;

pub(super) enum GrammarWork {
    /// Get a matcher for the beginning of an answer.
    Begin(Compile),
    /// Compute the masks of a step.
    Look(MaskRequest),
}

pub(super) struct MaskRequest {
    pub(super) matcher: Box<Matcher>,
    /// Tokens that the matcher does not know yet.
    pub(super) said: Vec<u32>,
    pub(super) tree: TokenTree,
    pub(super) reply: Sender<MaskResult>,
    /// Set by the engine when it stops waiting; the thread then wakes the engine.
    pub(super) is_late: Arc<AtomicBool>,
}

/// Serves queued work until the queue is closed.
pub(super) fn serve(
    work: &TenantQueue<GrammarWork>,
    compiling: &TenantQueue<Compile>,
    compilers: &Compilers,
    waker: &EngineWaker,
) {
    while let Some(mut taken) = work.take() {
        // A panic loses only its matcher, so only that sequence ends with an error.
        let _ = catch_unwind(AssertUnwindSafe(|| match taken.item.take() {
            Some(GrammarWork::Begin(asked)) => begin(asked, compiling, compilers, waker),
            Some(GrammarWork::Look(asked)) => compute_mask_and_wake(asked, waker),
            None => {}
        }));
    }
}

/// Returns a kept matcher, or queues the compilation.
fn begin(asked: Compile, compiling: &TenantQueue<Compile>, compilers: &Compilers, waker: &EngineWaker) {
    match compilers.kept(asked.tenant, &asked.source) {
        Some(matcher) => {
            let _ = asked.reply.send(Ok(matcher));
            waker();
        }
        // The queue has no limit.
        None => _ = compiling.push(asked.tenant, asked),
    }
}

fn compute_mask_and_wake(asked: MaskRequest, waker: &EngineWaker) {
    let MaskRequest { matcher, said, tree, reply, is_late } = asked;
    failpoint::pass("executor.grammar_look");
    let looked = catch_unwind(AssertUnwindSafe(|| compute_mask(matcher, &said, &tree)));
    // The requesting sequence may have ended.
    let _ = reply.send(looked.unwrap_or(Err(GrammarStateError::Fault)));
    if is_late.load(SeqCst) {
        waker();
    }
}

fn compute_mask(mut matcher: Box<Matcher>, said: &[u32], tree: &TokenTree) -> MaskResult {
    said.iter().try_for_each(|&token| matcher.accept(token))?;
    let (next, mut behind) = (matcher.allowed(), vec![None; tree.len()]);
    if let Some(next) = next.as_ref().ok().filter(|_| !tree.is_empty()) {
        // A clone is used, so a draft token that the matcher rejects does not end the answer.
        let _ = look_behind(&mut matcher.clone(), tree, None, next, &mut behind);
    }
    Ok((matcher, AllowedTokens::new(next, behind)))
}

/// Computes masks after the allowed draft tokens below `at`. The matcher is at `at` before and after.
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
