//! Every transport to an executor gives the same bits, and a hostile executor can only cause a typed error.

use std::{
    ops::ControlFlow,
    path::Path,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use crate::support::{
    OFF, executor, generate, resident, resident_tokens, sampling, settings, split_of, split_over,
    test_endpoint::{KEY, MaliciousBehavior, TestEndpoint, certificate, private_directory},
    tiny, tokens, widths,
};
use client::{
    address::Address,
    error::{CallError, LinkError},
    generate::{GenerateRequest, Generated},
    session::{ClientSettings, Session, calls::LayerCall},
    speculative::DraftPolicy,
    split_model::SplitOptions,
    transport::{Connect, local::LocalConnector, remote::RemoteConnector, tls::TlsFiles},
};
use model::linear_sites::SiteId;
use security::address::HostPort;
use shmproto::{
    fd_passing::ConnectError,
    layer::{CallClass, Dtype, SiteOp, SitePath},
};
use speculation::{
    baselines::BaselineRule,
    ngram::{AcceptanceTable, Ngram},
};
use testkit::WATCHDOG;

const MODEL: &str = "llama-tied";

fn endpoint(mischief: MaliciousBehavior) -> TestEndpoint {
    let executor = executor(&tiny(MODEL));
    let widths = widths(&executor);
    TestEndpoint::new(executor, widths, mischief)
}

fn ipc(path: &Path) -> Box<dyn Connect> {
    let address = Address::Ipc(path.to_owned());
    Box::new(RemoteConnector::new(address, None, &TlsFiles::default(), WATCHDOG).unwrap())
}

fn local(path: &Path) -> Box<dyn Connect> {
    Box::new(LocalConnector::new(path.to_owned(), Duration::from_micros(20), WATCHDOG))
}

fn tls(port: u16, ca: &Path, host: &str, key: &str) -> Box<dyn Connect> {
    let address = Address::Tls(HostPort { host: host.to_owned(), port });
    let files = TlsFiles { ca: Some(ca.to_owned()), identity: None };
    Box::new(RemoteConnector::new(address, Some(key.to_owned()), &files, WATCHDOG).unwrap())
}

fn task(vocab_size: usize) -> GenerateRequest {
    let sampling = sampling(vocab_size, 0.9, 3);
    GenerateRequest { prompt: tokens(19, vocab_size), sampling, max_tokens: 8, stop_tokens: Vec::new() }
}

/// Generates with draft tokens: as many as possible, at any acceptance probability.
fn drafted(connector: Box<dyn Connect>) -> (Generated, u64) {
    let options = SplitOptions {
        effort: DraftPolicy::Compared(BaselineRule::Nodes(6)),
        kv_bytes: 32 << 20,
        ..SplitOptions::default()
    };
    let mut model = split_of(connector, &tiny(MODEL), &options);
    let task = task(model.config().vocab_size);
    let mut ngram =
        Ngram::new(&[&task.prompt[..], &expected(), &task.prompt[10..]].concat(), AcceptanceTable::default());
    let generated =
        model.generate_drafted(&task, None, &mut ngram, &mut |_| ControlFlow::Continue(())).unwrap();
    (generated, model.session().usage().reconnections)
}

fn expected() -> Vec<u32> {
    let (mut model, _) = resident(&tiny(MODEL));
    let task = task(model.config().vocab_size);
    resident_tokens(&mut model, &task, None)
}

fn found(connector: Box<dyn Connect>) -> (Vec<u32>, u64) {
    let mut model = split_over(connector, &tiny(MODEL), OFF);
    let task = task(model.config().vocab_size);
    let generated = generate(&mut model, &task, None);
    (generated.tokens, model.session().usage().reconnections)
}

fn one_call(session: &mut Session) -> Result<Vec<f32>, CallError> {
    let site = &session.catalog().sites[0];
    let (columns, outputs) =
        (site.columns as usize, site.parts.iter().map(|part| part.rows as usize).sum::<usize>());
    let (x, mut out) = (vec![0.25; 2 * columns], vec![0.0; 2 * outputs]);
    let (op, path, class) = (SiteOp::Forward, SitePath::Fast, CallClass::Decode);
    session.call(LayerCall { site: SiteId(0), part: None, op, path, class }, &x, &mut out)?;
    Ok(out)
}

#[test]
fn shared_memory_a_unix_socket_and_tls_give_the_tokens_of_the_resident_model() {
    let directory = private_directory();
    let expected = expected();
    assert_eq!(
        found(local(&endpoint(MaliciousBehavior::None).local(directory.path()))),
        (expected.clone(), 0)
    );
    assert_eq!(found(ipc(&endpoint(MaliciousBehavior::None).ipc(directory.path()))), (expected.clone(), 0));
    let (ca, config) = certificate(directory.path());
    let port = endpoint(MaliciousBehavior::None).tls(config);
    assert_eq!(found(tls(port, &ca, "localhost", KEY)), (expected, 0));
}

#[test]
fn an_executor_that_dies_every_few_calls_changes_nothing_but_the_time() {
    for most in [1, 7] {
        let directory = private_directory();
        let place = directory.path();
        let (ipc_door, local_door) =
            (endpoint(MaliciousBehavior::DiesAfter(most)), endpoint(MaliciousBehavior::DiesAfter(most)));
        let seen = (ipc_door.connections.clone(), local_door.connections.clone());
        for (connector, seen) in
            [(ipc(&ipc_door.ipc(place)), seen.0), (local(&local_door.local(place)), seen.1)]
        {
            let (tokens, reconnections) = found(connector);
            assert_eq!(tokens, expected(), "it died after every {most} calls");
            assert!(reconnections > 5 && seen.load(Ordering::Relaxed) > 5);
        }
    }
}

#[test]
fn guesses_change_no_token_on_any_way_nor_when_the_executor_dies_amid_a_tree() {
    let (directory, other) = (private_directory(), private_directory());
    let place = directory.path();
    let (ca, config) = certificate(place);
    let port = endpoint(MaliciousBehavior::None).tls(config);
    let dying = |calls| endpoint(MaliciousBehavior::DiesAfter(calls));
    let ways = [
        (local(&endpoint(MaliciousBehavior::None).local(place)), 0),
        (tls(port, &ca, "localhost", KEY), 0),
        (ipc(&dying(4).ipc(place)), 2),
        (local(&dying(5).local(other.path())), 2),
    ];
    for (connector, least_reconnections) in ways {
        let (generated, reconnections) = drafted(connector);
        assert_eq!(generated.tokens, expected());
        assert!(generated.drafted.accepted > 0, "{:?}", generated.drafted);
        assert!(reconnections >= least_reconnections);
    }
}

#[test]
fn an_executor_that_stays_away_is_given_up_with_its_name() {
    let directory = private_directory();
    let path = endpoint(MaliciousBehavior::DiesAfter(0)).ipc(directory.path());
    let patience = Duration::from_millis(300);
    let mut session = Session::open(ipc(&path), ClientSettings { patience, ..settings() }).unwrap();
    let (begun, own) = (Instant::now(), session.opened().instance);
    let error = one_call(&mut session).unwrap_err();
    assert!(matches!(error, CallError::PeerGone { instance, .. } if instance == own), "{error}");
    assert!(begun.elapsed() < WATCHDOG, "patience ends");
    // A retry is allowed.
    assert!(matches!(one_call(&mut session), Err(CallError::PeerGone { .. })));
}

#[test]
fn nobody_at_the_address_is_said_at_once() {
    let directory = private_directory();
    let error = Session::open(local(&directory.path().join("x.sock")), settings()).unwrap_err();
    assert!(matches!(error, CallError::Link(LinkError::Local(ConnectError::Absent(_)))), "{error}");
    let error = Session::open(ipc(&directory.path().join("x.zmq")), settings()).unwrap_err();
    assert!(matches!(error, CallError::Link(LinkError::Unreachable { .. })), "{error}");
}

#[test]
fn answers_that_make_no_sense_are_protocol_errors_and_never_rows() {
    for mischief in [
        MaliciousBehavior::OtherSequence,
        MaliciousBehavior::OtherRows,
        MaliciousBehavior::OtherDtype,
        MaliciousBehavior::ShortRows,
        MaliciousBehavior::GarbageHeader,
        MaliciousBehavior::OneFrame,
        MaliciousBehavior::EmptyHeader,
        MaliciousBehavior::GarbageControl,
    ] {
        let directory = private_directory();
        let mut session = Session::open(ipc(&endpoint(mischief).ipc(directory.path())), settings()).unwrap();
        let error = one_call(&mut session).unwrap_err();
        assert!(matches!(error, CallError::Link(LinkError::Protocol(_))), "{mischief:?}: {error}");
    }
    for mischief in
        [MaliciousBehavior::OtherSequence, MaliciousBehavior::OtherRows, MaliciousBehavior::OtherDtype]
    {
        let directory = private_directory();
        let mut session =
            Session::open(local(&endpoint(mischief).local(directory.path())), settings()).unwrap();
        let error = one_call(&mut session).unwrap_err();
        assert!(matches!(error, CallError::Link(LinkError::Protocol(_))), "{mischief:?}: {error}");
    }
}

#[test]
fn a_wrong_key_another_name_and_an_unknown_authority_are_told_apart() {
    let directory = private_directory();
    let (ca, config) = certificate(directory.path());
    let port = endpoint(MaliciousBehavior::None).tls(config);
    let open = |connector| Session::open(connector, settings());
    assert!(open(tls(port, &ca, "localhost", KEY)).is_ok());
    let error = open(tls(port, &ca, "localhost", "wrong")).unwrap_err();
    assert!(matches!(error, CallError::Link(LinkError::Unauthenticated(_))), "{error}");
    let error = open(tls(port, &ca, "127.0.0.1", KEY)).unwrap_err();
    assert!(matches!(error, CallError::Link(LinkError::Tls { .. })), "{error}");
    let other = private_directory();
    let (other_ca, _) = certificate(other.path());
    let error = open(tls(port, &other_ca, "localhost", KEY)).unwrap_err();
    assert!(matches!(error, CallError::Link(LinkError::Tls { .. })), "{error}");
    // No debug output of a client contains its key.
    assert!(!format!("{:?}", tls(port, &ca, "localhost", KEY)).contains(KEY));
}

#[test]
fn rows_of_16_bits_are_rounded_alike_on_every_way() {
    let directory = private_directory();
    let settings = || ClientSettings { dtype: Dtype::Bf16, ..settings() };
    let mut outs = Vec::new();
    for connector in [
        Box::new(executor(&tiny(MODEL))) as Box<dyn Connect>,
        local(&endpoint(MaliciousBehavior::None).local(directory.path())),
        ipc(&endpoint(MaliciousBehavior::None).ipc(directory.path())),
    ] {
        let mut session = Session::open(connector, settings()).unwrap();
        outs.push(one_call(&mut session).unwrap());
        assert_eq!(session.usage().bytes_out, 2 * 2 * u64::from(session.catalog().sites[0].columns));
    }
    assert_eq!(outs[0], outs[1]);
    assert_eq!(outs[0], outs[2]);
}
