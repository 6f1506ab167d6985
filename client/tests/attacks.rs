//! Limits of masking: the known attacks on split execution, which must succeed on the real model.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "attacks/adapter.rs"]
mod adapter;
#[path = "attacks/algebra.rs"]
mod algebra;
#[path = "attacks/executor.rs"]
#[allow(dead_code, reason = "whole numbers are for the attacks on sound modes")]
mod executor;
#[path = "attacks/noises.rs"]
mod noises;
#[path = "attacks/prompt.rs"]
mod prompt;
#[path = "attacks/reuse.rs"]
mod reuse;
#[path = "attacks/scene.rs"]
mod scene;
#[path = "attacks/subspace.rs"]
mod subspace;
mod support;

use client::{
    masking::{Masking, NoiseSettings},
    text::Text,
};
use model::{
    adapter::Adapter,
    client_weights::client_base::ClientBase,
    forward::LinearGroup::{GateUp, Head, O, Qkv},
    linear_sites::SiteId,
    resident::KvPrecision,
};
use shmproto::layer::SitePath;

use self::{
    adapter::{ObservedRows, StolenAdapter, changes, own_delta, steal},
    algebra::{Matrix, least_squares, relative_error, to_f64},
    executor::{CallEnd, CuriousExecutor, FloatRows},
    noises::{CarriedNoise, amount, denoised, projected, recognise},
    prompt::Dictionary,
    reuse::shared_noise,
    scene::{
        base, block_sites, client, client_with, curious, distinct_tokens, first_tokens, pass, site, truth,
    },
    subspace::{CombinedNoiseMask, OrthogonalResidual},
    support::{
        OFF, example_adapter, real_model,
        training::{learn, remote_trainer},
    },
};

const LINEAR: Masking = Masking::Off { path: SitePath::Linear };
const ADAPTER: &str = "pirate";
const SECRET: &str = "Dear doctor, my name is Ada Byron, I was born in 1815 and live at 12 St James's Square. \
    Since Tuesday I have had a fever of 39.4 degrees; please call me at 020 7946 0018.";

fn secret(base: &ClientBase) -> Vec<u32> {
    Text::load(&base.files).unwrap().encode_raw(SECRET).unwrap()
}

fn paper(noises: usize) -> Masking {
    Masking::Paper(NoiseSettings { noises, ..NoiseSettings::default() })
}

fn name(masking: &Masking) -> &'static str {
    match masking {
        Masking::Off { path: SitePath::Fast } => "off, fast",
        Masking::Off { path: SitePath::Linear } => "off, linear",
        other => other.as_str(),
    }
}

fn agreement<T: PartialEq>(found: &[T], truth: &[T]) -> f64 {
    assert_eq!(found.len(), truth.len());
    found.iter().zip(truth).filter(|(a, b)| a == b).count() as f64 / truth.len() as f64
}

fn rows_error(found: &FloatRows, truth: &FloatRows) -> f64 {
    let (found, truth): (Vec<_>, Vec<_>) = (to_f64(&found.values), to_f64(&truth.values));
    relative_error([(&found[..], &truth[..])].into_iter())
}

fn matrix_error(found: &Matrix, truth: &Matrix) -> f64 {
    relative_error(found.columns().zip(truth.columns()))
}

#[test]
fn an_executor_reads_the_prompt_of_a_client_without_masking_t0() {
    let base = base();
    let (prompt, first) = (secret(&base), site(&base, 0, Qkv));
    for masking in [OFF, LINEAR] {
        let curious = curious([first]);
        pass(&mut client(&curious, masking.clone(), None), &prompt, None);
        let found = Dictionary::new(&base, &curious).read(&curious.forward(first, CallEnd::Sent));
        println!("T0, {}: {:.1} %", name(&masking), 100.0 * agreement(&found, &prompt));
        assert_eq!(found, prompt);
    }
}

#[test]
fn an_executor_recognises_every_noise_it_has_seen_t1() {
    let base = base();
    let (prompt, sites) = (secret(&base), block_sites(&base).collect::<Vec<_>>());
    let truths = truth(&prompt, Some(ADAPTER), &sites);
    for noises in [2, 64] {
        let curious = curious(sites.iter().copied());
        let mut model = client(&curious, paper(noises), None);
        let adapter = model.load_adapter(&example_adapter(ADAPTER)).unwrap();
        pass(&mut model, &prompt, Some(&adapter));
        let (mut found, mut carried) = (Vec::new(), Vec::new());
        for (&site, truth) in sites.iter().zip(&truths) {
            let (sent, bought) = (curious.forward(site, CallEnd::Sent), curious.noises(site, CallEnd::Sent));
            let added = sent.values.iter().zip(&truth.values).map(|(z, x)| z - x).collect();
            found.extend(recognise(&sent, &bought));
            carried.extend(recognise(&FloatRows { width: sent.width, values: added }, &bought));
        }
        let hits = agreement(&found, &carried);
        println!(
            "T1, {noises} noises: {:.2} % of {} rows at {} sites",
            100.0 * hits,
            found.len(),
            sites.len()
        );
        assert!(hits >= 0.99, "{hits}");
    }
}

/// Inputs of a layer's `[q | k | v]` without their noise.
fn bare_inputs(curious: &CuriousExecutor, base: &ClientBase, layer: usize) -> FloatRows {
    let place = site(base, layer, Qkv);
    let (sent, bought) = (curious.forward(place, CallEnd::Sent), curious.noises(place, CallEnd::Sent));
    let carried = recognise(&sent, &bought);
    let amount = amount(&sent, &bought, &carried, &base.frame.norms.attention[layer]);
    denoised(&sent, &bought, &carried, amount)
}

#[test]
fn an_executor_that_recognised_the_noises_takes_them_away_and_reads_the_prompt_t1() {
    let (base, layers) = (base(), [0, 1, 10, 29]);
    let (prompt, sites) = (secret(&base), layers.map(|layer| site(&base, layer, Qkv)));
    let curious = curious(sites);
    pass(&mut client(&curious, paper(2), None), &prompt, None);
    let found = Dictionary::new(&base, &curious).read(&bare_inputs(&curious, &base, 0));
    println!("T0 after T1: {:.1} % of {} tokens", 100.0 * agreement(&found, &prompt), prompt.len());
    assert_eq!(found, prompt);
    let truths = truth(&prompt, None, &sites);
    // Layer 0 follows from the tokens; its sphere is inexact, because embeddings are short.
    for (layer, truth) in layers.into_iter().zip(&truths).skip(1) {
        let error = rows_error(&bare_inputs(&curious, &base, layer), truth);
        println!("rows after T1, layer {layer}: error {error:.1e}");
        assert!(error <= 1e-3, "layer {layer}: {error}");
    }
}

/// Every second row: the rows with the first of two noises.
fn every_second(rows: &FloatRows) -> FloatRows {
    FloatRows { width: rows.width, values: rows.iter().step_by(2).flatten().copied().collect() }
}

/// Rows without their shared noise, which is solved for.
fn without_shared_noise(rows: &FloatRows, gains: &[f32]) -> FloatRows {
    let noise = shared_noise(rows, gains);
    let bare = |row: &[f32]| -> Vec<f32> {
        row.iter().zip(&noise).map(|(z, n)| (f64::from(*z) - n) as f32).collect()
    };
    FloatRows { width: rows.width, values: rows.iter().flat_map(bare).collect() }
}

#[test]
fn rows_that_share_a_noise_give_it_away_to_somebody_who_never_saw_it_t2() {
    let base = base();
    let prompt = distinct_tokens(&base, 2 * (base.config().hidden_size + 64));
    let norms = &base.frame.norms;
    let places = [
        (site(&base, 0, Qkv), &norms.attention[0]),
        (site(&base, 1, Qkv), &norms.attention[1]),
        (site(&base, 15, GateUp), &norms.feed_forward[15]),
        (site(&base, 29, Qkv), &norms.attention[29]),
    ];
    let sites = places.map(|(site, _)| site);
    let curious = curious(sites);
    pass(&mut client(&curious, paper(2), None), &prompt, None);
    let truths = truth(&prompt, None, &sites);
    let bare = places.map(|(site, gains)| {
        without_shared_noise(&every_second(&curious.forward(site, CallEnd::Sent)), gains)
    });
    let found = Dictionary::new(&base, &curious).read(&bare[0]);
    let prompt: Vec<u32> = prompt.into_iter().step_by(2).collect();
    println!("T2, {} rows: {:.1} % of the tokens", prompt.len(), 100.0 * agreement(&found, &prompt));
    assert!(agreement(&found, &prompt) >= 0.99);
    for ((site, bare), truth) in sites.iter().zip(&bare).zip(&truths).skip(1) {
        let error = rows_error(bare, &every_second(truth));
        println!("T2, {site:?}: error {error:.1e}");
        assert!(error <= 1e-3, "{site:?}: {error}");
    }
}

#[test]
fn a_secret_combination_of_fewer_noises_than_dimensions_leaves_the_rest_bare_t3() {
    let base = base();
    let (prompt, first) = (secret(&base), site(&base, 0, Qkv));
    let truth = truth(&prompt, None, &[first]).remove(0);
    let energy = |rows: &FloatRows| rows.values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
    for noises in [64, 512] {
        let curious = curious([first]);
        let mask = Box::new(CombinedNoiseMask::new(noises, vec![first], 3));
        pass(&mut client_with(&curious, None, |_| mask), &prompt, None);
        let uncovered = OrthogonalResidual::by(&curious.noises(first, CallEnd::Sent));
        let found = uncovered.parts(&curious.forward(first, CallEnd::Sent));
        let error = rows_error(&found, &uncovered.parts(&truth));
        let (visible, expected) = (energy(&found) / energy(&truth), 1.0 - noises as f64 / truth.width as f64);
        let read = agreement(&Dictionary::new(&base, &curious).read_parts(&found, &uncovered), &prompt);
        println!("T3, {noises} noises: {visible:.3} of the energy is visible ({expected:.3} expected)");
        println!("T3, {noises} noises: to {error:.1e}, {:.1} % of the tokens", 100.0 * read);
        assert!((visible - expected).abs() <= 0.1 * expected + 0.01 && error <= 1e-2, "{visible}, {error}");
        assert!(read >= 0.99, "{read}");
    }
}

#[test]
fn as_many_noises_as_dimensions_are_the_weights_themselves_t3() {
    let base = base();
    let (prompt, first) = (secret(&base), site(&base, 0, Qkv));
    let (width, outputs) = (base.config().hidden_size, 32);
    let curious = curious([first]);
    let mask = Box::new(CombinedNoiseMask::new(width + 64, vec![first], 3));
    pass(&mut client_with(&curious, None, |_| mask), &prompt[..2], None);
    let (noises, effects) = (curious.noises(first, CallEnd::Sent), curious.noises(first, CallEnd::Answered));
    let some_outputs =
        |rows: &FloatRows| Matrix::from_rows(outputs, rows.iter().map(|row| to_f64(&row[..outputs])));
    let left = Matrix::from_rows(width, noises.iter().map(to_f64));
    let found = least_squares(left, some_outputs(&effects));
    let mut unit = vec![0.0; width * width];
    unit.iter_mut().step_by(width + 1).for_each(|x| *x = 1.0);
    let weights = curious.evaluate(first, &FloatRows { width, values: unit }, effects.width);
    let error = matrix_error(&found, &some_outputs(&weights));
    println!("T3, {} noises: the weights to {error:.1e}", width + 64);
    assert!(error <= 1e-3, "{error}");
}

/// Rows that cross at a layer for `prompts` of one token, and their recognised noises.
fn crossed(
    curious: &CuriousExecutor,
    base: &ClientBase,
    layer: usize,
    masking: &Masking,
) -> (ObservedRows, Vec<CarriedNoise>) {
    let (qkv, o) = (site(base, layer, Qkv), site(base, layer, O));
    let inputs = curious.forward(qkv, CallEnd::Sent);
    let carried = match masking {
        Masking::Paper(_) => recognise(&inputs, &curious.noises(qkv, CallEnd::Sent)),
        _ => Vec::new(),
    };
    let (base, attended) = (curious.forward(qkv, CallEnd::Answered), curious.forward(o, CallEnd::Sent));
    (ObservedRows { inputs, base, attended }, carried)
}

/// Executor that has seen the first tokens of a client with an adapter.
fn visited(
    base: &ClientBase,
    layers: &[usize],
    prompts: &[u32],
    victim: (Masking, Option<KvPrecision>),
) -> CuriousExecutor {
    let kept = layers.iter().flat_map(|&layer| [site(base, layer, Qkv), site(base, layer, O)]);
    let curious = curious(kept.collect::<Vec<SiteId>>());
    let mut model = client(&curious, victim.0, victim.1);
    let adapter = model.load_adapter(&example_adapter(ADAPTER)).unwrap();
    first_tokens(&mut model, prompts, Some(&adapter));
    curious
}

#[test]
fn first_tokens_give_the_adapters_value_projection_away_t4() {
    let (base, layers) = (base(), [0, 10, 29]);
    let adapter = Adapter::read(&example_adapter(ADAPTER), base.config()).unwrap();
    let prompts = distinct_tokens(&base, base.config().hidden_size + 64);
    for masking in [OFF, LINEAR, paper(2)] {
        let curious = visited(&base, &layers, &prompts, (masking.clone(), Some(KvPrecision::F32)));
        for layer in layers {
            let (crossed, carried) = crossed(&curious, &base, layer, &masking);
            let StolenAdapter { rank, delta } = steal(&crossed, base.config(), &carried);
            let (own_rank, own) = own_delta(&adapter, layer);
            let error = matrix_error(&delta, &own);
            println!("T4, {}, layer {layer}: rank {rank}, error {error:.1e}", name(&masking));
            assert_eq!(rank, own_rank, "layer {layer}");
            assert!(error <= 1e-3, "layer {layer}: {error}");
        }
    }
}

#[test]
fn values_kept_in_16_bits_make_the_stolen_projection_rougher_but_hardly_its_effect_t4() {
    let (base, layers) = (base(), [0, 1, 10]);
    let adapter = Adapter::read(&example_adapter(ADAPTER), base.config()).unwrap();
    let (seen, unseen) = (2 * base.config().hidden_size + 128, 64);
    let prompts = distinct_tokens(&base, seen + unseen);
    let (prompts, others) = prompts.split_at(seen);
    let elsewhere = visited(&base, &layers, others, (OFF, None));
    for masking in [OFF, paper(2)] {
        let curious = visited(&base, &layers, prompts, (masking.clone(), None));
        for layer in layers {
            let (crossed, carried) = crossed(&curious, &base, layer, &masking);
            let StolenAdapter { rank, delta } = steal(&crossed, base.config(), &carried);
            let (own_rank, own) = own_delta(&adapter, layer);
            let others = elsewhere.forward(site(&base, layer, Qkv), CallEnd::Sent);
            let all = |delta: &Matrix| others.iter().flat_map(|row| changes(&to_f64(row), delta)).collect();
            let (found, truth): (Vec<f64>, Vec<f64>) = (all(&delta), all(&own));
            let error = relative_error([(&found[..], &truth[..])].into_iter());
            println!("T4, {}, 16 bits, layer {layer}: rank {rank}", name(&masking));
            println!("  error {:.1e}, of its effect {error:.1e}", matrix_error(&delta, &own));
            assert_eq!(rank, own_rank, "layer {layer}");
            assert!(error <= 1e-2, "layer {layer}: {error}");
        }
    }
}

/// Target token from a gradient at the head: the position of the largest magnitude.
fn answers(gradients: &FloatRows) -> Vec<u32> {
    let peak = |row: &[f32]| (0..row.len()).max_by(|&a, &b| row[a].abs().total_cmp(&row[b].abs())).unwrap();
    gradients.iter().map(|row| u32::try_from(peak(row)).unwrap()).collect()
}

#[test]
fn an_executor_reads_what_a_client_learns_to_say_from_gradients_at_the_head_t0_and_t1() {
    let base = base();
    let (text, head) = (secret(&base), site(&base, 0, Head));
    for masking in [LINEAR, paper(2)] {
        let curious = curious([head]);
        let mut trainer = remote_trainer(Box::new(curious.clone()), &real_model(), masking.clone());
        learn(&mut trainer, &example_adapter(ADAPTER), &text);
        let sent = curious.gradients(head, CallEnd::Sent);
        let hits = agreement(&answers(&sent), &text[1..]);
        println!("T0, gradients, {}: {:.1} % of {} tokens", name(&masking), 100.0 * hits, sent.count());
        if let Masking::Off { .. } = masking {
            assert!(hits >= 0.99, "{hits}");
            continue;
        }
        assert!(hits <= 0.1, "{hits}: a gradient alone must not tell");
        let bought = curious.gradient_noises(head, CallEnd::Sent);
        let bare = projected(&sent, &bought, &recognise(&sent, &bought));
        let hits = agreement(&answers(&bare), &text[1..]);
        println!("T0 after T1, gradients: {:.1} %", 100.0 * hits);
        assert!(hits >= 0.99, "{hits}");
    }
}
