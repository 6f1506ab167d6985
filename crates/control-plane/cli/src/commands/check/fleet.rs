//! Checks of the registry and store shared with other hosts. This program cannot reach them, so it runs the
//! gateway program.

use std::process::Command;

use super::said_finding;
use crate::{
    deployment::{config::DeploymentConfig, program_paths},
    terminal::findings::Finding,
};

/// Fix shown if the gateway gives none.
const FIX: &str = "see docs/guides/fleet.md";

/// Checks the registry and the store, if shared.
pub(super) fn shared(config: &DeploymentConfig) -> Vec<Finding> {
    const REGISTRY: &str = "[gateway] registry";
    const STORE: &str = "[gateway] store";
    let (registry, store) = (&config.gateway.registry, &config.gateway.store);
    let alone = match (registry, store) {
        (Some(_), None) => Some(Finding::fail(
            STORE,
            "a registry needs a store, so that other hosts can read the adapters' files",
            FIX,
        )),
        (None, Some(_)) => Some(Finding::fail(
            REGISTRY,
            "a store needs a registry, so that other hosts know the adapters' names",
            FIX,
        )),
        _ => None,
    };
    let keys = (config.gateway.shared_keys == Some(true)).then(|| keys(config));
    let asked = [(REGISTRY, "--registry", registry), (STORE, "--store", store)];
    let asked = asked.into_iter().filter_map(|(name, flag, url)| Some(ask(name, flag, url.as_deref()?)));
    asked.chain(alone).chain(keys).collect()
}

/// Checks the settings of keys from the registry.
fn keys(config: &DeploymentConfig) -> Finding {
    const KEYS: &str = "[gateway] shared_keys";
    match (&config.gateway.registry, &config.gateway.api_key_file) {
        (None, _) => Finding::fail(KEYS, "shared keys need a registry", "set registry"),
        (_, None) => Finding::fail(KEYS, "shared keys need a key file", "set api_key_file"),
        (Some(_), Some(path)) => Finding::ok(KEYS, format!("from the registry, kept in {}", path.display())),
    }
}

fn ask(name: &str, flag: &str, url: &str) -> Finding {
    let Some(program) = program_paths::find("gateway") else {
        return Finding::warn(name, "cannot check it without the program gateway", "install it");
    };
    match Command::new(program).args(["registry", "check", flag, url]).output() {
        Ok(output) => {
            said_finding(name, output.status.success(), &[output.stdout, output.stderr].concat(), FIX)
        }
        Err(error) => Finding::fail(name, format!("cannot run gateway: {error}"), "install it again"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::findings::Health;

    #[test]
    fn a_registry_without_a_store_is_refused_and_nothing_shared_is_nothing_to_say() {
        assert!(shared(&toml::from_str("").unwrap()).is_empty());
        for alone in ["gateway.registry = 'postgres://127.0.0.1:1/x'", "gateway.store = 's3://x'"] {
            let found = shared(&toml::from_str(alone).unwrap());
            assert_eq!(found.last().unwrap().health, Health::Fail, "{found:?}");
        }
        for alone in ["", "gateway.api_key_file = 'keys'"] {
            let found = shared(&toml::from_str(&format!("gateway.shared_keys = true\n{alone}")).unwrap());
            assert_eq!(found.last().unwrap().health, Health::Fail, "{found:?}");
        }
    }
}
