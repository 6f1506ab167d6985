//! Verification that an executor's answers follow from the weights (Freivalds).
//!
//! With secret numbers `s`, and `v = s W` computed once from a copy of the weights, `y = x W` is checked by
//! `y · s = x · v`. The check takes a few products per element; computing `y` again would take as many
//! products as there are weights. All values are signed and nothing overflows: `s` has few enough bits that
//! `v` stays below 2^62, and the sums have 128 bits.
//!
//! For `s` of `b` bits, 12 to 30, any wrong `y` that was chosen without knowing `s` passes one check with a
//! probability below `2^-b`. Enough checks are made to bring that below `2^-48`: two for most sites. `x · v`
//! is computed while the executor computes `y`. Where rows have fewer bits than `s`, `v` is computed from
//! pieces of `s`. Answers modulo 2^64 would be weaker: an error in the highest bit alone vanishes at every
//! even `s`.
//!
//! - [`file`]: the secrets and their effects in a file, for clients without a copy of the weights.

pub mod file;

use std::{fmt, sync::Arc};

use kernels::Activations;
use model::linear_sites::{
    EvaluateError, EvaluateSites, ModularRange, ModularSite, Site, SiteCall, SiteId, SiteOp, SitePath,
};
use shmproto::layer::seeded_rows::SeededRows;
use zeroize::{Zeroize as _, Zeroizing};

use super::{
    CallSite, Direction,
    modular_rows::{offers, pack, unpack},
    site_name,
};
use crate::{error::CallError, secrets, session::Session};

/// Minimum secret bits per value, over all checks: a wrong answer passes with a probability of `2^-48`.
const MIN_SECRET_BITS: u32 = 48;

/// Secrets and their effects for a site, in one direction.
struct SiteCheck {
    /// `[checks, width of an answer]`.
    secret: Vec<u32>,
    /// `[checks, width of a row]`: the secret through the site in the other direction.
    effect: Vec<i64>,
    checks: usize,
}

impl SiteCheck {
    /// Returns the expected checksums of the answer to the row `x`, one per check.
    fn foreseen(&self, x: &[u64]) -> impl Iterator<Item = i128> {
        self.effect.chunks(x.len()).map(|effect| product(x, effect))
    }

    /// Whether the answer `y` has the expected checksums.
    fn passes(&self, foreseen: &[i128], y: &[u64]) -> bool {
        foreseen.iter().zip(self.secret.chunks(y.len())).all(|(sum, secret)| *sum == product(y, secret))
    }
}

impl Drop for SiteCheck {
    fn drop(&mut self) {
        self.secret.zeroize();
        self.effect.zeroize();
    }
}

/// Returns the product of signed values; a sum of 2^26 products of 62 and 62 bits does not overflow.
pub(super) fn product<T: Copy + Into<i64>>(a: &[u64], b: &[T]) -> i128 {
    a.iter().zip(b).map(|(&a, &b)| i128::from(a.cast_signed()) * i128::from(b.into())).sum()
}

struct VerifiedSite {
    ring: ModularSite,
    checks: [SiteCheck; 2],
    bias: Option<Vec<f32>>,
}

/// Data to check answers: secrets and their effects. The size is at most eight numbers per input and output
/// of each site, not that of the weights.
pub struct Verifier {
    sites: Vec<VerifiedSite>,
}

impl fmt::Debug for Verifier {
    /// Secrets are not printed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").field("sites", &self.sites.len()).finish_non_exhaustive()
    }
}

impl Verifier {
    /// Computes the data from this process's own weights, which are not needed afterwards; calls
    /// `on_progress` with the numbers of finished sites and of all sites.
    ///
    /// # Errors
    /// Fails if a site has no modular path, the system has no randomness, or the device fails.
    pub fn new(
        base: &mut dyn EvaluateSites,
        on_progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, CallError> {
        let mut secrets = SeededRows { key: secrets::key()?, first: 0 };
        let shapes = base.sites().to_vec();
        let mut sites = Vec::with_capacity(shapes.len());
        for (site, number) in shapes.iter().zip(0..) {
            sites.push(known(base, SiteId(number), site, &mut secrets)?);
            on_progress(sites.len(), shapes.len());
        }
        Ok(Self { sites })
    }

    fn name(&self, site: SiteId) -> String {
        let shape = |known: &VerifiedSite| {
            let SiteCheck { effect, secret, checks } = &known.checks[Direction::Forward as usize];
            [effect.len() / checks, secret.len() / checks]
        };
        site_name(site, &self.sites.iter().map(shape).collect::<Vec<_>>())
    }

    /// Checks the answers of a session from now on.
    ///
    /// # Errors
    /// Fails if the executor has, or claims to have, other weights.
    pub(super) fn over(self: &Arc<Self>, session: &Session) -> Result<SessionVerifier, CallError> {
        let theirs = offers(session)?;
        let is_same = |(own, offer): (&VerifiedSite, &shmproto::layer::control::ModularWeights)| {
            let ModularSite { weight_exponent, l1, commitment } = own.ring;
            (weight_exponent, l1, commitment) == (offer.weight_exponent, offer.l1, offer.commitment)
        };
        let other = self.sites.iter().zip(&theirs).position(|pair| !is_same(pair));
        let count = self.sites.len();
        match other {
            Some(at) => {
                let number = SiteId(u32::try_from(at).unwrap_or(u32::MAX));
                Err(CallError::OtherWeights { site: self.name(number) })
            }
            None if theirs.len() != count => {
                Err(CallError::OtherWeights { site: "the number of sites".to_owned() })
            }
            None => Ok(SessionVerifier(Arc::clone(self))),
        }
    }
}

/// Computes secrets and effects of a site.
fn known(
    base: &mut dyn EvaluateSites,
    number: SiteId,
    site: &Site,
    secrets: &mut SeededRows,
) -> Result<VerifiedSite, CallError> {
    let ring = site.ring.ok_or(CallError::NoRing { site: number.0 })?;
    let mut check = |direction| check(base, (number, site), None, direction, secrets);
    let checks = [check(Direction::Forward)?, check(Direction::Backward)?];
    Ok(VerifiedSite { ring, checks, bias: bias(base, number, site)? })
}

/// Computes secrets and effects of a site, or of one of its parts, in one direction.
fn check(
    base: &mut dyn EvaluateSites,
    (number, site): (SiteId, &Site),
    part: Option<u8>,
    direction: Direction,
    secrets: &mut SeededRows,
) -> Result<SiteCheck, CallError> {
    let no_ring = || CallError::NoRing { site: number.0 };
    let ring = site.ring.ok_or_else(no_ring)?;
    let outputs = part.map_or_else(|| outputs_of(site), |part| site.parts[usize::from(part)].rows);
    let (answer, row, back) = match direction {
        Direction::Forward => (outputs, site.columns, Direction::Backward),
        Direction::Backward => (site.columns, outputs, Direction::Forward),
    };
    // The wire modulus does not matter here, because an effect is a number of 64 bits.
    let ModularRange { bits, .. } = ModularRange::new(ring.l1[back as usize], false).ok_or_else(no_ring)?;
    let range = site.modular_range(op_of(back)).ok_or_else(no_ring)?;
    let checks = MIN_SECRET_BITS.div_ceil(bits) as usize;
    let (mut secret, mut effect) = (vec![0_u32; checks * answer], vec![0_i64; checks * row]);
    secrets.fill(0, answer, bytemuck::cast_slice_mut(&mut secret));
    secrets.first += checks as u64;
    secret.iter_mut().for_each(|number| *number &= (1 << bits) - 1);
    // The buffers are erased, because effects reveal the secrets.
    let [mut piece, mut part_of_effect] =
        [secret.len(), effect.len()].map(|count| Zeroizing::new(vec![0_u64; count]));
    let [mut x, mut out] =
        [secret.len(), effect.len()].map(|count| Zeroizing::new(vec![0.0; range.modulus.words(count)]));
    for shift in (0..bits).step_by(range.bits as usize) {
        let mask = (1 << range.bits.min(bits - shift)) - 1;
        piece.iter_mut().zip(&secret).for_each(|(piece, secret)| *piece = u64::from(secret >> shift & mask));
        pack(range.modulus, &piece, &mut x);
        evaluate(base, (number, part), back, &x, &mut out)?;
        unpack(range.modulus, &out, &mut part_of_effect);
        for (effect, part) in effect.iter_mut().zip(part_of_effect.iter()) {
            *effect = effect.wrapping_add(part.cast_signed().wrapping_shl(shift));
        }
    }
    Ok(SiteCheck { secret, effect, checks })
}

fn outputs_of(site: &Site) -> usize {
    site.parts.iter().map(|part| part.rows).sum()
}

/// Returns the operation of a direction, without bias.
fn op_of(direction: Direction) -> SiteOp {
    match direction {
        Direction::Forward => SiteOp::ForwardNoBias,
        Direction::Backward => SiteOp::Backward,
    }
}

/// Takes integer rows in wire format through a site of the client's own weights, or through one of its parts.
///
/// # Errors
/// Fails if the device fails.
pub(super) fn evaluate(
    base: &mut dyn EvaluateSites,
    (site, part): (SiteId, Option<u8>),
    direction: Direction,
    x: &[f32],
    out: &mut [f32],
) -> Result<(), CallError> {
    let call = SiteCall { site, part, op: op_of(direction), path: SitePath::Ring };
    let width = base.sites()[site.0 as usize].words(call).map_or(1, |(input, _)| input);
    let mut activations = Activations::default();
    activations.reshape(x.len() / width, width);
    activations.values_mut().copy_from_slice(x);
    base.evaluate(call, &mut activations, out).map_err(failed)
}

fn bias(base: &mut dyn EvaluateSites, number: SiteId, site: &Site) -> Result<Option<Vec<f32>>, CallError> {
    if site.parts.iter().all(|part| !part.has_bias) {
        return Ok(None);
    }
    let call = SiteCall { site: number, part: None, op: SiteOp::Forward, path: SitePath::Linear };
    let (mut zeros, mut bias) = (Activations::default(), vec![0.0; outputs_of(site)]);
    zeros.reshape(1, site.columns);
    zeros.values_mut().fill(0.0);
    base.evaluate(call, &mut zeros, &mut bias).map_err(failed)?;
    Ok(Some(bias))
}

fn failed(_: EvaluateError) -> CallError {
    CallError::Masking("the weights of this machine's own cannot be computed with")
}

/// Checks the answers of one session.
#[derive(Debug, Clone)]
pub(super) struct SessionVerifier(Arc<Verifier>);

impl SessionVerifier {
    /// Writes the expected checksums of the answers to the rows `x`.
    pub(super) fn compute_expected(&self, place: CallSite, x: &[u64], foreseen: &mut Vec<i128>) {
        foreseen.clear();
        if let Some(check) = self.of(place) {
            let rows = x.chunks(check.effect.len() / check.checks);
            rows.for_each(|x| foreseen.extend(check.foreseen(x)));
        }
    }

    /// # Errors
    /// Fails if an answer does not have the expected checksums of its row.
    pub(super) fn check(&self, place: CallSite, foreseen: &[i128], y: &[u64]) -> Result<(), CallError> {
        let wrong = || CallError::Wrong { site: self.0.name(place.site) };
        let check = self.of(place).ok_or_else(wrong)?;
        let answers = y.chunks(check.secret.len() / check.checks);
        let mut pairs = foreseen.chunks(check.checks).zip(answers.clone());
        let are_all = foreseen.len() == check.checks * answers.len();
        if are_all && pairs.all(|(sums, y)| check.passes(sums, y)) { Ok(()) } else { Err(wrong()) }
    }

    fn of(&self, place: CallSite) -> Option<&SiteCheck> {
        self.0.sites.get(place.site.0 as usize).map(|known| &known.checks[place.direction as usize])
    }

    /// # Errors
    /// Fails if `bias` is not the bias of the site.
    pub(super) fn check_bias(&self, site: SiteId, bias: &[f32]) -> Result<(), CallError> {
        let own = self.0.sites.get(site.0 as usize).and_then(|known| known.bias.as_deref());
        if own == Some(bias) { Ok(()) } else { Err(CallError::Wrong { site: self.0.name(site) }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A site with 3 outputs and 2 inputs.
    const WEIGHTS: [[i64; 2]; 3] = [[5, -7], [1 << 30, 2], [-3, 0]];

    fn check() -> SiteCheck {
        let secret: Vec<u32> = (1..=2 * 3_u32).map(|number| number * 77_777_777 % 1_000_003).collect();
        let effect = secret.chunks(3).flat_map(|s| {
            let column = |at: usize| (0..3).map(|row| i64::from(s[row]) * WEIGHTS[row][at]).sum::<i64>();
            [column(0), column(1)]
        });
        SiteCheck { effect: effect.collect(), checks: 2, secret: secret.clone() }
    }

    #[test]
    fn a_true_answer_passes_and_one_with_any_bit_turned_does_not() {
        let x = [-9_i64, 1 << 20];
        let y = WEIGHTS.map(|row| (row[0] * x[0] + row[1] * x[1]).cast_unsigned());
        let x = x.map(i64::cast_unsigned);
        let check = check();
        let foreseen: Vec<i128> = check.foreseen(&x).collect();
        assert!(check.passes(&foreseen, &y));
        for bit in 0..192 {
            let mut wrong = y;
            wrong[bit / 64] ^= 1 << (bit % 64);
            assert!(!check.passes(&foreseen, &wrong), "bit {bit}");
        }
        // Two errors that a check modulo 2^64 with only odd or only even numbers would let pass.
        let mut wrong = y;
        wrong[0] ^= 1 << 63;
        wrong[1] ^= 1 << 63;
        assert!(!check.passes(&foreseen, &wrong));
    }
}
