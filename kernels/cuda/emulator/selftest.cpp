// The stand-in's own tests: each case in a process of its own, because some of them lose the device.
//   selftest            runs all, prints one line for each, and fails if one fails
#include "driver.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

#include "numbers.hpp"

// The entry points, as a program sees them.
extern "C" {
CUresult cuInit(unsigned);
CUresult cuDevicePrimaryCtxRetain(void **, int);
CUresult cuCtxSetCurrent(void *);
CUresult cuCtxSynchronize();
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemHostAlloc(void **, size_t, unsigned);
CUresult cuMemcpyHtoD_v2(CUdeviceptr, const void *, size_t);
CUresult cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr, const void *, size_t, void *);
CUresult cuMemsetD32Async(CUdeviceptr, unsigned, size_t, void *);
CUresult cuStreamCreate(void **, unsigned);
CUresult cuStreamSynchronize(void *);
CUresult cuStreamQuery(void *);
CUresult cuStreamWaitEvent(void *, void *, unsigned);
CUresult cuStreamWriteValue32_v2(void *, CUdeviceptr, unsigned, unsigned);
CUresult cuStreamWaitValue32_v2(void *, CUdeviceptr, unsigned, unsigned);
CUresult cuStreamBeginCapture_v2(void *, int);
CUresult cuStreamEndCapture(void *, void **);
CUresult cuGraphInstantiateWithFlags(void **, void *, unsigned long long);
CUresult cuGraphLaunch(void *, void *);
CUresult cuEventCreate(void **, unsigned);
CUresult cuEventRecord(void *, void *);
CUresult cuEventQuery(void *);
CUresult cuModuleLoadData(void **, const void *);
CUresult cuModuleGetFunction(void **, void *, const char *);
CUresult cuFuncSetAttribute(void *, int, int);
struct LaunchAttribute {
    unsigned id;
    alignas(8) unsigned value[16];
};
struct LaunchConfig {
    unsigned grid[3], threads[3], shared_bytes;
    void *stream;
    const LaunchAttribute *attributes;
    unsigned attribute_count;
};
CUresult cuLaunchKernelEx(const LaunchConfig *, void *, void **, void **);
CUresult cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                        void **);
int cublasLtCreate(void **);
int cublasLtMatmulDescCreate(void **, int, int);
int cublasLtMatmulDescSetAttribute(void *, int, const void *, size_t);
int cublasLtMatrixLayoutCreate(void **, int, uint64_t, uint64_t, int64_t);
int cublasLtMatmul(void *, void *, const float *, CUdeviceptr, void *, CUdeviceptr, void *, const float *, CUdeviceptr,
                   void *, CUdeviceptr, void *, const void *, void *, size_t, void *);
}

#define REQUIRE(condition)                                                                                         \
    do {                                                                                                           \
        if (!(condition)) {                                                                                        \
            std::printf("line %d: %s\n", __LINE__, #condition);                                                    \
            std::exit(1);                                                                                          \
        }                                                                                                          \
    } while (0)
#define OK(call) REQUIRE((call) == CUDA_SUCCESS)

static const char PTX[] = R"(
.version 8.7
.target sm_80
.visible .entry selftest_sums(
    .param .u64 selftest_sums_param_0,
    .param .u64 selftest_sums_param_1
)
{ ret;
}
.visible .entry selftest_shuffles(
    .param .u64 .ptr .align 1 selftest_shuffles_param_0
)
.maxntid 64, 1, 1
{ ret;
}
.visible .entry selftest_product_f16(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{ ret;
}
.visible .entry selftest_product_bf16(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{ ret;
}
.visible .entry selftest_tiles(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{ ret;
}
.visible .entry selftest_write(
    .param .u64 selftest_write_param_0,
    .param .u32 selftest_write_param_1
)
{ ret;
}
.visible .entry selftest_early(
    .param .u64 selftest_early_param_0,
    .param .u64 selftest_early_param_1,
    .param .u64 selftest_early_param_2,
    .param .u32 selftest_early_param_3
)
{ ret;
}
.visible .entry selftest_fault(
    .param .u64 selftest_fault_param_0,
    .param .u32 selftest_fault_param_1
)
{ ret;
}
)";

static void *module = nullptr, *stream = nullptr;

static void start() {
    void *context;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&stream, 1));
    OK(cuModuleLoadData(&module, PTX));
}

static void *function(const char *name) {
    void *found;
    OK(cuModuleGetFunction(&found, module, name));
    return found;
}

template <typename... A> static CUresult launch(const char *name, unsigned grid, unsigned threads, unsigned shared, A... a) {
    void *arguments[] = {&a...};
    return cuLaunchKernel(function(name), grid, 1, 1, threads, 1, 1, shared, stream, arguments, nullptr);
}

// One block that may begin before what is in front of it has ended.
template <typename... A> static CUresult launch_early(const char *name, unsigned threads, A... a) {
    void *arguments[] = {&a...};
    LaunchAttribute attribute = {6, {1}};
    LaunchConfig config = {{1, 1, 1}, {threads, 1, 1}, 0, stream, &attribute, 1};
    return cuLaunchKernelEx(&config, function(name), arguments, nullptr);
}

template <typename T> static CUdeviceptr upload(const std::vector<T> &from) {
    CUdeviceptr to;
    OK(cuMemAlloc_v2(&to, from.size() * sizeof(T)));
    OK(cuMemcpyHtoD_v2(to, from.data(), from.size() * sizeof(T)));
    return to;
}
template <typename T> static CUdeviceptr room(size_t count) {
    CUdeviceptr to;
    OK(cuMemAlloc_v2(&to, count * sizeof(T)));
    return to;
}
template <typename T> static std::vector<T> download(CUdeviceptr from, size_t count) {
    std::vector<T> to(count);
    OK(cuStreamSynchronize(stream));
    OK(cuMemcpyDtoH_v2(to.data(), from, count * sizeof(T)));
    return to;
}

static std::vector<float> numbers(size_t count, unsigned seed) {
    std::vector<float> out(count);
    for (auto &number : out) {
        seed = seed * 1664525 + 1013904223;
        number = static_cast<float>(seed >> 20) / 2048.0f - 1.0f; // twelve bits: exact in f16
    }
    return out;
}
static bool close(double got, double want, double tolerance) { return std::fabs(got - want) <= tolerance; }

// ---- How kernels run --------------------------------------------------------------------------------------------------

static void all_lanes_of_a_block_get_the_same_sum() {
    for (unsigned threads : {32u, 256u, 1024u}) {
        unsigned blocks = 7, count = blocks * threads;
        auto in = numbers(count, threads);
        auto out = room<float>(3 * count);
        OK(launch("selftest_sums", blocks, threads, threads * 4, out, upload(in)));
        auto got = download<float>(out, 3 * count);
        for (unsigned block = 0; block < blocks; ++block) {
            double want = 0;
            for (unsigned at = 0; at < threads; ++at) want += in[block * threads + at];
            for (unsigned at = block * threads; at < (block + 1) * threads; ++at) {
                REQUIRE(close(got[3 * at], want, 1e-3) && close(got[3 * at + 1], want, 1e-3));
                REQUIRE(got[3 * at + 1] == got[3 * block * threads + 1] && got[3 * at + 2] == static_cast<float>(threads));
            }
        }
    }
}

static void shuffles_read_the_lanes_that_the_manual_names() {
    auto out = room<int>(5 * 32);
    OK(launch("selftest_shuffles", 1, 32, 0, out));
    auto got = download<int>(out, 5 * 32);
    unsigned threes = 0x49249249; // lanes 0, 3, 6, ...
    for (int lane = 0; lane < 32; ++lane) {
        REQUIRE(got[lane] == 5 && got[32 + lane] == (lane ^ 9));
        REQUIRE(got[64 + lane] == (lane + 3 < 32 ? lane + 3 : lane));
        REQUIRE(got[96 + lane] == (lane % 16 >= 2 ? lane - 2 : lane));
        unsigned even = threes & 0x55555555u, odd = threes & 0xAAAAAAAAu;
        REQUIRE(got[128 + lane] == (lane % 2 == 0 ? static_cast<int>(even) : __builtin_popcount(odd)));
    }
}

static void check_product(const std::vector<float> &c, const std::vector<float> &a, const std::vector<float> &b) {
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < 8; ++column) {
            double want = 0;
            for (int inner = 0; inner < 16; ++inner) want += double(a[row * 16 + inner]) * b[inner * 8 + column];
            REQUIRE(close(c[row * 8 + column], want, 1e-4));
        }
}

static void tensor_cores_multiply_by_the_documented_layout() {
    auto a = numbers(256, 1), b = numbers(128, 2);
    auto c = room<float>(128);
    OK(launch("selftest_product_f16", 1, 32, 0, c, upload(a), upload(b)));
    check_product(download<float>(c, 128), a, b);
    for (auto *side : {&a, &b})
        for (auto &number : *side) number = on_cpu::bf16_to_float(on_cpu::float_to_bf16(number));
    OK(launch("selftest_product_bf16", 1, 32, 0, c, upload(a), upload(b)));
    check_product(download<float>(c, 128), a, b);
}

static void tiles_arrive_in_shared_memory_as_tensor_cores_want_them() {
    auto a = numbers(256, 3), b = numbers(128, 4);
    std::vector<uint16_t> half_a, half_b;
    for (float number : a) half_a.push_back(on_cpu::float_to_half(number));
    for (float number : b) half_b.push_back(on_cpu::float_to_half(number));
    auto c = room<float>(128);
    OK(launch("selftest_tiles", 1, 32, 0, c, upload(half_a), upload(half_b)));
    check_product(download<float>(c, 128), a, b);
}

static CUresult fault(unsigned which) {
    auto out = room<float>(64);
    OK(launch("selftest_fault", 3, 64, 64 * 4, out, which));
    CUresult result = cuStreamSynchronize(stream);
    REQUIRE(result == CUDA_SUCCESS || cuCtxSynchronize() == result); // it stays
    return result;
}
static void a_barrier_that_some_never_reach_is_reported() { REQUIRE(fault(0) == CUDA_ERROR_LAUNCH_FAILED); }
static void a_shuffle_with_lanes_that_ended_is_reported() { REQUIRE(fault(1) == CUDA_ERROR_LAUNCH_FAILED); }
static void two_barriers_for_half_a_block_each_are_reported() { REQUIRE(fault(5) == CUDA_ERROR_LAUNCH_FAILED); }
static void a_write_behind_an_allocation_is_reported() { REQUIRE(fault(3) == CUDA_ERROR_ILLEGAL_ADDRESS); }
static void a_write_behind_shared_memory_is_reported() { REQUIRE(fault(4) == CUDA_ERROR_ILLEGAL_ADDRESS); }
static void shared_memory_starts_as_nan() {
    auto out = room<float>(64);
    OK(launch("selftest_fault", 1, 64, 64 * 4, out, 2u));
    for (float number : download<float>(out, 64)) REQUIRE(std::isnan(number));
}

// ---- What the driver refuses ------------------------------------------------------------------------------------------

static void launches_beyond_the_limits_are_refused() {
    auto out = room<float>(64);
    unsigned none = 9;
    void *arguments[] = {&out, &none}, *fault = function("selftest_fault");
    auto with = [&](unsigned y, unsigned threads, unsigned shared) {
        return cuLaunchKernel(fault, 1, y, 1, threads, 1, 1, shared, stream, arguments, nullptr);
    };
    OK(with(1, 64, 48 * 1024));
    REQUIRE(with(65536, 64, 0) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(with(1, 1025, 0) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(with(0, 64, 0) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(with(1, 64, 48 * 1024 + 1) == CUDA_ERROR_INVALID_VALUE);
    OK(cuFuncSetAttribute(fault, 8, 64 * 1024));
    OK(with(1, 64, 64 * 1024));
    REQUIRE(cuFuncSetAttribute(fault, 8, 200 * 1024) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(launch("selftest_shuffles", 1, 96, 0, out) == CUDA_ERROR_INVALID_VALUE); // beyond its launch bounds
}

static void a_kernel_must_be_in_the_ptx_and_agree_with_it() {
    void *found;
    REQUIRE(cuModuleGetFunction(&found, module, "no_such_kernel") == CUDA_ERROR_NOT_FOUND);
    void *other;
    OK(cuModuleLoadData(&other, ".version 8.7\n.entry selftest_sums(.param .u64 a, .param .u32 b)\n{ ret;\n}\n"
                                ".entry in_no_library(.param .u64 a)\n{ ret;\n}\n"));
    REQUIRE(cuModuleGetFunction(&found, other, "selftest_sums") == CUDA_ERROR_NOT_FOUND);
    REQUIRE(cuModuleGetFunction(&found, other, "in_no_library") == CUDA_ERROR_NOT_FOUND);
    REQUIRE(cuModuleLoadData(&other, "not PTX") == CUDA_ERROR_INVALID_IMAGE);
    REQUIRE(cuModuleLoadData(&other, "\x7f" "ELF of a real compiler") == CUDA_ERROR_NO_BINARY_FOR_GPU);
    REQUIRE(cuModuleLoadData(&other, "// cubin for sm_80\n.version 8.7\n") == CUDA_ERROR_NO_BINARY_FOR_GPU);
    OK(cuModuleLoadData(&other, "// cubin for sm_90\n.version 8.7\n"));
}

static void a_freed_argument_is_an_illegal_address() {
    auto out = room<float>(64);
    OK(cuMemFree_v2(out));
    OK(launch("selftest_fault", 1, 64, 256, out, 2u));
    REQUIRE(cuStreamSynchronize(stream) == CUDA_ERROR_ILLEGAL_ADDRESS);
}

// ---- Order ------------------------------------------------------------------------------------------------------------

static void pinned_memory_is_read_when_the_stream_gets_there() {
    auto gate = upload(std::vector<unsigned>{0}), to = room<unsigned>(1);
    void *pinned;
    OK(cuMemHostAlloc(&pinned, 4, 0));
    auto *word = static_cast<unsigned *>(pinned);
    *word = 1;
    OK(cuStreamWaitValue32_v2(stream, gate, 5, 1));
    OK(cuMemcpyHtoDAsync_v2(to, word, 4, stream));
    REQUIRE(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
    *word = 2;
    void *other;
    OK(cuStreamCreate(&other, 1));
    OK(cuStreamWriteValue32_v2(other, gate, 5, 0));
    REQUIRE(download<unsigned>(to, 1)[0] == 2);
}

static void a_stream_waits_for_what_an_event_marked() {
    auto gate = upload(std::vector<unsigned>{0}), to = upload(std::vector<unsigned>{0});
    void *other, *event;
    OK(cuStreamCreate(&other, 1));
    OK(cuEventCreate(&event, 2));
    OK(cuStreamWaitValue32_v2(other, gate, 1, 0));
    OK(cuMemsetD32Async(to, 7, 1, other));
    OK(cuEventRecord(event, other));
    OK(cuStreamWaitEvent(stream, event, 0));
    REQUIRE(cuEventQuery(event) == CUDA_ERROR_NOT_READY && cuStreamQuery(stream) == CUDA_SUCCESS + CUDA_ERROR_NOT_READY);
    OK(cuMemcpyHtoD_v2(gate, std::vector<unsigned>{1}.data(), 4));
    REQUIRE(download<unsigned>(to, 1)[0] == 7);
}

static void a_graph_does_again_what_was_captured() {
    auto to = upload(std::vector<unsigned>{0});
    void *graph, *executable;
    OK(cuStreamBeginCapture_v2(stream, 1));
    OK(cuMemsetD32Async(to, 9, 1, stream));
    CUdeviceptr more;
    REQUIRE(cuMemAlloc_v2(&more, 4) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    OK(cuStreamEndCapture(stream, &graph));
    REQUIRE(download<unsigned>(to, 1)[0] == 0); // captured, not run
    OK(cuGraphInstantiateWithFlags(&executable, graph, 0));
    for (int turn = 0; turn < 2; ++turn) {
        OK(cuMemsetD32Async(to, 0, 1, stream));
        OK(cuGraphLaunch(executable, stream));
        REQUIRE(download<unsigned>(to, 1)[0] == 9);
    }
    OK(cuStreamBeginCapture_v2(stream, 1));
    REQUIRE(cuStreamSynchronize(stream) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    REQUIRE(cuStreamEndCapture(stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

static void a_kernel_may_begin_before_the_one_in_front_has_run() {
    auto from = upload(std::vector<unsigned>(64)), before = room<unsigned>(64), behind = room<unsigned>(64);
    void *graph, *executable;
    OK(cuStreamBeginCapture_v2(stream, 1));
    OK(launch("selftest_write", 1, 64, 0, from, 9u));
    OK(launch_early("selftest_early", 64, before, behind, from, 64u));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiateWithFlags(&executable, graph, 0));
    unsigned early = 0, turns = 32;
    for (unsigned turn = 0; turn < turns; ++turn) {
        OK(cuMemsetD32Async(from, 0, 64, stream));
        OK(cuGraphLaunch(executable, stream));
        REQUIRE(download<unsigned>(behind, 64) == std::vector<unsigned>(64, 9));
        std::vector<unsigned> read = download<unsigned>(before, 64);
        REQUIRE(read == std::vector<unsigned>(64, read[0])); // shared memory is kept meanwhile
        early += read[0] == 0;
    }
    REQUIRE(early > 0 && early < turns);
}

static void a_lane_that_leaves_before_the_kernel_in_front_has_ended_is_reported() {
    auto words = upload(std::vector<unsigned>(64));
    OK(launch_early("selftest_early", 64, words, words, words, 63u));
    REQUIRE(cuStreamSynchronize(stream) == CUDA_ERROR_LAUNCH_FAILED);
}

// ---- cuBLASLt ---------------------------------------------------------------------------------------------------------

static std::vector<unsigned char> stored(const std::vector<float> &numbers, int type) {
    std::vector<unsigned char> out(numbers.size() * (type == 0 ? 4 : 2));
    for (size_t at = 0; at < numbers.size(); ++at) {
        uint16_t half = type == 2 ? on_cpu::float_to_half(numbers[at]) : on_cpu::float_to_bf16(numbers[at]);
        if (type == 0) std::memcpy(&out[4 * at], &numbers[at], 4);
        else std::memcpy(&out[2 * at], &half, 2);
    }
    return out;
}

static void multiply_once(void *handle, int type, int transpose_a, int transpose_b) {
    const uint64_t m = 13, n = 6, k = 37, pad = 3;
    uint64_t rows_a = transpose_a ? k : m, columns_a = transpose_a ? m : k, leading_a = rows_a + pad;
    uint64_t rows_b = transpose_b ? n : k, columns_b = transpose_b ? k : n, leading_b = rows_b;
    auto a = numbers(leading_a * columns_a, 5), b = numbers(leading_b * columns_b, 6), c = numbers(m * n, 7);
    for (auto *side : {&a, &b})
        for (auto &number : *side)
            if (type == 14) number = on_cpu::bf16_to_float(on_cpu::float_to_bf16(number));
    void *desc, *layout_a, *layout_b, *layout_d;
    cublasLtMatmulDescCreate(&desc, 68, 0);
    cublasLtMatmulDescSetAttribute(desc, 3, &transpose_a, 4);
    cublasLtMatmulDescSetAttribute(desc, 4, &transpose_b, 4);
    cublasLtMatrixLayoutCreate(&layout_a, type, rows_a, columns_a, static_cast<int64_t>(leading_a));
    cublasLtMatrixLayoutCreate(&layout_b, type, rows_b, columns_b, static_cast<int64_t>(leading_b));
    cublasLtMatrixLayoutCreate(&layout_d, 0, m, n, m);
    auto there_a = upload(stored(a, type)), there_b = upload(stored(b, type)), d = upload(c);
    float alpha = 0.5f, beta = 2.0f;
    REQUIRE(cublasLtMatmul(handle, desc, &alpha, there_a, layout_a, there_b, layout_b, &beta, d, layout_d, d, layout_d,
                           nullptr, nullptr, 0, stream) == 0);
    auto got = download<float>(d, m * n);
    for (uint64_t row = 0; row < m; ++row)
        for (uint64_t column = 0; column < n; ++column) {
            double want = 0;
            for (uint64_t at = 0; at < k; ++at)
                want += double(transpose_a ? a[row * leading_a + at] : a[at * leading_a + row]) *
                        (transpose_b ? b[at * leading_b + column] : b[column * leading_b + at]);
            REQUIRE(close(got[column * m + row], 0.5 * want + 2.0 * c[column * m + row], 1e-4));
        }
}

static void cublaslt_multiplies_column_major_matrices() {
    void *handle;
    REQUIRE(cublasLtCreate(&handle) == 0);
    for (int type : {0, 2, 14})
        for (int transposes = 0; transposes < 4; ++transposes) multiply_once(handle, type, transposes & 1, transposes >> 1);
}

// ---- All of them ------------------------------------------------------------------------------------------------------

#define CASE(name) {#name, name}
static const struct {
    const char *name;
    void (*run)();
} CASES[] = {
    CASE(all_lanes_of_a_block_get_the_same_sum),
    CASE(shuffles_read_the_lanes_that_the_manual_names),
    CASE(tensor_cores_multiply_by_the_documented_layout),
    CASE(tiles_arrive_in_shared_memory_as_tensor_cores_want_them),
    CASE(a_barrier_that_some_never_reach_is_reported),
    CASE(a_shuffle_with_lanes_that_ended_is_reported),
    CASE(two_barriers_for_half_a_block_each_are_reported),
    CASE(a_write_behind_an_allocation_is_reported),
    CASE(a_write_behind_shared_memory_is_reported),
    CASE(shared_memory_starts_as_nan),
    CASE(launches_beyond_the_limits_are_refused),
    CASE(a_kernel_must_be_in_the_ptx_and_agree_with_it),
    CASE(a_freed_argument_is_an_illegal_address),
    CASE(pinned_memory_is_read_when_the_stream_gets_there),
    CASE(a_stream_waits_for_what_an_event_marked),
    CASE(a_graph_does_again_what_was_captured),
    CASE(a_kernel_may_begin_before_the_one_in_front_has_run),
    CASE(a_lane_that_leaves_before_the_kernel_in_front_has_ended_is_reported),
    CASE(cublaslt_multiplies_column_major_matrices),
};

int main(int count, char **words) {
    int failures = 0;
    for (auto &test : CASES) {
        if (count > 1 && std::strcmp(words[1], test.name) != 0) continue;
        std::fflush(nullptr);
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            start();
            test.run();
            std::fflush(nullptr);
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        std::printf("%s %s\n", status == 0 ? "ok    " : "FAILED", test.name);
        failures += status != 0;
    }
    return failures > 0;
}
