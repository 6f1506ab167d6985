//! Draws small charts in SVG: lines over time, and bars with intervals.

use std::fmt::Write as _;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 300.0;
/// Left, right, top and bottom of the drawing area in pixels.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 600.0;
const TOP: f64 = 36.0;
const BOTTOM: f64 = 250.0;
/// Colors that readers with color blindness can distinguish (Okabe and Ito).
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];
/// Maximum number of points of a line, beyond which they cannot be told apart.
const MAX_POINTS: usize = 200;

#[derive(Debug, Clone)]
pub(crate) struct ChartLine {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

#[derive(Debug, Clone)]
pub(crate) struct Bar {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) half_interval: f64,
}

/// Draws lines over a common axis; `marks` are named positions on it.
#[must_use]
pub(crate) fn lines(
    title: &str,
    (x_name, y_name): (&str, &str),
    lines: &[ChartLine],
    marks: &[(f64, &str)],
) -> String {
    let points = || lines.iter().flat_map(|line| &line.points);
    let x_min = points().map(|point| point.0).fold(f64::INFINITY, f64::min).min(1e300);
    let x_max = points().map(|point| point.0).fold(x_min + 1e-9, f64::max);
    let y_max = ceiling(points().map(|point| point.1).fold(0.0, f64::max));
    let x = |value: f64| LEFT + (value - x_min) / (x_max - x_min) * (RIGHT - LEFT);
    let y = |value: f64| BOTTOM - value / y_max * (BOTTOM - TOP);
    let mut svg = frame(title, y_name, y_max);
    for tick in 0..=6 {
        let value = x_min + (x_max - x_min) * f64::from(tick) / 6.0;
        text(&mut svg, (x(value), BOTTOM + 16.0), "middle", &short(value));
    }
    text(&mut svg, ((LEFT + RIGHT) / 2.0, BOTTOM + 36.0), "middle", x_name);
    for (at, name) in marks {
        let at = x(*at);
        _ = write!(
            svg,
            "<line x1='{at:.1}' y1='{TOP}' x2='{at:.1}' y2='{BOTTOM}' stroke='#999' stroke-dasharray='4'/>"
        );
        text(&mut svg, (at + 4.0, TOP + 10.0), "start", name);
    }
    for (index, line) in lines.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let step = line.points.len().div_ceil(MAX_POINTS).max(1);
        let path: Vec<String> = line
            .points
            .iter()
            .step_by(step)
            .map(|point| format!("{:.1},{:.1}", x(point.0), y(point.1)))
            .collect();
        _ = write!(
            svg,
            "<polyline fill='none' stroke='{colour}' stroke-width='1.5' points='{}'/>",
            path.join(" ")
        );
        let at = TOP + 12.0 + 18.0 * index as f64;
        _ = write!(
            svg,
            "<rect x='{}' y='{}' width='12' height='4' fill='{colour}'/>",
            RIGHT + 12.0,
            at - 5.0
        );
        text(&mut svg, (RIGHT + 30.0, at), "start", &line.name);
    }
    svg + "</svg>\n"
}

#[must_use]
pub(crate) fn bars(title: &str, y_name: &str, bars: &[Bar]) -> String {
    let y_max = ceiling(bars.iter().map(|bar| bar.value + bar.half_interval).fold(0.0, f64::max));
    let y = |value: f64| BOTTOM - value.clamp(0.0, y_max) / y_max * (BOTTOM - TOP);
    let mut svg = frame(title, y_name, y_max);
    let wide = (WIDTH - 24.0 - LEFT) / bars.len().max(1) as f64;
    for (index, bar) in bars.iter().enumerate() {
        let (left, top) = (LEFT + wide * (index as f64 + 0.15), y(bar.value));
        let (middle, high) = (left + wide * 0.35, BOTTOM - top);
        let (above, below) = (y(bar.value + bar.half_interval), y(bar.value - bar.half_interval));
        _ = write!(
            svg,
            "<rect x='{left:.1}' y='{top:.1}' width='{:.1}' height='{high:.1}' fill='{}'/>\
             <line x1='{middle:.1}' y1='{above:.1}' x2='{middle:.1}' y2='{below:.1}' stroke='#000'/>",
            wide * 0.7,
            COLOURS[0]
        );
        text(&mut svg, (middle, above - 4.0), "middle", &short(bar.value));
        text(&mut svg, (middle, BOTTOM + 16.0 + 14.0 * (index % 2) as f64), "middle", &bar.name);
    }
    svg + "</svg>\n"
}

/// Draws the title, the background, and the left axis with its grid.
fn frame(title: &str, y_name: &str, y_max: f64) -> String {
    let mut svg = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' font-family='sans-serif' font-size='11'>\
         <rect width='{WIDTH}' height='{HEIGHT}' fill='#fff'/>"
    );
    text(&mut svg, (LEFT, 20.0), "start", title);
    for tick in 0..=4 {
        let share = f64::from(tick) / 4.0;
        let y = BOTTOM - share * (BOTTOM - TOP);
        _ = write!(svg, "<line x1='{LEFT}' y1='{y:.1}' x2='{}' y2='{y:.1}' stroke='#ddd'/>", WIDTH - 24.0);
        text(&mut svg, (LEFT - 6.0, y + 4.0), "end", &short(y_max * share));
    }
    let middle = (TOP + BOTTOM) / 2.0;
    _ = write!(
        svg,
        "<text x='14' y='{middle}' text-anchor='middle' transform='rotate(-90 14 {middle})'>{}</text>",
        escaped(y_name)
    );
    svg
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    _ = write!(svg, "<text x='{x:.1}' y='{y:.1}' text-anchor='{anchor}'>{}</text>", escaped(words));
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;")
}

/// Rounds up to 1, 2, 2.5 or 5 times a power of ten.
fn ceiling(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0];
    steps.into_iter().map(|step| step * power).find(|step| *step >= value).unwrap_or(value)
}

/// Formats a value with its significant digits.
fn short(value: f64) -> String {
    let digits = if value.abs() >= 100.0 || value.fract() == 0.0 {
        0
    } else if value.abs() >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_its_words_and_as_many_shapes_as_values() {
        let bar = |name: &str, value| Bar { name: name.to_owned(), value, half_interval: 1.0 };
        let svg = bars("a < b", "ms", &[bar("one", 10.0), bar("two", 20.0)]);
        assert!(svg.contains("a &lt; b") && svg.contains(">one<") && svg.contains(">ms<"));
        assert_eq!(svg.matches("fill='#0072b2'").count(), 2);
        let line =
            ChartLine { name: "n".to_owned(), points: (0..1000).map(|x| (f64::from(x), 1.0)).collect() };
        let svg = lines("t", ("s", "n"), &[line], &[(10.0, "here")]);
        assert!(svg.contains(">here<") && svg.matches("<polyline").count() == 1 && svg.len() < 12_000);
    }

    #[test]
    fn axes_end_at_round_numbers() {
        assert_eq!([0.0, 0.7, 3.0, 99.0, 100.0, 210.0].map(ceiling), [1.0, 1.0, 5.0, 100.0, 100.0, 250.0]);
    }
}
