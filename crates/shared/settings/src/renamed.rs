//! Names of older versions: each is still read, and a warning names the new one.

use std::{collections::BTreeMap, ffi::OsString, fmt};

use crate::{OldName, Setting, all, draft::OLD_EARLY_EXIT};

/// Old name that was used, and the name that replaces it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Renamed {
    /// Old name, as it was written.
    pub old: String,
    /// Current name of the setting.
    pub new: String,
}

impl fmt::Display for Renamed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is called `{}` now; the old name is still read", self.old, self.new)
    }
}

impl Setting {
    /// Returns the old name of this setting, if it is `section` and `field`.
    #[must_use]
    pub fn old_field(&self, section: &str, field: &str) -> Option<OldName> {
        self.old.filter(|old| old.section == section && old.field == field)
    }
}

/// Returns the setting that an older version called `field` in `section`.
#[must_use]
pub fn setting_of(section: &str, field: &str) -> Option<&'static Setting> {
    all().find(|setting| setting.old_field(section, field).is_some())
}

/// Returns the current word for `value`, if an older version wrote this value differently.
#[must_use]
pub fn word(setting: &Setting, value: &str) -> Option<&'static str> {
    (setting.flag == "draft" && value == OLD_EARLY_EXIT).then_some("early-exit")
}

/// Returns the old names among the flags and environment variables of this process.
#[must_use]
pub fn in_use() -> Vec<Renamed> {
    let text = |text: OsString| text.into_string().ok();
    let variables =
        std::env::vars_os().filter_map(|(name, value)| Some((text(name)?, text(value)?))).collect();
    of(&std::env::args_os().filter_map(text).collect::<Vec<_>>(), &variables)
}

fn of(arguments: &[String], variables: &BTreeMap<String, String>) -> Vec<Renamed> {
    all()
        .flat_map(|setting| {
            let flag = setting.old_flag().map(|old| (format!("--{old}"), format!("--{}", setting.flag)));
            let flag = flag.filter(|(old, _)| arguments.iter().any(|argument| is_flag(argument, old)));
            let variable = setting.old_variable().filter(|old| variables.contains_key(old));
            let variable = variable.map(|old| (old, setting.variable()));
            flag.into_iter()
                .chain(variable)
                .map(|(old, new)| Renamed { old, new })
                .chain(words(setting, arguments, variables))
        })
        .collect()
}

/// Returns the old word among the setting's values, if there is one.
fn words(setting: &Setting, arguments: &[String], variables: &BTreeMap<String, String>) -> Option<Renamed> {
    let flag = format!("--{}", setting.flag);
    let mut words = arguments.windows(2).filter(|pair| pair[0] == flag).map(|pair| pair[1].as_str());
    let joined = arguments.iter().filter_map(|argument| argument.strip_prefix(&flag)?.strip_prefix('='));
    let value =
        words.by_ref().chain(joined).chain(variables.get(&setting.variable()).map(String::as_str)).last()?;
    let new = word(setting, value)?;
    Some(Renamed { old: format!("{flag} {value}"), new: format!("{flag} {new}") })
}

fn is_flag(argument: &str, flag: &str) -> bool {
    argument.strip_prefix(flag).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_and_variables_of_older_versions_are_told_with_their_new_names() {
        let arguments = ["--flood-share=1", "--silence-ms", "7", "--draft", "self", "--codel-target-ms", "1"];
        let variables = BTreeMap::from([("HOLOBIONT_WEIGHT_BYTES".to_owned(), "1".to_owned())]);
        let told: Vec<_> = of(&arguments.map(str::to_owned), &variables)
            .into_iter()
            .map(|renamed| (renamed.old, renamed.new))
            .collect();
        let expected = [
            ("HOLOBIONT_WEIGHT_BYTES", "HOLOBIONT_RESIDENT_WEIGHT_BYTES"),
            ("--draft self", "--draft early-exit"),
            ("--flood-share", "--burst-share"),
            ("--silence-ms", "--executor-timeout-ms"),
        ];
        assert_eq!(told, expected.map(|(old, new)| (old.to_owned(), new.to_owned())));
    }

    #[test]
    fn an_old_name_is_no_name_of_another_setting() {
        for old in all().filter_map(|setting| setting.old) {
            let has_name = |setting: &Setting| setting.section == old.section && setting.field == old.field;
            assert!(!all().any(has_name), "{old:?}");
        }
    }
}
