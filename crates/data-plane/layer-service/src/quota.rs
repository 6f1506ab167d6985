//! Limits of waiting rows and of rows per second, per tenant. Only the compute thread uses them.

use std::{collections::BTreeMap, time::Instant};

use super::{Tenant, settings::Quotas};

/// Retry delay of a call that was refused for waiting rows: some batches later.
const RETRY_MS: u32 = 10;

/// A call exceeds the tenant's quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverQuota {
    /// Retry delay, in milliseconds.
    pub retry_after_ms: u32,
}

/// Row quotas of all tenants.
#[derive(Debug)]
pub struct RowQuotas {
    max_waiting: u64,
    per_second: Option<f64>,
    tenants: BTreeMap<Tenant, TenantRows>,
}

#[derive(Debug, Clone, Copy)]
struct TenantRows {
    waiting: u64,
    /// Rows that the tenant may send now; negative after a large call, which is admitted whole.
    credit: f64,
    at: Instant,
}

impl RowQuotas {
    /// Makes quotas without any waiting rows.
    #[must_use]
    pub fn new(quotas: &Quotas) -> Self {
        let per_second = quotas.tenant_rows_per_s.map(f64::from);
        Self { max_waiting: quotas.tenant_rows.into(), per_second, tenants: BTreeMap::new() }
    }

    /// Admits a call of `rows` rows.
    ///
    /// # Errors
    /// Fails if the tenant has too many rows waiting, or has sent too many lately.
    pub fn admit(&mut self, tenant: &Tenant, rows: u32, now: Instant) -> Result<(), OverQuota> {
        let per_second = self.per_second;
        let fresh = TenantRows { waiting: 0, credit: per_second.unwrap_or(0.0), at: now };
        if !self.tenants.contains_key(tenant) {
            self.tenants.insert(tenant.clone(), fresh);
        }
        let Some(own) = self.tenants.get_mut(tenant) else { return Ok(()) };
        if own.waiting + u64::from(rows) > self.max_waiting {
            return Err(OverQuota { retry_after_ms: RETRY_MS });
        }
        if let Some(per_second) = per_second {
            own.earn(per_second, now);
            if own.credit <= 0.0 {
                let seconds = (1.0 - own.credit) / per_second;
                // A float above the integer range becomes the largest integer.
                return Err(OverQuota { retry_after_ms: (seconds * 1e3).ceil() as u32 });
            }
            own.credit -= f64::from(rows);
        }
        own.waiting += u64::from(rows);
        Ok(())
    }

    /// Releases the rows of a call that does not wait any more.
    pub fn release(&mut self, tenant: &Tenant, rows: u32) {
        if let Some(own) = self.tenants.get_mut(tenant) {
            own.waiting = own.waiting.saturating_sub(rows.into());
        }
    }

    /// Removes tenants without waiting rows and with full credit, which equal new ones.
    pub fn sweep(&mut self, now: Instant) {
        let per_second = self.per_second;
        self.tenants.retain(|_, own| {
            let is_spent = per_second.is_some_and(|per_second| {
                own.earn(per_second, now);
                own.credit < per_second
            });
            own.waiting > 0 || is_spent
        });
    }
}

impl TenantRows {
    /// Adds credit at an even rate, up to that of one second.
    fn earn(&mut self, per_second: f64, now: Instant) {
        let since = now.saturating_duration_since(self.at).as_secs_f64();
        self.credit = (self.credit + since * per_second).min(per_second);
        self.at = now;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn quotas(tenant_rows: u32, tenant_rows_per_s: Option<u32>) -> RowQuotas {
        RowQuotas::new(&Quotas { tenant_rows, tenant_rows_per_s, ..Quotas::default() })
    }

    #[test]
    fn a_tenants_waiting_rows_are_bounded_and_anothers_are_not_touched() {
        let (mut quotas, now) = (quotas(10, None), Instant::now());
        let (a, b) = (Tenant::new("a"), Tenant::new("b"));
        assert!(quotas.admit(&a, 8, now).is_ok());
        assert_eq!(quotas.admit(&a, 3, now), Err(OverQuota { retry_after_ms: RETRY_MS }));
        assert!(quotas.admit(&b, 10, now).is_ok());
        quotas.release(&a, 8);
        assert!(quotas.admit(&a, 10, now).is_ok());
    }

    #[test]
    fn rows_a_second_are_lent_once_and_paid_back_before_the_next() {
        let (mut quotas, now) = (quotas(10_000, Some(100)), Instant::now());
        let a = Tenant::new("a");
        assert!(quotas.admit(&a, 300, now).is_ok());
        let refused = quotas.admit(&a, 1, now).unwrap_err();
        assert_eq!(refused.retry_after_ms, 2010);
        let early = now + Duration::from_millis(1990);
        assert!(quotas.admit(&a, 1, early).is_err());
        assert!(quotas.admit(&a, 1, now + Duration::from_millis(2010)).is_ok());
    }

    #[test]
    fn a_tenant_that_owes_rows_is_not_forgotten() {
        let (mut quotas, now) = (quotas(10_000, Some(100)), Instant::now());
        let a = Tenant::new("a");
        assert!(quotas.admit(&a, 300, now).is_ok());
        quotas.release(&a, 300);
        quotas.sweep(now);
        assert!(quotas.admit(&a, 1, now).is_err());
        quotas.sweep(now + Duration::from_secs(10));
        assert!(quotas.tenants.is_empty());
    }
}
