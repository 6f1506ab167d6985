//! Recovery of a session, its timeouts, and its errors.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::support::settings;
use client::{
    error::{CallError, LinkError},
    masking::{CallSite, Direction, Masking, NoiseSettings},
    session::{ClientSettings, Session, calls::LayerCall},
    transport::{Connect, Transport},
};
use model::linear_sites::SiteId;
use shmproto::{
    codec::Wire as _,
    layer::{
        CallClass, CallHeader, CallStatus, Dtype, ReplyHeader, SiteOp, SitePath,
        control::{
            AdapterDtype, Catalog, Fetched, FromLayers, KvDtype, RefusalCode, SessionOpened, SessionRefused,
            Site, SiteLayer, ToLayers,
        },
    },
};

#[derive(Debug, Clone, Copy, PartialEq)]
enum CallOutcome {
    Refused(CallStatus),
    Lost,
}

#[derive(Debug, Clone, PartialEq)]
enum OpenOutcome {
    Refused(RefusalCode, u32),
    Unreachable,
    /// Another executor answers, with this base.
    Instance(u64, [u8; 32]),
}

/// Scripted executor; calls without a scripted outcome return `2 x`.
#[derive(Debug, Default)]
struct ExecutorScript {
    openings: VecDeque<OpenOutcome>,
    outcomes: VecDeque<CallOutcome>,
    asked: Vec<u64>,
    numbers: Vec<u64>,
    rows: Vec<u32>,
    paths: u8,
    max_bytes: u64,
    current: (u64, [u8; 32]),
}

#[derive(Debug, Clone)]
struct ScriptedExecutor(Arc<Mutex<ExecutorScript>>);

impl ScriptedExecutor {
    fn new(openings: &[OpenOutcome], outcomes: &[CallOutcome]) -> Self {
        Self(Arc::new(Mutex::new(ExecutorScript {
            openings: openings.to_vec().into(),
            outcomes: outcomes.to_vec().into(),
            paths: 0b011,
            max_bytes: 1 << 20,
            current: (1, [1; 32]),
            ..ExecutorScript::default()
        })))
    }

    fn session(&self) -> Result<Session, CallError> {
        self.session_with(ClientSettings { patience: Duration::from_secs(2), ..settings() })
    }

    fn session_with(&self, settings: ClientSettings) -> Result<Session, CallError> {
        Session::open(Box::new(self.clone()), settings)
    }
}

impl ExecutorScript {
    fn catalog(&self) -> Vec<u8> {
        let part = SiteLayer { name: "p".to_owned(), rows: 4, has_bias: 0 };
        let catalog = Catalog {
            model: "m".to_owned(),
            architecture: "a".to_owned(),
            base_hash: self.current.1,
            context_length: 0,
            kv_dtype: KvDtype::F32,
            adapter_dtype: AdapterDtype::Exact,
            sites: vec![Site { columns: 4, paths: self.paths, ring: None, parts: vec![part] }],
            files: Vec::new(),
        };
        catalog.to_bytes()
    }
}

impl Connect for ScriptedExecutor {
    fn connect(&self) -> Result<Box<dyn Transport>, LinkError> {
        let mut script = self.0.lock().unwrap();
        if script.openings.front() == Some(&OpenOutcome::Unreachable) {
            script.openings.pop_front();
            let source = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
            return Err(LinkError::Unreachable { address: "here".to_owned(), source });
        }
        Ok(Box::new(self.clone()))
    }
}

impl Transport for ScriptedExecutor {
    fn ask(&mut self, message: &ToLayers) -> Result<FromLayers, LinkError> {
        let mut script = self.0.lock().unwrap();
        Ok(match message {
            ToLayers::Open(open) => {
                script.asked.push(open.session);
                match script.openings.pop_front() {
                    Some(OpenOutcome::Refused(code, retry_after_ms)) => {
                        let message = "because".to_owned();
                        return Ok(FromLayers::Refused(SessionRefused { code, message, retry_after_ms }));
                    }
                    Some(OpenOutcome::Instance(instance, base)) => script.current = (instance, base),
                    _ => {}
                }
                FromLayers::Opened(SessionOpened {
                    session: 40 + script.asked.len() as u64,
                    instance: script.current.0,
                    tenant: "acme".to_owned(),
                    catalog_bytes: u32::try_from(script.catalog().len()).unwrap(),
                    max_rows: 3,
                    max_waiting_rows: 100,
                    max_bytes: script.max_bytes,
                })
            }
            ToLayers::Fetch(fetch) => {
                let (blob, offset) = (fetch.blob, fetch.offset);
                FromLayers::Fetched(Fetched { blob, offset, bytes: script.catalog() })
            }
            _ => FromLayers::Draining,
        })
    }

    fn send_oneway(&mut self, _message: &ToLayers) {}

    fn call(&mut self, call: &CallHeader, x: &[f32], out: &mut [f32]) -> Result<ReplyHeader, LinkError> {
        let mut script = self.0.lock().unwrap();
        script.numbers.push(call.sequence);
        match script.outcomes.pop_front() {
            Some(CallOutcome::Lost) => Err(LinkError::Lost("told so".to_owned())),
            Some(CallOutcome::Refused(status)) => Ok(ReplyHeader::refusal(call, status, 5)),
            None => {
                script.rows.push(call.rows);
                out.iter_mut().zip(x).for_each(|(out, x)| *out = 2.0 * x);
                let done = ReplyHeader::refusal(call, CallStatus::Done, 0);
                Ok(ReplyHeader { rows: call.rows, batch_rows: call.rows, ..done })
            }
        }
    }
}

const BACKWARD: CallSite =
    CallSite { site: SiteId(0), direction: Direction::Backward, class: CallClass::Training };
const ASK: LayerCall = LayerCall {
    site: SiteId(0),
    part: None,
    op: SiteOp::Forward,
    path: SitePath::Fast,
    class: CallClass::Decode,
};

fn call(session: &mut Session, rows: usize) -> Result<(), CallError> {
    let x: Vec<f32> = (0..rows * 4).map(|value| value as f32).collect();
    let mut out = vec![0.0; x.len()];
    session.call(ASK, &x, &mut out)?;
    assert!(out.iter().zip(&x).all(|(out, x)| *out == 2.0 * x));
    Ok(())
}

#[test]
fn an_unanswered_call_is_repeated_under_its_number_and_a_refused_one_under_another() {
    let outcomes = [
        CallOutcome::Lost,
        CallOutcome::Refused(CallStatus::Busy),
        CallOutcome::Refused(CallStatus::Quota),
        CallOutcome::Refused(CallStatus::Failed),
    ];
    let executor = ScriptedExecutor::new(&[], &outcomes);
    let mut session = executor.session().unwrap();
    call(&mut session, 1).unwrap();
    let script = executor.0.lock().unwrap();
    assert_eq!(script.numbers, [1, 1, 2, 3, 4]);
    assert_eq!(script.asked, [0, 41], "the session was taken over");
    drop(script);
    assert_eq!((session.usage().repeats, session.usage().reconnections), (4, 1));
}

#[test]
fn a_number_the_executor_has_answered_before_the_connection_was_lost_is_replaced() {
    let executor =
        ScriptedExecutor::new(&[], &[CallOutcome::Lost, CallOutcome::Refused(CallStatus::Sequence)]);
    call(&mut executor.session().unwrap(), 1).unwrap();
    assert_eq!(executor.0.lock().unwrap().numbers, [1, 1, 2]);
    let executor = ScriptedExecutor::new(&[], &[CallOutcome::Refused(CallStatus::Sequence)]);
    let error = call(&mut executor.session().unwrap(), 1).unwrap_err();
    assert!(matches!(error, CallError::Link(LinkError::Protocol(_))), "{error}");
}

#[test]
fn a_restarted_executor_is_found_again_and_gets_a_new_session() {
    let openings = [
        OpenOutcome::Instance(1, [1; 32]),
        OpenOutcome::Unreachable,
        OpenOutcome::Refused(RefusalCode::Draining, 10),
        OpenOutcome::Refused(RefusalCode::NoSuchSession, 0),
        OpenOutcome::Instance(2, [1; 32]),
    ];
    let executor = ScriptedExecutor::new(&openings, &[CallOutcome::Refused(CallStatus::Draining)]);
    let mut session = executor.session().unwrap();
    call(&mut session, 1).unwrap();
    assert_eq!(session.opened().instance, 2);
    assert_eq!(executor.0.lock().unwrap().asked, [0, 41, 41, 0]);
}

#[test]
fn an_executor_that_is_about_to_end_is_waited_for_by_questions_too() {
    let mut session = ScriptedExecutor::new(&[], &[]).session().unwrap();
    let error = session.stats().unwrap_err();
    assert!(matches!(error, CallError::PeerGone { source: LinkError::Draining, .. }), "{error}");
}

#[test]
fn another_base_is_an_error_and_never_gone_on_with() {
    let openings = [OpenOutcome::Instance(1, [1; 32]), OpenOutcome::Instance(2, [9; 32])];
    let executor = ScriptedExecutor::new(&openings, &[CallOutcome::Lost]);
    let mut session = executor.session().unwrap();
    let error = call(&mut session, 1).unwrap_err();
    assert!(matches!(error, CallError::OtherBase { .. }), "{error}");
    assert_eq!(executor.0.lock().unwrap().numbers, [1], "the other base was asked nothing");
}

#[test]
fn refusals_that_do_not_pass_end_with_a_name_of_their_own() {
    let many = |status| vec![CallOutcome::Refused(status); 100];
    let fails = |outcomes: &[CallOutcome]| {
        let executor = ScriptedExecutor::new(&[], outcomes);
        call(&mut executor.session().unwrap(), 1).unwrap_err()
    };
    let quota = fails(&many(CallStatus::Quota));
    assert!(matches!(&quota, CallError::Quota { tenant, .. } if tenant == "acme"), "{quota}");
    assert!(matches!(fails(&many(CallStatus::Busy)), CallError::Busy { .. }));
    assert!(matches!(fails(&many(CallStatus::Failed)), CallError::Failed { attempts: 3, .. }));
    assert!(matches!(fails(&many(CallStatus::Shape)), CallError::Shape { .. }));
    assert!(matches!(fails(&many(CallStatus::Nonlinear)), CallError::Nonlinear { site: 0 }));
    assert!(matches!(fails(&many(CallStatus::UnknownSite)), CallError::UnknownSite { site: 0 }));
    assert!(matches!(fails(&many(CallStatus::Draining)), CallError::PeerGone { instance: 1, .. }));
    assert!(matches!(fails(&[CallOutcome::Lost; 100]), CallError::PeerGone { instance: 1, .. }));
}

#[test]
fn a_session_without_room_is_waited_for_and_a_refused_one_is_not() {
    let busy = OpenOutcome::Refused(RefusalCode::Busy, 10);
    let executor = ScriptedExecutor::new(&[busy.clone(), busy.clone()], &[]);
    call(&mut executor.session().unwrap(), 1).unwrap();
    let executor = ScriptedExecutor::new(&vec![busy; 100], &[]);
    assert!(matches!(executor.session(), Err(CallError::Busy { .. })));
    for code in [RefusalCode::Version, RefusalCode::Unauthenticated, RefusalCode::Masking] {
        let executor = ScriptedExecutor::new(&[OpenOutcome::Refused(code, 0)], &[]);
        let error = executor.session().unwrap_err();
        assert!(
            matches!(&error, CallError::Link(LinkError::Refused(refused)) if refused.code == code),
            "{error}"
        );
    }
}

#[test]
fn a_session_has_another_beside_it_where_the_executor_grants_one() {
    let openings =
        [OpenOutcome::Instance(1, [1; 32]), OpenOutcome::Unreachable, OpenOutcome::Instance(2, [1; 32])];
    let executor = ScriptedExecutor::new(&openings, &[]);
    let mut session = executor.session().unwrap();
    let mut another = session.another().unwrap().unwrap();
    call(&mut session, 1).unwrap();
    call(&mut another, 1).unwrap();
    assert_eq!(executor.0.lock().unwrap().asked, [0, 0], "each is a new one");
    assert_eq!((another.usage().calls, another.usage().reconnections), (1, 0));
    for code in [RefusalCode::Quota, RefusalCode::Busy] {
        executor.0.lock().unwrap().openings.push_back(OpenOutcome::Refused(code, 10));
        assert!(session.another().unwrap().is_none(), "it is asked once, and goes on with what there is");
    }
    executor.0.lock().unwrap().openings.push_back(OpenOutcome::Instance(3, [9; 32]));
    assert!(matches!(session.another(), Err(CallError::OtherBase { .. })));
}

#[test]
fn large_calls_are_cut_to_what_the_executor_takes() {
    let executor = ScriptedExecutor::new(&[], &[]);
    call(&mut executor.session().unwrap(), 8).unwrap();
    assert_eq!(executor.0.lock().unwrap().rows, [3, 3, 2]);
    // Two rows of 8 values in and out are 64 bytes; the client uses half of the grant.
    let executor = ScriptedExecutor::new(&[], &[]);
    executor.0.lock().unwrap().max_bytes = 130;
    call(&mut executor.session().unwrap(), 5).unwrap();
    assert_eq!(executor.0.lock().unwrap().rows, [2, 2, 1]);
    executor.0.lock().unwrap().max_bytes = 63;
    let error = call(&mut executor.session().unwrap(), 1).unwrap_err();
    assert!(matches!(error, CallError::Shape { .. }), "{error}");
}

#[test]
fn calls_that_cannot_fit_are_not_sent() {
    let executor = ScriptedExecutor::new(&[], &[]);
    let mut session = executor.session().unwrap();
    let mut out = [0.0; 4];
    assert!(matches!(session.call(ASK, &[0.0; 5], &mut out), Err(CallError::Shape { .. })));
    assert!(matches!(session.call(ASK, &[0.0; 8], &mut out), Err(CallError::Shape { .. })));
    let elsewhere = LayerCall { site: SiteId(1), ..ASK };
    assert!(matches!(session.call(elsewhere, &[0.0; 4], &mut out), Err(CallError::UnknownSite { site: 1 })));
    let no_part = LayerCall { part: Some(1), ..ASK };
    assert!(matches!(session.call(no_part, &[0.0; 4], &mut out), Err(CallError::UnknownSite { site: 0 })));
    assert!(executor.0.lock().unwrap().numbers.is_empty());
}

#[test]
fn masking_is_refused_where_a_site_rounds_and_where_the_wire_would() {
    let paper = Masking::Paper(NoiseSettings::default());
    let executor = ScriptedExecutor::new(&[], &[]);
    executor.0.lock().unwrap().paths = 0b001;
    let mut session = executor.session().unwrap();
    assert!(matches!(
        paper.clone().prepare(&mut session, &mut |_, _| {}),
        Err(CallError::Nonlinear { site: 0 })
    ));
    executor.0.lock().unwrap().paths = 0b011;
    let mut session = executor.session_with(ClientSettings { dtype: Dtype::Bf16, ..settings() }).unwrap();
    assert!(matches!(paper.prepare(&mut session, &mut |_, _| {}), Err(CallError::Masking(_))));
    let mut session = executor.session().unwrap();
    let none = Masking::Paper(NoiseSettings { noises: 0, ..NoiseSettings::default() });
    assert!(matches!(none.prepare(&mut session, &mut |_, _| {}), Err(CallError::Masking(_))));
    assert!(executor.0.lock().unwrap().numbers.is_empty(), "no row was sent");
}

#[test]
fn gradients_are_refused_where_a_site_rounds() {
    let executor = ScriptedExecutor::new(&[], &[]);
    executor.0.lock().unwrap().paths = 0b001;
    let mut session = executor.session().unwrap();
    let mut mask = Masking::Off { path: SitePath::Linear }.prepare(&mut session, &mut |_, _| {}).unwrap();
    let error = mask.call(&mut session, BACKWARD, &[1.0; 4], &mut [0.0; 4]).unwrap_err();
    assert!(matches!(error, CallError::Nonlinear { site: 0 }), "{error}");
    assert!(executor.0.lock().unwrap().numbers.is_empty(), "no row was sent");
}

#[test]
fn a_gradient_whose_noise_is_refused_is_not_sent() {
    let executor = ScriptedExecutor::new(&[], &[]);
    let mut session = executor.session().unwrap();
    let mut mask = Masking::Paper(NoiseSettings::default()).prepare(&mut session, &mut |_, _| {}).unwrap();
    let (g, mut out) = ([1.0, -2.0, 3.0, 0.5], [0.0; 4]);
    executor.0.lock().unwrap().outcomes.push_back(CallOutcome::Refused(CallStatus::Nonlinear));
    let error = mask.call(&mut session, BACKWARD, &g, &mut out).unwrap_err();
    assert!(matches!(error, CallError::Nonlinear { site: 0 }), "{error}");
    assert_eq!(executor.0.lock().unwrap().numbers, [1, 2], "noises of activations, noises of gradients");
    // Noises without effects are discarded too.
    mask.call(&mut session, BACKWARD, &g, &mut out).unwrap();
    assert_eq!(executor.0.lock().unwrap().rows, [2, 2, 1]);
    assert!(out.iter().zip(g).all(|(out, g)| (out - 2.0 * g).abs() < 1e-4), "{out:?}");
}
