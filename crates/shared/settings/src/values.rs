//! Types of setting values, each read from the text of a flag, an environment variable or a deployment file.

use std::{collections::BTreeSet, fmt, num::NonZeroU32, str::FromStr};

/// Exclusive upper bound of core numbers: the size of the kernel's affinity mask.
pub const MAX_CORES: u32 = 1024;

/// Maximum number of workers of a deployment: the number of seats at the executor's board.
pub const MAX_WORKERS: u8 = 64;

/// Number of bytes, written as `1048576`, `1 MiB`, `1M` or `1 MB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteCount(pub u64);

impl ByteCount {
    /// Returns the count as `usize`, saturating at `usize::MAX`.
    #[must_use]
    pub fn as_usize(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl FromStr for ByteCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let unit_at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(unit_at);
        let factor: u64 = match unit.trim() {
            "" | "B" => 1,
            "KiB" | "K" => 1 << 10,
            "MiB" | "M" => 1 << 20,
            "GiB" | "G" => 1 << 30,
            "kB" => 1_000,
            "MB" => 1_000_000,
            "GB" => 1_000_000_000,
            other => {
                return Err(format!(
                    "`{other}` is not a unit of bytes; write B, KiB, MiB, GiB, kB, MB or GB"
                ));
            }
        };
        let number: u64 = number
            .parse()
            .map_err(|_| format!("`{text}` is not a number of bytes; write a number such as 512MiB"))?;
        number
            .checked_mul(factor)
            .map(Self)
            .ok_or_else(|| format!("`{text}` exceeds the largest number of bytes, 2^64 - 1"))
    }
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Part of a memory size: a number of bytes, or one of `N` equal parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryFraction {
    /// Absolute number of bytes.
    Bytes(ByteCount),
    /// `1/N` of the memory size.
    OneOf(NonZeroU32),
}

impl MemoryFraction {
    /// Returns the number of bytes of this part of `all`, at most `all`.
    #[must_use]
    pub fn bytes_of(self, all: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.0.min(all),
            Self::OneOf(parts) => all / u64::from(parts.get()),
        }
    }
}

impl FromStr for MemoryFraction {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim().strip_prefix("1/") {
            Some(parts) => parts.parse().map(Self::OneOf).map_err(|_| {
                format!("`{text}` is not a fraction; write a fraction such as 1/2, or bytes such as 4GiB")
            }),
            None => text.parse().map(Self::Bytes),
        }
    }
}

impl fmt::Display for MemoryFraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => bytes.fmt(f),
            Self::OneOf(parts) => write!(f, "1/{parts}"),
        }
    }
}

/// Device that computes the base model: the host's cores, or a GPU by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// Cores of the host's CPU.
    Cpu,
    /// NVIDIA GPU with the given ordinal.
    Cuda {
        /// Number of the GPU in the driver's order, from 0.
        ordinal: u32,
    },
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("`{text}` is not a device; write cpu, cuda, or cuda:1 for the second GPU");
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda { ordinal: 0 }),
            Some(("cuda", digits)) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                digits.parse().map(|ordinal| Self::Cuda { ordinal }).map_err(|_| wrong())
            }
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda { ordinal } => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Maximum number of devices that hold one base together.
pub const MAX_GROUP_DEVICES: usize = 16;

/// Devices that hold one base together, each with its cores, written as `cpu:0-31 cpu:32-63`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceGroup(Vec<CoreList>);

impl DeviceGroup {
    /// Returns the cores of each device; the first is the leader's.
    #[must_use]
    pub fn devices(&self) -> &[CoreList] {
        &self.0
    }

    /// Returns the cores of all devices.
    #[must_use]
    pub fn cores(&self) -> CoreList {
        CoreList(self.0.iter().flat_map(|cores| &cores.0).copied().collect())
    }
}

impl FromStr for DeviceGroup {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let devices = text.split_whitespace().map(cores_of_device).collect::<Result<Vec<_>, _>>()?;
        let (first, all) = (devices.first(), Self(devices.clone()).cores().0.len());
        let Some(first) = first.filter(|_| devices.len() <= MAX_GROUP_DEVICES) else {
            return Err(format!(
                "{} devices are not a group; write 1 to {MAX_GROUP_DEVICES}, such as `cpu:0-31 cpu:32-63`",
                devices.len()
            ));
        };
        if devices.iter().any(|cores| cores.0.len() != first.0.len()) {
            return Err(format!(
                "the devices of `{text}` have unequal numbers of cores; the slowest would delay all, so give \
                 each as many"
            ));
        }
        if all != devices.len() * first.0.len() {
            return Err(format!("two devices of `{text}` share a core; give each core to one device"));
        }
        Ok(Self(devices))
    }
}

/// Reads one device of a group.
fn cores_of_device(text: &str) -> Result<CoreList, String> {
    match text.split_once(':') {
        Some(("cpu", cores)) => cores.parse(),
        _ if text.split(':').next() == Some("cuda") => Err(format!(
            "`{text}` cannot be in a group: only CPU devices hold a base together; run one executor for each \
             GPU"
        )),
        _ => Err(format!("`{text}` is not a device of a group; write its cores, such as cpu:0-31")),
    }
}

impl fmt::Display for DeviceGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = self.0.iter().map(|cores| format!("cpu:{cores}"));
        f.write_str(&devices.collect::<Vec<_>>().join(" "))
    }
}

/// Speed in gigabits per second, fractions allowed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gbps(f64);

impl Gbps {
    const BYTES_PER_GIGABIT: f64 = 125e6;

    /// Returns the speed in bytes per second, at least 1.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "at least 1; a float beyond the integers becomes the largest of them"
    )]
    pub fn bytes_per_s(self) -> u64 {
        (self.0 * Self::BYTES_PER_GIGABIT) as u64
    }
}

impl FromStr for Gbps {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim().parse() {
            Ok(speed) if f64::is_finite(speed) && speed * Self::BYTES_PER_GIGABIT >= 1.0 => Ok(Self(speed)),
            _ => Err(format!("`{text}` is not a bandwidth; write a number of gigabits per second, as 12.5")),
        }
    }
}

impl fmt::Display for Gbps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Factor of the time that a layer call waits to be batched with others, from 0 (no wait) to 1000.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WaitFactor(pub f64);

impl FromStr for WaitFactor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim().parse() {
            Ok(factor) if (0.0..=1000.0).contains(&factor) => Ok(Self(factor)),
            _ => Err(format!("`{text}` is not a factor; write a number from 0 to 1000, as 1.5")),
        }
    }
}

impl fmt::Display for WaitFactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Share from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fraction(pub f64);

impl FromStr for Fraction {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim().parse() {
            Ok(share) if (0.0..=1.0).contains(&share) => Ok(Self(share)),
            _ => Err(format!("`{text}` is not a share; write a number from 0 to 1, as 0.05")),
        }
    }
}

impl fmt::Display for Fraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Set of cores, written as `0-3,8` in ascending order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoreList(pub BTreeSet<u32>);

impl FromStr for CoreList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("`{text}` is not a list of cores; write a list such as 0-3,8");
        let mut cores = BTreeSet::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(wrong());
            }
            if last >= MAX_CORES {
                let end = MAX_CORES - 1;
                return Err(format!(
                    "core {last} of `{text}` is too large; the largest core number is {end}"
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

/// Number of workers; each takes a process and a seat at the executor's board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerCount(pub u8);

impl FromStr for WorkerCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim().parse() {
            Ok(count @ 0..=MAX_WORKERS) => Ok(Self(count)),
            _ => Err(format!("`{text}` is not a number of workers; write a number from 0 to {MAX_WORKERS}")),
        }
    }
}

impl fmt::Display for WorkerCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

crate::declaration::shown_as_read!(
    ByteCount,
    CoreList,
    DeviceChoice,
    DeviceGroup,
    Gbps,
    MemoryFraction,
    Fraction,
    WaitFactor,
    WorkerCount
);

/// Maximum length of a process's name in bytes.
pub const MAX_PROCESS_NAME_BYTES: usize = 32;

/// Whether `name` may name a process in files, units, labels and on command lines.
#[must_use]
pub fn is_process_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let ends = !name.starts_with('-') && !name.ends_with('-');
    (1..=MAX_PROCESS_NAME_BYTES).contains(&name.len()) && ends && name.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts_are_read_with_and_without_units_and_never_wrap() {
        for (text, bytes) in [
            ("12", 12),
            ("0B", 0),
            ("2GiB", 2 << 30),
            ("4G", 4 << 30),
            ("4GB", 4_000_000_000),
            ("256M", 256 << 20),
            (" 3 kB ", 3000),
            ("3K", 3 << 10),
            ("3MB", 3_000_000),
        ] {
            assert_eq!(text.parse(), Ok(ByteCount(bytes)), "{text}");
        }
        for wrong in ["", "MiB", "1.5 GiB", "-3", "3 parsec", "1TiB", "99999999999 GiB"] {
            assert!(wrong.parse::<ByteCount>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_part_of_memory_is_bytes_or_one_of_so_many_and_never_more_than_there_is() {
        for (text, written, bytes) in
            [("1/3", "1/3", 33), (" 1/1", "1/1", 100), ("2kB", "2000", 100), ("7", "7", 7)]
        {
            let part: MemoryFraction = text.parse().unwrap();
            assert_eq!((part.to_string().as_str(), part.bytes_of(100)), (written, bytes));
        }
        for wrong in ["1/0", "2/3", "1/", "1/x", "half"] {
            assert!(wrong.parse::<MemoryFraction>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn lists_of_cores_are_read_and_written_back() {
        for (text, written) in [("0-2,5", "0-2,5"), ("3, 1 ,2", "1-3"), ("7", "7"), ("0-2,2,5", "0-2,5")] {
            assert_eq!(text.parse::<CoreList>().unwrap().to_string(), written);
        }
        for wrong in ["", "x", "3-1", "0-", "0-99999999999", "0-4000000000", "1,,2"] {
            assert!(wrong.parse::<CoreList>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_device_is_named_by_its_kind_and_number() {
        let cuda = |ordinal| DeviceChoice::Cuda { ordinal };
        for (text, device) in [("cpu", DeviceChoice::Cpu), ("cuda:0", cuda(0)), ("cuda:3", cuda(3))] {
            assert_eq!((text.parse(), device.to_string().as_str()), (Ok(device), text));
        }
        assert_eq!("cuda".parse(), Ok(cuda(0)));
        for wrong in ["", "gpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda:99999999999"] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn devices_of_a_group_have_equally_many_cores_of_their_own() {
        for text in ["cpu:0-1", "cpu:0 cpu:1", "cpu:0-3,8 cpu:4-7,9", "cpu:2 cpu:1 cpu:0"] {
            assert_eq!(text.parse::<DeviceGroup>().unwrap().to_string(), text);
        }
        let group: DeviceGroup = " cpu:2-3\ncpu:0-1 ".parse().unwrap();
        assert_eq!(group.devices()[0], "2-3".parse().unwrap());
        assert_eq!(group.cores(), "0-3".parse().unwrap());
        let many = (0..=MAX_GROUP_DEVICES).map(|core| format!("cpu:{core} ")).collect::<String>();
        for (wrong, reason) in [
            ("", "0 devices"),
            (many.as_str(), "17 devices"),
            ("cpu", "not a device of a group"),
            ("gpu:0 gpu:1", "not a device of a group"),
            ("cpu:0 cuda:1", "run one executor for each GPU"),
            ("cpu:0-1 cpu:2", "unequal numbers of cores"),
            ("cpu:0-1 cpu:1-2", "share a core"),
            ("cpu:x", "not a list of cores"),
        ] {
            let refused = wrong.parse::<DeviceGroup>().unwrap_err();
            assert!(refused.contains(reason), "{wrong:?}: {refused}");
        }
    }

    #[test]
    fn an_emulated_link_has_a_speed_in_bits() {
        assert_eq!("0.8".parse::<Gbps>().unwrap().bytes_per_s(), 100_000_000);
        for wrong in ["0", "nan", "inf", "1e-9", "-1"] {
            assert!(wrong.parse::<Gbps>().is_err(), "{wrong}");
        }
    }
}
