//! What a deployment is to be, before it is one.

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

/// What embedding, head and norms of the tests' model need in memory.
const EMBEDDING_BYTES: u64 = 30 << 20;

/// A deployment that has not been started.
#[derive(Debug, Clone)]
pub struct DeploymentPlan {
    /// Instead of the model of all tests.
    model: Option<PathBuf>,
    /// One unless told otherwise, whatever machine this is.
    workers: usize,
    /// One unless told otherwise, which one differs between deployments that run at once.
    cores: Option<usize>,
    arguments: Vec<String>,
    settings: Vec<(String, String)>,
    /// The deployment file, if there is one.
    file: String,
    /// Any free port of loopback unless told otherwise.
    listen: Option<SocketAddr>,
    /// Where its processes have another network than the test.
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
            file: String::new(),
            listen: None,
            namespace: None,
        }
    }
}

impl DeploymentPlan {
    /// The base model alone.
    #[must_use]
    pub fn bare() -> Self {
        Self::default()
    }

    /// The base model and the example adapters.
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

    /// Serves the model at `path` instead of the one all tests share.
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

    /// Lets `count` workers compute adapters.
    #[must_use]
    pub fn workers(mut self, count: usize) -> Self {
        self.workers = count;
        self
    }

    /// Serves on several executors, called so. All compute on the same core.
    #[must_use]
    pub fn executors(self, names: &[&str]) -> Self {
        let sections = names.iter().map(|name| format!("[[executor]]\nname = \"{name}\"\n"));
        self.file(&sections.collect::<String>())
    }

    /// Serves on one more executor, which somebody else has started at `address`.
    #[must_use]
    pub fn elsewhere(self, name: &str, address: SocketAddr) -> Self {
        self.file(&format!("[[executor]]\nname = \"{name}\"\naddress = \"{address}\"\n"))
    }

    /// Listens there, and not at any free port of loopback.
    #[must_use]
    pub fn listen(mut self, address: SocketAddr) -> Self {
        self.listen = Some(address);
        self
    }

    /// Runs on a network of its own.
    #[must_use]
    pub fn inside(mut self, namespace: &Namespace) -> Self {
        self.namespace = Some(namespace.clone());
        self
    }

    /// Says `sections` in its deployment file.
    #[must_use]
    pub fn file(mut self, sections: &str) -> Self {
        self.file.push_str(sections);
        self
    }

    /// Lets adapters come to a device of `device_bytes` over an emulated link of `link_gbps`: most requests find theirs
    /// missing there.
    #[must_use]
    pub fn cold_by(self, device_bytes: &str, link_gbps: &str) -> Self {
        self.set("DEVICE_ADAPTER_BYTES", device_bytes).set("LINK_GBPS", link_gbps)
    }

    /// The same for adapters of the tests' model, as much as the whole model's would need.
    #[must_use]
    pub fn cold(self, device_kib: u64, link_gbps: f64) -> Self {
        let device = fixtures::bytes_of_layers(device_kib);
        self.cold_by(&device, &fixtures::of_layers(link_gbps).to_string())
    }

    /// Has so much memory for the layers' weights, of the 63 MiB that the whole model's are; the others come from the disk.
    #[must_use]
    pub fn streaming(self, layers_mib: u64) -> Self {
        let layers: u64 = fixtures::bytes_of_layers(layers_mib << 10).parse().expect("a number");
        self.set("RESIDENT_WEIGHT_BYTES", &(EMBEDDING_BYTES + layers).to_string())
    }

    /// Sets `HOLOBIONT_<name>` to bytes of what each layer has, as many as the whole model's layers would need.
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

    /// Sets a variable of somebody else's, such as the loader's or a driver's.
    #[must_use]
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Lets its processes die as often as it takes, and come back soon.
    #[must_use]
    pub fn restless(self) -> Self {
        self.set("MAX_CRASHES_PER_MIN", "1000000").set("RESTART_DELAY_MS", "0")
    }

    /// Lets its processes die at `places`, as often as it takes, and come back soon.
    #[must_use]
    pub fn mortal(self, places: &FailpointDirectory) -> Self {
        let directory = places.directory().display().to_string();
        self.restless().set("FAILPOINTS", &directory)
    }

    /// Starts it with a state directory of its own.
    #[must_use]
    pub fn start(&self) -> Deployment {
        self.start_in(Arc::new(StateDirectory::new()))
    }

    /// Starts it with the state that is in `place`.
    #[must_use]
    pub fn start_in(&self, place: Arc<StateDirectory>) -> Deployment {
        Deployment::spawn(self.command(&place), place, self.served())
    }

    /// The model that it serves.
    fn served(&self) -> PathBuf {
        self.model.clone().unwrap_or_else(fixtures::model)
    }

    /// The command line, for those who want to see it fail.
    #[must_use]
    pub fn command(&self, place: &StateDirectory) -> Command {
        let program = program("holobiont");
        let mut up = match &self.namespace {
            Some(namespace) => namespace.command(&program),
            None => Command::new(program),
        };
        let listen = self.listen.map_or("127.0.0.1:0".to_owned(), |address| address.to_string());
        // Settings of whoever runs the tests must not reach what is tested.
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
        up.args(["--listen", &listen, "--log-format", "human", "--model"])
            .arg(self.served())
            .arg("--state")
            .arg(place.state())
            .args(["--workers", &self.workers.to_string()])
            .args(cores::options(self.cores, self.workers))
            .args(&self.arguments)
            .env("HOLOBIONT_HOME", place.home())
            .env("HOLOBIONT_SERVED_MODEL_NAME", BASE)
            .env("HOLOBIONT_ADAPTER_ROOT", place.adapters())
            .envs(self.settings.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null());
        up
    }
}
