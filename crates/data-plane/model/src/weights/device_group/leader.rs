//! The leader's side: the linear layers of the whole group, as the leader's pass sees them.

use std::{
    convert::Infallible,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kernels::{Activations, BorrowedCores, SumFrom, ThreadPool};
use shmproto::group::{GroupCall, GroupGeometry, GroupLeader, GroupWork, PLACE_VALUES};

use super::{ShardWeights, shard::first_output};
use crate::{
    adapter::dora::BaseLayer,
    cpu::Compute,
    linear_sites::{Site, SiteCall, SiteOp},
    precision::Precision,
    shape::{config::ModelConfig, source::Target},
    weights::{
        host::{HostLayers, WaitCallback},
        sites::evaluate,
    },
};

/// Number of chunks of rows of a gradient, so that the devices work at once on different chunks.
const CHUNKS: usize = 4;

/// Minimum number of rows of such a chunk: fewer rows do not repay the decoding of the weights.
const CHUNK_ROWS: usize = 64;

/// Returns the sizes of the region of a group whose leader has the shard `own`, for passes of up to `rows`
/// rows. More rows are computed in turns.
#[must_use]
pub fn geometry(own: &ShardWeights, rows: usize) -> GroupGeometry {
    let head = own.groups.len() - 1;
    let widest = |site: usize| own.ranges[site].iter().map(Range::len).max().unwrap_or(0);
    let columns = own.sites.iter().map(|site| padded(site.columns)).max().unwrap_or(0);
    let outputs = (0..head).map(|site| padded(widest(site))).max().unwrap_or(0);
    // A row of logits and a row of weights fit as well.
    let least = (head..own.sites.len()).map(|site| padded(widest(site))).max().unwrap_or(0).max(columns);
    GroupGeometry {
        members: u32::try_from(own.ranges[0].len() - 1).unwrap_or(u32::MAX),
        input_values: rows.max(1) * columns,
        output_values: (rows.max(1) * outputs).max(least),
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
    /// Gradient at the outputs of one member.
    gradient: Vec<f32>,
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
        Self { shared, sites, chunk: Activations::default(), gradient: Vec::new() }
    }

    pub(crate) fn weights(&self) -> Arc<GroupWeights> {
        Arc::clone(&self.shared)
    }

    /// Computes the leader's outputs while the members compute theirs, then gathers all.
    fn forward(&mut self, compute: &mut Compute, call: SiteCall, x: &mut Activations, out: &mut [f32]) {
        let shared = Arc::clone(&self.shared);
        let own = &shared.own;
        let site = &self.sites[call.site.0 as usize];
        let (rows, base) = (x.rows(), first_output(site, call.part.map(usize::from)));
        let outputs = site.words(call).expect("the site has the part").1;
        let shares = own.shares(call);
        let group = &mut *shared.lock();
        let others: Vec<_> = shares.iter().filter_map(|share| Some((share.member?, share))).collect();
        let most = rows_at_once(group.geometry(), site.columns, &others);
        let borrowed = compute.pool.use_borrowed(BorrowedCores::Returned);
        let mut rest = own.parts(call, base);
        let mut first = 0;
        while first < rows {
            let block = first..rows.min(first + most);
            if !others.is_empty() {
                // In a long pass the members sleep until they are called, and after they have answered.
                compute.pool.use_borrowed(borrowed);
                let values = &x.values()[block.start * site.columns..block.end * site.columns];
                write_inputs(&mut compute.pool, group, values, site.columns);
                compute.pool.use_borrowed(BorrowedCores::Returned);
            }
            let posted: Vec<_> = others
                .iter()
                .map(|&(member, _)| group.post(member, &group_call(call, block.len())))
                .collect();
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
            let out = &mut out[block.start * outputs..block.end * outputs];
            gather(&mut compute.pool, group, &others, (base, outputs), out);
            first = block.end;
        }
    }

    /// Passes the sums of each chunk of rows from device to device, in the order of the outputs.
    fn backward(&mut self, compute: &mut Compute, call: SiteCall, x: &mut Activations, out: &mut [f32]) {
        let shared = Arc::clone(&self.shared);
        let own = &shared.own;
        let site = &self.sites[call.site.0 as usize];
        let (rows, base, columns) = (x.rows(), first_output(site, call.part.map(usize::from)), site.columns);
        let width = x.width();
        let shares = own.shares(call);
        let group = &mut *shared.lock();
        let others: Vec<_> = shares.iter().filter_map(|share| Some((share.member?, share))).collect();
        let parts = own.parts(call, base);
        if others.is_empty() {
            return evaluate(compute, site, call, x, &parts, SumFrom::Zero, out);
        }
        let borrowed = compute.pool.use_borrowed(BorrowedCores::Returned);
        let most = rows_at_once(group.geometry(), columns, &others);
        let chunk_rows = rows.div_ceil(CHUNKS).max(CHUNK_ROWS).min(most);
        // As many chunks as lie side by side in the areas are under way at once.
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
                let at = start - first;
                group.write_inputs(at * padded(columns), sums);
                let mut after = None;
                for &(member, share) in &others {
                    let place = at * padded(share.width);
                    scatter(g, width, share, base, &mut self.gradient);
                    group.write_outputs(member, place, &self.gradient);
                    let of_chunk = group_call(call, chunk.len());
                    let call = GroupCall { input: at * padded(columns), output: place, after, ..of_chunk };
                    after = Some(group.post(member, &call));
                }
                posted.push((chunk, after));
            }
            for (chunk, last) in posted {
                last.into_iter().for_each(|calls| group.wait(calls));
                let place = (chunk.start - first) * padded(columns);
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
            let call = GroupCall { site, work: GroupWork::ReadRows, rows, input: 0, output: 0, after: None };
            let calls = group.post(member, &call);
            group.wait(calls);
            for (from, &at) in held.iter().enumerate() {
                group.read_outputs(member, from * columns, &mut out[at * columns..(at + 1) * columns]);
            }
        }
    }
}

impl ShardWeights {
    /// Returns the devices that take part in a call, in the order of their outputs.
    fn shares(&self, call: SiteCall) -> Vec<CallShare> {
        let site = &self.sites[call.site.0 as usize];
        let part = call.part.map(usize::from);
        let first = first_output(site, part);
        let end = first
            + part.map_or_else(|| first_output(site, Some(site.parts.len())), |part| site.parts[part].rows);
        let share = |(device, range): (usize, &Range<usize>)| {
            let outputs = range.start.max(first)..range.end.min(end);
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

/// Returns the number of rows that fit into the areas at once.
fn rows_at_once(geometry: GroupGeometry, columns: usize, others: &[(usize, &CallShare)]) -> usize {
    let widest = others.iter().map(|(_, share)| padded(share.width)).max().unwrap_or(1);
    (geometry.input_values / padded(columns)).min(geometry.output_values / widest).max(1)
}

/// Rounds a width up to whole cache lines, so that every row begins at a valid place.
fn padded(width: usize) -> usize {
    width.max(1).next_multiple_of(PLACE_VALUES)
}

fn group_call(call: SiteCall, rows: usize) -> GroupCall {
    let work = GroupWork::Evaluate { part: call.part, op: call.op, path: call.path };
    let rows = u32::try_from(rows).unwrap_or(u32::MAX);
    GroupCall { site: call.site.0, work, rows, input: 0, output: 0, after: None }
}

/// Number of rows that a thread copies at a time; even, because values are written in pairs.
const COPIED_ROWS: usize = 32;

/// Copies rows into the area of inputs with all threads of `pool`.
fn write_inputs(pool: &mut ThreadPool, group: &GroupLeader, rows: &[f32], columns: usize) {
    let step = COPIED_ROWS * columns;
    pool.run(rows.len().div_ceil(step), |chunk| {
        let first = chunk * step;
        group.write_inputs(first, &rows[first..rows.len().min(first + step)]);
    });
}

/// Copies the members' outputs of some rows into `out`, whose rows have `width` values and begin at output
/// `base` of the site, with all threads of `pool`.
fn gather(
    pool: &mut ThreadPool,
    group: &GroupLeader,
    others: &[(usize, &CallShare)],
    (base, width): (usize, usize),
    out: &mut [f32],
) {
    // Each lock is taken once, by the thread that copies the chunk.
    let chunks: Vec<Mutex<&mut [f32]>> = out.chunks_mut(COPIED_ROWS * width).map(Mutex::new).collect();
    pool.run(chunks.len(), |chunk| {
        let mut rows = chunks[chunk].lock().unwrap_or_else(PoisonError::into_inner);
        for (row, at) in rows.chunks_exact_mut(width).zip(chunk * COPIED_ROWS..) {
            for &(member, share) in others {
                let (from, to) = (share.outputs.start - share.first, share.outputs.start - base);
                let values = &mut row[to..to + share.outputs.len()];
                group.read_outputs(member, at * share.width + from, values);
            }
        }
    });
}

/// Copies a member's columns of the gradient `g` into rows of its own width. Columns that the call does not
/// need keep their contents and are not read.
fn scatter(g: &[f32], width: usize, share: &CallShare, base: usize, own: &mut Vec<f32>) {
    let (from, to) = (share.outputs.start - base, share.outputs.start - share.first);
    own.resize(g.len() / width * share.width, 0.0);
    for (g, own) in g.chunks_exact(width).zip(own.chunks_exact_mut(share.width)) {
        own[to..to + share.outputs.len()].copy_from_slice(&g[from..from + share.outputs.len()]);
    }
}
