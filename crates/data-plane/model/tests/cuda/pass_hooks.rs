//! Single sites on the device, and calls that join a pass there.

use kernels::Activations;
use model::{
    cuda::Graphs,
    forward::{ForwardPass as _, LogitRows},
    linear_sites::{EvaluateSites, PassHooks, SiteCall, SiteId, SiteOp, SitePath},
};

use crate::support::{CudaSequence, device, error, on_cpu, on_device};

const MODELS: [&str; 3] = ["llama-tied", "qwen2-f16", "llama-bf16"];

fn rows(width: usize, count: usize) -> Activations {
    let mut rows = Activations::default();
    rows.reshape(count, width);
    let value = |i: usize| ((i * 7919 % 1013) as f32 / 1013.0) - 0.5;
    rows.values_mut().iter_mut().enumerate().for_each(|(i, row)| *row = value(i));
    rows
}

fn evaluate(base: &mut dyn EvaluateSites, call: SiteCall, count: usize) -> Vec<f32> {
    let (input, output) = base.sites()[call.site.0 as usize].widths(call.part, call.op).unwrap();
    let mut out = vec![f32::NAN; count * output];
    base.evaluate(call, &mut rows(input, count), &mut out).unwrap();
    out
}

/// Norm of the difference relative to the norm.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|value| value * value).sum::<f32>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

#[test]
fn every_site_gives_what_the_cpu_gives_forward_and_backward() {
    let Some(cuda) = device() else { return };
    for name in MODELS {
        let (mut gpu, mut cpu) = (on_device(&cuda, name, Graphs::Use), on_cpu(name));
        let sites: Vec<u32> = (0..4).chain([u32::try_from(cpu.sites().len()).unwrap() - 1]).collect();
        for site in sites {
            let shapes = |sites: &dyn EvaluateSites| format!("{:?}", sites.sites()[site as usize].parts);
            assert_eq!(shapes(&gpu), shapes(&cpu), "{name}");
            for (op, path) in [
                (SiteOp::Forward, SitePath::Fast),
                (SiteOp::Forward, SitePath::Linear),
                (SiteOp::ForwardNoBias, SitePath::Linear),
                (SiteOp::Backward, SitePath::Linear),
            ] {
                let parts = cpu.sites()[site as usize].parts.len();
                for (part, count) in [(None, 1), (None, 19), (Some(0), 3), (Some(parts - 1), 40)] {
                    let part = part.map(|part| part as u8);
                    let call = SiteCall { site: SiteId(site), part, op, path };
                    let (found, expected) =
                        (evaluate(&mut gpu, call, count), evaluate(&mut cpu, call, count));
                    let tolerance = if path == SitePath::Linear { 1e-5 } else { 1e-2 };
                    let error = distance(&found, &expected);
                    assert!(error <= tolerance, "{name}, {call:?}, {count} rows: {error}");
                }
            }
        }
    }
}

#[derive(Default)]
struct JoiningHooks {
    asked: Option<SiteCall>,
    answers: Vec<(SiteCall, Vec<f32>)>,
}

impl PassHooks for JoiningHooks {
    fn is_waiting(&mut self) -> bool {
        true
    }

    fn before_site(&mut self, site: SiteId, base: &mut dyn EvaluateSites) {
        if site.0 == 1 {
            let call = SiteCall { site: SiteId(3), part: None, op: SiteOp::Backward, path: SitePath::Linear };
            assert!(evaluate(base, call, 2).iter().all(|value| value.is_finite()));
        }
    }

    fn join(&mut self, call: SiteCall, x: &mut Activations) -> usize {
        x.append(rows(x.width(), 3).values());
        self.asked = Some(call);
        3
    }

    fn part(&mut self, out: &[f32]) {
        self.answers.push((self.asked.take().unwrap(), out.to_vec()));
    }
}

#[test]
fn rows_that_join_a_pass_get_their_own_and_change_nothing() {
    let Some(cuda) = device() else { return };
    for name in MODELS {
        let mut pass = on_device(&cuda, name, Graphs::Use);
        let sequence = CudaSequence::new(0, 12, None);
        let (mut alone, mut together, mut guests) = (Vec::new(), Vec::new(), JoiningHooks::default());
        pass.forward(&[sequence.slice(0..12, LogitRows::Last)], &mut alone).unwrap();
        let slice = sequence.slice(0..12, LogitRows::Last);
        pass.forward_with_hooks(&[slice], &mut together, &mut guests).unwrap();
        let tolerance = if name == "llama-tied" { 1e-3 } else { 0.1 };
        assert!(error(&alone, &together) <= tolerance, "{name}");
        assert_eq!(guests.answers.len(), pass.sites().len(), "{name}: every site was joined");
        for (call, answer) in std::mem::take(&mut guests.answers) {
            let expected = evaluate(&mut pass, call, 3);
            let error = distance(&answer, &expected);
            assert!(error <= 1e-2, "{name}, {call:?}: {error}");
        }
    }
}

#[test]
fn whether_a_call_joined_a_pass_or_stood_alone_is_not_seen_in_its_bits() {
    let Some(cuda) = device() else { return };
    for name in ["qwen2-f16", "llama-bf16"] {
        let mut pass = on_device(&cuda, name, Graphs::Use);
        // So few rows in total that weights are read once for all of them.
        let (sequence, mut guests) = (CudaSequence::new(0, 12, None), JoiningHooks::default());
        let slice = sequence.slice(0..12, LogitRows::Last);
        pass.forward_with_hooks(&[slice], &mut Vec::new(), &mut guests).unwrap();
        assert_eq!(guests.answers.len(), pass.sites().len(), "{name}: every site was joined");
        for (call, answer) in std::mem::take(&mut guests.answers) {
            let alone = evaluate(&mut pass, call, 3);
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&answer), bits(&alone), "{name}, {call:?}");
        }
    }
}
