//! Draws losses by step as SVG. Text stays text, so drawing needs no fonts.

use std::{collections::BTreeMap, path::Path};

use plotters::{
    prelude::{
        BLACK, ChartBuilder, IntoDrawingArea, LineSeries, PathElement, RGBColor, SVGBackend, TRANSPARENT,
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

type LossCurve = BTreeMap<u64, f64>;

/// Draws the losses of `events` into `path`.
pub(super) fn draw(path: &Path, title: &str, events: &[TrainingEvent]) -> Result<(), TuneError> {
    let (loss, held_out) = curves(events);
    chart(path, title, &[("loss", &loss, LOSS), ("held out", &held_out, HELD_OUT)])
        .map_err(|reason| TuneError::Plot { path: path.to_owned(), reason })
}

/// Returns the training and held-out losses. A resumed run repeats steps; the last value of a step counts.
fn curves(events: &[TrainingEvent]) -> (LossCurve, LossCurve) {
    let (mut loss, mut held_out) = (LossCurve::new(), LossCurve::new());
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

fn chart(path: &Path, title: &str, curves: &[(&str, &LossCurve, RGBColor)]) -> Result<(), String> {
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
        .y_desc("loss")
        .label_style(TEXT)
        .light_line_style(TRANSPARENT)
        .draw()
        .map_err(failed)?;
    for &(name, curve, colour) in curves.iter().filter(|(_, curve, _)| !curve.is_empty()) {
        let points = curve.iter().map(|(step, loss)| (*step, *loss));
        let series = chart.draw_series(LineSeries::new(points, colour.stroke_width(2))).map_err(failed)?;
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
    fn both_losses_are_drawn_and_no_run_at_all_is_said() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("loss.svg");
        draw(&path, "pirate", &events()).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        for part in ["<svg", "pirate", "held out", "step", "</svg>"] {
            assert!(svg.contains(part), "{part} is not in {svg}");
        }
        let error = draw(&path, "pirate", &[]).unwrap_err();
        assert!(error.to_string().contains("the run has no steps yet"), "{error}");
    }
}
