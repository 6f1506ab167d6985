//! Parser of `[executor]`, or of several `[[executor]]`: processes that own weights. Each has its own cores
//! or device, or runs on another host.

use std::{fmt, ops::Deref, path::PathBuf};

use security::address::{HostPort, NotHostPort};
use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer},
};
use settings::{
    ExecutorSection, LabSection, MAX_PROCESS_NAME_BYTES, MemorySection, WorkersSection, is_process_name,
};

/// Maximum number of executors of a deployment.
pub(crate) const MAX_EXECUTORS: usize = 16;

/// Settings of all executors; dereferences to the common settings.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Executors {
    /// Values of `[executor]`, flags and variables.
    pub(crate) common: ExecutorSection,
    /// Entries `[[executor]]`; empty for a single executor without a name.
    pub(crate) each: Vec<ExecutorEntry>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ExecutorEntry {
    /// Unique name of the executor.
    pub(crate) name: String,
    /// Address of an executor on another host, which this deployment drives but does not start.
    pub(crate) address: Option<HostPort>,
    /// Fields of `[executor]`, over which flags and variables take precedence.
    pub(crate) executor: ExecutorSection,
    /// Fields of `[memory]` that override the common section.
    pub(crate) memory: MemorySection,
    /// Fields of `[workers]` that override the common section.
    pub(crate) workers: WorkersSection,
    /// Fields of `[lab]` that override the common section.
    pub(crate) lab: LabSection,
}

impl Executors {
    /// Keeps the values set here and takes the others from `lower`.
    pub(crate) fn or(self, lower: Self) -> Self {
        let each = if self.each.is_empty() { lower.each } else { self.each };
        Self { common: self.common.or(lower.common), each }
    }

    /// Returns the paths that may be relative to the deployment file.
    pub(crate) fn paths(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        self.each.iter_mut().filter_map(|entry| entry.memory.directory.as_mut())
    }
}

impl Deref for Executors {
    type Target = ExecutorSection;

    fn deref(&self) -> &ExecutorSection {
        &self.common
    }
}

impl<'de> Deserialize<'de> for Executors {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ExecutorsVisitor;

        impl<'de> Visitor<'de> for ExecutorsVisitor {
            type Value = Executors;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("[executor] or several [[executor]]")
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Executors, M::Error> {
                let common = ExecutorSection::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Executors { common, each: Vec::new() })
            }

            fn visit_seq<S: SeqAccess<'de>>(self, mut entries: S) -> Result<Executors, S::Error> {
                let mut each: Vec<ExecutorEntry> = Vec::new();
                while let Some(entry) = entries.next_element::<ExecutorEntry>()? {
                    if each.iter().any(|other| other.name == entry.name) {
                        let name = entry.name;
                        return Err(de::Error::custom(format!("two executors are called `{name}`")));
                    }
                    if let Some(address) = &entry.address
                        && each.iter().any(|other| other.address.as_ref() == Some(address))
                    {
                        return Err(de::Error::custom(format!("two executors are at `{address}`")));
                    }
                    if each.len() == MAX_EXECUTORS {
                        return Err(de::Error::custom(format!(
                            "the file has more than {MAX_EXECUTORS} executors"
                        )));
                    }
                    each.push(entry);
                }
                Ok(Executors { common: ExecutorSection::default(), each })
            }
        }

        deserializer.deserialize_any(ExecutorsVisitor)
    }
}

impl<'de> Deserialize<'de> for ExecutorEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut table = toml::Table::deserialize(deserializer)?;
        let name = table.remove("name").and_then(|name| Some(name.as_str()?.to_owned())).unwrap_or_default();
        if !is_process_name(&name) {
            return Err(de::Error::custom(format!(
                "an [[executor]] needs a `name` of at most {MAX_PROCESS_NAME_BYTES} lower-case letters, \
                 digits and '-', not `{name}`"
            )));
        }
        let of =
            |error: toml::de::Error| de::Error::custom(format!("the executor `{name}`: {}", error.message()));
        if let Some(address) = table.remove("address") {
            let address = elsewhere(&address, &table)
                .map_err(|why| de::Error::custom(format!("the executor `{name}`: {why}")))?;
            return Ok(Self { name, address: Some(address), ..Self::default() });
        }
        let memory = section(&mut table, "memory").map_err(of)?;
        let workers = section(&mut table, "workers").map_err(of)?;
        let lab = section(&mut table, "lab").map_err(of)?;
        let executor = ExecutorSection::deserialize(table).map_err(of)?;
        Ok(Self { name, address: None, executor, memory, workers, lab })
    }
}

/// Parses the address of an executor on another host. Other fields are refused, because that host sets them.
fn elsewhere(address: &toml::Value, rest: &toml::Table) -> Result<HostPort, String> {
    if let Some(field) = rest.keys().next() {
        return Err(format!("`{field}` cannot be set beside `address`; set it on the host of this executor"));
    }
    let address = address.as_str().ok_or("`address` must be a string, as \"gpu.example.org:7443\"")?;
    address.parse().map_err(|error: NotHostPort| error.to_string())
}

pub(super) fn section<T: Default + for<'a> Deserialize<'a>>(
    table: &mut toml::Table,
    name: &str,
) -> Result<T, toml::de::Error> {
    table.remove(name).map_or_else(|| Ok(T::default()), toml::Value::try_into)
}
