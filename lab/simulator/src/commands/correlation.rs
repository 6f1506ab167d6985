//! Measures how far recency, frequency and cost agree on a cache's content (E-27). Where they agree, a
//! policy that uses one of them is as good as one that uses all.

use std::{collections::BTreeMap, io::Write, time::Duration};

use clap::Args;
use serde_json::json;

use super::{CommandError, SimulationOptions, print};
use crate::{
    engine::EndedRequest,
    statistics::{mean, spearman},
};

/// Correlates the ranks by last use, frequency and cost.
#[derive(Debug, Args)]
pub(super) struct Correlation {
    #[command(flatten)]
    options: SimulationOptions,
}

/// Interval at which adapters and conversations are sampled.
const EVERY: Duration = Duration::from_secs(30);
/// Entries without a request in this time are not sampled.
const MEMORY: Duration = Duration::from_secs(300);

/// An entry that a cache may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Item {
    Adapter(usize),
    Conversation(usize),
}

/// Time of the last request, number of requests, and number of blocks of an entry.
type AccessHistory = (f64, f64, f64);

impl Correlation {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<(), CommandError> {
        print(out, &json!({ "settings": self.options.header()? }))?;
        let observation = self.options.observe(false)?;
        let (workload, cost) = (self.options.workload()?, self.options.setup()?.cost);
        let adapter_blocks = |adapter: usize| f64::from(cost.adapter_blocks(workload.adapters[adapter].rank));
        let end = Duration::from_secs_f64(self.options.duration);
        let mut found: [Vec<f64>; 3] = Default::default();
        let mut at = Duration::from_secs_f64(self.options.warmup);
        while at <= end {
            let recent = |record: &&EndedRequest| record.arrived <= at && record.arrived + MEMORY > at;
            let mut items: BTreeMap<Item, AccessHistory> = BTreeMap::new();
            for record in observation.records.iter().filter(recent) {
                let kv_blocks = (record.prompt + record.reply).div_ceil(cost.block_tokens) as f64;
                note(&mut items, Item::Adapter(record.adapter), record, adapter_blocks(record.adapter));
                note(&mut items, Item::Conversation(record.conversation), record, kv_blocks);
            }
            let column = |of: fn(&AccessHistory) -> f64| items.values().map(of).collect::<Vec<_>>();
            let (last, often, cost) =
                (column(|known| known.0), column(|known| known.1), column(|known| known.2));
            for (found, (one, other)) in
                found.iter_mut().zip([(&last, &often), (&last, &cost), (&often, &cost)])
            {
                found.push(spearman(one, other));
            }
            at += EVERY;
        }
        let [last_often, last_cost, often_cost] = found.map(|values| mean(&values));
        let is_low = [last_often, last_cost, often_cost].iter().all(|value| value.abs() < 0.3);
        print(
            out,
            &json!({
                "last_use_and_frequency": last_often,
                "last_use_and_cost": last_cost,
                "frequency_and_cost": often_cost,
                "all_below_0.3": is_low,
            }),
        )
    }
}

fn note(items: &mut BTreeMap<Item, AccessHistory>, item: Item, record: &EndedRequest, blocks: f64) {
    let known = items.entry(item).or_default();
    known.0 = known.0.max(record.arrived.as_secs_f64());
    known.1 += 1.0;
    known.2 = known.2.max(blocks);
}
