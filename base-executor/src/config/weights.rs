//! Where the weights are while they are served.

use clap::{Args, ValueEnum};
use model::weights::streamed::Readahead;
use settings::{ByteCount, DeviceChoice, Gbps};

use super::ExecutorConfigError;

/// Memory for weights, and how the rest of them is read.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct WeightFlags {
    /// Memory for weights [default: all of them are in memory].
    #[arg(long = "resident-weight-bytes", value_name = "BYTES")]
    pub bytes: Option<ByteCount>,
    /// Whether weights are read ahead of the pass, or only when it has come to them, for comparison.
    #[arg(
        long = "weight-reads",
        value_name = "WHEN",
        env = "HOLOBIONT_WEIGHT_READS",
        default_value = "ahead"
    )]
    pub reads: WeightReads,
    /// Emulate a disk of this many gigabits per second, for experiments.
    #[arg(long = "weight-disk-gbps", value_name = "GBIT_PER_S", env = "HOLOBIONT_WEIGHT_DISK_GBPS")]
    pub disk_gbps: Option<Gbps>,
}

/// When weights are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WeightReads {
    /// While what comes before them is computed.
    Ahead,
    /// When they are needed: load, then compute.
    Std,
}

impl From<WeightReads> for Readahead {
    fn from(reads: WeightReads) -> Self {
        match reads {
            WeightReads::Ahead => Self::Next,
            WeightReads::Std => Self::Nothing,
        }
    }
}

impl WeightFlags {
    /// Checks them beside the `device`.
    pub(super) fn check(&self, device: DeviceChoice) -> Result<(), ExecutorConfigError> {
        match (self.bytes, device) {
            (Some(_), DeviceChoice::Cuda { .. }) => Err(ExecutorConfigError::StreamedToGpu),
            _ => Ok(()),
        }
    }
}
