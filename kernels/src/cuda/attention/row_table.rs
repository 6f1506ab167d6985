//! Table of a batch's rows: their positions, their sequences' blocks, and the work items of attention.

use std::sync::Arc;

use crate::{
    attention::{BLOCK_TOKENS, KvRows, QkvLayout},
    cuda::{BlockMemory, CudaError, CudaStream, DeviceVec},
};

use super::pool::padded_head;

/// Marks an unused entry, for the kernels too.
const NONE: u32 = u32::MAX;

/// Sequences with more new rows than this are cut into tiles.
const FEW_ROWS: usize = 8;

/// Queries per item and per tile, as in the kernels.
const ITEM_QUERIES: usize = 8;
const TILE_QUERIES: usize = 64;

/// Words per table entry, as in the kernels.
const ITEM_WORDS: usize = 8;
const UNIT_WORDS: usize = 2;
const TILE_WORDS: usize = 4;

/// Positions of the shortest span, and maximum number of spans of a context: one warp lane joins each span.
const SHORTEST_SPAN: usize = 128;
const MAX_SPANS: usize = 32;

/// Initial capacity of a table, in entries.
const FIRST_CAPACITY: usize = 16;

/// Sizes of a table's launches. The sizes grow in steps, so a CUDA graph serves every table of the same
/// shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct TableShape {
    /// Number of spans of items.
    pub(super) units: usize,
    /// Number of items if any item has several spans, else 0.
    pub(super) joined_items: usize,
    /// Number of prefill tiles.
    pub(super) tiles: usize,
}

/// The rows of a batch on the device, uploaded once per pass.
///
/// The table's memory grows by doubling and otherwise keeps its address. Unused entries are marked. Rows of
/// no sequence have position 0, no keys and no results, so a CUDA graph may have more rows than are in use.
#[derive(Debug)]
pub struct RowTable {
    layout: QkvLayout,
    /// Blocks of the pool that the table refers to.
    pool: Arc<BlockMemory>,
    capacity: Sections,
    used: Sections,
    /// `[row_blocks | items | units | tiles | blocks]`, each as long as its capacity.
    words: DeviceVec<u32>,
    positions: DeviceVec<u32>,
    /// Results of spans that a later launch joins; written and read in the order of the stream.
    stats: DeviceVec<f32>,
    partials: DeviceVec<f32>,
    shape: TableShape,
    sequences: usize,
    longest: usize,
    staged: Staged,
}

#[derive(Debug, Clone, Copy, Default)]
struct Sections {
    rows: usize,
    items: usize,
    units: usize,
    tiles: usize,
    blocks: usize,
    /// Rows of partial results.
    slots: usize,
}

impl Sections {
    fn items_at(self) -> usize {
        self.rows
    }

    fn units_at(self) -> usize {
        self.items_at() + self.items * ITEM_WORDS
    }

    fn tiles_at(self) -> usize {
        self.units_at() + self.units * UNIT_WORDS
    }

    fn blocks_at(self) -> usize {
        self.tiles_at() + self.tiles * TILE_WORDS
    }

    fn words(self) -> usize {
        self.blocks_at() + self.blocks
    }

    /// Returns capacities for at least `used`, doubling those that are too small.
    fn grown(self, used: Self) -> Self {
        let grow = |has: usize, needs: usize| if needs <= has { has } else { needs.next_power_of_two() };
        Self {
            rows: grow(self.rows, used.rows),
            items: grow(self.items, used.items),
            units: grow(self.units, used.units),
            tiles: grow(self.tiles, used.tiles),
            blocks: grow(self.blocks, used.blocks),
            slots: grow(self.slots, used.slots),
        }
    }
}

/// The table as the host writes it; reused for its memory.
#[derive(Debug, Default)]
struct Staged {
    positions: Vec<u32>,
    row_blocks: Vec<u32>,
    items: Vec<[u32; ITEM_WORDS]>,
    units: Vec<[u32; UNIT_WORDS]>,
    tiles: Vec<[u32; TILE_WORDS]>,
    blocks: Vec<u32>,
    slots: usize,
    words: Vec<u32>,
}

impl RowTable {
    /// Creates an empty table for models of this `layout` and the pool with these blocks.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    pub fn new(pool: &Arc<BlockMemory>, layout: QkvLayout) -> Result<Self, CudaError> {
        let first = FIRST_CAPACITY;
        let capacity =
            Sections { rows: first, items: first, units: first, tiles: first, blocks: first, slots: 0 };
        Ok(Self {
            layout,
            pool: Arc::clone(pool),
            capacity,
            used: Sections::default(),
            words: DeviceVec::new(pool.cuda(), capacity.words())?,
            positions: DeviceVec::new(pool.cuda(), capacity.rows)?,
            stats: DeviceVec::new(pool.cuda(), 0)?,
            partials: DeviceVec::new(pool.cuda(), 0)?,
            shape: TableShape::default(),
            sequences: 0,
            longest: 0,
            staged: Staged::default(),
        })
    }

    /// Replaces the table by that of `batch`: on the host at once, on the device in the order of `stream`.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    ///
    /// # Panics
    /// Panics if a sequence has too few blocks, a block is missing or lent, or rows overlap or do not ascend.
    pub fn upload(&mut self, stream: &CudaStream, batch: &[KvRows<'_>]) -> Result<(), CudaError> {
        let rows = check(batch, &self.pool);
        self.staged.fill(batch, rows, self.layout);
        let used = self.staged.used();
        self.grow(stream, used)?;
        let words = self.staged.pack(self.capacity);
        stream.upload(words, &mut self.words, 0)?;
        stream.upload(&self.staged.positions, &mut self.positions, 0)?;
        (self.used, self.shape, self.sequences) = (used, self.staged.shape(), batch.len());
        self.longest = batch.iter().map(|slice| slice.position + slice.rows).max().unwrap_or(0);
        Ok(())
    }

    /// Allocates all missing memory before it frees any: if allocation fails, the table is unchanged.
    fn grow(&mut self, stream: &CudaStream, used: Sections) -> Result<(), CudaError> {
        let (cuda, capacity) = (stream.cuda(), self.capacity.grown(used));
        let slots = capacity.slots * self.layout.heads;
        let longer = |old: usize, new: usize| (new > old).then_some(new);
        let words = longer(self.words.len(), capacity.words()).map(|len| DeviceVec::new(cuda, len));
        let positions = longer(self.positions.len(), capacity.rows).map(|len| DeviceVec::new(cuda, len));
        let stats = longer(self.stats.len(), 2 * slots).map(|len| DeviceVec::new(cuda, len));
        let partials = slots * padded_head(self.layout.head_dim);
        let partials = longer(self.partials.len(), partials).map(|len| DeviceVec::new(cuda, len));
        let (words, positions, stats, partials) =
            (words.transpose()?, positions.transpose()?, stats.transpose()?, partials.transpose()?);
        replace(&mut self.words, words);
        replace(&mut self.positions, positions);
        replace(&mut self.stats, stats);
        replace(&mut self.partials, partials);
        self.capacity = capacity;
        Ok(())
    }

    /// Returns the position of each of at least [`RowTable::capacity`] rows; 0 for rows of no sequence.
    #[must_use]
    pub fn positions(&self) -> &DeviceVec<u32> {
        &self.positions
    }

    /// Returns the number of rows of the batch, including rows between sequences.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.used.rows
    }

    /// Returns the maximum number of rows of a launch.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity.rows
    }

    /// Returns the number of sequences of the batch.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.sequences
    }

    /// Returns the number of positions of the longest context, new rows included.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Returns the launch sizes, which a CUDA graph depends on.
    #[must_use]
    pub fn shape(&self) -> TableShape {
        self.shape
    }

    pub(super) fn layout(&self) -> QkvLayout {
        self.layout
    }

    /// Returns the memory whose blocks the entries number.
    pub(super) fn pool(&self) -> &Arc<BlockMemory> {
        &self.pool
    }

    /// Returns the address of each row's first index into the block list.
    pub(super) fn row_blocks(&self) -> u64 {
        self.words.address()
    }

    pub(super) fn items(&self) -> u64 {
        self.words.address_of(self.capacity.items_at())
    }

    pub(super) fn units(&self) -> u64 {
        self.words.address_of(self.capacity.units_at())
    }

    pub(super) fn tiles(&self) -> u64 {
        self.words.address_of(self.capacity.tiles_at())
    }

    pub(super) fn blocks(&self) -> u64 {
        self.words.address_of(self.capacity.blocks_at())
    }

    pub(super) fn stats(&self) -> u64 {
        self.stats.address()
    }

    pub(super) fn partials(&self) -> u64 {
        self.partials.address()
    }
}

impl Staged {
    fn fill(&mut self, batch: &[KvRows<'_>], rows: usize, layout: QkvLayout) {
        self.items.clear();
        self.units.clear();
        self.tiles.clear();
        self.blocks.clear();
        self.slots = 0;
        self.positions.clear();
        self.positions.resize(rows, 0);
        self.row_blocks.clear();
        self.row_blocks.resize(rows, NONE);
        for slice in batch.iter().filter(|slice| slice.rows > 0) {
            let context = slice.position + slice.rows;
            let first_block = to_u32(self.blocks.len());
            self.blocks.extend_from_slice(&slice.blocks[..context.div_ceil(BLOCK_TOKENS)]);
            for row in 0..slice.rows {
                self.positions[slice.first_row + row] = to_u32(slice.position + row);
                self.row_blocks[slice.first_row + row] = first_block;
            }
            let group = layout.heads / layout.kv_heads;
            if slice.rows <= FEW_ROWS {
                self.cut_into_items(slice, first_block, (ITEM_QUERIES / group).max(1));
            } else {
                self.cut_into_tiles(slice, first_block, (TILE_QUERIES / group).max(1));
            }
        }
        // The longest tiles come first, so that the last tiles to start are short.
        self.tiles.sort_by_key(|&[_, rows, position, _]| std::cmp::Reverse(position + rows));
    }

    /// Adds items of `rows_each` rows, and a unit for each span of an item's context.
    fn cut_into_items(&mut self, slice: &KvRows<'_>, first_block: u32, rows_each: usize) {
        for first in (0..slice.rows).step_by(rows_each) {
            let rows = rows_each.min(slice.rows - first);
            let context = slice.position + first + rows;
            let span = span(context);
            let splits = context.div_ceil(span);
            let item = to_u32(self.items.len());
            let position = to_u32(slice.position + first);
            let (first_row, slot) = (to_u32(slice.first_row + first), to_u32(self.slots));
            let (rows, spans) = (to_u32(rows), to_u32(splits));
            self.items.push([first_row, rows, position, first_block, slot, spans, to_u32(span), 0]);
            self.units.extend((0..spans).map(|split| [item, split]));
            if splits > 1 {
                self.slots += splits * rows as usize;
            }
        }
    }

    fn cut_into_tiles(&mut self, slice: &KvRows<'_>, first_block: u32, rows_each: usize) {
        for first in (0..slice.rows).step_by(rows_each) {
            let rows = to_u32(rows_each.min(slice.rows - first));
            let (first_row, position) = (to_u32(slice.first_row + first), to_u32(slice.position + first));
            self.tiles.push([first_row, rows, position, first_block]);
        }
    }

    fn used(&self) -> Sections {
        Sections {
            rows: self.row_blocks.len(),
            items: self.items.len(),
            units: self.units.len(),
            tiles: self.tiles.len(),
            blocks: self.blocks.len(),
            slots: self.slots,
        }
    }

    fn shape(&self) -> TableShape {
        TableShape {
            units: step(self.units.len()),
            joined_items: if self.slots > 0 { step(self.items.len()) } else { 0 },
            tiles: step(self.tiles.len()),
        }
    }

    /// Packs all sections into one run of words, unused entries filled with [`NONE`]; pads positions with 0.
    fn pack(&mut self, capacity: Sections) -> &[u32] {
        self.positions.resize(capacity.rows, 0);
        let words = &mut self.words;
        words.clear();
        words.extend_from_slice(&self.row_blocks);
        words.resize(capacity.items_at(), NONE);
        words.extend(self.items.iter().flatten());
        words.resize(capacity.units_at(), NONE);
        words.extend(self.units.iter().flatten());
        words.resize(capacity.tiles_at(), NONE);
        words.extend(self.tiles.iter().flatten());
        words.resize(capacity.blocks_at(), NONE);
        words.extend_from_slice(&self.blocks);
        words
    }
}

fn replace<T>(old: &mut T, new: Option<T>) {
    if let Some(new) = new {
        *old = new;
    }
}

/// Checks the conditions that the kernels rely on and returns the number of rows.
fn check(batch: &[KvRows<'_>], pool: &BlockMemory) -> usize {
    let in_order = |pair: &[KvRows<'_>]| pair[0].first_row + pair[0].rows <= pair[1].first_row;
    assert!(batch.windows(2).all(in_order), "slices have rows of their own, in ascending order");
    for slice in batch {
        assert!(slice.position + slice.rows <= slice.blocks.len() * BLOCK_TOKENS, "enough blocks");
        assert!(slice.blocks.iter().all(|&block| pool.is_own(block)), "blocks of this pool, not lent");
    }
    batch.last().map_or(0, |slice| slice.first_row + slice.rows)
}

/// Returns the positions per span, from `context` alone, so other sequences never change a result's bits.
fn span(context: usize) -> usize {
    let mut span = SHORTEST_SPAN;
    while context > span * MAX_SPANS {
        span *= 2;
    }
    span
}

/// Rounds a launch size up to one of few sizes, at most a third larger. The result never exceeds the next
/// power of two, which is the capacity of tables.
fn step(count: usize) -> usize {
    match count {
        0 => 0,
        1..=FIRST_CAPACITY => count.next_power_of_two(),
        _ => count.next_multiple_of(count.next_power_of_two() / 8),
    }
}

/// Converts a table entry; rows, positions and blocks are far below 2^32.
fn to_u32(of: usize) -> u32 {
    u32::try_from(of).expect("a batch's numbers fit 32 bits")
}

#[cfg(test)]
mod tests {
    use super::{FIRST_CAPACITY, MAX_SPANS, span, step};

    #[test]
    fn sizes_of_launches_cover_what_there_is_and_fit_the_table() {
        for count in 0..5000 {
            let size = step(count);
            assert!(
                (count..=count.next_power_of_two().max(FIRST_CAPACITY)).contains(&size),
                "{count}: {size}"
            );
            assert!(count <= FIRST_CAPACITY || size * 3 <= count * 4, "{count}: {size}");
        }
    }

    #[test]
    fn a_context_has_at_most_as_many_spans_as_a_warp_can_join() {
        for context in [1_usize, 127, 128, 129, 4096, 4097, 131_072, 131_073, 10_000_000] {
            assert!(context.div_ceil(span(context)) <= MAX_SPANS, "{context}");
        }
    }
}
