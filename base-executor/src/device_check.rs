//! `base-executor device`: reports a device's properties, and whether it is usable.
//!
//! Exit status: 0 usable, 1 unusable.

use clap::Parser;
use kernels::cuda::{Cuda, CudaError};
use serde_json::{Value, json};
use settings::DeviceChoice;

use crate::{budget, model_loader::cpu};

const GIB: f64 = (1u64 << 30) as f64;

/// Reports the properties of a device, and whether it is usable.
#[derive(Debug, Clone, PartialEq, Eq, Parser)]
#[command(name = "base-executor device", version)]
pub struct ProbeConfig {
    /// Device: cpu, cuda, or cuda:1 for another GPU than the first.
    #[arg(value_name = "DEVICE", env = "HOLOBIONT_DEVICE", default_value = "cpu")]
    pub device: DeviceChoice,
    /// Print one JSON object instead of a line to read.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug)]
struct DeviceReport {
    device: DeviceChoice,
    name: String,
    memory_bytes: u64,
    free_bytes: u64,
    /// Compute capability of a GPU, and the CUDA version of its driver.
    versions: Option<[(u32, u32); 2]>,
}

/// Opens the device with all its kernels, and prints its properties.
///
/// # Errors
/// If the device is unusable; the message gives the reason and the remedy.
pub fn run(config: &ProbeConfig) -> anyhow::Result<()> {
    let found = match config.device {
        DeviceChoice::Cpu => host(),
        DeviceChoice::Cuda { ordinal } => gpu(ordinal)?,
    };
    println!("{}", if config.json { found.json().to_string() } else { found.line() });
    Ok(())
}

fn host() -> DeviceReport {
    let facts = cpu::facts();
    DeviceReport {
        device: DeviceChoice::Cpu,
        name: facts.name,
        memory_bytes: facts.memory_bytes,
        free_bytes: budget::free_bytes(),
        versions: None,
    }
}

fn gpu(ordinal: u32) -> Result<DeviceReport, CudaError> {
    let cuda = Cuda::open(ordinal)?;
    let info = cuda.info();
    Ok(DeviceReport {
        device: DeviceChoice::Cuda { ordinal },
        name: info.name.clone(),
        memory_bytes: info.memory_bytes as u64,
        free_bytes: cuda.free_bytes()? as u64,
        versions: Some([info.capability, info.driver]),
    })
}

impl DeviceReport {
    fn line(&self) -> String {
        let Self { device, name, memory_bytes, free_bytes, versions } = self;
        let gib = |bytes: &u64| format!("{:.1} GiB", *bytes as f64 / GIB);
        let versions = versions.map_or_else(String::new, |[(major, minor), (driver, point)]| {
            format!(", compute capability {major}.{minor}, CUDA {driver}.{point}")
        });
        format!("{device}: {name}, {} free of {}{versions}", gib(free_bytes), gib(memory_bytes))
    }

    fn json(&self) -> Value {
        let version = |(major, minor): (u32, u32)| format!("{major}.{minor}");
        json!({
            "device": self.device.to_string(),
            "name": self.name,
            "memory_bytes": self.memory_bytes,
            "memory_free_bytes": self.free_bytes,
            "capability": self.versions.map(|[capability, _]| version(capability)),
            "cuda": self.versions.map(|[_, driver]| version(driver)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_described_in_a_line_and_as_an_object() {
        let mut found = DeviceReport {
            device: DeviceChoice::Cuda { ordinal: 1 },
            name: "A GPU".to_owned(),
            memory_bytes: 3 << 30,
            free_bytes: 1 << 30,
            versions: Some([(9, 0), (13, 0)]),
        };
        let line = "cuda:1: A GPU, 1.0 GiB free of 3.0 GiB, compute capability 9.0, CUDA 13.0";
        assert_eq!(found.line(), line);
        assert_eq!(found.json()["capability"], "9.0");
        found.versions = None;
        assert!(found.line().ends_with("3.0 GiB") && found.json()["cuda"].is_null());
    }
}
