//! The life of a batch: its check, its lines, and its result files. Each step can be repeated after a crash.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::watch,
    task::{JoinError, JoinSet},
    time::sleep,
};

use super::{
    BatchError, Batches, INPUT, KEPT_BATCHES, LiveBatch, failed,
    input::{self, InputLine, InputReader},
    line::{LineContext, LineService, expired},
    records::{BatchRecord, BatchStatus},
    results::ResultLog,
};
use crate::{
    clock::seconds_since_1970,
    lock::lock,
    thread,
    training::{TrainingError, files::FileSpec, records::Purpose},
};

/// Pause before the work on a batch is repeated after an error of this host.
const RETRY_PAUSE: Duration = Duration::from_secs(5);
/// Interval at which expired result files are deleted.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);
/// Bytes of lines that are read from the input file at once.
const READ_AHEAD_BYTES: usize = 256 << 10;
/// Pause before a line is read again whose bytes exceed its tenant's memory.
const MEMORY_PAUSE: Duration = Duration::from_secs(1);
/// Time for a slot that is waited for without a limit.
const FOREVER: Duration = Duration::from_secs(u64::MAX >> 34);
/// Expired lines whose results are written at once.
const EXPIRED_AT_ONCE: usize = 1024;

/// Reason why no further lines run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinesEnd {
    Done,
    Cancelled,
    Expired,
}

impl Batches {
    /// Works on all batches until the returned future is dropped.
    pub(crate) async fn run(self: Arc<Self>, service: Arc<dyn LineService>) {
        let mut tasks = JoinSet::new();
        tasks.spawn(Arc::clone(&self.slots).follow());
        tasks.spawn(Arc::clone(&self).sweep_outputs());
        loop {
            for id in self.take_unattended() {
                tasks.spawn(Arc::clone(&self).attend(id, Arc::clone(&service)));
            }
            tokio::select! {
                () = self.due.notified() => {}
                Some(ended) = tasks.join_next() => {
                    if let Err(error) = ended {
                        tracing::error!(%error, "the work on a batch failed; the next start continues it");
                    }
                }
            }
        }
    }

    fn take_unattended(&self) -> Vec<String> {
        let mut live = lock(&self.live);
        let unattended = |(id, batch): (&String, &mut LiveBatch)| {
            (!std::mem::replace(&mut batch.is_attended, true)).then(|| id.clone())
        };
        live.iter_mut().filter_map(unattended).collect()
    }

    /// Works on a batch until it ends.
    async fn attend(self: Arc<Self>, id: String, service: Arc<dyn LineService>) {
        let Some(batch) = lock(&self.live).get(&id).map(|live| live.record.subscribe()) else { return };
        while let Err(error) = self.advance(&id, batch.clone(), &service).await {
            tracing::warn!(batch = id, %error, "the work on a batch failed; trying again");
            sleep(RETRY_PAUSE).await;
        }
        let ended = lock(&self.live).remove(&id);
        let directory = self.batch_directory(&id);
        let removed = thread::run("batch-files", move || std::fs::remove_dir_all(directory)).await;
        if !matches!(removed, Ok(Ok(()))) {
            tracing::debug!(batch = id, "cannot remove the directory of a batch; the next start tries again");
        }
        if let Some(ended) = ended {
            let batch = ended.record.borrow().clone();
            self.counters.ended(batch.status);
            self.forget_old(&batch.tenant).await;
        }
    }

    /// Takes the batch through its remaining statuses.
    async fn advance(
        &self,
        id: &str,
        mut batch: watch::Receiver<BatchRecord>,
        service: &Arc<dyn LineService>,
    ) -> Result<(), BatchError> {
        loop {
            let now = batch.borrow_and_update().clone();
            match now.status {
                BatchStatus::Validating => self.validate(now).await?,
                BatchStatus::InProgress => self.compute(id, batch.clone(), service).await?,
                BatchStatus::Finalizing | BatchStatus::Cancelling => self.finalize(now).await?,
                _ => return Ok(()),
            }
        }
    }

    /// Checks the input file, without an order among batches, because a check takes only seconds.
    async fn validate(&self, batch: BatchRecord) -> Result<(), BatchError> {
        let permit = self.validations.acquire().await;
        let (path, endpoint) = (self.batch_directory(&batch.id).join(INPUT), batch.spec.endpoint);
        let (place, max_body_bytes) = (path.clone(), self.max_body_bytes);
        let check = move || input::validate(&place, endpoint, max_body_bytes);
        let checked = thread::run("batch-check", check).await?.map_err(failed("reading", &path))?;
        drop(permit);
        let entered = self.change(&batch.id, |batch| {
            // The caller may have cancelled the batch meanwhile.
            if batch.status == BatchStatus::Validating {
                match checked {
                    Ok(lines) => {
                        batch.counts.total = lines;
                        batch.enter(BatchStatus::InProgress);
                    }
                    Err(faults) => {
                        batch.faults = faults;
                        batch.enter(BatchStatus::Failed);
                    }
                }
            }
            Ok(())
        });
        entered.await.map(drop)
    }

    /// Computes the lines without a result, until all have one, the window ends, or the batch is cancelled.
    async fn compute(
        &self,
        id: &str,
        mut changes: watch::Receiver<BatchRecord>,
        service: &Arc<dyn LineService>,
    ) -> Result<(), BatchError> {
        let known = changes.borrow().clone();
        let tenant: Arc<str> = known.tenant.as_str().into();
        let _slot = tokio::select! {
            slot = self.running.acquire(&tenant, FOREVER) => slot,
            _ = changes.wait_for(|batch| batch.status != BatchStatus::InProgress) => return Ok(()),
            () = sleep(until(known.expires_at)) => None,
        };
        let context = Arc::new(LineContext {
            tenant,
            role: known.role.into(),
            endpoint: known.spec.endpoint,
            service: Arc::clone(service),
            slots: Arc::clone(&self.slots),
            counters: Arc::clone(&self.counters),
        });
        let mut run = BatchRun::open(self, known, context).await?;
        let end = run.compute_lines(changes).await?;
        drop(run);
        if end == LinesEnd::Cancelled {
            return Ok(());
        }
        let finalizing = self.change(id, |batch| {
            if batch.status == BatchStatus::InProgress {
                batch.is_late = end == LinesEnd::Expired;
                batch.enter(BatchStatus::Finalizing);
            }
            Ok(())
        });
        finalizing.await.map(drop)
    }

    /// Stores the result files and ends the batch.
    async fn finalize(&self, batch: BatchRecord) -> Result<(), BatchError> {
        let directory = self.batch_directory(&batch.id);
        let (known, max_body_bytes) = (batch.clone(), self.max_body_bytes);
        let place = directory.clone();
        let work = move || -> std::io::Result<ResultLog> {
            let mut log = ResultLog::open(&place, known.counts.total)?;
            if known.is_late {
                expire_rest(&mut log, &known, &place, max_body_bytes)?;
            }
            Ok(log)
        };
        let log = thread::run("batch-results", work).await?.map_err(failed("writing", &directory))?;
        let [output_file, error_file] = self.keep_files(&batch, &log).await?;
        failpoint::pass("gateway.batch_files_kept");
        let ended = self.change(&batch.id, |batch| {
            (batch.counts, batch.usage) = (log.counts, log.usage);
            (batch.output_file, batch.error_file) = (output_file, error_file);
            batch.enter(match batch.status {
                BatchStatus::Cancelling => BatchStatus::Cancelled,
                _ if batch.is_late => BatchStatus::Expired,
                _ => BatchStatus::Completed,
            });
            Ok(())
        });
        ended.await.map(drop)
    }

    /// Stores the result files; returns their ids.
    async fn keep_files(
        &self,
        batch: &BatchRecord,
        log: &ResultLog,
    ) -> Result<[Option<String>; 2], BatchError> {
        let expires_at = batch.spec.output_ttl_s.map(|ttl_s| seconds_since_1970() + ttl_s);
        let mut kept = [None, None];
        let files = log.files().into_iter().zip(batch.result_ids()).zip(["output", "error"]);
        for (kept, ((path, id), kind)) in kept.iter_mut().zip(files) {
            let Some(path) = path else { continue };
            let content = tokio::fs::File::open(&path).await.map_err(failed("reading", &path))?;
            let name = format!("{}_{kind}.jsonl", batch.id);
            let spec = FileSpec { name, purpose: Purpose::BatchOutput, expires_at };
            *kept = Some(self.training.keep_produced(id, &batch.tenant, spec, content).await?);
        }
        Ok(kept)
    }

    /// Removes the oldest ended batches of a tenant with their result files.
    async fn forget_old(&self, tenant: &str) {
        match self.database.remove_ended_batches(tenant, KEPT_BATCHES).await {
            Ok(old) => {
                for batch in &old {
                    self.remove_outputs(batch).await;
                }
            }
            // The removal is repeated when the tenant's next batch ends.
            Err(error) => tracing::debug!(%error, "cannot remove old batches"),
        }
    }

    /// Deletes the result files of batches at their time.
    async fn sweep_outputs(self: Arc<Self>) {
        loop {
            match self.database.batches_with_expired_outputs(seconds_since_1970()).await {
                Ok(expired) => {
                    for batch in &expired {
                        self.remove_outputs(batch).await;
                    }
                }
                Err(error) => tracing::debug!(%error, "cannot look for expired result files"),
            }
            sleep(SWEEP_INTERVAL).await;
        }
    }

    async fn remove_outputs(&self, batch: &BatchRecord) {
        for file in [&batch.output_file, &batch.error_file].into_iter().flatten() {
            match self.training.remove_file(file, &batch.tenant).await {
                // The tenant may have removed the file before.
                Ok(_) | Err(TrainingError::NoFile(_)) => {}
                Err(error) => return tracing::debug!(%error, file, "cannot delete a result file yet"),
            }
        }
        if let Err(error) = self.database.forget_outputs(&batch.id).await {
            tracing::debug!(%error, "cannot record that result files are deleted");
        }
    }
}

/// The lines of a batch while they run.
struct BatchRun<'a> {
    batches: &'a Batches,
    batch: BatchRecord,
    context: Arc<LineContext>,
    /// `None` only while a thread uses it.
    log: Option<ResultLog>,
    /// `None` once the input file is read to its end.
    input: Option<InputReader>,
    input_path: PathBuf,
    ahead: VecDeque<InputLine>,
    tasks: JoinSet<serde_json::Result<String>>,
}

impl<'a> BatchRun<'a> {
    async fn open(
        batches: &'a Batches,
        batch: BatchRecord,
        context: Arc<LineContext>,
    ) -> Result<Self, BatchError> {
        let directory = batches.batch_directory(&batch.id);
        let input_path = directory.join(INPUT);
        let (path, endpoint, total) = (input_path.clone(), batch.spec.endpoint, batch.counts.total);
        let max_body_bytes = batches.max_body_bytes;
        let open = move || {
            let log = ResultLog::open(&directory, total)?;
            let input = InputReader::open(&path, endpoint, max_body_bytes, log.done.clone())?;
            Ok((log, input))
        };
        let opened = thread::run("batch-results", open).await?;
        let (log, input) = opened.map_err(failed("opening", &input_path))?;
        let (ahead, tasks) = (VecDeque::new(), JoinSet::new());
        let run =
            Self { batches, batch, context, log: Some(log), input: Some(input), input_path, ahead, tasks };
        run.report_progress();
        Ok(run)
    }

    async fn compute_lines(
        &mut self,
        mut changes: watch::Receiver<BatchRecord>,
    ) -> Result<LinesEnd, BatchError> {
        loop {
            self.fill().await?;
            if self.tasks.is_empty() && self.ahead.is_empty() {
                return Ok(LinesEnd::Done);
            }
            let mut end = None;
            let mut results = Vec::new();
            tokio::select! {
                biased;
                _ = changes.wait_for(|batch| batch.status != BatchStatus::InProgress) => {
                    end = Some(LinesEnd::Cancelled);
                }
                () = sleep(until(self.batch.expires_at)) => end = Some(LinesEnd::Expired),
                Some(done) = self.tasks.join_next() => results.push(result_of(done)?),
                () = sleep(MEMORY_PAUSE), if self.tasks.is_empty() => {}
            }
            while let Some(done) = self.tasks.try_join_next() {
                results.push(result_of(done)?);
            }
            self.append(results).await?;
            if let Some(end) = end {
                return Ok(end);
            }
        }
    }

    /// Starts tasks until one more line waits for a slot than there are slots.
    async fn fill(&mut self) -> Result<(), BatchError> {
        while self.tasks.len() <= self.context.slots.limit() {
            if self.ahead.is_empty() {
                self.read_ahead().await?;
            }
            let Some(line) = self.ahead.pop_front() else { return Ok(()) };
            let Ok(memory) = self.batches.memory.reserve(&self.context.tenant, line.body.len()) else {
                self.ahead.push_front(line);
                return Ok(());
            };
            let id = self.batch.line_id(line.number);
            self.tasks.spawn(Arc::clone(&self.context).compute(line, id, memory));
        }
        Ok(())
    }

    async fn read_ahead(&mut self) -> Result<(), BatchError> {
        let Some(mut input) = self.input.take() else { return Ok(()) };
        let read = move || input.read_ahead(READ_AHEAD_BYTES).map(|lines| (input, lines));
        let read = thread::run("batch-input", read).await?;
        let (input, lines) = read.map_err(failed("reading", &self.input_path))?;
        self.input = (!lines.is_empty()).then_some(input);
        self.ahead.extend(lines);
        Ok(())
    }

    /// Appends results durably, and reports the progress.
    async fn append(&mut self, results: Vec<String>) -> Result<(), BatchError> {
        if results.is_empty() {
            return Ok(());
        }
        let Some(mut log) = self.log.take() else { return Ok(()) };
        let before = log.counts;
        let write = move || log.append(&results).map(|()| log);
        let written = thread::run("batch-results", write).await?;
        let log = written.map_err(failed("writing", &self.input_path))?;
        self.batches.counters.lines(before, log.counts);
        self.log = Some(log);
        self.report_progress();
        Ok(())
    }

    fn report_progress(&self) {
        let (Some(log), live) = (&self.log, lock(&self.batches.live)) else { return };
        if let Some(live) = live.get(&self.batch.id) {
            live.record.send_modify(|batch| (batch.counts, batch.usage) = (log.counts, log.usage));
        }
    }
}

fn result_of(done: Result<serde_json::Result<String>, JoinError>) -> Result<String, BatchError> {
    let result = done.map_err(|error| BatchError::Stopped(error.to_string()))?;
    result.map_err(|error| BatchError::Stopped(format!("an answer is not JSON: {error}")))
}

/// Returns the time from now until `at`, in seconds since 1970.
fn until(at: u64) -> Duration {
    Duration::from_secs(at.saturating_sub(seconds_since_1970()))
}

/// Writes the results of all lines that have none.
fn expire_rest(
    log: &mut ResultLog,
    batch: &BatchRecord,
    directory: &Path,
    max_body_bytes: usize,
) -> std::io::Result<()> {
    let path = directory.join(INPUT);
    let mut input = InputReader::open(&path, batch.spec.endpoint, max_body_bytes, log.done.clone())?;
    loop {
        let lines = input.read_ahead(READ_AHEAD_BYTES)?;
        if lines.is_empty() {
            return Ok(());
        }
        for lines in lines.chunks(EXPIRED_AT_ONCE) {
            let result = |line: &InputLine| expired(line, &batch.line_id(line.number));
            log.append(&lines.iter().map(result).collect::<Result<Vec<_>, _>>()?)?;
        }
    }
}
