//! The leader's side: the linear layers of the whole group, as the leader's pass sees them.

use std::{
    convert::Infallible,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kernels::{ActivationForms, Activations, BorrowedCores, Rounding, SumFrom, ThreadPool};
use shmproto::group::{
    GroupCall, GroupGeometry, GroupLeader, GroupWork, InputForm, MAX_TILE_ROWS, PLACE_VALUES,
};

use super::{ShardWeights, shard::call_outputs};
use crate::{
    adapter::dora::BaseLayer,
    cpu::Compute,
    linear_sites::{Site, SiteCall, SiteOp},
    precision::Precision,
    shape::{config::ModelConfig, source::Target},
    weights::{
        host::{HostLayers, WaitCallback},
        sites::{evaluate, multiplies_tiles},
    },
};

/// Number of chunks of rows of a gradient, so that the devices work at once on different chunks.
const CHUNKS: usize = 4;

/// Minimum number of rows of such a chunk: fewer rows do not repay the decoding of the weights.
const CHUNK_ROWS: usize = 64;

/// Returns the sizes of a group's shared memory from the weights of any device, for passes of up to `rows`
/// rows. More rows are computed in turns.
#[must_use]
pub fn geometry(own: &ShardWeights, rows: usize) -> GroupGeometry {
    let rows = rows.max(usize::from(MAX_TILE_ROWS));
    let head = own.groups.len() - 1;
    let outputs = |site: usize| own.ranges[site].last().map_or(0, |range| range.end);
    let widest = |site: usize| own.ranges[site].iter().map(|range| padded(range.len())).max().unwrap_or(0);
    // A gradient's call has the sums and the gradient; of the head it has at least one row.
    let inputs = |site: usize| padded(own.sites[site].columns) + padded(outputs(site));
    let input_values = rows * (0..head).map(inputs).max().unwrap_or(0);
    let columns = own.sites.iter().map(|site| padded(site.columns)).max().unwrap_or(0);
    let output_values = rows * (0..head).map(widest).max().unwrap_or(0);
    GroupGeometry {
        members: u32::try_from(own.ranges[0].len() - 1).unwrap_or(u32::MAX),
        input_values: input_values.max(rows * columns).max(inputs(head)),
        // A tile of rows of logits fits, and so does a row of weights.
        output_values: output_values.max(usize::from(MAX_TILE_ROWS) * widest(head)).max(columns),
    }
}

/// Linear layers of a device group, and its token embedding.
#[derive(Debug)]
pub struct GroupLayers {
    shared: Arc<GroupWeights>,
    /// Sites of the whole model, in the group's precision.
    sites: Vec<Site>,
    /// Rows of a chunk of a gradient.
    chunk: Activations,
}

/// The leader's own weights, and its connection to the members. The compute thread and the loader of adapters
/// share them.
#[derive(Debug)]
pub(crate) struct GroupWeights {
    own: ShardWeights,
    group: Mutex<GroupLeader>,
}

/// A device that takes part in a call.
struct CallShare {
    /// Index of the member; `None` for the leader.
    member: Option<usize>,
    /// First output of the member.
    first: usize,
    /// Number of outputs of the member.
    width: usize,
    /// Outputs that the call needs.
    outputs: Range<usize>,
}

impl GroupLayers {
    /// Takes the leader's weights and a group with the [`geometry`] of these weights.
    #[must_use]
    pub fn new(own: ShardWeights, group: GroupLeader) -> Self {
        let mut sites = own.sites[..own.groups.len()].to_vec();
        Precision::default().apply(&mut sites, &own.groups);
        let shared = Arc::new(GroupWeights { own, group: Mutex::new(group) });
        Self { shared, sites, chunk: Activations::default() }
    }

    pub(crate) fn weights(&self) -> Arc<GroupWeights> {
        Arc::clone(&self.shared)
    }

    /// Computes the leader's outputs while the members compute theirs, then gathers all.
    fn forward(&mut self, compute: &mut Compute, call: SiteCall, x: &mut Activations, out: &mut [f32]) {
        let shared = Arc::clone(&self.shared);
        let own = &shared.own;
        let site = &self.sites[call.site.0 as usize];
        let (rows, outputs) = (x.rows(), call_outputs(site, call.part).expect("the site has the part"));
        let shares = own.shares(call, &outputs);
        let group = &mut *shared.lock();
        let others: Vec<_> = shares.iter().filter_map(|share| Some((share.member?, share))).collect();
        let is_tiled = multiplies_tiles(site, call);
        let most = rows_at_once(group.geometry(), site.columns, is_tiled, &others);
        // In a long pass the members sleep until they are called, and after they have answered.
        let borrowed = compute.pool.use_borrowed(BorrowedCores::Returned);
        let mut rest = own.parts(call, outputs.start);
        let mut first = 0;
        while first < rows {
            let block = first..rows.min(first + most);
            let mut of_block = group_call(call, block.len());
            if !others.is_empty() {
                compute.pool.use_borrowed(borrowed);
                of_block.form = write_rows(compute, group, x, block.clone(), is_tiled);
                compute.pool.use_borrowed(BorrowedCores::Returned);
            }
            let posted: Vec<_> = others.iter().map(|&(member, _)| group.post(member, &of_block)).collect();
            let parts = std::mem::take(&mut rest);
            if !parts.is_empty() {
                // The leader computes all rows at once, while the members compute the first block. If none
                // takes part, all of them sleep.
                if others.is_empty() {
                    compute.pool.use_borrowed(borrowed);
                }
                evaluate(compute, site, call, x, &parts, SumFrom::Zero, out);
            }
            posted.into_iter().for_each(|calls| group.wait(calls));
            compute.pool.use_borrowed(borrowed);
            let out = &mut out[block.start * outputs.len()..block.end * outputs.len()];
            gather(&mut compute.pool, group, &others, &outputs, out);
            first = block.end;
        }
    }

    /// Passes the sums of each chunk of rows from device to device, in the order of the outputs.
    fn backward(&mut self, compute: &mut Compute, call: SiteCall, x: &mut Activations, out: &mut [f32]) {
        let shared = Arc::clone(&self.shared);
        let own = &shared.own;
        let site = &self.sites[call.site.0 as usize];
        let outputs = call_outputs(site, call.part).expect("the site has the part");
        let (rows, columns, width) = (x.rows(), site.columns, x.width());
        let shares = own.shares(call, &outputs);
        let group = &mut *shared.lock();
        let members: Vec<usize> = shares.iter().filter_map(|share| share.member).collect();
        let parts = own.parts(call, outputs.start);
        if members.is_empty() {
            return evaluate(compute, site, call, x, &parts, SumFrom::Zero, out);
        }
        let borrowed = compute.pool.use_borrowed(BorrowedCores::Returned);
        // A row takes the place of its sums and of its gradient.
        let of_row = padded(columns) + padded(width);
        let most = (group.geometry().input_values / of_row).max(1);
        let chunk_rows = rows.div_ceil(CHUNKS).max(CHUNK_ROWS).min(most);
        // As many chunks as lie side by side in the area are under way at once.
        let window = (most / chunk_rows).min(CHUNKS) * chunk_rows;
        let mut first = 0;
        while first < rows {
            let end = rows.min(first + window);
            let mut posted = Vec::with_capacity(CHUNKS);
            for start in (first..end).step_by(chunk_rows) {
                let chunk = start..end.min(start + chunk_rows);
                let sums = &mut out[chunk.start * columns..chunk.end * columns];
                let g = &x.values()[chunk.start * width..chunk.end * width];
                if parts.is_empty() {
                    sums.fill(0.0);
                } else {
                    self.chunk.reshape(chunk.len(), width);
                    self.chunk.values_mut().copy_from_slice(g);
                    evaluate(compute, site, call, &mut self.chunk, &parts, SumFrom::Zero, sums);
                }
                let output = (start - first) * of_row;
                let input = output + chunk.len() * padded(columns);
                group.write_inputs(output, sums);
                group.write_inputs(input, g);
                let mut after = None;
                for &member in &members {
                    let call = GroupCall { input, output, after, ..group_call(call, chunk.len()) };
                    after = Some(group.post(member, &call));
                }
                posted.push((chunk, output, after));
            }
            for (chunk, place, last) in posted {
                last.into_iter().for_each(|calls| group.wait(calls));
                group.read_inputs(place, &mut out[chunk.start * columns..chunk.end * columns]);
            }
            first = end;
        }
        compute.pool.use_borrowed(borrowed);
    }
}

impl HostLayers for GroupLayers {
    type Error = Infallible;

    fn config(&self) -> &ModelConfig {
        &self.shared.own.config
    }

    fn sites(&self) -> &[Site] {
        &self.sites
    }

    fn set_precision(&mut self, precision: Precision) {
        precision.apply(&mut self.sites, &self.shared.own.groups);
    }

    /// Returns the bytes of the leader's own weights.
    fn bytes(&self) -> usize {
        self.shared.own.bytes()
    }

    fn evaluate(
        &mut self,
        compute: &mut Compute,
        call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
        _: WaitCallback<'_>,
    ) -> Result<(), Infallible> {
        let (_, outputs) = self.sites[call.site.0 as usize].words(call).expect("the site has the part");
        let out = &mut out[..x.rows() * outputs];
        match call.op {
            SiteOp::Forward | SiteOp::ForwardNoBias => self.forward(compute, call, x, out),
            SiteOp::Backward => self.backward(compute, call, x, out),
        }
        Ok(())
    }

    fn embed(&self, tokens: &mut dyn Iterator<Item = u32>, out: &mut [f32]) -> Result<(), Infallible> {
        let rows: Vec<usize> = tokens.map(|token| token as usize).collect();
        self.shared.read_rows(self.shared.own.embedding_site(), &rows, out);
        Ok(())
    }
}

impl GroupWeights {
    fn lock(&self) -> MutexGuard<'_, GroupLeader> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a linear layer of the base, whose rows are read from the devices that hold them.
    pub(crate) fn linear_layer(&self, layer: usize, target: Target) -> Option<BaseLayer<'_>> {
        let (site, first, bias) = self.own.find(layer, target)?;
        let read_row = Box::new(move |row, out: &mut [f32]| self.read_rows(site, &[first + row], out));
        Some(BaseLayer { read_row, bias })
    }

    /// Writes rows of a site's weights to `out`, `[rows, columns]`; `rows` are numbers among the site's
    /// outputs.
    ///
    /// # Panics
    /// If a row does not exist.
    fn read_rows(&self, site: usize, rows: &[usize], out: &mut [f32]) {
        let columns = self.own.sites[site].columns;
        for (device, range) in self.own.ranges[site].iter().enumerate() {
            let held: Vec<usize> = (0..rows.len()).filter(|&at| range.contains(&rows[at])).collect();
            if device == self.own.device {
                for at in held {
                    self.own.read_row(site, rows[at], &mut out[at * columns..(at + 1) * columns]);
                }
            } else {
                self.fetch_rows(device - 1, site, rows, &held, out);
            }
        }
        assert!(rows.iter().all(|row| self.own.ranges[site].iter().any(|range| range.contains(row))));
    }

    /// Writes those rows to `out` that a member holds: the ones at the indices `held` of `rows`.
    fn fetch_rows(&self, member: usize, site: usize, rows: &[usize], held: &[usize], out: &mut [f32]) {
        let columns = self.own.sites[site].columns;
        let group = &mut *self.lock();
        let GroupGeometry { input_values, output_values, .. } = group.geometry();
        for held in held.chunks((output_values / columns).min(input_values).max(1)) {
            let bits = |&at: &usize| f32::from_bits(u32::try_from(rows[at]).unwrap_or(u32::MAX));
            group.write_inputs(0, &held.iter().map(bits).collect::<Vec<_>>());
            let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
            let (site, rows) = (number(site), number(held.len()));
            let work = GroupWork::ReadRows;
            let call = GroupCall { site, work, rows, form: InputForm::F32, input: 0, output: 0, after: None };
            let calls = group.post(member, &call);
            group.wait(calls);
            for (from, &at) in held.iter().enumerate() {
                group.read_outputs(member, from * columns, &mut out[at * columns..(at + 1) * columns]);
            }
        }
    }
}

impl ShardWeights {
    /// Returns the devices that take part in a call of these outputs, in the order of the outputs.
    fn shares(&self, call: SiteCall, outputs: &Range<usize>) -> Vec<CallShare> {
        let share = |(device, range): (usize, &Range<usize>)| {
            let outputs = range.start.max(outputs.start)..range.end.min(outputs.end);
            let member = (device != self.device).then(|| device - 1);
            (!outputs.is_empty()).then_some(CallShare {
                member,
                first: range.start,
                width: range.len(),
                outputs,
            })
        };
        self.ranges[call.site.0 as usize].iter().enumerate().filter_map(share).collect()
    }
}

/// Returns the number of rows of a forward call that fit into the areas at once: whole tiles if the rows are
/// tiles.
fn rows_at_once(
    geometry: GroupGeometry,
    columns: usize,
    is_tiled: bool,
    others: &[(usize, &CallShare)],
) -> usize {
    let widest = others.iter().map(|(_, share)| share.width).max().unwrap_or(1);
    let rows = (geometry.input_values / padded(columns)).min(geometry.output_values / widest.max(1)).max(1);
    if is_tiled { rows / usize::from(MAX_TILE_ROWS) * usize::from(MAX_TILE_ROWS) } else { rows }
}

/// Writes the rows of a block into the area of inputs with all threads, and returns their form.
fn write_rows(
    compute: &mut Compute,
    group: &GroupLeader,
    x: &mut Activations,
    block: Range<usize>,
    is_tiled: bool,
) -> InputForm {
    if !is_tiled {
        let columns = x.width();
        write_inputs(&mut compute.pool, group, &x.values()[block.start * columns..block.end * columns]);
        return InputForm::F32;
    }
    // Rounded once for all devices, and half as many bytes.
    x.prepare(&mut compute.pool, compute.isa, ActivationForms::BF16_TILES, Rounding::INT8);
    let (tile_rows, words) = x.tile_words(block);
    write_inputs(&mut compute.pool, group, words);
    InputForm::Bf16Tiles(u8::try_from(tile_rows).unwrap_or(u8::MAX))
}

/// Rounds a width up to whole cache lines, so that every row begins at a valid place.
fn padded(width: usize) -> usize {
    width.max(1).next_multiple_of(PLACE_VALUES)
}

fn group_call(call: SiteCall, rows: usize) -> GroupCall {
    let work = GroupWork::Evaluate { part: call.part, op: call.op, path: call.path };
    let rows = u32::try_from(rows).unwrap_or(u32::MAX);
    GroupCall { site: call.site.0, work, rows, form: InputForm::F32, input: 0, output: 0, after: None }
}

/// Number of values that a thread copies at a time; even, because values are written in pairs.
const COPIED_VALUES: usize = 1 << 15;

/// Number of rows that a thread gathers at a time.
const GATHERED_ROWS: usize = 32;

/// Copies values into the area of inputs with all threads of `pool`.
fn write_inputs(pool: &mut ThreadPool, group: &GroupLeader, values: &[f32]) {
    pool.run(values.len().div_ceil(COPIED_VALUES), |chunk| {
        let first = chunk * COPIED_VALUES;
        group.write_inputs(first, &values[first..values.len().min(first + COPIED_VALUES)]);
    });
}

/// Copies the members' outputs of some rows into `out`, which has rows of the outputs of the call, with all
/// threads of `pool`.
fn gather(
    pool: &mut ThreadPool,
    group: &GroupLeader,
    others: &[(usize, &CallShare)],
    outputs: &Range<usize>,
    out: &mut [f32],
) {
    let width = outputs.len();
    // Each lock is taken once, by the thread that copies the chunk.
    let chunks: Vec<Mutex<&mut [f32]>> = out.chunks_mut(GATHERED_ROWS * width).map(Mutex::new).collect();
    pool.run(chunks.len(), |chunk| {
        let mut rows = chunks[chunk].lock().unwrap_or_else(PoisonError::into_inner);
        for (row, at) in rows.chunks_exact_mut(width).zip(chunk * GATHERED_ROWS..) {
            for &(member, share) in others {
                let (from, to) = (share.outputs.start - share.first, share.outputs.start - outputs.start);
                let values = &mut row[to..to + share.outputs.len()];
                group.read_outputs(member, at * share.width + from, values);
            }
        }
    });
}
