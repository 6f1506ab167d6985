//! Plan of a deployment before its start.

use std::{
    env, fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};

use crate::{
    chaos::FailpointDirectory,
    cores,
    deployment::Deployment,
    fixtures::{self, BASE, EXAMPLES, example, program},
    network::Namespace,
    state_directory::StateDirectory,
};

/// Bytes of embedding, head and norms of the tests' model.
const EMBEDDING_BYTES: u64 = 30 << 20;

/// A deployment that has not been started.
#[derive(Debug, Clone)]
pub struct DeploymentPlan {
    model: Option<PathBuf>,
    /// Number of workers; the default is one on every machine.
    workers: usize,
    /// Number of cores; the default is one, which differs between concurrent deployments.
    cores: Option<usize>,
    arguments: Vec<String>,
    settings: Vec<(String, String)>,
    /// Whether the deployment file names the models.
    has_bases: bool,
    /// Content of the deployment file; empty for no file.
    file: String,
    /// Listen address; the default is a free port of loopback.
    listen: Option<SocketAddr>,
    /// Network namespace of the processes, if it is not the test's.
    namespace: Option<Namespace>,
}

impl Default for DeploymentPlan {
    fn default() -> Self {
        Self {
            model: None,
            workers: 1,
            cores: None,
            arguments: Vec::new(),
            settings: Vec::new(),
            has_bases: false,
            file: String::new(),
            listen: None,
            namespace: None,
        }
    }
}

impl DeploymentPlan {
    /// Plans a deployment of the base model alone.
    #[must_use]
    pub fn bare() -> Self {
        Self::default()
    }

    /// Plans a deployment of the base model and the example adapters.
    #[must_use]
    pub fn with_examples() -> Self {
        let adapters = EXAMPLES.map(|name| format!("{name}={}", example(name).display()));
        let arguments = adapters.into_iter().flat_map(|pair| ["--adapter".to_owned(), pair]).collect();
        Self { arguments, ..Self::default() }
    }

    /// Serves the real model with all of its layers.
    #[must_use]
    pub fn whole(self) -> Self {
        self.model(&fixtures::whole_model())
    }

    /// Serves the model at `path` instead of the default one.
    #[must_use]
    pub fn model(mut self, path: &Path) -> Self {
        self.model = Some(path.to_owned());
        self
    }

    /// Computes on the first `count` cores.
    #[must_use]
    pub fn cores(mut self, count: usize) -> Self {
        self.cores = Some(count);
        self
    }

    /// Uses `count` workers for adapters.
    #[must_use]
    pub fn workers(mut self, count: usize) -> Self {
        self.workers = count;
        self
    }

    /// Serves on several executors with these names, all on the same core.
    #[must_use]
    pub fn executors(self, names: &[&str]) -> Self {
        let sections = names.iter().map(|name| format!("[[executor]]\nname = \"{name}\"\n"));
        self.file(&sections.collect::<String>())
    }

    /// Serves several bases, each with its name and its model. `settings` are further lines of each.
    #[must_use]
    pub fn bases(mut self, bases: &[(&str, PathBuf)], settings: &str) -> Self {
        let section = |(name, model): &(&str, PathBuf)| {
            format!("[[base]]\nname = \"{name}\"\nmodel = \"{}\"\n{settings}\n", model.display())
        };
        self.has_bases = true;
        self.file(&bases.iter().map(section).collect::<String>())
    }

    /// Adds a remote executor at `address`, which the test starts itself.
    #[must_use]
    pub fn elsewhere(self, name: &str, address: SocketAddr) -> Self {
        self.file(&format!("[[executor]]\nname = \"{name}\"\naddress = \"{address}\"\n"))
    }

    /// Listens at `address` instead of a free port of loopback.
    #[must_use]
    pub fn listen(mut self, address: SocketAddr) -> Self {
        self.listen = Some(address);
        self
    }

    /// Runs in a separate network namespace.
    #[must_use]
    pub fn inside(mut self, namespace: &Namespace) -> Self {
        self.namespace = Some(namespace.clone());
        self
    }

    /// Adds `sections` to the deployment file.
    #[must_use]
    pub fn file(mut self, sections: &str) -> Self {
        self.file.push_str(sections);
        self
    }

    /// Copies adapters to a device of `device_bytes` over an emulated link of `link_gbps`, so that most
    /// requests are cold starts.
    #[must_use]
    pub fn cold_by(self, device_bytes: &str, link_gbps: &str) -> Self {
        self.set("DEVICE_ADAPTER_BYTES", device_bytes).set("LINK_GBPS", link_gbps)
    }

    /// Sets such a device for adapters of the tests' model, scaled from the whole model's.
    #[must_use]
    pub fn cold(self, device_kib: u64, link_gbps: f64) -> Self {
        let device = fixtures::bytes_of_layers(device_kib);
        self.cold_by(&device, &fixtures::of_layers(link_gbps).to_string())
    }

    /// Keeps this much memory for the layers' weights, of the 63 MiB of the whole model; all other weights
    /// are streamed from disk.
    #[must_use]
    pub fn streaming(self, layers_mib: u64) -> Self {
        let layers: u64 = fixtures::bytes_of_layers(layers_mib << 10).parse().expect("a number");
        self.set("RESIDENT_WEIGHT_BYTES", &(EMBEDDING_BYTES + layers).to_string())
    }

    /// Sets `HOLOBIONT_<name>` to bytes proportional to the layers, given the whole model's value.
    #[must_use]
    pub fn bytes(self, name: &str, kib: u64) -> Self {
        self.set(name, &fixtures::bytes_of_layers(kib))
    }

    /// Sets `HOLOBIONT_<name>`, as in `CHUNK_TOKENS`.
    #[must_use]
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.settings.push((format!("HOLOBIONT_{name}"), value.to_owned()));
        self
    }

    /// Sets a variable of another program, such as the loader or a driver.
    #[must_use]
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Allows unlimited restarts of processes after a short delay.
    #[must_use]
    pub fn restless(self) -> Self {
        self.set("MAX_CRASHES_PER_MIN", "1000000").set("RESTART_DELAY_MS", "0")
    }

    /// Arms failpoints at `places`, with unlimited restarts after a short delay.
    #[must_use]
    pub fn mortal(self, places: &FailpointDirectory) -> Self {
        let directory = places.directory().display().to_string();
        self.restless().set("FAILPOINTS", &directory)
    }

    /// Starts the deployment with a new state directory.
    #[must_use]
    pub fn start(&self) -> Deployment {
        self.start_in(Arc::new(StateDirectory::new()))
    }

    /// Starts the deployment with the state in `place`.
    #[must_use]
    pub fn start_in(&self, place: Arc<StateDirectory>) -> Deployment {
        Deployment::spawn(self.command(&place), place, self.served())
    }

    fn served(&self) -> PathBuf {
        self.model.clone().unwrap_or_else(fixtures::model)
    }

    /// Returns the command line, for tests of failing starts.
    #[must_use]
    pub fn command(&self, place: &StateDirectory) -> Command {
        let program = program("holobiont");
        let mut up = match &self.namespace {
            Some(namespace) => namespace.command(&program),
            None => Command::new(program),
        };
        let listen = self.listen.map_or("127.0.0.1:0".to_owned(), |address| address.to_string());
        // Settings of the developer's environment must not affect the test.
        for (name, _) in env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"HOLOBIONT_"))
        {
            up.env_remove(name);
        }
        up.args(["--json", "up"]);
        if !self.file.is_empty() {
            let file = place.home().join("deployment.toml");
            fs::write(&file, &self.file).expect("a deployment file");
            up.arg("--config").arg(file);
        }
        if !self.has_bases {
            up.arg("--model").arg(self.served()).env("HOLOBIONT_SERVED_MODEL_NAME", BASE);
        }
        up.args(["--listen", &listen, "--log-format", "human"])
            .arg("--state")
            .arg(place.state())
            .args(["--workers", &self.workers.to_string()])
            .args(cores::options(self.cores, self.workers))
            .args(&self.arguments)
            .env("HOLOBIONT_HOME", place.home())
            .env("HOLOBIONT_ADAPTER_ROOT", place.adapters())
            .envs(self.settings.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null());
        up
    }
}
