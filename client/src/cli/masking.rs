//! From arguments to what the executor sees.

use shmproto::layer::Path;

use super::exit::CliError;
use crate::masking::{Masking, PaperSettings};

/// What the executor sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
enum MaskingMode {
    /// Activations as they are
    #[default]
    Off,
    /// Obfuscated by rotating noises; no secrecy
    Paper,
}

/// How activations, and gradients, are protected.
#[derive(Debug, clap::Args)]
pub struct NoiseArguments {
    /// What the executor sees: off (activations), or paper (obfuscated activations)
    #[arg(long, value_name = "MODE", default_value = "off")]
    masking: MaskingMode,
    // Defaults are written out: what was said is told from what was not.
    #[arg(long, value_name = "N", help = format!("Noises of a site, of --masking paper [default: {}]", PaperSettings::default().noises))]
    noises: Option<usize>,
    #[arg(long, value_name = "X", help = format!("Size of the noise, in sizes of the activations [default: {}]", PaperSettings::default().scale))]
    noise_scale: Option<f32>,
    #[arg(long, value_name = "N", help = format!("Rows after which a site gets fresh noises [default: {}]", PaperSettings::default().rotate_rows))]
    noise_rows: Option<u64>,
}

impl NoiseArguments {
    /// The noises that are asked for, if any are.
    ///
    /// # Errors
    /// What was said has no meaning in this mode: it is not ignored where it would have protected.
    pub fn noises(&self) -> Result<Option<PaperSettings>, CliError> {
        let of_noises = [
            ("--noises", self.noises.is_some()),
            ("--noise-scale", self.noise_scale.is_some()),
            ("--noise-rows", self.noise_rows.is_some()),
        ];
        let said = of_noises.iter().find(|(_, is_said)| *is_said);
        match (self.masking, said) {
            (MaskingMode::Off, Some((flag, _))) => {
                Err(CliError::Usage(format!("{flag} is nothing without --masking paper")))
            }
            (MaskingMode::Off, None) => Ok(None),
            (MaskingMode::Paper, _) => {
                let usual = PaperSettings::default();
                Ok(Some(PaperSettings {
                    noises: self.noises.unwrap_or(usual.noises),
                    scale: self.noise_scale.unwrap_or(usual.scale),
                    rotate_rows: self.noise_rows.unwrap_or(usual.rotate_rows),
                }))
            }
        }
    }
}

/// The same, and with which arithmetic.
#[derive(Debug, clap::Args)]
pub(super) struct MaskingArguments {
    #[command(flatten)]
    noise: NoiseArguments,
    /// Arithmetic without masking: fast (as the executor's own requests) or linear (activations unrounded) [default: fast]
    #[arg(long, value_name = "PATH")]
    path: Option<SitePath>,
}

/// With which arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum SitePath {
    Fast,
    Linear,
}

impl MaskingArguments {
    /// The masking that is asked for.
    ///
    /// # Errors
    /// What was said has no meaning in this mode.
    pub(super) fn masking(&self) -> Result<Masking, CliError> {
        match (self.noise.noises()?, self.path) {
            (None, path) => Ok(Masking::Off {
                path: match path.unwrap_or(SitePath::Fast) {
                    SitePath::Fast => Path::Fast,
                    SitePath::Linear => Path::Linear,
                },
            }),
            (Some(_), Some(_)) => Err(CliError::Usage(
                "--path is for --masking off: with noises there is one arithmetic".to_owned(),
            )),
            (Some(noises), None) => Ok(Masking::Paper(noises)),
        }
    }
}
