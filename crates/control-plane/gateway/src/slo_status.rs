//! Report of service classes for `/v1/status`: load, served tokens, and SLO outcomes.

use std::num::NonZeroU32;

use control_protocol::status::classes::{ClassStatus, ClassTenant, ObjectiveStatus};

use crate::{
    admission_queue::TenantQueueStats,
    app::App,
    service_classes::{ClassId, ClassState, Objective, SloOutcome},
};

/// Reports all classes with their tenants.
#[must_use]
pub(crate) fn status(app: &App) -> Vec<ClassStatus> {
    let tenants = app.admission.stats();
    app.classes.all().map(|(id, class)| class_status(id, class, &tenants)).collect()
}

fn class_status(id: ClassId, class: &ClassState, tenants: &[TenantQueueStats]) -> ClassStatus {
    let settings = &class.settings;
    let [requests, throttled, tokens] = class.tally.counts();
    let own = || tenants.iter().filter(|tenant| tenant.principal.class == id);
    let each = own().map(|tenant| ClassTenant {
        tenant: tenant.principal.tenant.to_string(),
        waiting: tenant.waiting,
        tokens: tenant.served_tokens,
    });
    ClassStatus {
        name: settings.name.clone(),
        weight: settings.weight.get(),
        priority: settings.priority,
        requests_per_min: settings.requests_per_min.map(NonZeroU32::get),
        tokens_per_min: settings.tokens_per_min.map(NonZeroU32::get),
        requests,
        throttled,
        tokens,
        waiting: own().map(|tenant| tenant.waiting).sum(),
        ttft: objective(class, Objective::FirstToken, settings.ttft_ms),
        tpot: objective(class, Objective::PerToken, settings.tpot_ms),
        tenants: each.collect(),
    }
}

fn objective(class: &ClassState, objective: Objective, promised_ms: Option<NonZeroU32>) -> ObjectiveStatus {
    let count = |outcome| class.tally.promises(objective, outcome);
    ObjectiveStatus {
        promised_ms: promised_ms.map(NonZeroU32::get),
        mean_ms: class.tally.mean(objective).map(|mean| mean.as_secs_f64() * 1e3),
        met: count(SloOutcome::Met),
        missed: count(SloOutcome::Missed),
        refused: count(SloOutcome::Refused),
    }
}
