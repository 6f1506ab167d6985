//! Several hosts on one machine: deployments behind the front of a fleet.
//!
//! - here: independent hosts.
//! - [`front`]: two pickers, and the real Envoy with the shipped bootstrap.
//! - [`shared`]: hosts that share a registry and a bucket, each with a separate network.

pub mod front;
pub mod shared;

use std::ops::Deref;

use self::front::{FleetFront, FrontSetup};
use crate::{deployment::Deployment, plan::DeploymentPlan};

/// Deployments behind an Envoy front.
#[derive(Debug)]
pub struct EnvoyFleet {
    /// The hosts; `None` for a removed one.
    pub hosts: Vec<Option<Deployment>>,
    front: FleetFront,
}

impl EnvoyFleet {
    /// Starts `count` hosts of `plan`, up to three.
    #[must_use]
    pub fn start(count: usize, plan: impl Fn() -> DeploymentPlan, setup: FrontSetup<'_>) -> Self {
        let hosts: Vec<Deployment> = (0..count).map(|_| plan().start()).collect();
        let addresses: Vec<String> =
            hosts.iter().map(|host| host.client.url().trim_start_matches("http://").to_owned()).collect();
        let front = FleetFront::start(&addresses, setup);
        Self { hosts: hosts.into_iter().map(Some).collect(), front }
    }

    /// Returns a host that was not removed.
    #[must_use]
    pub fn host(&self, index: usize) -> &Deployment {
        self.hosts[index].as_ref().expect("it is there")
    }

    /// Returns the tokens that a host has generated.
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
