//! Two sessions that must never meet in one executor.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::SeqCst},
};

use shmproto::layer::control::SessionOpened;

use super::Session;
use crate::error::CallError;

/// One of two sessions, and which executors either of them is at. What an executor says of itself tells mistakes, not malice.
#[derive(Debug, Clone)]
pub(crate) struct DistinctExecutors {
    instances: Arc<[AtomicU64; 2]>,
    own: usize,
}

impl DistinctExecutors {
    /// Keeps two sessions apart from now on, wherever they connect to.
    ///
    /// # Errors
    /// They are at one executor.
    pub(crate) fn keep(first: &mut Session, second: &mut Session) -> Result<(), CallError> {
        let instances = Arc::new([first.opened.instance, second.opened.instance].map(AtomicU64::new));
        for (own, session) in [first, second].into_iter().enumerate() {
            let apart = Self { instances: Arc::clone(&instances), own };
            apart.register_instance(&session.opened)?;
            session.apart = Some(apart);
        }
        Ok(())
    }

    /// The session goes on with the executor that has `opened` it.
    ///
    /// # Errors
    /// The other session is there.
    pub(super) fn register_instance(&self, opened: &SessionOpened) -> Result<(), CallError> {
        self.instances[self.own].store(opened.instance, SeqCst);
        if self.instances[1 - self.own].load(SeqCst) == opened.instance {
            return Err(CallError::SameExecutor { instance: opened.instance });
        }
        Ok(())
    }
}
