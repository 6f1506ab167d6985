//! Exact arithmetic: rows as integers modulo 2^48 or 2^64, over any [`ModularRoute`].
//!
//! The bias of a site is not an integer. The client asks for it once, with a row of zeros on the float path,
//! which reveals nothing, and adds it here.

use std::{collections::BTreeMap, fmt};

use kernels::Modulus;
use model::linear_sites::{ModularRange, SiteId};
use shmproto::layer::{SiteOp, SitePath};

use super::{
    CallSite, Direction, Mask, fixed_point,
    modular_rows::{first, offers, pack, unpack},
    shapes_of, site_name,
    verify::SessionVerifier,
};
use crate::{
    error::CallError,
    session::{
        Session,
        calls::{LayerCall, modular_range},
    },
};

/// A way of integer rows through a site.
pub(super) trait ModularRoute: Send + fmt::Debug {
    /// Returns the mode's name in answers and logs.
    fn mode(&self) -> &'static str;

    /// Takes the rows `x` through a site into `out`; rows travel modulo `modulus`, and all values are signed.
    /// Calls `meanwhile` each time that rows are sent.
    ///
    /// # Errors
    /// Fails if the executor is gone, or refuses.
    fn call(
        &mut self,
        session: &mut Session,
        ask: LayerCall,
        modulus: Modulus,
        x: &[u64],
        out: &mut [u64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), CallError>;
}

#[derive(Debug, Default)]
pub(super) struct SingleExecutorRoute {
    sent: Vec<f32>,
    answer: Vec<f32>,
}

impl ModularRoute for SingleExecutorRoute {
    fn mode(&self) -> &'static str {
        "off"
    }

    fn call(
        &mut self,
        session: &mut Session,
        ask: LayerCall,
        modulus: Modulus,
        x: &[u64],
        out: &mut [u64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), CallError> {
        let sent = first(&mut self.sent, modulus.words(x.len()));
        let answer = first(&mut self.answer, modulus.words(out.len()));
        pack(modulus, x, sent);
        session.call_beside(ask, sent, answer, meanwhile)?;
        unpack(modulus, answer, out);
        Ok(())
    }
}

pub(super) struct ModularMask {
    route: Box<dyn ModularRoute>,
    verifying: Option<SessionVerifier>,
    pad_rows: bool,
    /// Bias of each known site; `None` if the site has none.
    biases: BTreeMap<SiteId, Option<Vec<f32>>>,
    x: Vec<u64>,
    y: Vec<u64>,
    exponents: Vec<i32>,
    /// Expected checksums of the answers.
    foreseen: Vec<i128>,
}

impl fmt::Debug for ModularMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_verified = self.verifying.is_some();
        f.debug_struct("Ring")
            .field("route", &self.route)
            .field("verified", &is_verified)
            .finish_non_exhaustive()
    }
}

impl ModularMask {
    /// # Errors
    /// Fails if a site has no modular path.
    pub(super) fn new(
        route: Box<dyn ModularRoute>,
        verifying: Option<SessionVerifier>,
        pad_rows: bool,
        session: &Session,
    ) -> Result<Self, CallError> {
        offers(session)?;
        let (biases, x, y) = (BTreeMap::new(), Vec::new(), Vec::new());
        let (exponents, foreseen) = (Vec::new(), Vec::new());
        Ok(Self { route, verifying, pad_rows, biases, x, y, exponents, foreseen })
    }

    /// Returns the number of rows sent for `count` rows.
    fn sent(&self, count: usize) -> usize {
        if self.pad_rows { count.next_power_of_two() } else { count }
    }

    /// Fills `self.x` with the integers of `rows`, and the padding rows with zeros.
    fn convert(
        &mut self,
        place: CallSite,
        width: usize,
        bits: u32,
        rows: &[f32],
        of: &Session,
    ) -> Result<(), CallError> {
        let sent = self.sent(rows.len() / width) * width;
        let (whole, behind) = first(&mut self.x, sent).split_at_mut(rows.len());
        behind.fill(0);
        self.exponents.clear();
        for (number, (row, whole)) in rows.chunks(width).zip(whole.chunks_mut(width)).enumerate() {
            let site = || site_name(place.site, &shapes_of(&of.catalog().sites));
            let exponent = fixed_point::to_whole(row, bits, whole)
                .ok_or_else(|| CallError::NotFinite { site: site(), row: number })?;
            self.exponents.push(exponent);
        }
        Ok(())
    }

    fn bias(
        &mut self,
        session: &mut Session,
        place: CallSite,
        outputs: usize,
    ) -> Result<Option<&[f32]>, CallError> {
        if place.direction == Direction::Backward {
            return Ok(None);
        }
        if !self.biases.contains_key(&place.site) {
            let bias = ask_bias(session, place, outputs)?;
            if let (Some(verifying), Some(bias)) = (&self.verifying, &bias) {
                verifying.check_bias(place.site, bias)?;
            }
            self.biases.insert(place.site, bias);
        }
        Ok(self.biases.get(&place.site).and_then(Option::as_deref))
    }
}

/// Asks for the bias of a site on the float path.
fn ask_bias(session: &mut Session, place: CallSite, outputs: usize) -> Result<Option<Vec<f32>>, CallError> {
    let site = &session.catalog().sites[place.site.0 as usize];
    if site.parts.iter().all(|part| part.has_bias == 0) {
        return Ok(None);
    }
    if !site.has_path(SitePath::Linear) {
        return Err(CallError::Nonlinear { site: place.site.0 });
    }
    let (zeros, mut bias) = (vec![0.0; site.columns as usize], vec![0.0; outputs]);
    session.call(place.ask(SitePath::Linear), &zeros, &mut bias)?;
    Ok(Some(bias))
}

impl Mask for ModularMask {
    fn mode(&self) -> &'static str {
        self.route.mode()
    }

    fn call(
        &mut self,
        session: &mut Session,
        place: CallSite,
        rows: &[f32],
        out: &mut [f32],
    ) -> Result<(), CallError> {
        let op = match place.direction {
            Direction::Forward => SiteOp::ForwardNoBias,
            Direction::Backward => SiteOp::Backward,
        };
        let ask = LayerCall { op, ..place.ask(SitePath::Ring) };
        let (input, output) = session.widths(ask)?;
        let (count, site) = (rows.len() / input, place.site.0);
        if !rows.len().is_multiple_of(input) || count.checked_mul(output) != Some(out.len()) {
            return Err(CallError::Shape {
                site,
                rows: count,
                reason: "widths of the rows are not the site's",
            });
        }
        let no_ring = || CallError::NoRing { site };
        let offered = &session.catalog().sites[site as usize];
        let (offer, range) = offered.ring.zip(modular_range(offered, op)).ok_or_else(no_ring)?;
        let ModularRange { modulus, bits } = range;
        self.convert(place, input, bits, rows, session)?;
        let sent = self.sent(count);
        let (x, y) = (&self.x[..sent * input], first(&mut self.y, sent * output));
        let (verifying, foreseen, mut is_foreseen) = (&self.verifying, &mut self.foreseen, false);
        let mut foresee = || {
            if let (Some(verifying), false) = (verifying, is_foreseen) {
                verifying.compute_expected(place, x, foreseen);
                is_foreseen = true;
            }
        };
        self.route.call(session, ask, modulus, x, y, &mut foresee)?;
        foresee();
        if let Some(verifying) = verifying {
            verifying.check(place, foreseen, y)?;
        }
        for ((row, whole), exponent) in out.chunks_mut(output).zip(y.chunks(output)).zip(&self.exponents) {
            let exponent = exponent.saturating_add(offer.weight_exponent);
            fixed_point::from_whole(modulus, whole, exponent, row);
        }
        if let Some(bias) = self.bias(session, place, output)? {
            for row in out.chunks_mut(output) {
                row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
            }
        }
        Ok(())
    }
}
