//! Failure of every single allocation: the operation fails with a message, and the next try gives the usual
//! result.
//!
//! The stand-in fails the allocations that a file names (`kernels/cuda/emulator/README.md`), and reads the
//! file's path from its environment once, so each test runs again in a process with that variable. A GPU has
//! no such file; there these tests are skipped with a message.

use std::{env, fs, path::PathBuf, process::Command, sync::Arc};

use kernels::{
    Activations,
    cuda::{Cuda, CudaError},
};
use model::{
    adapter::Adapter,
    cuda::{CudaModel, CudaModelError, CudaOptions, CudaWeights, Graphs},
    deltas::prepared::PreparedAdapter,
    forward::{ForwardPass as _, LogitRows},
    linear_sites::{EvaluateError, EvaluateSites as _, SiteCall, SiteId, SiteOp, SitePath},
    sources::open::open,
};

use crate::support::{CudaSequence, device, error, golden, on_device, upload};

const RULE: &str = "CUDA_ON_CPU_ALLOCATIONS";
const MODEL: &str = "llama-bf16";
/// More allocations than any operation makes.
const MANY: u64 = 1_000_000;

/// File that says which allocations fail.
struct AllocationFaults(PathBuf);

impl AllocationFaults {
    fn here() -> Option<Self> {
        env::var_os(RULE).map(|path| Self(path.into()))
    }

    fn set(&self, rule: &str, number: u64) {
        fs::write(&self.0, format!("{rule} {number}\n")).unwrap();
    }

    /// Fails only the `number`th next allocation.
    fn once(&self, number: u64) {
        self.set("once", number);
    }

    /// Ends the shortage; returns whether an allocation failed.
    fn end(&self) -> bool {
        let text = fs::read_to_string(&self.0).unwrap();
        let left: u64 = text.split_whitespace().last().unwrap().parse().unwrap();
        self.set("once", 0);
        left == 0
    }

    fn count(&self, what: impl FnOnce()) -> u64 {
        self.once(MANY);
        what();
        let text = fs::read_to_string(&self.0).unwrap();
        self.set("once", 0);
        MANY - text.split_whitespace().last().unwrap().parse::<u64>().unwrap()
    }
}

/// Runs `body` with a fault file: in this process if it has one, else in another that runs `test` again.
fn in_shortage(test: &str, body: impl FnOnce(&Arc<Cuda>, &AllocationFaults)) {
    let Some(cuda) = device() else { return };
    if cuda.info().name != "CUDA on this CPU" {
        eprintln!("skipped: the memory of a GPU is what it is ({})", cuda.info().name);
        return;
    }
    if let Some(shortage) = AllocationFaults::here() {
        return body(&cuda, &shortage);
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    let again = Command::new(env::current_exe().unwrap())
        .args(["--exact", &format!("shortage::{test}"), "--nocapture"])
        .env(RULE, file.path())
        .output()
        .unwrap();
    let told = [again.stdout, again.stderr].concat();
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&told));
}

fn options() -> CudaOptions {
    CudaOptions { kv_bytes: 1 << 20, kv_dtype: None, graphs: Graphs::Use }
}

fn try_open(cuda: &Arc<Cuda>) -> Result<CudaModel, CudaModelError> {
    let source = open(&golden("models").join(MODEL)).unwrap();
    CudaModel::new(CudaWeights::load(&*source, cuda, 1, &|_| {})?, &options())
}

/// Checks that the message is one line with advice.
fn assert_helpful(error: &CudaError) {
    let text = error.to_string();
    assert!(error.is_out_of_memory() && !error.is_device_lost(), "{error:?}");
    assert!(text.contains("; ") && !text.contains('\n'), "{text}");
}

/// Logits of a prompt and some steps after it, the last of which replay CUDA graphs.
fn logits(pass: &mut CudaModel, adapter: Option<&Arc<PreparedAdapter>>) -> Result<Vec<f32>, CudaError> {
    let (sequence, mut all, mut logits) = (CudaSequence::new(0, 48, adapter), Vec::new(), Vec::new());
    for (start, end) in [(0, 40), (40, 41), (41, 42), (42, 43), (43, 44)] {
        pass.forward(&[sequence.slice(start..end, LogitRows::Last)], &mut logits)?;
        all.append(&mut logits);
    }
    Ok(all)
}

#[test]
fn a_start_without_memory_is_an_error_at_every_allocation_and_leaves_none_taken() {
    in_shortage(
        "a_start_without_memory_is_an_error_at_every_allocation_and_leaves_none_taken",
        |cuda, shortage| {
            drop(try_open(cuda).unwrap());
            let free = cuda.free_bytes().unwrap();
            let all = shortage.count(|| drop(try_open(cuda).unwrap()));
            assert!(all > 50, "{all} allocations");
            for number in 1..=all {
                shortage.once(number);
                match try_open(cuda) {
                    // The workspace of cuBLASLt: without it there is a slower kernel.
                    Ok(_) => {}
                    Err(CudaModelError::Cuda(error)) => assert_helpful(&error),
                    Err(other) => panic!("allocation {number}: {other}"),
                }
                assert!(shortage.end(), "allocation {number} was not asked for");
                assert_eq!(cuda.free_bytes().unwrap(), free, "allocation {number} leaves something behind");
            }
        },
    );
}

#[test]
fn a_pass_without_memory_is_an_error_at_every_allocation_and_the_next_has_the_same_bits() {
    in_shortage(
        "a_pass_without_memory_is_an_error_at_every_allocation_and_the_next_has_the_same_bits",
        |cuda, shortage| {
            let mut pass = try_open(cuda).unwrap();
            let mut expected = Vec::new();
            let all = shortage.count(|| expected = logits(&mut pass, None).unwrap());
            assert!(all > 5, "{all} allocations");
            let mut failed = 0;
            for number in 1..=all {
                let mut pass = try_open(cuda).unwrap();
                shortage.once(number);
                match logits(&mut pass, None) {
                    // A smaller allocation sufficed, or a step was not captured as a graph.
                    Ok(found) => assert_eq!(found, expected, "allocation {number}"),
                    Err(error) => {
                        assert_helpful(&error);
                        failed += 1;
                    }
                }
                assert!(shortage.end(), "allocation {number} was not asked for");
                assert!(!pass.is_lost());
                assert_eq!(
                    logits(&mut pass, None).unwrap(),
                    expected,
                    "after allocation {number} had failed"
                );
            }
            assert!(failed > 0, "nothing failed");
        },
    );
}

#[test]
fn without_any_memory_steps_whose_shape_was_met_go_on() {
    in_shortage("without_any_memory_steps_whose_shape_was_met_go_on", |cuda, shortage| {
        let mut pass = try_open(cuda).unwrap();
        // Two runs: kept and other rows alternate, and so do the sizes of their buffers.
        logits(&mut pass, None).unwrap();
        let expected = logits(&mut pass, None).unwrap();
        shortage.set("from", 1);
        assert_eq!(logits(&mut pass, None).unwrap(), expected);
        let longer = CudaSequence::new(0, 200, None);
        let refused = pass.forward(&[longer.slice(0..200, LogitRows::All)], &mut Vec::new());
        assert_helpful(&refused.unwrap_err());
        assert_eq!(logits(&mut pass, None).unwrap(), expected);
        shortage.end();
        pass.forward(&[longer.slice(0..200, LogitRows::All)], &mut Vec::new()).unwrap();
        assert_eq!(logits(&mut pass, None).unwrap(), expected);
    });
}

fn prepared(pass: &CudaModel, name: &str) -> Arc<PreparedAdapter> {
    let adapter = Adapter::read(&golden("adapters").join("llama-tied").join(name), pass.config()).unwrap();
    Arc::new(PreparedAdapter::new(&adapter, pass.config(), pass.adapter_precision()).unwrap())
}

#[test]
fn an_adapter_needs_no_memory_to_arrive_and_a_pass_with_it_is_an_error_at_every_allocation() {
    in_shortage(
        "an_adapter_needs_no_memory_to_arrive_and_a_pass_with_it_is_an_error_at_every_allocation",
        |cuda, shortage| {
            let names = ["ia3", "patterns", "rank64-all-linear", "some-layers"];
            let mut pass = on_device(cuda, "llama-tied", Graphs::Use);
            let fresh =
                |pass: &mut CudaModel, name: &str| -> (Arc<PreparedAdapter>, Result<Vec<f32>, CudaError>) {
                    let adapter = prepared(pass, name);
                    if adapter.device_bytes() > 0 {
                        upload(pass, &adapter);
                    }
                    let logits = logits(pass, Some(&adapter));
                    (adapter, logits)
                };
            for name in names {
                let (_, expected) = fresh(&mut pass, name);
                let expected = expected.unwrap();
                let all = shortage.count(|| drop(fresh(&mut pass, name).1.unwrap()));
                for number in 1..=all {
                    shortage.once(number);
                    let (_, found) = fresh(&mut pass, name);
                    match found {
                        Ok(found) => assert!(error(&found, &expected) < 1e-3, "{name}, allocation {number}"),
                        Err(error) => assert_helpful(&error),
                    }
                    shortage.end();
                    let (_, found) = fresh(&mut pass, name);
                    assert!(error(&found.unwrap(), &expected) < 1e-3, "{name}, after allocation {number}");
                }
            }
        },
    );
}

#[test]
fn calls_of_split_clients_need_half_the_room_where_there_is_none_for_all() {
    in_shortage("calls_of_split_clients_need_half_the_room_where_there_is_none_for_all", |cuda, shortage| {
        for path in [SitePath::Fast, SitePath::Linear] {
            let call = SiteCall { site: SiteId(0), part: None, op: SiteOp::Forward, path };
            let evaluate = |pass: &mut CudaModel, count: usize| {
                let (input, output) = pass.sites()[0].widths(None, call.op).unwrap();
                let mut rows = Activations::default();
                rows.reshape(count, input);
                let value = |i: usize| ((i * 7919 % 1013) as f32 / 1013.0) - 0.5;
                rows.values_mut().iter_mut().enumerate().for_each(|(i, row)| *row = value(i));
                let mut out = vec![f32::NAN; count * output];
                pass.evaluate(call, &mut rows, &mut out).map(|()| out)
            };
            let mut pass = try_open(cuda).unwrap();
            let expected = evaluate(&mut pass, 96).unwrap();
            let mut pass = try_open(cuda).unwrap();
            evaluate(&mut pass, 24).unwrap();
            shortage.set("from", 1);
            // A buffer for 24 rows exists, and four times as many rows go through it.
            let found = evaluate(&mut pass, 96).unwrap();
            assert!(error(&found, &expected) < 0.05, "{}", error(&found, &expected));
            shortage.end();
            let mut pass = try_open(cuda).unwrap();
            shortage.set("from", 1);
            let Err(EvaluateError::NoMemory(cause)) = evaluate(&mut pass, 96) else {
                panic!("there is no memory")
            };
            assert_helpful(cause.downcast_ref().unwrap());
            shortage.end();
            assert_eq!(evaluate(&mut pass, 96).unwrap(), expected);
        }
    });
}
