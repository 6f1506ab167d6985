//! Turns declarations into the flags of each process and of `holobiont up`.

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

use crate::{PICKER, Preset, ProcessKind, Setting, all};

/// Sets the variable, default and help of a process's flag from its declaration. Flags without a declaration
/// are unchanged.
///
/// Usage: `#[command(mut_args(settings::described))]`.
#[must_use]
pub fn described(arg: Arg) -> Arg {
    let mut known = all().chain(PICKER);
    let Some(setting) = known.find(|setting| Some(setting.flag) == arg.get_long()) else { return arg };
    let arg = arg.env(variable_in_use(setting)).help(setting.help).long_help(None::<&str>);
    let arg = arg.hide(setting.is_lab()).aliases(setting.old_flag());
    match setting.preset {
        Preset::Is(_) if setting.is_switch() => arg,
        Preset::Is(value) => arg.required(false).default_value(value),
        Preset::Depends(words) if setting.process != ProcessKind::Up => {
            arg.help(format!("{} [default: {words}]", setting.help))
        }
        Preset::Depends(_) | Preset::None => arg,
    }
}

/// Returns the setting's variable, or its older name if only that one is set.
fn variable_in_use(setting: &Setting) -> String {
    let (new, old) = (setting.variable(), setting.old_variable());
    old.filter(|old| std::env::var_os(old).is_some() && std::env::var_os(&new).is_none()).unwrap_or(new)
}

/// Every setting as a flag of `holobiont up`. Values are parsed later, together with those of the file.
#[derive(Debug, Clone, Default)]
pub struct SettingFlags(Vec<(&'static Setting, String)>);

impl SettingFlags {
    /// Returns the settings that were given on the command line, with their values as text.
    pub fn given(&self) -> impl Iterator<Item = (&'static Setting, &str)> {
        self.0.iter().map(|(setting, value)| (*setting, value.as_str()))
    }
}

impl FromArgMatches for SettingFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let value = |setting: &Setting| matches.get_one::<String>(setting.flag).cloned();
        Ok(Self(all().filter_map(|setting| Some((setting, value(setting)?))).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for SettingFlags {
    fn augment_args(command: Command) -> Command {
        command.args(all().map(flag))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn flag(setting: &'static Setting) -> Arg {
    let help = match setting.preset {
        Preset::Is(value) => format!("{} [default: {value}]", setting.help),
        Preset::Depends(words) => format!("{} [default: {words}]", setting.help),
        Preset::None => setting.help.to_owned(),
    };
    let arg = Arg::new(setting.flag)
        .long(setting.flag)
        .value_name(setting.value)
        .help(help)
        .help_heading(format!("Settings of [{}]", setting.section))
        .hide(setting.is_lab())
        .aliases(setting.old_flag());
    match setting.is_switch() {
        true => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
        false => arg,
    }
}
