//! Report of service classes for `/v1/status`: load, served tokens, and SLO outcomes.

use std::num::NonZeroU32;

use serde_json::{Value, json};

use crate::{
    admission_queue::TenantQueueStats,
    app::App,
    service_classes::{ClassId, ClassState, Objective, SloOutcome},
};

/// Reports all classes with their tenants as JSON.
#[must_use]
pub(crate) fn status(app: &App) -> Value {
    let tenants = app.turns.figures();
    app.classes.all().map(|(id, class)| status_json(id, class, &tenants)).collect()
}

fn status_json(id: ClassId, class: &ClassState, tenants: &[TenantQueueStats]) -> Value {
    let settings = &class.settings;
    let [requests, throttled, tokens] = class.tally.counts();
    let own = || tenants.iter().filter(|tenant| tenant.principal.class == id);
    let each = own().map(|tenant| {
        json!({
            "tenant": &*tenant.principal.tenant, "waiting": tenant.waiting, "tokens": tenant.served_tokens,
        })
    });
    json!({
        "name": settings.name,
        "weight": settings.weight,
        "priority": settings.priority,
        "requests_per_min": settings.requests_per_min,
        "tokens_per_min": settings.tokens_per_min,
        "requests": requests,
        "throttled": throttled,
        "tokens": tokens,
        "waiting": own().map(|tenant| tenant.waiting).sum::<usize>(),
        "ttft": objective(class, Objective::FirstToken, settings.ttft_ms),
        "tpot": objective(class, Objective::PerToken, settings.tpot_ms),
        "tenants": each.collect::<Vec<_>>(),
    })
}

fn objective(class: &ClassState, objective: Objective, promised_ms: Option<NonZeroU32>) -> Value {
    let count = |outcome| class.tally.promises(objective, outcome);
    json!({
        "promised_ms": promised_ms,
        "mean_ms": class.tally.mean(objective).map(|mean| mean.as_secs_f64() * 1e3),
        "met": count(SloOutcome::Met),
        "missed": count(SloOutcome::Missed),
        "refused": count(SloOutcome::Refused),
    })
}
