//! Formats the plan, progress and result of a training run for people.

use control_protocol::training::{
    Correctness, ExampleToken, LearningRateCurve, RunResult, StepReport, TrainingEvent, TrainingPlan,
    rollout::RewardReport,
};

use crate::terminal::{
    TextStyle, printable,
    table::{percent, short_generation},
};

pub(super) fn plan(plan: &TrainingPlan) -> Vec<(String, String)> {
    let mut rows = vec![
        (
            "data",
            format!(
                "{}, {}, {} tokens",
                counted(plan.examples, "example"),
                printable(&plan.kind),
                plan.tokens
            ),
        ),
        ("held out", if plan.held_out == 0 { "none".to_owned() } else { counted(plan.held_out, "example") }),
        (
            "steps",
            format!(
                "{} of {} each, {}",
                plan.steps,
                counted(plan.batch_size, "example"),
                counted(plan.epochs, "epoch")
            ),
        ),
        ("method", printable(&plan.method)),
        ("adapter", adapter(plan)),
        (
            "learning rate",
            format!(
                "{}, {}, {} steps of warmup",
                significant(plan.learning_rate),
                printable(&plan.schedule),
                plan.warmup_steps
            ),
        ),
        ("seed", plan.seed.to_string()),
    ];
    if let Some(draft) = plan.draft {
        let words = format!("{}, guesses one of {} tokens", counted(draft.layers, "block"), draft.tokens);
        rows.push(("draft", words));
    }
    if let Some(step) = plan.resumed_step {
        rows.push(("goes on", format!("after step {step}")));
    }
    if !plan.unread_fields.is_empty() {
        rows.push(("ignored fields", printable(&plan.unread_fields.join(", "))));
    }
    rows.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Sign between two tokens of an example.
const BETWEEN_TOKENS: &str = "\u{2502}";

/// Formats an example token by token: what is learned is green, and in brackets; what has a negative weight
/// is red, and in `[-` and `-]`.
pub(super) fn sample(ink: TextStyle, sample: &[ExampleToken]) -> String {
    let runs = sample.chunk_by(|one, next| one.weight.total_cmp(&0.0) == next.weight.total_cmp(&0.0));
    let run = |run: &[ExampleToken]| {
        let tokens: Vec<String> = run.iter().map(|token| printable(&token.text)).collect();
        let text = tokens.join(BETWEEN_TOKENS);
        match run[0].weight {
            weight if weight > 0.0 => ink.green(&format!("[{text}]")),
            weight if weight < 0.0 => ink.red(&format!("[-{text}-]")),
            _ => text,
        }
    };
    runs.map(run).collect()
}

fn adapter(plan: &TrainingPlan) -> String {
    let mut parts = vec![printable(&plan.adapter_type)];
    parts.extend(plan.rank.map(|rank| format!("rank {rank}")));
    parts.extend(plan.alpha.map(|alpha| format!("alpha {alpha}")));
    parts.extend(plan.dropout.map(|share| format!("dropout {share}")));
    parts.push(counted(plan.parameters, "parameter"));
    let targets = plan.targets.iter().map(|target| printable(target)).collect::<Vec<_>>().join(", ");
    match targets.as_str() {
        "" => parts.join(", "),
        targets => format!("{} in {targets}", parts.join(", ")),
    }
}

/// Formats the text beside the progress bar.
pub(super) fn step(step: &StepReport, held_out_loss: Option<f64>) -> String {
    // The loss of GRPO is near 0 at any reward.
    let mut parts = match step.rewards {
        Some(rewards) => vec![rewards_of(rewards)],
        None => vec![format!("loss {:.3}", step.loss)],
    };
    parts.extend(held_out_loss.map(|loss| format!("held out {loss:.3}")));
    parts.extend(step.tokens_per_second.map(|speed| format!("{speed:.0} tokens/s")));
    parts.extend(
        step.seconds_left.filter(|_| step.step < step.steps).map(|left| format!("{} left", time(left))),
    );
    parts.join(", ")
}

/// Returns the value of a step that the training changes: the mean reward of GRPO, else the loss.
pub(super) fn goal(step: &StepReport) -> f64 {
    step.rewards.map_or(step.loss, |rewards| rewards.mean)
}

fn rewards_of(RewardReport { mean, deviation, answer_tokens, .. }: RewardReport) -> String {
    format!("reward {mean:.3} ± {deviation:.3}, {answer_tokens:.0} tokens an answer")
}

/// Formats an event as one line; `None` for events that are not shown.
pub(super) fn event(event: &TrainingEvent) -> Option<String> {
    Some(match event {
        TrainingEvent::Plan(plan) => {
            format!("plan: {}, {} steps, {}", printable(&plan.method), plan.steps, adapter(plan))
        }
        TrainingEvent::Problem { file, line, message } => {
            let file = file.as_deref().map(|file| format!("{}, ", printable(file))).unwrap_or_default();
            format!("{file}line {line}: {}", printable(message))
        }
        TrainingEvent::Step(it) => format!("step {} of {}: {}", it.step, it.steps, step(it, None)),
        TrainingEvent::Evaluation { step, loss } => format!("after step {step}: held out {loss:.3}"),
        TrainingEvent::Drafted { step, kinds } => format!("after step {step}: {}", drafted(kinds)),
        TrainingEvent::Asked { prompts, of } => format!("{prompts} of {of} prompts have answers"),
        TrainingEvent::Checkpoint { step } => format!("after step {step}: checkpoint"),
        TrainingEvent::LearningRate(it) => suggested(it),
        TrainingEvent::Done(it) => format!("trained: {}", outcome(it)),
        TrainingEvent::Published { generation } => {
            format!("served: generation {}", short_generation(&printable(generation)))
        }
        TrainingEvent::Failed { message, .. } => format!("failed: {}", printable(message)),
        TrainingEvent::Prompt(_)
        | TrainingEvent::Answered {}
        | TrainingEvent::Rollouts(_)
        | TrainingEvent::Other => return None,
    })
}

/// Formats the share of correct draft tokens, over all tokens and for each kind of text.
pub(super) fn drafted(kinds: &[Correctness]) -> String {
    #[expect(clippy::cast_precision_loss, reason = "for people to read")]
    let share = |right: u64, tokens: u64| format!("{:.3}", right as f64 / tokens.max(1) as f64);
    let (right, tokens) =
        kinds.iter().fold((0, 0), |(right, tokens), it| (right + it.right, tokens + it.tokens));
    let of_kind = |it: &Correctness| format!("{} {}", printable(&it.kind), share(it.right, it.tokens));
    let by_kind = kinds.iter().map(of_kind).collect::<Vec<_>>().join(", ");
    format!("{} of {tokens} held-out tokens guessed right ({by_kind})", share(right, tokens))
}

/// Number of rows in a table of losses by learning rate.
const RATE_ROWS: usize = 20;

/// Maximum length of a bar in that table.
const BAR: f64 = 40.0;

/// Formats the smoothed losses of a sweep as a table with bars, and the suggested rates.
pub(super) fn learning_rates(ink: TextStyle, curve: &LearningRateCurve) -> String {
    let losses = || curve.points.iter().map(|point| point.smoothed_loss);
    let (least, most) = (losses().fold(f64::INFINITY, f64::min), losses().fold(f64::NEG_INFINITY, f64::max));
    let row = |(learning_rate, loss): (f64, f64)| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is from 0 to 40")]
        let bar = (BAR * (loss - least) / (most - least).max(f64::EPSILON)) as usize;
        format!(
            "{:>9}  {loss:>8.3}  {}",
            format!("{learning_rate:.1e}"),
            ink.green(&"\u{2588}".repeat(bar + 1))
        )
    };
    let rows = curve.points.iter().step_by(curve.points.len().div_ceil(RATE_ROWS).max(1));
    let rows = rows.map(|point| row((point.learning_rate, point.smoothed_loss)));
    let head = [format!("{:>9}  {:>8}", "rate", "loss")];
    let lines: Vec<String> = head.into_iter().chain(rows).chain([suggested(curve)]).collect();
    lines.join("\n")
}

/// Formats the rates that a sweep suggests.
fn suggested(curve: &LearningRateCurve) -> String {
    match (curve.steepest, curve.tenth_of_lowest) {
        (Some(steepest), Some(tenth)) => format!(
            "suggestion: --learning-rate {steepest:.1e}, where the loss falls fastest; a tenth of the rate of the \
             lowest loss is {tenth:.1e}"
        ),
        _ => "no suggestion: the loss falls at no rate; use more or other data".to_owned(),
    }
}

/// Formats the result of a run in one line.
pub(super) fn outcome(it: &RunResult) -> String {
    let mut parts = vec![format!("{} in {}", counted(it.steps, "step"), time(it.seconds))];
    parts.extend(it.loss.map(|loss| format!("loss {loss:.3}")));
    parts.extend(it.held_out_loss.map(|loss| format!("held out {loss:.3}")));
    parts.extend(it.best_step.map(|step| format!("adapter of step {step}")));
    parts.join(", ")
}

/// Formats the progress at a run's last step.
pub(super) fn share(step: &StepReport) -> String {
    #[expect(clippy::cast_precision_loss, reason = "for people to read")]
    let ratio = step.step as f64 / step.steps.max(1) as f64;
    format!("{} of {} ({})", step.step, step.steps, percent(ratio))
}

/// Formats a duration of `seconds` with about two digits.
pub(super) fn time(seconds: f64) -> String {
    match seconds {
        s if s < 99.5 => format!("{s:.0} s"),
        s if s < 99.5 * 60.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// Formats a number without exponent, with four significant digits.
fn significant(number: f64) -> String {
    const DIGITS: f64 = 4.0;
    let magnitude = if number == 0.0 { 0.0 } else { number.abs().log10().floor() };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is clamped to a few hundred"
    )]
    let decimals = (DIGITS - 1.0 - magnitude).clamp(0.0, 400.0) as usize;
    let written = format!("{number:.decimals$}");
    if !written.contains('.') {
        return written;
    }
    written.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use control_protocol::training::LearningRatePoint;

    use super::*;

    #[test]
    fn a_step_says_what_is_known_of_it() {
        let mut it = StepReport {
            step: 1,
            steps: 2,
            loss: 2.3456,
            tokens_per_second: Some(480.4),
            seconds_left: Some(300.0),
            ..StepReport::default()
        };
        assert_eq!(step(&it, Some(2.0)), "loss 2.346, held out 2.000, 480 tokens/s, 5 min left");
        it.step = 2;
        it.tokens_per_second = None;
        assert_eq!(step(&it, None), "loss 2.346");
    }

    #[test]
    fn a_learning_rate_has_few_digits() {
        for (number, written) in [
            (0.001_321_856_988_368_204_7, "0.001322"),
            (1e-4, "0.0001"),
            (2.5e-8, "0.000000025"),
            (0.0, "0"),
            (1.0, "1"),
            (12_345.6, "12346"),
        ] {
            assert_eq!(significant(number), written);
        }
    }

    #[test]
    fn an_example_shows_its_tokens_and_which_are_learned() {
        let token = |text: &str, weight| ExampleToken { text: text.to_owned(), weight };
        let shown =
            [token("Hi", 0.0), token(" ", 0.0), token("\u{1b}Yes", 2.0), token("!", 0.5), token("No", -1.0)];
        assert_eq!(sample(TextStyle::None, &shown), "Hi\u{2502} [Yes\u{2502}!][-No-]");
        assert_eq!(sample(TextStyle::Ansi, &shown[4..]), "\u{1b}[31m[-No-]\u{1b}[0m");
    }

    #[test]
    fn losses_by_rate_are_a_table_of_bars_with_a_suggestion() {
        let point =
            |learning_rate, smoothed_loss| LearningRatePoint { learning_rate, loss: 0.0, smoothed_loss };
        let points = vec![point(1e-6, 3.0), point(1e-4, 1.0), point(1e-1, 2.0)];
        let curve = LearningRateCurve { steepest: Some(1.5e-4), tenth_of_lowest: Some(1e-5), points };
        let shown = learning_rates(TextStyle::None, &curve);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[0], "     rate      loss");
        assert_eq!(lines[1], format!("   1.0e-6     3.000  {}", "\u{2588}".repeat(41)));
        assert_eq!(lines[2], "   1.0e-4     1.000  \u{2588}");
        assert!(lines[4].starts_with("suggestion: --learning-rate 1.5e-4, "), "{shown}");
        let none = learning_rates(TextStyle::None, &LearningRateCurve::default());
        assert!(none.contains("no suggestion"), "{none}");
    }

    #[test]
    fn times_are_short() {
        assert_eq!([0.4, 99.0, 100.0, 36_000.0].map(time), ["0 s", "99 s", "2 min", "10.0 h"]);
    }

    #[test]
    fn what_a_plan_does_not_say_is_not_shown() {
        let plan = TrainingPlan { adapter_type: "ia3".into(), parameters: 1, ..TrainingPlan::default() };
        assert_eq!(adapter(&plan), "ia3, 1 parameter");
    }
}
