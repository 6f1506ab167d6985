//! Usage of the base layers by split clients, as `/v1/status` reports it.

use control_protocol::status::layers::{
    LayerServiceStatus, LayerUsage, RowCounts, SplitSessionStatus, TenantLayerUsage,
};
use shmproto::{
    layer::{CallClass, control::SessionStats},
    message::{LayerRoute, LayerSession, LayerStats, TenantUse},
};

/// Names of the call classes, in the order of [`CallClass`].
pub(crate) const CLASSES: [&str; 5] = ["decode", "verify", "prefill", "training", "noise"];
const _: () = assert!(CLASSES.len() == CallClass::ALL.len(), "every class has a name");

/// Name of a route in reports.
#[must_use]
pub(crate) fn route(route: LayerRoute) -> &'static str {
    match route {
        LayerRoute::SharedMemory => "shared memory",
        LayerRoute::Ipc => "ipc",
        LayerRoute::Tls => "tls",
    }
}

/// Reports the stats of the layer service.
#[must_use]
pub(crate) fn status(stats: &LayerStats) -> LayerServiceStatus {
    LayerServiceStatus {
        open: stats.open,
        refused: stats.refused,
        broken: stats.broken,
        batches: stats.batches,
        joined_rows: stats.joined_rows,
        used: used(&stats.used),
        tenants: stats.tenants.iter().map(tenant).collect(),
        sessions: stats.sessions.iter().map(session).collect(),
    }
}

fn tenant(tenant: &TenantUse) -> TenantLayerUsage {
    TenantLayerUsage {
        tenant: tenant.tenant.clone(),
        waiting_rows: tenant.waiting_rows,
        used: used(&tenant.used),
    }
}

fn session(session: &LayerSession) -> SplitSessionStatus {
    SplitSessionStatus {
        session: session.session,
        tenant: session.tenant.clone(),
        name: session.name.clone(),
        masking: session.masking.clone(),
        route: route(session.route).to_owned(),
        waiting_rows: session.waiting_rows,
        slab_bytes: session.slab_bytes,
        used: used(&session.used),
    }
}

fn used(used: &SessionStats) -> LayerUsage {
    let [decode, verify, prefill, training, noise] = used.rows;
    LayerUsage {
        calls: used.calls,
        refused: used.refused,
        rows: RowCounts { decode, verify, prefill, training, noise },
        bytes_in: used.bytes_in,
        bytes_out: used.bytes_out,
        wait_ms: millis(used.wait_us),
        compute_ms: millis(used.compute_us),
        mean_batch_rows: mean(used.batch_rows, used.calls),
    }
}

fn millis(us: u64) -> f64 {
    float(us) / 1e3
}

fn mean(sum: u64, count: u64) -> f64 {
    if count == 0 { 0.0 } else { float(sum) / float(count) }
}

#[expect(clippy::cast_precision_loss, reason = "for people to read; counts stay below 2^53")]
fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn before_anything_happened_nothing_is_divided_by_nothing() {
        let used = status(&LayerStats::default()).used;
        assert_eq!((used.mean_batch_rows, used.rows.total()), (0.0, 0));
    }
}
