//! Streamed passes beside continuous KV cache copies to the same disk: alone, with copies
//! that yield, and with copies that do not.
//!
//! A copy writes a block of one MiB and syncs it, so that it reaches the disk at once. An executor leaves
//! that to the system and copies no more than it computes.

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use anyhow::{Context, Result};
use kv_cache::copy::{CopyEngine, CopyPriority, CopySource};

use super::StreamedSide;
use crate::{
    measure::{Contestant, Samples, alternate},
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

const BLOCK: usize = 1 << 20;
const BLOCKS: u64 = 64;

struct EndlessCopy {
    file: File,
    block: Vec<u8>,
    copied: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
}

impl CopySource for EndlessCopy {
    fn next_bytes(&self) -> Option<usize> {
        (!self.is_over.load(Relaxed)).then_some(BLOCK)
    }

    fn copy_next(&mut self) {
        let at = self.copied.fetch_add(1, Relaxed) % BLOCKS;
        let written =
            self.file.write_all_at(&self.block, at * BLOCK as u64).and_then(|()| self.file.sync_data());
        written.expect("the disk has room for a block");
    }
}

fn beside(side: &mut StreamedSide, directory: &Path, copies: CopyEngine, name: &str) -> Result<f64> {
    let (copied, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let file = File::create(directory.join("history")).context("no file for history")?;
    let load = EndlessCopy {
        file,
        block: vec![1; BLOCK],
        copied: Arc::clone(&copied),
        is_over: Arc::clone(&is_over),
    };
    copies.submit(CopyPriority::Preload, Box::new(load), Box::new(|_| {}))?;
    let begun = Instant::now();
    let measured = side.decode(1);
    let rate = copied.load(Relaxed) as f64 / begun.elapsed().as_secs_f64();
    is_over.store(true, Relaxed);
    drop(copies);
    eprintln!("holobiont-bench: history that {name} was written at {rate:.1} MiB/s beside sweeps");
    Ok(measured?.tokens_per_s)
}

pub(super) fn run(side: &mut StreamedSide, directory: &Path, runs: usize) -> Result<Vec<Comparison>> {
    let totals = side.weight_stats().context("nothing of the base comes from the disk")?;
    let side = std::cell::RefCell::new(side);
    let contestants: [Contestant<'_, f64>; 3] = [
        Box::new(|_| Ok(side.borrow_mut().decode(1)?.tokens_per_s)),
        Box::new(|_| {
            let copies = CopyEngine::start_behind(Arc::clone(&totals) as _)?;
            beside(&mut side.borrow_mut(), directory, copies, "gives way")
        }),
        Box::new(|_| {
            beside(&mut side.borrow_mut(), directory, CopyEngine::start(None)?, "does not give way")
        }),
    ];
    let [alone, gives_way, does_not] = alternate(runs, contestants)?;
    let ours = Samples::new(gives_way)?;
    let row = |name: &str, samples, target| Comparison {
        bench: "stream",
        case: "50 % of memory, 1 stream, beside history that is copied: tokens".to_owned(),
        unit: "tokens/s",
        better: Better::Higher,
        ours: ours.clone(),
        rival: PeerSamples { name: name.to_owned(), format: "as packed".to_owned(), samples },
        target,
    };
    Ok(vec![
        row("sweeps alone", Samples::new(alone)?, Some(BenchTarget::RatioAtLeast(1.0 / 1.1))),
        row("history that does not give way", Samples::new(does_not)?, None),
    ])
}
