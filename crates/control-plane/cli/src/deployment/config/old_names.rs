//! Replaces names of older versions in a deployment file.

use settings::{
    Setting, all,
    renamed::{Renamed, setting_of, word},
};
use toml::{Table, Value};

/// Returns the deployment file `text` with current names, and the list of replaced names. `None` if there are
/// none, or if `text` is not TOML.
pub(super) fn replaced(text: &str) -> Option<(Table, Vec<Renamed>)> {
    let mut table: Table = text.parse().ok()?;
    let mut renamed = Vec::new();
    replace_in(&mut table, &mut renamed);
    if let Some(Value::Array(entries)) = table.get_mut("executor") {
        entries
            .iter_mut()
            .filter_map(Value::as_table_mut)
            .for_each(|entry| replace_in_entry(entry, &mut renamed));
    }
    (!renamed.is_empty()).then_some((table, renamed))
}

/// Replaces older names in the sections of `table`. A value under the current name takes precedence.
fn replace_in(table: &mut Table, renamed: &mut Vec<Renamed>) {
    for (section, field) in fields(table) {
        let Some(Value::Table(from)) = table.get_mut(&section) else { continue };
        if let Some(setting) = setting_of(&section, &field) {
            let Some(value) = from.remove(&field) else { continue };
            let into = table.entry(setting.section).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(into) = into {
                into.entry(setting.field).or_insert(value);
            }
            let new = format!("[{}] {}", setting.section, setting.field);
            renamed.push(Renamed { old: format!("[{section}] {field}"), new });
        } else if let Some(value) = from.get_mut(&field)
            && let Some(new) = all()
                .find(|setting| is_at(setting, &section, &field))
                .and_then(|setting| word(setting, value.as_str()?))
        {
            renamed.push(Renamed { old: format!("{field} = {value}"), new: format!("{field} = \"{new}\"") });
            *value = new.into();
        }
    }
}

/// Replaces older names in one `[[executor]]` entry, whose own fields are those of `[executor]`.
fn replace_in_entry(entry: &mut Table, renamed: &mut Vec<Renamed>) {
    let own = |field: &String| setting_of("executor", field).is_some();
    let fields: Vec<String> = entry.keys().filter(|field| own(field)).cloned().collect();
    let moved = fields.into_iter().filter_map(|field| entry.remove(&field).map(|value| (field, value)));
    let moved: Table = moved.collect();
    let mut sections = Table::from_iter([("executor".to_owned(), Value::Table(moved))]);
    sections.extend(["memory", "workers", "lab"].into_iter().filter_map(|name| entry.remove_entry(name)));
    replace_in(&mut sections, renamed);
    sections.remove("executor");
    entry.extend(sections);
}

/// Returns all pairs of section and field.
fn fields(table: &Table) -> Vec<(String, String)> {
    let sections = table.iter().filter_map(|(name, section)| Some((name, section.as_table()?)));
    sections.flat_map(|(name, section)| section.keys().map(|field| (name.clone(), field.clone()))).collect()
}

fn is_at(setting: &Setting, section: &str, field: &str) -> bool {
    setting.section == section && setting.field == field
}

#[cfg(test)]
mod tests {
    use settings::CachePolicy;

    use super::super::DeploymentConfig;

    #[test]
    fn every_older_name_is_read_and_named_with_the_one_of_today() {
        for setting in settings::all() {
            let Some(old) = setting.old else { continue };
            let preset = match setting.preset {
                settings::Preset::Is(value) => value,
                _ => "1",
            };
            let text = format!("[{}]\n{} = \"{preset}\"", old.section, old.field);
            let config = DeploymentConfig::parse(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
            let set: Vec<_> = config.set().map(|(setting, _)| setting).collect();
            assert_eq!(set, [setting], "{text}");
            let new = format!("[{}] {}", setting.section, setting.field);
            assert_eq!(config.renamed.iter().map(|renamed| &renamed.new).collect::<Vec<_>>(), [&new]);
        }
    }

    #[test]
    fn names_of_today_win_over_older_ones_and_entries_have_older_names_too() {
        let config =
            DeploymentConfig::parse("[memory]\npolicy = \"lru\"\n[lab]\ncache_policy = \"rrip\"").unwrap();
        assert_eq!(config.lab.cache_policy, Some(CachePolicy::Rrip));
        let entries = "[[executor]]\nname = \"a\"\ncold_start = \"cached\"\nmemory.tau_ms = 7";
        let config = DeploymentConfig::parse(entries).unwrap();
        let member = &config.members()[0].config;
        assert_eq!(
            (member.lab.cold_start, member.memory.decay_ms),
            (Some(settings::ColdStart::Cached), Some(7))
        );
        assert_eq!(config.renamed.len(), 2, "{:?}", config.renamed);
        let config = DeploymentConfig::parse("[speculation]\ndraft = \"self\"").unwrap();
        assert_eq!(config.renamed[0].new, "draft = \"early-exit\"");
    }

    #[test]
    fn a_file_of_today_keeps_the_lines_of_its_errors() {
        let error = DeploymentConfig::parse("[gateway]\nlisten = \"127.0.0.1:1\"\nthreadz = 1").unwrap_err();
        assert!(error.to_string().contains("line 3"), "{error}");
    }
}
