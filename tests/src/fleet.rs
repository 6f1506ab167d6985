//! Several hosts on one: deployments behind what stands before a fleet.
//!
//! - here: hosts that know nothing of each other.
//! - [`front`]: two pickers, and the real Envoy with the bootstrap that is shipped.
//! - [`shared`]: hosts that share a registry and a bucket, each with a network of its own.

pub mod front;
pub mod shared;

use std::ops::Deref;

use self::front::{FleetFront, FrontSetup};
use crate::{deployment::Deployment, plan::DeploymentPlan};

/// Deployments behind Envoy.
#[derive(Debug)]
pub struct EnvoyFleet {
    /// The hosts; `None` once one is gone.
    pub hosts: Vec<Option<Deployment>>,
    front: FleetFront,
}

impl EnvoyFleet {
    /// `count` hosts of `plan`, up to three.
    #[must_use]
    pub fn start(count: usize, plan: impl Fn() -> DeploymentPlan, setup: FrontSetup<'_>) -> Self {
        let hosts: Vec<Deployment> = (0..count).map(|_| plan().start()).collect();
        let addresses: Vec<String> =
            hosts.iter().map(|host| host.client.url().trim_start_matches("http://").to_owned()).collect();
        let front = FleetFront::start(&addresses, setup);
        Self { hosts: hosts.into_iter().map(Some).collect(), front }
    }

    /// A host that is there.
    #[must_use]
    pub fn host(&self, index: usize) -> &Deployment {
        self.hosts[index].as_ref().expect("it is there")
    }

    /// Tokens that a host has generated.
    #[must_use]
    pub fn generated(&self, index: usize) -> f64 {
        self.host(index).client.metric("holobiont_generated_tokens_total")
    }
}

impl Deref for EnvoyFleet {
    type Target = FleetFront;

    fn deref(&self) -> &FleetFront {
        &self.front
    }
}
