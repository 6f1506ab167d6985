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
            "every activation and every gradient: prompts and answers are looked up from them, adapters solved for",
        )],
    },
    ModeDescription {
        mode: MaskingMode::Paper,
        worth: "obfuscation, no secrecy: it stops who looks at one message, not who keeps them",
        sees: &[(
            "the executor",
            "activations with one of a few noises, whose effects it computed itself: it finds the noises again and takes them away",
        )],
    },
    ModeDescription {
        mode: MaskingMode::Shares,
        worth: "secrecy, as long as the two operators do not put together what they saw; then they see what `off` shows",
        sees: &[
            (
                "the first executor",
                "numbers that are uniform whatever your activations are: nothing about them",
            ),
            (
                "the second executor",
                "a random key, and how many rows are made from it: nothing about activations",
            ),
            ("both together", "every activation and every gradient, as with `off`"),
        ],
    },
    ModeDescription {
        mode: MaskingMode::Pads,
        worth: "secrecy: no executor can help to undo it, as long as no pad is used twice, which this program sees to",
        sees: &[
            ("the executor", "numbers that are uniform whatever your activations are: nothing about them"),
            (
                "who takes this machine's disk",
                "pads that are not used yet; those that were used are erased, as far as the disk erases",
            ),
        ],
    },
];

const VISIBLE: [&str; 5] = [
    "how many rows are sent: the length of prompts and answers, and how many tokens are guessed at once; with --pad-rows, \
        their powers of two",
    "when: pauses between calls, and so how fast you read, type and compute",
    "through which sites, in which order, forward or backward: that an adapter learns, and of which architecture the base is",
    "who you are: the key or certificate that you show, and your address",
    "that you use this program, and the masking mode",
];

/// Threats that masking does not address.
const BESIDES: &str = "Answers can be wrong in any mode: --verify checks each of them against a copy of the model of your own. \
    That nobody looks into this machine, is for you to see to.";

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
