//! Plots as SVG, with text as text: drawing them needs no fonts.

use std::{fs, path::Path};

use anyhow::{Context, Result, anyhow};
use plotters::prelude::{
    BLACK, ChartBuilder, Circle, IntoDrawingArea, IntoLogRange, LineSeries, PathElement, RGBColor,
    SVGBackend, SeriesLabelPosition, TRANSPARENT, WHITE,
};
use plotters::style::Color;

use crate::measure::Samples;

const SIZE: (u32, u32) = (960, 540);
const TEXT: (&str, i32) = ("sans-serif", 15);
/// Colours that remain distinct with red-green colour blindness (Okabe and Ito).
const COLOURS: [RGBColor; 5] = [
    RGBColor(0, 0, 0),
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
];

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PlotCurve {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    pub(crate) line: Vec<(f64, f64)>,
}

/// Plots cumulative distributions of times in milliseconds on a logarithmic axis.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn distribution(path: &Path, title: &str, curves: &[(&str, Samples)]) -> Result<()> {
    let ends = curves.iter().flat_map(|(_, samples)| samples.range());
    let (least, most) = ends.fold((f64::MAX, 0.0f64), |(least, most), end| (least.min(end), most.max(end)));
    let area = area(path)?;
    let area = area.into_drawing_area();
    area.fill(&WHITE).map_err(failed(path))?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, TEXT)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(((least * 0.9).max(0.1)..most * 1.1).log_scale(), 0.0..1.0f64)
        .map_err(failed(path))?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("milliseconds (logarithmic)").y_desc("share of the requests").label_style(TEXT);
    mesh.light_line_style(TRANSPARENT);
    mesh.x_label_formatter(&|ms| format!("{ms:.0}")).draw().map_err(failed(path))?;
    for ((name, samples), colour) in curves.iter().zip(COLOURS) {
        let count = samples.count() as f64;
        let points = samples.values().iter().enumerate().map(|(index, &ms)| (ms, (index + 1) as f64 / count));
        let label = format!("{name}: median {:.0} ms, mean {:.0} ms", samples.median(), samples.mean());
        let series =
            chart.draw_series(LineSeries::new(points, colour.stroke_width(2))).map_err(failed(path))?;
        series
            .label(label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], colour.stroke_width(2)));
    }
    legend(&mut chart, SeriesLabelPosition::LowerRight, path)?;
    area.present().map_err(failed(path))
}

/// Plots points with their forecasts over a logarithmic axis.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn lines(
    path: &Path,
    title: &str,
    [x_name, y_name]: [&str; 2],
    curves: &[PlotCurve],
) -> Result<()> {
    let all = || curves.iter().flat_map(|curve| curve.points.iter().chain(&curve.line));
    let over =
        |start: f64, pick: fn(f64, f64) -> f64, of: fn(&(f64, f64)) -> f64| all().map(of).fold(start, pick);
    let x = over(f64::MAX, f64::min, |point| point.0)..over(1.0, f64::max, |point| point.0);
    let y = over(0.0, f64::min, |point| point.1) * 1.1 - 1.0..over(0.0, f64::max, |point| point.1) * 1.1;
    let area = area(path)?;
    let area = area.into_drawing_area();
    area.fill(&WHITE).map_err(failed(path))?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, TEXT)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d((x.start * 0.9..x.end * 1.1).log_scale().base(2.0), y)
        .map_err(failed(path))?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(format!("{x_name} (logarithmic)")).y_desc(y_name).label_style(TEXT);
    mesh.light_line_style(TRANSPARENT);
    mesh.x_label_formatter(&|tokens| format!("{tokens:.0}")).draw().map_err(failed(path))?;
    let zero = [(x.start * 0.9, 0.0), (x.end * 1.1, 0.0)];
    chart.draw_series(LineSeries::new(zero, BLACK.stroke_width(1))).map_err(failed(path))?;
    for (curve, colour) in curves.iter().zip(COLOURS) {
        let line = LineSeries::new(curve.line.iter().copied(), colour.stroke_width(1));
        let series = chart.draw_series(line).map_err(failed(path))?;
        series
            .label(format!("{} (points: measured, line: forecast)", curve.name))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], colour.stroke_width(2)));
        let dots = curve.points.iter().map(|&point| Circle::new(point, 4, colour.filled()));
        chart.draw_series(dots).map_err(failed(path))?;
    }
    legend(&mut chart, SeriesLabelPosition::UpperLeft, path)?;
    area.present().map_err(failed(path))
}

type Chart<'a, 'b, X> = plotters::chart::ChartContext<
    'a,
    SVGBackend<'b>,
    plotters::coord::cartesian::Cartesian2d<X, plotters::coord::types::RangedCoordf64>,
>;

fn legend<'a, 'b: 'a, X>(chart: &mut Chart<'a, 'b, X>, at: SeriesLabelPosition, path: &Path) -> Result<()>
where
    X: plotters::coord::ranged1d::Ranged<ValueType = f64>,
{
    let mut labels = chart.configure_series_labels();
    labels.position(at).background_style(WHITE.mix(0.85)).border_style(BLACK).label_font(TEXT);
    labels.draw().map_err(failed(path))
}

fn area(path: &Path) -> Result<SVGBackend<'_>> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    Ok(SVGBackend::new(path, SIZE))
}

fn failed<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> anyhow::Error + '_ {
    move |error| anyhow!("cannot draw {}: {error}", path.display())
}
