//! Cost of computing rows in other processes: the board beside Unix stream sockets.
//!
//! 16 rows of 4096 values (256 KiB) go out and as many sums come back; the workers compute nothing. Either
//! each worker gets its own rows (row slices), or each gets all rows and returns its columns (column slices).
//! The board holds the rows once for all workers; sockets need one copy per worker.

mod board_transport;
mod round_trip;
mod sockets;
pub(crate) mod worker;

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use self::{
    board_transport::BoardTransport,
    round_trip::{MessageShape, RoundTrip, RowShare},
    sockets::Sockets,
};
use crate::{
    config::SuiteConfig,
    machine::{Cores, pin},
    measure::{Samples, alternate},
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

const ROWS: usize = 16;
const WIDTH: usize = 4096;
/// Round trips of a measurement, and warm-up trips before them.
const TRIPS: usize = 400;
const WARM_UP_TRIPS: usize = 50;
const RUNS: usize = 9;
/// Pause between the two sides; workers spin less than this after their last job.
const PAUSE: Duration = Duration::from_millis(3);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessPlacement {
    /// The producer runs on the first core, the workers on the other cores in turn.
    Pinned,
    Anywhere,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BoardCase {
    workers: usize,
    share: RowShare,
    place: ProcessPlacement,
}

/// Median and 99th percentile of the measurements of one side, in microseconds.
#[derive(Debug, Clone, PartialEq, Default)]
struct LatencyStats {
    medians: Vec<f64>,
    tails: Vec<f64>,
}

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let numbers = cores.numbers();
    ensure!(numbers.len() > 1, "the board is measured between cores; give --threads 2 or --cores");
    let mut comparisons = Vec::new();
    for share in [RowShare::OwnRows, RowShare::AllRows] {
        let mut curve = Vec::new();
        for workers in counts(numbers.len()) {
            let case = BoardCase { workers, share, place: ProcessPlacement::Pinned };
            let sides = measure(config, case, numbers)?;
            comparisons.extend(case.compare(&sides, numbers.len())?);
            curve.push((workers, sides));
        }
        comparisons.push(slope(share, &curve)?);
        let crowd = BoardCase { workers: 8, share, place: ProcessPlacement::Anywhere };
        comparisons.extend(crowd.compare(&measure(config, crowd, numbers)?, numbers.len())?);
    }
    Ok(comparisons)
}

/// Worker counts 1, 2, 4, 8, and on larger machines one per core except the first, up to the number of rows.
fn counts(cores: usize) -> Vec<usize> {
    let most = ROWS.min((cores - 1).max(8));
    (0..).map(|power| 1 << power).take_while(|&count| count <= most).collect()
}

/// Measures both sides in alternation and returns ours, then the peer's.
fn measure(config: &SuiteConfig, case: BoardCase, cores: &[usize]) -> Result<[LatencyStats; 2]> {
    let shape = MessageShape { rows: ROWS, width: WIDTH, share: case.share };
    let homes: Vec<Option<usize>> = (0..case.workers)
        .map(|worker| match case.place {
            ProcessPlacement::Pinned => Some(cores[1 + worker % (cores.len() - 1)]),
            ProcessPlacement::Anywhere => None,
        })
        .collect();
    let mut board = BoardTransport::start(shape, &homes)?;
    let mut sockets = Sockets::start(shape, &homes)?;
    let home = (case.place == ProcessPlacement::Pinned).then_some(cores[0]);
    thread::scope(|scope| {
        let here = scope.spawn(|| {
            home.map_or(Ok(()), pin)?;
            let runs = config.runs.max(RUNS);
            alternate(runs, [Box::new(|_| trips(&mut board)), Box::new(|_| trips(&mut sockets))])
        });
        let sides = here.join().expect("the measuring thread panicked")?;
        Ok(sides.map(|runs| {
            let (medians, tails) = runs.into_iter().unzip();
            LatencyStats { medians, tails }
        }))
    })
}

/// Returns median and 99th percentile of [`TRIPS`] trips, in microseconds.
fn trips(side: &mut dyn RoundTrip) -> Result<(f64, f64)> {
    let mut x: Vec<f32> = (0..ROWS * WIDTH).map(|number| number as f32).collect();
    let mut times = Vec::with_capacity(TRIPS);
    thread::sleep(PAUSE);
    side.begin();
    for trip in 0..WARM_UP_TRIPS + TRIPS {
        // Each trip has a new mark, since a missing reply would otherwise look right.
        let mark = trip as f32 + 0.5;
        x[0] = mark;
        let started = Instant::now();
        side.trip(&x)?;
        let took = started.elapsed();
        ensure!(side.sums(0) == mark, "trip {trip} brought something else back");
        if trip >= WARM_UP_TRIPS {
            times.push(took.as_secs_f64() * 1e6);
        }
    }
    side.end();
    let times = Samples::new(times)?;
    Ok((times.median(), times.quantile(0.99)))
}

impl BoardCase {
    fn compare(&self, [ours, peer]: &[LatencyStats; 2], cores: usize) -> Result<[Comparison; 2]> {
        let place = match self.place {
            ProcessPlacement::Pinned => "pinned",
            ProcessPlacement::Anywhere => "unpinned",
        };
        let (workers, share) = (self.workers, self.share.name());
        let case =
            format!("{ROWS} x {WIDTH} there and back, workers: {workers}, {share}, {place}, cores: {cores}");
        let target = match *self {
            Self { workers: 1, .. } => Some(BenchTarget::RatioAtLeast(4.0)),
            Self { workers: 8, .. } if cores == 2 => Some(BenchTarget::RatioAtLeast(1.0)),
            _ => None,
        };
        let row = |case: String, ours: &[f64], peer: &[f64], target| {
            anyhow::Ok(Comparison {
                bench: "board",
                case,
                unit: "us",
                better: Better::Lower,
                ours: Samples::new(ours.to_vec())?,
                rival: PeerSamples {
                    name: "Unix stream sockets".to_owned(),
                    format: "f32".to_owned(),
                    samples: Samples::new(peer.to_vec())?,
                },
                target,
            })
        };
        let tail = format!("{case}, p99");
        Ok([row(case, &ours.medians, &peer.medians, target)?, row(tail, &ours.tails, &peer.tails, None)?])
    }
}

/// Cost of one more worker on the board, as a share of the cost through sockets.
fn slope(share: RowShare, curve: &[(usize, [LatencyStats; 2])]) -> Result<Comparison> {
    let runs = curve.iter().map(|(_, [ours, peer])| ours.medians.len().min(peer.medians.len()));
    let slopes = |side: usize| -> Vec<f64> {
        let points = |run: usize| curve.iter().map(move |(n, sides)| (*n as f64, sides[side].medians[run]));
        (0..runs.clone().min().unwrap_or(0)).map(|run| slope_of(points(run))).collect()
    };
    Ok(Comparison {
        bench: "board",
        case: format!("{ROWS} x {WIDTH} there and back, {}, each further worker", share.name()),
        unit: "us",
        better: Better::Lower,
        ours: Samples::new(slopes(0))?,
        rival: PeerSamples {
            name: "Unix stream sockets".to_owned(),
            format: "f32".to_owned(),
            samples: Samples::new(slopes(1))?,
        },
        target: Some(BenchTarget::ShareAtMost(0.7)),
    })
}

fn slope_of(points: impl Iterator<Item = (f64, f64)>) -> f64 {
    let points: Vec<(f64, f64)> = points.collect();
    let count = points.len() as f64;
    let mean = |pick: fn(&(f64, f64)) -> f64| points.iter().map(pick).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let rise: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    let run: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    rise / run
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slope_is_that_of_the_line() {
        let points = [1.0, 2.0, 4.0, 8.0].map(|x| (x, 3.0 * x + 20.0));
        assert!((slope_of(points.into_iter()) - 3.0).abs() < 1e-9);
    }

    #[test]
    fn larger_machines_have_more_workers() {
        assert_eq!(counts(2), [1, 2, 4, 8]);
        assert_eq!(counts(64), [1, 2, 4, 8, 16]);
    }
}
