//! `holobiont check`: whether a deployment file, and everything it names, would start. Nothing is started.

use std::{
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::Command,
};

use model::{
    open::ModelFiles,
    random_source::{RandomSource, RandomSourceError},
    source::WeightSource as _,
};

use crate::{
    config::{Config, ConfigError, CoreList, Device, LayersSection},
    cores::{self, Neighbour, Split},
    exit::{Exit, Explain},
    findings::{Finding, Unwell, report},
    home::Home,
    key::file::KeyFile,
    models, sibling,
    table::size,
    terminal::{Terminal, printable},
};

/// Arguments of `check`.
#[derive(Debug, clap::Args)]
pub(crate) struct CheckArguments {
    /// Deployment file; without it, what the environment and the defaults describe
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Checks a deployment and prints a line for everything it names.
pub(crate) fn run(arguments: &CheckArguments, terminal: Terminal) -> Result<(), Unwell> {
    let file = arguments.config.as_deref();
    let name = file.map_or_else(|| "configuration".to_owned(), |file| file.display().to_string());
    let (findings, exit) = match Config::layered(Config::default(), file) {
        Ok(config) => {
            let mut findings = vec![Finding::ok(name, "every key is known and every value possible")];
            findings.extend(deployment(&config, &Home::from_environment()));
            let lines = Lines::of(file);
            findings.iter_mut().for_each(|finding| lines.point_at(finding));
            (findings, Exit::Usage)
        }
        Err(error) => (vec![Finding::error(name, &error)], ConfigError::exit(&error)),
    };
    report(&findings, exit, terminal)
}

/// Everything a configuration names.
pub(crate) fn deployment(config: &Config, home: &Home) -> Vec<Finding> {
    let allowed = cores::allowed();
    let mut findings = vec![model(config, home)];
    findings.extend(config.executor.device.filter(|device| *device != Device::Cpu).map(device));
    findings.extend([cores(config, &allowed), workers(config, &allowed)]);
    findings.extend(config.adapters.iter().map(|(name, path)| adapter(name, path)));
    if let Some(path) = &config.gateway.api_key_file {
        findings.push(keys(path));
    }
    findings.push(listen(config));
    if let Some(root) = &config.gateway.adapter_root {
        findings.push(match root.is_dir() {
            true => Finding::ok("[gateway] adapter_root", root.display().to_string()),
            false => Finding::fail(
                "[gateway] adapter_root",
                format!("{} is no directory", root.display()),
                "create it",
            ),
        });
    }
    findings.extend(layers(&config.layers));
    findings.extend(["base-executor", "gateway"].map(program));
    if !Split::new(config, &allowed).workers.is_empty() {
        findings.push(program("lora-worker"));
    }
    findings
}

/// What the executor says of a device, which it can reach and this program cannot.
pub(crate) fn device(device: Device) -> Finding {
    const NAME: &str = "[executor] device";
    let Some(program) = sibling::find("base-executor") else {
        return Finding::warn(NAME, format!("{device}, which only base-executor can look at"), "install it");
    };
    match Command::new(program).args(["device", &device.to_string()]).output() {
        Ok(output) => device_finding(NAME, output.status.success(), &[output.stdout, output.stderr].concat()),
        Err(error) => {
            Finding::fail(NAME, format!("base-executor cannot be asked: {error}"), "install it again")
        }
    }
}

/// The last line of what was said, whose cause and next step are one line.
fn device_finding(name: &str, is_usable: bool, said: &[u8]) -> Finding {
    let said = String::from_utf8_lossy(said);
    let line = printable(said.lines().last().unwrap_or("base-executor says nothing").trim());
    match is_usable {
        true => Finding::ok(name, line),
        false => {
            let line = line.strip_prefix("error: ").unwrap_or(&line);
            let (found, fix) = line.split_once("; ").unwrap_or((line, "use device = \"cpu\""));
            Finding::fail(name, found, fix)
        }
    }
}

/// A model whose weights are made of a number: its shape, and a tokenizer for the gateway.
fn random_model(path: &Path, seed: u64) -> Finding {
    const NAME: &str = "[model] random_weights";
    let shape = match RandomSource::open(path, seed) {
        Ok(source) => source,
        Err(error @ RandomSourceError::Read { .. }) => {
            return Finding::fail(NAME, error.to_string(), "name the directory of a config.json");
        }
        Err(error) => return Finding::fail(NAME, error.to_string(), "take a model of a known architecture"),
    };
    if !path.join("tokenizer.json").is_file() {
        let found = format!("there is no tokenizer.json in {}", path.display());
        return Finding::fail(NAME, found, "add the tokenizer.json and tokenizer_config.json of the model");
    }
    let architecture = &shape.config().architecture;
    Finding::warn(
        NAME,
        format!("{}: {architecture}", path.display()),
        "answers mean nothing: for measurements alone",
    )
}

fn model(config: &Config, home: &Home) -> Finding {
    const NAME: &str = "[model] name";
    let path = match models::find(config.model.name.as_deref(), home) {
        Ok(path) => path,
        Err(error) => return Finding::error(NAME, &error),
    };
    if let Some(seed) = config.model.random_weights {
        return random_model(&path, seed);
    }
    let opened =
        ModelFiles::at(&path).and_then(|files| Ok((files.weights()?.config().clone(), path.clone())));
    match opened {
        Ok((shape, path)) => {
            let bytes = models::model_at(&path).map_or(0, |model| model.bytes);
            let found = format!("{}: {}, {}", path.display(), shape.architecture, size(bytes));
            match config.model.context_length {
                Some(asked) if asked as usize > shape.context_length => Finding::fail(
                    "[model] context_length",
                    format!("{asked} tokens are asked for, the model has {}", shape.context_length),
                    "leave context_length out or lower it",
                ),
                _ => Finding::ok(NAME, found),
            }
        }
        Err(error) => Finding::fail(
            NAME,
            format!("{}: {error}", path.display()),
            "fetch the model again: holobiont pull NAME",
        ),
    }
}

/// The list is understood, and this machine has the cores.
fn cores(config: &Config, allowed: &CoreList) -> Finding {
    const NAME: &str = "[executor] cores";
    let Some(text) = &config.executor.cores else {
        let left = Split::new(config, allowed).executor;
        return Finding::ok(NAME, left.unwrap_or_else(|| format!("all {}", allowed.0.len())));
    };
    let wanted: CoreList = match text.parse() {
        Ok(wanted) => wanted,
        Err(error) => return Finding::fail(NAME, error, "name cores of this machine"),
    };
    match wanted.0.difference(&allowed.0).next() {
        None => Finding::ok(NAME, text.clone()),
        Some(core) => Finding::fail(
            NAME,
            format!("core {core} is not among the {} this process may use", allowed.0.len()),
            "holobiont doctor shows the cores there are",
        ),
    }
}

/// Every worker has a core, and it is not computing where the executor does if it need not.
fn workers(config: &Config, allowed: &CoreList) -> Finding {
    const NAME: &str = "[workers] cores";
    let split = Split::new(config, allowed);
    let cores = CoreList(split.workers.iter().map(|worker| worker.core).collect());
    let [first, ..] = split.workers.as_slice() else {
        return Finding::ok(NAME, "no workers: the executor computes every adapter itself");
    };
    if let Some(core) = cores.0.difference(&allowed.0).next() {
        let found = format!("core {core} is not among those this process may use: {allowed}");
        return Finding::fail(NAME, found, "holobiont doctor shows the cores there are");
    }
    let count = split.workers.len();
    let found = format!("{cores}, for {count} worker{}", if count == 1 { "" } else { "s" });
    if split.workers.iter().all(|worker| worker.neighbour == Neighbour::None) {
        return Finding::ok(NAME, format!("{found}, apart from the executor's"));
    }
    let found = format!("{found}, shared with the executor");
    match allowed.0.len() > cores.0.len() && config.executor.cores.is_some() {
        true => Finding::warn(NAME, found, format!("leave core {} out of [executor].cores", first.core)),
        false => Finding::ok(NAME, found),
    }
}

fn adapter(name: &str, path: &Path) -> Finding {
    let label = format!("[adapters] {name}");
    let holds = |file: &str| path.join(file).is_file();
    let fix = format!("holobiont adapters check {}", path.display());
    match (holds("adapter_config.json"), holds("adapter_model.safetensors")) {
        (true, true) => Finding::ok(label, path.display().to_string()),
        (false, _) => Finding::fail(
            label,
            format!("there is no adapter_config.json in {}", path.display()),
            "name a PEFT adapter's directory",
        ),
        (true, false) => {
            Finding::fail(label, format!("there is no adapter_model.safetensors in {}", path.display()), fix)
        }
    }
}

/// Every line of the key file is understood, and nobody else can read it.
pub(crate) fn keys(path: &Path) -> Finding {
    use std::os::unix::fs::PermissionsExt as _;
    const NAME: &str = "[gateway] api_key_file";
    let file = match KeyFile::read(path) {
        Ok(file) => file,
        Err(error) => return Finding::error(NAME, &error),
    };
    let mode = std::fs::metadata(path).map_or(0, |metadata| metadata.permissions().mode() & 0o777);
    if mode & 0o077 != 0 {
        let fix = format!("chmod 600 {}", path.display());
        return Finding::warn(
            NAME,
            format!("{} has mode {mode:03o}: others can read or change it", path.display()),
            fix,
        );
    }
    match file.entries().count() {
        0 => Finding::warn(NAME, "it holds no key: nobody may ask", "holobiont key add NAME"),
        keys => Finding::ok(NAME, format!("{} with {keys} keys", path.display())),
    }
}

/// The port is free, and not open to everybody by accident.
fn listen(config: &Config) -> Finding {
    const NAME: &str = "[gateway] listen";
    let listen = config.listen();
    let open = !listen.ip().is_loopback() && config.gateway.api_key_file.is_none();
    if open && config.gateway.insecure != Some(true) {
        let fix = "set api_key_file (holobiont key add NAME), listen on 127.0.0.1, or say insecure = true";
        return Finding::fail(NAME, format!("{listen} is reachable by others and no key is asked for"), fix);
    }
    port(NAME, listen)
}

/// What renting base layers over TLS needs is there, and nobody is let in by accident.
fn layers(layers: &LayersSection) -> Vec<Finding> {
    let mut findings = Vec::new();
    let files = [
        ("[layers] cert", &layers.cert, "holobiont cert --host NAME"),
        ("[layers] cert_key", &layers.cert_key, "holobiont cert --host NAME"),
        ("[layers] client_ca", &layers.client_ca, "holobiont cert --host NAME"),
        ("[layers] key_file", &layers.key_file, "holobiont key add NAME --file FILE"),
    ];
    for (name, path, fix) in files {
        let Some(path) = path else { continue };
        findings.push(match std::fs::File::open(path) {
            Ok(_) => Finding::ok(name, path.display().to_string()),
            Err(error) => Finding::fail(name, format!("{}: {error}", path.display()), fix),
        });
    }
    if let Some(listen) = layers.listen {
        findings.push(layer_listen(layers, listen));
    }
    findings
}

fn layer_listen(layers: &LayersSection, listen: SocketAddr) -> Finding {
    const NAME: &str = "[layers] listen";
    if layers.cert.is_none() || layers.cert_key.is_none() {
        let found = "layers are served over TLS only, and there is no certificate";
        return Finding::fail(NAME, found, "holobiont cert --host NAME, then set cert and cert_key");
    }
    if !listen.ip().is_loopback() && layers.key_file.is_none() && layers.client_ca.is_none() {
        let found = format!("{listen} is reachable by others and neither key nor certificate is asked for");
        return Finding::fail(NAME, found, "set key_file (holobiont key add NAME --file FILE) or client_ca");
    }
    port(NAME, listen)
}

/// Whether an address can be listened on.
pub(crate) fn port(name: &str, listen: SocketAddr) -> Finding {
    match TcpListener::bind(listen) {
        Ok(_) => Finding::ok(name, format!("{listen} is free")),
        Err(error) => Finding::fail(
            name,
            format!("{listen}: {error}"),
            "stop what listens there, or choose another port",
        ),
    }
}

fn program(name: &str) -> Finding {
    match sibling::find(name) {
        Some(path) => Finding::ok(name, path.display().to_string()),
        None => Finding::fail(
            name,
            "neither beside `holobiont` nor on PATH",
            format!("cargo build --release --bin {name}"),
        ),
    }
}

/// Where the settings of a file stand in it.
struct Lines(Vec<String>);

impl Lines {
    fn of(file: Option<&Path>) -> Self {
        let text = file.and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
        Self(text.lines().map(str::to_owned).collect())
    }

    /// Adds the line of a finding's setting, where the file has one.
    fn point_at(&self, finding: &mut Finding) {
        let Some((section, field)) = finding.name.split_once("] ") else { return };
        let header = format!("{section}]");
        let sections = self.0.iter().enumerate().skip_while(|(_, line)| line.trim() != header).skip(1);
        let mut fields = sections.take_while(|(_, line)| !line.trim_start().starts_with('['));
        let is_field =
            |line: &str| line.split_once('=').is_some_and(|(key, _)| key.trim().trim_matches('"') == field);
        if let Some((index, _)) = fields.find(|(_, line)| is_field(line)) {
            finding.name.push_str(&format!(" (line {})", index + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::Health;

    #[test]
    fn workers_are_held_against_the_cores_there_are_and_the_executors() {
        let finding = |machine: &str, settings: &str| {
            workers(&toml::from_str(settings).unwrap(), &machine.parse().unwrap())
        };
        let foreign = finding("0-3", "workers.cores = '3-4'");
        assert_eq!(foreign.health, Health::Fail);
        assert!(foreign.found.contains("core 4"), "{foreign:?}");
        let apart = finding("0-7", "");
        assert_eq!(
            (apart.health, apart.found.as_str()),
            (Health::Ok, "6-7, for 2 workers, apart from the executor's")
        );
        assert_eq!(finding("0-1", "").found, "1, for 1 worker, shared with the executor");
        let clash = finding("0-7", "executor.cores = '0-7'");
        assert_eq!(clash.health, Health::Warn, "{clash:?}");
        assert!(finding("0-7", "workers.count = 0").found.starts_with("no workers"));
    }

    #[test]
    fn an_open_port_without_keys_fails_and_says_three_ways_out() {
        let mut config = Config::default();
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
        assert!(bare[0].health == Health::Fail && bare[0].found.contains("no certificate"), "{bare:?}");
        let open = findings("listen = '0.0.0.0:0'\ncert = '/dev/null'\ncert_key = '/dev/null'");
        assert!(open[2].health == Health::Fail && open[2].found.contains("by others"), "{open:?}");
        let missing = findings("key_file = '/nonexistent/keys'");
        assert_eq!((missing[0].health, missing[0].name.as_str()), (Health::Fail, "[layers] key_file"));
    }

    #[test]
    fn what_the_executor_says_of_a_device_is_a_finding_with_its_next_step() {
        let finding = device_finding("d", true, b"cuda:0: A GPU, 1.0 GiB free of 2.0 GiB\n");
        assert_eq!(
            (finding.health, finding.found.as_str()),
            (Health::Ok, "cuda:0: A GPU, 1.0 GiB free of 2.0 GiB")
        );
        let finding = device_finding("d", false, b"error: there is no GPU; use --device cpu\n");
        assert_eq!((finding.health, finding.found.as_str()), (Health::Fail, "there is no GPU"));
        assert_eq!(finding.fix.as_deref(), Some("use --device cpu"));
    }

    #[test]
    fn random_weights_need_a_shape_and_a_tokenizer() {
        let directory = tempfile::tempdir().unwrap();
        let health = || random_model(directory.path(), 1);
        assert!(health().found.contains("config.json"));
        let shape = concat!(env!("CARGO_MANIFEST_DIR"), "/../benches/shapes/llama-2-7b/config.json");
        std::fs::copy(shape, directory.path().join("config.json")).unwrap();
        assert!(health().fix.unwrap().contains("tokenizer_config.json"));
        std::fs::write(directory.path().join("tokenizer.json"), "{}").unwrap();
        assert_eq!(health().health, Health::Warn, "answers mean nothing");
    }

    #[test]
    fn a_finding_points_at_its_line() {
        let lines =
            Lines("[model]\nname = 1\n[executor]\n# c\ncores = \"9\"".lines().map(str::to_owned).collect());
        let mut finding = Finding::ok("[executor] cores", "");
        lines.point_at(&mut finding);
        assert_eq!(finding.name, "[executor] cores (line 5)");
        let mut finding = Finding::ok("[executor] name", "");
        lines.point_at(&mut finding);
        assert_eq!(finding.name, "[executor] name");
    }
}
