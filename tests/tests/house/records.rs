//! One fact has one record: two structs with the same fields drift apart, and each change costs twice. Wire
//! messages, which macros of `shmproto` declare, are not counted.

use std::collections::BTreeSet;

use syn::{Fields, ItemStruct, visit::Visit};

use super::{assert_only, sources};

/// Maximum number of equal field names of two structs.
const MAX_SHARED_FIELDS: usize = 7;

/// Allowed pairs, grouped by reason.
const TWINS: &[&str] = &[
    // A message, and its receiver's copy.
    "GatewayReport HostReport",
    // A configuration and its command line.
    "Args GatewayConfig",
    // The options of a training job by command and by request, the plan with all defaults, which checkpoints
    // hold, and its report.
    "JobHyperparameters TrainingSpec",
    "JobPlan TrainingPlan",
    "JobPlan TrainingSpec",
    "TrainingPlan TrainingSpec",
    // A kernel and its gradient take the same tensors, and a shape is part of a product.
    "Activations Quantize",
    "BlasProduct BlasShape",
    "Rotate RotateGradient",
    // Options of the simulator, and their parsed form.
    "Forecast SimulationOptions",
    "Observation SimulationReport",
    "Setup SimulationOptions",
    "SimulationOptions WorkloadSpec",
];

type Record = (String, BTreeSet<String>);

struct Records(Vec<Record>);

impl<'ast> Visit<'ast> for Records {
    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        if let Fields::Named(fields) = &item.fields {
            let names = fields.named.iter().filter_map(|field| Some(field.ident.as_ref()?.to_string()));
            self.0.push((item.ident.to_string(), names.collect()));
        }
    }
}

#[test]
fn two_structs_do_not_share_eight_fields() {
    let mut records = Records(Vec::new());
    let is_test = |member: &str| ["tests", "tests/testkit", "benches", "fuzz"].contains(&member);
    for source in sources().iter().filter(|source| source.is_shipped() && !is_test(source.member())) {
        records.visit_file(&source.parsed());
    }
    let long: Vec<&Record> =
        records.0.iter().filter(|(_, fields)| fields.len() > MAX_SHARED_FIELDS).collect();
    assert!(long.len() > 100, "the sources were read");
    let mut found = BTreeSet::new();
    for (index, (one, fields)) in long.iter().enumerate() {
        let twins = long[index + 1..]
            .iter()
            .filter(|(_, other)| fields.intersection(other).count() > MAX_SHARED_FIELDS);
        found.extend(twins.map(|(other, _)| {
            let (first, second) = if one < other { (one, other) } else { (other, one) };
            format!("{first} {second}")
        }));
    }
    let found: Vec<String> = found.into_iter().collect();
    assert_only("two structs share eight fields; make one of them, below both", TWINS, &found);
}
