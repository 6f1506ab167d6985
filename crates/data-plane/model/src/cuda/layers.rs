//! Linear layers on the device, for a pass and for calls of split clients, co-batched or alone.

use std::sync::Arc;

use kernels::{
    Activations,
    cuda::{
        CudaError, CudaStream, DeviceVec, Matrix,
        embed::embed,
        linear::{LinearPart, Workspace, linear, linear_transposed},
        modular::{ModularPart, ModularScratch, linear_ring, linear_ring_transposed},
        rows::{append_rows, split_rows},
        weight::Weight,
    },
    lora::ElementKind,
};

use super::CudaDevice;
use crate::{
    forward::{BaseLayers, LinearGroup},
    linear_sites::{EvaluateError, EvaluateSites, PassHooks, Site, SiteCall, SiteId, SiteOp, SitePath},
    shape::config::ModelConfig,
};

/// Minimum rows of a call's part when memory is short.
const LEAST_ROWS: usize = 8;

#[derive(Debug)]
pub(super) struct CudaLinear {
    /// Weights, shared if two layers have the same.
    pub(super) weight: Arc<Weight>,
    pub(super) bias: Option<DeviceVec<f32>>,
    /// Unit of the weight's scales in integers, set by the commitment.
    pub(super) unit: f32,
}

#[derive(Debug)]
pub(super) struct CudaLayers {
    pub(super) sites: Vec<Site>,
    pub(super) layers: Vec<Vec<CudaLinear>>,
    pub(super) embedding: Arc<Weight>,
    pub(super) config: ModelConfig,
}

impl CudaLayers {
    fn call(&self, layer: usize, group: LinearGroup) -> SiteCall {
        let site = SiteId::of(&self.config, layer, group);
        SiteCall { site, part: None, op: SiteOp::Forward, path: SitePath::Fast }
    }

    /// Returns the layers of `call`, each with the first column of its outputs.
    fn columns(&self, call: SiteCall) -> impl Iterator<Item = (&CudaLinear, usize)> {
        let layers = &self.layers[call.site.0 as usize];
        let layers = match call.part {
            None => &layers[..],
            Some(part) => std::slice::from_ref(&layers[usize::from(part)]),
        };
        let mut end = 0;
        layers.iter().map(move |linear| {
            end += linear.weight.rows();
            (linear, end - linear.weight.rows())
        })
    }

    fn parts(&self, call: SiteCall) -> Vec<LinearPart<'_>> {
        let mut parts = Vec::new();
        for (CudaLinear { weight, bias, .. }, column) in self.columns(call) {
            let bias = bias.as_ref().filter(|_| call.op == SiteOp::Forward);
            parts.push(LinearPart { weight, bias, column });
        }
        parts
    }

    /// Evaluates `call` for the rows of `x`, of any element type.
    fn evaluate(
        &self,
        stream: &CudaStream,
        workspace: &mut Workspace,
        call: SiteCall,
        x: &Matrix,
        out: &mut Matrix,
    ) -> Result<(), CudaError> {
        let parts = self.parts(call);
        match call.op {
            SiteOp::Backward => linear_transposed(stream, workspace, x, &parts, out),
            SiteOp::Forward | SiteOp::ForwardNoBias => linear(stream, workspace, x, &parts, out),
        }
    }
}

impl CudaLayers {
    fn evaluate_ring(
        &self,
        stream: &CudaStream,
        scratch: &mut ModularScratch,
        call: SiteCall,
        x: &Matrix,
        out: &mut Matrix,
    ) -> Result<(), CudaError> {
        let site = &self.sites[call.site.0 as usize];
        let (ring, range) = site
            .ring
            .zip(site.modular_range(call.op))
            .expect("who asks for the ring path knows there is one");
        let (exponent, modulus) = (ring.weight_exponent, range.modulus);
        let mut parts = Vec::new();
        for (CudaLinear { weight, unit, .. }, column) in self.columns(call) {
            parts.push(ModularPart { weight, unit: *unit, column });
        }
        match call.op {
            SiteOp::Backward => linear_ring_transposed(stream, scratch, modulus, x, &parts, exponent, out),
            SiteOp::Forward | SiteOp::ForwardNoBias => {
                linear_ring(stream, scratch, modulus, x, &parts, exponent, out)
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct LinearScratch {
    workspace: Workspace,
    ring: ModularScratch,
    /// Input and output rows of split clients on the host.
    guests: Activations,
    answers: Vec<f32>,
    /// Rows of a separate call, in the pass's element type and in 32 bits.
    fast: Matrix,
    exact: Matrix,
    out: Matrix,
    /// Outputs of a pass's own and joined rows.
    together: Matrix,
}

impl LinearScratch {
    pub(super) fn new(
        stream: &CudaStream,
        workspace: Workspace,
        kind: ElementKind,
    ) -> Result<Self, CudaError> {
        let matrix = |kind| Matrix::new(stream.cuda(), kind);
        Ok(Self {
            workspace,
            ring: ModularScratch::new(stream)?,
            guests: Activations::default(),
            answers: Vec::new(),
            fast: matrix(kind)?,
            exact: matrix(ElementKind::F32)?,
            out: matrix(ElementKind::F32)?,
            together: matrix(kind)?,
        })
    }
}

#[derive(Debug)]
pub(super) struct CoBatchedCuda<'a> {
    pub(super) layers: &'a CudaLayers,
    pub(super) scratch: &'a mut LinearScratch,
    pub(super) hooks: OptionalHooks<'a>,
}

pub(super) enum OptionalHooks<'a> {
    None,
    /// Hooks for calls of split clients.
    Some(&'a mut dyn PassHooks),
}

impl std::fmt::Debug for OptionalHooks<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, Self::None) { "None" } else { "Some" })
    }
}

impl CoBatchedCuda<'_> {
    /// Takes the rows of waiting calls that equal `call`, and returns their number.
    fn join(&mut self, device: &CudaDevice, call: SiteCall, width: usize) -> usize {
        let OptionalHooks::Some(hooks) = &mut self.hooks else { return 0 };
        if !hooks.is_waiting() {
            return 0;
        }
        let mut lent = CudaSites { layers: self.layers, scratch: &mut *self.scratch, device };
        hooks.before_site(call.site, &mut lent);
        let guests = &mut self.scratch.guests;
        guests.reshape(0, width);
        let joined = hooks.join(call, guests);
        assert_eq!(guests.rows(), joined, "hooks append as many rows as they say");
        joined
    }

    /// Evaluates the pass's own and joined rows together. The host waits only for the joined rows.
    fn evaluate_together(
        &mut self,
        device: &CudaDevice,
        call: SiteCall,
        x: &mut Matrix,
        out: &mut Matrix,
        joined: usize,
    ) -> Result<(), CudaError> {
        let (stream, own) = (device.stream(), x.rows());
        let LinearScratch { workspace, guests, answers, out: wide, together, .. } = &mut *self.scratch;
        append_rows(stream, x, guests.values())?;
        // Logits have a wider element type than the other outputs of a pass.
        let all = if out.kind() == together.kind() { together } else { wide };
        all.reshape(own + joined, out.width())?;
        self.layers.evaluate(stream, workspace, call, x, all)?;
        x.truncate(own);
        answers.resize(joined * out.width(), 0.0);
        split_rows(stream, all, answers)?;
        out.copy_head(stream, all)?;
        if let OptionalHooks::Some(hooks) = &mut self.hooks {
            hooks.part(answers);
        }
        Ok(())
    }
}

impl CoBatchedCuda<'_> {
    /// Evaluates the pass's own rows, then the joined ones, if memory for all rows at once is missing.
    fn evaluate_apart(
        &mut self,
        device: &CudaDevice,
        call: SiteCall,
        x: &Matrix,
        out: &mut Matrix,
        joined: usize,
    ) -> Result<(), CudaError> {
        self.layers.evaluate(device.stream(), &mut self.scratch.workspace, call, x, out)?;
        let guests = std::mem::take(&mut self.scratch.guests);
        let mut answers = std::mem::take(&mut self.scratch.answers);
        answers.resize(joined * out.width(), 0.0);
        let mut lent = CudaSites { layers: self.layers, scratch: &mut *self.scratch, device };
        let evaluated = lent.evaluate_in_parts(call, guests.values(), (x.width(), out.width()), &mut answers);
        if evaluated.is_ok()
            && let OptionalHooks::Some(hooks) = &mut self.hooks
        {
            hooks.part(&answers);
        }
        (self.scratch.guests, self.scratch.answers) = (guests, answers);
        evaluated
    }
}

impl BaseLayers<CudaDevice> for CoBatchedCuda<'_> {
    type Error = CudaError;

    fn linear(
        &mut self,
        device: &mut CudaDevice,
        layer: usize,
        group: LinearGroup,
        x: &mut Matrix,
        out: &mut Matrix,
    ) -> Result<(), CudaError> {
        let call = self.layers.call(layer, group);
        match self.join(device, call, x.width()) {
            0 => self.layers.evaluate(device.stream(), &mut self.scratch.workspace, call, x, out),
            joined => {
                let own = x.rows();
                match self.evaluate_together(device, call, x, out, joined) {
                    Err(error) if error.is_out_of_memory() => {
                        x.truncate(own);
                        self.evaluate_apart(device, call, x, out, joined)
                    }
                    evaluated => evaluated,
                }
            }
        }
    }

    fn embed(
        &self,
        device: &mut CudaDevice,
        tokens: &mut dyn Iterator<Item = u32>,
        out: &mut Matrix,
    ) -> Result<(), CudaError> {
        device.write_tokens(tokens)?;
        embed(device.stream(), &self.layers.embedding, device.tokens(), out)
    }
}

#[derive(Debug)]
pub(super) struct CudaSites<'a> {
    pub(super) layers: &'a CudaLayers,
    pub(super) scratch: &'a mut LinearScratch,
    pub(super) device: &'a CudaDevice,
}

impl CudaSites<'_> {
    /// Evaluates `call` for rows of `inputs` and `outputs` 32-bit words, in several parts if memory is short.
    fn evaluate_in_parts(
        &mut self,
        call: SiteCall,
        x: &[f32],
        (inputs, outputs): (usize, usize),
        out: &mut [f32],
    ) -> Result<(), CudaError> {
        let rows = x.len() / inputs.max(1);
        let (mut first, mut most) = (0, rows);
        while first < rows {
            let some = most.min(rows - first);
            let x = &x[first * inputs..][..some * inputs];
            let out = &mut out[first * outputs..][..some * outputs];
            match self.evaluate_rows(call, (some, inputs, outputs), x, out) {
                Err(error) if error.is_out_of_memory() && some > LEAST_ROWS => most = some.div_ceil(2),
                evaluated => {
                    evaluated?;
                    first += some;
                }
            }
        }
        Ok(())
    }

    /// Evaluates `call` for `rows` rows of `inputs` and `outputs` 32-bit words. The quantized path rounds as
    /// a pass does, so a client cannot tell whether its call joined a pass.
    fn evaluate_rows(
        &mut self,
        call: SiteCall,
        (rows, inputs, outputs): (usize, usize, usize),
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), CudaError> {
        let stream = self.device.stream();
        let LinearScratch { workspace, ring, fast, exact, out: wide, together, .. } = &mut *self.scratch;
        let is_fast = call.path == SitePath::Fast && call.op != SiteOp::Backward;
        let is_head = call.site.0 as usize + 1 == self.layers.sites.len();
        let inputs_as = if is_fast { fast } else { exact };
        let outputs_as = if is_fast && !is_head { together } else { wide };
        inputs_as.reshape(rows, inputs)?;
        inputs_as.upload(stream, 0, x)?;
        outputs_as.reshape(rows, outputs)?;
        match call.path {
            SitePath::Ring => self.layers.evaluate_ring(stream, ring, call, inputs_as, outputs_as)?,
            _ => self.layers.evaluate(stream, workspace, call, inputs_as, outputs_as)?,
        }
        outputs_as.download(stream, 0, out)
    }
}

impl CudaSites<'_> {
    /// Evaluates a call as [`EvaluateSites::evaluate`] does, with the device's own error.
    pub(super) fn evaluate_here(
        &mut self,
        call: SiteCall,
        x: &Activations,
        out: &mut [f32],
    ) -> Result<(), CudaError> {
        let site = &self.layers.sites[call.site.0 as usize];
        let (inputs, outputs) = site.words(call).expect("the site has the part");
        assert_eq!(x.width(), inputs, "rows are as wide as what goes in");
        let out = &mut out[..x.rows() * outputs];
        self.evaluate_in_parts(call, x.values(), (inputs, outputs), out)
    }
}

impl From<CudaError> for EvaluateError {
    fn from(error: CudaError) -> Self {
        if error.is_out_of_memory() { Self::NoMemory(error.into()) } else { Self::Failed(error.into()) }
    }
}

impl EvaluateSites for CudaSites<'_> {
    fn sites(&self) -> &[Site] {
        &self.layers.sites
    }

    fn evaluate(
        &mut self,
        call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
    ) -> Result<(), EvaluateError> {
        self.layers.sites[call.site.0 as usize].check_ring(call)?;
        Ok(self.evaluate_here(call, x, out)?)
    }
}
