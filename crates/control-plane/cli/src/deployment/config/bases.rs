//! Parser of `[[base]]`: several base models of one deployment, each with its own executors.

use serde::{Deserialize, Deserializer, de};
use settings::{ExecutorSection, MAX_BASES, MAX_PROCESS_NAME_BYTES, is_process_name};

use super::{
    DeploymentConfig,
    executors::{Executors, section},
};

/// Fields of `[gateway]` that a base may have.
const OF_GATEWAY: [&str; 4] =
    ["tool_call_parser", "reasoning_parser", "classifier_from_token", "score_template"];
/// Fields of `[model]` that a base may have beside `name`, which is `model` here.
const OF_MODEL: [&str; 4] = ["served_name", "context_length", "resident_weight_bytes", "sleep_after_s"];

/// One base of several.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BaseEntry {
    /// Unique name of the base in administration, and of its processes.
    pub(crate) name: String,
    /// Settings of the base, which override the common sections.
    pub(crate) layer: DeploymentConfig,
}

impl<'de> Deserialize<'de> for BaseEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut table = toml::Table::deserialize(deserializer)?;
        let name = table.remove("name").and_then(|name| Some(name.as_str()?.to_owned())).unwrap_or_default();
        if !is_process_name(&name) {
            return Err(de::Error::custom(format!(
                "a [[base]] needs a `name` of at most {MAX_PROCESS_NAME_BYTES} lower-case letters, digits \
                 and '-', not `{name}`; `served_name` may be any name for requests"
            )));
        }
        Self::of(name.clone(), table)
            .map_err(|error| de::Error::custom(format!("the base `{name}`: {}", error.message())))
    }
}

impl BaseEntry {
    fn of(name: String, mut table: toml::Table) -> Result<Self, toml::de::Error> {
        let mut model = taken(&mut table, &OF_MODEL);
        let path = table.remove("model");
        let path = path.ok_or_else(|| de::Error::custom("`model` is missing; name the base model"))?;
        model.insert("name".to_owned(), path);
        let gateway = taken(&mut table, &OF_GATEWAY);
        let (memory, speculation) = (section(&mut table, "memory")?, section(&mut table, "speculation")?);
        let (workers, lab) = (section(&mut table, "workers")?, section(&mut table, "lab")?);
        let adapters = section(&mut table, "adapters")?;
        let each: Executors = section(&mut table, "executor")?;
        if each.each.iter().any(|executor| executor.address.is_some()) {
            let why = "`address` is not possible in [[base.executor]]; a base has executors of this host";
            return Err(de::Error::custom(why));
        }
        let common = ExecutorSection::deserialize(table)?.or(each.common);
        let layer = DeploymentConfig {
            model: model.try_into()?,
            executor: Executors { common, each: each.each },
            memory,
            speculation,
            workers,
            lab,
            gateway: gateway.try_into()?,
            adapters,
            ..DeploymentConfig::default()
        };
        Ok(Self { name, layer })
    }
}

/// Removes and returns those of `fields` that the table has.
fn taken(table: &mut toml::Table, fields: &[&str]) -> toml::Table {
    fields.iter().filter_map(|field| table.remove_entry(*field)).collect()
}

/// Parses the entries, and refuses names that two bases have.
pub(super) fn bases<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<BaseEntry>, D::Error> {
    let bases: Vec<BaseEntry> = Vec::deserialize(deserializer)?;
    if bases.len() > MAX_BASES {
        return Err(de::Error::custom(format!("the file has more than {MAX_BASES} bases")));
    }
    for (index, base) in bases.iter().enumerate() {
        let served =
            |base: &BaseEntry| base.layer.model.served_name.clone().unwrap_or_else(|| base.name.clone());
        let is_same = |other: &BaseEntry| other.name == base.name || served(other) == served(base);
        if bases[..index].iter().any(is_same) {
            let name = &base.name;
            return Err(de::Error::custom(format!("two bases are called `{name}`, or are served as one")));
        }
    }
    Ok(bases)
}
