//! Clients and executors of the sound masking modes are killed anywhere: no pad is used twice, and the answer
//! stays the same.
//!
//! A relay of the test carries the executors' input, and an auditor finds each row's pad from the rows alone.
//! The model is so small that a restart takes a fraction of a second.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use client::{FAILPOINTS, PAD_FAILPOINTS};
use e2e_tests::{
    chaos::FailpointDirectory,
    eventually, signal,
    split::{
        Program,
        audit::{PoolAuditor, SharesAuditor},
        exact::{ExactExecutor, write_model},
        tap::CallObserver,
    },
    watched,
};
use rustix::process::Signal;
use shmproto::layer::{
    CallClass, CallHeader, Dtype, RowSource, SiteOp, SitePath,
    seeded_rows::{Key, SeededRows},
};
use tempfile::TempDir;

const PROMPT: &str = "sound";
const ANSWER: usize = 6;
/// Sites of the small model: each is called once for the prompt, and once per answer token except the last.
const SITES: usize = 13;
/// Rows of an answer: one per token and site, but at the head only for sampled tokens.
const ROWS: usize = (SITES - 1) * (PROMPT.len() + ANSWER - 1) + ANSWER;
/// Tokens per batch of pads, which a kill loses.
const TOKENS: usize = 64;
/// Failpoints of executors during a call.
const DEATHS: [&str; 4] =
    ["layer.call_taken", "layer.before_batch", "layer.after_batch", "layer.before_answer"];

/// Exit code of a command without an executor.
const UNAVAILABLE: i32 = 5;

/// Model, and the answer that every client must give.
struct MaskingFixture {
    directory: TempDir,
    golden: String,
}

impl MaskingFixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        write_model(&directory.path().join("model"));
        let mut scene = Self { directory, golden: String::new() };
        let bare = scene.executor(Arc::new(|_, _| {}));
        let ended = scene.ask(&bare).arg("--path").arg("ring").ask(PROMPT, ANSWER).run();
        scene.golden = ended.text().to_owned();
        scene
    }

    fn model(&self) -> PathBuf {
        self.directory.path().join("model")
    }

    fn executor(&self, witness: CallObserver) -> ExactExecutor {
        ExactExecutor::start(&self.model(), witness)
    }

    fn ask(&self, executor: &ExactExecutor) -> Program {
        let program = Program::bare().arg("generate").renting(&executor.address(), &self.model());
        program.arg("--ignore-eos")
    }
}

fn witness<T: Send + 'static>(auditor: &Arc<Mutex<T>>, hear: fn(&mut T, &CallHeader, &[u8])) -> CallObserver {
    let auditor = Arc::clone(auditor);
    Arc::new(move |call, body| hear(&mut lock(&auditor), call, body))
}

fn lock<T>(auditor: &Mutex<T>) -> MutexGuard<'_, T> {
    auditor.lock().unwrap_or_else(PoisonError::into_inner)
}

struct AuditedPool {
    directory: PathBuf,
    model: PathBuf,
    places: FailpointDirectory,
    auditor: Arc<Mutex<PoolAuditor>>,
}

impl AuditedPool {
    fn new(scene: &MaskingFixture) -> Self {
        let directory = scene.directory.path().join("pads");
        let auditor = Arc::new(Mutex::new(PoolAuditor::new(&directory)));
        Self { directory, model: scene.model(), places: FailpointDirectory::new(), auditor }
    }

    fn prepare(&self) -> Program {
        let program = Program::bare().arg("pads").arg("prepare").arg("--model").arg(&self.model);
        program.arg("--tokens").arg(TOKENS.to_string()).arg("--pads").arg(&self.directory)
    }

    fn fill(&self) {
        let ended = self.prepare().run();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        lock(&self.auditor).learn();
    }

    fn ask(&self, scene: &MaskingFixture, executor: &ExactExecutor) -> Program {
        let program = scene.ask(executor).arg("--masking").arg("pads").arg("--pads").arg(&self.directory);
        program.ask(PROMPT, ANSWER)
    }

    /// Kills a program when it reaches `place` for the `at`th time.
    fn kill(&self, program: Program, place: &str, at: usize) {
        self.places.arm(place, &format!("kill {at}"));
        let ended = program.mortal(&self.places).run();
        assert_eq!(ended.code, None, "it was not killed at {place}: {ended:?}");
        self.places.clear(place);
    }

    /// Number of used pads; panics if one was used twice.
    fn used(&self) -> usize {
        lock(&self.auditor).audited()
    }
}

/// Hit counts at which an answering client is killed: during the prompt, and during the answer.
fn hits(place: &str) -> &'static [usize] {
    match place {
        "client.session_opened" | "client.pads_before_note" | "client.pads_noted" => &[1],
        _ => &[2 * SITES / 3, 5 * SITES + 6],
    }
}

#[test]
fn a_client_that_is_killed_anywhere_uses_no_pad_twice_and_says_the_same_again() {
    watched(|| {
        let scene = MaskingFixture::new();
        let pool = AuditedPool::new(&scene);
        let executor = scene.executor(witness(&pool.auditor, PoolAuditor::hear));
        // Kills during the pool's creation, during pad creation, and before and after the pads' journal
        // entry.
        pool.kill(pool.prepare(), "client.pads_noted", 1);
        pool.kill(pool.prepare(), "client.pads_written", SITES / 2);
        pool.kill(pool.prepare(), "client.pads_before_note", 1);
        pool.kill(pool.prepare(), "client.pads_noted", 1);
        let answer = || {
            pool.fill();
            let (before, ended) = (pool.used(), pool.ask(&scene, &executor).run());
            assert_eq!(ended.text(), scene.golden, "{ended:?}");
            assert_eq!(pool.used() - before, ROWS, "a pad for each row");
        };
        answer();
        let of_users = PAD_FAILPOINTS.iter().filter(|place| **place != "client.pads_written");
        for place in of_users.chain(FAILPOINTS) {
            for &at in hits(place) {
                pool.fill();
                pool.kill(pool.ask(&scene, &executor), place, at);
                answer();
            }
        }
    });
}

#[test]
fn an_executor_that_is_killed_amid_an_answer_gets_no_pad_again_and_the_client_goes_on() {
    watched(|| {
        let scene = MaskingFixture::new();
        let pool = AuditedPool::new(&scene);
        let mut executor = scene.executor(witness(&pool.auditor, PoolAuditor::hear));
        for (place, at) in DEATHS.into_iter().zip([3, 16, 29, 60]) {
            pool.fill();
            let before = pool.used();
            executor.places.arm(place, &format!("kill {at}"));
            let running = pool.ask(&scene, &executor).start();
            executor.await_death(place);
            executor.return_from_death();
            let ended = running.finish();
            assert_eq!((ended.text(), ended.reconnections()), (&*scene.golden, 1), "{place}: {ended:?}");
            assert!(pool.used() - before > ROWS, "what it was asked again was covered anew");
        }
    });
}

struct AuditedPair {
    both: [ExactExecutor; 2],
    auditor: Arc<Mutex<SharesAuditor>>,
}

impl AuditedPair {
    fn new(scene: &MaskingFixture) -> Self {
        let auditor = Arc::new(Mutex::new(SharesAuditor::default()));
        let hear: [fn(&mut SharesAuditor, &CallHeader, &[u8]); 2] =
            [SharesAuditor::hear_first, SharesAuditor::hear_second];
        Self { both: hear.map(|hear| scene.executor(witness(&auditor, hear))), auditor }
    }

    fn ask(&self, scene: &MaskingFixture) -> Program {
        let [first, second] = &self.both;
        let program = scene.ask(first).arg("--masking").arg("shares");
        program.arg("--second-executor").arg(second.address())
    }

    fn used(&self) -> usize {
        lock(&self.auditor).audited()
    }
}

#[test]
fn either_of_two_executors_may_be_killed_amid_an_answer_and_gets_no_pad_again() {
    watched(|| {
        let scene = MaskingFixture::new();
        let mut pair = AuditedPair::new(&scene);
        let deaths = DEATHS.into_iter().flat_map(|place| [(0, place), (1, place)]);
        for ((mortal, place), at) in deaths.zip([3, 60, 16, 29, 29, 16, 60, 3]) {
            let before = pair.used();
            pair.both[mortal].places.arm(place, &format!("kill {at}"));
            let running = pair.ask(&scene).ask(PROMPT, ANSWER).start();
            pair.both[mortal].await_death(place);
            pair.both[mortal].return_from_death();
            let ended = running.finish();
            assert_eq!(ended.text(), scene.golden, "{mortal}, {place}: {ended:?}");
            assert!(pair.used() - before >= ROWS, "{mortal}, {place}");
        }
    });
}

#[test]
fn an_answer_ends_where_the_second_executor_does_not_come_back() {
    watched(|| {
        let scene = MaskingFixture::new();
        let mut pair = AuditedPair::new(&scene);
        pair.both[1].places.arm("layer.before_batch", "kill 20");
        let running = pair.ask(&scene).arg("--patience-s").arg("1").ask(PROMPT, ANSWER).start();
        pair.both[1].await_death("layer.before_batch");
        let ended = running.finish();
        assert_eq!(ended.code, Some(UNAVAILABLE), "{ended:?}");
        assert!(pair.used() > 0);
    });
}

#[test]
fn a_client_that_hides_its_rows_leaves_no_image_of_its_memory_behind() {
    watched(|| {
        let (scene, places) = (MaskingFixture::new(), FailpointDirectory::new());
        let pair = AuditedPair::new(&scene);
        places.arm("client.after_call", "stop");
        let mut running = pair.ask(&scene).ask(PROMPT, ANSWER).mortal(&places).start();
        eventually("it is answered", || places.has_fired("client.after_call"));
        let limits = fs::read_to_string(format!("/proc/{}/limits", running.id())).unwrap();
        let core = limits.lines().find_map(|line| line.strip_prefix("Max core file size")).unwrap();
        assert_eq!(core.split_whitespace().collect::<Vec<_>>(), ["0", "0", "bytes"]);
        // The client is about to stop, or has ended.
        eventually("its end", || {
            signal(running.id(), Signal::CONT);
            running.has_ended()
        });
        assert_eq!(running.finish().text(), scene.golden);
    });
}

fn call(source: RowSource) -> CallHeader {
    CallHeader {
        op: SiteOp::ForwardNoBias,
        path: SitePath::Ring,
        class: CallClass::Decode,
        dtype: Dtype::F32,
        site: 0,
        part: None,
        source,
        sequence: 1,
        rows: 1,
        input: 0,
        output: 0,
    }
}

fn bytes(words: &[f32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_bits().to_le_bytes()).collect()
}

#[test]
fn the_auditor_sees_a_pad_that_is_used_again_and_a_row_without() {
    let draw = SeededRows { key: Key::new(&[7; 32]), first: 9 };
    let mut pad = [0.0; 8];
    draw.fill(0, pad.len(), &mut pad);
    let mut other = pad;
    other[0] = f32::from_bits(pad[0].to_bits() ^ 0xfff);
    for (rows, expected) in
        [([pad, other], "pad 9 of site 0 was used again"), ([pad, [0.0; 8]], "0 pads cover a row at site 0")]
    {
        let mut auditor = SharesAuditor::default();
        auditor.hear_second(&call(RowSource::Draw), &bytes(&*draw.to_words()));
        rows.iter().for_each(|row| auditor.hear_first(&call(RowSource::Rows), &bytes(row)));
        let panic = catch_unwind(AssertUnwindSafe(|| auditor.audited())).unwrap_err();
        let complaint = panic.downcast::<String>().unwrap();
        assert!(complaint.contains(expected), "{complaint}");
    }
}
