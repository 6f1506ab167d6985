use std::{
    sync::mpsc::{Receiver, channel},
    time::Instant,
};

use kernels::{blocks::BlockMemory, lora::LoraPrecision};
use kv_cache::copy::CopySource;
use model::{
    adapter::{Adapter, LoraModule, MethodWeights, ScaleVector, ScaledSide, Scales},
    deltas::cpu_copy::CpuMemory,
    shape::{config::ModelConfig, source::Target},
};
use testkit::WATCHDOG;
use types::AdapterVersion;

use super::*;
use crate::fixtures::square_model;

const WIDTH: usize = 64;
/// Bytes of a test adapter: 32 ranks of 64 + 64 values, which 16 bits hold exactly.
const BYTES: u64 = 32 * 128 * 2;

fn id(tag: u8) -> AdapterId {
    AdapterId([tag; 32])
}

fn config() -> ModelConfig {
    square_model(WIDTH, 1)
}

/// An adapter of [`BYTES`] times `size`: as many matrices of rank 32.
fn adapter(size: usize) -> Arc<PreparedAdapter> {
    let targets = [Target::Q, Target::K, Target::V, Target::O, Target::Gate];
    let module = |&target: &Target| {
        let (a, b) = (vec![0.5; 32 * WIDTH], vec![0.25; WIDTH * 32]);
        LoraModule { layer: 0, target, rank: 32, scale: 1.0, a, b }
    };
    let modules = targets[..size].iter().map(module).collect();
    let generation = AdapterVersion([0; 32]);
    let adapter = Adapter {
        generation,
        method: MethodWeights::Lora(modules),
        base_model: None,
        stored_in_16_bits: false,
    };
    let prepared = PreparedAdapter::new(&adapter, &config(), LoraPrecision::Exact).unwrap();
    assert_eq!(prepared.bytes() as u64, BYTES * size as u64);
    Arc::new(prepared)
}

/// An adapter of one vector of `size` values, and no matrix.
fn scaling_adapter(size: usize) -> Arc<PreparedAdapter> {
    let vector =
        ScaleVector { layer: 0, target: Target::Q, side: ScaledSide::Output, values: vec![2.0; size] };
    let method = MethodWeights::Ia3(Arc::new(Scales::new(vec![vector])));
    let adapter =
        Adapter { generation: AdapterVersion([1; 32]), method, base_model: None, stored_in_16_bits: false };
    let prepared = PreparedAdapter::new(&adapter, &config(), LoraPrecision::Exact).unwrap();
    assert_eq!(prepared.bytes(), 4 * size);
    Arc::new(prepared)
}

/// A device tier with capacity for a few one-block adapters, and its messages to the engine.
struct DeviceTierHarness {
    device: AdapterDeviceTier,
    pool: Cache,
    told: Receiver<AdapterId>,
    clock: Duration,
}

impl DeviceTierHarness {
    fn new(room: u32, cold_start: ColdStart, link: Option<u64>) -> Self {
        let (tell, told) = channel();
        let link = link.map(|bytes| BytesPerSecond(bytes.try_into().unwrap()));
        let settings = DeviceSettings { block_bytes: BYTES, cold_start, link };
        let arrivals = ArrivalNotifier::new(move |id| tell.send(id).unwrap_or_default());
        let memory = CpuMemory(BlockMemory::new(BYTES as usize, room as usize).unwrap());
        let device =
            AdapterDeviceTier::new(settings, Arc::new(memory), arrivals, Workers::default(), None).unwrap();
        let pool = Cache::new(kv_cache::CacheSettings::device_alone(room, 16));
        Self { device, pool, told, clock: Duration::ZERO }
    }

    /// Handles the next arrival, as the engine does.
    fn next_arrival(&mut self) -> AdapterId {
        let id = self.told.recv_timeout(WATCHDOG).expect("an adapter arrives or is given up");
        self.device.arrived(&mut self.pool, id);
        self.device.start_copies(&self.pool);
        id
    }

    fn until_arrived(&mut self, tag: u8) {
        let end = Instant::now() + WATCHDOG;
        while !self.is_there(tag) {
            assert!(Instant::now() < end, "adapter {tag} does not arrive");
            self.next_arrival();
        }
    }

    fn is_there(&self, tag: u8) -> bool {
        let resident = self.device.residency.copy(id(tag));
        resident.is_some_and(|resident| resident.copy.is_complete() && resident.way.is_done())
    }

    fn begin_use(&mut self, tag: u8, adapter: &Arc<PreparedAdapter>) -> AdapterAvailability {
        self.clock += Duration::from_secs(1);
        self.pool.advance(self.clock, 1);
        let found = self.device.begin_use(&mut self.pool, id(tag), adapter, 10);
        self.device.start_copies(&self.pool);
        found
    }

    fn loaded(&mut self, tag: u8, adapter: &Arc<PreparedAdapter>) -> Result<LoadCompletion, PlacementError> {
        let loaded = self.device.loaded(&mut self.pool, id(tag), adapter);
        self.device.start_copies(&self.pool);
        loaded
    }

    fn end_use(&mut self, tag: u8) {
        self.device.end_use(&mut self.pool, id(tag));
        self.device.start_copies(&self.pool);
    }

    fn unloaded(&mut self, tag: u8) {
        self.device.unloaded(&mut self.pool, id(tag));
        self.device.start_copies(&self.pool);
    }

    /// Blocks of adapters, and the pinned ones among them.
    fn blocks(&self) -> [usize; 2] {
        let held = self.pool.counts().adapters;
        [held, held - (self.pool.available() - self.pool.counts().free)]
    }

    fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        self.device.stats(&self.pool, &mut stats);
        stats
    }

    fn residents(&self) -> Vec<u8> {
        let tags: Vec<u8> = (0..10).filter(|tag| self.pool.has_adapter_place(id(*tag))).collect();
        assert!(tags.iter().all(|tag| self.device.residency.copy(id(*tag)).is_some()), "each has a copy");
        tags
    }
}

#[test]
fn an_adapter_joins_the_device_while_there_is_room_and_pushes_nobody_out_unasked() {
    let mut bench = DeviceTierHarness::new(2, ColdStart::CpuAssist, None);
    let adapters: Vec<_> = (0..3).map(|_| adapter(1)).collect();
    for (tag, adapter) in (1..).zip(&adapters) {
        assert_eq!(bench.loaded(tag, adapter), Ok(LoadCompletion::Now));
    }
    assert_eq!(bench.residents(), [1, 2]);
    bench.until_arrived(1);
    bench.until_arrived(2);
    assert!(adapters[0].device().is_some_and(|copy| copy.is_complete()));
    assert!(adapters[2].device().is_none());
    let stats = bench.stats();
    assert_eq!((stats.device_bytes, stats.copied_bytes), (2 * BYTES, 2 * BYTES));
}

#[test]
fn the_least_recently_used_of_those_nobody_uses_gives_way() {
    let mut bench = DeviceTierHarness::new(3, ColdStart::CpuAssist, None);
    let adapters: Vec<_> = (0..5).map(|_| adapter(1)).collect();
    for tag in [1, 2, 3] {
        assert_ne!(bench.begin_use(tag, &adapters[usize::from(tag)]), AdapterAvailability::MustWait);
        bench.until_arrived(tag);
    }
    [1, 2, 3].into_iter().for_each(|tag| bench.end_use(tag));
    assert_eq!(
        bench.begin_use(1, &adapters[1]),
        AdapterAvailability::OnDevice,
        "of those two the second is older now"
    );
    assert_ne!(bench.begin_use(4, &adapters[4]), AdapterAvailability::MustWait);
    assert_eq!(bench.residents(), [1, 3, 4]);
    assert!(adapters[2].device().is_none(), "who gave way is computed from the host tier");
    // After two uses and one end, the adapter is still in use.
    assert_eq!(bench.begin_use(1, &adapters[1]), AdapterAvailability::OnDevice);
    bench.end_use(1);
    assert_ne!(bench.begin_use(2, &adapters[2]), AdapterAvailability::MustWait);
    assert_eq!(bench.residents(), [1, 2, 4], "the third alone had no user");
    assert_eq!(
        bench.begin_use(3, &adapters[3]),
        AdapterAvailability::Missing,
        "it starts from the host tier"
    );
    assert_eq!(bench.residents(), [1, 2, 4], "and nobody who is used gives way");
}

#[test]
fn an_adapter_that_found_no_room_gets_it_when_others_leave() {
    let mut bench = DeviceTierHarness::new(2, ColdStart::CpuAssist, None);
    let (small, large, late) = (adapter(1), adapter(2), adapter(1));
    bench.begin_use(1, &small);
    bench.until_arrived(1);
    assert_eq!(bench.begin_use(2, &large), AdapterAvailability::Missing);
    assert_eq!((bench.residents(), bench.device.residency.left_out().len()), (vec![1], 1));
    bench.end_use(1);
    assert_eq!((bench.residents(), bench.device.residency.left_out().len()), (vec![2], 0));
    bench.until_arrived(2);
    assert_eq!(bench.begin_use(2, &large), AdapterAvailability::OnDevice);
    // The adapter is in use: a late arrival was pinned too.
    assert_eq!(bench.begin_use(3, &late), AdapterAvailability::Missing);
    assert_eq!(bench.residents(), [2]);
    bench.end_use(2);
    assert_eq!(bench.residents(), [2], "one of its two users is left");
    // A request that has ended needs no capacity.
    bench.end_use(3);
    bench.end_use(2);
    assert_eq!((bench.residents(), bench.device.residency.left_out().len()), (vec![2], 0));
    bench.unloaded(2);
    assert_eq!((bench.residents(), bench.blocks()[0]), (vec![], 0));
}

#[test]
fn what_does_not_fit_is_refused_or_computed_from_the_host_tier_as_the_mode_says() {
    let (small, large) = (adapter(1), adapter(2));
    let refusal = |held: u64, limit: u64| {
        Err(PlacementError::TierFull {
            asked_bytes: 2 * BYTES,
            held_bytes: held * BYTES,
            limit_bytes: limit * BYTES,
        })
    };
    // The adapter is larger than the whole tier.
    let cases = [
        (ColdStart::Cached, refusal(0, 1)),
        (ColdStart::OnDemand, refusal(0, 1)),
        (ColdStart::CpuAssist, Ok(LoadCompletion::Now)),
    ];
    for (mode, expected) in cases {
        let mut bench = DeviceTierHarness::new(1, mode, None);
        assert_eq!(bench.loaded(1, &large), expected, "{mode:?}");
        assert!(bench.residents().is_empty());
    }
    // The adapter is too large together with an unused one.
    for (mode, expected) in [
        (ColdStart::Cached, refusal(1, 2)),
        (ColdStart::OnDemand, Ok(LoadCompletion::Now)),
        (ColdStart::CpuAssist, Ok(LoadCompletion::Now)),
    ] {
        let mut bench = DeviceTierHarness::new(2, mode, None);
        bench.loaded(1, &small).unwrap();
        assert_eq!(bench.loaded(2, &large), expected, "{mode:?}");
        assert_eq!(bench.residents(), [1], "{mode:?}");
    }
    // The adapter is too large together with a used one, at the time of need.
    for (mode, expected) in [
        (ColdStart::OnDemand, AdapterAvailability::MustWait),
        (ColdStart::CpuAssist, AdapterAvailability::Missing),
    ] {
        let mut bench = DeviceTierHarness::new(2, mode, None);
        bench.loaded(1, &small).unwrap();
        bench.until_arrived(1);
        assert_eq!(bench.begin_use(1, &small), AdapterAvailability::OnDevice);
        assert_eq!(bench.begin_use(2, &large), expected, "{mode:?}");
        bench.end_use(1);
        bench.begin_use(2, &large);
        assert_eq!(bench.residents(), [2], "{mode:?}: now there is room");
    }
    let text = refusal(1, 2).unwrap_err().to_string();
    assert!(text.contains(&(2 * BYTES).to_string()) && text.contains("--device-bytes"), "{text}");
}

#[test]
fn where_all_must_be_there_a_load_is_answered_after_the_arrival() {
    let mut bench = DeviceTierHarness::new(2, ColdStart::Cached, Some(BYTES * 20));
    let adapter = adapter(1);
    assert_eq!(bench.loaded(1, &adapter), Ok(LoadCompletion::Later));
    assert!(!bench.is_there(1));
    assert_eq!(bench.next_arrival(), id(1));
    assert!(bench.is_there(1));
    assert_eq!(bench.loaded(1, &adapter), Ok(LoadCompletion::Now), "it is there already");
    assert_eq!(bench.begin_use(1, &adapter), AdapterAvailability::OnDevice);
}

#[test]
fn a_refused_load_can_be_tried_again_when_there_is_room() {
    let mut bench = DeviceTierHarness::new(1, ColdStart::Cached, Some(BYTES * 20));
    let (first, second) = (adapter(1), adapter(1));
    assert_eq!(bench.loaded(1, &first), Ok(LoadCompletion::Later));
    bench.until_arrived(1);
    assert!(bench.loaded(2, &second).is_err());
    bench.unloaded(1);
    assert_eq!(bench.loaded(2, &second), Ok(LoadCompletion::Later));
    bench.until_arrived(2);
}

#[test]
fn two_that_wait_for_the_same_room_get_it_one_after_the_other() {
    // The link is so slow that neither adapter arrives before the other is requested.
    let mut bench = DeviceTierHarness::new(1, ColdStart::OnDemand, Some(BYTES * 4));
    let (first, second) = (adapter(1), adapter(1));
    assert_eq!(bench.begin_use(1, &first), AdapterAvailability::MustWait);
    for _ in 0..10 {
        assert_eq!(bench.begin_use(2, &second), AdapterAvailability::MustWait);
        assert_eq!(bench.begin_use(1, &first), AdapterAvailability::MustWait);
        assert_eq!(bench.residents(), [1], "what is on its way to somebody stays on its way");
    }
    assert_eq!(bench.next_arrival(), id(1));
    assert_eq!(bench.begin_use(1, &first), AdapterAvailability::OnDevice);
    assert_eq!(bench.begin_use(2, &second), AdapterAvailability::MustWait);
    bench.end_use(1);
    assert_eq!(bench.begin_use(2, &second), AdapterAvailability::MustWait);
    assert_eq!(bench.next_arrival(), id(2));
    assert_eq!(bench.begin_use(2, &second), AdapterAvailability::OnDevice);
    bench.end_use(2);
    assert_eq!(bench.blocks()[1], 0);
}

#[test]
fn who_waited_and_went_away_keeps_no_room() {
    let mut bench = DeviceTierHarness::new(1, ColdStart::OnDemand, Some(BYTES * 8));
    let (first, second) = (adapter(1), adapter(1));
    assert_eq!(bench.begin_use(1, &first), AdapterAvailability::MustWait);
    assert_eq!(bench.begin_use(2, &second), AdapterAvailability::MustWait);
    // No further request uses the first adapter.
    assert_eq!(bench.next_arrival(), id(1));
    assert_eq!(bench.begin_use(2, &second), AdapterAvailability::MustWait);
    assert_eq!(bench.residents(), [2]);
    // No request uses the second adapter either, which is unloaded before its arrival.
    bench.unloaded(2);
    assert_eq!((bench.residents(), bench.blocks()[1]), (vec![], 0));
    assert_eq!(bench.begin_use(1, &first), AdapterAvailability::MustWait);
    bench.until_arrived(1);
}

#[test]
fn news_of_a_copy_that_was_given_up_is_not_taken_for_the_next_ones() {
    let mut bench = DeviceTierHarness::new(1, ColdStart::OnDemand, Some(BYTES * 4));
    let adapter = adapter(1);
    assert_eq!(bench.begin_use(1, &adapter), AdapterAvailability::MustWait);
    bench.unloaded(1);
    assert_eq!(bench.begin_use(1, &adapter), AdapterAvailability::MustWait);
    // The arrival is that of the first copy, which was cancelled.
    assert_eq!(bench.next_arrival(), id(1));
    assert!(!bench.is_there(1) && !bench.device.residency.has_failed(id(1)));
    assert_eq!(bench.blocks()[1], 1, "the second is still waited for");
    bench.until_arrived(1);
}

/// A load that never ends.
struct EndlessLoad;

impl CopySource for EndlessLoad {
    fn next_bytes(&self) -> Option<usize> {
        // A started piece keeps an emulated link busy, even after cancellation.
        Some(1 << 15)
    }

    fn copy_next(&mut self) {}
}

#[test]
fn an_adapter_that_found_too_much_on_its_way_keeps_its_place_and_sets_out_when_there_is_less() {
    for mode in [ColdStart::Cached, ColdStart::OnDemand, ColdStart::CpuAssist] {
        let mut bench = DeviceTierHarness::new(1, mode, Some(1 << 20));
        let adapter = adapter(1);
        let copies = &bench.device.carrier.copies;
        let submit = || copies.submit(CopyPriority::Demand, Box::new(EndlessLoad), Box::new(|_| {})).ok();
        let jobs: Vec<Ticket> = std::iter::from_fn(submit).collect();
        let found = bench.begin_use(1, &adapter);
        assert_eq!(found == AdapterAvailability::MustWait, mode != ColdStart::CpuAssist, "{mode:?}");
        assert_eq!((bench.blocks()[0], bench.device.residency.copy(id(1)).is_none()), (1, true), "{mode:?}");
        jobs.iter().for_each(Ticket::cancel);
        let end = Instant::now() + WATCHDOG;
        while bench.begin_use(1, &adapter) != AdapterAvailability::OnDevice {
            assert!(Instant::now() < end, "{mode:?}: it never sets out");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn an_adapter_whose_load_fails_is_computed_from_the_host_tier_in_every_mode() {
    for mode in [ColdStart::Cached, ColdStart::OnDemand, ColdStart::CpuAssist] {
        // The link is so slow that the own load fails, but is busy only until its first block would arrive.
        let mut bench = DeviceTierHarness::new(2, mode, Some(4000));
        let adapter = adapter(1);
        let found = bench.begin_use(1, &adapter);
        assert_eq!(found == AdapterAvailability::MustWait, mode != ColdStart::CpuAssist, "{mode:?}");
        // The copy ends early: the engine receives an arrival of an incomplete adapter.
        bench.device.residency.copy(id(1)).unwrap().way.cancel();
        let end = Instant::now() + WATCHDOG;
        while !bench.device.residency.has_failed(id(1)) {
            assert!(Instant::now() < end);
            bench.next_arrival();
        }
        assert_eq!(bench.begin_use(1, &adapter), AdapterAvailability::Missing, "{mode:?}: it starts");
        assert_eq!(bench.loaded(1, &adapter), Ok(LoadCompletion::Now), "{mode:?}: a call for it is answered");
        assert_eq!(bench.device.residency.on_the_way_bytes(), 0, "nothing more comes");
        bench.end_use(1);
        if found != AdapterAvailability::MustWait {
            bench.end_use(1);
        }
        bench.unloaded(1);
        assert_eq!((bench.residents(), bench.blocks()[0]), (vec![], 0));
        assert!(!bench.device.residency.has_failed(id(1)) && bench.device.residency.left_out().is_empty());
    }
}

#[test]
fn an_adapter_without_matrices_is_always_on_the_device_and_takes_no_room_there() {
    for cold_start in [ColdStart::CpuAssist, ColdStart::OnDemand, ColdStart::Cached] {
        let mut bench = DeviceTierHarness::new(0, cold_start, None);
        let adapter = scaling_adapter(1000);
        assert_eq!(bench.loaded(1, &adapter), Ok(LoadCompletion::Now));
        assert_eq!(bench.begin_use(1, &adapter), AdapterAvailability::OnDevice);
        bench.end_use(1);
        bench.unloaded(1);
        assert_eq!((bench.residents(), bench.stats().device_bytes), (Vec::new(), 0));
        assert!(adapter.is_on_device());
    }
}
