//! What a declaration says, and the macro that declares.

use std::{
    ffi::OsString,
    net::SocketAddr,
    num::{NonZeroU32, NonZeroU64},
    path::PathBuf,
};

/// What holds if nobody sets a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preset {
    /// This value, written as somebody would set it.
    Is(&'static str),
    /// It depends, as these words say.
    Depends(&'static str),
    /// Nothing.
    None,
}

/// The process that a setting is handed on to as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessKind {
    /// `base-executor`.
    Executor,
    /// `gateway`.
    Gateway,
    /// `endpoint-picker`, which no deployment starts.
    Picker,
    /// None: `holobiont up` uses it itself, or makes something else of it.
    Up,
}

/// A declaration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// The section of a deployment file, without its brackets.
    pub section: &'static str,
    /// Its field there.
    pub field: &'static str,
    /// Its flag, without dashes.
    pub flag: &'static str,
    /// What stands for its value in a help text.
    pub value: &'static str,
    /// What holds if nobody sets it.
    pub preset: Preset,
    /// What it is for: a line, without a full stop.
    pub help: &'static str,
    /// Who is told.
    pub process: ProcessKind,
    /// The name that it had before, which is still read.
    pub old: Option<OldName>,
}

/// A name that a setting had in an older version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OldName {
    /// The section of a deployment file, without its brackets.
    pub section: &'static str,
    /// Its field there.
    pub field: &'static str,
    /// Its flag, without dashes.
    pub flag: &'static str,
}

impl Setting {
    /// Its environment variable.
    #[must_use]
    pub fn variable(&self) -> String {
        variable(self.flag)
    }

    /// The environment variable that it had before, if its flag was renamed.
    #[must_use]
    pub fn old_variable(&self) -> Option<String> {
        self.old_flag().map(variable)
    }

    /// The flag that it had before, if its flag was renamed.
    #[must_use]
    pub fn old_flag(&self) -> Option<&'static str> {
        self.old.map(|old| old.flag).filter(|flag| *flag != self.flag)
    }

    /// True if it serves experiments alone: such settings stand in `[lab]` and in no help text.
    #[must_use]
    pub fn is_lab(&self) -> bool {
        self.section == "lab"
    }

    /// True if its flag may stand without a value.
    #[must_use]
    pub fn is_switch(&self) -> bool {
        matches!(self.preset, Preset::Is("true" | "false"))
    }
}

fn variable(flag: &str) -> String {
    format!("HOLOBIONT_{}", flag.replace('-', "_").to_ascii_uppercase())
}

/// A value, as it is written on a command line.
pub trait Value {
    /// Text that reads as the same value.
    fn text(&self) -> OsString;
}

impl Value for PathBuf {
    fn text(&self) -> OsString {
        self.clone().into_os_string()
    }
}

/// Implements [`Value`] for what is shown as it is read.
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

/// The old name of a setting, or none.
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
        /// Every setting, section by section.
        pub static SECTIONS: &[&[Setting]] = &[$( $section::SETTINGS ),*];

        $(
        $(#[doc = $about])*
        #[derive(Debug, Clone, Default, PartialEq, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $section {
            $( $(#[doc = $help])* #[serde(deserialize_with = "crate::file::setting")] pub $field: Option<$type>, )*
        }

        impl $section {
            /// The declarations of its fields.
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

            /// Keeps what is set here and takes the rest from `lower`.
            #[must_use]
            pub fn or(self, lower: Self) -> Self {
                Self { $( $field: self.$field.or(lower.$field), )* }
            }

            /// What holds if nobody sets it, where that does not depend on anything.
            #[must_use]
            pub fn presets() -> Self {
                let mut settings = Self::SETTINGS.iter().map(|setting| match setting.preset {
                    Preset::Is(value) => Some(value),
                    Preset::Depends(_) | Preset::None => None,
                });
                Self { $( $field: settings.next().flatten().and_then(|value| value.parse().ok()), )* }
            }

            /// What is set, each value with its declaration.
            pub fn set(&self) -> impl Iterator<Item = (&'static Setting, OsString)> {
                let values = [$( self.$field.as_ref().map(Value::text) ),*];
                Self::SETTINGS.iter().zip(values).filter_map(|(setting, value)| Some((setting, value?)))
            }
        } )*
    };
}
pub(crate) use sections;
