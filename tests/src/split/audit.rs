//! Checks from the executors' input alone whether a pad was used twice.
//!
//! A row's values have at most 30 bits, a pad's 48 or 64. So the pad that covers a row is the only one whose
//! subtraction leaves small values; any other pad leaves large values.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fs,
    path::{Path, PathBuf},
};

use client::masking::one_time_pads::pool::PadPool;
use shmproto::layer::{
    CallHeader, RowSource, SiteOp, SitePath,
    seeded_rows::{DRAW_WORDS, KEY_BYTES, Key, SeededRows},
};

/// Number of compared values per row: another pad leaves all of them small once in 2^132 times; of five
/// shorter values, in 2^85.
const LOOKED_AT: usize = 4;
/// Pads per block of a pool's file: keys first, then the site's outputs, each followed by half a hash.
const BLOCK: usize = 64;
const CHECK_BYTES: usize = 16;
/// Alignment in bytes of a journal's slots.
const SLOT_BYTES: usize = 4096;

/// First values of a row or pad in wire format: `LOOKED_AT` values, or a third more of shorter ones.
type RowHead = [u8; 8 * LOOKED_AT];

/// Identity of a pad.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PadName {
    key: [u8; KEY_BYTES],
    /// Row number among the key's pads.
    row: u64,
}

impl PadName {
    fn head(&self) -> RowHead {
        let mut words = [0.0; 2 * LOOKED_AT];
        SeededRows { key: Key::new(&self.key), first: self.row }.fill(0, words.len(), &mut words);
        let mut head = [0; 8 * LOOKED_AT];
        for (bytes, word) in head.as_chunks_mut().0.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
        head
    }
}

/// Returns the heads of a call's rows on the ring path.
fn heads(call: &CallHeader, body: &[u8]) -> Vec<RowHead> {
    let head = |row: &[u8]| *row.first_chunk().expect("rows are longer");
    body.chunks(body.len() / call.rows as usize).map(head).collect()
}

/// Whether subtracting the pad leaves small values, for values of `number_bytes` bytes.
fn covers(number_bytes: usize, row: &RowHead, pad: &RowHead) -> bool {
    let word = |number: &[u8]| number.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    let above = 64 - 8 * number_bytes;
    let pairs = row.chunks_exact(number_bytes).zip(pad.chunks_exact(number_bytes));
    pairs
        .map(|(z, r)| (word(z).wrapping_sub(word(r)) << above).cast_signed() >> above)
        .all(|x| x.abs() < 1 << 30)
}

/// True if the call's rows travel in the ring.
fn has_rows(call: &CallHeader) -> bool {
    (call.path, call.source) == (SitePath::Ring, RowSource::Rows)
}

/// Known pads by purpose, and the used ones.
#[derive(Debug, Default)]
pub struct PadUsage {
    known: BTreeMap<(u32, bool), BTreeMap<PadName, (RowHead, u64)>>,
    used: BTreeSet<PadName>,
    breaches: Vec<String>,
}

impl PadUsage {
    /// Adds a pad of a site and direction, with its number there.
    fn learn(&mut self, place: (u32, bool), name: PadName, number: u64) {
        let known = self.known.entry(place).or_default();
        if let Entry::Vacant(new) = known.entry(name) {
            let head = new.key().head();
            new.insert((head, number));
        }
    }

    /// Returns the number of the pad that covers a row, and marks the pad as used.
    fn spend(&mut self, call: &CallHeader, row: RowHead) -> Option<u64> {
        let place = (call.site, call.op == SiteOp::Backward);
        let covers = |pad: &RowHead| [6, 8].iter().any(|&number_bytes| covers(number_bytes, &row, pad));
        let pads = self.known.get(&place).into_iter().flatten();
        let found: Vec<_> = pads.filter(|(_, (head, _))| covers(head)).collect();
        let [(name, (_, number))] = found[..] else {
            self.breaches.push(format!("{} pads cover a row at site {}", found.len(), call.site));
            return None;
        };
        let number = *number;
        if !self.used.insert(name.clone()) {
            self.breaches.push(format!("pad {number} of site {} was used again", call.site));
        }
        Some(number)
    }

    /// Returns the number of used pads.
    ///
    /// # Panics
    /// If a pad was used twice, or a row was sent without a pad.
    #[must_use]
    pub fn audited(&self) -> usize {
        assert!(self.breaches.is_empty(), "{:#?}", self.breaches);
        self.used.len()
    }
}

/// Checks a pool's pads, and its journal when a row with one of the pads arrives.
#[derive(Debug)]
pub struct PoolAuditor {
    directory: PathBuf,
    ledger: PadUsage,
}

impl PoolAuditor {
    /// Creates an audit of the pool in `directory`, which may be created later.
    #[must_use]
    pub fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), ledger: PadUsage::default() }
    }

    /// Reads the pads that exist and were not erased.
    ///
    /// # Panics
    /// If there is no pool, or another process has locked it.
    pub fn learn(&mut self) {
        let pool = PadPool::open(&self.directory).expect("a pool that nobody has");
        let marks = marks(&self.directory);
        for (shape, site) in pool.shapes().iter().zip(0_u32..) {
            let bytes = fs::read(self.directory.join(format!("{site:05}.forward"))).expect("its pads");
            let effect_bytes = CHECK_BYTES + 4 * shape.moduli[0].words(shape.outputs as usize);
            let blocks = bytes.chunks(BLOCK * (KEY_BYTES + CHECK_BYTES + effect_bytes));
            let keys = blocks.flat_map(|block| block.chunks_exact(KEY_BYTES + CHECK_BYTES).take(BLOCK));
            for (key, number) in keys.zip(0..marks[2 * site as usize].1) {
                let key = *key.first_chunk().expect("a key");
                if key != [0; KEY_BYTES] {
                    self.ledger.learn((site, false), PadName { key, row: 0 }, number);
                }
            }
        }
    }

    /// Checks a call before the executor receives it.
    pub fn hear(&mut self, call: &CallHeader, body: &[u8]) {
        if !has_rows(call) {
            return;
        }
        // The client waits for the reply and does not write meanwhile.
        let burnt = marks(&self.directory)[2 * call.site as usize].0;
        for head in heads(call, body) {
            if self.ledger.spend(call, head).is_some_and(|number| number >= burnt) {
                self.ledger
                    .breaches
                    .push(format!("a pad of site {} was used before it was noted", call.site));
            }
        }
    }

    /// Returns the number of used pads; see [`PadUsage::audited`].
    #[must_use]
    pub fn audited(&self) -> usize {
        self.ledger.audited()
    }
}

/// Returns how many pads of each file of a pool are burnt and made, from the newer slot of its journal.
fn marks(directory: &Path) -> Vec<(u64, u64)> {
    let bytes = fs::read(directory.join("journal")).expect("the journal");
    // Both slots have the same length, except for the zeros after the second.
    let slot = bytes.len().next_multiple_of(SLOT_BYTES) / 2;
    let newer =
        bytes.chunks(slot).max_by_key(|slot| slot.first_chunk().map(|bytes| u64::from_le_bytes(*bytes)));
    let numbers = newer.expect("two slots").as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    let numbers: Vec<u64> = numbers.skip(1).collect();
    numbers.as_chunks::<2>().0.iter().map(|&[burnt, made]| (burnt, made)).collect()
}

/// Checks the input of two non-colluding executors: rows at the first, draws at the second.
#[derive(Debug, Default)]
pub struct SharesAuditor {
    ledger: PadUsage,
    /// Rows that arrived before the draw of their pads.
    waiting: Vec<(CallHeader, Vec<RowHead>)>,
    drawn: BTreeSet<PadName>,
}

impl SharesAuditor {
    /// Checks a call to the first executor.
    pub fn hear_first(&mut self, call: &CallHeader, body: &[u8]) {
        if has_rows(call) {
            self.waiting.push((*call, heads(call, body)));
        }
    }

    /// Checks a call to the second executor.
    pub fn hear_second(&mut self, call: &CallHeader, body: &[u8]) {
        if call.source != RowSource::Draw {
            self.ledger.breaches.push("rows came to the second executor".to_owned());
            return;
        }
        let words: Vec<f32> = body.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let draw = SeededRows::from_words(<&[f32; DRAW_WORDS]>::try_from(&words[..]).expect("a draw"));
        for row in draw.first..draw.first + u64::from(call.rows) {
            let name = PadName { key: *draw.key.bytes(), row };
            if !self.drawn.insert(name.clone()) {
                self.ledger.breaches.push(format!("row {row} was drawn again"));
            }
            self.ledger.learn((call.site, call.op == SiteOp::Backward), name, row);
        }
    }

    /// Returns the number of used pads; see [`PadUsage::audited`].
    #[must_use]
    pub fn audited(&mut self) -> usize {
        for (call, heads) in std::mem::take(&mut self.waiting) {
            for head in heads {
                self.ledger.spend(&call, head);
            }
        }
        self.ledger.audited()
    }
}
