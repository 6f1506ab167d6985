//! Upload of adapters into device blocks, their layout there, and their eviction.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
};

use kernels::{
    attention::{KvPrecision, KvRows, KvShape, QkvLayout},
    cuda::{
        BlockMemory, CudaStream,
        attention::{KvPool, RowTable},
        lora::{LoraPlan, LoraSegment, RegisteredBytes, StagedAdapter, UploadQueue},
    },
    lora::{ElementKind, SharedBytes},
};

use super::{
    expected,
    layer::{Encoded, LARGE_BLOCK, Layer},
    run, tolerance,
};
use crate::support::{KINDS, SeededNumbers, assert_close, matrix, rounded, stream};

/// Host memory of an adapter's bytes.
#[derive(Debug, Clone, Copy)]
enum ByteSource {
    Registered,
    Staged,
}

#[test]
fn a_layer_is_computed_with_while_it_arrives() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(19);
    let (columns, outputs, rows, kind) = (256, 64, 2, ElementKind::F32);
    for (source, block_bytes) in [
        (ByteSource::Registered, LARGE_BLOCK),
        (ByteSource::Staged, LARGE_BLOCK),
        (ByteSource::Staged, 4 << 10),
    ] {
        let memory = BlockMemory::new(stream.cuda(), block_bytes, (2 << 20) / block_bytes + 1).unwrap();
        let encoded = Encoded::new(&mut random, ElementKind::F16, [250, columns, outputs]);
        let mut map = memmap2::MmapMut::map_anon(encoded.bytes.len()).unwrap();
        map.copy_from_slice(&encoded.bytes);
        let bytes: SharedBytes = Arc::new(map.make_read_only().unwrap());
        let registered = match source {
            ByteSource::Registered => Some(Arc::new(RegisteredBytes::new(stream.cuda(), &bytes).unwrap())),
            ByteSource::Staged => None,
        };
        let lane = UploadQueue::new(stream.cuda()).unwrap();
        let layer = Layer::over(&lane, &bytes, encoded, &memory);
        let x = random.normals(rows * columns);
        let out = random.normals(rows * outputs);
        let x_there = matrix(&stream, kind, columns, &x);
        thread::scope(|scope| {
            scope.spawn(|| {
                while let Some(bytes) = layer.adapter.next_bytes(0) {
                    assert_eq!(layer.copy_next(registered.as_ref()), bytes);
                    thread::yield_now();
                }
            });
            let mut last = usize::MAX;
            while last > 0 {
                lane.poll_arrivals().unwrap();
                let first_rank = layer.staged().first_rank();
                assert!(first_rank <= last, "what has arrived stays");
                last = first_rank;
                let segment = LoraSegment { first_rank, ..layer.segment(0, rows, 0) };
                let got = run(&stream, &[segment], &x_there, kind, &out);
                let want = expected(&x, &out, outputs, &[(&layer, segment)]);
                assert_close(&format!("{source:?} from {first_rank}"), &got, &want, tolerance(kind));
            }
        });
        assert_eq!(layer.adapter.next_bytes(0), None);
        assert_eq!(layer.copy_next(registered.as_ref()), 0);
    }
}

#[test]
fn pieces_larger_than_the_locked_memory_arrive_whole() {
    let Some(stream) = stream() else { return };
    let mut random = SeededNumbers::new(20);
    let columns = 40_000;
    let layer = Layer::in_blocks(&stream, &mut random, ElementKind::F32, [17, columns, 4], 4 << 20);
    assert_eq!(layer.staged().first_rank(), 0);
    let x = random.normals(columns);
    let segment = layer.segment(0, 1, 0);
    let x_there = matrix(&stream, ElementKind::F32, columns, &x);
    let got = run(&stream, &[segment], &x_there, ElementKind::F32, &[0.0; 4]);
    assert_close("all of it", &got, &expected(&x, &[0.0; 4], 4, &[(&layer, segment)]), 5e-5);
}

#[test]
fn nothing_is_announced_before_it_is_asked_for() {
    let Some(stream) = stream() else { return };
    let lane = UploadQueue::new(stream.cuda()).unwrap();
    let memory = BlockMemory::new(stream.cuda(), LARGE_BLOCK, 2).unwrap();
    let layer = Layer::absent(&lane, &mut SeededNumbers::new(21), ElementKind::F16, [40, 64, 64], &memory);
    assert_eq!(layer.staged().first_rank(), 40);
    assert_eq!(layer.adapter.next_bytes(0), Some(8 * (64 + 64) * 2));
    layer.copy_next(None);
    assert_eq!(layer.adapter.next_bytes(0), Some(16 * (64 + 64) * 2));
    assert_eq!(layer.staged().first_rank(), 40, "nobody has looked yet");
    lane.finish().unwrap();
    assert_eq!(layer.staged().first_rank(), 32);
}

#[test]
fn however_small_the_blocks_are_a_delta_has_the_same_bits() {
    let Some(stream) = stream() else { return };
    for [rank, columns, outputs, column, stride] in
        [[40, 2050, 1040, 0, 1040], [16, 3000, 200, 8, 208], [7, 1100, 130, 3, 133], [64, 512, 70, 2, 72]]
    {
        for (kind, factors) in KINDS.into_iter().flat_map(|kind| KINDS.map(|factors| (kind, factors))) {
            let layer = |block_bytes| {
                let shape = [rank, columns, outputs];
                Layer::in_blocks(&stream, &mut SeededNumbers::new(22), factors, shape, block_bytes)
            };
            let (whole, mut random) = (layer(LARGE_BLOCK), SeededNumbers::new(23));
            let rows = 35;
            let x = rounded(kind, &random.normals(rows * columns));
            let out = rounded(kind, &random.normals(rows * stride));
            let x_there = matrix(&stream, kind, columns, &x);
            let segment = whole.segment(0, rows, column);
            let want = run(&stream, &[segment], &x_there, kind, &out);
            let what = format!("{kind:?} x, {factors:?} {rank} of {columns} to {outputs}");
            let plain = expected(&x, &out, stride, &[(&whole, segment)]);
            assert_close(&what, &want, &plain, tolerance(kind));
            for block_bytes in [4 << 10, 8 << 10, 20 << 10] {
                let cut = layer(block_bytes);
                for first_rank in [0, 16].into_iter().filter(|first| *first < rank) {
                    let [want, got] = [&whole, &cut].map(|layer| {
                        let segment = LoraSegment { first_rank, ..layer.segment(0, rows, column) };
                        run(&stream, &[segment], &x_there, kind, &out)
                    });
                    let same = got.iter().zip(&want).all(|(got, want)| got.to_bits() == want.to_bits());
                    assert!(same, "{what} in blocks of {block_bytes} from {first_rank}");
                }
            }
        }
    }
}

#[test]
fn blocks_that_do_not_hold_the_least_piece_take_no_adapter() {
    let Some(stream) = stream() else { return };
    let layer = Layer::new(&stream, &mut SeededNumbers::new(24), ElementKind::F32, [16, 300, 64]);
    assert_eq!(StagedAdapter::blocks_for([&layer.host], 64 * 16 * 4 - 64), None);
    assert_eq!(StagedAdapter::blocks_for([&layer.host], LARGE_BLOCK), Some(1));
    assert!(StagedAdapter::blocks_for([&layer.host], 64 * 16 * 4).is_some_and(|blocks| blocks > 5));
}

/// A pool whose blocks hold a rank block of a small layer.
fn pool(stream: &CudaStream) -> KvPool {
    let shape = KvShape { layers: 2, kv_heads: 4, head_dim: 64, precision: KvPrecision::F16 };
    KvPool::new(stream.cuda(), shape, 200).unwrap()
}

#[test]
fn an_adapter_that_is_revoked_under_way_leaves_its_blocks_alone() {
    let Some(stream) = stream() else { return };
    let (lane, mut pool) = (UploadQueue::new(stream.cuda()).unwrap(), pool(&stream));
    let mark = vec![0x5A; pool.memory().block_bytes()];
    for copied in [0, 1, 3, 30] {
        let memory = pool.memory();
        let layer =
            Layer::absent(&lane, &mut SeededNumbers::new(25), ElementKind::F32, [500, 512, 200], memory);
        (0..copied).for_each(|_| assert!(layer.copy_next(None) > 0));
        layer.adapter.revoke();
        // The blocks belong to the next owner at once.
        layer.blocks.iter().for_each(|&block| pool.write_block(&stream, block, &mark).unwrap());
        assert_eq!((layer.staged().first_rank(), layer.adapter.next_bytes(0)), (500, None));
        assert_eq!(layer.copy_next(None), 0);
        lane.finish().unwrap();
        assert_eq!((layer.staged().first_rank(), layer.adapter.has_arrived()), (500, false));
        let mut held = vec![0; mark.len()];
        for &block in &layer.blocks {
            pool.read_block(&stream, block, &mut held).unwrap();
            assert!(held == mark, "block {block}, after {copied} rank blocks");
        }
        // The new owner keeps the blocks.
        let lent = pool.memory().lease(&layer.blocks);
        drop(layer);
        assert!(!pool.memory().is_own(1));
        drop(lent);
    }
}

#[test]
fn copies_that_set_out_while_an_adapter_is_revoked_end_before_it_is() {
    let Some(stream) = stream() else { return };
    let (lane, mut pool) = (UploadQueue::new(stream.cuda()).unwrap(), pool(&stream));
    let mark = vec![0x5A; pool.memory().block_bytes()];
    for _ in 0..20 {
        let memory = pool.memory();
        let layer =
            Layer::absent(&lane, &mut SeededNumbers::new(26), ElementKind::F16, [500, 512, 200], memory);
        thread::scope(|scope| {
            scope.spawn(|| while layer.copy_next(None) > 0 {});
            thread::yield_now();
            layer.adapter.revoke();
            layer.blocks.iter().for_each(|&block| pool.write_block(&stream, block, &mark).unwrap());
        });
        lane.finish().unwrap();
        let mut held = vec![0; mark.len()];
        for &block in &layer.blocks {
            pool.read_block(&stream, block, &mut held).unwrap();
            assert!(held == mark, "block {block}");
        }
    }
}

#[test]
fn a_pool_refuses_blocks_that_are_lent() {
    let Some(stream) = stream() else { return };
    let mut pool = pool(&stream);
    let memory = Arc::clone(pool.memory());
    let layout = QkvLayout { heads: 4, kv_heads: 4, head_dim: 64 };
    let mut table = RowTable::new(&memory, layout).unwrap();
    let mut bytes = vec![0; memory.block_bytes()];
    let mut accepts = |block: u32| {
        let rows = [KvRows { first_row: 0, rows: 1, position: 0, blocks: &[block] }];
        let refused = [
            catch_unwind(AssertUnwindSafe(|| pool.read_block(&stream, block, &mut bytes).unwrap())),
            catch_unwind(AssertUnwindSafe(|| pool.write_block(&stream, block, &bytes).unwrap())),
            catch_unwind(AssertUnwindSafe(|| table.upload(&stream, &rows).unwrap())),
            catch_unwind(AssertUnwindSafe(|| drop(memory.lease(&[block])))),
        ];
        refused.map(|refused| refused.is_ok())
    };
    assert_eq!(accepts(7), [true; 4]);
    let lent = memory.lease(&[3, 7]);
    assert_eq!(accepts(7), [false; 4]);
    assert_eq!(accepts(8), [true; 4]);
    drop(lent);
    assert_eq!(accepts(7), [true; 4]);
    assert_eq!(accepts(200), [false; 4]);
}

#[test]
fn an_adapter_that_is_dropped_gives_its_blocks_back_once_no_plan_has_it() {
    let Some(stream) = stream() else { return };
    let (lane, pool) = (UploadQueue::new(stream.cuda()).unwrap(), pool(&stream));
    let layer =
        Layer::absent(&lane, &mut SeededNumbers::new(27), ElementKind::F16, [20, 64, 64], pool.memory());
    while layer.copy_next(None) > 0 {}
    lane.finish().unwrap();
    let mut plan = LoraPlan::new(stream.cuda()).unwrap();
    plan.upload(&stream, &[vec![layer.segment(0, 1, 0)]]).unwrap();
    drop(layer);
    assert!(!pool.memory().is_own(1), "a plan may be launched again");
    plan.upload(&stream, &[vec![]]).unwrap();
    assert!(pool.memory().is_own(1));
}
