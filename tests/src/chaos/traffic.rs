//! Clients that repeat golden requests and accept only golden answers.
//!
//! Every answer names its adapter version, and there is a golden answer for each question and version. So an
//! answer must equal that of its version alone, regardless of the version that the name has at the moment.

use std::{
    collections::HashMap,
    path::Path,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::ChaosRng;
use crate::{
    Client, CompletionAnswer, CompletionRequest, StreamEnd, client::RequestFault, fixtures,
    watchdog::WATCHDOG,
};

/// Words and numbers in turns: longer than any answer, so each answer ends inside it.
const LIST: &str = "([a-z]{1,12} [0-9]{1,4}, ){30}";

const RETRY_PAUSE: Duration = Duration::from_millis(30);

/// Adapters with their golden answers, and those of the base.
#[derive(Debug)]
pub struct AdapterVariants {
    /// Directory and adapter version of each adapter.
    pub adapters: Vec<(std::path::PathBuf, String)>,
    asks: Vec<CompletionRequest>,
    golden: HashMap<(Option<String>, usize), CompletionAnswer>,
}

impl AdapterVariants {
    /// Makes `count` variants of the examples in `into` and records the answers of each in an otherwise idle
    /// deployment.
    #[must_use]
    pub fn learn(client: &Client, into: &Path, count: u32) -> Self {
        Self::learn_stacked(client, into, count, 1)
    }

    /// Makes variants in which every rank of the examples is repeated `times` times.
    #[must_use]
    pub fn learn_stacked(client: &Client, into: &Path, count: u32, times: usize) -> Self {
        let asks: Vec<CompletionRequest> = [(5, None), (40, None), (90, Some(11)), (20, Some(7))]
            .into_iter()
            .map(|(length, seed)| CompletionRequest {
                seed,
                ..CompletionRequest::new("", fixtures::prompt(1, length), 16)
            })
            .chain([CompletionRequest {
                seed: Some(5),
                expression: Some(LIST),
                ..CompletionRequest::new("", fixtures::prompt(2, 10), 16)
            }])
            .collect();
        let mut variants = Self { adapters: Vec::new(), asks, golden: HashMap::new() };
        variants.listen(client, crate::BASE, None);
        for index in 0..count {
            let path = into.join(format!("variant-{index}"));
            let example = crate::EXAMPLES[index as usize % crate::EXAMPLES.len()];
            fixtures::stacked(example, times, 16 + index, &path);
            let generation = client.load("learning", &path);
            variants.listen(client, "learning", Some(&generation));
            client.unload("learning");
            variants.adapters.push((path, generation));
        }
        variants
    }

    fn listen(&mut self, client: &Client, model: &str, generation: Option<&str>) {
        for (index, ask) in self.asks.iter().enumerate() {
            let reply = client.ask(&ask.of(model));
            assert_eq!(reply.generation.as_deref(), generation, "{model} names what answers");
            self.golden.insert((reply.generation, index), reply.answer);
        }
    }

    /// Returns the number of questions.
    #[must_use]
    pub fn questions(&self) -> usize {
        self.asks.len()
    }

    /// Returns question `index` for `model`.
    #[must_use]
    pub fn ask(&self, model: &str, index: usize) -> CompletionRequest {
        self.asks[index].of(model)
    }

    /// Fails unless `answer` to question `index` is the golden answer of `generation`.
    pub fn check(&self, index: usize, generation: Option<&str>, answer: &CompletionAnswer) {
        let golden = self.golden(index, generation);
        assert_eq!(answer, golden, "question {index} to {generation:?}");
    }

    fn golden(&self, index: usize, generation: Option<&str>) -> &CompletionAnswer {
        let key = (generation.map(str::to_owned), index);
        self.golden
            .get(&key)
            .unwrap_or_else(|| panic!("an answer from {generation:?}, which nobody has loaded"))
    }
}

/// Counters of the clients.
#[derive(Debug, Default)]
pub struct TrafficCounts {
    /// Number of golden answers.
    pub answered: AtomicU64,
    /// Number of resent requests because the gateway failed or was absent.
    pub retried: AtomicU64,
    /// Number of requests for a name without an adapter.
    pub not_found: AtomicU64,
    /// Number of accepted streams that ended in a typed error.
    pub given_up: AtomicU64,
    first_fault: OnceLock<String>,
}

impl TrafficCounts {
    /// Fails with the reason if a request was resent or a stream failed.
    pub fn nobody_asked_again(&self) {
        let lost = [&self.retried, &self.given_up].map(|count| count.load(Ordering::Relaxed));
        assert_eq!(lost, [0, 0], "nobody has to ask again; the first did for: {:?}", self.first_fault.get());
    }
}

/// Running clients, which stop in `finish`.
#[derive(Debug)]
pub struct Traffic {
    stop: Arc<AtomicBool>,
    /// Counters of the clients so far.
    pub tally: Arc<TrafficCounts>,
    clients: Vec<JoinHandle<()>>,
}

impl Traffic {
    /// Starts `clients` clients that send all questions to `models`.
    #[must_use]
    pub fn begin(client: &Client, variants: &Arc<AdapterVariants>, models: &[String], clients: u64) -> Self {
        let (stop, tally) = (Arc::new(AtomicBool::new(false)), Arc::new(TrafficCounts::default()));
        let clients = (0..clients).map(|number| {
            let asker = TrafficClient {
                client: client.clone(),
                variants: Arc::clone(variants),
                models: models.to_vec(),
                random: ChaosRng::new(number),
                tally: Arc::clone(&tally),
                stop: Arc::clone(&stop),
            };
            thread::spawn(move || asker.run())
        });
        let clients = clients.collect();
        Self { stop, tally, clients }
    }

    /// Fails if a client has seen an unexpected result.
    pub fn check(&mut self) {
        if self.clients.iter().any(JoinHandle::is_finished) {
            self.end();
        }
    }

    /// Stops the clients after their current requests and returns their counters.
    pub fn finish(mut self) -> Arc<TrafficCounts> {
        self.end();
        Arc::clone(&self.tally)
    }

    /// Stops the clients after their current requests. Fails if a client has seen an unexpected result.
    pub fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients.drain(..) {
            if let Err(panic) = client.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

struct TrafficClient {
    client: Client,
    variants: Arc<AdapterVariants>,
    models: Vec<String>,
    random: ChaosRng,
    tally: Arc<TrafficCounts>,
    stop: Arc<AtomicBool>,
}

impl TrafficClient {
    fn run(mut self) {
        while !self.stop.load(Ordering::Relaxed) {
            let index = self.random.below(self.variants.questions());
            let model = self.random.pick(&self.models).clone();
            let streamed = self.random.below(2) == 0;
            self.until_answered(index, &model, streamed);
        }
    }

    /// Resends a request until it is answered, like the SDKs' clients with retries.
    fn until_answered(&self, index: usize, model: &str, streamed: bool) {
        let (ask, started) = (self.variants.ask(model, index), Instant::now());
        loop {
            let outcome = if streamed { self.streamed(index, &ask) } else { self.whole(index, &ask) };
            match outcome {
                Ok(()) => return add(&self.tally.answered),
                Err(RequestFault::Refused { status: 404, .. }) => {
                    assert_ne!(model, crate::BASE, "the base is always there");
                    return add(&self.tally.not_found);
                }
                Err(fault @ (RequestFault::Refused { status: 429 | 503, .. } | RequestFault::Silence(_))) => {
                    add(&self.tally.retried);
                    self.tally.first_fault.get_or_init(|| format!("{model}: {fault}"));
                }
                Err(fault) => panic!("{ask:?}: {fault}"),
            }
            assert!(started.elapsed() < WATCHDOG, "{ask:?} was not answered in time");
            thread::sleep(RETRY_PAUSE);
        }
    }

    fn whole(&self, index: usize, ask: &CompletionRequest) -> Result<(), RequestFault> {
        let reply = self.client.try_ask(ask)?;
        self.variants.check(index, reply.generation.as_deref(), &reply.answer);
        Ok(())
    }

    fn streamed(&self, index: usize, ask: &CompletionRequest) -> Result<(), RequestFault> {
        let mut stream = self.client.try_stream(ask)?;
        let ending = stream.read_to_end();
        let generation = stream.generation.clone();
        match ending {
            StreamEnd::Done => {
                self.variants.check(index, generation.as_deref(), &stream.answer);
                Ok(())
            }
            ending => {
                if !stream.answer.scored.is_empty() {
                    let golden = self.variants.golden(index, generation.as_deref());
                    assert!(stream.answer.begins(golden), "{ask:?}: {:?} before {ending:?}", stream.answer);
                }
                if matches!(ending, StreamEnd::Error(_)) {
                    add(&self.tally.given_up);
                }
                Err(RequestFault::Silence(format!("{ending:?}")))
            }
        }
    }
}

fn add(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}
