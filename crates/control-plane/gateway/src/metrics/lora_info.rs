//! `vllm:lora_requests_info`, in the form that the Gateway API inference extension reads.
//!
//! The metric is a gauge whose value is the current time and whose labels are lists of adapter names. The
//! single series is built for each scrape, so changing lists leave no old series behind. The lists name only
//! adapters in use; other metrics show where adapters reside.

use std::{
    collections::{HashMap, HashSet},
    fmt::Write as _,
};

use shmproto::message::{AdapterIdBytes, AdapterStats};

use super::{
    executor::LastStats,
    table::MetricKind,
    text::{label_list, write_head},
};
use crate::clock::seconds_since_1970;

const NAME: &str = "vllm:lora_requests_info";
const HELP: &str =
    "Adapters with requests that run and that wait; the value is the time of this line in seconds since 1970";
/// Maximum number of adapters named in one list.
const MAX_NAMED: usize = 256;

/// Appends the gauge. `names` maps adapters to their names; `max_lora` is the maximum number in use at once.
pub(super) fn write(
    out: &mut String,
    max_lora: u32,
    reports: &[LastStats],
    names: &HashMap<AdapterIdBytes, Vec<String>>,
) {
    let list = |is_in: fn(&AdapterStats) -> bool| {
        let adapters =
            reports.iter().flat_map(|report| &report.stats.adapters).filter(|adapter| is_in(adapter));
        let names = adapters.filter_map(|adapter| names.get(&adapter.adapter)).flatten();
        // A comma inside a name would split it.
        let mut seen = HashSet::new();
        let names = names.filter(|name| seen.insert(*name)).take(MAX_NAMED);
        let names: Vec<String> = names.map(|name| name.replace(',', "_")).collect();
        names.join(",")
    };
    let values =
        [max_lora.to_string(), list(|adapter| adapter.running > 0), list(|adapter| adapter.waiting > 0)];
    let labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"];
    write_head(out, NAME, MetricKind::Gauge, HELP);
    let labels = label_list(&labels, &values.into(), &[]);
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{NAME}{{{labels}}} {}", seconds_since_1970());
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use shmproto::message::Stats;

    use super::*;

    #[test]
    fn the_lists_name_adapters_in_use_alone_and_at_most_256_of_them() {
        let adapter = |number: u16| {
            let mut id = [0; 32];
            id[..2].copy_from_slice(&number.to_le_bytes());
            id
        };
        let stats = |number: u16, running| AdapterStats {
            adapter: adapter(number),
            rank: 8,
            bytes: 1,
            running,
            waiting: 0,
            device_bytes: 0,
            cold_starts: 0,
            load_wait_us: 0,
            rank_rows_device: 0,
            rank_rows_workers: 0,
            rank_rows_executor: 0,
            drafted: 0,
            accepted: 0,
            least_confidence: 0.5,
        };
        let mut adapters: Vec<_> = (0..300).map(|number| stats(number, 1)).collect();
        adapters.push(AdapterStats { waiting: 2, ..stats(300, 0) });
        adapters.push(stats(301, 0));
        let names = (0..302).map(|number| (adapter(number), vec![format!("a{number}")])).collect();
        let mut out = String::new();
        let stats = Arc::new(Stats { adapters, ..Stats::default() });
        write(&mut out, 4, &[LastStats::of(stats)], &names);
        let line = out.lines().last().unwrap();
        let running = line.split("running_lora_adapters=\"").nth(1).unwrap().split('"').next().unwrap();
        assert_eq!(running.split(',').count(), MAX_NAMED);
        assert!(
            line.contains("{max_lora=\"4\"") && line.contains("waiting_lora_adapters=\"a300\"}"),
            "{line}"
        );
        assert!(!line.contains("a301"));
    }
}
