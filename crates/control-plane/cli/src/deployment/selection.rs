//! Selects the deployment of a command: the named one, else the only one that runs.

use std::path::{Path, PathBuf};

use super::{
    config::{DeploymentConfig, DeploymentConfigError},
    registry::{RunningDeployment, running},
};
use crate::{
    exit::{Exit, Explain},
    home::HomeDirectory,
};

/// Address of the gateway if no deployment runs.
const DEFAULT_URL: &str = "http://127.0.0.1:8080";

/// Reason why no deployment is selected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SelectionError {
    #[error(transparent)]
    Config(#[from] DeploymentConfigError),
    /// No running deployment has this name.
    #[error("no running deployment is called {name}; {}", listed(running))]
    Unknown { name: String, running: Vec<RunningDeployment> },
    /// Several running deployments match.
    #[error("several deployments run; {}", listed(.0))]
    Several(Vec<RunningDeployment>),
    /// The selected deployment does not take requests yet.
    #[error("the deployment {0} is still starting and takes no requests yet")]
    NotServing(String),
}

fn listed(running: &[RunningDeployment]) -> String {
    let one = |entry: &RunningDeployment| format!("{} ({})", entry.name(), entry.state.display());
    match running {
        [] => "no deployment runs".to_owned(),
        _ => format!("running deployments: {}", running.iter().map(one).collect::<Vec<_>>().join(", ")),
    }
}

impl Explain for SelectionError {
    fn exit(&self) -> Exit {
        match self {
            Self::Config(error) => error.exit(),
            Self::Unknown { .. } => Exit::NotFound,
            Self::Several(_) => Exit::Usage,
            Self::NotServing(_) => Exit::Unavailable,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Config(error) => error.next(),
            Self::Unknown { .. } | Self::Several(_) => {
                Some("choose one with --deployment NAME or --deployment PATH".into())
            }
            Self::NotServing(name) => Some(format!("holobiont logs --deployment {name}")),
        }
    }
}

/// Argument that selects one of the running deployments.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct DeploymentArgument {
    /// Running deployment: name or path of its state directory [default: the only running one]
    #[arg(long, global = true, value_name = "NAME|PATH")]
    deployment: Option<String>,
}

impl DeploymentArgument {
    /// Returns the named deployment, else the one in the default state directory, else the only one. `None`
    /// if none runs.
    fn entry(&self, home: &HomeDirectory) -> Result<Option<RunningDeployment>, SelectionError> {
        let mut running = running(home);
        let Some(name) = &self.deployment else {
            let default = running.iter().position(|entry| is_same(&entry.state, &home.state()));
            return match (running.len(), default) {
                (_, Some(default)) => Ok(Some(running.swap_remove(default))),
                (0 | 1, None) => Ok(running.pop()),
                (_, None) => Err(SelectionError::Several(running)),
            };
        };
        let is_meant =
            |entry: &RunningDeployment| entry.name() == *name || is_same(&entry.state, Path::new(name));
        let mut meant: Vec<RunningDeployment> =
            running.iter().filter(|entry| is_meant(entry)).cloned().collect();
        match meant.len() {
            0 => Err(SelectionError::Unknown { name: name.clone(), running }),
            1 => Ok(meant.pop()),
            _ => Err(SelectionError::Several(meant)),
        }
    }

    /// Returns the deployment's state directory; the default one if none runs.
    pub(crate) fn state(&self) -> Result<PathBuf, SelectionError> {
        if self.deployment.is_none()
            && let Some(state) =
                DeploymentConfig::layered(DeploymentConfig::default(), None)?.deployment.state
        {
            return Ok(state);
        }
        let home = HomeDirectory::from_environment();
        Ok(self.entry(&home)?.map_or_else(|| home.state(), |entry| entry.state))
    }
}

fn is_same(one: &Path, other: &Path) -> bool {
    matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

/// Arguments that select a deployment by state directory, file or name.
#[derive(Debug, clap::Args)]
pub(crate) struct StateArguments {
    #[command(flatten)]
    deployment: DeploymentArgument,
    /// Deployment file that names the state directory
    #[arg(long, value_name = "FILE", conflicts_with = "deployment")]
    config: Option<PathBuf>,
    /// State directory of the deployment [default: that of --deployment]
    #[arg(long, value_name = "DIR", conflicts_with = "deployment")]
    state: Option<PathBuf>,
}

impl StateArguments {
    /// Returns the state directory from these arguments, the environment or the file, else that of the
    /// running deployment.
    pub(crate) fn directory(&self) -> Result<PathBuf, SelectionError> {
        if let Some(state) = &self.state {
            return Ok(state.clone());
        }
        let Some(file) = &self.config else { return self.deployment.state() };
        let config = DeploymentConfig::layered(DeploymentConfig::default(), Some(file))?;
        Ok(config.deployment.state.unwrap_or_else(|| HomeDirectory::from_environment().state()))
    }
}

/// Arguments that select a gateway.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct GatewayArguments {
    /// Address of the gateway [default: HOLOBIONT_URL, else the deployment's]
    #[arg(long, global = true, value_name = "URL", conflicts_with = "deployment")]
    url: Option<String>,
    #[command(flatten)]
    deployment: DeploymentArgument,
}

impl GatewayArguments {
    /// Returns the gateway's address.
    pub(crate) fn url(&self) -> Result<String, SelectionError> {
        if let Some(url) = &self.url {
            return Ok(url.clone());
        }
        let is_named = self.deployment.deployment.is_some();
        let variable = std::env::var("HOLOBIONT_URL").ok().filter(|url| !is_named && !url.is_empty());
        if let Some(url) = variable {
            return Ok(url);
        }
        match self.deployment.entry(&HomeDirectory::from_environment())? {
            Some(RunningDeployment { url: Some(url), .. }) => Ok(url),
            Some(entry) if is_named => Err(SelectionError::NotServing(entry.name())),
            _ => Ok(DEFAULT_URL.to_owned()),
        }
    }

    /// Returns the state directory of the deployment on this host.
    pub(crate) fn state(&self) -> Result<PathBuf, SelectionError> {
        self.deployment.state()
    }
}
