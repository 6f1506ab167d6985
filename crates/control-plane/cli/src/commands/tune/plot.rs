//! Draws losses, or rewards, by step as SVG. Text stays text, so drawing needs no fonts.

use std::{collections::BTreeMap, path::Path};

use plotters::{
    prelude::{
        BLACK, ChartBuilder, Circle, IntoDrawingArea, LineSeries, PathElement, RGBColor, SVGBackend, TRANSPARENT,
        WHITE,
    },
    style::Color,
};

use control_protocol::training::TrainingEvent;

use super::errors::TuneError;

const SIZE: (u32, u32) = (960, 540);
const TEXT: (&str, i32) = ("sans-serif", 15);

/// Colours of the Okabe and Ito palette, distinguishable with red-green colour blindness.
const LOSS: RGBColor = RGBColor(0, 114, 178);
const HELD_OUT: RGBColor = RGBColor(213, 94, 0);

/// Values by step.
type StepCurve = BTreeMap<u64, f64>;

/// Draws the losses of `events` into `path`, or the rewards of a run of GRPO.
pub(super) fn draw(path: &Path, title: &str, events: &[TrainingEvent]) -> Result<(), TuneError> {
    let rewards = rewards(events);
    let (loss, held_out) = curves(events);
    let drawn = match rewards.is_empty() {
        true => chart(path, title, "loss", &[("loss", &loss, LOSS), ("held out", &held_out, HELD_OUT)]),
        false => chart(path, title, "reward", &[("mean reward", &rewards, LOSS)]),
    };
    drawn.map_err(|reason| TuneError::Plot { path: path.to_owned(), reason })
}

/// Returns the mean rewards of GRPO by step.
fn rewards(events: &[TrainingEvent]) -> StepCurve {
    let of = |event: &TrainingEvent| match event {
        TrainingEvent::Step(step) => step.rewards.map(|rewards| (step.step, rewards.mean)),
        _ => None,
    };
    events.iter().filter_map(of).filter(|(_, reward)| reward.is_finite()).collect()
}

/// Returns the training and held-out losses. A resumed run repeats steps; the last value of a step counts.
fn curves(events: &[TrainingEvent]) -> (StepCurve, StepCurve) {
    let (mut loss, mut held_out) = (StepCurve::new(), StepCurve::new());
    for event in events {
        match event {
            TrainingEvent::Step(step) => drop(loss.insert(step.step, step.loss)),
            TrainingEvent::Evaluation { step, loss } => drop(held_out.insert(*step, *loss)),
            _ => {}
        }
    }
    for curve in [&mut loss, &mut held_out] {
        curve.retain(|_, loss| loss.is_finite());
    }
    (loss, held_out)
}

fn chart(
    path: &Path,
    title: &str,
    values: &str,
    curves: &[(&str, &StepCurve, RGBColor)],
) -> Result<(), String> {
    fn failed(error: impl std::fmt::Display) -> String {
        error.to_string()
    }
    let steps = curves.iter().flat_map(|(_, curve, _)| curve.keys());
    let last = steps.max().ok_or("the run has no steps yet")?;
    let most =
        curves.iter().flat_map(|(_, curve, _)| curve.values()).fold(0.0, |most: f64, loss| most.max(*loss));
    let least =
        curves.iter().flat_map(|(_, curve, _)| curve.values()).fold(0.0, |least: f64, loss| least.min(*loss));
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, TEXT)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0..last + 1, least * 1.1..most * 1.1 + f64::EPSILON)
        .map_err(failed)?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("step")
        .y_desc(values)
        .label_style(TEXT)
        .light_line_style(TRANSPARENT)
        .draw()
        .map_err(failed)?;
    for &(name, curve, colour) in curves.iter().filter(|(_, curve, _)| !curve.is_empty()) {
        let points = curve.iter().map(|(step, loss)| (*step, *loss));
        let series = chart.draw_series(LineSeries::new(points, colour.stroke_width(2))).map_err(failed)?;
        if let Some((&step, &value)) = curve.first_key_value().filter(|_| curve.len() == 1) {
            // A line needs two values.
            let dot = std::iter::once(Circle::new((step, value), 4, colour.filled()));
            chart.draw_series(dot).map_err(failed)?;
        }
        let mark = move |(x, y)| PathElement::new([(x, y), (x + 24, y)], colour.stroke_width(2));
        series.label(name).legend(mark);
    }
    let mut labels = chart.configure_series_labels();
    labels.background_style(WHITE.mix(0.85)).border_style(BLACK).label_font(TEXT).draw().map_err(failed)?;
    area.present().map_err(failed)
}

#[cfg(test)]
mod tests {
    use control_protocol::training::parse;

    use super::*;

    fn events() -> Vec<TrainingEvent> {
        let step =
            |step, loss| parse(&format!(r#"{{"event":"step","step":{step},"steps":3,"loss":{loss}}}"#));
        let held_out = TrainingEvent::Evaluation { step: 2, loss: 2.5 };
        vec![step(1, 3.0), step(2, 9.0), step(2, 2.0), held_out, step(3, 1.0)]
    }

    #[test]
    fn of_a_step_taken_twice_the_last_time_counts() {
        let (loss, held_out) = curves(&events());
        assert_eq!(loss.into_iter().collect::<Vec<_>>(), [(1, 3.0), (2, 2.0), (3, 1.0)]);
        assert_eq!(held_out.into_iter().collect::<Vec<_>>(), [(2, 2.5)]);
    }

    #[test]
    fn rewards_are_drawn_in_place_of_losses() {
        let step = parse(
            r#"{"event":"step","step":1,"steps":2,"loss":0.0,"rewards":{"mean":0.25,"deviation":0.5,"answer_tokens":9.0,"equal_groups":0,"logprob_difference":0.0}}"#,
        );
        let events = [step, events().remove(0)];
        assert_eq!(rewards(&events).into_iter().collect::<Vec<_>>(), [(1, 0.25)]);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("reward.svg");
        draw(&path, "json", &events).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        assert!(svg.contains("mean reward") && !svg.contains("held out"), "{svg}");
    }

    #[test]
    fn both_losses_are_drawn_and_no_run_at_all_is_said() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("loss.svg");
        draw(&path, "pirate", &events()).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        for part in ["<svg", "pirate", "held out", "step", "</svg>"] {
            assert!(svg.contains(part), "{part} is not in {svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 1, "the only held-out loss is a dot: {svg}");
        let error = draw(&path, "pirate", &[]).unwrap_err();
        assert!(error.to_string().contains("the run has no steps yet"), "{error}");
    }
}
