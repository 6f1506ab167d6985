//! Header and table of an image: encoding, and all checks at decoding.

use std::ops::Range;

use super::{EntryFault, ImageError};
use crate::codec::{DecodeError, Reader, Wire};

/// First eight bytes of every image.
pub const MAGIC: [u8; 8] = *b"HOLOLORA";

/// Version of the image layout; it changes with the layout.
pub const VERSION: u32 = 1;

/// Size of the header in bytes; the table follows.
pub const HEADER_BYTES: usize = 64;

/// Size of a table entry in bytes.
pub const ENTRY_BYTES: usize = 40;

/// Alignment of the data and of every factor in bytes: a cache line.
pub const ALIGNMENT_BYTES: usize = 64;

/// Maximum number of modules in an image: eight targets in each of 1,024 layers.
pub const MAX_MODULES: u32 = 8 * 1024;

/// Largest rank that an entry may have.
pub const MAX_RANK: u32 = 1024;

/// Maximum number of columns, and of rows.
pub const MAX_SIDE: u32 = 1 << 24;

/// Constants on which both sides must agree; the hash of the hello covers them.
pub const LAYOUT: [u32; 6] =
    [VERSION, HEADER_BYTES as u32, ENTRY_BYTES as u32, ALIGNMENT_BYTES as u32, MAX_MODULES, MAX_RANK];

/// Target number of the head, which exists once, under layer 0.
const HEAD: u32 = 7;

/// Matrix pair of an adapter: `out += scale * B (A x)`.
///
/// `A` is `[rank, columns]`, `B` transposed `[rank, rows]`, both contiguous and little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ImageEntry {
    /// Module number, `layer * 8 + target`: q 0, k 1, v 2, o 3, gate 4, up 5, down 6, head 7 (layer 0).
    pub module: u32,
    /// Rank of the pair, 1 to [`MAX_RANK`].
    pub rank: u32,
    /// Number of inputs of the layer, 1 to [`MAX_SIDE`].
    pub columns: u32,
    /// Number of outputs of the layer, 1 to [`MAX_SIDE`].
    pub rows: u32,
    /// Factor of the product; finite.
    pub scale: f32,
    /// Element type of `A`: 0 f32, 1 f16, 2 bf16.
    pub a_kind: u8,
    /// Element type of `B`, with the same codes.
    pub b_kind: u8,
    /// Offset of `A`, in bytes; a multiple of [`ALIGNMENT_BYTES`].
    pub a_offset: u64,
    /// Offset of `B`, in bytes; a multiple of [`ALIGNMENT_BYTES`].
    pub b_offset: u64,
}

impl ImageEntry {
    /// Returns the size of `A` in bytes; `None` if its element type is unknown.
    #[must_use]
    pub fn a_bytes(&self) -> Option<u64> {
        factor_bytes(self.a_kind, self.rank, self.columns)
    }

    /// Returns the size of `B` in bytes; `None` if its element type is unknown.
    #[must_use]
    pub fn b_bytes(&self) -> Option<u64> {
        factor_bytes(self.b_kind, self.rank, self.rows)
    }

    fn put(&self, out: &mut Vec<u8>) {
        for number in [self.module, self.rank, self.columns, self.rows] {
            number.put(out);
        }
        self.scale.put(out);
        [self.a_kind, self.b_kind, 0, 0].put(out);
        self.a_offset.put(out);
        self.b_offset.put(out);
    }

    /// Reads an entry without checks, and its reserved bytes.
    fn get(from: &mut Reader<'_>) -> Result<(Self, [u8; 2]), DecodeError> {
        let (module, rank) = (u32::get(from)?, u32::get(from)?);
        let (columns, rows) = (u32::get(from)?, u32::get(from)?);
        let scale = f32::get(from)?;
        let [a_kind, b_kind, reserved @ ..] = <[u8; 4]>::get(from)?;
        let (a_offset, b_offset) = (u64::get(from)?, u64::get(from)?);
        Ok((Self { module, rank, columns, rows, scale, a_kind, b_kind, a_offset, b_offset }, reserved))
    }

    /// Checks every field of an entry whose factors must lie in the byte range `data`.
    fn check(&self, before: Option<u32>, data: &Range<u64>) -> Result<(), EntryFault> {
        let lone_head = self.module % 8 != HEAD || self.module == HEAD;
        if self.module >= MAX_MODULES || !lone_head {
            return Err(EntryFault::Module);
        }
        if before.is_some_and(|before| before >= self.module) {
            return Err(EntryFault::Order);
        }
        if !(1..=MAX_RANK).contains(&self.rank) {
            return Err(EntryFault::Rank(self.rank));
        }
        for side in [self.columns, self.rows] {
            if !(1..=MAX_SIDE).contains(&side) {
                return Err(EntryFault::Side(side));
            }
        }
        if !self.scale.is_finite() {
            return Err(EntryFault::Scale);
        }
        inside(self.a_offset, self.a_bytes().ok_or(EntryFault::Kind(self.a_kind))?, data)?;
        inside(self.b_offset, self.b_bytes().ok_or(EntryFault::Kind(self.b_kind))?, data)
    }
}

fn factor_bytes(kind: u8, rank: u32, side: u32) -> Option<u64> {
    let width = match kind {
        0 => 4,
        1 | 2 => 2,
        _ => return None,
    };
    u64::from(rank).checked_mul(u64::from(side))?.checked_mul(width)
}

fn inside(offset: u64, bytes: u64, data: &Range<u64>) -> Result<(), EntryFault> {
    if !offset.is_multiple_of(ALIGNMENT_BYTES as u64) {
        return Err(EntryFault::Alignment(offset));
    }
    let end = offset.checked_add(bytes);
    if offset >= data.start && end.is_some_and(|end| end <= data.end) {
        Ok(())
    } else {
        Err(EntryFault::Outside { offset, bytes })
    }
}

/// Returns the offset of the data in an image with this number of modules.
fn data_offset(modules: usize) -> Option<usize> {
    modules.checked_mul(ENTRY_BYTES)?.checked_add(HEADER_BYTES)?.checked_next_multiple_of(ALIGNMENT_BYTES)
}

/// Encodes header, table and padding for `entries` whose offsets count from the data's start.
pub(super) fn head(entries: &[ImageEntry], data_bytes: usize) -> Result<Vec<u8>, ImageError> {
    let modules = u32::try_from(entries.len()).ok().filter(|modules| (1..=MAX_MODULES).contains(modules));
    let modules = modules.ok_or(ImageError::Modules(u32::try_from(entries.len()).unwrap_or(u32::MAX)))?;
    let short = ImageError::Short { bytes: data_bytes, modules };
    let start = data_offset(entries.len()).ok_or(short)?;
    let size = ImageError::Size { said: u64::MAX, bytes: data_bytes };
    let bytes = start.checked_add(data_bytes).ok_or(size)? as u64;
    let mut out = Vec::with_capacity(start);
    MAGIC.put(&mut out);
    VERSION.put(&mut out);
    modules.put(&mut out);
    bytes.put(&mut out);
    out.resize(HEADER_BYTES, 0);
    let mut before = None;
    for (at, entry) in entries.iter().enumerate() {
        let faulty = |fault| ImageError::Entry { entry: at, module: entry.module, fault };
        entry.check(before, &(0..data_bytes as u64)).map_err(faulty)?;
        before = Some(entry.module);
        let from_start = |offset| offset + start as u64;
        let (a_offset, b_offset) = (from_start(entry.a_offset), from_start(entry.b_offset));
        ImageEntry { a_offset, b_offset, ..*entry }.put(&mut out);
    }
    out.resize(start, 0);
    Ok(out)
}

/// Decodes the table of an image and checks every entry, so that all factors lie within `bytes`.
///
/// # Errors
/// Returns the first difference from the layout that `docs/PROTOCOL.md` draws.
pub fn entries(bytes: &[u8]) -> Result<Vec<ImageEntry>, ImageError> {
    let modules = header(bytes)?;
    let short = || ImageError::Short { bytes: bytes.len(), modules };
    let start = data_offset(modules as usize).ok_or_else(short)?;
    let mut table = Reader::new(bytes.get(HEADER_BYTES..start).ok_or_else(short)?);
    let data = start as u64..bytes.len() as u64;
    let mut entries: Vec<ImageEntry> = Vec::with_capacity(modules as usize);
    for at in 0..modules as usize {
        let (entry, reserved) = ImageEntry::get(&mut table).map_err(|_| short())?;
        let faulty = |fault| ImageError::Entry { entry: at, module: entry.module, fault };
        entry.check(entries.last().map(|last| last.module), &data).map_err(faulty)?;
        if reserved != [0; 2] {
            return Err(ImageError::Reserved);
        }
        entries.push(entry);
    }
    let gap_bytes = start - HEADER_BYTES - entries.len() * ENTRY_BYTES;
    let gap = table.take(gap_bytes).map_err(|_| short())?;
    if gap.iter().any(|&byte| byte != 0) { Err(ImageError::Reserved) } else { Ok(entries) }
}

/// Checks the header and returns its number of modules.
fn header(bytes: &[u8]) -> Result<u32, ImageError> {
    let short = |_| ImageError::Short { bytes: bytes.len(), modules: 0 };
    let mut reader = Reader::new(bytes);
    if <[u8; 8]>::get(&mut reader).map_err(short)? != MAGIC {
        return Err(ImageError::Magic);
    }
    let version = u32::get(&mut reader).map_err(short)?;
    if version != VERSION {
        return Err(ImageError::Version(version));
    }
    let modules = u32::get(&mut reader).map_err(short)?;
    if !(1..=MAX_MODULES).contains(&modules) {
        return Err(ImageError::Modules(modules));
    }
    let said = u64::get(&mut reader).map_err(short)?;
    if said != bytes.len() as u64 {
        return Err(ImageError::Size { said, bytes: bytes.len() });
    }
    let reserved = reader.take(HEADER_BYTES - 24).map_err(short)?;
    if reserved.iter().any(|&byte| byte != 0) { Err(ImageError::Reserved) } else { Ok(modules) }
}
