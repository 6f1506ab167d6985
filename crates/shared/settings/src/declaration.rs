//! Type of a setting's declaration, and the macro `sections!` that declares sections.

use std::{
    ffi::OsString,
    net::SocketAddr,
    num::{NonZeroU32, NonZeroU64},
    path::PathBuf,
};

/// Value of a setting that is not set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preset {
    /// Fixed value, written as on a command line.
    Is(&'static str),
    /// Value that depends on other settings or the machine, as these words explain.
    Depends(&'static str),
    /// No value at all.
    None,
}

/// Process to which `holobiont up` passes a setting unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessKind {
    /// Process `base-executor`, which owns the weights.
    Executor,
    /// Process `gateway`, which serves HTTP.
    Gateway,
    /// `endpoint-picker`, which no deployment starts.
    Picker,
    /// No process: `holobiont up` uses the setting itself or derives other settings from it.
    Up,
}

/// Declaration of one setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// The section of a deployment file, without its brackets.
    pub section: &'static str,
    /// Name of the field in its section.
    pub field: &'static str,
    /// Name of the flag, without dashes.
    pub flag: &'static str,
    /// Placeholder for the value in a help text.
    pub value: &'static str,
    /// Value if the setting is not set.
    pub preset: Preset,
    /// Help text: one line without a full stop.
    pub help: &'static str,
    /// Process that takes the setting.
    pub process: ProcessKind,
    /// Name in an older version, which is still read.
    pub old: Option<OldName>,
}

/// Name of a setting in an older version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OldName {
    /// The section of a deployment file, without its brackets.
    pub section: &'static str,
    /// Name of the field in that section.
    pub field: &'static str,
    /// Name of the flag, without dashes.
    pub flag: &'static str,
}

impl Setting {
    /// Returns the name of the environment variable.
    #[must_use]
    pub fn variable(&self) -> String {
        variable(self.flag)
    }

    /// Returns the older environment variable, if the flag was renamed.
    #[must_use]
    pub fn old_variable(&self) -> Option<String> {
        self.old_flag().map(variable)
    }

    /// Returns the older flag, if the flag was renamed.
    #[must_use]
    pub fn old_flag(&self) -> Option<&'static str> {
        self.old.map(|old| old.flag).filter(|flag| *flag != self.flag)
    }

    /// True if the setting serves experiments only. Such settings belong to `[lab]` and are hidden in help
    /// texts.
    #[must_use]
    pub fn is_lab(&self) -> bool {
        self.section == "lab"
    }

    /// True if the flag may be given without a value.
    #[must_use]
    pub fn is_switch(&self) -> bool {
        matches!(self.preset, Preset::Is("true" | "false"))
    }
}

fn variable(flag: &str) -> String {
    format!("HOLOBIONT_{}", flag.replace('-', "_").to_ascii_uppercase())
}

/// Value of a setting that can be written on a command line.
pub trait Value {
    /// Returns text that parses to the same value.
    fn text(&self) -> OsString;
}

impl Value for PathBuf {
    fn text(&self) -> OsString {
        self.clone().into_os_string()
    }
}

/// Implements [`Value`] for types whose `Display` output parses to the same value.
macro_rules! shown_as_read {
    ($($type:ty),*) => { $(
        impl $crate::Value for $type {
            fn text(&self) -> ::std::ffi::OsString {
                self.to_string().into()
            }
        }
    )* };
}
pub(crate) use shown_as_read;

shown_as_read!(String, bool, u32, u64, SocketAddr, NonZeroU32, NonZeroU64);

/// Expands to the old name of a setting, or to `None`.
macro_rules! old_name {
    () => {
        None
    };
    ($section:literal $field:literal $flag:literal) => {
        Some($crate::OldName { section: $section, field: $field, flag: $flag })
    };
}
pub(crate) use old_name;

/// Declares sections: their types, whose fields are all optional, and a [`Setting`] for each field.
macro_rules! sections {
    ($( $(#[doc = $about:literal])* $section:ident = $name:literal { $(
        $(#[doc = $help:literal])+
        $field:ident: $type:ty, --$flag:literal $value:literal, $preset:expr, $process:ident
            $(, was [$old_section:literal] $old_field:literal --$old_flag:literal)?;
    )* } )*) => {
        /// All settings, grouped by section.
        pub static SECTIONS: &[&[Setting]] = &[$( $section::SETTINGS ),*];

        $(
        $(#[doc = $about])*
        #[derive(Debug, Clone, Default, PartialEq, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $section {
            $( $(#[doc = $help])* #[serde(deserialize_with = "crate::file::setting")] pub $field: Option<$type>, )*
        }

        impl $section {
            /// Declarations of the section's fields.
            pub const SETTINGS: &[Setting] = &[$( Setting {
                section: $name,
                field: stringify!($field),
                flag: $flag,
                value: $value,
                preset: $preset,
                help: concat!($($help),+).trim_ascii(),
                process: ProcessKind::$process,
                old: $crate::declaration::old_name!($($old_section $old_field $old_flag)?),
            } ),*];

            /// Returns the fields set here, and takes the others from `lower`.
            #[must_use]
            pub fn or(self, lower: Self) -> Self {
                Self { $( $field: self.$field.or(lower.$field), )* }
            }

            /// Returns the section with its fixed presets, [`Preset::Is`].
            #[must_use]
            pub fn presets() -> Self {
                let mut settings = Self::SETTINGS.iter().map(|setting| match setting.preset {
                    Preset::Is(value) => Some(value),
                    Preset::Depends(_) | Preset::None => None,
                });
                Self { $( $field: settings.next().flatten().and_then(|value| value.parse().ok()), )* }
            }

            /// Returns the fields that are set, each with its declaration and its value as text.
            pub fn set(&self) -> impl Iterator<Item = (&'static Setting, OsString)> {
                let values = [$( self.$field.as_ref().map(Value::text) ),*];
                Self::SETTINGS.iter().zip(values).filter_map(|(setting, value)| Some((setting, value?)))
            }
        } )*
    };
}
pub(crate) use sections;
