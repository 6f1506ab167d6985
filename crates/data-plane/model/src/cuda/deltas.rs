//! Adapter changes of a batch on the device. The device computes the ranks that it holds; CPU workers, asked
//! in stream order, compute the rest (CaraServe §4.2).

use std::sync::Arc;

use kernels::{
    Isa, ThreadPool,
    attention::QkvLayout,
    cuda::{
        CudaError, CudaStream, DeviceVec, Matrix,
        board::{
            NativeCopy, RowSpans, SumsTarget, WaitMethod, add_sums, await_value, copy_and_signal, copy_native,
        },
        lora::{LoraPlan, LoraSegment, PlanShape, UploadQueue, add_deltas},
        rows::{add_weighted, place, scale_columns},
    },
    lora::ElementKind,
};

use super::{
    CudaDevice,
    assist::{DeviceAssist, Invocation},
    direct::DirectCopies,
    plan::{AssistedGroup, PlanRows, parts},
};
use crate::{
    adapter::ScaledSide,
    cpu::Compute,
    deltas::{
        adapter_rows::{AdapterRows, EmbeddingRows, RowValues},
        prepared::PreparedAdapter,
    },
    forward::{Deltas, LinearGroup, SequenceSlice},
    linear_sites::SiteId,
    shape::{config::ModelConfig, layout::model_groups, source::Target},
    weights::group_targets,
};

#[derive(Debug)]
pub(super) struct DeltaState {
    plan: LoraPlan,
    /// Rows of the plan on the device, or `None` if the plan cannot be reused.
    planned: Option<PlanRows>,
    direct: DirectCopies,
    pub(super) lane: Arc<UploadQueue>,
    pub(super) assist: Option<Box<dyn DeviceAssist>>,
    /// Tables on the device of rows to send to workers, each with the row spans that the table holds.
    spans: Vec<(Vec<(usize, usize)>, RowSpans)>,
    native: NativeCopy,
    waiting: WaitMethod,
    /// Threads that compute the heads of adapters with their own head.
    pub(super) host: Compute,
}

/// Maximum time for which a kernel waits for workers. The limit is far longer than any job, so it only ends
/// waits for a process that is shutting down.
const WAIT_LIMIT_US: u32 = 30_000_000;

impl DeltaState {
    pub(super) fn new(stream: &CudaStream) -> Result<Self, CudaError> {
        let cuda = stream.cuda();
        Ok(Self {
            plan: LoraPlan::new(cuda)?,
            planned: None,
            direct: DirectCopies::default(),
            lane: UploadQueue::new(cuda)?,
            assist: None,
            spans: Vec::new(),
            native: NativeCopy::new(cuda, 0)?,
            waiting: WaitMethod::StreamMemory,
            host: Compute {
                pool: ThreadPool::new(&[]).expect("a pool of the calling thread starts none"),
                isa: Isa::best(),
            },
        })
    }

    /// Makes the stream wait for the answer `number`; a kernel waits if the device has no stream wait.
    fn wait(&mut self, stream: &CudaStream, number: u32) -> Result<(), CudaError> {
        let Some(assist) = &self.assist else { return Err(CudaError::Unanswered) };
        match await_value(stream, assist.answered(), number, self.waiting) {
            Err(CudaError::Refused { .. }) if self.waiting == WaitMethod::StreamMemory => {
                self.waiting = WaitMethod::Kernel { limit_us: WAIT_LIMIT_US };
                await_value(stream, assist.answered(), number, self.waiting)
            }
            waited => waited,
        }
    }
}

#[derive(Debug)]
pub(super) struct CudaDeltas<'a> {
    config: &'a ModelConfig,
    state: &'a mut DeltaState,
    found: AdapterRows,
    /// Requests to workers by group, in the order of a pass; empty if there are none.
    help: Vec<Option<AssistedGroup>>,
    has_scales: bool,
    /// Number of the posted job of the current group, and the targets of its sums.
    posted: Option<(u32, Vec<SumsTarget>)>,
}

impl<'a> CudaDeltas<'a> {
    /// Looks up the ranks on the device for the batch's adapters, and writes the plan of the whole pass.
    pub(super) fn new(
        stream: &CudaStream,
        config: &'a ModelConfig,
        state: &'a mut DeltaState,
        batch: &[SequenceSlice<'_, PreparedAdapter>],
    ) -> Result<Self, CudaError> {
        state.lane.poll_arrivals()?;
        let found = AdapterRows::of(batch);
        for run in &found.rows {
            state.direct.load(stream, &run.adapter)?;
        }
        let has_scales = found.have_scales();
        let mut deltas = Self { config, state, found, help: Vec::new(), has_scales, posted: None };
        deltas.plan(stream)?;
        if !deltas.help.is_empty()
            && let Some(assist) = &mut deltas.state.assist
        {
            assist.begin_pass();
        }
        Ok(deltas)
    }

    /// True if the pass consists only of launches that depend on the plan.
    pub(super) fn is_plain(&self) -> bool {
        self.help.is_empty()
            && !self.has_scales
            && !self.found.have_vocabularies()
            && self.found.virtual_rows.is_empty()
    }

    /// Returns the shape that determines the launches, or `None` without adapters.
    pub(super) fn shape(&self) -> Option<PlanShape> {
        (!self.found.rows.is_empty()).then(|| self.state.plan.shape().clone())
    }

    fn plan(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        if self.found.rows.is_empty() {
            return Ok(());
        }
        let planned = self.state.planned.take();
        if let Some(planned) = planned.filter(|planned| planned.is_of(&self.found)) {
            self.state.planned = Some(planned);
            self.tally();
            return Ok(());
        }
        let mut help: Vec<Option<AssistedGroup>> = Vec::new();
        let mut segments: Vec<Vec<LoraSegment<'_>>> = Vec::new();
        for (layer, group) in model_groups(self.config) {
            let (of_device, of_others) = parts(self.config, &self.found, layer, group);
            segments.push(of_device);
            help.push(of_others);
        }
        self.state.plan.upload(stream, &segments)?;
        drop(segments);
        if help.iter().any(Option::is_some) {
            self.write_spans(stream, &mut help)?;
            self.help = help;
        } else {
            // A plan with requests to workers cannot be reused, even if the missing ranks have arrived.
            self.state.planned = PlanRows::of(&self.found);
        }
        self.tally();
        Ok(())
    }

    /// Writes the tables of rows to send, one for all groups with equal spans.
    fn write_spans(
        &mut self,
        stream: &CudaStream,
        help: &mut [Option<AssistedGroup>],
    ) -> Result<(), CudaError> {
        let tables = &mut self.state.spans;
        let mut written = 0;
        for AssistedGroup { spans, table, .. } in help.iter_mut().flatten() {
            let known = tables[..written].iter().position(|(known, _)| known == spans);
            *table = known.unwrap_or(written);
            if known.is_none() {
                if tables.len() == written {
                    tables.push((Vec::new(), RowSpans::new(stream.cuda())?));
                }
                let (rows, table) = &mut tables[written];
                rows.clone_from(spans);
                table.upload(stream, spans)?;
                written += 1;
            }
        }
        Ok(())
    }

    /// Counts the device's work; workers count their own.
    fn tally(&self) {
        for run in self.found.rows.iter() {
            let ranks = |(layer, target, host): (usize, Target, &kernels::lora::LoraMatrix)| {
                let device = run.device.as_ref().and_then(|copy| copy.cuda(layer, target));
                host.rank() - device.map_or(host.rank(), |matrix| matrix.first_rank())
            };
            let ranks: usize = run.adapter.matrices().map(ranks).sum();
            run.adapter.tally().device((run.rows * ranks) as u64);
        }
    }

    fn index(&self, layer: usize, group: LinearGroup) -> usize {
        SiteId::of(self.config, layer, group).0 as usize
    }

    fn scale(
        &self,
        device: &CudaDevice,
        layer: usize,
        group: LinearGroup,
        side: ScaledSide,
        values: &mut Matrix,
    ) -> Result<(), CudaError> {
        if !self.has_scales {
            return Ok(());
        }
        let targets = group_targets(self.config, group);
        for run in self.found.of_group(group).iter().filter(|run| run.rows > 0) {
            let Some(copy) = self.state.direct.get(&run.adapter) else { continue };
            for &(target, column) in &targets {
                let Some(factors) = copy.factors(layer, target, side) else { continue };
                // Scaled inputs belong to one layer only.
                let column = if side == ScaledSide::Input { 0 } else { column };
                let rows = run.first_row..run.first_row + run.rows;
                scale_columns(device.stream(), values, rows, column, factors)?;
            }
        }
        Ok(())
    }

    /// Ends the pass for the workers, after the device has read all sums.
    pub(super) fn finish(mut self) -> Result<(), CudaError> {
        self.end_pass()
    }

    fn end_pass(&mut self) -> Result<(), CudaError> {
        if self.help.is_empty() {
            return Ok(());
        }
        self.help.clear();
        self.state.assist.as_mut().map_or(Ok(()), |assist| assist.end_pass())
    }
}

fn add_rows(stream: &CudaStream, added: &RowValues, to: &mut Matrix) -> Result<(), CudaError> {
    let mut values = Matrix::new(stream.cuda(), ElementKind::F32)?;
    values.reshape(added.rows.len(), to.width())?;
    values.upload(stream, 0, &added.values)?;
    let ones = DeviceVec::from_slice(stream, &vec![1.0; added.rows.len()])?;
    add_weighted(stream, &values, &DeviceVec::from_slice(stream, &added.rows)?, &ones, to)
}

impl Drop for CudaDeltas<'_> {
    /// A pass that failed midway must end for the workers, too.
    fn drop(&mut self) {
        let _ = self.end_pass();
    }
}

impl Deltas<CudaDevice> for CudaDeltas<'_> {
    fn change_embeddings(
        &mut self,
        device: &mut CudaDevice,
        tokens: &mut dyn Iterator<Item = u32>,
        residual: &mut Matrix,
    ) -> Result<(), CudaError> {
        let EmbeddingRows { added, replaced } = self.found.embedding_rows(self.config, tokens);
        let stream = device.stream();
        for (row, embedding) in replaced.iter(residual.width()) {
            residual.upload(stream, row, embedding)?;
        }
        if added.rows.is_empty() { Ok(()) } else { add_rows(stream, &added, residual) }
    }

    fn scale_inputs(
        &mut self,
        device: &mut CudaDevice,
        layer: usize,
        group: LinearGroup,
        x: &mut Matrix,
    ) -> Result<(), CudaError> {
        self.scale(device, layer, group, ScaledSide::Input, x)
    }

    fn place_prefix(
        &mut self,
        device: &mut CudaDevice,
        layer: usize,
        qkv: &mut Matrix,
        layout: QkvLayout,
    ) -> Result<(), CudaError> {
        for virtual_rows in &self.found.virtual_rows {
            let copy = self.state.direct.get(&virtual_rows.adapter);
            let Some(prefix) = copy.and_then(|copy| copy.prefix()) else { continue };
            // Keys and values are adjacent at the end of a row.
            let column = layout.stride() - prefix.width;
            let rows = virtual_rows.first_row..virtual_rows.first_row + virtual_rows.rows;
            let at = prefix.at(virtual_rows.token, layer);
            place(device.stream(), qkv, rows, column, &prefix.values, at, prefix.width)?;
        }
        Ok(())
    }

    fn begin(
        &mut self,
        device: &mut CudaDevice,
        layer: usize,
        group: LinearGroup,
        x: &Matrix,
    ) -> Result<(), CudaError> {
        let index = self.index(layer, group);
        let Some(AssistedGroup { job, table, answers, .. }) = self.help.get_mut(index).and_then(Option::take)
        else {
            return Ok(());
        };
        // Without workers nothing would answer.
        let Some(assist) = &mut self.state.assist else { return Err(CudaError::Unanswered) };
        let (numbers, number) = (job.x_rows * job.width, assist.post(job));
        let (stream, slab, asked) = (device.stream(), assist.slab(), assist.asked());
        let (spans, native) = (&self.state.spans[table].1, &mut self.state.native);
        match assist.invocation() {
            Invocation::Fused => copy_and_signal(stream, x, spans, slab, 0, asked, number)?,
            Invocation::Native => {
                native.reserve(stream, numbers)?;
                copy_native(stream, x, spans, native, slab, 0, asked, number)?;
            }
        }
        self.posted = Some((number, answers));
        Ok(())
    }

    fn add(
        &mut self,
        device: &mut CudaDevice,
        layer: usize,
        group: LinearGroup,
        x: &Matrix,
        out: &mut Matrix,
    ) -> Result<(), CudaError> {
        self.scale(device, layer, group, ScaledSide::Output, out)?;
        let stream = device.stream();
        if group == LinearGroup::Head && self.found.have_own_heads() {
            let inputs = x.to_vec(stream)?;
            let put = |row, logits: &[f32]| out.upload(stream, row, logits);
            self.found.own_logits(&mut self.state.host, &inputs, put)?;
            self.found.token_logits(&inputs, x.width(), |row, own| {
                let mut logits = vec![0.0; out.width()];
                out.download(stream, row, &mut logits)?;
                own.iter().for_each(|&(token, logit)| logits[token] = logit);
                out.upload(stream, row, &logits)
            })?;
        }
        if let Some((number, answers)) = self.posted.take() {
            self.state.wait(stream, number)?;
            let Some(assist) = &self.state.assist else { return Err(CudaError::Unanswered) };
            for place in answers {
                add_sums(stream, assist.sums(), place, out)?;
            }
        }
        if self.found.rows.is_empty() {
            return Ok(());
        }
        add_deltas(stream, &self.state.plan, self.index(layer, group), x, out)
    }
}
