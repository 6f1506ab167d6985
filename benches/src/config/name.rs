//! Names of the benchmarks.

use clap::ValueEnum;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Name {
    /// Measured limits of this machine.
    Limits,
    /// One stream: tokens per second.
    Decode,
    /// A prompt of 512 tokens: tokens per second.
    Prefill,
    /// 1 to 16 streams of the base.
    Batch,
    /// 8 streams on 8 adapters, over HTTP.
    Adapters,
    /// Decode beside a busy process.
    Neighbour,
    /// Time from start to first token, and memory.
    Startup,
    /// Five hundred simultaneous requests.
    Burst,
    /// Ten times as many requests as the server can serve.
    Overload,
    /// Divergence from f32 by rounding beside llama.cpp's, and the speed it buys.
    Accuracy,
    /// Divergence from f32 of each precision.
    Divergence,
    /// Prompts and batches beside OpenVINO GenAI.
    Openvino,
    /// Prompts, streams and adapters over HTTP, beside vLLM on a CPU.
    Vllm,
    /// One adapted layer beside PyTorch.
    Xab,
    /// Rows to worker processes and back, beside Unix sockets.
    Board,
    /// Requests on adapters that are not on the device, in the three modes of a cold start.
    ColdStart,
    /// A decode step in the three modes, once all adapters are on the device.
    DecodeModes,
    /// A single cold prompt by its length: immediate start beside waiting.
    Crossover,
    /// Conversations with evicted KV cache: read from disk beside computed again.
    Cache,
    /// A split client beside the resident engine, and the overhead of a layer call.
    Split,
    /// Eight split clients under each batching policy, and a fast one beside a slow one.
    SplitBatching,
    /// Split clients and resident requests, together and in sequence.
    SplitMixed,
    /// Cost of masking and of exact arithmetic for a split client.
    SplitMasking,
    /// A split client that drafts locally, over emulated round trips.
    Speculate,
    /// Repetitive and other answers, with drafts and without, and llama.cpp's lookup.
    Drafts,
    /// Training jobs over one base, beside PEFT.
    Tune,
    /// Training jobs beside requests that decode.
    TuneMixed,
    /// Tenants that train and sample through Tinker's API: time from a step to the first token.
    Tinker,
    /// Adapters pushed from memory: time until usable, beside streams, and rate.
    Push,
    /// Verification of an answer's receipt, beside decoding the answer.
    Receipts,
    /// One base over several devices of one core each, beside one executor on these cores.
    Devices,
    /// Two executors behind one gateway, beside one.
    Executors,
    /// Cost of ranks in steps and prompts, padded and not, as the performance model predicts it.
    PerfModel,
    /// Tenants beside one that floods, and beside each other by weight.
    Fairness,
    /// Seven tenants beside one that attacks every endpoint.
    Hostile,
    /// Three executors of unequal speed, for real and as `holobiont simulate` forecasts.
    Forecast,
    /// Hosts behind Envoy that share a registry and a bucket, part by part.
    Fleet,
    /// Routing decisions of the endpoint picker.
    Picker,
    /// An executor behind a TLS listener, beside one behind its ipc socket.
    Far,
    /// A base streamed from disk, beside one in memory.
    Stream,
    /// Structured output beside free answers.
    Grammar,
    /// Structured output over HTTP, beside llama.cpp's.
    Forms,
    /// The pass on more cores than the machine has, measured chunk by chunk and simulated.
    ManyCores,
    /// A GPU's decode steps, beside its memory bandwidth and PyTorch.
    CudaDecode,
    /// A GPU's long prompts, beside the rate of its matrix unit.
    CudaPrefill,
    /// Cost of adapters on a GPU, by rank.
    CudaLora,
    /// The link between host and GPU.
    CudaLink,
    /// Prompts on cold adapters: workers called in the GPU's stream, beside through the host.
    CudaFused,
    /// Requests on cold adapters over the real link to a GPU.
    CudaCold,
    /// Times of steps and copies, and the simulator's cost model fitted to them.
    Costs,
    /// Five workloads, for real and in the simulator with those costs.
    Reality,
    /// All benchmarks except `xab` (needs PyTorch), `openvino`, `vllm`, `costs`, `reality`, `forecast`,
    /// `fleet` (needs shared servers), and those of a GPU.
    All,
}

impl Name {
    pub(super) const EACH: [Self; 37] = [
        Self::Limits,
        Self::Decode,
        Self::Prefill,
        Self::Batch,
        Self::Adapters,
        Self::Neighbour,
        Self::Startup,
        Self::Accuracy,
        Self::Divergence,
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
        Self::Tinker,
        Self::Push,
        Self::Receipts,
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

    /// Whether the benchmark runs on a GPU, with weights of its own.
    pub(crate) fn is_for_gpu(self) -> bool {
        self.shares_model() || matches!(self, Self::CudaLink | Self::CudaFused | Self::CudaCold)
    }

    pub(crate) fn shares_model(self) -> bool {
        matches!(self, Self::CudaDecode | Self::CudaPrefill | Self::CudaLora)
    }

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
