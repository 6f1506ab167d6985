//! An adapter's image is read as it was written, and no wrong byte leads outside of it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::fd::OwnedFd;

use proptest::prelude::*;
use shmproto::{
    image::{
        ALIGNMENT_BYTES, ENTRY_BYTES, EntryFault, HEADER_BYTES, Image, ImageEntry, ImageError, MAX_MODULES,
        MAX_SIDE, entries,
    },
    region::{RegionError, SealedBytes},
};

fn copy(image: &Image) -> OwnedFd {
    image.fd().try_clone_to_owned().unwrap()
}

fn entry() -> ImageEntry {
    ImageEntry {
        module: 0x1234,
        rank: 3,
        columns: 5,
        rows: 7,
        scale: 0.5,
        a_kind: 2,
        b_kind: 1,
        a_offset: 0,
        b_offset: 64,
    }
}

/// `A` has 30 bytes at 0, `B` has 42 at 64.
const DATA: [u8; 106] = [0xab; 106];

/// The bytes of an image, to be damaged.
fn image_bytes(entries: &[ImageEntry], data: &[u8]) -> Vec<u8> {
    Image::build(entries, data).unwrap().bytes().as_ref().as_ref().to_vec()
}

fn fault(entry: ImageEntry) -> EntryFault {
    match Image::build(&[entry], &DATA) {
        Err(ImageError::Entry { entry: 0, module, fault }) if module == entry.module => fault,
        other => panic!("{entry:?} came to {other:?}"),
    }
}

#[test]
fn an_image_is_mapped_as_it_was_built() {
    let second = ImageEntry { module: 0x1235, a_offset: 64, b_offset: 0, ..entry() };
    let second = ImageEntry { columns: 7, rows: 5, ..second };
    let ours = Image::build(&[entry(), second], &DATA).unwrap();
    let theirs = Image::map(copy(&ours), 4096).unwrap();
    assert_eq!(ours.entries(), theirs.entries());
    let start = (HEADER_BYTES + 2 * ENTRY_BYTES).next_multiple_of(ALIGNMENT_BYTES) as u64;
    let moved = |entry: ImageEntry| ImageEntry {
        a_offset: entry.a_offset + start,
        b_offset: entry.b_offset + start,
        ..entry
    };
    assert_eq!(theirs.entries(), [moved(entry()), moved(second)]);
    let at = usize::try_from(theirs.entries()[0].a_offset).unwrap();
    assert_eq!(&theirs.bytes().as_ref().as_ref()[at..], DATA);
    assert_eq!(theirs.entry(0x1235), Some(&moved(second)));
    assert_eq!(theirs.entry(0x1236), None);
    let bytes = theirs.bytes();
    drop((ours, theirs));
    assert_eq!(bytes.as_ref().as_ref()[at], 0xab, "the bytes live as long as anybody holds them");
}

#[test]
fn every_field_of_an_entry_has_its_limits_and_its_error() {
    for module in [MAX_MODULES, u32::MAX, 15, 8 * 1023 + 7] {
        assert_eq!(fault(ImageEntry { module, ..entry() }), EntryFault::Module);
    }
    for rank in [0, 1025, u32::MAX] {
        assert_eq!(fault(ImageEntry { rank, ..entry() }), EntryFault::Rank(rank));
    }
    for side in [0, MAX_SIDE + 1, u32::MAX] {
        assert_eq!(fault(ImageEntry { columns: side, ..entry() }), EntryFault::Side(side));
        assert_eq!(fault(ImageEntry { rows: side, ..entry() }), EntryFault::Side(side));
    }
    for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert_eq!(fault(ImageEntry { scale, ..entry() }), EntryFault::Scale);
    }
    for kind in [3, 255] {
        assert_eq!(fault(ImageEntry { a_kind: kind, ..entry() }), EntryFault::Kind(kind));
        assert_eq!(fault(ImageEntry { b_kind: kind, ..entry() }), EntryFault::Kind(kind));
    }
    for offset in [1, 32, u64::MAX] {
        assert_eq!(fault(ImageEntry { a_offset: offset, ..entry() }), EntryFault::Alignment(offset));
        assert_eq!(fault(ImageEntry { b_offset: offset, ..entry() }), EntryFault::Alignment(offset));
    }
    for offset in [128, u64::MAX - 63] {
        assert_eq!(
            fault(ImageEntry { a_offset: offset, ..entry() }),
            EntryFault::Outside { offset, bytes: 30 }
        );
        assert_eq!(
            fault(ImageEntry { b_offset: offset, ..entry() }),
            EntryFault::Outside { offset, bytes: 42 }
        );
    }
    let longer = ImageEntry { rows: 8, ..entry() };
    assert_eq!(fault(longer), EntryFault::Outside { offset: 64, bytes: 48 });
}

#[test]
fn modules_come_once_and_in_order() {
    for second in [entry().module, entry().module - 1] {
        let second = ImageEntry { module: second, ..entry() };
        let refused = Image::build(&[entry(), second], &DATA);
        let order = EntryFault::Order;
        assert!(
            matches!(refused, Err(ImageError::Entry { entry: 1, fault, .. }) if fault == order),
            "{refused:?}"
        );
    }
}

#[test]
fn an_image_has_at_least_one_module_and_at_most_its_limit() {
    assert!(matches!(Image::build(&[], &DATA), Err(ImageError::Modules(0))));
    let many = vec![entry(); MAX_MODULES as usize + 1];
    assert!(matches!(Image::build(&many, &DATA), Err(ImageError::Modules(8193))));
    let mut bytes = image_bytes(&[entry()], &DATA);
    for modules in [0, MAX_MODULES + 1, u32::MAX] {
        bytes[12..16].copy_from_slice(&modules.to_le_bytes());
        assert!(matches!(entries(&bytes), Err(ImageError::Modules(found)) if found == modules));
    }
    bytes[12..16].copy_from_slice(&MAX_MODULES.to_le_bytes());
    assert!(matches!(entries(&bytes), Err(ImageError::Short { modules: MAX_MODULES, .. })));
}

#[test]
fn a_header_of_something_else_is_refused_by_name() {
    let good = image_bytes(&[entry()], &DATA);
    let spoiled = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        entries(&bytes).unwrap_err()
    };
    assert!(matches!(spoiled(0), ImageError::Magic));
    assert!(matches!(spoiled(8), ImageError::Version(_)));
    assert!(matches!(spoiled(16), ImageError::Size { .. }));
    for reserved in [24, HEADER_BYTES - 1, HEADER_BYTES + 22, HEADER_BYTES + 23, HEADER_BYTES + ENTRY_BYTES] {
        assert!(matches!(spoiled(reserved), ImageError::Reserved), "byte {reserved}");
    }
    assert!(matches!(entries(&[good.as_slice(), &[0]].concat()), Err(ImageError::Size { .. })));
}

#[test]
fn an_image_cut_anywhere_is_refused() {
    let good = image_bytes(&[entry()], &DATA);
    assert!((0..good.len()).all(|end| entries(&good[..end]).is_err()));
}

#[test]
fn only_sealed_memory_of_the_agreed_size_is_an_image() {
    let ours = Image::build(&[entry()], &DATA).unwrap();
    let bytes = ours.bytes().as_ref().as_ref().len();
    let refused = Image::map(copy(&ours), bytes - 1);
    assert!(matches!(refused, Err(ImageError::Region(RegionError::PeerSize { .. }))), "{refused:?}");
    assert!(Image::map(copy(&ours), bytes).is_ok());
    let (pipe, _end) = std::io::pipe().unwrap();
    let refused = Image::map(pipe.into(), 4096);
    assert!(matches!(refused, Err(ImageError::Region(RegionError::NotMemory(_)))), "{refused:?}");
    let garbage = SealedBytes::build("test-garbage", &[&[0x5a; 4096]]).unwrap();
    let refused = Image::map(garbage.fd().try_clone_to_owned().unwrap(), 4096);
    assert!(matches!(refused, Err(ImageError::Magic)), "{refused:?}");
}

/// Independent check of an entry: ends are computed in 128 bits.
fn lies_inside(entry: &ImageEntry, image: &[u8]) -> bool {
    let table_end = HEADER_BYTES + ENTRY_BYTES;
    let part = |kind: u8, side: u32, offset: u64| {
        let width: u128 = if kind == 0 { 4 } else { 2 };
        let bytes = u128::from(entry.rank) * u128::from(side) * width;
        bytes > 0
            && offset.is_multiple_of(64)
            && offset >= table_end as u64
            && u128::from(offset) + bytes <= image.len() as u128
    };
    entry.a_kind <= 2
        && entry.b_kind <= 2
        && part(entry.a_kind, entry.columns, entry.a_offset)
        && part(entry.b_kind, entry.rows, entry.b_offset)
}

#[test]
fn every_flipped_bit_of_header_and_table_is_refused_or_leads_nowhere_outside() {
    let good = image_bytes(&[entry()], &[0; 4096]);
    let mut taken = 0;
    for bit in 0..(HEADER_BYTES + ENTRY_BYTES) * 8 {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        if let Ok(entries) = entries(&bytes) {
            assert!(bit >= HEADER_BYTES * 8, "bit {bit} of the header means something");
            assert!(entries.iter().all(|entry| lies_inside(entry, &bytes)), "bit {bit}: {entries:?}");
            taken += 1;
        }
    }
    // Other modules, ranks, sides, scales, kinds and offsets are valid.
    assert!((30..100).contains(&taken), "{taken}");
}

/// Consecutive matrices, by ascending module.
fn layouts() -> impl Strategy<Value = (Vec<ImageEntry>, Vec<u8>)> {
    let one = (1u32..9, 1u32..40, 1u32..40, -2f32..2.0, 0u8..3, 0u8..3);
    let modules = prop::collection::btree_set((0u32..1024, 0u32..7), 1..12);
    (modules, prop::collection::vec(one, 12)).prop_map(|(modules, shapes)| {
        let mut data = 0u64;
        let mut place = |bytes: Option<u64>| {
            let at = data;
            data = (at + bytes.unwrap()).next_multiple_of(ALIGNMENT_BYTES as u64);
            at
        };
        let entries = modules.into_iter().zip(shapes).map(|((layer, target), shape)| {
            let (rank, columns, rows, scale, a_kind, b_kind) = shape;
            let module = layer * 8 + target;
            let mut entry =
                ImageEntry { module, rank, columns, rows, scale, a_kind, b_kind, ..ImageEntry::default() };
            entry.a_offset = place(entry.a_bytes());
            entry.b_offset = place(entry.b_bytes());
            entry
        });
        let entries: Vec<_> = entries.collect();
        let data = (0..data).map(|at| (at % 251) as u8).collect();
        (entries, data)
    })
}

proptest! {
    #[test]
    fn whatever_is_built_is_mapped_with_the_same_matrices((layout, data) in layouts()) {
        let ours = Image::build(&layout, &data).unwrap();
        let theirs = Image::map(copy(&ours), 1 << 24).unwrap();
        let bytes = theirs.bytes();
        let bytes = bytes.as_ref().as_ref();
        let start = bytes.len() - data.len();
        prop_assert_eq!(&bytes[start..], &data[..]);
        for (built, mapped) in layout.iter().zip(theirs.entries()) {
            let offsets = ImageEntry { a_offset: built.a_offset + start as u64, b_offset: built.b_offset + start as u64, ..*built };
            prop_assert_eq!(*mapped, offsets);
        }
        prop_assert_eq!(layout.len(), theirs.entries().len());
    }

    #[test]
    fn arbitrary_bytes_behind_a_right_header_never_lead_outside(table in prop::collection::vec(any::<u8>(), 40..2000)) {
        let mut bytes = image_bytes(&[entry()], &DATA);
        bytes.truncate(HEADER_BYTES);
        bytes.extend(table);
        let length = (bytes.len() as u64).to_le_bytes();
        bytes[16..24].copy_from_slice(&length);
        if let Ok(entries) = entries(&bytes) {
            prop_assert!(entries.iter().all(|entry| lies_inside(entry, &bytes)));
        }
    }
}

/// Rows of the first table after `heading` in the document: offset, bytes, field.
fn drawn(heading: &str) -> Vec<(usize, usize, String)> {
    let document = include_str!("../../docs/PROTOCOL.md");
    let section = document.split(heading).nth(1).expect("the section");
    let rows = section.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    let rows = rows.take_while(|line| line.starts_with('|')).map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        (
            cells[1].parse().expect("an offset"),
            cells[2].parse().expect("bytes"),
            cells[4].trim_matches('`').to_owned(),
        )
    });
    rows.collect()
}

/// Checks that fields follow one another and fill the whole.
fn fills(rows: &[(usize, usize, String)], whole: usize) {
    let mut end = 0;
    for (offset, bytes, field) in rows {
        assert_eq!(*offset, end, "{field}");
        end += bytes;
    }
    assert_eq!(end, whole);
}

#[test]
fn the_document_draws_the_header_and_the_entries_that_are_written() {
    let image = Image::build(&[entry()], &DATA).unwrap();
    let (bytes, written) = (image.bytes(), image.entries()[0]);
    let bytes = bytes.as_ref().as_ref();
    let number = |value: u64| value.to_le_bytes().to_vec();
    let (header, table) = (drawn("### Header of an image"), drawn("### Entry of an image"));
    fills(&header, HEADER_BYTES);
    fills(&table, ENTRY_BYTES);
    let value = |field: &str| match field {
        "magic" => b"HOLOLORA".to_vec(),
        "version" | "modules" => number(1),
        "bytes" => number(bytes.len() as u64),
        "module" => number(0x1234),
        "rank" => number(3),
        "columns" => number(5),
        "rows" => number(7),
        "scale" => number(u64::from(0.5f32.to_bits())),
        "a_kind" => number(2),
        "b_kind" => number(1),
        "a_offset" => number(written.a_offset),
        "b_offset" => number(written.b_offset),
        "reserved" => vec![0; 64],
        other => panic!("{other} is in the document alone"),
    };
    for (base, rows, count) in [(0, header, 5), (HEADER_BYTES, table, 10)] {
        assert_eq!(rows.len(), count);
        for (offset, length, field) in rows {
            let found = &bytes[base + offset..base + offset + length];
            assert_eq!(found, &value(&field)[..length], "{field}");
        }
    }
}
