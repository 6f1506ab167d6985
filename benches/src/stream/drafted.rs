//! Drafts over a base streamed from disk (EdgeLLM): our engine beside the paper's
//! baselines, and without each of its parts.
//!
//! The emulated disk is so slow that reading dominates a pass. An oracle drafter has the accuracy of the
//! paper's drafters, and a draft token takes as large a share of a pass as theirs (L-23). Every answer except
//! the lossy baseline's is checked to be the target's own.

use std::{
    num::NonZeroU64,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use base_executor::{
    drafter::{DrafterFactory, SequenceDrafter},
    engine::drafts::Drafts,
};
use client::text::Text;
use model::weights::streamed::Readahead;
use model_files::model_files::ModelFiles;
use shmproto::message::DraftKind;
use speculation::{baselines::BaselineRule, threshold::Threshold};

use super::{
    ReadMode, StreamedSide,
    big_little::{self, BigLittle},
    engine::{EngineAnswer, StreamedEngine},
};
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    oracle_draft::{OracleDraft, PricedOracle, Quality},
    report::{BenchTarget, Better, Comparison, PeerSamples},
    split::drafts::{COPIED, TOLD},
};

/// Speed of the emulated disk in bytes per second.
const DISK: u64 = 400 << 20;
/// Memory bounds in percent of all weights.
const BOUNDS: [u64; 2] = [50, 25];
/// Share of right draft tokens (L-19).
const CORRECT: [f64; 4] = [0.816, 0.907, 0.899, 0.871];
/// Draft tokens that take as long as a pass at half of the memory; 11.7 to 21.8 on the paper's devices
/// (L-23).
const GUESSES_OF_A_SWEEP: u32 = 16;
/// Tokens of an answer with drafts, and without.
const DRAFTED: usize = 60;
const PLAIN: usize = 10;
const NODES: usize = 16;

/// Answer of the next request, for its oracle drafter.
#[derive(Debug, Clone)]
struct OracleScript {
    planted: OracleDraft,
    prompt: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct DraftContestant {
    name: &'static str,
    /// Draft tokens per position; 0 disables drafts.
    width: usize,
    rule: Option<BaselineRule>,
    goes_on: bool,
    /// Target ratio of our speed to this contestant's.
    goal: Option<f64>,
}

const OURS: DraftContestant =
    DraftContestant { name: "ours", width: 2, rule: None, goes_on: true, goal: None };

fn entries() -> [DraftContestant; 8] {
    let fixed = |name, rule, goal| DraftContestant { name, rule: Some(rule), goes_on: false, goal, ..OURS };
    [
        fixed("chains of 5 (SP)", BaselineRule::Chain(5), Some(1.3)),
        fixed("chains of 8 (SP)", BaselineRule::Chain(8), None),
        fixed("2 branches of 6 (SI)", BaselineRule::Branches { width: 2, depth: 6 }, Some(1.15)),
        DraftContestant { name: "ours without the tree", width: 1, goal: Some(1.05), ..OURS },
        DraftContestant { name: "ours without drafting ahead", goes_on: false, goal: Some(1.05), ..OURS },
        DraftContestant {
            name: "ours without a threshold",
            rule: Some(BaselineRule::Nodes(NODES)),
            goal: Some(1.05),
            ..OURS
        },
        DraftContestant {
            name: "ours, with the threshold that verdicts move (EdgeLLM)",
            rule: Some(BaselineRule::Learned(Threshold::default())),
            ..OURS
        },
        DraftContestant { name: "layer pipeline (SPL)", width: 0, goal: Some(2.5), ..OURS },
    ]
}

struct DraftedStreamBench<'a> {
    config: &'a SuiteConfig,
    cores: &'a Cores,
    directory: &'a Path,
    percent: u64,
}

impl DraftedStreamBench<'_> {
    fn side(&self, readahead: Readahead) -> Result<StreamedSide> {
        let way = ReadMode { percent: self.percent, readahead, bytes_per_s: NonZeroU64::new(DISK) };
        StreamedSide::open(&self.config.model, self.directory, self.cores, way)
    }

    fn asked(&self, readahead: Readahead, drafts: Drafts) -> Result<StreamedEngine> {
        Ok(StreamedEngine::new(self.side(readahead)?.model, drafts))
    }
}

fn drafts(entry: DraftContestant, script: &Arc<Mutex<OracleScript>>) -> Drafts {
    if entry.width == 0 {
        return Drafts::default();
    }
    let script = Arc::clone(script);
    let author = move |text: &[u32], _| -> Box<dyn SequenceDrafter> {
        let OracleScript { planted, prompt } = script.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Box::new(PricedOracle::new(OracleDraft { said: text.len() - prompt, width: entry.width, ..planted }))
    };
    let drafts = Drafts::by(NODES, Some(DrafterFactory::new(DraftKind::Model, author)));
    let drafts = if entry.goes_on { drafts } else { drafts.without_drafting_ahead() };
    match entry.rule {
        Some(rule) => drafts.ruled(rule),
        None => drafts,
    }
}

/// Measures every comparison with drafts.
///
/// # Errors
/// If the model cannot be read, or an answer is not the target's own.
pub(super) fn run(config: &SuiteConfig, cores: &Cores, directory: &Path) -> Result<Vec<Comparison>> {
    let text = Text::load(&ModelFiles::at(&config.model)?).context("the model has no text side")?;
    let told = text.encode_raw(TOLD)?;
    let copied =
        text.encode_raw(&format!("Copy this text:\n{COPIED}\n\nThe copy:\n{COPIED}\n\nOnce more:\nThe"))?;
    let way = ReadMode { percent: 100, readahead: Readahead::Next, bytes_per_s: None };
    let mut resident = StreamedEngine::new(
        StreamedSide::open(&config.model, directory, cores, way)?.model,
        Drafts::default(),
    );
    let beyond = DRAFTED + 2 * speculation::tree::MAX_NODES;
    let resident_token = resident.answer(&told, beyond)?;
    let copy = resident.answer(&copied, DRAFTED)?.tokens;
    drop(resident);
    let mut rows = Vec::new();
    let mut guess = None;
    let mut gains = Vec::new();
    for percent in BOUNDS {
        let bench = DraftedStreamBench { config, cores, directory, percent };
        let mut std = bench.asked(Readahead::Nothing, Drafts::default())?;
        let sweep_s = std.answer(&told, PLAIN)?.token_s;
        let takes = *guess.get_or_insert(Duration::from_secs_f64(sweep_s / f64::from(GUESSES_OF_A_SWEEP)));
        eprintln!(
            "holobiont-bench: {percent} % of memory: a sweep takes {:.0} ms, a guess {:.1} ms, {:.2} of what a token takes in memory",
            sweep_s * 1e3,
            takes.as_secs_f64() * 1e3,
            takes.as_secs_f64() / resident_token.token_s,
        );
        let answer: Arc<[u32]> = resident_token.tokens.clone().into();
        let planted = |correct| OracleDraft {
            answer: Arc::clone(&answer),
            said: 0,
            width: 1,
            quality: Quality::uneven(correct),
            seed: 0,
            takes,
        };
        let mut field = Field::new(&bench, planted(CORRECT[0]), &told, std)?;
        for correct in CORRECT {
            field.set_script(planted(correct));
            let (more, gain) = field.compare(config.runs, correct)?;
            rows.extend(more);
            gains.push((correct, gain));
        }
        rows.push(ngram(&bench, &copied, &copy)?);
    }
    rows.extend(gains[..CORRECT.len()].iter().zip(&gains[CORRECT.len()..]).map(|(half, quarter)| {
        row(
            format!("draft right {}: gain over chains of 5 (SP) at 25 % of memory", half.0),
            ("x", Better::Higher),
            quarter.1.clone(),
            ("at 50 %", half.1.clone()),
            Some(BenchTarget::RatioAtLeast(1.0)),
        )
    }));
    Ok(rows)
}

struct Field<'a> {
    script: Arc<Mutex<OracleScript>>,
    prompt: &'a [u32],
    percent: u64,
    ours: StreamedEngine,
    others: Vec<(DraftContestant, StreamedEngine)>,
    std: StreamedEngine,
    big_little: StreamedSide,
}

type Runs = Vec<EngineAnswer>;

impl<'a> Field<'a> {
    fn new(
        bench: &DraftedStreamBench<'_>,
        planted: OracleDraft,
        prompt: &'a [u32],
        std: StreamedEngine,
    ) -> Result<Self> {
        let script = Arc::new(Mutex::new(OracleScript { planted, prompt: prompt.len() }));
        let asked = |entry| bench.asked(Readahead::Next, drafts(entry, &script));
        let ours = asked(OURS)?;
        let others = entries().into_iter().map(|entry| Ok((entry, asked(entry)?)));
        let others = others.collect::<Result<Vec<_>>>()?;
        let big_little = bench.side(Readahead::Next)?;
        Ok(Self { script, prompt, percent: bench.percent, ours, others, std, big_little })
    }

    fn set_script(&mut self, planted: OracleDraft) {
        self.script.lock().unwrap_or_else(PoisonError::into_inner).planted = planted;
    }

    /// Compares ours with all others, and returns the speedup over chains of 5, run by run.
    fn compare(&mut self, runs: usize, correct: f64) -> Result<(Vec<Comparison>, Samples)> {
        let mut planted = self.script.lock().unwrap_or_else(PoisonError::into_inner).planted.clone();
        let (mut ours, mut std, mut lossy): (Runs, Runs, Vec<BigLittle>) = Default::default();
        let mut others: Vec<Runs> = vec![Vec::new(); self.others.len()];
        // In the first round the engine learns the costs of rows and draft tokens.
        for run in 0..=runs {
            // Each run has other wrong positions: in so short an answer their position matters.
            planted.seed = run as u64;
            self.set_script(planted.clone());
            let mut round = Vec::new();
            for (entry, asked) in &mut self.others {
                let tokens = if entry.width == 0 { PLAIN } else { DRAFTED };
                round.push(asked.answer(self.prompt, tokens)?);
            }
            let own = self.ours.answer(self.prompt, DRAFTED)?;
            let plain = self.std.answer(self.prompt, PLAIN)?;
            let big_little = big_little::decode(&mut self.big_little, &planted, self.prompt, DRAFTED)?;
            for answer in round.iter().chain([&own, &plain]) {
                ensure!(planted.answer.starts_with(&answer.tokens), "drafts changed the answer");
            }
            if run > 0 {
                others.iter_mut().zip(round).for_each(|(runs, answer)| runs.push(answer));
                ours.push(own);
                std.push(plain);
                lossy.push(big_little);
            }
        }
        log_details(self.percent, correct, &ours, &lossy);
        self.rows(correct, &ours, (&std, &others, &lossy))
    }

    fn rows(
        &self,
        correct: f64,
        ours: &Runs,
        (std, others, lossy): (&Runs, &[Runs], &[BigLittle]),
    ) -> Result<(Vec<Comparison>, Samples)> {
        let of = |runs: &Runs| Samples::of(runs, |answer| answer.token_s * 1e3);
        let case = format!("{} % of memory, draft right {correct}: a token", self.percent);
        let beside = |name: &str, rival: Samples, goal: Option<f64>| -> Result<Comparison> {
            let target = goal.map(BenchTarget::RatioAtLeast);
            Ok(row(case.clone(), ("ms", Better::Lower), of(ours)?, (name, rival), target))
        };
        let mut rows = vec![
            beside("load, then compute (Std)", of(std)?, Some(2.9))?,
            beside("big and little (BLD), LOSSY", Samples::of(lossy, |lossy| lossy.token_s * 1e3)?, None)?,
        ];
        for ((entry, _), runs) in self.others.iter().zip(others) {
            rows.push(beside(entry.name, of(runs)?, entry.goal)?);
        }
        let gain = others[0].iter().zip(ours).map(|(chain, ours)| chain.token_s / ours.token_s);
        Ok((rows, Samples::new(gain.collect())?))
    }
}

fn ngram(bench: &DraftedStreamBench<'_>, prompt: &[u32], answer: &[u32]) -> Result<Comparison> {
    let mut drafting = bench.asked(Readahead::Next, Drafts::by(NODES, Some(DrafterFactory::ngram())))?;
    let mut plain = bench.asked(Readahead::Next, Drafts::default())?;
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for _ in 0..bench.config.runs {
        let said = drafting.answer(prompt, DRAFTED)?;
        ensure!(answer.starts_with(&said.tokens), "drafts changed the answer");
        ours.push(said.token_s * 1e3);
        others.push(plain.answer(prompt, PLAIN)?.token_s * 1e3);
    }
    let case = format!("{} % of memory, ngram, a text that repeats: a token", bench.percent);
    Ok(row(
        case,
        ("ms", Better::Lower),
        Samples::new(ours)?,
        ("layer pipeline (SPL)", Samples::new(others)?),
        None,
    ))
}

fn row(
    case: String,
    (unit, better): (&'static str, Better),
    ours: Samples,
    (name, samples): (&str, Samples),
    target: Option<BenchTarget>,
) -> Comparison {
    let rival = PeerSamples { name: name.to_owned(), format: "as packed".to_owned(), samples };
    Comparison { bench: "stream", case, unit, better, ours, rival, target }
}

fn log_details(percent: u64, correct: f64, ours: &Runs, lossy: &[BigLittle]) {
    let Some(last) = ours.last() else { return };
    let drafted = &last.drafted;
    let each = |count: u64| count as f64 / drafted.verifications.max(1) as f64;
    eprintln!(
        "holobiont-bench: {percent} % of memory, draft right {correct}: ours verifies {:.1} guesses and accepts {:.2}; {:.1} drafted ahead, \
         {:.1} kept; {:.1} ms of drafting hidden for a token; of BLD's tokens {:.1} % are not the target's",
        each(drafted.drafted),
        each(drafted.accepted),
        each(drafted.ahead),
        each(drafted.kept),
        last.hidden().as_secs_f64() * 1e3,
        lossy.last().map_or(0.0, |lossy| 100.0 * lossy.wrong),
    );
}
