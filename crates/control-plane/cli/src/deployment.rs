//! Deployments: configuration file, cores, paths, and the registry of running deployments.

pub(crate) mod config;
pub(crate) mod cores;
pub(crate) mod machine;
pub(crate) mod paths;
pub(crate) mod program_paths;
pub(crate) mod registry;
pub(crate) mod running;
pub(crate) mod selection;
