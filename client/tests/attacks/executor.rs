//! An honest but curious executor: it answers correctly, and records the rows that cross.

use std::sync::{Arc, Mutex, PoisonError};

use client::{
    error::LinkError,
    session::{Session, calls::modular_range},
    transport::{Connect, Transport, loopback::Loopback},
};
use kernels::Modulus;
use model::linear_sites::SiteId;
use shmproto::layer::{
    CallClass, CallHeader, Dtype, ReplyHeader, RowSource, SiteOp, SitePath,
    control::{FromLayers, ToLayers},
    seeded_rows::SeededRows,
};

use crate::support::{ring::unpacked, settings};

#[derive(Debug, Clone, Default)]
pub(crate) struct FloatRows {
    pub(crate) width: usize,
    /// Values of shape `[rows, width]`.
    pub(crate) values: Vec<f32>,
}

impl FloatRows {
    pub(crate) fn iter(&self) -> std::slice::ChunksExact<'_, f32> {
        self.values.chunks_exact(self.width)
    }

    pub(crate) fn count(&self) -> usize {
        self.values.len() / self.width
    }

    pub(crate) fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.width..][..self.width]
    }
}

/// Rows of integers modulo a power of two, in sequence.
#[derive(Debug, Clone)]
pub(crate) struct IntegerRows {
    pub(crate) modulus: Modulus,
    pub(crate) width: usize,
    /// Values of shape `[rows, width]`.
    pub(crate) numbers: Vec<u64>,
}

impl IntegerRows {
    pub(crate) fn count(&self) -> usize {
        self.numbers.len() / self.width
    }

    fn of(modulus: Modulus, words: &[f32], row_words: usize) -> Self {
        let numbers = unpacked(modulus.bytes(), words);
        Self { modulus, width: 4 * row_words / modulus.bytes(), numbers }
    }

    pub(crate) fn without(&self, other: &Self) -> Self {
        let less = |(z, r): (&u64, &u64)| z.wrapping_sub(*r) & u64::MAX >> (64 - self.modulus.bits());
        Self { numbers: self.numbers.iter().zip(&other.numbers).map(less).collect(), ..*self }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.numbers
            .iter()
            .flat_map(|number| number.to_le_bytes().into_iter().take(self.modulus.bytes()))
            .collect()
    }

    /// Rows as signed values of equal norm, for an observer who does not know the scales.
    pub(crate) fn seen(&self) -> FloatRows {
        let mut values: Vec<f32> = self
            .numbers
            .iter()
            .map(|number| (number << (64 - self.modulus.bits())).cast_signed() as f32)
            .collect();
        for row in values.chunks_mut(self.width) {
            let square: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
            let size = (square / self.width as f64).sqrt().max(f64::MIN_POSITIVE);
            row.iter_mut().for_each(|x| *x = (f64::from(*x) / size) as f32);
        }
        FloatRows { width: self.width, values }
    }
}

#[derive(Debug)]
struct CrossedCall {
    site: SiteId,
    op: SiteOp,
    path: SitePath,
    source: RowSource,
    class: CallClass,
    rows: usize,
    sent: Vec<f32>,
    answered: Vec<f32>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum CallEnd {
    Sent,
    Answered,
}

/// The executor and its records. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct CuriousExecutor {
    executor: Loopback,
    kept: Arc<Vec<SiteId>>,
    log: Arc<Mutex<Vec<CrossedCall>>>,
}

impl CuriousExecutor {
    pub(crate) fn new(executor: Loopback, kept: impl IntoIterator<Item = SiteId>) -> Self {
        Self { executor, kept: Arc::new(kept.into_iter().collect()), log: Arc::default() }
    }

    /// Clients' rows at `site`, or the answers to them, in order.
    pub(crate) fn forward(&self, site: SiteId, end: CallEnd) -> FloatRows {
        self.kept_rows(end, |seen| (seen.site, seen.op) == (site, SiteOp::Forward))
    }

    /// Noises of `site`, or their effects: the rows of calls without bias.
    pub(crate) fn noises(&self, site: SiteId, end: CallEnd) -> FloatRows {
        self.kept_rows(end, |seen| (seen.site, seen.op) == (site, SiteOp::ForwardNoBias))
    }

    /// Clients' gradients at `site`, or the answers to them.
    pub(crate) fn gradients(&self, site: SiteId, end: CallEnd) -> FloatRows {
        let is_noise = |seen: &CrossedCall| seen.class == CallClass::Noise;
        self.kept_rows(end, |seen| (seen.site, seen.op) == (site, SiteOp::Backward) && !is_noise(seen))
    }

    /// Noises of gradients at `site`, or their effects: the client's call names this purpose.
    pub(crate) fn gradient_noises(&self, site: SiteId, end: CallEnd) -> FloatRows {
        let is_noise = |seen: &CrossedCall| seen.class == CallClass::Noise;
        self.kept_rows(end, |seen| (seen.site, seen.op) == (site, SiteOp::Backward) && is_noise(seen))
    }

    fn kept_rows(&self, end: CallEnd, is_wanted: impl Fn(&CrossedCall) -> bool) -> FloatRows {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rows = FloatRows::default();
        for seen in log.iter().filter(|seen| is_wanted(seen)) {
            let values = match end {
                CallEnd::Sent => &seen.sent,
                CallEnd::Answered => &seen.answered,
            };
            rows.width = values.len() / seen.rows;
            rows.values.extend_from_slice(values);
        }
        assert!(rows.width > 0, "such calls were kept");
        rows
    }

    /// Integer rows sent to `site`, or their answers, in order.
    pub(crate) fn whole(&self, site: SiteId, op: SiteOp, end: CallEnd) -> IntegerRows {
        let words = self.kept_rows(end, |seen| {
            (seen.site, seen.op, seen.path, seen.source) == (site, op, SitePath::Ring, RowSource::Rows)
        });
        IntegerRows::of(self.modulus(site, op), &words.values, words.width)
    }

    fn modulus(&self, site: SiteId, op: SiteOp) -> Modulus {
        let session = Session::open(Box::new(self.executor.clone()), settings()).unwrap();
        modular_range(&session.catalog().sites[site.0 as usize], op).unwrap().modulus
    }

    /// Rows of `width` integers that the executor had to draw for `site`.
    pub(crate) fn drawn(&self, site: SiteId, op: SiteOp, width: usize) -> IntegerRows {
        let modulus = self.modulus(site, op);
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let row_words = modulus.words(width);
        let mut rows = Vec::new();
        for seen in log.iter().filter(|seen| (seen.site, seen.op, seen.source) == (site, op, RowSource::Draw))
        {
            let mut words = vec![0.0; row_words * seen.rows];
            let draw = SeededRows::from_words(seen.sent.as_slice().try_into().unwrap());
            draw.fill(0, row_words, &mut words);
            rows.extend(words);
        }
        IntegerRows::of(modulus, &rows, row_words)
    }

    /// The executor's own product of `x` with its weights at `site`, without bias.
    pub(crate) fn evaluate(&self, site: SiteId, x: &FloatRows, outputs: usize) -> FloatRows {
        let call = CallHeader {
            op: SiteOp::ForwardNoBias,
            path: SitePath::Linear,
            class: CallClass::Noise,
            dtype: Dtype::F32,
            site: site.0,
            part: None,
            source: RowSource::Rows,
            sequence: 1,
            rows: u32::try_from(x.count()).unwrap(),
            input: 0,
            output: 0,
        };
        let mut out = FloatRows { width: outputs, values: vec![0.0; x.count() * outputs] };
        let mut own = self.executor.connect().unwrap();
        let reply = own.call(&call, &x.values, &mut out.values).unwrap();
        assert_eq!(reply.rows, call.rows, "the executor answers itself");
        out
    }
}

impl Connect for CuriousExecutor {
    fn connect(&self) -> Result<Box<dyn Transport>, LinkError> {
        Ok(Box::new(TappedTransport { inner: self.executor.connect()?, curious: self.clone() }))
    }
}

#[derive(Debug)]
struct TappedTransport {
    inner: Box<dyn Transport>,
    curious: CuriousExecutor,
}

impl Transport for TappedTransport {
    fn ask(&mut self, message: &ToLayers) -> Result<FromLayers, LinkError> {
        self.inner.ask(message)
    }

    fn send_oneway(&mut self, message: &ToLayers) {
        self.inner.send_oneway(message);
    }

    fn call(&mut self, call: &CallHeader, x: &[f32], out: &mut [f32]) -> Result<ReplyHeader, LinkError> {
        let reply = self.inner.call(call, x, out)?;
        let site = SiteId(call.site);
        if self.curious.kept.contains(&site) {
            let (sent, answered) = (x.to_vec(), out.to_vec());
            let CallHeader { op, path, source, class, .. } = *call;
            let seen =
                CrossedCall { site, op, path, source, class, rows: call.rows as usize, sent, answered };
            self.curious.log.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
        }
        Ok(reply)
    }
}
