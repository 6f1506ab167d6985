//! Serves the adapter of a model: its weights pass from the trainer to the registry through memory.
//!
//! 1. The trainer replies with PEFT's configuration, and sends the weight file after it.
//! 2. The registry hashes the file while it arrives: in memory for a snapshot, which ends with its model; in
//!    the state directory for an adapter with a name.
//! 3. The executor loads the file. An adapter with a name is on disk and in the database before the answer.

use std::{io, path::PathBuf, sync::Arc};

use control_protocol::training::session::{CommandRefusal, ExportedAdapter};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, copy, sink};

use super::{
    checkpoint_path,
    future_result::FutureResult,
    trainer::{ExportedWeights, Trainer},
    worker::{ModelWorker, from_now},
};
use crate::{
    adapters::{
        Durability, LoadRequest, Replace, Terms,
        push::{ArrivingPush, PushRequest},
    },
    errors::ApiError,
};

/// Maximum number of served snapshots per model; the oldest is unloaded.
const MAX_SNAPSHOTS: usize = 4;
/// Bytes that are read from a trainer at once.
const READ_BYTES: usize = 64 << 10;

impl ModelWorker {
    /// Serves the adapter under `name`. The outer error means that the trainer has ended.
    pub(super) async fn publish(
        &mut self,
        trainer: &mut Trainer,
        name: String,
        answer: Value,
        ttl_s: Option<u64>,
    ) -> io::Result<Result<FutureResult, CommandRefusal>> {
        let (adapter, mut weights) = match trainer.export().await? {
            Ok(exported) => exported,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let push = match self.begin(&name, adapter, ttl_s) {
            Ok(push) => receive(push, &mut weights).await?,
            Err(error) => Err(error),
        };
        // The rest of a refused weight file would be read as the next reply.
        copy(&mut weights, &mut sink()).await?;
        let served = match push {
            Ok(push) => self.means.registry.end_made(push).await.map_err(ApiError::from),
            Err(error) => Err(error),
        };
        Ok(served.map_err(CommandRefusal::from).map(|_| {
            self.note_snapshot(name);
            FutureResult::Json(answer)
        }))
    }

    fn begin(
        &self,
        name: &str,
        adapter: ExportedAdapter,
        ttl_s: Option<u64>,
    ) -> Result<ArrivingPush, ApiError> {
        let serving = self.means.status.borrow().serving()?;
        let registry = &self.means.registry;
        let is_snapshot = checkpoint_path::run_of_snapshot(name).is_some();
        let expected_bytes = adapter.weight_bytes.saturating_add(adapter.config.len() as u64);
        let request = PushRequest {
            load: LoadRequest {
                name: name.to_owned(),
                path: PathBuf::from(name),
                replace: Replace::Always,
                tenant: Some(self.tenant.to_string()),
                pinned: None,
            },
            durability: if is_snapshot { Durability::Ephemeral } else { Durability::Durable },
            config: Some(adapter.config),
        };
        let made_by = is_snapshot.then(|| registry.instance().to_owned());
        let terms = Terms { made_by, expires_at: ttl_s.map(from_now), publication: None };
        Ok(registry.begin_made(request, expected_bytes, (&*serving).into(), terms)?)
    }

    /// Remembers a snapshot, and unloads the oldest if there are too many.
    fn note_snapshot(&mut self, name: String) {
        if checkpoint_path::run_of_snapshot(&name).is_none() {
            return;
        }
        self.snapshots.push_back(name);
        if self.snapshots.len() > MAX_SNAPSHOTS
            && let Some(oldest) = self.snapshots.pop_front()
        {
            // Requests that sample from the snapshot may finish; the model does not wait for them.
            let registry = Arc::clone(&self.means.registry);
            tokio::spawn(async move { registry.unload(&oldest, None).await });
        }
    }
}

/// Receives a weight file. The outer error means that the trainer has ended.
async fn receive(
    mut push: ArrivingPush,
    weights: &mut ExportedWeights<'_>,
) -> io::Result<Result<ArrivingPush, ApiError>> {
    let mut buffer = vec![0; READ_BYTES];
    while weights.limit() > 0 {
        let count = weights.read(&mut buffer).await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        push = match push.take(&buffer[..count]).await {
            Ok(push) => push,
            Err(error) => return Ok(Err(ApiError::from(error))),
        };
    }
    Ok(Ok(push))
}
