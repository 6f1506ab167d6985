//! The paper's mask on gradients, and the rows that cross.

use crate::executor::{CallEnd, CuriousExecutor, FloatRows};
use crate::support::{settings, tiny};
use client::{
    masking::{CallSite, Direction, Mask, Masking, NoiseSettings},
    session::Session,
};
use model::linear_sites::SiteId;
use shmproto::layer::{CallClass, SitePath};

/// The site `[q | k | v]` of the first layer.
const SITE: SiteId = SiteId(0);
const PLAIN: Masking = Masking::Off { path: SitePath::Linear };

/// A client, its mask, and an executor that records the rows of [`SITE`].
struct GradientMaskFixture {
    curious: CuriousExecutor,
    session: Session,
    mask: Box<dyn Mask>,
}

impl GradientMaskFixture {
    fn new(masking: Masking) -> Self {
        let curious = CuriousExecutor::new(crate::support::executor(&tiny("llama-tied")), [SITE]);
        let mut session = Session::open(Box::new(curious.clone()), settings()).unwrap();
        let mask = masking.prepare(&mut session, &mut |_, _| {}).unwrap();
        Self { curious, session, mask }
    }

    /// Elements of an activation and of a gradient at `site`.
    fn widths(&self, site: SiteId) -> (usize, usize) {
        let site = &self.session.catalog().sites[site.0 as usize];
        (site.columns as usize, site.parts.iter().map(|part| part.rows as usize).sum())
    }

    fn forward(&mut self, rows: usize) {
        let (columns, outputs) = self.widths(SITE);
        let place = CallSite { site: SITE, direction: Direction::Forward, class: CallClass::Training };
        let mut out = vec![0.0; rows * outputs];
        self.mask.call(&mut self.session, place, &numbers(rows * columns, 1.0), &mut out).unwrap();
    }

    fn backward(&mut self, site: SiteId, g: &[f32]) -> Vec<f32> {
        let (columns, outputs) = self.widths(site);
        let place = CallSite { site, direction: Direction::Backward, class: CallClass::Training };
        let mut out = vec![0.0; g.len() / outputs * columns];
        self.mask.call(&mut self.session, place, g, &mut out).unwrap();
        out
    }

    fn bought(&mut self) -> u64 {
        self.session.stats().unwrap().rows[CallClass::Noise as usize]
    }
}

fn numbers(count: usize, size: f32) -> Vec<f32> {
    let number = |at: u32| (at.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0;
    (0..u32::try_from(count).unwrap()).map(|at| size * number(at)).collect()
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most, value| most.max(value.abs()))
}

fn paper(noises: usize, rotate_rows: u64) -> Masking {
    Masking::Paper(NoiseSettings { noises, rotate_rows, ..NoiseSettings::default() })
}

#[test]
fn gradients_come_back_through_the_mask_up_to_rounding_however_small_they_become() {
    let (mut plain, mut masked) =
        (GradientMaskFixture::new(PLAIN), GradientMaskFixture::new(paper(2, 1 << 14)));
    let sites = u32::try_from(plain.session.catalog().sites.len()).unwrap();
    let mut worst = 0.0f32;
    for site in (0..sites).map(SiteId) {
        let width = plain.widths(site).1;
        for size in [1.0, 1e-7, 0.0, 1e4] {
            let g = numbers(5 * width, size);
            let (expected, found) = (plain.backward(site, &g), masked.backward(site, &g));
            let difference: Vec<f32> = found.iter().zip(&expected).map(|(a, b)| a - b).collect();
            let far = largest(&difference) / if size == 0.0 { 1.0 } else { largest(&expected) };
            assert!(far < 1e-5, "{site:?}, gradients of {size}: {far}");
            worst = worst.max(far);
        }
    }
    println!("{worst:.1e} of the largest");
}

/// Gradients as at a head: one peak and small values elsewhere; and one row of zeros.
fn peaks(rows: usize, width: usize) -> FloatRows {
    let mut g = FloatRows { width, values: numbers(rows * width, 1e-3) };
    for (row, values) in g.values.chunks_exact_mut(width).enumerate() {
        values[7 * row % width] = -1.0;
    }
    g.values[..width].fill(0.0);
    g
}

#[test]
fn the_executor_sees_no_gradient_as_it_is_nor_where_its_peak_lies() {
    let mut scene = GradientMaskFixture::new(paper(2, 1 << 14));
    let g = peaks(33, scene.widths(SITE).1);
    scene.backward(SITE, &g.values);
    let sent = scene.curious.gradients(SITE, CallEnd::Sent);
    let lowest = |row: &[f32]| (0..row.len()).min_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
    let mut found = 0;
    for (sent, g) in sent.iter().zip(g.iter()) {
        let bare = sent.iter().zip(g).filter(|(sent, g)| sent == g).count();
        assert_eq!(bare, 0, "every number carries noise");
        found += usize::from(lowest(sent) == lowest(g));
    }
    assert_eq!(sent.count(), g.count());
    assert!(found < g.count() / 3, "{found} peaks of {} stand out", g.count());
}

#[test]
fn noises_of_gradients_come_with_the_first_of_them_and_rotate_apart_from_those_of_activations() {
    let mut scene = GradientMaskFixture::new(paper(3, 10));
    let sites = scene.session.catalog().sites.len() as u64;
    let g = numbers(6 * scene.widths(SITE).1, 0.5);
    scene.forward(9);
    assert_eq!(scene.bought(), 3 * sites, "activations alone have noises yet");
    scene.backward(SITE, &g);
    scene.backward(SITE, &g);
    assert_eq!(scene.bought(), 3 * (sites + 1), "12 rows, and activations are at 9");
    scene.backward(SITE, &g);
    assert_eq!(scene.bought(), 3 * (sites + 2), "gradients have fresh noises");
    scene.forward(9);
    assert_eq!(scene.bought(), 3 * (sites + 2));
    scene.forward(1);
    assert_eq!(scene.bought(), 3 * (sites + 3), "activations have fresh noises");

    let (noises, sent) =
        (scene.curious.gradient_noises(SITE, CallEnd::Sent), scene.curious.gradients(SITE, CallEnd::Sent));
    assert_eq!((noises.count(), sent.count()), (6, 18));
    let (rows, scale) = (g.chunks_exact(noises.width).cycle(), largest(&g));
    for (at, (sent, g)) in sent.iter().zip(rows).enumerate() {
        let turn = if at < 12 { at % 3 } else { 3 + at % 3 };
        let off = sent.iter().zip(g).zip(noises.row(turn)).map(|((sent, g), n)| (sent - g) / scale - n);
        assert!(largest(&off.collect::<Vec<_>>()) < 1e-5, "row {at} carries noise {turn}");
    }
}
