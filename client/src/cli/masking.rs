//! From arguments to what an executor sees.

use std::{path::PathBuf, sync::Arc};

use shmproto::layer::Path;

use super::{
    exit::CliError,
    pads::{self, PadArguments},
    remote_base::RemoteBaseArguments,
    terminal::Terminal,
};
use crate::{
    masking::{
        Exact, Masking, NoiseSettings, RowProtection,
        one_time_pads::{Pads, maker::PadMaker, pool::PadPool},
        secret_sharing::SecondExecutor,
        verify::Verifier,
    },
    secrets,
};

/// What an executor sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum MaskingMode {
    /// Activations as they are
    #[default]
    Off,
    /// Obfuscated by rotating noises; no secrecy
    Paper,
    /// Random numbers each, at two executors that must not collude
    Shares,
    /// Random numbers, which pads from a disk take away
    Pads,
}

impl MaskingMode {
    /// As it is written.
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

/// How activations, and gradients, are protected, and answers checked.
#[derive(Debug, clap::Args)]
pub struct ProtectionArguments {
    /// What the executor sees: off (activations), paper (obfuscated activations), shares or pads (nothing); see `privacy`
    #[arg(long, value_name = "MODE", default_value = "off")]
    masking: MaskingMode,
    // Defaults are written out: what was said is told from what was not.
    #[arg(long, value_name = "N", help = format!("Noises of a site, of --masking paper [default: {}]", NoiseSettings::default().noises))]
    noises: Option<usize>,
    #[arg(long, value_name = "X", help = format!("Size of the noise, in sizes of the activations [default: {}]", NoiseSettings::default().scale))]
    noise_scale: Option<f32>,
    #[arg(long, value_name = "N", help = format!("Rows after which a site gets fresh noises [default: {}]", NoiseSettings::default().rotate_rows))]
    noise_rows: Option<u64>,
    /// The executor that sees the pads, of --masking shares; never the first one's operator's
    #[arg(long, value_name = "ADDR")]
    second_executor: Option<String>,
    /// File with the second executor's API key; else it is shown that of the first
    #[arg(long, value_name = "FILE", requires = "second_executor")]
    second_api_key_file: Option<PathBuf>,
    #[command(flatten)]
    pads: PadArguments,
    /// What becomes of a call where pads are used up: refuse, or wait until some are made, which takes --model [default: refuse]
    #[arg(long, value_name = "WHAT")]
    pads_empty: Option<PadExhaustion>,
    /// Checks every answer against --model, which the executor must serve exactly: an answer that is wrong is an error
    #[arg(long)]
    verify: bool,
    /// Fills calls up with rows of nothing to 1, 2, 4, 8 ... rows, so that executors see no other number; of exact arithmetic
    #[arg(long)]
    pad_rows: bool,
}

/// What becomes of a call where pads are used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum PadExhaustion {
    /// It is an error
    Refuse,
    /// It waits until this client has made some
    Wait,
}

impl ProtectionArguments {
    /// The protection that is asked for; without masking, with the arithmetic `path`. If it is secrecy, this process keeps its memory to
    /// itself from now on.
    ///
    /// # Errors
    /// What was said has no meaning in this mode (it is not ignored where it would have protected), or what it takes is not there.
    pub fn protection(
        &self,
        path: Path,
        rent: &RemoteBaseArguments,
        terminal: Terminal,
    ) -> Result<Masking, CliError> {
        self.check_flags()?;
        let cover = match (self.masking, path) {
            (MaskingMode::Off, Path::Ring) => RowProtection::Bare,
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
    /// More was asked for than arithmetic that rounds can do.
    fn inexact(&self, masking: Masking) -> Result<Masking, CliError> {
        let said = [
            (self.verify, "only exact answers can be checked: --verify"),
            (self.pad_rows, "only exact calls are filled up: --pad-rows"),
        ];
        match said.iter().find(|(is_said, _)| *is_said) {
            Some((_, why)) => Err(CliError::Usage(format!(
                "{why} takes exact arithmetic: --path ring, --masking shares or --masking pads"
            ))),
            None => Ok(masking),
        }
    }

    /// Which mode it is.
    #[must_use]
    pub fn mode(&self) -> MaskingMode {
        self.masking
    }

    /// Whether something is asked for that only exact arithmetic can do.
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
                Err(CliError::Usage(format!("{flag} is nothing without --masking {}", of.as_str())))
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
        let missing = || {
            CliError::Usage(
                "--masking shares takes two executors: say --second-executor ADDR as well".to_owned(),
            )
        };
        let address = self.second_executor.as_deref().ok_or_else(missing)?;
        rent.connect.second(address, self.second_api_key_file.as_deref())
    }

    fn pads(&self, rent: &RemoteBaseArguments, terminal: Terminal) -> Result<Pads, CliError> {
        let pool = PadPool::open(&self.pads.directory()?).map_err(crate::error::CallError::from)?;
        let maker = match self.pads_empty {
            None | Some(PadExhaustion::Refuse) => None,
            Some(PadExhaustion::Wait) => {
                let base = pads::own_weights(rent.model(), "--pads-empty wait", &[], terminal)?;
                Some(PadMaker::new(Box::new(base), self.pads.most_bytes()))
            }
        };
        Ok(Pads::new(pool, maker))
    }
}

/// What answers are checked with.
fn verifier(rent: &RemoteBaseArguments, terminal: Terminal) -> Result<Arc<Verifier>, CliError> {
    let mut base = pads::own_weights(rent.model(), "--verify", &[], terminal)?;
    let mut progress = terminal.progress("preparing to check answers");
    let verifier = Verifier::new(&mut base, &mut |done, total| progress(done as u64, total as u64))?;
    Ok(Arc::new(verifier))
}

/// The same, and with which arithmetic.
#[derive(Debug, clap::Args)]
pub(super) struct MaskingArguments {
    #[command(flatten)]
    protection: ProtectionArguments,
    /// Arithmetic without masking: fast (as the executor's own requests), linear (activations unrounded) or ring (exact)
    /// [default: fast]
    #[arg(long, value_name = "PATH")]
    path: Option<SitePathArgument>,
}

/// With which arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum SitePathArgument {
    Fast,
    Linear,
    Ring,
}

impl MaskingArguments {
    /// The masking that is asked for.
    ///
    /// # Errors
    /// What was said has no meaning in this mode, or what it takes is not there.
    pub(super) fn masking(
        &self,
        rent: &RemoteBaseArguments,
        terminal: Terminal,
    ) -> Result<Masking, CliError> {
        let path = match self.path {
            Some(_) if self.protection.mode() != MaskingMode::Off => {
                return Err(CliError::Usage(
                    "--path is for --masking off: with masking there is one arithmetic".to_owned(),
                ));
            }
            None | Some(SitePathArgument::Fast) => Path::Fast,
            Some(SitePathArgument::Linear) => Path::Linear,
            Some(SitePathArgument::Ring) => Path::Ring,
        };
        self.protection.protection(path, rent, terminal)
    }
}
