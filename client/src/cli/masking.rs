//! From arguments to a masking mode.

use std::{path::PathBuf, sync::Arc};

use shmproto::layer::SitePath;

use super::{
    exit::CliError,
    pads::{self, PadArguments},
    remote_base::RemoteBaseArguments,
    terminal::Terminal,
};
use crate::{
    masking::{
        Exact, Masking, NoiseSettings, RowProtection,
        one_time_pads::{Pads, maker::PadGenerator, pool::PadPool},
        secret_sharing::SecondExecutor,
        verify::Verifier,
    },
    secrets,
};

/// Masking modes of the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum MaskingMode {
    /// Activations are sent as they are
    #[default]
    Off,
    /// Rotating noises obfuscate activations; this is not secrecy
    Paper,
    /// Two executors, which must not collude, each see random numbers
    Shares,
    /// Pads from a disk turn activations into random numbers
    Pads,
}

impl MaskingMode {
    /// Returns the mode's name on the command line.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Paper => "paper",
            Self::Shares => "shares",
            Self::Pads => "pads",
        }
    }
}

/// Options that protect activations and gradients, and check answers.
#[derive(Debug, clap::Args)]
pub struct ProtectionArguments {
    /// Masking mode: off (the executor sees activations), paper (obfuscated ones), shares or pads; see
    /// `privacy`
    #[arg(long, value_name = "MODE", default_value = "off")]
    masking: MaskingMode,
    // Defaults stand in the help text, so that given options are distinguishable from defaults.
    #[arg(long, value_name = "N", help = format!("Number of noises per site, for --masking paper \
                              [default: {}]", NoiseSettings::default().noises))]
    noises: Option<usize>,
    #[arg(long, value_name = "X", help = format!("Scale of the noise relative to the activations \
                              [default: {}]", NoiseSettings::default().scale))]
    noise_scale: Option<f32>,
    #[arg(long, value_name = "N", help = format!("Number of rows after which a site gets new noises \
                              [default: {}]", NoiseSettings::default().rotate_rows))]
    noise_rows: Option<u64>,
    /// Executor that sees the pads, for --masking shares; its operator must not be the first executor's
    #[arg(long, value_name = "ADDR")]
    second_executor: Option<String>,
    /// File with the second executor's API key; else the first executor's key is sent
    #[arg(long, value_name = "FILE", requires = "second_executor")]
    second_api_key_file: Option<PathBuf>,
    #[command(flatten)]
    pads: PadArguments,
    /// Action when a call finds no pads left: refuse, or wait for new ones, with --model [default: refuse]
    #[arg(long, value_name = "WHAT")]
    pads_empty: Option<PadExhaustion>,
    /// Checks every answer against --model, which must equal the executor's model; a wrong answer is an error
    #[arg(long)]
    verify: bool,
    /// Pads calls with zero rows to 1, 2, 4, 8 ... rows to hide the exact number; needs exact arithmetic
    #[arg(long)]
    pad_rows: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum PadExhaustion {
    /// The call fails with an error
    Refuse,
    /// The call waits until this client has made new pads
    Wait,
}

impl ProtectionArguments {
    /// Returns the requested protection; `path` is the arithmetic without masking. For a secret mode this
    /// also keeps the process's memory private.
    ///
    /// # Errors
    /// Fails if an option does not fit the mode, as ignoring it could drop a protection, or one is missing.
    pub fn protection(
        &self,
        path: SitePath,
        rent: &RemoteBaseArguments,
        terminal: Terminal,
    ) -> Result<Masking, CliError> {
        self.check_flags()?;
        let cover = match (self.masking, path) {
            (MaskingMode::Off, SitePath::Ring) => RowProtection::Bare,
            (MaskingMode::Off, _) => return self.inexact(Masking::Off { path }),
            (MaskingMode::Paper, _) => return self.inexact(Masking::Paper(self.noises())),
            (MaskingMode::Shares, _) => RowProtection::Shares(Arc::new(self.second(rent)?)),
            (MaskingMode::Pads, _) => RowProtection::Pads(self.pads(rent, terminal)?),
        };
        let verifier = self.verify.then(|| verifier(rent, terminal)).transpose()?;
        let masking = Masking::Exact(Exact { cover, verifier, pad_rows: self.pad_rows });
        if masking.is_sound() {
            secrets::keep_memory_private()?;
        }
        Ok(masking)
    }

    /// # Errors
    /// Fails if the arguments ask for something that only exact arithmetic can do.
    fn inexact(&self, masking: Masking) -> Result<Masking, CliError> {
        let said = [
            (self.verify, "--verify checks exact answers only"),
            (self.pad_rows, "--pad-rows fills up exact calls only"),
        ];
        match said.iter().find(|(is_said, _)| *is_said) {
            Some((_, why)) => {
                Err(CliError::Usage(format!("{why}; add --path ring, --masking shares or --masking pads")))
            }
            None => Ok(masking),
        }
    }

    /// Returns the masking mode.
    #[must_use]
    pub fn mode(&self) -> MaskingMode {
        self.masking
    }

    /// Whether an option is set that needs exact arithmetic.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.verify || self.pad_rows
    }

    fn check_flags(&self) -> Result<(), CliError> {
        let said = [
            (MaskingMode::Paper, "--noises", self.noises.is_some()),
            (MaskingMode::Paper, "--noise-scale", self.noise_scale.is_some()),
            (MaskingMode::Paper, "--noise-rows", self.noise_rows.is_some()),
            (MaskingMode::Shares, "--second-executor", self.second_executor.is_some()),
            (MaskingMode::Pads, "--pads", self.pads.is_said()),
            (MaskingMode::Pads, "--pads-empty", self.pads_empty.is_some()),
        ];
        match said.iter().find(|(of, _, is_said)| *is_said && *of != self.masking) {
            Some((of, flag, _)) => {
                Err(CliError::Usage(format!("{flag} has no effect without --masking {}", of.as_str())))
            }
            None => Ok(()),
        }
    }

    fn noises(&self) -> NoiseSettings {
        let usual = NoiseSettings::default();
        NoiseSettings {
            noises: self.noises.unwrap_or(usual.noises),
            scale: self.noise_scale.unwrap_or(usual.scale),
            rotate_rows: self.noise_rows.unwrap_or(usual.rotate_rows),
        }
    }

    fn second(&self, rent: &RemoteBaseArguments) -> Result<SecondExecutor, CliError> {
        let missing =
            || CliError::Usage("--masking shares needs two executors: add --second-executor ADDR".to_owned());
        let address = self.second_executor.as_deref().ok_or_else(missing)?;
        rent.connect.second(address, self.second_api_key_file.as_deref())
    }

    fn pads(&self, rent: &RemoteBaseArguments, terminal: Terminal) -> Result<Pads, CliError> {
        let pool = PadPool::open(&self.pads.directory()?).map_err(crate::error::CallError::from)?;
        let maker = match self.pads_empty {
            None | Some(PadExhaustion::Refuse) => None,
            Some(PadExhaustion::Wait) => {
                let base = pads::own_weights(rent.model(), "--pads-empty wait", &[], terminal)?;
                Some(PadGenerator::new(Box::new(base), self.pads.most_bytes()))
            }
        };
        Ok(Pads::new(pool, maker))
    }
}

fn verifier(rent: &RemoteBaseArguments, terminal: Terminal) -> Result<Arc<Verifier>, CliError> {
    let mut base = pads::own_weights(rent.model(), "--verify", &[], terminal)?;
    let mut progress = terminal.progress("preparing to check answers");
    let verifier = Verifier::new(&mut base, &mut |done, total| progress(done as u64, total as u64))?;
    Ok(Arc::new(verifier))
}

#[derive(Debug, clap::Args)]
pub(super) struct MaskingArguments {
    #[command(flatten)]
    protection: ProtectionArguments,
    /// Arithmetic without masking: fast (quantized, as for the executor's own requests), linear (activations
    /// not rounded) or ring (modular, exact) [default: fast]
    #[arg(long, value_name = "PATH")]
    path: Option<SitePathArgument>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum SitePathArgument {
    Fast,
    Linear,
    Ring,
}

impl MaskingArguments {
    pub(super) fn masking(
        &self,
        rent: &RemoteBaseArguments,
        terminal: Terminal,
    ) -> Result<Masking, CliError> {
        let path = match self.path {
            Some(_) if self.protection.mode() != MaskingMode::Off => {
                return Err(CliError::Usage("--path works only with --masking off: remove it".to_owned()));
            }
            None | Some(SitePathArgument::Fast) => SitePath::Fast,
            Some(SitePathArgument::Linear) => SitePath::Linear,
            Some(SitePathArgument::Ring) => SitePath::Ring,
        };
        self.protection.protection(path, rent, terminal)
    }
}
