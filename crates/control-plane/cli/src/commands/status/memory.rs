//! Status of the memory tiers of KV cache and adapters.

use control_protocol::status::{
    BlockPoolStatus, HostMemoryStatus, MemoryStatus, StreamedWeightStatus, TierSlotStatus,
};

use crate::terminal::table::{percent, size};

/// Width of the bar in characters.
const BAR: u64 = 24;

/// Formats the block pool as a bar: `#` running, `=` prefix cache ("history"), `a` adapters, `.` free.
pub(super) fn device(memory: &MemoryStatus) -> String {
    let BlockPoolStatus { total, running, history, adapters, .. } = memory.device;
    if total == 0 {
        return "-".into();
    }
    let parts = [('#', running, "running"), ('=', history, "history"), ('a', adapters, "adapters")];
    let mut bar = String::new();
    let mut so_far = 0;
    for (sign, blocks, _) in parts {
        so_far += blocks;
        // Segment ends are rounded up, so the parts add up to the used share, and any use shows at
        // least one character.
        let end = (so_far * BAR).div_ceil(total).min(BAR);
        bar.extend(std::iter::repeat_n(sign, usize::try_from(end).unwrap_or(0).saturating_sub(bar.len())));
    }
    let free = usize::try_from(BAR).unwrap_or(0).saturating_sub(bar.len());
    bar.extend(std::iter::repeat_n('.', free));
    let bytes = |blocks: u64| size(blocks.saturating_mul(memory.block_bytes));
    let named = parts.iter().filter(|(_, blocks, _)| *blocks > 0);
    let mut words: Vec<String> =
        named.map(|(_, blocks, name)| format!("{} {name}", bytes(*blocks))).collect();
    words.push(format!("of {}", bytes(total)));
    format!("[{bar}] {}", words.join(", "))
}

/// Formats the host memory that the executor holds, by kind.
pub(super) fn held(held: &HostMemoryStatus) -> String {
    let named = held.uses().into_iter().filter(|(_, bytes)| *bytes > 0);
    let words = named.map(|(name, bytes)| format!("{} {name}", size(bytes)));
    words.chain([format!("of {}", size(held.limit_bytes))]).collect::<Vec<_>>().join(", ")
}

/// Formats where the weights are and how much was read from disk.
pub(super) fn weights(weights: StreamedWeightStatus) -> String {
    let StreamedWeightStatus { read_bytes, read_ms, waited_ms, bytes_per_token } = weights;
    if read_bytes == 0 {
        return "in memory".into();
    }
    let a_token = bytes_per_token.map(|bytes| format!("{} for each token generated", size(bytes)));
    let hidden = (read_ms > 0.0).then(|| {
        let part = (1.0 - waited_ms / read_ms).clamp(0.0, 1.0);
        format!("{} of the time hidden behind computing", percent(part))
    });
    let read = format!("{} read from the disk", size(read_bytes));
    [Some(read), a_token, hidden].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Formats the use of the tiers below the device, and the copies back from them.
pub(super) fn below(memory: &MemoryStatus) -> String {
    let bytes = |blocks: u64| size(blocks.saturating_mul(memory.block_bytes));
    let tier = |name: &str, slots: &TierSlotStatus| {
        (slots.total > 0).then(|| format!("{name} {} of {}", bytes(slots.used), bytes(slots.total)))
    };
    let tiers: Vec<String> =
        [tier("host", &memory.host), tier("disk", &memory.disk)].into_iter().flatten().collect();
    if tiers.is_empty() {
        return "nothing is kept below the device; [memory].disk keeps it, also for the next start".into();
    }
    let back = memory.blocks.fetched_host + memory.blocks.fetched_disk;
    let came = (back > 0).then(|| format!("{} came back in {:.1} ms", bytes(back), memory.kv_wait_ms));
    let lost = (memory.blocks.lost > 0).then(|| format!("{} found no room", bytes(memory.blocks.lost)));
    let failed = (memory.blocks.failed > 0)
        .then(|| format!("{} copies failed; holobiont logs executor says why", memory.blocks.failed));
    tiers.into_iter().chain([came, lost, failed].into_iter().flatten()).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_bar_shows_every_part_and_adds_up() {
        let memory: MemoryStatus = serde_json::from_value(json!({
            "block_bytes": 1024, "device": {"total": 24, "running": 6, "history": 12, "adapters": 0},
            "disk": {"total": 100, "used": 10}, "blocks": {"fetched_disk": 3, "lost": 1}, "kv_wait_ms": 2.5,
        }))
        .unwrap();
        assert_eq!(
            device(&memory),
            "[######============......] 6.00 KiB running, 12.00 KiB history, of 24.00 KiB"
        );
        assert_eq!(
            below(&memory),
            "disk 10.00 KiB of 100.00 KiB; 3.00 KiB came back in 2.5 ms; 1.00 KiB found no room"
        );
        assert_eq!(device(&MemoryStatus::default()), "-");
        let bytes = json!({"held": {"limit_bytes": 4096, "weights_bytes": 1024, "clients_bytes": 2048}});
        let memory: MemoryStatus = serde_json::from_value(bytes).unwrap();
        assert_eq!(held(&memory.held), "1.00 KiB weights, 2.00 KiB clients, of 4.00 KiB");
    }

    #[test]
    fn weights_from_a_disk_are_told_by_token_and_by_what_of_the_reading_was_hidden() {
        let streamed = json!({"weights": {"read_bytes": 4096, "read_ms": 8.0, "waited_ms": 2.0, "bytes_per_token": 1024}});
        let memory: MemoryStatus = serde_json::from_value(streamed).unwrap();
        assert_eq!(
            weights(memory.weights),
            "4.00 KiB read from the disk, 1.00 KiB for each token generated, 75 % of the time hidden behind computing"
        );
        assert_eq!(weights(MemoryStatus::default().weights), "in memory");
    }
}
