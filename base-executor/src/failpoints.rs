//! Failpoints of this process; see the crate `failpoint`.

/// Failpoints of the executor and of its forward pass.
pub const FAILPOINTS: &[&str] = &[
    // Start.
    "executor.after_bind",
    "executor.before_weights",
    "executor.after_weights",
    "executor.hello",
    "executor.welcome",
    // Requests.
    "executor.admission",
    "executor.cold_start",
    "executor.cold_waits",
    "executor.admitted",
    "executor.prefill_chunk",
    "executor.decode",
    "executor.before_step",
    "forward.after_qkv",
    "forward.after_attention",
    "forward.after_o",
    "forward.after_gate_up",
    "forward.after_down",
    "forward.head",
    "executor.after_step_before_outputs",
    "executor.after_outputs",
    "executor.after_preempt",
    "executor.prefix_evicted",
    "executor.cancel",
    "executor.retire",
    "executor.fetch_waits",
    "executor.gateway_gone",
    // Adapters and KV blocks.
    "executor.adapter_read",
    "executor.adapter_claimed",
    "executor.adapter_prepared",
    "executor.adapter_inserted",
    "executor.block_arrived",
    "executor.block_back",
    "executor.block_read",
    "executor.block_taken",
    "executor.block_written",
    "executor.adapter_arrived",
    "executor.adapter_evicted",
    "executor.unload_begun",
    "executor.unload_done",
    // Workers.
    "executor.worker_hello",
    "executor.worker_seated",
    "executor.image_offered",
    "executor.before_post",
    "executor.after_post",
    "executor.slices_collected",
    "executor.worker_lost",
    // Exit.
    "executor.drain_begun",
    "executor.drain_done",
];

/// Failpoints of structured output.
pub const GRAMMAR_FAILPOINTS: &[&str] = &["executor.grammar_look", "executor.sits_out"];

/// Failpoints of the GPU bridge, which a pass on the CPU does not reach.
pub const BRIDGE_FAILPOINTS: &[&str] = &["executor.bridge_asked", "executor.bridge_before_answer"];

/// Failpoints of the layer service, which only split clients reach.
pub const LAYER_FAILPOINTS: &[&str] = &[
    "layer.session_opened",
    "layer.channel_made",
    "layer.call_taken",
    "layer.before_batch",
    "layer.after_batch",
    "layer.joined_pass",
    "layer.before_answer",
    "layer.session_left",
];

/// Failpoints of the members of a device group.
pub const GROUP_FAILPOINTS: &[&str] =
    &["member.hello", "member.before_weights", "member.loaded", "member.call_taken", "member.before_finish"];

/// Failpoints of streamed weights.
pub const WEIGHT_FAILPOINTS: &[&str] = &["weights.packed_matrix", "weights.before_rename", "weights.read"];

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::{
        BRIDGE_FAILPOINTS, FAILPOINTS, GRAMMAR_FAILPOINTS, GROUP_FAILPOINTS, LAYER_FAILPOINTS,
        WEIGHT_FAILPOINTS,
    };

    /// Collects every failpoint name in the source files below `folder`.
    fn mentioned(folder: &Path, found: &mut BTreeSet<String>) {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                mentioned(&path, found);
            } else if !path.ends_with("base-executor/src/failpoints.rs") {
                let source = fs::read_to_string(&path).unwrap();
                let literals = source.split('"').filter(|literal| {
                    let word = literal.split_once('.').filter(|(area, _)| {
                        ["executor", "forward", "layer", "member", "weights"].contains(area)
                    });
                    word.is_some_and(|(_, name)| {
                        name.bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase())
                    })
                });
                found.extend(literals.filter(|name| *name != "executor.sock").map(str::to_owned));
            }
        }
    }

    #[test]
    fn the_table_of_failpoints_names_what_is_in_the_source_and_nothing_else() {
        let mut found = BTreeSet::new();
        for folder in [
            "src",
            "../crates/data-plane/model/src",
            "../crates/data-plane/kv-cache/src",
            "../crates/data-plane/layer-service/src",
        ] {
            mentioned(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut found);
        }
        let all = [
            FAILPOINTS,
            GRAMMAR_FAILPOINTS,
            BRIDGE_FAILPOINTS,
            GROUP_FAILPOINTS,
            LAYER_FAILPOINTS,
            WEIGHT_FAILPOINTS,
        ]
        .concat();
        let table: BTreeSet<String> = all.iter().map(|&name| name.to_owned()).collect();
        assert_eq!(found, table);
        assert_eq!(table.len(), all.len(), "each is named once");
    }
}
