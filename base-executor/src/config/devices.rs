//! Settings of a base that several devices hold together.

use clap::Args;
use settings::{CoreList, DeviceChoice, DeviceGroup, DeviceSplit, DraftChoice};

use super::{EngineKind, ExecutorConfig, ExecutorConfigError};

/// The devices of a group.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct DeviceFlags {
    /// CPU devices that hold the base together, one process each, such as "cpu:0-31 cpu:32-63".
    #[arg(long, value_name = "LIST")]
    pub devices: Option<DeviceGroup>,
    /// Division of the weights among these devices.
    #[arg(long, value_name = "SPLIT", default_value = "outputs")]
    pub device_split: DeviceSplit,
}

impl DeviceFlags {
    /// Returns the devices, if there is more than one.
    #[must_use]
    pub fn several(&self) -> Option<&DeviceGroup> {
        self.devices.as_ref().filter(|group| group.devices().len() > 1)
    }

    /// Returns the cores of the first device.
    #[must_use]
    pub fn own_cores(&self) -> Option<&CoreList> {
        self.devices.as_ref()?.devices().first()
    }

    /// Returns the cores of the other devices.
    #[must_use]
    pub fn other_cores(&self) -> Vec<usize> {
        let others = self.devices.iter().flat_map(|group| group.devices().iter().skip(1));
        others.flat_map(|cores| &cores.0).map(|&core| core as usize).collect()
    }

    /// Checks the group against the other settings.
    pub(super) fn check(&self, config: &ExecutorConfig) -> Result<(), ExecutorConfigError> {
        if self.devices.is_none() {
            return Ok(());
        }
        let faults = [
            (config.cores.is_some(), ExecutorConfigError::GroupCores),
            (config.device != DeviceChoice::Cpu, ExecutorConfigError::GroupOfGpu),
            (config.weights.bytes.is_some(), ExecutorConfigError::GroupStreams),
            (config.engine == EngineKind::None, ExecutorConfigError::GroupWithoutEngine),
            (config.draft == DraftChoice::EarlyExit, ExecutorConfigError::GroupDrafts),
        ];
        let first = faults.into_iter().find(|(is_wrong, _)| *is_wrong);
        first.map_or(Ok(()), |(_, fault)| Err(fault))
    }
}
