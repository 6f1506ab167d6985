//! Hostile split clients: they flood, stall, lie, repeat themselves, or vanish, without effect on other
//! clients.
//!
//! A resident client and a split one of another tenant repeat golden requests. Each test makes one attack,
//! and then checks that the executor holds the same resources as before.

use std::{
    io::{self, ErrorKind, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use e2e_tests::{
    BASE, Client, CompletionAnswer, CompletionRequest, Deployment, DeploymentPlan,
    chaos::ChaosRng,
    eventually, fixtures, signal,
    split::{
        HeldResources, Program, SplitEndpoints, SplitRoute, SplitTenant,
        network::Network,
        raw::{SharedMemoryClient, Zmtp, bare, call, is_hung_up_on, open, stream},
        tenant::OPEN,
    },
    watched,
};
use rustix::process::Signal;
use settings::LayersSection;
use shmproto::layer::{
    CallHeader, CallStatus, Dtype, SitePath,
    control::{FromLayers, ToLayers},
};

const ANSWER: u32 = 6;
/// Features of site 0's input, and bytes of a row.
const COLUMNS: usize = 576;
const ROW_BYTES: usize = 4 * COLUMNS;
/// Bytes of a slab for the input and output rows of site 0.
const SLAB: u64 = 1 << 20;
const ZMQ: [SplitRoute; 2] = [SplitRoute::Ipc, SplitRoute::Tls];

/// Pause of an honest client after an answer, so that the attacker has cores.
const REST: Duration = Duration::from_millis(100);

struct HonestClient {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    thread: JoinHandle<Vec<Duration>>,
}

impl HonestClient {
    fn begin(mut answer: impl FnMut() -> String + Send + 'static) -> Self {
        let golden = answer();
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ends, count) = (Arc::clone(&stop), Arc::clone(&answered));
        let thread = thread::spawn(move || {
            let mut times = Vec::new();
            while !ends.load(Ordering::Relaxed) {
                let begun = Instant::now();
                assert_eq!(answer(), golden, "an honest client's answer");
                times.push(begun.elapsed());
                count.fetch_add(1, Ordering::Relaxed);
                thread::sleep(REST);
            }
            times
        });
        Self { stop, answered, thread }
    }

    fn has_answers(&self, more: u64) {
        let until = self.answered.load(Ordering::Relaxed) + more;
        eventually("an honest client is answered", || {
            assert!(!self.thread.is_finished(), "an honest client has given up");
            self.answered.load(Ordering::Relaxed) >= until
        });
    }

    /// Durations of its answers, in ascending order.
    fn finish(self) -> Vec<Duration> {
        self.stop.store(true, Ordering::Relaxed);
        let mut times = self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        times.sort();
        times
    }
}

/// Deployment with honest clients, and a key of another tenant.
struct HostileClientTest {
    deployment: Deployment,
    endpoints: SplitEndpoints,
    key: String,
    resident: HonestClient,
    split: HonestClient,
    before: HeldResources,
}

impl HostileClientTest {
    fn open() -> Self {
        Self::with(SplitEndpoints::new(), |plan| plan)
    }

    fn with(endpoints: SplitEndpoints, plan: impl FnOnce(DeploymentPlan) -> DeploymentPlan) -> Self {
        let [key, honest] = ["mallory", "carol"].map(|tenant| endpoints.add_key(tenant));
        let ways_in = endpoints.of(DeploymentPlan::bare().workers(0));
        let deployment = plan(ways_in.set("LAYER_KEY_FILE", &endpoints.key_file().to_string_lossy())).start();
        let resident = resident(deployment.client.clone());
        let split = split(endpoints.tenant(&deployment, SplitRoute::SharedMemory, OPEN, Some(&honest)));
        let before = HeldResources::of(&deployment);
        Self { deployment, endpoints, key, resident, split, before }
    }

    fn local(&self, slab_bytes: u64) -> SharedMemoryClient {
        SharedMemoryClient::session(&self.deployment, &self.key, slab_bytes).expect("a session")
    }

    fn zmtp(&self, route: SplitRoute) -> Zmtp {
        Zmtp::session(&self.endpoints, &self.deployment, route, Some(&self.key)).expect("a session")
    }

    /// Checks that honest clients get answers, during or after an attack.
    fn goes_on(&self) {
        self.resident.has_answers(2);
        self.split.has_answers(2);
    }

    fn finish(self, what: &str) {
        self.goes_on();
        let begun = Instant::now();
        eventually(&format!("the executor holds {:?}, as before", self.before), || {
            HeldResources::of(&self.deployment).are_within(&self.before)
        });
        let back = begun.elapsed();
        for (who, honest) in [("resident", self.resident), ("split", self.split)] {
            let times = honest.finish();
            let (median, last) = (times[times.len() / 2], times[times.len() - 1]);
            eprintln!("{what}: {} {who} answers, median {median:?}, slowest {last:?}", times.len());
        }
        eprintln!("{what}: resources were back after {back:?}");
        assert!(self.deployment.stop().success());
    }
}

fn resident(client: Client) -> HonestClient {
    let ask = CompletionRequest::new(BASE, fixtures::prompt(41, 20), ANSWER);
    HonestClient::begin(move || {
        let CompletionAnswer { text, scored, .. } = client.ask(&ask).answer;
        format!("{text} {scored:?}")
    })
}

fn split(mut tenant: SplitTenant) -> HonestClient {
    let prompt = fixtures::prompt(42, 20);
    HonestClient::begin(move || {
        format!("{:?}", tenant.generate(&prompt, ANSWER as usize).expect("an answer"))
    })
}

/// Meaningless bytes, different for each `seed`.
fn garbage(seed: u64, length: usize) -> Vec<u8> {
    let mut random = ChaosRng::new(seed);
    (0..length).map(|_| u8::try_from(random.below(256)).expect("a byte")).collect()
}

fn rows(count: usize) -> Vec<u8> {
    vec![0; count * ROW_BYTES]
}

#[test]
fn garbage_at_every_door_is_hung_up_on() {
    watched(|| {
        let arena = HostileClientTest::open();
        let HostileClientTest { deployment, endpoints, key, .. } = &arena;
        for seed in 0..6 {
            for route in ZMQ {
                // Garbage at the listener, after TLS, after the handshake, and in an open session.
                let mut raw = bare(endpoints, deployment, route);
                let _ = raw.write_all(&garbage(seed, 3000));
                is_hung_up_on(&mut *raw);
                let mut agreed = stream(endpoints, deployment, route, Some(key));
                let _ = agreed.write_all(&garbage(seed + 10, 3000)).and_then(|()| agreed.flush());
                is_hung_up_on(&mut *agreed);
                let mut greeted =
                    Zmtp::greet(stream(endpoints, deployment, route, Some(key)), Some(key)).expect("hello");
                let _ = greeted.send(&garbage(seed + 20, 3000));
                is_hung_up_on(&mut *greeted.stream);
                let mut session = arena.zmtp(route);
                let _ = session.send(&garbage(seed + 30, 3000));
                is_hung_up_on(&mut *session.stream);
            }
            let control = datagrams(deployment.place().state().join("layers.sock"));
            let _ = rustix::io::write(&control, &garbage(seed, 500));
            eventually("the control socket is closed", || {
                matches!(rustix::io::read(&control, &mut [0; 64]), Ok(0) | Err(rustix::io::Errno::CONNRESET))
            });
        }
        arena.finish("garbage");
    });
}

/// Datagram connection without a protocol.
fn datagrams(path: PathBuf) -> rustix::fd::OwnedFd {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket");
    let path = SocketAddrUnix::new(path).expect("a short path");
    // A non-blocking connect fails while the listener's backlog is full.
    eventually("the endpoint is open", || connect(&socket, &path).is_ok());
    socket
}

#[test]
fn frames_of_2_to_the_62_bytes_take_no_memory() {
    watched(|| {
        let arena = HostileClientTest::open();
        let resident_bytes = || arena.deployment.resident_bytes(e2e_tests::DeploymentProcess::Executor);
        arena.goes_on();
        let before = resident_bytes();
        let huge = (1_u64 << 62).to_be_bytes();
        for route in ZMQ {
            // A message frame, a command, and the second frame of a call: each announces data that never
            // comes.
            for head in [
                vec![2_u8],
                vec![6],
                Zmtp::call_bytes(&call(1, 1), &[])[..66].iter().copied().chain([2]).collect(),
            ] {
                let mut session = arena.zmtp(route);
                session.send(&[&head[..], &huge].concat()).expect("it is sent");
                is_hung_up_on(&mut *session.stream);
            }
        }
        arena.goes_on();
        let after = resident_bytes();
        assert!(after < before + (8 << 20), "{before} bytes became {after}");
        arena.finish("frames of 2^62 bytes");
    });
}

#[test]
fn lies_about_shapes_and_places_are_refused_one_by_one() {
    watched(|| {
        let arena = HostileClientTest::open();
        let whole = call(1, 1);
        let lies = [
            (
                CallHeader { site: u32::try_from(fixtures::calls()).unwrap(), ..whole },
                CallStatus::UnknownSite,
            ),
            (CallHeader { site: u32::MAX, ..whole }, CallStatus::UnknownSite),
            (CallHeader { part: Some(3), ..whole }, CallStatus::UnknownSite),
            (CallHeader { rows: 400, ..whole }, CallStatus::Shape),
            (CallHeader { input: SLAB - 64, ..whole }, CallStatus::Shape),
            (CallHeader { output: SLAB - 64, ..whole }, CallStatus::Shape),
        ];
        let mut local = arena.local(SLAB);
        for (number, (lie, status)) in (1..).zip(lies) {
            let reply = local.call(&CallHeader { sequence: number, ..lie }).expect("a reply");
            assert_eq!(reply.status, status, "{lie:?}");
        }
        let honest = CallHeader { sequence: 20, output: 65536, ..whole };
        assert_eq!(local.call(&honest).expect("a reply").status, CallStatus::Done);
        drop(local);
        // Invalid slab positions and headers violate the protocol and end the session.
        let breaches = [
            CallHeader { input: SLAB, ..whole },
            CallHeader { output: u64::MAX - 63, ..whole },
            CallHeader { input: 1 << 62, ..whole },
            CallHeader { input: 3, ..whole },
            CallHeader { rows: 0, ..whole },
            CallHeader { rows: u32::MAX, ..whole },
        ];
        for breach in breaches {
            assert_eq!(arena.local(SLAB).call(&breach), None, "{breach:?}");
        }
        for route in ZMQ {
            let mut session = arena.zmtp(route);
            let mut answer = |header: &CallHeader, rows: &[u8]| {
                session.call(header, rows).expect("it is sent");
                session.reply().expect("a reply").0.status
            };
            assert_eq!(answer(&whole, &rows(2)), CallStatus::Shape, "more rows than it says");
            assert_eq!(
                answer(&CallHeader { sequence: 2, ..whole }, &rows(1)[4..]),
                CallStatus::Shape,
                "less than a row"
            );
            assert_eq!(answer(&CallHeader { sequence: 3, ..whole }, &[]), CallStatus::Shape, "none");
            assert_eq!(
                answer(
                    &CallHeader { sequence: 4, site: u32::try_from(fixtures::calls()).unwrap(), ..whole },
                    &rows(1)
                ),
                CallStatus::UnknownSite
            );
            assert_eq!(
                answer(&CallHeader { sequence: 5, dtype: Dtype::Bf16, ..whole }, &rows(1)),
                CallStatus::Shape
            );
            assert_eq!(
                answer(&CallHeader { sequence: 6, path: SitePath::Linear, ..whole }, &rows(1)),
                CallStatus::Done
            );
        }
        arena.finish("lies");
    });
}

#[test]
fn a_number_that_was_answered_is_refused_and_changes_nothing() {
    watched(|| {
        let arena = HostileClientTest::open();
        let mut local = arena.local(SLAB);
        let header = CallHeader { output: 65536, ..call(7, 1) };
        assert_eq!(local.call(&header).expect("a reply").status, CallStatus::Done);
        for sequence in [7, 1, 0] {
            let again = CallHeader { sequence, ..header };
            assert_eq!(local.call(&again).expect("a reply").status, CallStatus::Sequence);
        }
        for route in ZMQ {
            let mut session = arena.zmtp(route);
            for (sequence, status) in [
                (7, CallStatus::Done),
                (7, CallStatus::Sequence),
                (3, CallStatus::Sequence),
                (8, CallStatus::Done),
            ] {
                session.call(&call(sequence, 1), &rows(1)).expect("it is sent");
                assert_eq!(session.reply().expect("a reply").0.status, status, "number {sequence}");
            }
        }
        drop(local);
        arena.finish("numbers again");
    });
}

/// True if no more bytes can be written, now or later.
fn is_broken(written: io::Result<usize>) -> bool {
    written.is_err_and(|error| !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
}

#[test]
fn floods_without_reading_answers_slow_nobody_down_for_long() {
    watched(|| {
        let arena = HostileClientTest::open();
        // Submits calls without reading any answer, until the executor disconnects.
        let mut local = arena.local(64 << 20);
        let (mut sent, begun) = (0_u64, Instant::now());
        while !local.is_hung_up_on() && begun.elapsed() < Duration::from_secs(8) {
            let channel = local.channel.as_mut().expect("a channel");
            sent += u64::from(channel.submit(&CallHeader { output: 32 << 20, ..call(sent + 1, 64) }).is_ok());
        }
        eprintln!("a flood of {sent} calls through shared memory");
        let floods = ZMQ.map(|route| {
            let mut session = arena.zmtp(route);
            thread::spawn(move || {
                let (bytes, begun) = (rows(32), Instant::now());
                let mut sent = 0;
                while begun.elapsed() < Duration::from_secs(8) {
                    sent += 1;
                    if session.call(&call(sent, 32), &bytes).is_err() {
                        break;
                    }
                }
                eprintln!("a flood of {sent} calls over {}", route.name());
                // A client that reads late is silent, not stuck, and stays connected for a minute more.
                eventually("it is hung up on", || is_broken(session.stream.write(&[0])));
                session
            })
        });
        arena.goes_on();
        for flood in floods {
            let mut session = flood.join().expect("the flood");
            is_hung_up_on(&mut *session.stream);
        }
        drop(local);
        arena.finish("floods");
    });
}

#[test]
fn sessions_that_stall_hold_only_what_is_theirs() {
    watched(|| {
        let arena = HostileClientTest::open();
        let stalls: Vec<Zmtp> = ZMQ
            .into_iter()
            .map(|route| {
                let mut session = arena.zmtp(route);
                // A call whose rows never come completely.
                let bytes = Zmtp::call_bytes(&call(1, 4096), &rows(4096));
                session.send(&bytes[..5000]).expect("it is sent");
                session
            })
            .collect();
        let silent = [arena.local(SLAB), arena.local(64)];
        let listed = || arena.deployment.client.status()["layers"]["sessions"].as_array().map_or(0, Vec::len);
        eventually("the sessions are listed", || listed() == 5);
        arena.goes_on();
        // Sessions above the hostile tenant's quota are rejected; other tenants are not affected.
        let allowed = LayersSection::presets().tenant_sessions.expect("a preset") as usize;
        let more: Vec<_> = (0..=allowed)
            .map_while(|_| SharedMemoryClient::session(&arena.deployment, &arena.key, 64).ok())
            .collect();
        assert_eq!(more.len(), allowed - stalls.len() - silent.len());
        arena.goes_on();
        // The quota of bytes holds over all sessions of a tenant.
        let mut greedy = silent;
        let refused = greedy[0].demand_channel(1 << 30).expect_err("a slab above the quota");
        assert!(refused.to_string().contains("Quota"), "{refused}");
        drop((stalls, greedy, more));
        arena.finish("stalls");
    });
}

#[test]
fn three_hundred_idle_connections_keep_nobody_out() {
    watched(|| {
        let arena = HostileClientTest::open();
        let HostileClientTest { deployment, endpoints, key, .. } = &arena;
        let state = deployment.place().state();
        let control: Vec<_> = (0..300).map(|_| datagrams(state.join("layers.sock"))).collect();
        let private: Vec<_> = (0..300).map(|_| UnixStream::connect(state.join("layers.zmq"))).collect();
        let outside: Vec<_> = (0..300).map(|_| bare(endpoints, deployment, SplitRoute::Tls)).collect();
        arena.goes_on();
        for route in SplitRoute::ALL {
            let begun = Instant::now();
            let mut found = None;
            eventually("a client with a key comes in", || {
                found = endpoints.try_tenant(deployment, route, OPEN, Some(key)).ok();
                found.is_some()
            });
            let tokens = found.expect("it came in").generate(&fixtures::prompt(3, 8), 1);
            assert_eq!(tokens.expect("an answer").len(), 1);
            eprintln!(
                "beside 300 idle connections a client came in over {} after {:?}",
                route.name(),
                begun.elapsed()
            );
        }
        drop((control, private, outside));
        arena.finish("idle connections");
    });
}

#[test]
fn sessions_opened_and_dropped_in_a_hurry_leave_nothing() {
    watched(|| {
        let arena = HostileClientTest::open();
        for number in 0..60_usize {
            let mut local = arena.local(SLAB << (number % 5));
            let _ = local.call(&CallHeader { output: 65536, ..call(1, 1) });
            if number % 2 == 0 {
                // Another slab replaces the one in use and drops its call.
                let channel = local.channel.as_mut().expect("a channel");
                channel.submit(&CallHeader { output: 65536, ..call(2, 1) }).expect("the ring has room");
                local.demand_channel(SLAB).expect("another slab");
            } else {
                assert!(matches!(
                    local.ask(&open(SplitRoute::SharedMemory, &arena.key)),
                    Ok(FromLayers::Refused(_))
                ));
                let _ = local.send_control(&ToLayers::Close);
            }
            let mut session = arena.zmtp(ZMQ[number % 2]);
            session.call(&call(1, 8), &rows(8)).expect("it is sent");
        }
        arena.finish("sessions in a hurry");
    });
}

/// A client in a namespace of its own, behind `network`.
fn far_client(arena: &HostileClientTest, network: &Network) -> Program {
    let launcher = network.far_side(&fixtures::program("holobiont-client"));
    Program::over(launcher, "generate", &arena.endpoints, &arena.deployment, SplitRoute::Tls)
}

#[test]
fn a_half_open_connection_is_given_up_and_a_bad_network_only_slows() {
    watched(|| {
        let Some(network) = Network::lay("a_half_open_connection") else { return };
        let arena = HostileClientTest::with(SplitEndpoints::at(network.address()), |plan| plan);
        let ask = |program: Program| program.ask("The ship", 48);
        let golden = ask(far_client(&arena, &network)).run();
        assert_eq!(golden.code, Some(0), "{golden:?}");
        if network.degrade(4, 2) {
            let late = ask(far_client(&arena, &network)).run();
            assert_eq!(late.text(), golden.text());
            assert!(network.degrade(0, 0));
        }
        // The link fails for moments: TCP retransmits, and no token is lost.
        eventually("what was asked before is over", || lists(&arena, 1));
        let mut flapping = ask(far_client(&arena, &network).arg("--patience-s").arg("90")).start();
        // Only a client that was connected waits for the network.
        eventually("it is connected", || lists(&arena, 2) || flapping.has_ended());
        while !flapping.has_ended() {
            network.cut();
            thread::sleep(Duration::from_millis(60));
            network.mend();
            thread::sleep(Duration::from_millis(700));
        }
        assert_eq!(flapping.finish().text(), golden.text());
        half_open(&arena, &network);
        arena.finish("half-open connections");
    });
}

/// Whether the operator sees `sessions` sessions, including the honest client's.
fn lists(arena: &HostileClientTest, sessions: usize) -> bool {
    arena.deployment.client.status()["layers"]["sessions"].as_array().map(Vec::len) == Some(sessions)
}

/// A client that vanishes without notice during its computation.
fn half_open(arena: &HostileClientTest, network: &Network) {
    eventually("what was asked before is over", || lists(arena, 1));
    let vanishing = far_client(arena, network).ask("The ship", 4000).start();
    eventually("the session is listed", || lists(arena, 2));
    network.cut();
    signal(vanishing.id(), Signal::STOP);
    let begun = Instant::now();
    eventually("a half-open session is given up", || {
        arena.split.has_answers(1);
        lists(arena, 1)
    });
    eprintln!("a half-open session was given up after {:?}", begun.elapsed());
}
