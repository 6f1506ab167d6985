//! Drafts in the engine: repetitive and other answers, with drafts and without, beside llama.cpp with its own
//! lookup in the earlier text.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::setup::Setup;
use crate::{
    holobiont_runner::{Holobiont, NamedAdapter},
    http::{Dialect, DialectServer, post_json},
    measure::{Samples, alternate},
    peer::{LlamaServer, LlamaServerOptions},
    report::{BenchTarget, Better, Comparison, PeerSamples},
    workload::{AdapterChoice, AnswerKind, BenchRequest},
};

const ANSWER_TOKENS: usize = 160;

/// Minimum speedup of repetitive text, and minimum share that other text keeps.
const REPEATS: f64 = 1.5;
const ORDINARY: f64 = 0.97;
/// Minimum share of the tokens per second that streams keep beside a repetitive one.
const BESIDE: f64 = 0.95;
const OTHERS: usize = 7;

/// llama-server's lookup in the earlier text, in the variant that `llama-lookup` shows.
const LOOKUP: [&str; 2] = ["--spec-type", "ngram-cache"];

/// Name, prompt and minimum speedup of each text.
const TEXTS: [(&str, &str, f64); 6] = [
    ("code that is edited", include_str!("drafts/code.txt"), REPEATS),
    ("JSON", include_str!("drafts/json.txt"), REPEATS),
    ("quotes", include_str!("drafts/quotes.txt"), REPEATS),
    (
        "a story",
        "Tell me a story about a lighthouse keeper who finds a strange bottle on the beach.",
        ORDINARY,
    ),
    ("an explanation", "Why is the sky blue, and why are sunsets red? Explain it to a student.", ORDINARY),
    ("advice", "Give me advice on how to learn to play chess well.", ORDINARY),
];

struct Servers {
    drafting: Holobiont,
    plain: Holobiont,
    by_itself: Option<Holobiont>,
    lookup: LlamaServer,
    theirs: LlamaServer,
}

pub(super) fn run(setup: &Setup) -> Result<Vec<Comparison>> {
    let servers = Servers::start(setup)?;
    let mut comparisons = Vec::new();
    for (what, text, least) in TEXTS {
        comparisons.extend(servers.compare(setup, what, text, least)?);
    }
    comparisons.push(beside(setup, &servers.drafting, &servers.plain)?);
    Ok(comparisons)
}

impl Servers {
    fn start(setup: &Setup) -> Result<Self> {
        let ours = |name: &str, draft: &str, adapters: &[NamedAdapter]| {
            let settings = [("HOLOBIONT_DRAFT", draft.to_owned())];
            let folder = setup.temporary(&format!("holobiont-drafts-{name}"));
            Holobiont::start_with(&setup.holobiont, adapters, &folder, &settings)
        };
        let theirs = |name: &str, options: &[&str]| {
            let folder = setup.temporary(&format!("llama-server-{name}"));
            let start = LlamaServerOptions { options, ..LlamaServerOptions::default() };
            LlamaServer::start_with(&setup.peer, &setup.peer.shipped, &start, &folder)
        };
        let by_itself = setup.config.draft_adapter.as_ref().map(|folder| {
            let adapter = NamedAdapter { name: "guesses".to_owned(), folder: folder.clone() };
            ours("self", "early-exit", &[adapter])
        });
        Ok(Self {
            drafting: ours("ngram", "ngram", &[])?,
            plain: ours("off", "off", &[])?,
            by_itself: by_itself.transpose()?,
            lookup: theirs("lookup", &LOOKUP)?,
            theirs: theirs("plain", &[])?,
        })
    }

    /// One stream that answers `text`: with drafts beside without, and beside the peer's.
    fn compare(&self, setup: &Setup, what: &str, text: &str, least: f64) -> Result<Vec<Comparison>> {
        let job = &job(&self.plain, text)?;
        self.warm_up(job)?;
        let [drafting, plain, by_itself, lookup, theirs] = alternate(
            setup.config.runs,
            [
                Box::new(|_| rate(&self.drafting, job)),
                Box::new(|_| rate(&self.plain, job)),
                Box::new(|_| rate(self.by_itself.as_ref().unwrap_or(&self.plain), job)),
                Box::new(|_| rate(&self.lookup, job)),
                Box::new(|_| rate(&self.theirs, job)),
            ],
        )?;
        let case = |by: &str| format!("one stream, {what}{by}");
        let target = Some(BenchTarget::RatioAtLeast(least));
        let mut comparisons = vec![
            comparison(case(""), &drafting, ("without drafts", &plain), target)?,
            comparison(case(""), &drafting, ("llama-server with its lookup", &lookup), None)?,
            comparison(
                case(": llama-server with its lookup"),
                &lookup,
                ("llama-server without", &theirs),
                None,
            )?,
        ];
        if self.by_itself.is_some() {
            let rival = ("without drafts", &plain[..]);
            comparisons.push(comparison(case(", by itself"), &by_itself, rival, target)?);
        }
        Ok(comparisons)
    }

    fn warm_up(&self, job: &BenchRequest) -> Result<()> {
        let job = std::slice::from_ref(job);
        for server in [&self.drafting, &self.plain].into_iter().chain(&self.by_itself) {
            server.warm_up(job)?;
        }
        [&self.lookup, &self.theirs].into_iter().try_for_each(|server| server.warm_up(job))
    }
}

/// Streams of ordinary text beside a repetitive one.
fn beside(setup: &Setup, drafting: &Holobiont, plain: &Holobiont) -> Result<Comparison> {
    let mut jobs = vec![job(plain, TEXTS[0].1)?];
    for index in 0..OTHERS {
        jobs.push(job(plain, &format!("{} Write chapter {}.", TEXTS[3].1, index + 1))?);
    }
    let others = |server: &Holobiont| -> Result<f64> {
        let burst = server.burst(&jobs)?;
        let each = burst.0[1..].iter().map(|t| (t.tokens - 1) as f64 / (t.last - t.first).as_secs_f64());
        Ok(each.sum())
    };
    let [drafting, plain] =
        alternate(setup.config.runs, [Box::new(|_| others(drafting)), Box::new(|_| others(plain))])?;
    let case = format!("{OTHERS} streams beside one whose text repeats");
    comparison(case, &drafting, ("without drafts", &plain), Some(BenchTarget::RatioAtLeast(BESIDE)))
}

/// Request for an answer to `text` in the chat template.
fn job(server: &Holobiont, text: &str) -> Result<BenchRequest> {
    let body = json!({ "messages": [{ "role": "user", "content": text.trim() }] });
    let answer: Value = serde_json::from_str(&post_json(server.port(), "/tokenize", &body)?)?;
    let tokens = answer["tokens"].as_array().with_context(|| format!("/tokenize says {answer}"))?;
    let prompt =
        tokens.iter().filter_map(Value::as_u64).filter_map(|token| u32::try_from(token).ok()).collect();
    Ok(BenchRequest { prompt, who: AdapterChoice::Base, generate: ANSWER_TOKENS, says: AnswerKind::Anything })
}

/// Tokens per second after the first.
fn rate<D: Dialect>(server: &DialectServer<D>, job: &BenchRequest) -> Result<f64> {
    let timeline = server.ask(job)?;
    Ok((timeline.tokens - 1) as f64 / (timeline.last - timeline.first).as_secs_f64())
}

fn comparison(
    case: String,
    ours: &[f64],
    (name, theirs): (&str, &[f64]),
    target: Option<BenchTarget>,
) -> Result<Comparison> {
    let samples = |rates: &[f64]| Samples::new(rates.to_vec());
    let rival = PeerSamples { name: name.to_owned(), format: "Q4_1".to_owned(), samples: samples(theirs)? };
    let (ours, better) = (samples(ours)?, Better::Higher);
    Ok(Comparison { bench: "drafts", case, unit: "tokens/s", better, ours, rival, target })
}
