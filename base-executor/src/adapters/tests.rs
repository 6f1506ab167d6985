use super::*;
use crate::engine::event::ConnectionId;

const A: AdapterId = AdapterId([1; 32]);
const B: AdapterId = AdapterId([2; 32]);
const CALL: RequestKey = RequestKey { connection: ConnectionId(1), request: 9 };

fn budget() -> Budget {
    Budget::new(MemoryAccount::new("adapters", 100))
}

fn prepared(budget: &Budget, id: AdapterId, bytes: u64) -> ResidentAdapter<()> {
    ResidentAdapter {
        adapter: Arc::new(()),
        claim: budget.claim(id, bytes).unwrap(),
        generation: AdapterVersion([0; 32]),
        rank: 1,
        modules: 1,
        virtual_tokens: 0,
        invocation: None,
        role: AdapterRole::Answers,
        warnings: Vec::new(),
    }
}

#[test]
fn claims_never_exceed_the_budget_and_are_given_back_when_dropped() {
    let budget = budget();
    let mut claim = budget.claim(A, 60).unwrap();
    let refused =
        OutOfBudget { account: "adapters".to_owned(), asked_bytes: 41, held_bytes: 60, limit_bytes: 100 };
    assert_eq!(budget.claim(B, 41).unwrap_err(), ClaimError::Exceeded(refused));
    assert!(budget.claim(B, u64::MAX).is_err());
    assert_eq!(budget.claim(A, 1).unwrap_err(), ClaimError::Known(A));
    assert!(claim.resize(101).is_err());
    claim.resize(100).unwrap();
    assert_eq!(budget.held_bytes(), 100);
    drop(claim);
    assert_eq!(budget.held_bytes(), 0);
}

#[test]
fn an_unload_waits_for_the_last_user_and_frees_the_bytes() {
    let budget = budget();
    let mut table = AdapterTable::default();
    table.insert(prepared(&budget, A, 10));
    table.acquire(A).unwrap();
    assert!(table.unload(A, CALL).unwrap().is_none());
    assert_eq!(table.acquire(A).unwrap_err(), AdapterUseError::Unloading(A));
    assert!(table.unload(A, CALL).unwrap().is_none(), "a second call waits with the first");
    let unloaded = table.release(A).unwrap();
    assert_eq!((unloaded.freed_bytes, unloaded.calls.len()), (10, 2));
    assert_eq!(budget.held_bytes(), 0);
    assert_eq!(table.unload(A, CALL).unwrap_err(), AdapterUseError::NotLoaded(A));
}

#[test]
fn a_draft_is_there_and_answers_nobody() {
    let budget = budget();
    let mut table = AdapterTable::default();
    let role = AdapterRole::Drafts { layers: 2, factory: None };
    table.insert(ResidentAdapter { role, ..prepared(&budget, A, 10) });
    let refused = table.acquire(A).unwrap_err();
    assert_eq!((refused, table.get(A).unwrap().draft_layers()), (AdapterUseError::Draft(A), 2));
    assert!(refused.to_string().contains("is a draft adapter and answers no requests"));
    assert!(table.unload(A, CALL).unwrap().is_some());
}
