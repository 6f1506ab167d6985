//! A deployment: the file that describes it, who computes where, where its things lie, and the one that runs.

pub(crate) mod config;
pub(crate) mod cores;
pub(crate) mod machine;
pub(crate) mod paths;
pub(crate) mod program_paths;
pub(crate) mod registry;
pub(crate) mod running;
pub(crate) mod selection;
