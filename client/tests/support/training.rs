//! Trainers over an in-process executor, or over weights of their own.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{fmt::Debug, ops::Range, path::Path};

use client::{
    masking::Masking,
    remote_layers::RemoteLayers,
    session::{ClientSettings, Session},
    split_model::kv_precision,
    transport::Connect,
};
use kernels::{ThreadPool, lora::LoraPrecision};
use model::{
    adapter::Adapter,
    backward::{Example, Gradients, Loss, SavedScope, TrainableAdapter, Trainer},
    client_weights::client_base::ClientBase,
    cpu::Compute,
    forward::ReverseLayers,
    resident::kv_shape,
    sources::open::open,
    weights::ResidentLayers,
};
use shmproto::layer::CallClass;

use super::settings;

pub fn resident_trainer(path: &Path) -> Trainer<ResidentLayers> {
    let layers = ResidentLayers::load(&*open(path).unwrap(), 1, &|_| {}).unwrap();
    let frame = ClientBase::open(path).unwrap().frame;
    let shape = kv_shape(&frame.config, layers.sites().numerics().kv(None));
    Trainer::new(frame.into(), layers, shape, ThreadPool::new(&[]).unwrap(), SavedScope::All).unwrap()
}

pub fn remote_trainer(connector: Box<dyn Connect>, path: &Path, masking: Masking) -> Trainer<RemoteLayers> {
    let settings = ClientSettings { masking: masking.as_str().to_owned(), ..settings() };
    let mut session = Session::open(connector, settings).unwrap();
    let kv = kv_precision(session.catalog(), None);
    let mask = masking.prepare(&mut session, &mut |_, _| {}).unwrap();
    let ClientBase { frame, embedding, .. } = ClientBase::open(path).unwrap();
    let mut layers = RemoteLayers::new(session, mask, &frame.config, embedding).unwrap();
    layers.set_class(CallClass::Training);
    let shape = kv_shape(&frame.config, kv);
    Trainer::new(frame.into(), layers, shape, ThreadPool::new(&[]).unwrap(), SavedScope::All).unwrap()
}

/// Loss: the negative sum of the targets' log-probabilities.
struct SumLoss;

impl Loss for SumLoss {
    fn gradients(&mut self, _: Range<usize>, _: &[f32], gradients: &mut [f32]) {
        gradients.fill(-1.0);
    }
}

/// Log-probabilities of the tokens of `text`, and gradients of the adapter at `adapter`, tensor by tensor.
pub fn learn<B>(trainer: &mut Trainer<B>, adapter: &Path, text: &[u32]) -> (Vec<f32>, Vec<Vec<f32>>)
where
    B: ReverseLayers<Compute>,
    B::Error: Debug,
{
    let config = &trainer.model().config;
    let method = Adapter::read(adapter, config).unwrap().method;
    let learner = TrainableAdapter::new(&method, config, LoraPrecision::Exact).unwrap();
    let (tokens, answers) = (&text[..text.len() - 1], &text[1..]);
    let targets: Vec<_> = answers.iter().map(|&answer| Some(answer)).collect();
    let tape = trainer.forward(&learner, &[Example { tokens, targets: &targets, dropout: None }]).unwrap();
    let log_probabilities = trainer.log_probabilities(&learner, &tape).unwrap();
    let mut gradients = Gradients::zero(&method);
    trainer.reverse(&learner, tape, &mut SumLoss, gradients.single_turn()).unwrap();
    (log_probabilities, gradients.tensors().iter().map(|tensor| tensor.to_vec()).collect())
}
