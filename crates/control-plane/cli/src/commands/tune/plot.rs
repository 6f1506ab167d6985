//! Draws losses or rewards by step, or losses by learning rate, as SVG. Text stays text, so drawing needs no
//! fonts.

use std::{collections::BTreeMap, ops::Range, path::Path};

use plotters::{
    prelude::{
        BLACK, ChartBuilder, Circle, IntoDrawingArea, LineSeries, PathElement, RGBColor, SVGBackend,
        TRANSPARENT, WHITE,
    },
    style::Color,
};

use control_protocol::training::{LearningRateCurve, LearningRatePoint, TrainingEvent};

use super::errors::TuneError;

const SIZE: (u32, u32) = (960, 540);
const TEXT: (&str, i32) = ("sans-serif", 15);

/// Colours of the Okabe and Ito palette, distinguishable with red-green colour blindness.
const LOSS: RGBColor = RGBColor(0, 114, 178);
const HELD_OUT: RGBColor = RGBColor(213, 94, 0);

/// Values by step.
type StepCurve = BTreeMap<u64, f64>;

/// Horizontal axis of a chart, and the name of the values.
struct ChartAxes {
    name: &'static str,
    range: Range<f64>,
    label: fn(&f64) -> String,
    values: &'static str,
}

/// Points of a line with its name and colour.
type ChartLine = (&'static str, Vec<(f64, f64)>, RGBColor);

/// Draws the losses of `events` into `path`, or the rewards of a run of GRPO.
pub(super) fn draw(path: &Path, title: &str, events: &[TrainingEvent]) -> Result<(), TuneError> {
    let failed = |reason| TuneError::Plot { path: path.to_owned(), reason };
    let ((loss, held_out), rewards) = (curves(events), rewards(events));
    let last = loss.keys().chain(held_out.keys()).max().copied();
    let last = last.ok_or_else(|| failed("the run has no steps yet".to_owned()))?;
    #[expect(clippy::cast_precision_loss, reason = "no run has so many steps")]
    let (line, end) = (
        |curve: StepCurve| curve.into_iter().map(|(step, value)| (step as f64, value)).collect(),
        (last + 1) as f64,
    );
    let (values, lines): (_, &[ChartLine]) = match rewards.is_empty() {
        true => ("loss", &[("loss", line(loss), LOSS), ("held out", line(held_out), HELD_OUT)]),
        false => ("reward", &[("mean reward", line(rewards), LOSS)]),
    };
    let axes = ChartAxes { name: "step", range: 0.0..end, label: |step| format!("{step:.0}"), values };
    chart(path, title, axes, lines).map_err(failed)
}

/// Returns the mean rewards of GRPO by step.
fn rewards(events: &[TrainingEvent]) -> StepCurve {
    let of = |event: &TrainingEvent| match event {
        TrainingEvent::Step(step) => step.rewards.map(|rewards| (step.step, rewards.mean)),
        _ => None,
    };
    events.iter().filter_map(of).filter(|(_, reward)| reward.is_finite()).collect()
}

/// Draws the losses of a sweep over learning rates into `path`, over a logarithmic axis.
pub(super) fn draw_by_rate(path: &Path, title: &str, curve: &LearningRateCurve) -> Result<(), TuneError> {
    let line = |loss: fn(&LearningRatePoint) -> f64| {
        curve.points.iter().map(|point| (point.learning_rate.log10(), loss(point))).collect::<Vec<_>>()
    };
    let (loss, smoothed) = (line(|point| point.loss), line(|point| point.smoothed_loss));
    let range = match (loss.first(), loss.last()) {
        (Some((first, _)), Some((last, _))) => *first..last + 0.1,
        _ => 0.0..1.0,
    };
    let label = |rate: &f64| format!("{:.0e}", 10f64.powf(*rate));
    let axes = ChartAxes { name: "learning rate", range, label, values: "loss" };
    chart(path, title, axes, &[("loss", loss, LOSS), ("smoothed", smoothed, HELD_OUT)])
        .map_err(|reason| TuneError::Plot { path: path.to_owned(), reason })
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

fn chart(path: &Path, title: &str, axes: ChartAxes, lines: &[ChartLine]) -> Result<(), String> {
    fn failed(error: impl std::fmt::Display) -> String {
        error.to_string()
    }
    let losses = || lines.iter().flat_map(|(_, line, _)| line.iter().map(|(_, loss)| *loss));
    let (least, most) = (losses().fold(0.0, f64::min), losses().fold(0.0, f64::max));
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, TEXT)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(axes.range, least * 1.1..most * 1.1 + f64::EPSILON)
        .map_err(failed)?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(axes.name)
        .x_label_formatter(&axes.label)
        .y_desc(axes.values)
        .label_style(TEXT)
        .light_line_style(TRANSPARENT)
        .draw()
        .map_err(failed)?;
    for &(name, ref line, colour) in lines.iter().filter(|(_, line, _)| !line.is_empty()) {
        if let &[point] = &line[..] {
            // A line needs two points.
            let dot = std::iter::once(Circle::new(point, 4, colour.filled()));
            chart.draw_series(dot).map_err(failed)?;
        }
        let series = chart
            .draw_series(LineSeries::new(line.iter().copied(), colour.stroke_width(2)))
            .map_err(failed)?;
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
    fn losses_by_rate_are_drawn_over_powers_of_ten() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rate.svg");
        let point = |learning_rate, loss| LearningRatePoint { learning_rate, loss, smoothed_loss: loss };
        let points = vec![point(1e-6, 2.0), point(1e-3, 1.0), point(1e-1, 3.0)];
        draw_by_rate(&path, "pirate", &LearningRateCurve { points, ..LearningRateCurve::default() }).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        for part in ["learning rate", "smoothed", "1e-4", "</svg>"] {
            assert!(svg.contains(part), "{part} is not in {svg}");
        }
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
