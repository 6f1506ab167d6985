//! What can be measured.

use clap::ValueEnum;

/// A benchmark, or all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Name {
    /// What the machine can do at most.
    Limits,
    /// One stream, tokens a second.
    Decode,
    /// A prompt of 512 tokens, tokens a second.
    Prefill,
    /// 1 to 16 streams of the base model.
    Batch,
    /// 8 streams on 8 adapters, through HTTP.
    Adapters,
    /// Decode beside a busy process.
    Neighbour,
    /// Start to first token, and memory.
    Startup,
    /// Five hundred requests at once.
    Burst,
    /// Ten times as many requests as can be served.
    Overload,
    /// How far rounding takes answers from those of f32, and what it brings.
    Accuracy,
    /// One adapted layer beside PyTorch.
    Xab,
    /// Rows to worker processes and back, beside Unix sockets.
    Board,
    /// Requests on adapters that are not on the device, in the three modes of a cold start.
    ColdStart,
    /// A decode step in the three modes, once every adapter has arrived.
    DecodeModes,
    /// A single cold prompt by its length: starting at once beside waiting.
    Crossover,
    /// Conversations whose keys and values left the device, from the disk beside computed anew.
    Cache,
    /// A split client beside the resident engine, and what a layer call costs.
    Split,
    /// Eight split clients under each batching policy, and a fast one beside a slow one.
    SplitBatching,
    /// Split clients and resident requests, together and one after the other.
    SplitMixed,
    /// What masking costs a split client, and what exact arithmetic costs.
    SplitMasking,
    /// A split client that drafts at home, over emulated round trips.
    Speculate,
    /// Answers whose text repeats or does not, with drafts and without, and llama.cpp's lookup.
    Drafts,
    /// Jobs that learn over one base, beside PEFT.
    Tune,
    /// Jobs beside requests that decode.
    TuneMixed,
    /// Two executors behind one gateway, beside one.
    Executors,
    /// What ranks cost steps and prompts, padded and not, told by the performance model.
    PerfModel,
    /// Tenants beside one that floods, and beside each other by their weights.
    Fairness,
    /// Seven tenants beside one that attacks every door.
    Hostile,
    /// Three executors of unequal speed, for real and as `holobiont simulate` forecasts.
    Forecast,
    /// Hosts behind Envoy that share a registry and a bucket, part by part.
    Fleet,
    /// What the endpoint picker takes to say which host a request goes to.
    Picker,
    /// An executor behind a TLS door, beside one behind its ipc socket.
    Far,
    /// A base that comes from a disk, beside one in memory.
    Stream,
    /// Answers of a form beside free ones.
    Grammar,
    /// The same through HTTP, beside llama.cpp's.
    Forms,
    /// The pass on more cores than there are, rehearsed and simulated.
    ManyCores,
    /// A GPU's decode steps, beside its memory's bandwidth and PyTorch.
    CudaDecode,
    /// A GPU's long prompts, beside the rate of its matrix unit.
    CudaPrefill,
    /// What adapters cost on a GPU, by ranks.
    CudaLora,
    /// The link between host and GPU.
    CudaLink,
    /// Prompts on cold adapters, workers asked in the GPU's stream beside through the host.
    CudaFused,
    /// Requests on cold adapters over the real link to a GPU.
    CudaCold,
    /// What steps and copies take, and the simulator's cost model that fits it.
    Costs,
    /// Five workloads, for real and by the simulator with those costs.
    Reality,
    /// Every one of them but `xab`, which needs PyTorch, `costs`, `reality` and `forecast`, `fleet`, which needs servers that hosts share, and those of a GPU.
    All,
}

impl Name {
    pub(super) const EACH: [Self; 33] = [
        Self::Limits,
        Self::Decode,
        Self::Prefill,
        Self::Batch,
        Self::Adapters,
        Self::Neighbour,
        Self::Startup,
        Self::Accuracy,
        Self::Burst,
        Self::Overload,
        Self::Board,
        Self::DecodeModes,
        Self::ColdStart,
        Self::Crossover,
        Self::Cache,
        Self::Split,
        Self::SplitBatching,
        Self::SplitMixed,
        Self::SplitMasking,
        Self::Speculate,
        Self::Drafts,
        Self::Tune,
        Self::TuneMixed,
        Self::Executors,
        Self::PerfModel,
        Self::Fairness,
        Self::Hostile,
        Self::Picker,
        Self::Far,
        Self::Stream,
        Self::Grammar,
        Self::Forms,
        Self::ManyCores,
    ];

    /// Whether it is measured on a GPU, with weights of its own.
    pub(crate) fn is_for_gpu(self) -> bool {
        self.shares_model() || matches!(self, Self::CudaLink | Self::CudaFused | Self::CudaCold)
    }

    /// Whether it is measured on a model in this process.
    pub(crate) fn shares_model(self) -> bool {
        matches!(self, Self::CudaDecode | Self::CudaPrefill | Self::CudaLora)
    }

    /// Whether it is compared with llama.cpp.
    pub(crate) fn needs_llama_cpp(self) -> bool {
        matches!(
            self,
            Self::Decode
                | Self::Prefill
                | Self::Batch
                | Self::Adapters
                | Self::Neighbour
                | Self::Startup
                | Self::Accuracy
                | Self::Burst
                | Self::Overload
                | Self::Drafts
                | Self::Forms
        )
    }
}
