//! A forward pass without weights, and requests of the tests.

use std::{
    cell::Cell,
    collections::HashSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use base_executor::adapters::{AdapterClaim, AdapterRole, ResidentAdapter};
use model::{
    forward::{BLOCK_TOKENS, ForwardPass, LogitRows, SequenceSlice},
    linear_sites::{PassHooks, SitePath},
    weight_stream_stats::PendingWeights,
};
use shmproto::message::{Generate, Precision, ProvisionalMode, Sampling};
use types::{AdapterVersion, BlockId};

pub(crate) const VOCAB: usize = 64;
/// Elements of a hidden state: the first logits.
pub(crate) const HIDDEN: usize = 8;
/// A pass with this token panics.
pub(crate) const PANICS: u32 = 63;
/// A pass with this token returns half a row of logits too few.
pub(crate) const FALLS_SHORT: u32 = 62;
/// A pass with this token fails for lack of memory.
pub(crate) const HOPELESS: u32 = 61;
/// A pass with this token and more than [`FEW_ROWS`] rows fails for lack of memory.
pub(crate) const THIRSTY: u32 = 60;
pub(crate) const FEW_ROWS: usize = 20;

#[derive(Debug)]
pub(crate) struct FakeAdapter(pub(crate) u64);

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SeenSlice {
    pub(crate) start: usize,
    pub(crate) tokens: usize,
    pub(crate) logits: LogitRows,
}

#[derive(Debug, thiserror::Error)]
#[error("there is none; make some")]
pub(crate) struct NoMemory;

pub(crate) type Log = Arc<Mutex<Vec<Vec<SeenSlice>>>>;

pub(crate) type Tick = Arc<Mutex<Option<Box<dyn FnMut() + Send>>>>;

/// A pass whose KV cache holds the tokens themselves, in the given blocks, and whose logits are a hash of the
/// cache's content. Any error changes the output: a wrong block, a block given to two sequences, a token
/// computed twice or never, or a prefix of another adapter.
pub(crate) struct FakePass {
    memory: Vec<u64>,
    states: Vec<f32>,
    log: Log,
    tick: Tick,
    pause: Duration,
    path: SitePath,
    takes_linear: bool,
}

impl FakePass {
    pub(crate) fn new(blocks: u32) -> (Self, Log) {
        let log = Log::default();
        // Initial content is as wrong as another sequence's.
        let memory = (0..blocks as usize * BLOCK_TOKENS).map(|slot| slot as u64 * 31 + 7).collect();
        (
            Self {
                memory,
                states: Vec::new(),
                log: Arc::clone(&log),
                tick: Tick::default(),
                pause: Duration::ZERO,
                path: SitePath::Fast,
                takes_linear: true,
            },
            log,
        )
    }

    /// Pass with a pause, so that events can arrive during its requests.
    pub(crate) fn slow(blocks: u32) -> Self {
        Self { pause: Duration::from_millis(2), ..Self::new(blocks).0 }
    }

    /// Pass without a linear path, as on a GPU.
    pub(crate) fn of_one_path(self) -> Self {
        Self { takes_linear: false, ..self }
    }

    pub(crate) fn tick(&self) -> Tick {
        Arc::clone(&self.tick)
    }

    fn write(&mut self, slice: &SequenceSlice<'_, FakeAdapter>) {
        let adapter = slice.adapter.map_or(0, |adapter| adapter.0);
        // Each path has its own KV cache.
        let tag = if self.path == SitePath::Linear { !adapter } else { adapter };
        for (index, &token) in slice.tokens.iter().enumerate() {
            let slot = slot(slice, slice.start + index);
            self.memory[slot] = mix(u64::from(token) + 1, tag);
        }
    }

    /// Writes a branch's earlier rows, which come with all rows up to its first.
    fn write_trunk(&mut self, slice: &SequenceSlice<'_, FakeAdapter>, rows: &[u32]) {
        for trunk in slice.trunk {
            let tokens = &rows[rows.len() - trunk.back..][..trunk.rows];
            self.write(&SequenceSlice { tokens, start: trunk.start, trunk: &[], ..*slice });
        }
    }

    fn block(&mut self, block: BlockId) -> &mut [u64] {
        &mut self.memory[block.0 as usize * BLOCK_TOKENS..][..BLOCK_TOKENS]
    }

    /// Logits after the token at `position`, from all tokens up to it.
    fn row(&self, slice: &SequenceSlice<'_, FakeAdapter>, position: usize) -> impl Iterator<Item = f32> {
        let hash = (0..=position).fold(1, |hash, at| mix(hash, self.memory[slot(slice, at)]));
        // The answers must not contain the tokens that break the pass.
        let logit = move |token| (mix(hash, token) % 4096) as f32 / 512.0;
        (0..VOCAB as u64).map(move |token| if token < THIRSTY.into() { logit(token) } else { -1000.0 })
    }
}

fn slot(slice: &SequenceSlice<'_, FakeAdapter>, position: usize) -> usize {
    slice.blocks[position / BLOCK_TOKENS].0 as usize * BLOCK_TOKENS + position % BLOCK_TOKENS
}

fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(b).wrapping_add(0x632B_E59B_D9B4_E019);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

impl ForwardPass for FakePass {
    type Adapter = FakeAdapter;
    type Error = NoMemory;

    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn hidden_size(&self) -> usize {
        HIDDEN
    }

    fn states(&self) -> &[f32] {
        &self.states
    }

    fn branches(&self) -> bool {
        true
    }

    fn takes_linear(&self) -> bool {
        self.takes_linear
    }

    fn set_path(&mut self, path: SitePath) {
        self.path = path;
    }

    fn lacked_memory(_: &NoMemory) -> bool {
        true
    }

    fn forward_with_hooks(
        &mut self,
        batch: &[SequenceSlice<'_, FakeAdapter>],
        logits: &mut Vec<f32>,
        hooks: &mut dyn PassHooks,
    ) -> Result<(), Self::Error> {
        let seen = |slice: &SequenceSlice<'_, FakeAdapter>| SeenSlice {
            start: slice.start,
            tokens: slice.tokens.len(),
            logits: slice.logits,
        };
        self.log.lock().unwrap().push(batch.iter().map(seen).collect());
        check_aliasing(batch);
        std::thread::sleep(self.pause);
        self.tick.lock().unwrap().iter_mut().for_each(|tick| tick());
        logits.clear();
        self.states.clear();
        let mut rows_before = Vec::new();
        for slice in batch {
            assert!(!slice.tokens.is_empty());
            hooks.while_waiting(&Wait(Cell::new(slice.start % 5)));
            self.write_trunk(slice, &rows_before);
            rows_before.extend(slice.tokens);
            assert!(!slice.tokens.contains(&PANICS), "a token that the pass cannot bear");
            self.write(slice);
            // Earlier writes stay, as on a device.
            let rows: usize = batch.iter().map(|slice| slice.tokens.len()).sum();
            if slice.tokens.contains(&HOPELESS) || slice.tokens.contains(&THIRSTY) && rows > FEW_ROWS {
                return Err(NoMemory);
            }
            let end = slice.start + slice.tokens.len();
            let first = match slice.logits {
                LogitRows::None => end,
                LogitRows::Last | LogitRows::Draw(_) => end - 1,
                LogitRows::All => slice.start,
                LogitRows::States { from } => {
                    let states = (slice.start + from..end)
                        .flat_map(|position| self.row(slice, position).take(HIDDEN))
                        .collect::<Vec<_>>();
                    self.states.extend(states);
                    continue;
                }
            };
            assert!(self.states.is_empty(), "who wants states comes last");
            (first..end).for_each(|position| logits.extend(self.row(slice, position)));
        }
        if batch.iter().any(|slice| slice.tokens.contains(&FALLS_SHORT)) {
            logits.truncate(logits.len() - VOCAB / 2);
        }
        Ok(())
    }

    fn block_bytes(&self) -> usize {
        BLOCK_TOKENS * size_of::<u64>()
    }

    fn read_block(&mut self, block: BlockId, bytes: &mut [u8]) -> Result<(), NoMemory> {
        assert_eq!(bytes.len(), self.block_bytes());
        let held: Vec<u8> = self.block(block).iter().flat_map(|slot| slot.to_le_bytes()).collect();
        bytes.copy_from_slice(&held);
        Ok(())
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), NoMemory> {
        assert_eq!(bytes.len(), self.block_bytes());
        let slots = bytes.as_chunks().0.iter().map(|slot| u64::from_le_bytes(*slot));
        self.block(block).iter_mut().zip(slots).for_each(|(held, slot)| *held = slot);
        Ok(())
    }
}

/// A wait that ends after this number of polls.
struct Wait(Cell<usize>);

impl PendingWeights for Wait {
    fn is_over(&self) -> bool {
        let left = self.0.get();
        self.0.set(left.saturating_sub(1));
        left == 0
    }

    fn left(&self) -> Duration {
        Duration::ZERO
    }
}

/// Checks that no slice reads what another writes, since a real pass computes them in any order.
fn check_aliasing(batch: &[SequenceSlice<'_, FakeAdapter>]) {
    for (index, writer) in batch.iter().enumerate() {
        let end = (writer.start + writer.tokens.len()).div_ceil(BLOCK_TOKENS);
        let written: HashSet<BlockId> =
            writer.blocks[writer.start / BLOCK_TOKENS..end].iter().copied().collect();
        let others = batch.iter().enumerate().filter(|(other, _)| *other != index);
        for (_, reader) in others {
            assert!(
                !reader.blocks.iter().any(|block| written.contains(block)),
                "a block is written and shared"
            );
        }
    }
}

pub(crate) fn request(request: u64, prompt: Vec<u32>, max_tokens: u32) -> Generate {
    let sampling = Sampling { temperature: 0.0, seed: request, ..Sampling::default() };
    Generate {
        request,
        adapter: None,
        namespace: [0; 32],
        base_namespace: [0; 32],
        owner: [0; 32],
        prompt,
        generated: 0,
        max_tokens,
        min_tokens: 0,
        stop_tokens: Vec::new(),
        sampling,
        logprobs: None,
        prompt_logprobs: None,
        deadline_ms: 0,
        provisional: ProvisionalMode::Unwanted,
        precision: Precision::Serving,
        grammar: None,
        pooling: None,
        expected: Vec::new(),
    }
}

/// Adapter of rank 4 that answers requests.
pub(crate) fn resident<A>(adapter: Arc<A>, claim: AdapterClaim) -> ResidentAdapter<A> {
    ResidentAdapter {
        generation: AdapterVersion([100 + claim.id().0[0]; 32]),
        adapter,
        claim,
        rank: 4,
        modules: 2,
        virtual_tokens: 0,
        invocation: None,
        role: AdapterRole::Answers,
        warnings: Vec::new(),
    }
}

pub(crate) fn prompt(salt: u64, len: usize) -> Vec<u32> {
    (0..len as u64).map(|index| (mix(salt, index) % 60) as u32).collect()
}
