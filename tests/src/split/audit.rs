//! Whether a pad was used twice, found out from what executors were sent alone.
//!
//! A row of activations has at most 30 bits, a pad 48 or 64. So of all pads there are, the one that a row was covered with is the one
//! that leaves small numbers when it is taken away; any other leaves numbers as large as its own.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fs,
    path::{Path, PathBuf},
};

use client::masking::one_time_pads::pool::PadPool;
use shmproto::layer::{
    CallHeader, Op, Path as SitePath, RowSource,
    seeded_rows::{DRAW_WORDS, KEY_BYTES, Key, SeededRows},
};

/// Numbers of a row that are looked at: another pad leaves all of them small once in 2^132 times; of five shorter ones, in 2^85.
const LOOKED_AT: usize = 4;
/// Pads of a block of a pool's file: keys first, and then what the site makes of them, with half a hash behind each.
const BLOCK: usize = 64;
const CHECK_BYTES: usize = 16;
/// Slots of a journal begin at a multiple of this.
const SLOT_BYTES: usize = 4096;

/// The first numbers of a row, or of a pad, as they travel: so many, or a third more that are shorter.
type RowHead = [u8; 8 * LOOKED_AT];

/// What rows are small without.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PadName {
    key: [u8; KEY_BYTES],
    /// Of the key's rows.
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

/// The heads of the rows of a call on the ring path.
fn heads(call: &CallHeader, body: &[u8]) -> Vec<RowHead> {
    let head = |row: &[u8]| *row.first_chunk().expect("rows are longer");
    body.chunks(body.len() / call.rows as usize).map(head).collect()
}

/// Whether a row without a pad is small, where numbers have so many bytes.
fn covers(number_bytes: usize, row: &RowHead, pad: &RowHead) -> bool {
    let word = |number: &[u8]| number.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    let above = 64 - 8 * number_bytes;
    let pairs = row.chunks_exact(number_bytes).zip(pad.chunks_exact(number_bytes));
    pairs
        .map(|(z, r)| (word(z).wrapping_sub(word(r)) << above).cast_signed() >> above)
        .all(|x| x.abs() < 1 << 30)
}

/// True for rows that travel in the ring.
fn has_rows(call: &CallHeader) -> bool {
    (call.path, call.source) == (SitePath::Ring, RowSource::Rows)
}

/// Pads that are known, by what they are for, and those that were used.
#[derive(Debug, Default)]
pub struct PadUsage {
    known: BTreeMap<(u32, bool), BTreeMap<PadName, (RowHead, u64)>>,
    used: BTreeSet<PadName>,
    /// What should not have been.
    breaches: Vec<String>,
}

impl PadUsage {
    /// A pad of a site, in one direction, and its number there.
    fn learn(&mut self, place: (u32, bool), name: PadName, number: u64) {
        let known = self.known.entry(place).or_default();
        if let Entry::Vacant(new) = known.entry(name) {
            let head = new.key().head();
            new.insert((head, number));
        }
    }

    /// The number of the pad that covers a row; it is used from now on.
    fn spend(&mut self, call: &CallHeader, row: RowHead) -> Option<u64> {
        let place = (call.site, call.op == Op::Backward);
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

    /// Pads that were used.
    ///
    /// # Panics
    /// If one was used twice, or a row went without.
    #[must_use]
    pub fn audited(&self) -> usize {
        assert!(self.breaches.is_empty(), "{:#?}", self.breaches);
        self.used.len()
    }
}

/// Looks at a pool's pads, and at its journal at the very moment when a row arrives that one covers.
#[derive(Debug)]
pub struct PoolAuditor {
    directory: PathBuf,
    ledger: PadUsage,
}

impl PoolAuditor {
    /// Of the pool in `directory`, which is made later.
    #[must_use]
    pub fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), ledger: PadUsage::default() }
    }

    /// Reads the pads that are there now and were not erased.
    ///
    /// # Panics
    /// If there is no pool, or somebody has it.
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

    /// Looks at a call before the executor gets it.
    pub fn hear(&mut self, call: &CallHeader, body: &[u8]) {
        if !has_rows(call) {
            return;
        }
        // Its client waits for the answer, and writes nothing.
        let burnt = marks(&self.directory)[2 * call.site as usize].0;
        for head in heads(call, body) {
            if self.ledger.spend(call, head).is_some_and(|number| number >= burnt) {
                self.ledger
                    .breaches
                    .push(format!("a pad of site {} was used before it was noted", call.site));
            }
        }
    }

    /// Pads that were used; see [`PadUsage::audited`].
    #[must_use]
    pub fn audited(&self) -> usize {
        self.ledger.audited()
    }
}

/// Of each file of a pool: how many pads are burnt, and made. From the newer slot of its journal.
fn marks(directory: &Path) -> Vec<(u64, u64)> {
    let bytes = fs::read(directory.join("journal")).expect("the journal");
    // Both slots are as long, but for the zeros behind the second.
    let slot = bytes.len().next_multiple_of(SLOT_BYTES) / 2;
    let newer =
        bytes.chunks(slot).max_by_key(|slot| slot.first_chunk().map(|bytes| u64::from_le_bytes(*bytes)));
    let numbers = newer.expect("two slots").as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    let numbers: Vec<u64> = numbers.skip(1).collect();
    numbers.as_chunks::<2>().0.iter().map(|&[burnt, made]| (burnt, made)).collect()
}

/// Looks at what two executors are sent that do not: rows there, draws here.
#[derive(Debug, Default)]
pub struct SharesAuditor {
    ledger: PadUsage,
    /// Rows that came before the draw of their pads did.
    waiting: Vec<(CallHeader, Vec<RowHead>)>,
    drawn: BTreeSet<PadName>,
}

impl SharesAuditor {
    /// Looks at a call to the first executor.
    pub fn hear_first(&mut self, call: &CallHeader, body: &[u8]) {
        if has_rows(call) {
            self.waiting.push((*call, heads(call, body)));
        }
    }

    /// Looks at a call to the second executor.
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
            self.ledger.learn((call.site, call.op == Op::Backward), name, row);
        }
    }

    /// Pads that were used; see [`PadUsage::audited`].
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
