//! Two sessions that must never use the same executor.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::SeqCst},
};

use shmproto::layer::control::SessionOpened;

use super::Session;
use crate::error::CallError;

/// Shared record of the executors of two sessions. An executor reports its own instance number, so this
/// detects mistakes, not malice.
#[derive(Debug, Clone)]
pub(crate) struct DistinctExecutors {
    instances: Arc<[AtomicU64; 2]>,
    own: usize,
}

impl DistinctExecutors {
    /// Keeps two sessions at different executors from now on, also after reconnections.
    ///
    /// # Errors
    /// Fails if both sessions use the same executor.
    pub(crate) fn keep(first: &mut Session, second: &mut Session) -> Result<(), CallError> {
        let instances = Arc::new([first.opened.instance, second.opened.instance].map(AtomicU64::new));
        for (own, session) in [first, second].into_iter().enumerate() {
            let apart = Self { instances: Arc::clone(&instances), own };
            apart.register_instance(&session.opened)?;
            session.apart = Some(apart);
        }
        Ok(())
    }

    /// Registers that the session continues with the executor that `opened` it.
    ///
    /// # Errors
    /// Fails if the other session uses the same executor.
    pub(super) fn register_instance(&self, opened: &SessionOpened) -> Result<(), CallError> {
        self.instances[self.own].store(opened.instance, SeqCst);
        if self.instances[1 - self.own].load(SeqCst) == opened.instance {
            return Err(CallError::SameExecutor { instance: opened.instance });
        }
        Ok(())
    }
}
