//! Integers modulo 2^48: rows of clients, and rows that the executor draws.

use kernels::Activations;
use layer_service::settings::{LayerSettings, Quotas};
use model::linear_sites::{EvaluateError, EvaluateSites, ModularSite, Site, SiteCall, SitePart};
use shmproto::layer::{
    CallClass, CallHeader, CallStatus, Dtype, RowSource, SiteOp, SitePath,
    seeded_rows::{DRAW_BYTES, Key, SeededRows},
};

use crate::calls::{DispatcherFixture, far, numbers, payload};

const WIDTH: usize = 64;
/// 32-bit words per row, with six bytes per number.
const WORDS: usize = 3 * WIDTH / 2;

/// Triples integers at its first site; its second has no ring path.
struct TriplingSites(Vec<Site>);

impl TriplingSites {
    fn new() -> Self {
        let part = SitePart { name: "triple".to_owned(), rows: WIDTH, has_bias: false };
        let ring = ModularSite { weight_exponent: 0, l1: [3; 2], commitment: [1; 32] };
        let site = Site {
            columns: WIDTH,
            parts: vec![part],
            fast_is_linear: true,
            arithmetic: model::linear_sites::Arithmetic::Unrounded,
            ring: Some(ring),
        };
        Self(vec![site.clone(), Site { ring: None, ..site }])
    }
}

impl EvaluateSites for TriplingSites {
    fn sites(&self) -> &[Site] {
        &self.0
    }

    fn evaluate(
        &mut self,
        call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
    ) -> Result<(), EvaluateError> {
        assert_eq!((call.path, x.width()), (SitePath::Ring, WORDS));
        let tripled = wholes(x.values()).into_iter().flat_map(|number| number_bytes(number * 3));
        for (out, bytes) in out.iter_mut().zip(tripled.collect::<Vec<_>>().as_chunks().0) {
            *out = f32::from_le_bytes(*bytes);
        }
        Ok(())
    }
}

fn number_bytes(number: u64) -> [u8; 6] {
    let [a, b, c, d, e, f, ..] = number.to_le_bytes();
    [a, b, c, d, e, f]
}

fn wholes(words: &[f32]) -> Vec<u64> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let whole = |&[a, b, c, d, e, f]: &[u8; 6]| u64::from_le_bytes([a, b, c, d, e, f, 0, 0]);
    bytes.as_chunks().0.iter().map(whole).collect()
}

fn draw() -> SeededRows {
    SeededRows { key: Key::new(&[0xa7; 32]), first: u64::MAX - 2 }
}

fn expected(rows: usize) -> Vec<u64> {
    let mut words = vec![0.0; rows * WORDS];
    draw().fill(0, WORDS, &mut words);
    wholes(&words).iter().map(|number| number * 3 % (1 << 48)).collect()
}

fn drawn(header: CallHeader) -> CallHeader {
    CallHeader { op: SiteOp::ForwardNoBias, path: SitePath::Ring, source: RowSource::Draw, ..header }
}

fn rig() -> DispatcherFixture {
    DispatcherFixture::over(Box::new(TriplingSites::new()), LayerSettings::default())
}

#[test]
fn rows_that_the_executor_makes_are_those_that_would_have_come_whole_or_cut() {
    let mut rig = rig();
    let (session, mut answers) = rig.remote(0, 8);
    for (sequence, rows) in [(1, 1), (3, 3), (5, 600)] {
        let header = drawn(far(sequence, rows));
        session.call(header, payload(&session, &header, &*draw().to_words())).unwrap();
        rig.run();
        assert_eq!(wholes(&numbers(&answers.try_recv().unwrap())), expected(rows));
        let mut words = vec![0.0; rows * WORDS];
        draw().fill(0, WORDS, &mut words);
        let header = CallHeader { source: RowSource::Rows, sequence: sequence + 1, ..header };
        session.call(header, payload(&session, &header, &words)).unwrap();
        rig.run();
        assert_eq!(wholes(&numbers(&answers.try_recv().unwrap())), expected(rows));
    }
    let used = session.stats();
    let (rows, row_bytes) = (604, 6 * WIDTH as u64);
    assert_eq!(
        used.rows[CallClass::Prefill as usize],
        2 * rows,
        "rows that were made count as those that came"
    );
    assert_eq!(used.bytes_in, 3 * DRAW_BYTES as u64 + rows * row_bytes, "what travelled");
    assert_eq!(used.bytes_out, 2 * rows * row_bytes);
}

#[test]
fn a_draw_through_shared_memory_is_one_too() {
    let mut rig = rig();
    let mut local = rig.local("a");
    let header = drawn(local.header(0, CallClass::Decode, 2));
    local.client.write_rows(header.input, Dtype::F32, &*draw().to_words()).unwrap();
    local.client.submit(&header).unwrap();
    rig.run();
    assert_eq!(wholes(&local.answer(WORDS).1), expected(2));
}

#[test]
fn what_does_not_go_together_is_refused_and_the_session_goes_on() {
    let mut rig = rig();
    let mut local = rig.local("a");
    let mut refused = |change: &dyn Fn(CallHeader) -> CallHeader| {
        let header = change(drawn(local.header(0, CallClass::Decode, 1)));
        local.client.submit(&header).unwrap();
        rig.run();
        local.refusal()
    };
    assert_eq!(refused(&|header| CallHeader { op: SiteOp::Forward, ..header }), CallStatus::Unsuited);
    assert_eq!(refused(&|header| CallHeader { dtype: Dtype::Bf16, ..header }), CallStatus::Unsuited);
    assert_eq!(refused(&|header| CallHeader { path: SitePath::Linear, ..header }), CallStatus::Unsuited);
    assert_eq!(refused(&|header| CallHeader { site: 1, ..header }), CallStatus::Nonlinear);
    assert_eq!(refused(&|header| CallHeader { part: Some(1), ..header }), CallStatus::UnknownSite);
}

#[test]
fn a_draw_of_another_length_and_one_of_more_rows_than_may_wait_are_refused() {
    let quotas = Quotas { tenant_rows: 10, ..Quotas::default() };
    let mut rig = DispatcherFixture::over(
        Box::new(TriplingSites::new()),
        LayerSettings { quotas, ..LayerSettings::default() },
    );
    let (session, mut answers) = rig.remote(0, 8);
    let mut refused = |header: CallHeader, words: &[f32]| {
        session.call(header, payload(&session, &header, words)).unwrap();
        rig.run();
        answers.try_recv().unwrap().header.status
    };
    let words = draw().to_words();
    assert_eq!(refused(drawn(far(1, 1)), &words[1..]), CallStatus::Shape);
    assert_eq!(
        refused(drawn(far(2, 1)), &[0.0; WORDS]),
        CallStatus::Shape,
        "rows where a draw was said to be"
    );
    assert_eq!(
        refused(CallHeader { source: RowSource::Rows, ..drawn(far(3, 1)) }, &*words),
        CallStatus::Shape
    );
    assert_eq!(refused(drawn(far(4, 11)), &*words), CallStatus::Shape);
    assert_eq!(refused(drawn(far(5, 10)), &*words), CallStatus::Done);
}
