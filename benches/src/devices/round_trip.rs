//! Time of a call that computes nothing: a member fills its half of the outputs, and the leader gathers it.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use shmproto::{
    group::{GroupCall, GroupGeometry, GroupLeader, GroupMember, GroupWork, InputForm},
    layer::{SiteOp, SitePath},
};

use crate::{
    machine::pin,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

const ROWS: usize = 16;
const OUTPUTS: usize = 1536;
/// Outputs of the member.
const HALF: usize = OUTPUTS / 2;
/// Calls of a measurement, and warm-up calls before them.
const CALLS: usize = 2000;
const WARM_UP_CALLS: usize = 200;
/// Limit for members with physical cores of their own, in microseconds.
const TARGET_US: f64 = 15.0;
const SPIN: Duration = Duration::from_millis(1);

/// Measures the gather between the first two cores, beside copies of as many bytes within one core.
pub(super) fn compare(runs: usize, cores: &[usize]) -> Result<Comparison> {
    let geometry = GroupGeometry { members: 1, input_values: 16, output_values: ROWS * HALF };
    let (mut leader, mut members) = GroupLeader::in_process(geometry, SPIN)?;
    let member = members.pop().context("the group has a member")?;
    let (first, second) = (cores[0], cores[1]);
    let serving = thread::spawn(move || pin(second).and_then(|()| serve(member)));
    let measuring = thread::spawn(move || -> Result<_> {
        pin(first)?;
        let mut samples = (Vec::new(), Vec::new());
        let mut out = vec![0.0f32; ROWS * OUTPUTS];
        for _ in 0..runs {
            samples.0.push(median_us(|call| gather(&mut leader, call, &mut out))?);
            let from = vec![1.0f32; ROWS * HALF];
            samples.1.push(median_us(|_| {
                columns(&mut out)
                    .zip(from.chunks_exact(HALF))
                    .for_each(|(to, from)| to.copy_from_slice(from));
                std::hint::black_box(&mut out);
                Ok(())
            })?);
        }
        Ok(samples)
    });
    let (ours, copies) = measuring.join().expect("the leader's thread panicked")?;
    serving.join().expect("the member's thread panicked")?;
    Ok(Comparison {
        bench: "devices",
        case: format!("gather of {ROWS} x {OUTPUTS}"),
        unit: "us",
        better: Better::Lower,
        ours: Samples::new(ours)?,
        rival: PeerSamples {
            name: "copy within a core".into(),
            format: "f32".into(),
            samples: Samples::new(copies)?,
        },
        target: Some(BenchTarget::OursAtMost(TARGET_US)),
    })
}

/// Answers every call with its number.
fn serve(mut member: GroupMember) -> Result<()> {
    while let Some(call) = member.next_call()? {
        member.outputs_mut(0, ROWS * HALF)?.fill(call.site as f32);
        member.finish();
    }
    Ok(())
}

fn gather(leader: &mut GroupLeader, call: u32, out: &mut [f32]) -> Result<()> {
    let work = GroupWork::Evaluate { part: None, op: SiteOp::Forward, path: SitePath::Fast };
    let form = InputForm::F32;
    let rows = u32::try_from(ROWS)?;
    let posted =
        leader.post(0, &GroupCall { site: call, work, rows, form, input: 0, output: 0, after: None });
    leader.wait(posted);
    for (row, to) in columns(out).enumerate() {
        leader.read_outputs(0, row * HALF, to);
    }
    let expected = call as f32;
    ensure!(out[HALF] == expected && out[ROWS * OUTPUTS - 1] == expected, "the member's outputs arrived");
    Ok(())
}

/// Returns the member's columns of each row.
fn columns(out: &mut [f32]) -> impl Iterator<Item = &mut [f32]> {
    out.chunks_exact_mut(OUTPUTS).map(|row| &mut row[HALF..])
}

/// Returns the median time of a call in microseconds.
fn median_us(mut call: impl FnMut(u32) -> Result<()>) -> Result<f64> {
    let mut times = Vec::with_capacity(CALLS);
    for number in 0..WARM_UP_CALLS + CALLS {
        let start = Instant::now();
        call(u32::try_from(number)?)?;
        if number >= WARM_UP_CALLS {
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    Ok(Samples::new(times)?.median())
}
