//! Times decisions on this machine: the cache's, with a tree of maximum size (E-17), and the choice among
//! executors (`decision`).

mod decision;

use std::{
    io::Write,
    time::{Duration, Instant},
};

use clap::Args;
use kv_cache::{Cache, CacheSettings, Cursor, replacement::Variant};
use serde_json::json;

use super::{CommandError, print};
use crate::{
    random::RandomStream,
    workload::{ShareAccounting, Workload, WorkloadAdapter},
};

/// Times the cache's own work, and a choice among executors.
#[derive(Debug, Args)]
pub(super) struct DecisionBench {
    /// Blocks of the device, all of which the prefix tree knows.
    #[arg(long, default_value_t = 100_000)]
    nodes: u32,
    /// Eviction policy of the cache.
    #[arg(long, default_value = "elora")]
    variant: Variant,
    /// Executors to choose among.
    #[arg(long, default_value_t = 60)]
    executors: usize,
    /// Adapters that each executor knows.
    #[arg(long, default_value_t = 1000)]
    adapters: usize,
}

const BLOCK_TOKENS: usize = 16;
const ADAPTERS: usize = 100;
/// Numbers of known and of new blocks of a prompt.
const KNOWN_BLOCKS: usize = 64;
const NEW_BLOCKS: usize = 8;
const ROUNDS: u64 = 2000;
const DECISIONS: usize = 20_000;

impl DecisionBench {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<(), CommandError> {
        let settings =
            CacheSettings { variant: self.variant, ..CacheSettings::device_alone(self.nodes, BLOCK_TOKENS) };
        let mut stage = BenchState::new(settings);
        stage.fill(self.nodes as usize);
        let [matched, inserted, evicted, advanced, reviewed] = stage.measure();
        print(
            out,
            &json!({
                "nodes": self.nodes,
                "variant": self.variant.name(),
                "match_us": microseconds(matched),
                "match_blocks": KNOWN_BLOCKS,
                "insert_us": microseconds(inserted),
                "insert_blocks": NEW_BLOCKS,
                "evict_us_per_block": microseconds(evicted) / NEW_BLOCKS as f64,
                "advance_us": microseconds(advanced),
                "evaluate_us_per_node": microseconds(reviewed),
            }),
        )?;
        if self.adapters == 0 {
            return Err(CommandError::Option("--adapters"));
        }
        let [median, p99] = decision::measure(self.executors, self.adapters, DECISIONS);
        print(
            out,
            &json!({
                "executors": self.executors,
                "adapters": self.adapters,
                "choice_us": microseconds(median),
                "choice_p99_us": microseconds(p99),
            }),
        )
    }
}

struct BenchState {
    cache: Cache,
    adapters: Workload,
    stream: RandomStream,
    now: Duration,
    prompts: Vec<(usize, Vec<u32>)>,
}

impl BenchState {
    fn new(settings: CacheSettings) -> Self {
        let adapters = vec![WorkloadAdapter { rank: 1, tenant: 0 }; ADAPTERS];
        Self {
            cache: Cache::new(settings),
            adapters: Workload { adapters, conversations: Vec::new(), shares: ShareAccounting::ByTenant },
            stream: RandomStream::new(1, "bench", 0),
            now: Duration::ZERO,
            prompts: Vec::new(),
        }
    }

    /// Inserts prompts until the tree has `nodes` nodes.
    fn fill(&mut self, nodes: usize) {
        while self.prompts.len() * (KNOWN_BLOCKS + NEW_BLOCKS) < nodes {
            let adapter = self.stream.below(ADAPTERS);
            let tokens =
                (0..(KNOWN_BLOCKS + NEW_BLOCKS) * BLOCK_TOKENS).map(|_| self.stream.bits() as u32).collect();
            self.prompts.push((adapter, tokens));
            self.ask(self.prompts.len() - 1, |tokens, _| tokens);
        }
    }

    /// Matches a prompt and inserts its unknown part. Returns the times of matching, eviction and insertion.
    fn ask(
        &mut self,
        prompt: usize,
        change: impl Fn(Vec<u32>, &mut RandomStream) -> Vec<u32>,
    ) -> [Duration; 3] {
        let (adapter, tokens) = self.prompts[prompt].clone();
        let tokens = change(tokens, &mut self.stream);
        self.now += Duration::from_millis(20);
        let namespace = self.adapters.namespace(adapter);
        self.cache.note_request(namespace.adapter);
        let began = Instant::now();
        let found = self.cache.lookup(namespace, &tokens);
        let matched = began.elapsed();
        let began = Instant::now();
        let known = found.blocks.len();
        let fresh = self.cache.allocate(tokens.len() / BLOCK_TOKENS - known).unwrap_or_default();
        let evicted = began.elapsed();
        let (mut held, mut cursor): (_, Cursor) = (found.blocks, found.cursor);
        let began = Instant::now();
        for (block, tokens) in fresh.into_iter().zip(tokens.chunks_exact(BLOCK_TOKENS).skip(known)) {
            held.push(self.cache.insert(&mut cursor, tokens, block));
        }
        let inserted = began.elapsed();
        self.cache.release(&held);
        [matched, evicted, inserted]
    }

    /// Returns mean times: of a match, an insertion, an eviction, a step's turn, and re-evaluating one node.
    fn measure(&mut self) -> [Duration; 5] {
        let mut sums = [Duration::ZERO; 4];
        for _ in 0..ROUNDS {
            let prompt = self.stream.below(self.prompts.len());
            let [matched, evicted, inserted] = self.ask(prompt, |mut tokens, stream| {
                let known = KNOWN_BLOCKS * BLOCK_TOKENS;
                tokens[known..].iter_mut().for_each(|token| *token = stream.bits() as u32);
                tokens
            });
            // The interval covers as many nodes as one turn re-evaluates.
            self.now += Duration::from_secs(1);
            let began = Instant::now();
            self.cache.advance(self.now, 16);
            let advanced = began.elapsed();
            for (sum, took) in sums.iter_mut().zip([matched, inserted, evicted, advanced]) {
                *sum += took;
            }
        }
        let [matched, inserted, evicted, advanced] = sums.map(|sum| sum / ROUNDS as u32);
        [matched, inserted, evicted, advanced, advanced / kv_cache::replacement::REVIEWED_AT_ONCE]
    }
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
