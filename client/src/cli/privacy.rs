//! The command `privacy`: a description of what each party sees.

use serde_json::json;

use super::{
    exit::CliError,
    masking::MaskingMode,
    terminal::{OutputFormat, Terminal},
};

#[derive(Debug, clap::Args)]
pub(super) struct PrivacyArguments {
    /// Masking mode to describe; else all modes
    #[arg(long, value_name = "MODE")]
    masking: Option<MaskingMode>,
}

struct ModeDescription {
    mode: MaskingMode,
    /// Degree of secrecy, in one line.
    worth: &'static str,
    sees: &'static [(&'static str, &'static str)],
}

const ALL: [ModeDescription; 4] = [
    ModeDescription {
        mode: MaskingMode::Off,
        worth: "no secrecy: the executor's operator can read your prompts, your answers and your adapter",
        sees: &[(
            "the executor",
            "all activations and gradients, which reveal prompts, answers and adapters",
        )],
    },
    ModeDescription {
        mode: MaskingMode::Paper,
        worth: "obfuscation, no secrecy: it protects single messages, not collected ones",
        sees: &[("the executor", "activations with one of a few noises, which it can find and remove")],
    },
    ModeDescription {
        mode: MaskingMode::Shares,
        worth: "secrecy, unless the two operators combine their data; then they see what `off` shows",
        sees: &[
            ("the first executor", "uniformly random numbers, which reveal nothing about activations"),
            (
                "the second executor",
                "a random key and a number of rows, which reveal nothing about activations",
            ),
            ("both together", "every activation and every gradient, as with `off`"),
        ],
    },
    ModeDescription {
        mode: MaskingMode::Pads,
        worth: "secrecy: no executor can undo it, because this program never uses a pad twice",
        sees: &[
            ("the executor", "uniformly random numbers, which reveal nothing about activations"),
            (
                "a thief of this machine's disk",
                "unused pads; used pads are erased, as far as the disk erases data",
            ),
        ],
    },
];

const VISIBLE: [&str; 5] = [
    "the number of rows: lengths of prompts and answers, and numbers of draft tokens; with --pad-rows \
     only their powers of two",
    "the times of calls, and so how fast you read, type and compute",
    "the order of sites and the direction: whether an adapter is trained, and the architecture of the base",
    "your identity: your API key or certificate, and your address",
    "the use of this program, and the masking mode",
];

/// Threats that masking does not address.
const BESIDES: &str = "Answers can be wrong in any mode: --verify checks all of them against your own \
                       copy of the model. You must protect this machine yourself.";

pub(super) fn run(arguments: &PrivacyArguments, terminal: Terminal) -> Result<(), CliError> {
    let modes = ALL.iter().filter(|words| arguments.masking.is_none_or(|mode| mode == words.mode));
    if terminal.format == OutputFormat::Json {
        let mode = |words: &ModeDescription| {
            let sees: Vec<_> =
                words.sees.iter().map(|(who, what)| json!({ "who": who, "sees": what })).collect();
            json!({ "masking": words.mode.as_str(), "worth": words.worth, "parties": sees })
        };
        let modes: Vec<_> = modes.map(mode).collect();
        return Ok(terminal.print(json!({ "modes": modes, "visible_in_all": VISIBLE, "besides": BESIDES }))?);
    }
    for ModeDescription { mode, worth, sees } in modes {
        terminal.print(format_args!("--masking {}: {worth}", mode.as_str()))?;
        for (who, what) in *sees {
            terminal.print(format_args!("  {who} sees {what}"))?;
        }
    }
    terminal.print("In every mode an executor sees")?;
    for what in VISIBLE {
        terminal.print(format_args!("  {what}"))?;
    }
    Ok(terminal.print(BESIDES)?)
}
