//! Settings of streamed weights.

use clap::{Args, ValueEnum};
use model::weights::streamed::Readahead;
use settings::{ByteCount, DeviceChoice, Gbps};

use super::ExecutorConfigError;

#[derive(Debug, Clone, PartialEq, Args)]
pub struct WeightFlags {
    /// Memory for weights [default: all weights are in memory].
    #[arg(long = "resident-weight-bytes", value_name = "BYTES")]
    pub bytes: Option<ByteCount>,
    /// Time of weight reads: ahead of the pass, or only when the pass needs them, for comparison.
    #[arg(
        long = "weight-reads",
        value_name = "WHEN",
        env = "HOLOBIONT_WEIGHT_READS",
        default_value = "ahead"
    )]
    pub reads: WeightReads,
    /// Bandwidth of an emulated disk, in gigabits per second, for experiments.
    #[arg(long = "weight-disk-gbps", value_name = "GBIT_PER_S", env = "HOLOBIONT_WEIGHT_DISK_GBPS")]
    pub disk_gbps: Option<Gbps>,
}

/// The time at which weights are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WeightReads {
    /// Read the next weights while the pass computes the previous ones.
    Ahead,
    /// Read weights when the pass needs them.
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
    pub(super) fn check(&self, device: DeviceChoice) -> Result<(), ExecutorConfigError> {
        match (self.bytes, device) {
            (Some(_), DeviceChoice::Cuda { .. }) => Err(ExecutorConfigError::StreamedToGpu),
            _ => Ok(()),
        }
    }
}
