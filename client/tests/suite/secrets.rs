//! Secrets are overwritten after use: the test searches all memory of this process for them.

use std::{
    fs::{self, File},
    ops::Range,
    os::unix::fs::FileExt as _,
    path::Path,
};

use crate::support::{
    ring::{maker, pool},
    tiny,
};
use client::masking::{Direction::Forward, one_time_pads::pool::TakenPads};
use model::linear_sites::SiteId;
use shmproto::layer::seeded_rows::{Key, SeededRows};

/// Mask of the stored fingerprints, so that the search does not find them.
const DISGUISE: u64 = 0x5bd1_e995_9e37_79b9;

/// First eight bytes of a secret, masked.
#[derive(Debug, Clone, Copy)]
struct SecretFingerprint(u64);

impl SecretFingerprint {
    fn of(bytes: &[u8]) -> Self {
        Self(u64::from_le_bytes(bytes[..8].try_into().unwrap()) ^ DISGUISE)
    }
}

/// Number of occurrences of each secret in writable memory.
fn found(secrets: &[SecretFingerprint]) -> Vec<usize> {
    let (memory, mut page) = (File::open("/proc/self/mem").unwrap(), vec![0; 4096]);
    let mut counts = vec![0; secrets.len()];
    for pages in writable() {
        for at in pages.step_by(page.len()) {
            // Mappings of a device cannot be read.
            if memory.read_exact_at(&mut page, at).is_err() {
                continue;
            }
            for words in page.as_chunks::<8>().0 {
                let word = u64::from_le_bytes(*words) ^ DISGUISE;
                let matches = secrets.iter().map(|secret| usize::from(word == secret.0));
                counts.iter_mut().zip(matches).for_each(|(count, one)| *count += one);
            }
        }
    }
    page.fill(0);
    counts
}

fn writable() -> Vec<Range<u64>> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let map = |line: &str| {
        let mut words = line.split(' ');
        let (from, to) = words.next()?.split_once('-')?;
        let [from, to] = [from, to].map(|number| u64::from_str_radix(number, 16).unwrap());
        words.next()?.starts_with("rw").then_some(from..to)
    };
    maps.lines().filter_map(map).collect()
}

fn taken(directory: &Path) -> TakenPads {
    let path = tiny("llama-tied");
    let mut pool = pool(&path, directory);
    maker(&path, 1 << 30).prepare(&mut pool, 3, &[Forward], &mut |_, _| {}).unwrap();
    pool.take(SiteId(0), Forward, 3).unwrap()
}

#[test]
fn keys_of_pads_are_overwritten_when_they_are_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let pads = taken(directory.path());
    let keys: Vec<_> = pads.keys().iter().map(|key| SecretFingerprint::of(key.bytes())).collect();
    assert!(found(&keys).iter().all(|&count| count > 0), "while they are needed they are there");
    drop(pads);
    assert_eq!(found(&keys), [0; 3], "no copy was left behind");
}

#[test]
fn a_draw_leaves_nothing_of_its_key_behind() {
    let mut bytes = [0; 32];
    File::open("/dev/urandom").unwrap().read_exact_at(&mut bytes, 0).unwrap();
    let key = SecretFingerprint::of(&bytes);
    {
        let draw = SeededRows { key: Key::new(&bytes), first: 5 };
        bytes.fill(0);
        std::hint::black_box(&mut bytes);
        let (sent, mut row) = (draw.to_words(), vec![0.0; 600]);
        draw.fill(0, 200, &mut row);
        let again = vec![SeededRows::from_words(&sent).clone(); 3];
        assert!(found(&[key])[0] > again.len(), "while it is needed it is there");
    }
    assert_eq!(found(&[key]), [0]);
}
