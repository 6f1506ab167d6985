//! Draft tokens: no answer changes, and rejected ones leave no trace.

use std::convert::Infallible;

use base_executor::drafter::{DrafterFactory, SequenceDrafter};
use shmproto::message::{DraftKind, ProvisionalMode};
use speculation::{
    baselines::BaselineRule,
    draft::{Draft, DraftToken},
    threshold::Threshold,
    tree::{NodeId, TokenTree},
};

use super::*;
use crate::oracle_drafter::OracleDrafter;

/// Engine whose steps take equally long for any number of rows.
fn drafting(limits: EngineLimits, requests: &[Generate], right: f64) -> EngineHarness {
    EngineHarness::drafting(limits, planted(requests, right))
}

fn planted(requests: &[Generate], right: f64) -> Drafts {
    let answers = requests.iter().map(|request| {
        (request.prompt.clone(), alone(request).tokens.iter().map(|token| token.token).collect())
    });
    let answers = Arc::new(Mutex::new(answers.collect()));
    OracleDrafter::drafts(&answers, right, Duration::ZERO)
}

fn curious(request: Generate) -> Generate {
    Generate { provisional: ProvisionalMode::Wanted, ..request }
}

fn numbered(requests: impl IntoIterator<Item = Generate>) -> Vec<Generate> {
    (1..).zip(requests).map(|(id, request)| Generate { request: id, ..request }).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_drafted_a_request_gets_what_it_would_get_alone(
        moments in prop::collection::vec((any_request(), 0..6usize), 1..17),
        limits in any_limits(),
        right in 0.0..1.0f64,
    ) {
        let wishes = [ProvisionalMode::Wanted, ProvisionalMode::Unwanted].into_iter().cycle();
        let wish = |((request, _), provisional): (&(Generate, _), _)| Generate { provisional, ..request.clone() };
        let requests = numbered(moments.iter().zip(wishes).map(wish));
        let mut bench = drafting(limits, &requests, right);
        [1, 2, PREFIX, ACTIVATED].into_iter().for_each(|tag| bench.load(tag));
        for (request, (_, steps_before)) in requests.iter().zip(&moments) {
            (0..*steps_before).for_each(|_| bench.step());
            bench.send(request.clone());
        }
        bench.finish();
        assert_as_if_alone(&bench, &requests);
        assert_nothing_held(&bench);
        let unasked = requests.iter().filter(|request| request.provisional == ProvisionalMode::Unwanted);
        for request in unasked {
            prop_assert_eq!(&bench.answer(request.request).provisional, &ProvisionalTokens::default());
        }
    }

    #[test]
    fn requests_cancelled_while_something_is_drafted_leave_nothing_behind(
        moments in prop::collection::vec((any_request(), 0..3usize, 0..20usize), 60),
        limits in any_limits(),
    ) {
        let requests = numbered(moments.iter().map(|(request, ..)| curious(request.clone())));
        let mut bench = drafting(limits, &requests, 0.8);
        [1, 2, PREFIX, ACTIVATED].into_iter().for_each(|tag| bench.load(tag));
        for (request, (_, steps, age)) in requests.iter().zip(&moments) {
            bench.send(request.clone());
            (0..*steps).for_each(|_| bench.step());
            bench.cancel(request.request.saturating_sub(*age as u64));
        }
        requests.iter().for_each(|request| bench.cancel(request.request));
        prop_assert!(bench.engine.is_idle());
        assert_nothing_held(&bench);
    }
}

#[test]
fn drafts_that_come_true_are_verified_many_at_once_and_counted() {
    let requests = numbered([request(1, prompt(5, 40), 60)]);
    let mut bench = drafting(ROOMY, &requests, 1.0);
    bench.send(requests[0].clone());
    bench.finish();
    assert_as_if_alone(&bench, &requests);
    let stats = bench.stats();
    assert!(stats.steps < 30, "60 tokens in {} steps", stats.steps);
    let speculation = stats.speculation;
    assert_eq!(speculation.accepted + stats.steps, 60, "a step gives what was accepted and one more");
    assert!(speculation.drafted >= speculation.accepted && speculation.verifications < stats.steps);
    assert!(speculation.ahead > speculation.kept && speculation.kept > 0, "{speculation:?}");
    let counts = speculation.accepted_counts;
    assert_eq!(counts.iter().sum::<u64>(), speculation.verifications);
    let [least, most] = [[0, 1, 2, 3, 5, 9, 17], [0, 1, 2, 4, 8, 16, u64::from(u16::MAX)]]
        .map(|bounds: [u64; 7]| counts.iter().zip(bounds).map(|(count, bound)| count * bound).sum::<u64>());
    assert!((least..=most).contains(&speculation.accepted), "{speculation:?}");
    assert_nothing_held(&bench);
}

#[test]
fn what_is_verified_for_an_adapter_is_counted_for_it_too() {
    let adapted = Generate { adapter: Some([1; 32]), ..request(1, prompt(5, 40), 60) };
    let requests = numbered([adapted, request(2, prompt(6, 40), 60)]);
    let mut bench = drafting(ROOMY, &requests, 0.8);
    bench.load(1);
    requests.iter().for_each(|request| bench.send(request.clone()));
    bench.finish();
    assert_as_if_alone(&bench, &requests);
    let stats = bench.stats();
    let (all, adapter) = (stats.speculation, &stats.adapters[0]);
    assert!(adapter.accepted > 0 && adapter.drafted > adapter.accepted, "{adapter:?}");
    assert!(
        all.accepted > adapter.accepted && all.drafted > adapter.drafted,
        "the base's are others: {all:?}"
    );
}

#[test]
fn what_a_guess_had_to_promise_is_told_of_each_adapter_that_was_drafted_for() {
    let adapted = Generate { adapter: Some([1; 32]), ..request(1, prompt(5, 40), 20) };
    let requests = numbered([adapted]);
    // With untimed steps the threshold would be 0; this rule's is not.
    let drafts = planted(&requests, 0.8).ruled(BaselineRule::Learned(Threshold::default()));
    let mut bench = EngineHarness::drafting(ROOMY, drafts);
    [1, 2].into_iter().for_each(|tag| bench.load(tag));
    bench.send(requests[0].clone());
    bench.finish();
    assert_as_if_alone(&bench, &requests);
    let stats = bench.stats();
    let of =
        |tag| stats.adapters.iter().find(|adapter| adapter.adapter == [tag; 32]).unwrap().least_confidence;
    assert!(of(1) > 0.0 && of(1) <= 1.0, "{}", of(1));
    assert_eq!(of(2), 0.0, "nobody asked for it");
}

#[test]
fn who_finds_no_memory_for_drafts_goes_on_without_them() {
    let mut thirsty = prompt(5, 10);
    thirsty.push(THIRSTY);
    let others = (2..18).map(|salt| request(1, prompt(salt, 20), 40));
    let requests = numbered(std::iter::once(request(1, thirsty, 40)).chain(others).map(curious));
    let mut bench = drafting(ROOMY, &requests, 0.9);
    requests.iter().for_each(|request| bench.send(request.clone()));
    bench.finish();
    assert_as_if_alone(&bench, &requests);
    assert_nothing_held(&bench);
    assert!(requests.iter().any(|request| bench.answer(request.request).provisional.came_true > 0));
}

#[derive(Default)]
struct DraftListener {
    answers: HashMap<u64, RequestTranscript>,
    passes: usize,
}

impl DraftListener {
    fn hear(&mut self, queue: &mut mpsc::Receiver<ToGateway>) {
        while let Ok(ToGateway::Outputs(outputs)) = queue.try_recv() {
            outputs.into_iter().for_each(|one| self.answers.entry(one.request).or_default().add(one));
        }
    }
}

const LISTENER: ConnectionId = ConnectionId(2);

fn ask(bench: &mut EngineHarness, request: &Generate) {
    let (request, received_at) = (request.clone(), bench.clock.now());
    bench.engine.handle(EngineEvent::Generate { connection: LISTENER, request, received_at });
}

#[test]
fn drafts_are_told_to_who_asked_while_they_are_verified_and_some_come_true() {
    let requests = numbered([curious(request(1, prompt(5, 40), 60)), request(2, prompt(6, 40), 60)]);
    let mut bench = drafting(ROOMY, &requests, 0.7);
    let (outbox, queue) = mpsc::channel(1024);
    bench.engine.handle(EngineEvent::Connected { connection: LISTENER, outbox });
    let listener = Arc::new(Mutex::new((DraftListener::default(), queue)));
    let (clock, listening) = (bench.clock.clone(), Arc::clone(&listener));
    let during_the_pass = move || {
        *clock.0.lock().unwrap() += Duration::from_millis(1);
        let (listener, queue) = &mut *listening.lock().unwrap();
        listener.hear(queue);
        let mut answers = listener.answers.values();
        listener.passes += usize::from(answers.any(|answer| !answer.provisional.standing.is_empty()));
    };
    *bench.tick.lock().unwrap() = Some(Box::new(during_the_pass));
    requests.iter().for_each(|request| ask(&mut bench, request));
    bench.finish();
    let (listener, queue) = &mut *listener.lock().unwrap();
    listener.hear(queue);
    for request in &requests {
        assert_eq!(listener.answers[&request.request].content(), alone(request).content());
    }
    let [curious, other] = [1, 2].map(|request| &listener.answers[&request].provisional);
    assert!(listener.passes > 0 && curious.came_true > 0 && curious.in_vain > 0, "{curious:?}");
    assert_eq!((&curious.standing, other), (&Vec::new(), &ProvisionalTokens::default()));
}

#[test]
fn a_token_that_would_end_the_answer_is_not_told() {
    let free = request(1, prompt(5, 40), 60);
    let said: Vec<u32> = alone(&free).tokens.iter().map(|token| token.token).collect();
    let last = said.iter().position(|token| *token == said[30]).expect("it is said");
    let requests = [curious(Generate { stop_tokens: vec![said[30]], ..free })];
    let mut bench = drafting(ROOMY, &requests, 1.0);
    bench.send(requests[0].clone());
    bench.finish();
    assert_as_if_alone(&bench, &requests);
    let told = &bench.answer(1).provisional;
    assert!(told.came_true > 0 && told.came_true < last, "{told:?} of {last}");
    assert_eq!(bench.answer(1).finish, Some(Finish::Stop));
}

#[test]
fn drafts_take_no_room_that_outputs_may_need() {
    let requests = numbered([curious(request(1, prompt(5, 40), 60))]);
    let mut bench = drafting(ROOMY, &requests, 1.0);
    let (outbox, mut queue) = mpsc::channel(4);
    bench.engine.handle(EngineEvent::Connected { connection: LISTENER, outbox });
    // The listener reads its welcome, and nothing else. An earlier request has measured the step time.
    bench.send(request(2, prompt(6, 20), 20));
    bench.finish();
    queue.try_recv().unwrap();
    ask(&mut bench, &requests[0]);
    (0..4).for_each(|_| bench.step());
    let heard = std::iter::from_fn(|| queue.try_recv().ok());
    let provisional = |message| {
        let ToGateway::Outputs(outputs) = message else { panic!("{message:?}") };
        !outputs[0].provisional.is_empty()
    };
    assert_eq!(heard.map(provisional).collect::<Vec<_>>(), [false, true, false, false]);
}

/// A drafter that records its calls, with the number of its text.
struct RecordingDrafter {
    number: u32,
    notes: Arc<Mutex<Vec<(DrafterCall, u32)>>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DrafterCall {
    Foreseen,
    Asked,
}

impl Draft for RecordingDrafter {
    type Error = Infallible;

    fn accept(&mut self, _: &[u32]) -> Result<(), Infallible> {
        Ok(())
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Infallible> {
        self.notes.lock().unwrap().push((DrafterCall::Asked, self.number));
        let guess = DraftToken { token: 1, probability: 0.5 };
        Ok(if tree.depth(at) < 3 { vec![guess] } else { Vec::new() })
    }
}

impl SequenceDrafter for RecordingDrafter {
    fn prefetch_logits(&mut self, _: &TokenTree, _: Option<NodeId>) {
        self.notes.lock().unwrap().push((DrafterCall::Foreseen, self.number));
    }
}

#[test]
fn of_several_sequences_all_are_foreseen_a_level_before_any_is_asked() {
    let notes = Arc::new(Mutex::new(Vec::new()));
    let (heard, mut number) = (Arc::clone(&notes), 0);
    let factory = DrafterFactory::new(DraftKind::Model, move |_, _| {
        number += 1;
        Box::new(RecordingDrafter { number, notes: Arc::clone(&heard) })
    });
    let requests = numbered((5..8).map(|salt| request(1, prompt(salt, 40), 12)));
    let mut bench = EngineHarness::drafting(ROOMY, Drafts::by(16, Some(factory)));
    requests.iter().for_each(|request| bench.send(request.clone()));
    bench.finish();
    assert_as_if_alone(&bench, &requests);
    let notes = std::mem::take(&mut *notes.lock().unwrap());
    let rounds: Vec<_> = notes.chunk_by(|a, b| a.0 == b.0).collect();
    for pair in rounds.chunks(2) {
        let [foreseen, asked] = pair else { panic!("nobody is asked without warning: {rounds:?}") };
        assert_eq!((foreseen[0].0, asked[0].0), (DrafterCall::Foreseen, DrafterCall::Asked));
        assert!(foreseen.iter().map(|note| note.1).eq(asked.iter().map(|note| note.1)), "{pair:?}");
    }
    assert!(rounds.iter().any(|round| round.len() == 3), "three of them at once: {rounds:?}");
}
