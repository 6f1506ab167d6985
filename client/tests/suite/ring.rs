//! Exact arithmetic: equal bits with any masking, and verified answers.

use std::{path::Path, sync::Arc, time::Instant};

use crate::executor::CuriousExecutor;
use crate::support::{
    bits, committed_executor, golden, real_model,
    ring::{ModularTestBase, RING, maker, pads, pool, ring_executor, shares},
    sampling, settings, split_logits, split_over, tiny, tokens,
    training::{learn, remote_trainer},
};
use client::{
    error::CallError,
    generate::GenerateRequest,
    masking::{
        CallSite, Direction, Exact, Mask, Masking, RowProtection,
        one_time_pads::{Pads, maker::PadGenerator, pool::PadPool},
        verify::Verifier,
    },
    session::Session,
    transport::{Connect, loopback::Loopback},
};
use model::{linear_sites::SiteId, site_model::SiteModel};
use shmproto::layer::{CallClass, Dtype, SitePath};

const MODELS: [&str; 3] = ["llama-tied", "qwen2-bias", "mistral-window"];

fn verified(path: &Path, cover: RowProtection) -> Masking {
    let verifier = Verifier::new(&mut ModularTestBase::new(path).0, &mut |_, _| {}).unwrap();
    Masking::Exact(Exact { cover, verifier: Some(Arc::new(verifier)), pad_rows: false })
}

/// The exact modes: all except the first verify answers, and the last two pad calls to a power of two rows.
fn modes(path: &Path, directory: &Path) -> [Masking; 4] {
    let filled_up = |cover| match verified(path, cover) {
        Masking::Exact(exact) => Masking::Exact(Exact { pad_rows: true, ..exact }),
        masking => masking,
    };
    [
        RING,
        verified(path, RowProtection::Bare),
        filled_up(shares(ring_executor(path))),
        filled_up(RowProtection::Pads(pads(path, directory))),
    ]
}

#[test]
fn prompts_and_answers_have_the_same_bits_in_every_exact_mode_and_those_of_the_linear_path_up_to_rounding() {
    for name in MODELS {
        let (path, directory) = (tiny(name), tempfile::tempdir().unwrap());
        let mut expected = None;
        for masking in modes(&path, directory.path()) {
            let mut model = split_over(Box::new(ring_executor(&path)), &path, masking.clone());
            let vocabulary = model.config().vocab_size;
            let prompt = tokens(23, vocabulary);
            let logits = split_logits(&mut model, &prompt, None);
            let task = GenerateRequest {
                prompt,
                sampling: sampling(vocabulary, 0.7, 5),
                max_tokens: 12,
                stop_tokens: Vec::new(),
            };
            let found = (bits(&logits), crate::support::generate(&mut model, &task, None).tokens);
            let expected = expected.get_or_insert_with(|| found.clone());
            assert!(found == *expected, "{name}, {}", masking.as_str());
            if let Masking::Off { .. } = masking {
                let linear = Masking::Off { path: SitePath::Linear };
                let mut model = split_over(Box::new(ring_executor(&path)), &path, linear);
                let plain = split_logits(&mut model, &task.prompt, None);
                let far = plain.iter().zip(&logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                let largest = plain.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                println!("{name}: {:.1e} of the largest logit", far / largest);
                assert!(far < 1e-4 * largest, "{name}: {far}");
            }
        }
    }
}

#[test]
fn an_executors_ring_path_is_the_one_that_is_written_down_for_these_tests() {
    for name in MODELS {
        let path = tiny(name);
        let mut logits = [ring_executor(&path), committed_executor(&path)].map(|executor| {
            let mut model = split_over(Box::new(executor), &path, RING);
            let prompt = tokens(19, model.config().vocab_size);
            bits(&split_logits(&mut model, &prompt, None))
        });
        let [expected, found] = &mut logits;
        assert!(found == expected, "{name}");
    }
}

/// The client's own copy of the model at `path`, with a commitment.
fn own(path: &Path) -> SiteModel {
    let mut own = SiteModel::open(path, &[]).unwrap();
    own.commit();
    own
}

#[test]
fn the_real_model_says_the_same_with_shares_and_pads_that_are_checked_as_without() {
    let (path, directory) = (real_model(), tempfile::tempdir().unwrap());
    let executor = committed_executor(&path);
    let verifier = Arc::new(Verifier::new(&mut own(&path), &mut |_, _| {}).unwrap());
    let mut maker = PadGenerator::new(Box::new(own(&path)), 1 << 30);
    let mut pool = PadPool::create(directory.path(), maker.commitment().unwrap(), &maker.shapes()).unwrap();
    let begun = Instant::now();
    maker.prepare(&mut pool, 16, &[Direction::Forward], &mut |_, _| {}).unwrap();
    let (took, bytes) = (begun.elapsed().as_secs_f64(), pool.token_bytes(Direction::Forward));
    println!("pads: {:.1} tokens a second, {bytes} bytes each", 16.0 / took);
    let pads = RowProtection::Pads(Pads::new(pool, Some(maker)));
    let second = shares(committed_executor(&path));
    let checked =
        |cover| Masking::Exact(Exact { cover, verifier: Some(Arc::clone(&verifier)), pad_rows: false });
    let mut expected = None;
    for masking in [RING, checked(RowProtection::Bare), checked(second), checked(pads)] {
        let mut model = split_over(Box::new(executor.clone()), &path, masking.clone());
        let vocabulary = model.config().vocab_size;
        let prompt = tokens(15, vocabulary);
        let task = GenerateRequest {
            prompt,
            sampling: sampling(vocabulary, 0.0, 1),
            max_tokens: 8,
            stop_tokens: Vec::new(),
        };
        let begun = Instant::now();
        let found = crate::support::generate(&mut model, &task, None).tokens;
        println!("{}: {:.2} s for 15 + 8 tokens", masking.as_str(), begun.elapsed().as_secs_f64());
        assert_eq!(found, *expected.get_or_insert_with(|| found.clone()), "{masking:?}");
    }
}

#[test]
fn an_adapter_learns_the_same_bits_in_every_exact_mode() {
    for (name, method) in [("llama-tied", "lora-all"), ("qwen2-bias", "ia3")] {
        let (path, directory) = (tiny(name), tempfile::tempdir().unwrap());
        let adapter = golden("training").join(name).join(method).join("start");
        let mut expected = None;
        for masking in modes(&path, directory.path()) {
            let word = masking.as_str();
            let mut trainer = remote_trainer(Box::new(ring_executor(&path)), &path, masking);
            let text = tokens(20, trainer.model().config.vocab_size);
            let (likely, gradients) = learn(&mut trainer, &adapter, &text);
            let found = (bits(&likely), bits(&gradients.concat()));
            assert!(gradients.concat().iter().any(|&gradient| gradient != 0.0));
            assert!(found == *expected.get_or_insert_with(|| found.clone()), "{name}, {word}");
        }
    }
}

struct ModularMaskFixture {
    session: Session,
    mask: Box<dyn Mask>,
}

impl ModularMaskFixture {
    fn new(connector: impl Connect + 'static, masking: &Masking) -> Self {
        let mut session = Session::open(Box::new(connector), settings()).unwrap();
        let mask = masking.clone().prepare(&mut session, &mut |_, _| {}).unwrap();
        Self { session, mask }
    }

    fn call(&mut self, site: u32, direction: Direction, rows: usize) -> Result<Vec<f32>, CallError> {
        let listed = &self.session.catalog().sites[site as usize];
        let outputs: usize = listed.parts.iter().map(|part| part.rows as usize).sum();
        let (input, output) = match direction {
            Direction::Forward => (listed.columns as usize, outputs),
            Direction::Backward => (outputs, listed.columns as usize),
        };
        let x: Vec<f32> = (0..rows * input).map(|at| (at as f32 * 0.37).sin()).collect();
        let mut out = vec![0.0; rows * output];
        let place = CallSite { site: SiteId(site), direction, class: CallClass::Training };
        self.mask.call(&mut self.session, place, &x, &mut out)?;
        Ok(out)
    }
}

fn refused(connector: impl Connect + 'static, masking: &Masking) -> CallError {
    let mut session = Session::open(Box::new(connector), settings()).unwrap();
    masking.clone().prepare(&mut session, &mut |_, _| {}).unwrap_err()
}

fn lying(path: &Path, wrong: impl FnMut(usize, &mut [u64]) + Send + 'static) -> Loopback {
    let (base, is_exact) = ModularTestBase::new(path);
    let (mut wrong, mut count) = (wrong, 0);
    let tampered = base.tampered(Box::new(move |_, answer| {
        wrong(count, answer);
        count += 1;
    }));
    tampered.executor(is_exact)
}

#[test]
fn a_bit_that_is_turned_in_an_answer_is_seen_in_every_mode_and_named() {
    let (path, directory) = (tiny("llama-tied"), tempfile::tempdir().unwrap());
    // Numbers have 48 bits on the wire.
    for bit in 0..48 {
        for direction in [Direction::Forward, Direction::Backward] {
            let liar = || lying(&path, move |_, answer| answer[bit % 7] ^= 1 << bit);
            let second = verified(&path, shares(liar()));
            let error =
                ModularMaskFixture::new(ring_executor(&path), &second).call(1, direction, 2).unwrap_err();
            assert!(matches!(&error, CallError::Wrong { site } if site == "site 1 (layer 0 o)"), "{error}");
            let error = ModularMaskFixture::new(liar(), &verified(&path, RowProtection::Bare))
                .call(4, direction, 1)
                .unwrap_err();
            assert!(error.to_string().contains("site 4 (layer 1 q, k, v)"), "{error}");
        }
    }
    let masking = verified(&path, RowProtection::Pads(pads(&path, directory.path())));
    let mut scene =
        ModularMaskFixture::new(lying(&path, |count, answer| answer[3] ^= u64::from(count == 1)), &masking);
    assert!(scene.call(0, Direction::Forward, 3).is_ok());
    assert!(matches!(scene.call(0, Direction::Forward, 3), Err(CallError::Wrong { .. })));
}

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

#[test]
fn of_ten_thousand_answers_the_one_with_a_turned_bit_is_seen_and_no_other() {
    let (path, mut state) = (tiny("llama-tied"), 7);
    for _ in 0..3 {
        let [at, number, bit] = [10_000, 1 << 20, 48].map(|below| random(&mut state) % below);
        let liar = lying(&path, move |count, answer| {
            let number = usize::try_from(number).unwrap() % answer.len();
            answer[number] ^= u64::from(count as u64 == at) << bit;
        });
        let mut scene = ModularMaskFixture::new(liar, &verified(&path, RowProtection::Bare));
        for count in 0..10_000 {
            let answer = scene.call(1, Direction::Forward, 1);
            let is_seen = matches!(answer, Err(CallError::Wrong { .. }));
            assert_eq!(is_seen, count == at, "answer {count}, bit {bit}: {answer:?}");
        }
    }
}

#[test]
fn an_executor_that_answers_with_old_rows_is_seen() {
    let path = tiny("llama-tied");
    let mut old: Option<Vec<u64>> = None;
    let repeating = lying(&path, move |_, answer| {
        let first = old.get_or_insert_with(|| answer.to_vec());
        if first.len() == answer.len() {
            answer.copy_from_slice(first);
        }
    });
    let mut scene = ModularMaskFixture::new(repeating, &verified(&path, shares(ring_executor(&path))));
    assert!(scene.call(2, Direction::Forward, 2).is_ok());
    assert!(matches!(scene.call(2, Direction::Forward, 2), Err(CallError::Wrong { .. })));
}

#[test]
fn without_verification_a_lie_passes() {
    let path = tiny("llama-tied");
    let mut scene = ModularMaskFixture::new(lying(&path, |_, answer| answer[0] ^= 1 << 20), &RING);
    assert!(scene.call(0, Direction::Forward, 1).is_ok());
}

#[test]
fn executors_that_are_one_or_have_other_weights_are_refused() {
    let path = tiny("llama-tied");
    let executor = ring_executor(&path);
    assert!(matches!(
        refused(executor.clone(), &shares(executor.clone()).into()),
        CallError::SameExecutor { .. }
    ));
    let (base, is_exact) = ModularTestBase::new(&path);
    let other = base.with_another_weight(5).executor(is_exact);
    let error = refused(executor.clone(), &shares(other.clone()).into());
    assert!(matches!(&error, CallError::OtherWeights { site } if site == "site 5 (layer 1 o)"), "{error}");
    assert!(matches!(
        refused(other.clone(), &verified(&path, RowProtection::Bare)),
        CallError::OtherWeights { .. }
    ));
    let directory = tempfile::tempdir().unwrap();
    let of_another = RowProtection::Pads(Pads::new(pool(&path, directory.path()), None)).into();
    assert!(matches!(refused(other, &of_another), CallError::Pads(_)));
}

#[test]
fn a_base_without_a_ring_path_and_rows_that_would_be_rounded_are_refused() {
    let path = tiny("llama-tied");
    let error = refused(crate::support::executor(&path), &RING);
    assert!(matches!(error, CallError::NoRing { site: 0 }), "{error}");
    let rounding = client::session::ClientSettings { dtype: Dtype::Bf16, ..settings() };
    let mut session = Session::open(Box::new(ring_executor(&path)), rounding).unwrap();
    assert!(matches!(RING.prepare(&mut session, &mut |_, _| {}), Err(CallError::Masking(_))));
}

#[test]
fn a_row_that_is_no_number_is_an_error_that_names_it() {
    let path = tiny("llama-tied");
    let mut scene = ModularMaskFixture::new(ring_executor(&path), &RING);
    let width = scene.session.catalog().sites[0].columns as usize;
    let outputs: usize = scene.session.catalog().sites[0].parts.iter().map(|part| part.rows as usize).sum();
    let mut x = vec![1.0; 3 * width];
    x[2 * width + 5] = f32::INFINITY;
    let place = CallSite { site: SiteId(0), direction: Direction::Forward, class: CallClass::Decode };
    let error = scene.mask.call(&mut scene.session, place, &x, &mut vec![0.0; 3 * outputs]).unwrap_err();
    assert!(matches!(&error, CallError::NotFinite { row: 2, site } if site.starts_with("site 0")), "{error}");
}

#[test]
fn neither_executor_sees_a_row_and_equal_rows_look_different() {
    let (path, directory) = (tiny("llama-tied"), tempfile::tempdir().unwrap());
    for cover in [shares(ring_executor(&path)), RowProtection::Pads(pads(&path, directory.path()))] {
        let masking = Masking::from(cover);
        let curious = CuriousExecutor::new(ring_executor(&path), [SiteId(0)]);
        let mut scene = ModularMaskFixture::new(curious.clone(), &masking);
        for _ in 0..40 {
            scene.call(0, Direction::Forward, 4).unwrap();
        }
        let sent = curious.noises(SiteId(0), crate::executor::CallEnd::Sent);
        assert_eq!(sent.count(), 160);
        let (mut counts, mut seen) = ([0_u32; 256], std::collections::BTreeSet::new());
        for row in sent.iter() {
            assert!(seen.insert(bits(row)), "{}: a row was seen before", masking.as_str());
            bits(row)
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .for_each(|byte| counts[usize::from(byte)] += 1);
        }
        let total: u32 = counts.iter().sum();
        let wanted = f64::from(total) / 256.0;
        let chi: f64 = counts.iter().map(|&count| (f64::from(count) - wanted).powi(2) / wanted).sum();
        // 255 degrees of freedom: mean 255, standard deviation 22.6.
        assert!((255.0 - 5.0 * 22.6..255.0 + 5.0 * 22.6).contains(&chi), "{}: {chi}", masking.as_str());
    }
}

#[test]
fn calls_that_are_filled_up_show_no_number_of_rows_but_powers_of_two() {
    let path = tiny("llama-tied");
    for (rows, sent) in [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16)] {
        let [first, second] = [(); 2].map(|()| CuriousExecutor::new(ring_executor(&path), [SiteId(0)]));
        let Masking::Exact(exact) = verified(&path, shares(second.clone())) else { unreachable!() };
        let mut scene =
            ModularMaskFixture::new(first.clone(), &Masking::Exact(Exact { pad_rows: true, ..exact }));
        scene.call(0, Direction::Forward, rows).unwrap();
        let seen = [&first, &second]
            .map(|executor| executor.noises(SiteId(0), crate::executor::CallEnd::Answered).count());
        assert_eq!(seen, [sent; 2], "{rows} rows");
    }
}

#[test]
fn pads_of_another_machine_run_out_and_are_never_passed_by() {
    let (path, directory) = (tiny("llama-tied"), tempfile::tempdir().unwrap());
    let mut pool = pool(&path, directory.path());
    maker(&path, 1 << 30).prepare(&mut pool, 5, &[Direction::Forward], &mut |_, _| {}).unwrap();
    let curious = CuriousExecutor::new(ring_executor(&path), [SiteId(0)]);
    let masking = RowProtection::Pads(Pads::new(pool, None)).into();
    let mut scene = ModularMaskFixture::new(curious.clone(), &masking);
    assert!(scene.call(0, Direction::Forward, 3).is_ok());
    let error = scene.call(0, Direction::Forward, 3).unwrap_err();
    assert!(error.to_string().contains("site 0 (layer 0 q, k, v), forward"), "{error}");
    let error = scene.call(0, Direction::Backward, 1).unwrap_err();
    assert!(error.to_string().contains("backward"), "{error}");
    assert!(scene.call(0, Direction::Forward, 2).is_ok());
    assert_eq!(curious.noises(SiteId(0), crate::executor::CallEnd::Sent).count(), 5);
}
