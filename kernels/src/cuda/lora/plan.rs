//! The deltas of a pass as tables on the device, made and uploaded once at the start of the pass.

use std::{collections::HashMap, sync::Arc};

use super::StagedMatrix;
use crate::{
    cuda::{Cuda, CudaError, CudaStream, DeviceBlockLease, DeviceVec, launch::count},
    lora::{Factor, FactorCut, RANK_BLOCK},
};

/// Rows per unit: `TILE_ROWS` of `lora.cu`.
const TILE_ROWS: usize = 32;

/// Words of a segment in the table: `Segment` of `lora.cu`.
const SEGMENT_WORDS: usize = 16;

/// Minimum columns of a shrink unit, and maximum number of chunks of A's columns. A matrix's chunks depend on
/// its columns alone, so the order of its sums does not depend on the batch.
const LEAST_CHUNK: usize = 1024;
const MAX_CHUNKS: usize = 8;

/// Panels of one rank block per expand unit.
const PANELS: usize = 64;

/// Shift of a factor that is not cut, as in `lora.cu`.
const UNCUT: u32 = 31;

/// A delta to add: consecutive rows of one adapter, one linear layer.
#[derive(Debug, Clone, Copy)]
pub struct LoraSegment<'a> {
    /// First row of the segment.
    pub first_row: usize,
    /// Number of consecutive rows.
    pub rows: usize,
    /// The adapter's matrices for this layer.
    pub matrix: &'a StagedMatrix,
    /// First rank to add: a multiple of [`RANK_BLOCK`], or the rank itself for none. CPU workers add the
    /// others.
    pub first_rank: usize,
    /// Column of `out` of the layer's first output.
    pub column: usize,
}

/// Function that returns the rank blocks to compute of every segment of a group; `None` for each segment's
/// own.
type Padding = fn(&[LoraSegment<'_>]) -> Option<usize>;

/// Sizes that the launches for a group depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(super) struct GroupShape {
    /// Capacity of the table, in segments.
    pub(super) segments: u32,
    pub(super) shrink_units: u32,
    pub(super) expand_units: u32,
}

/// Sizes of a plan's launches; a CUDA graph serves every plan of equal shape.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct PlanShape(Vec<GroupShape>);

/// A group's sizes and device addresses, as [`super::add_deltas`] needs them.
pub(super) struct Group {
    pub(super) shape: GroupShape,
    pub(super) columns: usize,
    /// One past the last row.
    pub(super) rows: usize,
    /// One past the last output.
    pub(super) outputs: usize,
    pub(super) segments: u64,
    pub(super) shrink_first: u64,
    pub(super) expand_first: u64,
    pub(super) sums: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct GroupEntry {
    columns: usize,
    rows: usize,
    outputs: usize,
    /// Index of its first word in the table.
    at: usize,
}

/// The deltas to add in a pass. The plan keeps the blocks that it points to lent until the next upload. If an
/// adapter is revoked before, the plan must not be launched again.
#[derive(Debug)]
pub struct LoraPlan {
    padding: Padding,
    shape: PlanShape,
    entries: Vec<GroupEntry>,
    words: Vec<u32>,
    table: DeviceVec<u32>,
    /// Contents of `table` on the device.
    uploaded: Vec<u32>,
    sums: DeviceVec<f32>,
    held: HashMap<usize, Arc<DeviceBlockLease>>,
}

impl LoraPlan {
    /// Creates an empty plan that computes each segment at its true rank.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn new(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        Self::with_padding(cuda, |_| None)
    }

    pub(in crate::cuda) fn with_padding(cuda: &Arc<Cuda>, padding: Padding) -> Result<Self, CudaError> {
        Ok(Self {
            padding,
            shape: PlanShape::default(),
            entries: Vec::new(),
            words: Vec::new(),
            table: DeviceVec::new(cuda, 0)?,
            uploaded: Vec::new(),
            sums: DeviceVec::new(cuda, 0)?,
            held: HashMap::new(),
        })
    }

    /// Replaces all groups, in the order of `stream`. Tables grow by doubling, which makes CUDA graphs stale;
    /// an unchanged plan is not uploaded again.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    ///
    /// # Panics
    /// Panics if a group's segments are not in ascending order of rows and then columns, if its matrices
    /// differ in input features, or if a segment's first rank is not the first of a block or has not arrived.
    pub fn upload(&mut self, stream: &CudaStream, groups: &[Vec<LoraSegment<'_>>]) -> Result<(), CudaError> {
        self.words.clear();
        self.entries.clear();
        self.shape.0.clear();
        let mut held = HashMap::new();
        let mut most_sums = 0;
        for group in groups {
            let mut table = GroupTable::new(group, (self.padding)(group));
            for segment in group {
                let lent = segment.matrix.lent();
                held.entry(Arc::as_ptr(lent).addr()).or_insert_with(|| Arc::clone(lent));
                table.push(segment);
            }
            most_sums = most_sums.max(table.sums);
            self.entries.push(GroupEntry { at: self.words.len(), ..table.entry });
            self.shape.0.push(table.append(&mut self.words));
        }
        self.send(stream, most_sums)?;
        self.held = held;
        Ok(())
    }

    /// Returns the shape that a CUDA graph of this plan's launches depends on.
    #[must_use]
    pub fn shape(&self) -> &PlanShape {
        &self.shape
    }

    /// Returns the number of groups.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.entries.len()
    }

    fn send(&mut self, stream: &CudaStream, most_sums: usize) -> Result<(), CudaError> {
        if most_sums > self.sums.len() {
            self.sums = DeviceVec::new(stream.cuda(), most_sums.max(2 * self.sums.len()))?;
        }
        if self.words.len() > self.table.len() {
            self.uploaded.clear();
            self.table = DeviceVec::new(stream.cuda(), self.words.len().max(2 * self.table.len()))?;
        }
        if self.words != self.uploaded {
            // The contents are unknown until the upload is enqueued.
            self.uploaded.clear();
            stream.upload(&self.words, &mut self.table, 0)?;
            self.uploaded.clone_from(&self.words);
        }
        Ok(())
    }

    /// Returns group `index` if it has segments.
    pub(super) fn group(&self, index: usize) -> Option<Group> {
        let (GroupEntry { columns, rows, outputs, at }, shape) = (self.entries[index], self.shape.0[index]);
        if shape.segments == 0 {
            return None;
        }
        let room = shape.segments as usize;
        let first = at + room * SEGMENT_WORDS;
        Some(Group {
            shape,
            columns,
            rows,
            outputs,
            segments: self.table.address_of(at),
            shrink_first: self.table.address_of(first),
            expand_first: self.table.address_of(first + room + 1),
            sums: self.sums.address_of(0),
        })
    }
}

struct GroupTable {
    entry: GroupEntry,
    /// Rank blocks of every segment, if they are padded.
    padded_blocks: Option<usize>,
    segments: Vec<u32>,
    shrink_first: Vec<u32>,
    expand_first: Vec<u32>,
    shrink_units: usize,
    expand_units: usize,
    sums: usize,
}

impl GroupTable {
    fn new(group: &[LoraSegment<'_>], padded_blocks: Option<usize>) -> Self {
        assert!(
            group.windows(2).all(|pair| in_order(&pair[0], &pair[1])),
            "segments are disjoint and in order"
        );
        let columns = group.first().map_or(0, |segment| segment.matrix.layout().columns);
        Self {
            entry: GroupEntry { columns, ..GroupEntry::default() },
            padded_blocks,
            segments: Vec::with_capacity(group.len() * SEGMENT_WORDS),
            shrink_first: Vec::with_capacity(group.len() + 1),
            expand_first: Vec::with_capacity(group.len() + 1),
            shrink_units: 0,
            expand_units: 0,
            sums: 0,
        }
    }

    /// Adds a segment, unless it has nothing to add.
    fn push(&mut self, segment: &LoraSegment<'_>) {
        let LoraSegment { first_row, rows, matrix, first_rank, column } = *segment;
        let layout = matrix.layout();
        assert_eq!(layout.columns, self.entry.columns, "a group's matrices have one input");
        assert!(
            first_rank.is_multiple_of(RANK_BLOCK) || first_rank >= layout.rank,
            "ranks are added by blocks"
        );
        assert!(first_rank >= matrix.first_rank(), "the ranks that are added have arrived");
        if rows == 0 || first_rank >= layout.rank {
            return;
        }
        self.entry.rows = self.entry.rows.max(first_row + rows);
        self.entry.outputs = self.entry.outputs.max(column + layout.rows);
        let first_block = first_rank / RANK_BLOCK;
        let blocks = self.padded_blocks.unwrap_or_else(|| layout.rank.div_ceil(RANK_BLOCK));
        let (computed, tiles) = (blocks - first_block, rows.div_ceil(TILE_ROWS));
        let chunk = layout.columns.div_ceil(MAX_CHUNKS).next_multiple_of(128).max(LEAST_CHUNK);
        let chunks = layout.columns.div_ceil(chunk);
        let cuts = [Factor::A, Factor::B].map(|factor| matrix.cut(factor));
        let panels = unit_panels(computed, cuts[1]);

        let [a, b] = matrix.tables().map(halves);
        let [a_shift, b_shift] = cuts.map(shift);
        let kinds = layout.a.kind as u32 | (layout.b.kind as u32) << 4;
        let packed = kinds | a_shift << 8 | b_shift << 16 | count(panels) << 24;
        let [first_row, all_rows, columns, outputs, rank] =
            [first_row, rows, layout.columns, layout.rows, layout.rank].map(count);
        let [first_block, blocks, chunk, column, sums] =
            [first_block, blocks, chunk, column, self.sums].map(count);
        let shape = [first_row, all_rows, columns, outputs, rank, first_block, blocks, chunk];
        self.segments.extend(a.into_iter().chain(b).chain(shape));
        self.segments.extend([column, packed, sums, layout.scale.to_bits()]);

        self.shrink_first.push(count(self.shrink_units));
        self.expand_first.push(count(self.expand_units));
        self.shrink_units += tiles * computed * chunks;
        self.expand_units += tiles * layout.rows.div_ceil(RANK_BLOCK).div_ceil(panels);
        self.sums += rows * computed * chunks * RANK_BLOCK;
    }

    /// Appends the table, padded to the capacity in its shape.
    fn append(mut self, words: &mut Vec<u32>) -> GroupShape {
        let segments = self.shrink_first.len();
        if segments == 0 {
            return GroupShape::default();
        }
        let room = segments.next_power_of_two();
        self.segments.resize(room * SEGMENT_WORDS, 0);
        self.shrink_first.resize(room + 1, count(self.shrink_units));
        self.expand_first.resize(room + 1, count(self.expand_units));
        words.extend(self.segments);
        words.extend(self.shrink_first);
        words.extend(self.expand_first);
        // The kernels read segments 16 bytes at a time, so the next group must be aligned.
        words.resize(words.len().next_multiple_of(4), 0);
        GroupShape {
            segments: count(room),
            shrink_units: count(bucket(self.shrink_units)),
            expand_units: count(bucket(self.expand_units)),
        }
    }
}

/// True if two segments are disjoint and ascend by rows, or by columns within equal rows.
fn in_order(a: &LoraSegment<'_>, b: &LoraSegment<'_>) -> bool {
    let same_rows = (a.first_row, a.rows) == (b.first_row, b.rows);
    a.first_row + a.rows <= b.first_row || same_rows && a.column + a.matrix.layout().rows <= b.column
}

/// Returns the panels per expand unit; all panels of a unit lie within one piece.
fn unit_panels(computed_blocks: usize, cut: FactorCut) -> usize {
    let panels = (PANELS / computed_blocks).next_multiple_of(8).max(8);
    if cut.count == 1 { panels } else { (1 << panels.ilog2()).min((1 << cut.shift) / RANK_BLOCK) }
}

/// Returns the features per piece as a power of two, for the kernels.
fn shift(cut: FactorCut) -> u32 {
    if cut.count == 1 { UNCUT } else { cut.shift }
}

/// Rounds `units` up by at most a quarter, so that similar plans have one shape.
fn bucket(units: usize) -> usize {
    units.next_multiple_of((units.next_power_of_two() / 8).max(1))
}

/// Splits an address into two words, the lower first.
fn halves(address: u64) -> [u32; 2] {
    [address as u32, (address >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::bucket;

    #[test]
    fn buckets_hold_their_units_and_waste_at_most_a_quarter() {
        for units in 1..5000 {
            let room = bucket(units);
            assert!(room >= units && 4 * (room - units) <= units.max(4), "{units} in {room}");
            assert_eq!(bucket(room), room, "a bucket's size is in that bucket");
        }
    }
}
