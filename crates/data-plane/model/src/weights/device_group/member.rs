//! A member's side: computes the leader's calls with the weights of one device.

use kernels::{Activations, Isa, SumFrom, ThreadPool};
use shmproto::group::{GroupCall, GroupGeometry, GroupMember, GroupViolation, GroupWork, InputForm};

use super::{ShardWeights, shard::call_outputs};
use crate::{
    cpu::Compute,
    linear_sites::{Site, SiteCall, SiteId, SiteOp, SitePart},
    precision::Precision,
    weights::sites::{evaluate, multiplies_tiles},
};

/// Number of bf16 in a value of the area of inputs, which therefore holds twice as many rows as tiles.
const BF16_PER_VALUE: usize = 2;

/// The weights of one device with the threads that compute them.
#[derive(Debug)]
pub struct MemberModel {
    weights: ShardWeights,
    /// Sites with this device's outputs as their only part.
    sites: Vec<Site>,
    compute: Compute,
    x: Activations,
    /// Sums of a gradient.
    sums: Vec<f32>,
}

impl MemberModel {
    /// Takes the weights of a device, with layers in `precision`, and the threads that compute.
    #[must_use]
    pub fn new(weights: ShardWeights, precision: Precision, pool: ThreadPool) -> Self {
        let mut sites: Vec<Site> = (0..weights.sites.len()).map(|site| own_site(&weights, site)).collect();
        precision.apply(&mut sites, &weights.groups);
        let compute = Compute { pool, isa: Isa::best() };
        Self { weights, sites, compute, x: Activations::default(), sums: Vec::new() }
    }

    /// Replaces the instruction set, for tests.
    #[must_use]
    pub fn with_isa(mut self, isa: Isa) -> Self {
        self.compute.isa = isa;
        self
    }

    /// Computes the calls of the leader until the group ends.
    ///
    /// # Errors
    /// A call violates the protocol.
    pub fn serve(&mut self, mut group: GroupMember) -> Result<(), GroupViolation> {
        while let Some(call) = group.next_call()? {
            failpoint::pass("member.call_taken");
            self.answer(&mut group, &call)?;
            failpoint::pass("member.before_finish");
            group.finish();
        }
        Ok(())
    }

    fn answer(&mut self, group: &mut GroupMember, call: &GroupCall) -> Result<(), GroupViolation> {
        let fault = GroupViolation::Site { site: call.site, rows: call.rows };
        let site = self.sites.get(call.site as usize).ok_or(fault)?;
        // Memory is bounded by the areas before it is taken.
        let fits =
            |width: usize, area| (call.rows as usize).checked_mul(width).is_some_and(|all| all <= area);
        let GroupGeometry { input_values, output_values, .. } = group.geometry();
        let is_within = match call.work {
            GroupWork::ReadRows => fits(1, input_values) && fits(site.columns, output_values),
            GroupWork::Evaluate { part, op, .. } => {
                let outputs = call_outputs(&self.weights.sites[call.site as usize], part).ok_or(fault)?;
                match op {
                    SiteOp::Forward | SiteOp::ForwardNoBias => {
                        fits(site.columns, BF16_PER_VALUE * input_values)
                            && fits(site.parts[0].rows, output_values)
                    }
                    SiteOp::Backward => fits(site.columns + outputs.len(), input_values),
                }
            }
        };
        if !is_within {
            return Err(fault);
        }
        match call.work {
            GroupWork::ReadRows => self.read_rows(group, call),
            GroupWork::Evaluate { part, op, path } => {
                let call_of_site = SiteCall { site: SiteId(call.site), part, op, path };
                match op {
                    SiteOp::Forward | SiteOp::ForwardNoBias => self.forward(group, call, call_of_site),
                    SiteOp::Backward => self.backward(group, call, call_of_site),
                }
            }
        }
    }

    /// Computes this device's outputs in the memory that the leader reads.
    fn forward(
        &mut self,
        group: &mut GroupMember,
        call: &GroupCall,
        of: SiteCall,
    ) -> Result<(), GroupViolation> {
        let (rows, site) = (call.rows as usize, &self.sites[call.site as usize]);
        match call.form {
            InputForm::F32 => {
                self.x.reshape(rows, site.columns);
                group.read_inputs(call.input, self.x.values_mut())?;
            }
            InputForm::Bf16Tiles(tile_rows) => {
                if !multiplies_tiles(site, of) {
                    return Err(GroupViolation::Form(tile_rows.into()));
                }
                let words = self.x.reshape_tiled(rows, site.columns, tile_rows.into());
                group.read_inputs(call.input, words)?;
            }
        }
        let out = group.outputs_mut(call.output, rows * site.parts[0].rows)?;
        let parts = self.weights.parts(of, self.weights.own(call.site as usize).start);
        let whole = SiteCall { part: None, ..of };
        evaluate(&mut self.compute, site, whole, &mut self.x, &parts, SumFrom::Zero, out);
        Ok(())
    }

    /// Continues the sums of a gradient with this device's outputs.
    fn backward(
        &mut self,
        group: &mut GroupMember,
        call: &GroupCall,
        of: SiteCall,
    ) -> Result<(), GroupViolation> {
        let (rows, number) = (call.rows as usize, call.site as usize);
        let (site, own) = (&self.sites[number], self.weights.own(number));
        let fault = GroupViolation::Site { site: call.site, rows: call.rows };
        let outputs = call_outputs(&self.weights.sites[number], of.part).ok_or(fault)?;
        let shared = own.start.max(outputs.start)..own.end.min(outputs.end);
        self.x.reshape(rows, own.len());
        for (row, gradient) in self.x.values_mut().chunks_exact_mut(own.len().max(1)).enumerate() {
            // Columns that the call does not have keep their contents and are not read.
            let gradient = &mut gradient[shared.start - own.start..][..shared.len()];
            let skipped = row * outputs.len() + shared.start - outputs.start;
            group.read_inputs_after(call.input, skipped, gradient)?;
        }
        let sums = resized(&mut self.sums, rows * site.columns);
        group.read_inputs(call.output, sums)?;
        let parts = self.weights.parts(of, own.start);
        let whole = SiteCall { part: None, ..of };
        evaluate(&mut self.compute, site, whole, &mut self.x, &parts, SumFrom::Out, sums);
        group.write_inputs(call.output, sums)
    }

    /// Decodes those of the named rows that this device holds.
    fn read_rows(&mut self, group: &mut GroupMember, call: &GroupCall) -> Result<(), GroupViolation> {
        let (rows, number) = (call.rows as usize, call.site as usize);
        let columns = self.sites[number].columns;
        self.x.reshape(rows, 1);
        group.read_inputs(call.input, self.x.values_mut())?;
        let own = self.weights.own(number);
        let outputs = self.x.values().iter().map(|value| value.to_bits() as usize);
        let outputs: Vec<usize> = outputs.filter(|output| own.contains(output)).collect();
        let out = group.outputs_mut(call.output, outputs.len() * columns)?;
        for (&output, row) in outputs.iter().zip(out.chunks_exact_mut(columns)) {
            self.weights.read_row(number, output, row);
        }
        Ok(())
    }
}

/// Returns a site whose only part is this device's outputs.
fn own_site(weights: &ShardWeights, site: usize) -> Site {
    let part = SitePart { name: String::new(), rows: weights.own(site).len(), has_bias: false };
    Site { parts: vec![part], ..weights.sites[site].clone() }
}

fn resized(values: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if values.len() < len {
        values.resize(len, 0.0);
    }
    &mut values[..len]
}
