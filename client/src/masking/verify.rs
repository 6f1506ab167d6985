//! Whether an executor's answers are what the weights make of the rows (Freivalds).
//!
//! With secret numbers `s`, and `v = s W` computed once from a copy of the weights, `y = x W` is checked by `y · s = x · v`: a few
//! products for each number, where computing `y` again would take as many as there are weights. Numbers have signs, and nothing
//! wraps around: `s` has as few bits as leave `v` below 2^62, and the sums have 128. So a wrong `y`, whatever it is, and whoever
//! chose it without knowing `s`, passes one check with a probability below `2^-b` for `s` of `b` bits, 12 to 30. There are as many
//! checks as bring that below `2^-48`: two for most sites. `x · v` is computed while the executor
//! computes `y`. Where rows have fewer bits than `s`, `v` is computed from pieces of `s`. Answers modulo 2^64 would be weaker: an error
//! in the highest bit alone vanishes at every even `s`.
//!
//! - [`file`]: the same in a file, for clients that have no copy of the weights at hand.

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

/// Bits that the secrets of a number have at least, all checks together: a wrong answer passes with `2^-48`.
const MIN_SECRET_BITS: u32 = 48;

/// What answers of a site are checked with, in one direction.
struct SiteCheck {
    /// `[checks, width of an answer]`.
    secret: Vec<u32>,
    /// `[checks, width of a row]`: the secret through the site the other way.
    effect: Vec<i64>,
    /// How many.
    checks: usize,
}

impl SiteCheck {
    /// What a true answer to the row `x` comes to with each secret.
    fn foreseen(&self, x: &[u64]) -> impl Iterator<Item = i128> {
        self.effect.chunks(x.len()).map(|effect| product(x, effect))
    }

    /// Whether the answer `y` comes to what was foreseen.
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

/// As numbers with signs; a sum of 2^26 products of 62 and 62 bits does not overflow.
pub(super) fn product<T: Copy + Into<i64>>(a: &[u64], b: &[T]) -> i128 {
    a.iter().zip(b).map(|(&a, &b)| i128::from(a.cast_signed()) * i128::from(b.into())).sum()
}

/// What is known of a site.
struct VerifiedSite {
    ring: ModularSite,
    checks: [SiteCheck; 2],
    /// What it adds, if it adds anything.
    bias: Option<Vec<f32>>,
}

/// What answers are checked with: secrets, and what a copy of the weights makes of them. Not of their size: eight numbers for each
/// that goes into a site or comes out.
pub struct Verifier {
    sites: Vec<VerifiedSite>,
}

impl fmt::Debug for Verifier {
    /// Secrets are nobody's business.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").field("sites", &self.sites.len()).finish_non_exhaustive()
    }
}

impl Verifier {
    /// Computes it from this process's own weights, which are not needed any more then; tells `told` how many of how many
    /// sites are done.
    ///
    /// # Errors
    /// A site has no ring path, there is no randomness, or the device fails.
    pub fn new(base: &mut dyn EvaluateSites, told: &mut dyn FnMut(usize, usize)) -> Result<Self, CallError> {
        let mut secrets = SeededRows { key: secrets::key()?, first: 0 };
        let shapes = base.sites().to_vec();
        let mut sites = Vec::with_capacity(shapes.len());
        for (site, number) in shapes.iter().zip(0..) {
            sites.push(known(base, SiteId(number), site, &mut secrets)?);
            told(sites.len(), shapes.len());
        }
        Ok(Self { sites })
    }

    /// A site as people read it.
    fn name(&self, site: SiteId) -> String {
        let shape = |known: &VerifiedSite| {
            let SiteCheck { effect, secret, checks } = &known.checks[Direction::Forward as usize];
            [effect.len() / checks, secret.len() / checks]
        };
        site_name(site, &self.sites.iter().map(shape).collect::<Vec<_>>())
    }

    /// Checks the answers of a session with it.
    ///
    /// # Errors
    /// Its executor has, or says it has, other weights.
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

/// Secrets of a site, and what it makes of them.
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

/// What answers of a site, or of one of its parts, are checked with.
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
    // Whatever rows travel modulo, an effect is a number of 64 bits.
    let ModularRange { bits, .. } = ModularRange::new(ring.l1[back as usize], false).ok_or_else(no_ring)?;
    let room = site.ring_room(op_of(back)).ok_or_else(no_ring)?;
    let checks = MIN_SECRET_BITS.div_ceil(bits) as usize;
    let (mut secret, mut effect) = (vec![0_u32; checks * answer], vec![0_i64; checks * row]);
    secrets.fill(0, answer, bytemuck::cast_slice_mut(&mut secret));
    secrets.first += checks as u64;
    secret.iter_mut().for_each(|number| *number &= (1 << bits) - 1);
    // Who knows effects knows secrets.
    let [mut piece, mut part_of_effect] =
        [secret.len(), effect.len()].map(|count| Zeroizing::new(vec![0_u64; count]));
    let [mut x, mut out] =
        [secret.len(), effect.len()].map(|count| Zeroizing::new(vec![0.0; room.modulus.words(count)]));
    for shift in (0..bits).step_by(room.bits as usize) {
        let mask = (1 << room.bits.min(bits - shift)) - 1;
        piece.iter_mut().zip(&secret).for_each(|(piece, secret)| *piece = u64::from(secret >> shift & mask));
        pack(room.modulus, &piece, &mut x);
        evaluate(base, (number, part), back, &x, &mut out)?;
        unpack(room.modulus, &out, &mut part_of_effect);
        for (effect, part) in effect.iter_mut().zip(part_of_effect.iter()) {
            *effect = effect.wrapping_add(part.cast_signed().wrapping_shl(shift));
        }
    }
    Ok(SiteCheck { secret, effect, checks })
}

/// Outputs of all parts.
fn outputs_of(site: &Site) -> usize {
    site.parts.iter().map(|part| part.rows).sum()
}

/// The operation of a direction, without bias.
fn op_of(direction: Direction) -> SiteOp {
    match direction {
        Direction::Forward => SiteOp::ForwardNoBias,
        Direction::Backward => SiteOp::Backward,
    }
}

/// Takes rows of whole numbers, as they travel, through a site of one's own, or one of its parts.
///
/// # Errors
/// The device fails.
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
    /// Writes what true answers to the rows `x` come to.
    pub(super) fn compute_expected(&self, place: CallSite, x: &[u64], foreseen: &mut Vec<i128>) {
        foreseen.clear();
        if let Some(check) = self.of(place) {
            let rows = x.chunks(check.effect.len() / check.checks);
            rows.for_each(|x| foreseen.extend(check.foreseen(x)));
        }
    }

    /// # Errors
    /// An answer does not come to what was foreseen of its row.
    pub(super) fn check(&self, place: CallSite, foreseen: &[i128], y: &[u64]) -> Result<(), CallError> {
        let wrong = || CallError::Wrong { site: self.0.name(place.site) };
        let check = self.of(place).ok_or_else(wrong)?;
        let answers = y.chunks(check.secret.len() / check.checks);
        let mut pairs = foreseen.chunks(check.checks).zip(answers.clone());
        let are_all = foreseen.len() == check.checks * answers.len();
        if are_all && pairs.all(|(sums, y)| check.passes(sums, y)) { Ok(()) } else { Err(wrong()) }
    }

    /// What answers are checked with there.
    fn of(&self, place: CallSite) -> Option<&SiteCheck> {
        self.0.sites.get(place.site.0 as usize).map(|known| &known.checks[place.direction as usize])
    }

    /// # Errors
    /// It is not what the site adds.
    pub(super) fn check_bias(&self, site: SiteId, bias: &[f32]) -> Result<(), CallError> {
        let own = self.0.sites.get(site.0 as usize).and_then(|known| known.bias.as_deref());
        if own == Some(bias) { Ok(()) } else { Err(CallError::Wrong { site: self.0.name(site) }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Outputs 3, inputs 2.
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
        // Two errors that a check modulo 2^64 with odd or even numbers alone would let pass.
        let mut wrong = y;
        wrong[0] ^= 1 << 63;
        wrong[1] ^= 1 << 63;
        assert!(!check.passes(&foreseen, &wrong));
    }
}
