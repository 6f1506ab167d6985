//! Guarantees of sound masking: the attacks that succeed on `off` and `paper` (`attacks.rs`) are no better
//! than chance on `shares` and `pads`, on the real model. With the input of both executors they succeed
//! again.
#![allow(dead_code, reason = "the attacks have more parts than are used here")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "attacks/adapter.rs"]
mod adapter;
#[path = "attacks/algebra.rs"]
mod algebra;
#[path = "attacks/chance.rs"]
mod chance;
#[path = "attacks/executor.rs"]
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

use std::{path::Path, sync::Arc};

use client::{
    masking::{
        Masking, RowProtection,
        one_time_pads::{Pads, maker::PadGenerator, pool::PadPool},
        secret_sharing::SecondExecutor,
    },
    text::Text,
};
use model::{
    adapter::Adapter,
    client_weights::client_base::ClientBase,
    forward::LinearGroup::{Head, O, Qkv},
    linear_sites::SiteId,
    resident::KvPrecision,
    site_model::SiteModel,
};
use shmproto::layer::{SiteOp, SitePath};
use tempfile::TempDir;

use self::{
    adapter::{ObservedRows, own_delta, steal},
    algebra::{Matrix, least_squares, to_f64},
    chance::{assert_rare, assert_uniform, assert_unlike, paired},
    executor::{CallEnd, CuriousExecutor, FloatRows, IntegerRows},
    prompt::Dictionary,
    reuse::shared_noise,
    scene::{base, client, distinct_tokens, first_tokens, pass, site},
    subspace::OrthogonalResidual,
    support::{
        committed_executor, example_adapter, real_model, settings,
        training::{learn, remote_trainer},
    },
};

const ADAPTER: &str = "pirate";
const SECRET: &str = "Dear doctor, my name is Ada Byron, I was born in 1815 and live at 12 St James's Square. \
    Since Tuesday I have had a fever of 39.4 degrees; please call me at 020 7946 0018.";
const LAYERS: [usize; 2] = [0, 10];
/// Pairs left out of the inverter's training.
const UNSEEN: usize = 64;
/// Noises that the executor is assumed to know.
const KNOWN: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Bare,
    Shares,
    Pads,
}

struct VictimClient {
    first: CuriousExecutor,
    second: Option<CuriousExecutor>,
    masking: Masking,
    _pool: TempDir,
}

impl VictimClient {
    /// Creates a client whose executors record the rows of the sites `kept`.
    fn new(mode: Mode, kept: &[SiteId]) -> Self {
        let executor = || CuriousExecutor::new(committed_executor(&real_model()), kept.iter().copied());
        let (first, pool) = (executor(), tempfile::tempdir().unwrap());
        let second = (mode == Mode::Shares).then(executor);
        let masking = match (mode, &second) {
            (Mode::Bare, _) => Masking::Off { path: SitePath::Ring },
            (Mode::Pads, _) => RowProtection::Pads(pads(pool.path())).into(),
            (Mode::Shares, second) => {
                let connector = Arc::new(second.clone().unwrap());
                RowProtection::Shares(Arc::new(SecondExecutor { connector, settings: settings() })).into()
            }
        };
        Self { first, second, masking, _pool: pool }
    }

    /// Creates a client with an adapter that has run first tokens of many prompts.
    fn visited(mode: Mode, base: &ClientBase, prompts: &[u32]) -> Self {
        let sites = LAYERS.into_iter().flat_map(|layer| [site(base, layer, Qkv), site(base, layer, O)]);
        let victim = Self::new(mode, &sites.collect::<Vec<_>>());
        let mut model = client(&victim.first, victim.masking.clone(), Some(KvPrecision::F32));
        let adapter = model.load_adapter(&example_adapter(ADAPTER)).unwrap();
        first_tokens(&mut model, prompts, Some(&adapter));
        victim
    }

    fn sent(&self, site: SiteId) -> IntegerRows {
        self.first.whole(site, SiteOp::ForwardNoBias, CallEnd::Sent)
    }

    /// Rows of the first executor without the pads of the second.
    fn together(&self, site: SiteId) -> IntegerRows {
        let sent = self.sent(site);
        let drawn = self.second.as_ref().unwrap().drawn(site, SiteOp::ForwardNoBias, sent.width);
        sent.without(&drawn)
    }
}

/// Pads in `directory`; missing ones are made.
fn pads(directory: &Path) -> Pads {
    let mut own = SiteModel::open(&real_model(), &[]).unwrap();
    own.commit();
    let maker = PadGenerator::new(Box::new(own), 2 << 30);
    let pool = PadPool::create(directory, maker.commitment().unwrap(), &maker.shapes()).unwrap();
    Pads::new(pool, Some(maker))
}

fn part(rows: &FloatRows, of: std::ops::Range<usize>) -> FloatRows {
    FloatRows { width: rows.width, values: rows.values[of.start * rows.width..of.end * rows.width].to_vec() }
}

fn hits(found: &[u32], truth: &[u32]) -> usize {
    found.iter().zip(truth).filter(|(a, b)| a == b).count()
}

/// Rows decoded by an inverter that is trained on pairs of sent and true rows, without the last [`UNSEEN`].
fn inverted(sent: &FloatRows, truth: &FloatRows) -> FloatRows {
    let learned = sent.count() - UNSEEN;
    let matrix = |rows: &FloatRows| Matrix::from_rows(rows.width, rows.iter().take(learned).map(to_f64));
    let inverter = least_squares(matrix(sent), matrix(truth));
    let read = |row: &[f32]| {
        let row = to_f64(row);
        inverter.columns().map(|column| algebra::dot(&row, column) as f32).collect::<Vec<f32>>()
    };
    let values = sent.iter().skip(learned).flat_map(read).collect();
    FloatRows { width: truth.width, values }
}

/// Least-squares estimate of the value projection's change, and the adapter's own.
fn stolen(victim: &VictimClient, base: &ClientBase, layer: usize) -> [FloatRows; 2] {
    let (qkv, o) = (site(base, layer, Qkv), site(base, layer, O));
    let crossed = ObservedRows {
        inputs: victim.sent(qkv).seen(),
        base: victim.first.whole(qkv, SiteOp::ForwardNoBias, CallEnd::Answered).seen(),
        attended: victim.sent(o).seen(),
    };
    let delta = steal(&crossed, base.config(), &[]).delta;
    let adapter = Adapter::read(&example_adapter(ADAPTER), base.config()).unwrap();
    let rows = |matrix: &Matrix| {
        let columns: Vec<Vec<f32>> =
            matrix.columns().map(|column| column.iter().map(|x| *x as f32).collect()).collect();
        FloatRows { width: columns[0].len(), values: columns.concat() }
    };
    [rows(&delta), rows(&own_delta(&adapter, layer).1)]
}

/// Runs all attacks of one executor on first tokens.
fn assert_blind(mode: Mode) {
    let base = base();
    let prompts = distinct_tokens(&base, base.config().hidden_size + 64 + UNSEEN);
    let (victim, bare) =
        (VictimClient::visited(mode, &base, &prompts), VictimClient::visited(Mode::Bare, &base, &prompts));
    let first = site(&base, 0, Qkv);
    let (sent, truth) = (victim.sent(first).seen(), bare.sent(first).seen());
    println!("{mode:?}");
    for layer in LAYERS {
        assert_uniform("rows", &victim.sent(site(&base, layer, Qkv)));
    }
    assert_unlike("T0, rows as they are", &sent, &truth);
    let found = Dictionary::new(&base, &victim.first).read(&sent);
    assert_rare("T0, tokens", hits(&found, &prompts), prompts.len(), 1.0);

    let gains = &base.frame.norms.attention[0];
    let noise: Vec<f32> = shared_noise(&sent, gains).into_iter().map(|x| x as f32).collect();
    let without = sent.iter().flat_map(|row| row.iter().zip(&noise).map(|(z, n)| z - n).collect::<Vec<_>>());
    assert_unlike("T2, rows", &FloatRows { width: sent.width, values: without.collect() }, &truth);

    let uncovered = OrthogonalResidual::by(&part(&sent, 0..KNOWN));
    let rest = KNOWN..sent.count();
    assert_unlike("T3, rows", &uncovered.parts(&part(&sent, rest.clone())), &part(&truth, rest));

    for layer in LAYERS {
        let [found, own] = stolen(&victim, &base, layer);
        assert_unlike(&format!("T4, layer {layer}"), &found, &own);
    }

    let read = inverted(&sent, &truth);
    let unseen = prompts.len() - UNSEEN..prompts.len();
    assert_unlike("what was learned, rows", &read, &part(&truth, unseen.clone()));
    let found = Dictionary::new(&base, &victim.first).read(&read);
    assert_rare("what was learned, tokens", hits(&found, &prompts[unseen]), UNSEEN, 1.0);
}

#[test]
fn one_of_two_executors_learns_nothing_by_any_attack() {
    assert_blind(Mode::Shares);
}

#[test]
fn an_executor_learns_nothing_of_rows_under_pads_by_any_attack() {
    assert_blind(Mode::Pads);
}

/// Runs the prompt twice, so that the executor can compare its rows.
fn twice(mode: Mode) -> (FloatRows, FloatRows, Vec<u32>, CuriousExecutor) {
    let base = base();
    let prompt = Text::load(&base.files).unwrap().encode_raw(SECRET).unwrap();
    let first = site(&base, 0, Qkv);
    let victim = VictimClient::new(mode, &[first]);
    (0..2).for_each(|_| pass(&mut client(&victim.first, victim.masking.clone(), None), &prompt, None));
    let sent = victim.sent(first).seen();
    assert_eq!(sent.count(), 2 * prompt.len());
    (part(&sent, 0..prompt.len()), part(&sent, prompt.len()..2 * prompt.len()), prompt, victim.first)
}

#[test]
fn equal_rows_are_told_from_others_only_where_nothing_covers_them_t1() {
    for mode in [Mode::Bare, Mode::Shares, Mode::Pads] {
        let (once, again, prompt, executor) = twice(mode);
        let (same, found) = (paired(&once, &again), Dictionary::new(&base(), &executor).read(&once));
        println!("{mode:?}");
        if mode == Mode::Bare {
            // Repeated tokens give repeated rows.
            let distinct: std::collections::HashSet<_> = prompt.iter().collect();
            assert!(same >= distinct.len(), "{same} of {}", prompt.len());
            assert_eq!(found, prompt, "exact arithmetic alone hides nothing");
            continue;
        }
        assert_rare("T1, equal rows", same, prompt.len(), 1.0);
        assert_rare("T0, tokens", hits(&found, &prompt), prompt.len(), 1.0);
    }
}

#[test]
fn two_executors_that_put_together_what_they_saw_read_everything() {
    let base = base();
    let prompts = distinct_tokens(&base, base.config().hidden_size + 64 + UNSEEN);
    let victim = VictimClient::visited(Mode::Shares, &base, &prompts);
    let bare = VictimClient::visited(Mode::Bare, &base, &prompts);
    for layer in LAYERS {
        for place in [site(&base, layer, Qkv), site(&base, layer, O)] {
            assert_eq!(victim.together(place).numbers, bare.sent(place).numbers, "{place:?}");
        }
    }
    let rows = victim.together(site(&base, 0, Qkv)).seen();
    assert_eq!(Dictionary::new(&base, &victim.first).read(&rows), prompts);
    // An inverter learns easily from such rows.
    let truth = bare.sent(site(&base, 0, Qkv)).seen();
    let unseen = prompts.len() - UNSEEN..prompts.len();
    let read = inverted(&rows, &truth);
    assert_eq!(Dictionary::new(&base, &victim.first).read(&read), prompts[unseen]);
}

#[test]
fn gradients_at_the_head_do_not_tell_what_is_learned() {
    let base = base();
    let (text, head) = (Text::load(&base.files).unwrap().encode_raw(SECRET).unwrap(), site(&base, 0, Head));
    for mode in [Mode::Bare, Mode::Shares, Mode::Pads] {
        let victim = VictimClient::new(mode, &[head]);
        let mut trainer =
            remote_trainer(Box::new(victim.first.clone()), &real_model(), victim.masking.clone());
        learn(&mut trainer, &example_adapter(ADAPTER), &text);
        let gradients = victim.first.whole(head, SiteOp::Backward, CallEnd::Sent);
        let rows = gradients.seen();
        let peak =
            |row: &[f32]| (0..row.len()).max_by(|&a, &b| row[a].abs().total_cmp(&row[b].abs())).unwrap();
        let found: Vec<u32> = rows.iter().map(|row| u32::try_from(peak(row)).unwrap()).collect();
        let hits = hits(&found, &text[1..]);
        println!("{mode:?}: {hits} of {}", found.len());
        if mode == Mode::Bare {
            assert!(hits * 100 >= found.len() * 99, "{hits}");
        } else {
            assert_rare("T0, gradients", hits, found.len(), 1.0);
            assert_uniform("gradients", &gradients);
        }
    }
}
