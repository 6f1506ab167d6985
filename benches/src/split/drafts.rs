//! `speculate`: a split client that drafts locally, over emulated round trips, beside one
//! without drafts.
//!
//! An oracle drafter, which knows the answer and gets a part of it wrong, shows the value of a draft of that
//! quality. The n-gram drafter shows the gain without a model, on repetitive and on other text.

use std::{convert::Infallible, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use client::{generate::Generated, masking::Masking, speculative::DraftPolicy, text::Text};
use model_files::model_files::ModelFiles;
use shmproto::layer::SitePath;
use speculation::{
    baselines::BaselineRule,
    draft::{Draft, DraftToken},
    ngram::{AcceptanceTable, Ngram},
    threshold::Threshold,
    tree::{NodeId, TokenTree},
};

use super::{
    SplitRow,
    delay::DelayedConnector,
    executor::{BatchingFlag, CallTransport, SplitExecutor, open},
    model::{Decoder, time_of_a_token},
};
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::{Contestant, Samples, alternate},
    oracle_draft::{OracleDraft, Quality},
    report::{BenchTarget, Better, Comparison},
};

const BENCH: &str = "speculate";

type BoxedDraft = Box<dyn Draft<Error = Infallible> + Send>;

/// Emulated round trip, tokens to generate with drafts and without, and X-02's target.
struct EmulatedLink {
    round_trip_us: u64,
    drafted: usize,
    plain: usize,
    goal: f64,
}

const LINKS: [EmulatedLink; 4] = [
    EmulatedLink { round_trip_us: 100, drafted: 128, plain: 64, goal: 1.3 },
    EmulatedLink { round_trip_us: 1_000, drafted: 128, plain: 24, goal: 1.8 },
    EmulatedLink { round_trip_us: 5_000, drafted: 64, plain: 12, goal: 2.5 },
    EmulatedLink { round_trip_us: 20_000, drafted: 48, plain: 6, goal: 3.0 },
];

/// Time of a draft token of a model of about a tenth of the target's size.
const GUESS: Duration = Duration::from_millis(10);

/// Share of right first draft tokens of the oracle drafter.
const CORRECT: f64 = 0.85;

/// Minimum share of the speed that text without repetition keeps.
const LEAST_SHARE: f64 = 0.97;

/// A text to copy, and one to continue: sampled, since a small model's greedy story soon repeats itself.
pub(crate) const COPIED: &str = "The inspector counted the valves twice. Valve seven was open, valve eight was shut, and valve nine had \
    been painted over by somebody who did not want it to be counted. She wrote all of it into the green book, signed the \
    page, and asked the keeper for the key of the lower gallery.";
pub(crate) const TOLD: &str = "Write a story about a lighthouse keeper and a botanist.\n\nThe lighthouse keeper had lived on the island for \
    thirty years before the first visitor came. She was";

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let executor = SplitExecutor::start(config, cores.numbers(), BatchingFlag::Opportunistic)?;
    let text = Text::load(&ModelFiles::at(&config.model)?).context("the model has no text side")?;
    let copied =
        text.encode_raw(&format!("Copy this text:\n{COPIED}\n\nThe copy:\n{COPIED}\n\nOnce more:\nThe"))?;
    let told = text.encode_raw(TOLD)?;
    let mut comparisons = Vec::new();
    let mut before: Option<(u64, Samples)> = None;
    for link in LINKS {
        let mut bench = SpeculationBench::new(config, &executor, &link)?;
        let answer = bench.answer(&executor, config, &told)?;
        for (width, goal) in [(1, Some(link.goal)), (2, None)] {
            let planted = || planted(&answer, width);
            let (row, thresholds) = bench.compare(
                &format!("planted, {width} of a place"),
                (&told, link.drafted, 0.0),
                &|_| Box::new(planted()),
            )?;
            comparisons.push(row.with(goal.map(BenchTarget::RatioAtLeast)));
            if width == 1 {
                comparisons.extend(lower(
                    &link,
                    &thresholds,
                    before.replace((link.round_trip_us, thresholds.clone())),
                ));
            }
        }
        for (name, rule) in compared() {
            let planted = || -> BoxedDraft { Box::new(planted(&answer, 2)) };
            comparisons.push(bench.beside(
                &executor,
                config,
                (name, rule),
                (&told, link.drafted),
                &planted,
            )?);
        }
        comparisons.push(bench.going_on(&answer, (&told, link.drafted))?);
        let own = |prompt: &[u32]| -> BoxedDraft { Box::new(Ngram::new(prompt, AcceptanceTable::default())) };
        comparisons.push(
            bench.compare("ngram, a text that repeats", (&copied, link.drafted, 0.0), &own)?.0.with(None),
        );
        let told = bench.compare("ngram, a text that does not", (&told, 2 * link.plain, 1.0), &own)?.0;
        comparisons.push(told.with(Some(BenchTarget::RatioAtLeast(LEAST_SHARE))));
    }
    Ok(comparisons)
}

/// Compares the acceptance threshold over this link with the one over the link before.
fn lower(link: &EmulatedLink, thresholds: &Samples, before: Option<(u64, Samples)>) -> Option<Comparison> {
    let (shorter_us, rival) = before?;
    let row = SplitRow {
        bench: BENCH,
        case: format!("confidence a guess must have, round trips of {} ms", link.round_trip_us as f64 / 1e3),
        unit: "probability",
        better: Better::Lower,
        target: Some(BenchTarget::RatioAtLeast(1.0)),
    };
    Some(row.beside(thresholds, &format!("round trips of {} ms", shorter_us as f64 / 1e3), &rival))
}

struct SpeculationMeasurement {
    case: String,
    drafted: Samples,
    plain: Samples,
}

impl SpeculationMeasurement {
    fn with(self, target: Option<BenchTarget>) -> Comparison {
        let row =
            SplitRow { bench: BENCH, case: self.case, unit: "tokens/s", better: Better::Higher, target };
        row.beside(&self.drafted, "split decoding without drafts", &self.plain)
    }
}

struct SpeculationBench<'a> {
    link: &'a EmulatedLink,
    runs: usize,
    plain: Decoder,
    drafting: Decoder,
}

impl<'a> SpeculationBench<'a> {
    fn new(config: &SuiteConfig, executor: &SplitExecutor, link: &'a EmulatedLink) -> Result<Self> {
        let round_trip = Duration::from_micros(link.round_trip_us);
        let decoder = || decoder(config, executor, round_trip, DraftPolicy::Worth);
        Ok(Self { link, runs: config.runs, plain: decoder()?, drafting: decoder()? })
    }

    fn answer(&self, executor: &SplitExecutor, config: &SuiteConfig, prompt: &[u32]) -> Result<Arc<[u32]>> {
        // Draft tokens go beyond the answer's end, by at most a tree.
        let tokens = self.link.drafted + speculation::tree::MAX_NODES;
        Ok(decoder(config, executor, Duration::ZERO, DraftPolicy::Worth)?
            .answer(prompt.to_vec(), tokens, 0.0, None)?
            .tokens
            .into())
    }

    /// Compares our drafting rule with another one, with the same drafter.
    fn beside(
        &mut self,
        executor: &SplitExecutor,
        config: &SuiteConfig,
        (name, rule): (&str, BaselineRule),
        (prompt, tokens): (&[u32], usize),
        make: &dyn Fn() -> BoxedDraft,
    ) -> Result<Comparison> {
        let round_trip = Duration::from_micros(self.link.round_trip_us);
        let mut other = decoder(config, executor, round_trip, DraftPolicy::Compared(rule))?;
        let case =
            format!("planted, 2 of a place, round trips of {} ms", self.link.round_trip_us as f64 / 1e3);
        let contestant = |decoder: &mut Decoder, name: &str| -> Result<f64> {
            let generated = decoder.answer(prompt.to_vec(), tokens, 0.0, Some(&mut *make()))?;
            print_drafting(&format!("{name}, {case}"), &generated);
            Ok(1.0 / time_of_a_token(&generated).as_secs_f64())
        };
        let [worth, other] = alternate(
            self.runs,
            [
                Box::new(|_| contestant(&mut self.drafting, "what is worth it")) as Contestant<'_, f64>,
                Box::new(|_| contestant(&mut other, name)),
            ],
        )?;
        let row = SplitRow { bench: BENCH, case, unit: "tokens/s", better: Better::Higher, target: None };
        Ok(row.beside(&Samples::new(worth)?, name, &Samples::new(other)?))
    }

    /// Compares a slow drafter that drafts on during verification with one that does not.
    fn going_on(&mut self, answer: &Arc<[u32]>, (prompt, tokens): (&[u32], usize)) -> Result<Comparison> {
        let case =
            format!("a guess takes {GUESS:?}, round trips of {} ms", self.link.round_trip_us as f64 / 1e3);
        let planted = || OracleDraft { takes: GUESS, ..planted(answer, 2) };
        let contestant = |decoder: &mut Decoder, name: &str, mut made: BoxedDraft| -> Result<f64> {
            let generated = decoder.answer(prompt.to_vec(), tokens, 0.0, Some(&mut *made))?;
            print_drafting(&format!("{name}, {case}"), &generated);
            Ok(1.0 / time_of_a_token(&generated).as_secs_f64())
        };
        let [goes_on, waits] = alternate(
            self.runs,
            [
                Box::new(|_| contestant(&mut self.drafting, "goes on", Box::new(OverlappedOracle(planted()))))
                    as Contestant<'_, f64>,
                Box::new(|_| contestant(&mut self.plain, "waits", Box::new(planted()))),
            ],
        )?;
        let row = SplitRow { bench: BENCH, case, unit: "tokens/s", better: Better::Higher, target: None };
        Ok(row.beside(&Samples::new(goes_on)?, "a draft that waits for the verdict", &Samples::new(waits)?))
    }

    /// Compares decode with drafts and without, and returns the thresholds.
    fn compare(
        &mut self,
        draft: &str,
        (prompt, tokens, temperature): (&[u32], usize, f32),
        make: &dyn Fn(&[u32]) -> BoxedDraft,
    ) -> Result<(SpeculationMeasurement, Samples)> {
        let Self { link, runs, plain, drafting } = self;
        let case = format!("{draft}, round trips of {} ms", link.round_trip_us as f64 / 1e3);
        let (mut said, mut known) = (Vec::new(), Vec::new());
        let [drafted, plain] = alternate(
            *runs,
            [
                Box::new(|_| {
                    let generated =
                        drafting.answer(prompt.to_vec(), tokens, temperature, Some(&mut *make(prompt)))?;
                    print_drafting(&case, &generated);
                    said.push(generated.clone());
                    Ok(1.0 / time_of_a_token(&generated).as_secs_f64())
                }),
                Box::new(|_| {
                    let generated = plain.answer(prompt.to_vec(), link.plain, temperature, None)?;
                    known = generated.tokens.clone();
                    Ok(1.0 / time_of_a_token(&generated).as_secs_f64())
                }) as Contestant<'_, f64>,
            ],
        )?;
        ensure!(said.iter().all(|said| said.tokens.starts_with(&known)), "drafts changed the answer");
        let thresholds = Samples::of(&said, |said| said.drafted.threshold)?;
        Ok((
            SpeculationMeasurement { case, drafted: Samples::new(drafted)?, plain: Samples::new(plain)? },
            thresholds,
        ))
    }
}

/// A drafter that drafts on while its draft tokens are verified.
struct OverlappedOracle(OracleDraft);

impl Draft for OverlappedOracle {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        self.0.accept(tokens)
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Infallible> {
        self.0.guesses(tree, at)
    }

    fn takes_time(&self) -> bool {
        true
    }
}

/// Oracle drafter with `width` draft tokens per position, which takes no time.
fn planted(answer: &Arc<[u32]>, width: usize) -> OracleDraft {
    let (answer, quality, takes) = (Arc::clone(answer), Quality::even(CORRECT), Duration::ZERO);
    OracleDraft { answer, said: 0, width, quality, seed: 2_026, takes }
}

/// Rules that the paper compares with, and its own threshold.
fn compared() -> [(&'static str, BaselineRule); 3] {
    [
        ("chains of 5 (SP)", BaselineRule::Chain(5)),
        ("2 branches of 6 (SI)", BaselineRule::Branches { width: 2, depth: 6 }),
        ("the threshold that verdicts move (EdgeLLM)", BaselineRule::Learned(Threshold::default())),
    ]
}

fn decoder(
    config: &SuiteConfig,
    executor: &SplitExecutor,
    round_trip: Duration,
    effort: DraftPolicy,
) -> Result<Decoder> {
    let off = Masking::Off { path: SitePath::Fast };
    let connector =
        Box::new(DelayedConnector { connector: executor.connector(CallTransport::Channel)?, round_trip });
    Decoder::with_effort(&config.model, open(connector, off.as_str(), None)?, off, effort)
}

fn print_drafting(case: &str, generated: &Generated) {
    let drafted = &generated.drafted;
    let per_sweep = |count: u64| count as f64 / drafted.trees.max(1) as f64;
    eprintln!(
        "holobiont-bench: {case}: {:.2} tokens/s; {} sweeps with drafts, {:.1} guesses in each, {:.2} true; threshold {:.4}; {:.1} ms guessing; {} ahead, {} kept, {:.1} ms hidden",
        1.0 / time_of_a_token(generated).as_secs_f64(),
        drafted.trees,
        per_sweep(drafted.nodes),
        per_sweep(drafted.accepted),
        drafted.threshold,
        drafted.drafting.as_secs_f64() * 1e3,
        drafted.ahead,
        drafted.kept,
        drafted.hidden.as_secs_f64() * 1e3,
    );
}
