//! What settings may be: each is read from text, whether the command line or the environment wrote it.

use std::{fmt, str::FromStr};

/// A number of bytes, written plainly or with a unit: `1048576`, `512MiB`, `2GB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteCount(pub u64);

impl FromStr for ByteCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let factor: u64 = match unit.trim() {
            "" | "B" => 1,
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            "kB" => 1000,
            "MB" => 1_000_000,
            "GB" => 1_000_000_000,
            other => return Err(format!("`{other}` is no unit; use KiB, MiB, GiB, kB, MB or GB")),
        };
        let number: u64 = number.parse().map_err(|_| "write a whole number, such as 512MiB".to_owned())?;
        number.checked_mul(factor).map(Self).ok_or_else(|| "more bytes than there are".to_owned())
    }
}

/// Numbers of cores, ascending: `0,1` or `0-3,6`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoreList(pub Vec<usize>);

impl CoreList {
    /// Largest number a core may have: what the kernel's affinity mask holds.
    const LAST_CORE: usize = 1023;
}

impl FromStr for CoreList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let core = |text: &str| match text.trim().parse::<usize>() {
            Ok(core) if core <= Self::LAST_CORE => Ok(core),
            _ => Err(format!(
                "`{text}` is no core; write numbers up to {} such as 0,1 or 0-3",
                Self::LAST_CORE
            )),
        };
        let mut cores = Vec::new();
        for part in text.split(',') {
            match part.split_once('-') {
                Some((first, last)) => cores.extend(core(first)?..=core(last)?),
                None => cores.push(core(part)?),
            }
        }
        cores.sort_unstable();
        cores.dedup();
        if cores.is_empty() {
            Err("no core is named; write numbers such as 0,1".to_owned())
        } else {
            Ok(Self(cores))
        }
    }
}

/// What the base is computed on: `cpu`, `cuda`, or `cuda:1` where there are several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The host's own cores.
    Cpu,
    /// An NVIDIA GPU.
    Cuda {
        /// Its number, as the driver counts.
        ordinal: u32,
    },
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong =
            || format!("`{text}` is no device; write cpu, cuda, or cuda:1 for another GPU than the first");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_with_or_without_a_unit() {
        assert_eq!("4096".parse(), Ok(ByteCount(4096)));
        assert_eq!("2GiB".parse(), Ok(ByteCount(2 << 30)));
        assert_eq!("3MB".parse(), Ok(ByteCount(3_000_000)));
        for wrong in ["", "GiB", "-1", "1.5GiB", "1TiB", "99999999999GiB"] {
            assert!(wrong.parse::<ByteCount>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn cores_are_numbers_and_ranges() {
        assert_eq!("1,0".parse(), Ok(CoreList(vec![0, 1])));
        assert_eq!("0-2,2,5".parse(), Ok(CoreList(vec![0, 1, 2, 5])));
        for wrong in ["", "a", "3-1", "0-99999999999", "1,,2"] {
            assert!(wrong.parse::<CoreList>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_device_is_named_by_its_kind_and_number() {
        let devices = [("cpu", DeviceChoice::Cpu), ("cuda:0", DeviceChoice::Cuda { ordinal: 0 })];
        for (text, device) in devices {
            assert_eq!((text.parse(), device.to_string().as_str()), (Ok(device), text));
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda { ordinal: 0 }));
        assert_eq!("cuda:7".parse(), Ok(DeviceChoice::Cuda { ordinal: 7 }));
        for wrong in ["", "gpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda:99999999999"] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }
}
