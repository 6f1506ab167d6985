//! A base over several devices: the bits of one device, for every call, precision and division of the weights.

use std::{thread, time::Duration};

use kernels::{Activations, Isa, ThreadPool};
use model::{
    cpu::Compute,
    linear_sites::{EvaluateSites, SiteCall, SiteId, SiteOp, SitePath},
    precision::Precision,
    resident::{KvPrecision, LoadedWeights, ResidentModel, ResidentOptions},
    shape::source::{Target, WeightSource},
    sources::open::open,
    weights::{
        device_group::{
            GroupPlan, ShardWeights,
            leader::{GroupLayers, geometry},
            member::MemberModel,
        },
        host::HostLayers as _,
        served::ServedLayers,
    },
};
use shmproto::group::{GroupLeader, WeightSplit};
use testkit::paths::{golden, real_model as smollm2};

use crate::streamed::{adapters, talk};

type Source = dyn WeightSource + Send + Sync;

const SPIN: Duration = Duration::from_micros(20);

fn options() -> ResidentOptions {
    ResidentOptions { cores: Vec::new(), kv_bytes: 8 << 20, kv_dtype: Some(KvPrecision::F16) }
}

/// Starts the members as threads, and returns the leader's weights and group.
fn start(source: &Source, plan: GroupPlan, precision: Precision, rows: usize) -> (ShardWeights, GroupLeader) {
    let shard = |device| ShardWeights::load(source, plan, device, 1, &|_| {}).unwrap();
    let own = shard(0);
    let (leader, members) = GroupLeader::in_process(geometry(&own, rows), SPIN).unwrap();
    for (index, member) in members.into_iter().enumerate() {
        let pool = ThreadPool::new(&[]).unwrap();
        let mut model = MemberModel::new(shard(index + 1), precision, pool);
        thread::spawn(move || model.serve(member).unwrap());
    }
    (own, leader)
}

fn grouped(
    source: &Source,
    plan: GroupPlan,
    precision: Precision,
    rows: usize,
) -> LoadedWeights<ServedLayers> {
    let (own, leader) = start(source, plan, precision, rows);
    LoadedWeights::of_group(source, own, leader).unwrap().with_precision(precision)
}

fn resident(source: &Source, precision: Precision) -> LoadedWeights {
    LoadedWeights::load(source, 2).unwrap().with_precision(precision)
}

fn plans(devices: impl IntoIterator<Item = usize>) -> Vec<GroupPlan> {
    let of = |devices| [WeightSplit::Outputs, WeightSplit::Layers].map(|split| GroupPlan { devices, split });
    devices.into_iter().flat_map(of).collect()
}

/// Rows that differ from call to call.
fn rows(count: usize, salt: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * 2_654_435_761 + salt * 97) % 1009) as f32 / 504.0 - 1.0).collect()
}

/// Result bits of all calls that a site takes, with so many rows.
fn calls<B: EvaluateSites>(model: &mut B, counts: &[usize]) -> Vec<(SiteCall, Vec<u32>)> {
    let mut results = Vec::new();
    let sites = model.sites().to_vec();
    for (site, description) in (0u32..).zip(&sites) {
        let parts = (0..description.parts.len()).map(|part| u8::try_from(part).ok());
        for (part, count) in
            [None].into_iter().chain(parts).flat_map(|part| counts.iter().map(move |&count| (part, count)))
        {
            for (op, path) in [
                (SiteOp::Forward, SitePath::Fast),
                (SiteOp::ForwardNoBias, SitePath::Linear),
                (SiteOp::Backward, SitePath::Fast),
                (SiteOp::Backward, SitePath::Linear),
            ] {
                let call = SiteCall { site: SiteId(site), part, op, path };
                let (inputs, outputs) = description.words(call).unwrap();
                let mut x = Activations::default();
                x.reshape(count, inputs);
                x.values_mut().copy_from_slice(&rows(count * inputs, site as usize));
                let mut out = vec![f32::NAN; count * outputs];
                model.evaluate(call, &mut x, &mut out).unwrap();
                results.push((call, out.iter().map(|value| value.to_bits()).collect()));
            }
        }
    }
    results
}

const MODELS: [&str; 12] = [
    "llama-tied",
    "llama-bf16",
    "llama-sharded",
    "qwen2-bias",
    "qwen3-qknorm",
    "olmo2",
    "phi3",
    "gemma3",
    "mixtral",
    "qwen3moe",
    "gptoss",
    "gptoss-mxfp4",
];

#[test]
fn a_base_on_several_devices_gives_the_logits_of_one() {
    for name in MODELS {
        let source = open(&golden("models").join(name)).unwrap();
        let weights = resident(&*source, Precision::default());
        let adapters = adapters(name, &*source);
        let wanted = talk(&mut ResidentModel::new(weights, &options()).unwrap(), &adapters).unwrap();
        for plan in plans([2, 3, 4, 16]) {
            // Passes of more rows than fit at once are computed in turns.
            for rows in [5, 600] {
                let weights = grouped(&*source, plan, Precision::default(), rows);
                let mut model = ResidentModel::new(weights, &options()).unwrap();
                assert!(talk(&mut model, &adapters).unwrap() == wanted, "{name}, {plan:?}, {rows} rows");
            }
        }
    }
}

#[test]
fn each_call_of_split_clients_and_trainers_has_the_bits_of_one_device_in_every_precision() {
    for name in ["llama-tied", "llama-sharded", "qwen2-bias", "mixtral", "gptoss-mxfp4"] {
        let source = open(&golden("models").join(name)).unwrap();
        for precision in
            [Precision::Int8, Precision::Mixed, Precision::Int15, Precision::Bf16, Precision::Exact]
        {
            let counts = [1, 3, 130];
            let mut one = ResidentModel::new(resident(&*source, precision), &options()).unwrap();
            let wanted = calls(&mut one, &counts);
            for plan in plans([2, 3]) {
                for rows in [64, 600] {
                    let weights = grouped(&*source, plan, precision, rows);
                    let mut model = ResidentModel::new(weights, &options()).unwrap();
                    for ((call, wanted), (_, found)) in wanted.iter().zip(calls(&mut model, &counts)) {
                        assert!(*wanted == found, "{name}, {precision:?}, {plan:?}, {rows} rows: {call:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_real_model_on_several_devices_gives_the_bits_of_one_and_each_holds_a_part() {
    let source = open(&smollm2()).unwrap();
    let one = resident(&*source, Precision::default());
    let whole = one.bytes();
    let mut one = ResidentModel::new(one, &options()).unwrap();
    let (logits, gradients) = (talk(&mut one, &[None]).unwrap(), calls(&mut one, &[70]));
    for (plan, share) in [(2, 1.7), (3, 2.4)]
        .map(|(devices, share)| (GroupPlan { devices, split: WeightSplit::Outputs }, share))
    {
        let weights = grouped(&*source, plan, Precision::default(), 64);
        assert!((weights.bytes() as f64) < whole as f64 / share, "{plan:?}: {} of {whole}", weights.bytes());
        let mut model = ResidentModel::new(weights, &options()).unwrap();
        assert!(talk(&mut model, &[None]).unwrap() == logits, "{plan:?}");
        assert!(calls(&mut model, &[70]) == gradients, "{plan:?}");
    }
}

#[test]
fn rows_of_weights_are_read_from_the_device_that_holds_them() {
    for name in ["llama-tied", "llama-sharded", "qwen2-bias"] {
        let source = open(&golden("models").join(name)).unwrap();
        let one = LoadedWeights::open(&*source, None, 1, &|_| {}).unwrap().shared();
        for plan in plans([2, 5]) {
            let group = grouped(&*source, plan, Precision::default(), 8).shared();
            for (layer, target) in [
                (0, Target::Q),
                (1, Target::V),
                (0, Target::O),
                (1, Target::Up),
                (1, Target::Down),
                (0, Target::LmHead),
            ] {
                let [wanted, found] = [&one, &group].map(|base| base.linear_layer(layer, target).unwrap());
                assert_eq!(wanted.bias, found.bias, "{name}, {plan:?}, {target:?}");
                let [rows, columns] = model::shape::layout::linear_shape(source.config(), target);
                let [mut ours, mut theirs] = [vec![0.0; columns], vec![1.0; columns]];
                for row in 0..rows {
                    (wanted.read_row)(row, &mut ours);
                    (found.read_row)(row, &mut theirs);
                    assert_eq!(ours, theirs, "{name}, {plan:?}, {target:?}, row {row}");
                }
            }
        }
    }
}

#[test]
fn every_instruction_set_gives_the_bits_of_a_group_on_another_set() {
    let source = open(&golden("models").join("qwen2-bias")).unwrap();
    let plan = GroupPlan { devices: 2, split: WeightSplit::Outputs };
    let mut one = ResidentModel::new(resident(&*source, Precision::Bf16), &options()).unwrap();
    let wanted = calls(&mut one, &[40]);
    for isa in Isa::available() {
        let (own, leader) = start(&*source, plan, Precision::Bf16, 64);
        let mut layers = GroupLayers::new(own, leader);
        layers.set_precision(Precision::Bf16);
        let mut compute = Compute { pool: ThreadPool::new(&[]).unwrap(), isa };
        // The float path has other bits on a processor without fused multiply-adds.
        for (call, wanted) in wanted.iter().filter(|(call, _)| call.path == SitePath::Fast) {
            let (inputs, outputs) = layers.sites()[call.site.0 as usize].words(*call).unwrap();
            let mut x = Activations::default();
            x.reshape(40, inputs);
            x.values_mut().copy_from_slice(&rows(40 * inputs, call.site.0 as usize));
            let mut out = vec![0.0; 40 * outputs];
            layers.evaluate(&mut compute, *call, &mut x, &mut out, &mut |_| {}).unwrap();
            let found: Vec<u32> = out.iter().map(|value| value.to_bits()).collect();
            assert!(*wanted == found, "{isa:?}: {call:?}");
        }
    }
}
