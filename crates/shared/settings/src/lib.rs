//! Declares once what all programs share at the command line: deployment settings, environment variables and
//! exit codes.
//!
//! A declaration names a setting's section and field in the deployment file, its flag, type, preset and help
//! text. The declaration also names the process to which `holobiont up` passes the setting. The environment
//! variable is `HOLOBIONT_` and the flag in capitals, for `up` and for every process alike. The section
//! types, the flags and help texts of all programs and the tables of docs/reference/configuration.md follow
//! from the declarations.
//!
//! # Layout
//!
//! - [`Setting`], [`Preset`], [`ProcessKind`]: the declaration of one setting
//! - [`ModelSection`] and its siblings, [`all`]: the declarations
//! - [`ByteCount`], [`CoreList`], [`DeviceChoice`] ...: types of values
//! - [`renamed`]: names of older versions, which are still read
//! - [`PICKER`]: settings of `endpoint-picker`
//! - `choices`: values that are one of a few words; `draft`: a word or a path
//! - [`ServiceClass`]: SLO targets, weight and limits of some tenants or adapters
//! - `base`: [`BaseOption`], one of several bases as an option of the gateway
//! - [`variables`]: all other environment variables, and the refusal of unknown ones
//! - [`described`], [`SettingFlags`]: declarations as flags
//! - [`completions`]: shell completion scripts
//! - [`exit`]: exit codes, and an error with its causes in one line
//! - [`file`](mod@file): reader of a field of a deployment file
//!
//! # Principles
//!
//! - Leaf crate: `settings` depends on no other crate of the workspace.
//! - One name: a setting has the same name in every program, and an unknown variable is refused, never
//!   skipped.

#![forbid(unsafe_code)]

mod base;
mod choices;
mod class;
pub mod completions;
mod declaration;
mod draft;
pub mod exit;
pub mod file;
mod flags;
mod picker;
pub mod renamed;
mod sections;
mod values;
pub mod variables;

pub use self::{
    base::{BaseOption, BaseOptionError, MAX_BASES},
    choices::{
        AdapterDtype, BatchingPolicy, CachePolicy, ColdStart, DeviceSplit, KvDtype, LogFormat, Precision,
        ReasoningParser, Routing, ToolCallParser,
    },
    class::{
        BACKGROUND_CLASS, CacheWeight, ClassError, DEFAULT_CLASS, MAX_CLASSES, MAX_WEIGHT, ServiceClass,
    },
    declaration::{OldName, Preset, ProcessKind, Setting, Value},
    draft::DraftChoice,
    flags::{SettingFlags, described},
    picker::PICKER,
    sections::{
        DeploymentSection, ExecutorSection, GatewaySection, LabSection, LayersSection, MemorySection,
        ModelSection, SECTIONS, SpeculationSection, TrainingSection, WorkersSection, all,
    },
    values::{
        ByteCount, CoreList, DeviceChoice, DeviceGroup, Fraction, Gbps, MAX_CORES, MAX_GROUP_DEVICES,
        MAX_PROCESS_NAME_BYTES, MAX_WORKERS, MemoryFraction, WaitFactor, WorkerCount, is_process_name,
    },
};
