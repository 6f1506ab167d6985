//! What settings may be: each is read from text, whether TOML or the environment wrote it.

use std::{collections::BTreeSet, fmt, str::FromStr};

use serde::{Deserializer, de};

/// Cores above this are on no machine.
pub(crate) const MAX_CORES: usize = rustix::thread::CpuSet::MAX_CPU;

/// Most workers of a deployment: as many seats the executor's board has.
pub(crate) const MAX_WORKERS: u8 = 64;

/// A number of bytes: `1048576`, `1 MiB` or `1 MB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ByteCount(pub(crate) u64);

impl FromStr for ByteCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let unit_at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(unit_at);
        let factor: u64 = match unit.trim() {
            "" | "B" => 1,
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            "kB" => 1_000,
            "MB" => 1_000_000,
            "GB" => 1_000_000_000,
            other => {
                return Err(format!("`{other}` is no unit of bytes; write B, KiB, MiB, GiB, kB, MB or GB"));
            }
        };
        let number: u64 = number.parse().map_err(|_| format!("`{text}` is no number of bytes"))?;
        number
            .checked_mul(factor)
            .map(Self)
            .ok_or_else(|| format!("`{text}` is more bytes than can be counted"))
    }
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What computes: the host's cores, or a GPU by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Device {
    /// The host's own cores.
    Cpu,
    /// An NVIDIA GPU.
    Cuda(u32),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |digits: &str| match digits.bytes().all(|byte| byte.is_ascii_digit()) {
            true => digits.parse().ok(),
            false => None,
        };
        match text.split_once(':') {
            None if text == "cpu" => Some(Self::Cpu),
            None if text == "cuda" => Some(Self::Cuda(0)),
            Some(("cuda", digits)) => number(digits).map(Self::Cuda),
            _ => None,
        }
        .ok_or_else(|| {
            format!("`{text}` is no device; write cpu, cuda, or cuda:1 for another GPU than the first")
        })
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// What a request does whose adapter the device does not hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ColdStart {
    /// It starts at once: workers compute what has not arrived.
    CpuAssist,
    /// It waits until the adapter is there.
    OnDemand,
    /// There are none: every adapter is on the device before its load is answered.
    Cached,
}

impl FromStr for ColdStart {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "cpu-assist" => Ok(Self::CpuAssist),
            "on-demand" => Ok(Self::OnDemand),
            "cached" => Ok(Self::Cached),
            other => Err(format!("`{other}` is no cold start; write cpu-assist, on-demand or cached")),
        }
    }
}

impl fmt::Display for ColdStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CpuAssist => "cpu-assist",
            Self::OnDemand => "on-demand",
            Self::Cached => "cached",
        })
    }
}

/// Gigabits a second, fractions allowed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Gbps(f64);

impl FromStr for Gbps {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim().parse() {
            Ok(speed) if f64::is_finite(speed) && speed > 0.0 => Ok(Self(speed)),
            _ => Err(format!("`{text}` is no speed; write gigabits a second, as 12.5")),
        }
    }
}

impl fmt::Display for Gbps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How calls of split clients are put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Batching {
    /// They wait a little for company, the longer the larger they are.
    Opportunistic,
    /// Each is computed alone.
    Alone,
    /// All wait for all.
    Lockstep,
}

impl FromStr for Batching {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "opportunistic" => Ok(Self::Opportunistic),
            "none" => Ok(Self::Alone),
            "lockstep" => Ok(Self::Lockstep),
            other => Err(format!("`{other}` is no way of batching; write opportunistic, none or lockstep")),
        }
    }
}

impl fmt::Display for Batching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Opportunistic => "opportunistic",
            Self::Alone => "none",
            Self::Lockstep => "lockstep",
        })
    }
}

/// A factor on how long calls wait for company; 0 for not at all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct WaitFactor(f64);

impl FromStr for WaitFactor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim().parse() {
            Ok(factor) if (0.0..=1000.0).contains(&factor) => Ok(Self(factor)),
            _ => Err(format!("`{text}` is no factor; write a number from 0 to 1000, as 1.5")),
        }
    }
}

impl fmt::Display for WaitFactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Cores as `0-3,8`, ascending, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CoreList(pub(crate) BTreeSet<u32>);

impl FromStr for CoreList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("`{text}` is no list of cores; write it as 0-3,8");
        let mut cores = BTreeSet::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(wrong());
            }
            if last as usize >= MAX_CORES {
                return Err(format!(
                    "core {last} of `{text}` is on no machine; they end at {}",
                    MAX_CORES - 1
                ));
            }
            cores.extend(first..=last);
        }
        Ok(Self(cores))
    }
}

impl fmt::Display for CoreList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for core in &self.0 {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == *core => *last = *core,
                _ => runs.push((*core, *core)),
            }
        }
        let runs = runs.iter().map(|(first, last)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        });
        f.write_str(&runs.collect::<Vec<_>>().join(","))
    }
}

/// How many workers: each takes a process and a seat at the executor's board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkerCount(pub(crate) u8);

impl FromStr for WorkerCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim().parse() {
            Ok(count @ 0..=MAX_WORKERS) => Ok(Self(count)),
            _ => Err(format!("`{text}` is no number of workers from 0 to {MAX_WORKERS}")),
        }
    }
}

impl fmt::Display for WorkerCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The form of the processes' logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people.
    Human,
    /// One JSON object a line.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "human" => Ok(Self::Human),
            "json" => Ok(Self::Json),
            other => Err(format!("`{other}` is no log format; write human or json")),
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Human => "human",
            Self::Json => "json",
        })
    }
}

/// Reads a field through its `FromStr`, whether TOML or the environment wrote it: `8`, `"8"` and `true` all work.
pub(super) fn setting<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr,
    T::Err: fmt::Display,
{
    struct Scalar;

    impl de::Visitor<'_> for Scalar {
        type Value = String;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a string, a number or a boolean")
        }
        fn visit_str<E>(self, text: &str) -> Result<String, E> {
            Ok(text.to_owned())
        }
        fn visit_i64<E>(self, number: i64) -> Result<String, E> {
            Ok(number.to_string())
        }
        fn visit_f64<E>(self, number: f64) -> Result<String, E> {
            Ok(number.to_string())
        }
        fn visit_bool<E>(self, flag: bool) -> Result<String, E> {
            Ok(flag.to_string())
        }
    }

    let text = deserializer.deserialize_any(Scalar)?;
    text.parse().map(Some).map_err(|cause: T::Err| de::Error::custom(format!("`{text}`: {cause}")))
}
