//! The layer service without listeners: sessions, calls through shared memory and queues, batches, and
//! concurrent clients.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use kernels::Activations;
use kv_cache::ledger::MemoryAccount;
use layer_service::{
    SessionTransport, Tenant,
    batching_policy::LONGEST_WAIT,
    dispatcher::Dispatcher,
    event_queue::{Payload, Replies, Reply, inbox},
    registry::{MAX_CALLS, MaskedRowSupport, RegisteredSession, Registry, ServedBase},
    settings::{BatchingPolicy, LayerSettings, Quotas},
};
use model::{
    deltas::prepared::PreparedAdapter,
    forward::{ForwardPass as _, LogitRows, SequenceSlice},
    linear_sites::{EvaluateError, EvaluateSites, Site, SiteCall, SiteId, SitePart},
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
};
use scheduling::clock::{Clock, SystemClock};
use shmproto::{
    channel::{ClientChannel, Geometry},
    layer::{
        CallClass, CallHeader, CallStatus, Dtype, LAYER_VERSION, ReplyHeader, RowSource, SiteOp, SitePath,
        control::{RefusalCode, SessionOpen},
    },
};
use tokio::sync::mpsc;
use types::BlockId;

use crate::tiny;

const SLAB: u64 = 1 << 20;
/// Offset of answers in a test's slab.
pub(crate) const OUT: u64 = SLAB / 2;

pub(crate) struct DispatcherFixture {
    pub(crate) base: Box<dyn EvaluateSites>,
    pub(crate) dispatcher: Dispatcher,
    registry: Registry,
}

impl DispatcherFixture {
    fn new(settings: LayerSettings) -> Self {
        Self::over(Box::new(resident()), settings)
    }

    pub(crate) fn over(base: Box<dyn EvaluateSites>, settings: LayerSettings) -> Self {
        Self::at(Box::new(SystemClock), base, settings)
    }

    fn at(clock: Box<dyn Clock>, base: Box<dyn EvaluateSites>, settings: LayerSettings) -> Self {
        let (sender, inbox) = inbox();
        let served = ServedBase {
            instance: 7,
            catalog_bytes: 9,
            maskable: MaskedRowSupport { linear: true, ring: true },
        };
        let registry = Registry::new(settings.quotas, served, sender, MemoryAccount::default());
        let dispatcher = Dispatcher::new(&*base, settings, registry.clone(), inbox, clock);
        Self { base, dispatcher, registry }
    }

    pub(crate) fn local(&mut self, name: &str) -> LocalClient {
        let mut session =
            self.registry.open(&Tenant::new(name), &open(0), SessionTransport::Channel, None).unwrap();
        let client = channel(&mut session);
        self.dispatcher.poll();
        LocalClient { session, client, sequence: 0 }
    }

    pub(crate) fn remote(&self, number: u64, most: usize) -> (RegisteredSession, mpsc::Receiver<Reply>) {
        let (replies, answers) = Replies::queue(most);
        let session =
            self.registry.open(&Tenant::new("far"), &open(number), SessionTransport::Tls, Some(replies));
        (session.unwrap(), answers)
    }

    pub(crate) fn run(&mut self) {
        let begin = Instant::now();
        self.dispatcher.poll();
        while !self.dispatcher.is_idle() {
            if self.dispatcher.run_due(&mut *self.base).rows == 0 {
                self.dispatcher.wait(None);
            }
            self.dispatcher.poll();
            assert!(begin.elapsed() < Duration::from_secs(60), "a call is never computed");
        }
    }

    fn alone(&mut self, call: SiteCall, x: &[f32]) -> Vec<f32> {
        evaluate(&mut *self.base, call, x)
    }
}

/// A clock that only the test advances.
#[derive(Debug, Clone)]
struct StoppedClock(Arc<Mutex<Instant>>);

impl StoppedClock {
    fn advance(&self, time: Duration) {
        *self.0.lock().unwrap() += time;
    }
}

impl Clock for StoppedClock {
    fn now(&self) -> Instant {
        *self.0.lock().unwrap()
    }
}

pub(crate) struct LocalClient {
    pub(crate) session: RegisteredSession,
    pub(crate) client: ClientChannel,
    sequence: u64,
}

impl LocalClient {
    fn call(&mut self, site: u32, class: CallClass, x: &[f32], columns: usize) -> CallHeader {
        let header = self.header(site, class, x.len() / columns);
        self.client.write_rows(header.input, header.dtype, x).unwrap();
        self.client.submit(&header).unwrap();
        header
    }

    pub(crate) fn header(&mut self, site: u32, class: CallClass, rows: usize) -> CallHeader {
        self.sequence += 1;
        CallHeader { sequence: self.sequence, ..header(site, class, rows) }
    }

    pub(crate) fn answer(&mut self, outputs: usize) -> (ReplyHeader, Vec<f32>) {
        let reply = self.client.try_take().unwrap().expect("an answer is there");
        let mut rows = vec![0.0; reply.rows as usize * outputs];
        self.client.read_rows(OUT, Dtype::F32, &mut rows).unwrap();
        (reply, rows)
    }

    pub(crate) fn refusal(&mut self) -> CallStatus {
        let reply = self.client.try_take().unwrap().expect("a refusal is there");
        assert_eq!(reply.rows, 0);
        reply.status
    }
}

fn header(site: u32, class: CallClass, rows: usize) -> CallHeader {
    CallHeader {
        op: SiteOp::Forward,
        path: SitePath::Fast,
        class,
        dtype: Dtype::F32,
        site,
        part: None,
        source: RowSource::Rows,
        sequence: 1,
        rows: u32::try_from(rows).unwrap(),
        input: 0,
        output: OUT,
    }
}

fn open(session: u64) -> SessionOpen {
    SessionOpen {
        version: LAYER_VERSION,
        layout_hash: 0,
        key: String::new(),
        name: "test".to_owned(),
        masking: "off".to_owned(),
        session,
    }
}

fn channel(session: &mut RegisteredSession) -> ClientChannel {
    let mut given = None;
    let give = |channel: &shmproto::channel::ExecutorChannel| {
        let fd = channel.fd().unwrap().try_clone_to_owned().unwrap();
        given = Some((fd, channel.region_bytes(), channel.geometry()));
        Ok(())
    };
    session.channel(SLAB, give).unwrap();
    let (fd, bytes, geometry): (_, u64, Geometry) = given.unwrap();
    ClientChannel::join(fd, bytes, geometry).unwrap()
}

fn resident() -> ResidentModel {
    let directory = tempfile::tempdir().unwrap();
    tiny::write_model(directory.path());
    let source = model::sources::open::open(directory.path()).unwrap();
    let weights = LoadedWeights::load(&*source, 1).unwrap();
    let options = ResidentOptions { cores: Vec::new(), kv_bytes: 1 << 20, kv_dtype: None };
    ResidentModel::new(weights, &options).unwrap()
}

pub(crate) fn evaluate(base: &mut dyn EvaluateSites, call: SiteCall, x: &[f32]) -> Vec<f32> {
    let (input, output) = base.sites()[call.site.0 as usize].widths(call.part, call.op).unwrap();
    let mut rows = Activations::default();
    rows.reshape(x.len() / input, input);
    rows.values_mut().copy_from_slice(x);
    let mut out = vec![0.0; x.len() / input * output];
    base.evaluate(call, &mut rows, &mut out).unwrap();
    out
}

fn forward(site: u32) -> SiteCall {
    SiteCall { site: SiteId(site), part: None, op: SiteOp::Forward, path: SitePath::Fast }
}

pub(crate) fn rows(salt: u32, count: usize) -> Vec<f32> {
    (0..count as u32)
        .map(|index| (index.wrapping_mul(747_796_405).wrapping_add(salt * 99_991) >> 12) as f32 / 1e6 - 0.5)
        .collect()
}

pub(crate) fn bits(rows: &[f32]) -> Vec<u32> {
    rows.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn a_session_of_one_executor_is_no_session_of_its_successor() {
    let [had, other] = [3 << 40, 5 << 40].map(|instance| {
        let served = ServedBase {
            instance,
            catalog_bytes: 9,
            maskable: MaskedRowSupport { linear: true, ring: true },
        };
        let (sender, inbox) = inbox();
        let registry =
            Registry::new(LayerSettings::default().quotas, served, sender, MemoryAccount::default());
        let session = registry.open(&Tenant::new("a"), &open(0), SessionTransport::Channel, None).unwrap();
        (registry, session, inbox)
    });
    let number = had.1.opened().session;
    let refused =
        other.0.open(&Tenant::new("a"), &open(number), SessionTransport::Channel, None).unwrap_err();
    assert_eq!(refused.code, RefusalCode::NoSuchSession);
    assert!(!other.1.is_closed(), "nobody else's session was taken over");
}

#[test]
fn calls_through_shared_memory_give_the_bits_of_the_base() {
    let mut rig = DispatcherFixture::new(LayerSettings::default());
    let mut local = rig.local("a");
    let ops = [
        (SiteOp::Forward, SiteOp::Forward),
        (SiteOp::ForwardNoBias, SiteOp::ForwardNoBias),
        (SiteOp::Backward, SiteOp::Backward),
    ];
    for site in 0..9 {
        for (op, site_op) in ops {
            for part in [None, Some(0)] {
                let path = SitePath::Fast;
                let call = SiteCall { site: SiteId(site), part, op: site_op, path };
                let (input, output) = rig.base.sites()[site as usize].widths(part, site_op).unwrap();
                let x = rows(site, 3 * input);
                let header = CallHeader { op, part, ..local.header(site, CallClass::Training, 3) };
                local.client.write_rows(0, Dtype::F32, &x).unwrap();
                local.client.submit(&header).unwrap();
                rig.run();
                let (reply, out) = local.answer(output);
                assert_eq!(
                    (reply.status, reply.sequence, reply.rows),
                    (CallStatus::Done, header.sequence, 3)
                );
                assert_eq!(bits(&out), bits(&rig.alone(call, &x)), "{call:?}");
            }
        }
    }
    let stats = local.session.stats();
    assert_eq!((stats.calls, stats.refused, stats.rows[CallClass::Training as usize]), (54, 0, 162));
}

#[test]
fn beside_requests_a_noise_has_its_turn_and_training_one_before_its_client_gives_up() {
    let clock = StoppedClock(Arc::new(Mutex::new(Instant::now())));
    let settings = LayerSettings { training_share: 0.0, ..LayerSettings::default() };
    let mut rig = DispatcherFixture::at(Box::new(clock.clone()), Box::new(resident()), settings);
    let [mut trainer, mut masked] = ["trainer", "masked"].map(|name| rig.local(name));
    trainer.call(0, CallClass::Training, &rows(1, 64), 64);
    masked.call(4, CallClass::Noise, &rows(2, 64), 64);
    let mut after = |time| {
        clock.advance(time);
        rig.dispatcher.poll();
        rig.dispatcher.run_beside(Duration::from_millis(8), &mut *rig.base);
        let answered = |local: &mut LocalClient| local.client.try_take().unwrap().map(|reply| reply.status);
        [answered(&mut masked), answered(&mut trainer)]
    };
    assert_eq!(after(Duration::from_secs(1)), [Some(CallStatus::Done), None]);
    assert_eq!(after(LONGEST_WAIT), [None, Some(CallStatus::Done)]);
}

#[test]
fn eight_clients_get_the_same_bits_under_every_policy() {
    for policy in [BatchingPolicy::Opportunistic, BatchingPolicy::Alone, BatchingPolicy::Lockstep] {
        let mut settings = LayerSettings::default();
        settings.batching.policy = policy;
        settings.batching.chunk_rows = 32;
        let mut rig = DispatcherFixture::new(settings);
        let mut locals: Vec<_> = (0..8).map(|index| rig.local(&format!("tenant {index}"))).collect();
        for round in 0..3_u32 {
            let mut sent = Vec::new();
            for (index, local) in locals.iter_mut().enumerate() {
                // From one token up to several batches; two sites.
                let count = [1, 2, 5, 33, 1, 70, 9, 1][index];
                let (site, x) = (4 * (index as u32 % 2), rows(round * 8 + index as u32, 64 * count));
                local.call(site, CallClass::ALL[index % 5], &x, 64);
                sent.push((site, x));
            }
            rig.run();
            for (local, (site, x)) in locals.iter_mut().zip(sent) {
                let (reply, out) = local.answer(128);
                assert_eq!(reply.status, CallStatus::Done);
                assert_eq!(bits(&out), bits(&rig.alone(forward(site), &x)), "{policy:?}");
                if policy == BatchingPolicy::Alone {
                    assert!(reply.batch_rows <= 32 && reply.batch_rows <= reply.rows);
                }
            }
        }
    }
}

#[test]
fn what_is_no_number_harms_only_its_own_row() {
    let mut rig = DispatcherFixture::new(LayerSettings::default());
    let (mut sick, mut sound) = (rig.local("sick"), rig.local("sound"));
    let x = rows(1, 4 * 64);
    let mut poisoned = rows(2, 2 * 64);
    poisoned[3] = f32::NAN;
    poisoned[70] = f32::INFINITY;
    sick.call(0, CallClass::Decode, &poisoned, 64);
    sound.call(0, CallClass::Decode, &x, 64);
    rig.run();
    let (reply, out) = sound.answer(128);
    assert_eq!(reply.batch_rows, 6, "they were computed together");
    assert_eq!(bits(&out), bits(&rig.alone(forward(0), &x)));
    assert!(sick.answer(128).1.iter().any(|value| !value.is_finite()));
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let mut rig = DispatcherFixture::new(LayerSettings {
        quotas: Quotas { tenant_rows: 40, ..Quotas::default() },
        ..LayerSettings::default()
    });
    let mut local = rig.local("a");
    let mut refused = |change: fn(CallHeader) -> CallHeader| {
        let header = change(local.header(0, CallClass::Decode, 1));
        local.client.submit(&header).unwrap();
        rig.dispatcher.poll();
        local.refusal()
    };
    assert_eq!(refused(|call| CallHeader { site: 9, ..call }), CallStatus::UnknownSite);
    assert_eq!(refused(|call| CallHeader { part: Some(3), ..call }), CallStatus::UnknownSite);
    assert_eq!(refused(|call| CallHeader { rows: 41, ..call }), CallStatus::Shape);
    assert_eq!(refused(|call| CallHeader { output: SLAB - 64, ..call }), CallStatus::Shape);
    let x = rows(1, 30 * 64);
    local.call(0, CallClass::Prefill, &x, 64);
    let repeated = local.call(0, CallClass::Prefill, &x, 64);
    rig.dispatcher.poll();
    assert_eq!(local.refusal(), CallStatus::Quota);
    rig.run();
    assert_eq!(local.answer(128).0.status, CallStatus::Done);
    // A rejected sequence number may be repeated, an answered one may not.
    local.client.submit(&repeated).unwrap();
    rig.run();
    assert_eq!(local.answer(128).0.status, CallStatus::Done);
    local.client.submit(&repeated).unwrap();
    rig.dispatcher.poll();
    assert_eq!(local.refusal(), CallStatus::Sequence);
    rig.dispatcher.drain();
    local.call(0, CallClass::Decode, &x[..64], 64);
    rig.dispatcher.poll();
    assert_eq!(local.refusal(), CallStatus::Draining);
    assert_eq!(local.session.stats().refused, 7);
}

#[test]
fn a_number_that_still_waits_is_computed_once_and_the_newer_call_counts() {
    let mut rig = DispatcherFixture::new(LayerSettings::default());
    let mut local = rig.local("a");
    let (old, new) = (rows(1, 64), rows(2, 64));
    let header = local.call(0, CallClass::Decode, &old, 64);
    rig.dispatcher.poll();
    local.client.write_rows(0, Dtype::F32, &new).unwrap();
    local.client.submit(&header).unwrap();
    rig.run();
    let (reply, out) = local.answer(128);
    assert_eq!((reply.status, reply.batch_rows), (CallStatus::Done, 1));
    assert_eq!(bits(&out), bits(&rig.alone(forward(0), &new)));
    assert!(local.client.try_take().unwrap().is_none(), "one answer");
    assert_eq!(local.session.stats().calls, 1);
}

#[test]
fn who_breaks_the_protocol_is_let_go_and_the_others_go_on() {
    let mut rig = DispatcherFixture::new(LayerSettings::default());
    let (mut bad, mut good) = (rig.local("bad"), rig.local("good"));
    let x = rows(1, 64);
    bad.call(0, CallClass::Decode, &x, 64);
    good.call(0, CallClass::Decode, &x, 64);
    rig.dispatcher.poll();
    let header = CallHeader { input: 1, ..bad.header(0, CallClass::Decode, 1) };
    bad.client.submit(&header).unwrap();
    rig.run();
    assert!(bad.session.is_closed() && !good.session.is_closed());
    let (reply, out) = good.answer(128);
    assert_eq!((reply.status, reply.batch_rows), (CallStatus::Done, 1));
    assert_eq!(bits(&out), bits(&rig.alone(forward(0), &x)));
    assert_eq!(rig.dispatcher.stats().broken, 1);
}

#[test]
fn who_takes_no_answers_is_let_go() {
    let mut rig = DispatcherFixture::new(LayerSettings::default());
    let mut local = rig.local("a");
    for _ in 0..=MAX_CALLS {
        local.call(0, CallClass::Decode, &rows(1, 64), 64);
        rig.run();
    }
    assert!(local.session.is_closed());
    assert_eq!(rig.dispatcher.stats().broken, 1);
}

#[test]
fn another_channel_forgets_what_was_in_flight() {
    let mut rig = DispatcherFixture::new(LayerSettings::default());
    let mut local = rig.local("a");
    let header = local.call(0, CallClass::Decode, &rows(1, 64), 64);
    rig.dispatcher.poll();
    assert!(!rig.dispatcher.is_idle());
    local.client = channel(&mut local.session);
    rig.dispatcher.poll();
    assert!(rig.dispatcher.is_idle());
    local.client.submit(&header).unwrap();
    rig.run();
    assert_eq!(local.answer(128).0.status, CallStatus::Done);
}

#[test]
fn a_session_that_ends_leaves_nothing_behind() {
    let mut rig = DispatcherFixture::new(LayerSettings {
        quotas: Quotas { tenant_sessions: 1, tenant_bytes: SLAB + SLAB / 2, ..Quotas::default() },
        ..LayerSettings::default()
    });
    let mut local = rig.local("a");
    local.call(0, CallClass::Decode, &rows(1, 64), 64);
    rig.dispatcher.poll();
    let full = rig.registry.open(&Tenant::new("a"), &open(0), SessionTransport::Channel, None).unwrap_err();
    assert_eq!(full.code, RefusalCode::Quota);
    let before = local.session.stats();
    drop(local);
    rig.dispatcher.poll();
    assert!(rig.dispatcher.is_idle());
    // Another session and another slab fit.
    let mut next = rig.local("a");
    next.call(0, CallClass::Decode, &rows(1, 64), 64);
    rig.run();
    let stats = rig.dispatcher.stats();
    assert_eq!((stats.open, stats.used.calls), (1, before.calls + 1));
}

/// Doubles its rows, and panics at rows that begin with 13.
struct DoublingSites {
    sites: Vec<Site>,
}

impl DoublingSites {
    fn new() -> Self {
        let part = SitePart { name: "double".to_owned(), rows: 64, has_bias: false };
        Self {
            sites: vec![
                Site {
                    columns: 64,
                    parts: vec![part],
                    fast_is_linear: false,
                    arithmetic: model::linear_sites::Arithmetic::Unrounded,
                    ring: None
                };
                2
            ],
        }
    }
}

impl EvaluateSites for DoublingSites {
    fn sites(&self) -> &[Site] {
        &self.sites
    }

    fn evaluate(
        &mut self,
        _call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
    ) -> Result<(), EvaluateError> {
        assert!(!x.values().chunks(64).any(|row| row[0] == 13.0), "a batch that the base cannot bear");
        out.iter_mut().zip(x.values()).for_each(|(out, x)| *out = 2.0 * x);
        Ok(())
    }
}

#[test]
fn a_batch_that_fails_ends_its_own_calls_and_no_others() {
    let mut rig = DispatcherFixture::over(Box::new(DoublingSites::new()), LayerSettings::default());
    let (mut bad, mut good) = (rig.local("bad"), rig.local("good"));
    bad.call(0, CallClass::Decode, &[13.0; 64], 64);
    good.call(1, CallClass::Decode, &[1.0; 64], 64);
    rig.run();
    assert_eq!(bad.refusal(), CallStatus::Failed);
    assert_eq!(good.answer(64).1, [2.0; 64]);
    bad.call(0, CallClass::Decode, &[3.0; 64], 64);
    rig.run();
    assert_eq!(bad.answer(64).1, [6.0; 64]);
}

pub(crate) fn payload(session: &RegisteredSession, header: &CallHeader, rows: &[f32]) -> Payload {
    let bytes: Vec<u8> = rows.iter().flat_map(|value| value.to_le_bytes()).collect();
    Payload { held: session.reserve(header, bytes.len() as u64).unwrap(), bytes }
}

pub(crate) fn numbers(reply: &Reply) -> Vec<f32> {
    let bytes = &reply.payload.as_ref().unwrap().bytes;
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

pub(crate) fn far(sequence: u64, rows: usize) -> CallHeader {
    CallHeader { sequence, input: 0, output: 0, ..header(0, CallClass::Prefill, rows) }
}

#[test]
fn calls_of_messages_give_the_same_bits_whole_or_cut() {
    let mut rig = DispatcherFixture::new(LayerSettings::default());
    let (session, mut answers) = rig.remote(0, 8);
    for (sequence, count) in [(1, 1), (2, 300), (3, 600)] {
        let x = rows(sequence as u32, count * 64);
        let header = far(sequence, count);
        session.call(header, payload(&session, &header, &x)).unwrap();
        rig.run();
        let reply = answers.try_recv().unwrap();
        assert_eq!((reply.header.status, reply.header.sequence), (CallStatus::Done, sequence));
        assert_eq!(bits(&numbers(&reply)), bits(&rig.alone(forward(0), &x)));
    }
    let header = far(4, 2);
    session.call(header, payload(&session, &header, &[0.0; 64])).unwrap();
    rig.run();
    assert_eq!(answers.try_recv().unwrap().header.status, CallStatus::Shape);
}

#[test]
fn bytes_are_held_until_an_answer_is_gone() {
    let quotas = Quotas { tenant_bytes: 2000, ..Quotas::default() };
    let mut rig = DispatcherFixture::new(LayerSettings { quotas, ..LayerSettings::default() });
    let (session, mut answers) = rig.remote(0, 8);
    let header = far(1, 2);
    // 512 bytes in and 1,024 out.
    session.call(header, payload(&session, &header, &[0.0; 128])).unwrap();
    rig.run();
    let refused = session.reserve(&far(2, 4), 1024).unwrap_err();
    assert_eq!(refused.status, CallStatus::Quota);
    drop(answers.try_recv().unwrap());
    assert!(session.reserve(&far(2, 4), 1024).is_ok());
}

#[test]
fn a_remote_client_that_takes_no_answers_is_let_go() {
    let mut rig = DispatcherFixture::new(LayerSettings::default());
    let (session, mut answers) = rig.remote(0, 1);
    for sequence in 1..=2 {
        let header = far(sequence, 1);
        session.call(header, payload(&session, &header, &[0.0; 64])).unwrap();
    }
    rig.run();
    assert!(session.is_closed());
    assert!(answers.try_recv().is_ok());
    assert_eq!(answers.try_recv().unwrap_err(), mpsc::error::TryRecvError::Disconnected);
}

#[test]
fn a_session_is_taken_over_with_its_number_and_repeats_what_it_has_no_answer_to() {
    let mut rig = DispatcherFixture::new(LayerSettings::default());
    let (lost, mut old) = rig.remote(0, 8);
    let number = lost.opened().session;
    let header = far(5, 1);
    lost.call(header, payload(&lost, &header, &[0.5; 64])).unwrap();
    rig.run();
    let (session, mut answers) = rig.remote(number, 8);
    assert_eq!(session.opened().session, number);
    let first = numbers(&old.try_recv().unwrap());
    session.call(header, payload(&session, &header, &[0.5; 64])).unwrap();
    rig.run();
    assert_eq!(bits(&numbers(&answers.try_recv().unwrap())), bits(&first));
    assert!(lost.is_closed(), "the old connection is hung up on");
    assert_eq!(old.try_recv().unwrap_err(), mpsc::error::TryRecvError::Disconnected);
    drop(lost);
    rig.dispatcher.poll();
    assert!(!session.is_closed(), "its end is not the end of the session");
    let other =
        rig.registry.open(&Tenant::new("other"), &open(number), SessionTransport::Tls, None).unwrap_err();
    assert_eq!(other.code, RefusalCode::NoSuchSession);
}

#[test]
fn what_a_client_says_of_itself_is_checked() {
    let rig = DispatcherFixture::new(LayerSettings::default());
    let refused = |open: SessionOpen| {
        rig.registry.open(&Tenant::new("a"), &open, SessionTransport::Tls, None).unwrap_err().code
    };
    assert_eq!(refused(SessionOpen { version: 99, ..open(0) }), RefusalCode::Version);
    assert_eq!(refused(SessionOpen { name: "x".repeat(65), ..open(0) }), RefusalCode::Malformed);
    assert_eq!(refused(SessionOpen { name: "a\nb".to_owned(), ..open(0) }), RefusalCode::Malformed);
    assert_eq!(refused(SessionOpen { masking: "perfect".to_owned(), ..open(0) }), RefusalCode::Masking);
    assert_eq!(refused(open(77)), RefusalCode::NoSuchSession);
    rig.registry.drain();
    assert_eq!(refused(open(0)), RefusalCode::Draining);
}

#[test]
fn a_resident_pass_in_company_gives_both_the_bits_they_would_have_alone() {
    let mut resident = resident();
    let (tokens, blocks) = ([5_u32, 9, 200, 31], [BlockId(0)]);
    let slice = || SequenceSlice::<PreparedAdapter> {
        trunk: &[],
        tokens: &tokens,
        start: 0,
        blocks: &blocks,
        adapter: None::<&Arc<PreparedAdapter>>,
        logits: LogitRows::All,
    };
    let (mut alone, mut together) = (Vec::new(), Vec::new());
    resident.forward(&[slice()], &mut alone);
    let mut rig = DispatcherFixture::new(LayerSettings::default());
    let mut locals: Vec<_> = (0..4).map(|index| rig.local(&format!("tenant {index}"))).collect();
    let sites = [(0, 64, 128), (3, 128, 64), (8, 64, 256), (5, 64, 64)];
    let calls: Vec<_> = locals
        .iter_mut()
        .zip(sites)
        .map(|(local, (site, columns, _))| {
            let x = rows(site, 5 * columns);
            local.call(site, CallClass::Prefill, &x, columns);
            (site, x)
        })
        .collect();
    rig.dispatcher.poll();
    resident.forward_with_hooks(&[slice()], &mut together, &mut rig.dispatcher);
    assert_eq!(bits(&together), bits(&alone));
    assert!(rig.dispatcher.is_idle(), "all were served in the course of one pass");
    assert_eq!(rig.dispatcher.stats().joined_rows, 20);
    for ((local, (site, x)), (_, _, outputs)) in locals.iter_mut().zip(calls).zip(sites) {
        let (reply, out) = local.answer(outputs);
        assert_eq!((reply.status, reply.batch_rows), (CallStatus::Done, 9));
        assert_eq!(bits(&out), bits(&rig.alone(forward(site), &x)), "site {site}");
    }
}

#[test]
fn a_token_that_waits_for_another_site_is_served_within_the_pass() {
    let mut resident = resident();
    let mut rig = DispatcherFixture::new(LayerSettings::default());
    let mut local = rig.local("a");
    let x = rows(3, 64);
    let header = CallHeader { path: SitePath::Fast, part: Some(1), ..local.header(0, CallClass::Decode, 1) };
    local.client.write_rows(0, Dtype::F32, &x).unwrap();
    local.client.submit(&header).unwrap();
    let slice = SequenceSlice::<PreparedAdapter> {
        trunk: &[],
        tokens: &[1],
        start: 0,
        blocks: &[BlockId(0)],
        adapter: None,
        logits: LogitRows::Last,
    };
    resident.forward_with_hooks(&[slice], &mut Vec::new(), &mut rig.dispatcher);
    assert!(rig.dispatcher.is_idle());
    let (_, out) = local.answer(32);
    let call = SiteCall { part: Some(1), ..forward(0) };
    assert_eq!(bits(&out), bits(&rig.alone(call, &x)));
}
