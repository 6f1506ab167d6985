//! What all programs have in common towards whoever runs them: every setting of a deployment, declared once, every
//! environment variable, and the exit codes.
//!
//! A declaration says in which section of a deployment file a setting stands, what it is called as a flag, of what type
//! it is, what holds if nobody sets it, what it is for, and to which process `holobiont up` hands it on. Its environment
//! variable is `HOLOBIONT_` and the flag in capitals, for `up` and for every process alike. From the same declaration
//! follow the sections' types, flags and help of `up` and of the processes, and the table in the README.
//!
//! # Layout
//!
//! - [`Setting`], [`Preset`], [`ProcessKind`]: a declaration
//! - [`ModelSection`] and its siblings, [`all`]: the declarations
//! - [`ByteCount`], [`CoreList`], [`DeviceChoice`] ...: what values may be
//! - [`renamed`]: names of older versions, which are still read
//! - [`PICKER`]: those of `endpoint-picker`
//! - `words`: those that are one of a few words; `draft`: or a path
//! - [`ServiceClass`]: what is promised to tenants and adapters
//! - [`variables`]: every other variable there is, and the refusal of all that are none
//! - [`described`], [`SettingFlags`]: declarations as flags
//! - [`completions`]: what shells read of a program's flags
//! - [`exit`]: exit codes, and why a program ended, in one line
//! - [`file`](mod@file): how a field of a deployment file is read
//!
//! # Principles
//!
//! - A leaf: it depends on no other crate of the workspace.
//! - One name: a setting is called alike in every program; a variable that nobody knows is refused, never skipped.

#![forbid(unsafe_code)]

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
mod words;

pub use self::{
    class::{CacheWeight, ClassError, DEFAULT_CLASS, MAX_CLASSES, MAX_WEIGHT, ServiceClass},
    declaration::{OldName, Preset, ProcessKind, Setting, Value},
    draft::DraftChoice,
    flags::{SettingFlags, described},
    picker::PICKER,
    sections::{
        DeploymentSection, ExecutorSection, GatewaySection, LabSection, LayersSection, MemorySection,
        ModelSection, SECTIONS, SpeculationSection, TrainingSection, WorkersSection, all,
    },
    values::{
        ByteCount, CoreList, DeviceChoice, Fraction, Gbps, MAX_CORES, MAX_PROCESS_NAME_BYTES, MAX_WORKERS,
        MemoryFraction, WaitFactor, WorkerCount, is_process_name,
    },
    words::{
        AdapterDtype, Batching, CachePolicy, ColdStart, KvDtype, LogFormat, Precision, ReasoningParser,
        Routing, ToolCallParser,
    },
};
