//! Data between a worker and its executor: messages, and adapters in shared memory.

use shmproto::{
    codec::Wire,
    fd_passing::{AdapterOffered, AdapterRejected, FromWorker, SlotGranted, ToWorker, WorkerHello},
    image::{ENTRY_BYTES, HEADER_BYTES, Image, ImageEntry},
};

use super::{
    Maker, Seed,
    gguf::OFFSETS,
    wire::{COUNTS, FORMAT},
};

pub(super) fn messages() -> Vec<Seed> {
    let mut make = Maker::new("worker_message");
    make.valid("a hello", FromWorker::Hello(WorkerHello::new(1, 0)).to_bytes());
    make.valid("an adapter that is mapped", FromWorker::AdapterMapped(1).to_bytes());
    let rejected = AdapterRejected { image: 1, reason: "why".to_owned() };
    make.valid("an adapter that is not", FromWorker::AdapterRejected(rejected).to_bytes());
    let seated = SlotGranted { seat: 1, worker: 2, control_bytes: 64, x_bytes: 64, sums_bytes: 64 };
    make.valid("a seat", ToWorker::Seated(seated).to_bytes());
    make.valid("no seat", ToWorker::Refused("why".to_owned()).to_bytes());
    make.valid(
        "an adapter to map",
        ToWorker::AdapterOffered(AdapterOffered { image: 1, bytes: 64 }).to_bytes(),
    );
    make.valid("the end", ToWorker::Closing.to_bytes());
    let text = [&[2][..], &[0; 8], &[255; 4], b"x"].concat();
    make.refused("a reason of 2^32 - 1 bytes", COUNTS, text, "ends early");
    make.refused("nothing", COUNTS, Vec::new(), "ends early");
    make.refused("an unknown message", FORMAT, vec![200], "no variant 200");
    make.refused("a pickle", FORMAT, b"\x80\x04\x95cos\nsystem\n".to_vec(), "no variant 128");
    let trailing = [ToWorker::Closing.to_bytes(), vec![0]].concat();
    make.refused("bytes behind the end", FORMAT, trailing, "follow the end");
    make.seeds
}

/// Builds two matrices of rank 2, in 16 and 32 bits.
fn image() -> Vec<u8> {
    let first = ImageEntry {
        module: 8,
        rank: 2,
        columns: 4,
        rows: 4,
        scale: 2.0,
        a_kind: 1,
        b_kind: 2,
        b_offset: 64,
        ..ImageEntry::default()
    };
    let second = ImageEntry { module: 13, a_kind: 0, b_kind: 0, a_offset: 128, b_offset: 192, ..first };
    let image = Image::build(&[first, second], &[0x3c; 256]);
    let bytes = image.map(|image| image.bytes().as_ref().as_ref().to_vec());
    bytes.unwrap_or_else(|error| panic!("a valid image could not be made: {error}"))
}

pub(super) fn images() -> Vec<Seed> {
    let mut make = Maker::new("adapter_image");
    make.valid("two modules", image());
    let with = |at: usize, bytes: &[u8]| {
        let mut image = image();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        image
    };
    // Offsets of the fields of the header and of the second entry; docs/PROTOCOL.md draws them.
    let entry = HEADER_BYTES + ENTRY_BYTES;
    make.refused("2^32 - 1 modules", COUNTS, with(12, &[255; 4]), "modules");
    make.refused("8,192 modules in 448 bytes", COUNTS, with(12, &8192u32.to_le_bytes()), "too short");
    make.refused("no modules", COUNTS, with(12, &[0; 4]), "modules");
    make.refused("2^64 - 1 bytes", COUNTS, with(16, &[255; 8]), "says it has");
    make.refused("a rank of 2^32 - 1", COUNTS, with(entry + 4, &[255; 4]), "rank");
    make.refused("2^32 - 1 columns", COUNTS, with(entry + 8, &[255; 4]), "side");
    make.refused(
        "a matrix longer than the data",
        OFFSETS,
        with(entry + 4, &[0, 4, 0, 0]),
        "outside the data",
    );
    let far = (u64::MAX - 63).to_le_bytes();
    make.refused("an offset whose end overflows", OFFSETS, with(entry + 24, &far), "outside the data");
    make.refused(
        "an offset into the table",
        OFFSETS,
        with(entry + 24, &64u64.to_le_bytes()),
        "outside the data",
    );
    make.refused("an offset off a line", OFFSETS, with(entry + 32, &[1]), "multiple of 64");
    make.refused("a module twice", FORMAT, with(entry, &8u32.to_le_bytes()), "does not follow");
    make.refused("numbers of a kind there is not", FORMAT, with(entry + 20, &[3]), "kind 3");
    make.refused("a scale that is not a number", FORMAT, with(entry + 16, &f32::NAN.to_le_bytes()), "scale");
    make.refused("another version", FORMAT, with(8, &[9]), "version 9");
    make.refused("another file", FORMAT, with(0, b"GGUF"), "no adapter image");
    make.refused("a table cut in the middle", FORMAT, image()[..entry + 20].to_vec(), "says it has");
    make.refused("nothing", FORMAT, Vec::new(), "too short");
    make.seeds
}
