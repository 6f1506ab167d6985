//! Checks of access: key files, ports, certificates.

use std::{
    net::{SocketAddr, TcpListener},
    path::Path,
};

use security::keys::KeyFile;
use settings::LayersSection;

use crate::{deployment::config::DeploymentConfig, terminal::findings::Finding};

/// Checks that gateway and executor accept a key file and that other users cannot read it.
pub(super) fn keys(name: &str, path: &Path) -> Finding {
    use std::os::unix::fs::PermissionsExt as _;
    let keys = match KeyFile::open(path) {
        Ok((_, keys)) => keys,
        Err(error) => return Finding::error(name, &error),
    };
    let mode = std::fs::metadata(path).map_or(0, |metadata| metadata.permissions().mode() & 0o777);
    if mode & 0o077 != 0 {
        let fix = format!("chmod 600 {}", path.display());
        return Finding::warn(
            name,
            format!("{} has mode {mode:03o}: others can read or change it", path.display()),
            fix,
        );
    }
    Finding::ok(name, format!("{} with {} keys", path.display(), keys.len()))
}

/// Checks that every tenant of a service class has a key. A misspelt tenant would silently get the default
/// class.
pub(super) fn classes(config: &DeploymentConfig) -> Option<Finding> {
    const NAME: &str = "[[class]] tenants";
    let path = config.gateway.api_key_file.as_ref();
    let keys = path.and_then(|path| KeyFile::open(path).ok()).map_or_else(Vec::new, |(_, keys)| keys);
    let tenants = config.class.iter().flat_map(|class| &class.tenants);
    let unknown: Vec<&str> = tenants
        .map(String::as_str)
        .filter(|tenant| !keys.iter().any(|key| &*key.tenant == *tenant))
        .collect();
    match unknown.as_slice() {
        _ if config.class.is_empty() => None,
        [] => Some(Finding::ok(NAME, "each tenant has a key")),
        unknown => {
            let found = format!("these tenants have no key: {}", unknown.join(", "));
            Some(Finding::warn(NAME, found, "run holobiont key add NAME, or correct the tenant's name"))
        }
    }
}

/// Checks that the port is free and not open to other hosts by accident.
pub(super) fn listen(config: &DeploymentConfig) -> Finding {
    const NAME: &str = "[gateway] listen";
    let listen = config.listen();
    let open = !listen.ip().is_loopback() && config.gateway.api_key_file.is_none();
    if open && config.gateway.insecure != Some(true) {
        let fix =
            "set api_key_file (holobiont key add NAME makes it), listen on 127.0.0.1, or set insecure = true";
        return Finding::fail(NAME, format!("{listen} is reachable from other hosts without a key"), fix);
    }
    port(NAME, listen)
}

/// Checks the files of the TLS layer service, and that clients need a key or certificate.
pub(super) fn layers(layers: &LayersSection) -> Vec<Finding> {
    let mut findings = Vec::new();
    let files = [
        ("[layers] cert", &layers.cert, "holobiont cert --host NAME"),
        ("[layers] cert_key", &layers.cert_key, "holobiont cert --host NAME"),
        ("[layers] client_ca", &layers.client_ca, "holobiont cert --host NAME"),
    ];
    for (name, path, fix) in files {
        let Some(path) = path else { continue };
        findings.push(match std::fs::File::open(path) {
            Ok(_) => Finding::ok(name, path.display().to_string()),
            Err(error) => Finding::fail(name, format!("{}: {error}", path.display()), fix),
        });
    }
    if layers.gateways.is_some() && (layers.listen.is_none() || layers.client_ca.is_none()) {
        let found = "gateways of other hosts need a listener and a certificate authority";
        findings.push(Finding::fail("[layers] gateways", found, "set listen and client_ca"));
    }
    findings.extend(layers.key_file.as_deref().map(|path| keys("[layers] key_file", path)));
    if let Some(listen) = layers.listen {
        findings.push(layer_listen(layers, listen));
    }
    findings
}

fn layer_listen(layers: &LayersSection, listen: SocketAddr) -> Finding {
    const NAME: &str = "[layers] listen";
    if layers.cert.is_none() || layers.cert_key.is_none() {
        let found = "a listener for layers needs a TLS certificate";
        return Finding::fail(NAME, found, "holobiont cert --host NAME, then set cert and cert_key");
    }
    if !listen.ip().is_loopback() && layers.key_file.is_none() && layers.client_ca.is_none() {
        let found = format!("{listen} is reachable from other hosts without a key or certificate");
        return Finding::fail(NAME, found, "set key_file (holobiont key add NAME --file FILE) or client_ca");
    }
    port(NAME, listen)
}

/// Checks whether the address can be bound.
pub(crate) fn port(name: &str, listen: SocketAddr) -> Finding {
    match TcpListener::bind(listen) {
        Ok(_) => Finding::ok(name, format!("{listen} is free")),
        Err(error) => Finding::fail(
            name,
            format!("{listen}: {error}"),
            "stop the program that listens there, or choose another port",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::findings::Health;

    #[test]
    fn a_key_file_is_approved_exactly_if_gateway_and_executor_accept_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let line = |name: &str, key: &str| security::keys::line_of("user", name, key);
        let comments = "# so long\n".repeat(usize::try_from(security::keys::MAX_FILE_BYTES).unwrap() / 10);
        for (text, is_good) in [
            (line("a", "1") + &line("b", "2"), true),
            (line("a", "1") + &line("b", "1"), false),
            (comments + &line("a", "1"), false),
            ("# nobody\n".to_owned(), false),
        ] {
            std::fs::write(file.path(), &text).unwrap();
            let accepted = KeyFile::open(file.path()).is_ok();
            let mut config = DeploymentConfig::default();
            config.layers.key_file = Some(file.path().to_owned());
            let approved = |finding: &Finding| finding.health != Health::Fail;
            let found = [keys("[gateway] api_key_file", file.path()), layers(&config.layers).remove(0)];
            assert_eq!(accepted, is_good);
            assert!(found.iter().all(|finding| approved(finding) == is_good), "{found:?}");
        }
    }

    #[test]
    fn a_tenant_that_no_key_names_is_seen_in_its_class() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), security::keys::line_of("user", "alice", "1")).unwrap();
        let found = |tenants: &str| {
            let text = format!("[[class]]\nname = 'gold'\ntenants = {tenants}");
            let mut config: DeploymentConfig = toml::from_str(&text).unwrap();
            config.gateway.api_key_file = Some(file.path().to_owned());
            classes(&config).unwrap()
        };
        assert_eq!(found("['alice']").health, Health::Ok);
        let finding = found("['alice', 'alcie']");
        assert_eq!(
            (finding.health, finding.found.as_str()),
            (Health::Warn, "these tenants have no key: alcie")
        );
        assert!(classes(&DeploymentConfig::default()).is_none());
    }

    #[test]
    fn an_open_port_without_keys_fails_and_says_three_ways_out() {
        let mut config = DeploymentConfig::default();
        config.gateway.listen = Some("0.0.0.0:0".parse().unwrap());
        let finding = listen(&config);
        assert_eq!(finding.health, Health::Fail);
        assert!(finding.fix.unwrap().contains("api_key_file"));
        config.gateway.insecure = Some(true);
        assert_eq!(listen(&config).health, Health::Ok);
    }

    #[test]
    fn layers_are_not_offered_without_a_certificate_nor_to_strangers() {
        let findings = |section: &str| layers(&toml::from_str(section).unwrap());
        assert!(findings("").is_empty());
        let bare = findings("listen = '127.0.0.1:0'");
        assert!(
            bare[0].health == Health::Fail && bare[0].found.contains("needs a TLS certificate"),
            "{bare:?}"
        );
        let open = findings("listen = '0.0.0.0:0'\ncert = '/dev/null'\ncert_key = '/dev/null'");
        assert!(open[2].health == Health::Fail && open[2].found.contains("from other hosts"), "{open:?}");
        let gateways = findings("gateways = 'front'");
        assert!(
            gateways[0].health == Health::Fail && gateways[0].found.contains("certificate authority"),
            "{gateways:?}"
        );
        let missing = findings("key_file = '/nonexistent/keys'");
        assert_eq!((missing[0].health, missing[0].name.as_str()), (Health::Fail, "[layers] key_file"));
    }
}
