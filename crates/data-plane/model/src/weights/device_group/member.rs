//! A member's side: computes the leader's calls with the weights of one device.

use kernels::{Activations, Isa, SumFrom, ThreadPool};
use shmproto::group::{GroupCall, GroupGeometry, GroupMember, GroupViolation, GroupWork};

use super::ShardWeights;
use crate::{
    cpu::Compute,
    linear_sites::{Site, SiteCall, SiteId, SiteOp, SitePart},
    precision::Precision,
    weights::sites::evaluate,
};

/// The weights of one device with the threads that compute them.
#[derive(Debug)]
pub struct MemberModel {
    weights: ShardWeights,
    /// Sites with this device's outputs as their only part.
    sites: Vec<Site>,
    compute: Compute,
    x: Activations,
    out: Vec<f32>,
}

impl MemberModel {
    /// Takes the weights of a device, with layers in `precision`, and the threads that compute.
    #[must_use]
    pub fn new(weights: ShardWeights, precision: Precision, pool: ThreadPool) -> Self {
        let mut sites: Vec<Site> = (0..weights.sites.len()).map(|site| own_site(&weights, site)).collect();
        precision.apply(&mut sites, &weights.groups);
        let compute = Compute { pool, isa: Isa::best() };
        Self { weights, sites, compute, x: Activations::default(), out: Vec::new() }
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
            self.answer(&group, &call)?;
            failpoint::pass("member.before_finish");
            group.finish();
        }
        Ok(())
    }

    fn answer(&mut self, group: &GroupMember, call: &GroupCall) -> Result<(), GroupViolation> {
        let fault = GroupViolation::Site { site: call.site, rows: call.rows };
        let site = self.sites.get(call.site as usize).ok_or(fault)?;
        // Memory is bounded by the areas before it is taken.
        let fits =
            |width: usize, area| (call.rows as usize).checked_mul(width).is_some_and(|all| all <= area);
        let GroupGeometry { input_values, output_values, .. } = group.geometry();
        let is_within = match call.work {
            GroupWork::ReadRows => fits(1, input_values) && fits(site.columns, output_values),
            GroupWork::Evaluate { .. } => {
                fits(site.columns, input_values) && fits(site.parts[0].rows, output_values)
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

    fn forward(&mut self, group: &GroupMember, call: &GroupCall, of: SiteCall) -> Result<(), GroupViolation> {
        let (rows, site) = (call.rows as usize, &self.sites[call.site as usize]);
        self.x.reshape(rows, site.columns);
        group.read_inputs(call.input, self.x.values_mut())?;
        let out = resized(&mut self.out, rows * site.parts[0].rows);
        let parts = self.weights.parts(of, self.weights.own(call.site as usize).start);
        let whole = SiteCall { part: None, ..of };
        evaluate(&mut self.compute, site, whole, &mut self.x, &parts, SumFrom::Zero, out);
        group.write_outputs(call.output, out)
    }

    fn backward(
        &mut self,
        group: &GroupMember,
        call: &GroupCall,
        of: SiteCall,
    ) -> Result<(), GroupViolation> {
        let (rows, site) = (call.rows as usize, &self.sites[call.site as usize]);
        self.x.reshape(rows, site.parts[0].rows);
        group.read_outputs(call.output, self.x.values_mut())?;
        let sums = resized(&mut self.out, rows * site.columns);
        group.read_inputs(call.input, sums)?;
        let parts = self.weights.parts(of, self.weights.own(call.site as usize).start);
        let whole = SiteCall { part: None, ..of };
        evaluate(&mut self.compute, site, whole, &mut self.x, &parts, SumFrom::Out, sums);
        group.write_inputs(call.input, sums)
    }

    /// Decodes those of the named rows that this device holds.
    fn read_rows(&mut self, group: &GroupMember, call: &GroupCall) -> Result<(), GroupViolation> {
        let (rows, number) = (call.rows as usize, call.site as usize);
        let columns = self.sites[number].columns;
        self.x.reshape(rows, 1);
        group.read_inputs(call.input, self.x.values_mut())?;
        let own = self.weights.own(number);
        let outputs = self.x.values().iter().map(|value| value.to_bits() as usize);
        let outputs: Vec<usize> = outputs.filter(|output| own.contains(output)).collect();
        let out = resized(&mut self.out, outputs.len() * columns);
        for (&output, row) in outputs.iter().zip(out.chunks_exact_mut(columns)) {
            self.weights.read_row(number, output, row);
        }
        group.write_outputs(call.output, out)
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
