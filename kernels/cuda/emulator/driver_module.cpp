// The stand-in driver: modules and launches.
//
// A module is PTX, as for a real driver, but only its declarations are read: a kernel exists if the PTX has an entry
// of its name *and* a library beside this one was compiled from the same source. A launch must fit both.
//
// In place of machine code the stand-in takes PTX behind a line `// cubin for sm_90`, and refuses other architectures and
// real machine code, as a driver refuses what its device cannot run.
#include "driver.hpp"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <dlfcn.h>
#include <link.h>
#include <regex>

namespace on_cpu {

// ---- Libraries of kernels ---------------------------------------------------------------------------------------------

struct Compiled {
    Kernel kernel;
    Library library;
};
static std::map<std::string, Compiled> &compiled() {
    static auto &kernels = *new std::map<std::string, Compiled>;
    return kernels;
}

static Library library_of(const void *address) {
    struct Search {
        uintptr_t address;
        Library found;
    } search{reinterpret_cast<uintptr_t>(address), {}};
    dl_iterate_phdr([](dl_phdr_info *info, size_t, void *data) {
        auto &search = *static_cast<Search *>(data);
        bool here = false;
        Library library;
        for (int at = 0; at < info->dlpi_phnum; ++at) {
            auto &segment = info->dlpi_phdr[at];
            uintptr_t start = info->dlpi_addr + segment.p_vaddr;
            here |= segment.p_type == PT_LOAD && search.address >= start && search.address < start + segment.p_memsz;
            if (segment.p_type == PT_TLS) library = {info->dlpi_tls_modid, segment.p_memsz};
        }
        if (here) search.found = library;
        return here ? 1 : 0;
    }, &search);
    return search.found;
}

void announce(const Kernel &kernel) {
    if (compiled().count(kernel.name))
        std::fprintf(stderr, "cuda-on-cpu: two kernels are named %s\n", kernel.name);
    compiled()[kernel.name] = {kernel, library_of(kernel.address)};
}

// Opens every library in `kernels/` beside this one; each announces what it holds.
void load_kernels() {
    Dl_info self;
    if (!dladdr(reinterpret_cast<void *>(&load_kernels), &self)) return;
    std::string folder(self.dli_fname);
    folder = folder.substr(0, folder.rfind('/') + 1) + "kernels";
    DIR *listing = opendir(folder.c_str());
    if (!listing) {
        std::fprintf(stderr, "cuda-on-cpu: no kernels: there is no folder %s\n", folder.c_str());
        return;
    }
    while (dirent *entry = readdir(listing)) {
        std::string name = entry->d_name;
        if (name.size() < 3 || name.substr(name.size() - 3) != ".so") continue;
        if (!dlopen((folder + "/" + name).c_str(), RTLD_NOW | RTLD_LOCAL))
            std::fprintf(stderr, "cuda-on-cpu: %s\n", dlerror());
    }
    closedir(listing);
}

// ---- PTX --------------------------------------------------------------------------------------------------------------

struct Entry {
    std::vector<uint32_t> argument_bytes;
    uint32_t most_threads = 1024, static_shared_bytes = 0;
};
struct Module {
    std::map<std::string, Entry> entries;
    std::map<std::string, std::unique_ptr<Function>> functions;
};

static uint32_t bytes_of_type(const std::string &type) {
    return static_cast<uint32_t>(std::atoi(type.c_str() + 1)) / 8; // u64, f32, b8, ...
}

// Shared variables by name, with their bytes; those of templates and device functions lie outside the entries. Looked
// for by hand: a regular expression over megabytes would take longer than most tests.
static std::map<std::string, uint32_t> shared_variables(const std::string &ptx) {
    static const std::regex DECLARED(R"(\.shared\s+\.align\s+\d+\s+\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?)");
    static const std::string WORD = ".shared .align ";
    std::map<std::string, uint32_t> found;
    for (size_t at = ptx.find(WORD); at != std::string::npos; at = ptx.find(WORD, at + 1)) {
        std::smatch declared;
        std::string line = ptx.substr(at, ptx.find(';', at) - at);
        if (!std::regex_match(line, declared, DECLARED)) continue; // `extern` without a size: dynamic
        uint32_t count = declared[3].matched ? static_cast<uint32_t>(std::stoul(declared[3])) : 1;
        found[declared[2]] = bytes_of_type(declared[1]) * count;
    }
    return found;
}

static Entry read_entry(const std::string &declaration, const std::string &body,
                        const std::map<std::string, uint32_t> &shared) {
    static const std::regex PARAM(R"(\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(?:\s+\.ptr[^,)]*?)?\s+[\w$]+(?:\[(\d+)\])?\s*(?:,|$))");
    static const std::regex THREADS(R"(\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?)");
    Entry entry;
    size_t close = declaration.find(')');
    std::string params = declaration.substr(0, close), attributes = declaration.substr(close);
    for (std::sregex_iterator at(params.begin(), params.end(), PARAM), end; at != end; ++at) {
        uint32_t count = (*at)[2].matched ? static_cast<uint32_t>(std::stoul((*at)[2])) : 1;
        entry.argument_bytes.push_back(bytes_of_type((*at)[1]) * count);
    }
    std::smatch found;
    if (std::regex_search(attributes, found, THREADS)) {
        entry.most_threads = 1;
        for (size_t axis = 1; axis <= 3; ++axis)
            if (found[axis].matched) entry.most_threads *= static_cast<uint32_t>(std::stoul(found[axis]));
    }
    for (auto &[name, bytes] : shared)
        if (body.find(name) != std::string::npos) entry.static_shared_bytes += bytes;
    return entry;
}

static Module *read_ptx(const std::string &ptx) {
    auto *module = new Module;
    auto shared = shared_variables(ptx);
    static const std::string WORD = ".entry ";
    for (size_t at = ptx.find(WORD); at != std::string::npos; at = ptx.find(WORD, at)) {
        at += WORD.size();
        size_t open = ptx.find('(', at), brace = ptx.find('{', at);
        if (open == std::string::npos || brace == std::string::npos) break;
        std::string name = ptx.substr(at, open - at);
        name.erase(std::remove_if(name.begin(), name.end(), isspace), name.end());
        size_t end = ptx.find("\n}", brace);
        module->entries[name] = read_entry(ptx.substr(open + 1, brace - open - 1), ptx.substr(brace, end - brace), shared);
    }
    return module;
}

// Null where the two compilers saw the same arguments, or what differs.
static std::string difference(const Entry &entry, const Kernel &kernel) {
    if (entry.argument_bytes.size() != kernel.arguments)
        return "the PTX has " + std::to_string(entry.argument_bytes.size()) + " arguments, the library " +
               std::to_string(kernel.arguments);
    for (uint32_t at = 0; at < kernel.arguments; ++at)
        if (entry.argument_bytes[at] != kernel.argument_bytes[at])
            return "argument " + std::to_string(at) + " has " + std::to_string(entry.argument_bytes[at]) +
                   " bytes in the PTX and " + std::to_string(kernel.argument_bytes[at]) + " in the library";
    return "";
}

// ---- Launches ---------------------------------------------------------------------------------------------------------

struct Call {
    Function *function;
    Dim3 grid, threads;
    uint32_t shared_bytes;
    bool begins_early;
    std::vector<uint64_t> values; // one word an argument
};

// Every pointer must point to memory that the device can reach, or be null.
static std::string wild_pointer(const Call &call) {
    const Kernel &kernel = *call.function->kernel;
    for (uint32_t at = 0; at < kernel.arguments; ++at)
        if (kernel.argument_is_pointer[at] && call.values[at] != 0 && !reachable(call.values[at], 0))
            return std::string(kernel.name) + ": argument " + std::to_string(at) +
                   " points to memory that the device cannot reach (freed, or the host's own)";
    return "";
}

static bool fails_on_purpose() {
    static const uint64_t last = [] {
        const char *word = std::getenv("CUDA_ON_CPU_FAIL_AFTER");
        return word ? std::strtoull(word, nullptr, 10) : UINT64_MAX;
    }();
    return driver().launches.fetch_add(1) >= last;
}

static void run(const Call &call, const Front *front) {
    if (fails_on_purpose()) return lose_device(CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ON_CPU_FAIL_AFTER launches have run");
    std::string wild = wild_pointer(call);
    if (!wild.empty()) return lose_device(CUDA_ERROR_ILLEGAL_ADDRESS, wild);
    std::vector<uint64_t> values = call.values;
    std::vector<void *> arguments;
    for (auto &value : values) arguments.push_back(&value);
    auto launch = std::make_shared<Launch>();
    launch->kernel = call.function->kernel;
    launch->library = call.function->library;
    launch->arguments = arguments.data();
    launch->grid = call.grid;
    launch->threads = call.threads;
    launch->shared_bytes = call.shared_bytes;
    launch->begins_early = call.begins_early;
    launch->front = front;
    launch->seed = driver().launches;
    std::string failure = run_grid(launch);
    if (!failure.empty()) lose_device(launch->illegal_address ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_ERROR_LAUNCH_FAILED, failure);
}

static CUresult refuse(const Function &function, const std::string &why, CUresult code) {
    std::fprintf(stderr, "cuda-on-cpu: %s cannot be launched: %s\n", function.kernel->name, why.c_str());
    return code;
}

static CUresult check_shape(const Function &function, Dim3 grid, Dim3 threads, uint32_t shared_bytes) {
    uint64_t count = uint64_t{threads.x} * threads.y * threads.z;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || count == 0)
        return refuse(function, "an extent of the grid or the block is 0", CUDA_ERROR_INVALID_VALUE);
    if (grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535)
        return refuse(function, "the grid is larger than (2^31 - 1, 65535, 65535)", CUDA_ERROR_INVALID_VALUE);
    if (count > 1024 || threads.x > 1024 || threads.y > 1024 || threads.z > 64)
        return refuse(function, "the block is larger than 1024 threads", CUDA_ERROR_INVALID_VALUE);
    if (count > function.most_threads)
        return refuse(function, "the block is larger than its __launch_bounds__", CUDA_ERROR_INVALID_VALUE);
    if (shared_bytes > function.most_dynamic_bytes ||
        shared_bytes + function.static_shared_bytes > std::max(STATIC_SHARED_LIMIT, function.most_dynamic_bytes))
        return refuse(function, std::to_string(shared_bytes) + " bytes of dynamic and " +
                      std::to_string(function.static_shared_bytes) + " of static shared memory, without opting in",
                      CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

} // namespace on_cpu

using namespace on_cpu;

EXPORT CUresult cuModuleLoadData(void **out, const void *image) {
    if (CUresult error = usable()) return error;
    const char *text = static_cast<const char *>(image);
    if (std::strncmp(text, "\x7f" "ELF", 4) == 0) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    std::string ptx(text, strnlen(text, size_t{64} << 20));
    static const std::string CUBIN = "// cubin for ";
    if (ptx.compare(0, CUBIN.size(), CUBIN) == 0 && ptx.compare(CUBIN.size(), 6, "sm_90\n") != 0)
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    if (ptx.find(".version") == std::string::npos) return CUDA_ERROR_INVALID_IMAGE;
    *out = read_ptx(ptx);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadDataEx(void **out, const void *image, unsigned, void *, void **) {
    return cuModuleLoadData(out, image);
}

EXPORT CUresult cuModuleUnload(void *module) {
    if (CUresult error = usable()) return error;
    synchronize_device();
    delete static_cast<Module *>(module);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(void **out, void *handle, const char *name) {
    if (CUresult error = usable()) return error;
    auto &module = *static_cast<Module *>(handle);
    auto entry = module.entries.find(name);
    if (entry == module.entries.end()) return CUDA_ERROR_NOT_FOUND;
    auto kernel = compiled().find(name);
    if (kernel == compiled().end()) {
        std::fprintf(stderr, "cuda-on-cpu: %s is in the PTX, but no library has it: is ON_CPU_KERNEL(%s) missing, or "
                     "scripts/cuda-on-cpu not run?\n", name, name);
        return CUDA_ERROR_NOT_FOUND;
    }
    std::string differs = difference(entry->second, kernel->second.kernel);
    if (!differs.empty()) {
        std::fprintf(stderr, "cuda-on-cpu: %s: %s; the PTX is stale\n", name, differs.c_str());
        return CUDA_ERROR_NOT_FOUND;
    }
    auto &function = module.functions[name];
    if (!function) {
        function = std::make_unique<Function>();
        function->kernel = &kernel->second.kernel;
        function->library = kernel->second.library;
        function->most_threads = entry->second.most_threads;
        function->static_shared_bytes = entry->second.static_shared_bytes;
    }
    *out = function.get();
    return CUDA_SUCCESS;
}

// Attributes: 0 most threads a block, 1 static shared bytes, 4 registers, 8 most dynamic shared bytes.
EXPORT CUresult cuFuncGetAttribute(int *value, int attribute, void *handle) {
    if (CUresult error = usable()) return error;
    auto &function = *static_cast<Function *>(handle);
    switch (attribute) {
    case 0: *value = static_cast<int>(function.most_threads); break;
    case 1: *value = static_cast<int>(function.static_shared_bytes); break;
    case 4: *value = 32; break;
    case 5: case 6: *value = 80; break;
    case 8: *value = static_cast<int>(function.most_dynamic_bytes); break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(void *handle, int attribute, int value) {
    if (CUresult error = usable()) return error;
    auto &function = *static_cast<Function *>(handle);
    if (attribute == 9) return CUDA_SUCCESS; // a preference
    if (attribute != 8 || value < 0 ||
        static_cast<uint32_t>(value) + function.static_shared_bytes > OPTIN_SHARED_LIMIT)
        return CUDA_ERROR_INVALID_VALUE;
    function.most_dynamic_bytes = static_cast<uint32_t>(value);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncLoad(void *handle) {
    if (CUresult error = usable()) return error;
    static_cast<Function *>(handle)->loaded = true;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetCacheConfig(void *, int) { return usable(); }

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *, int threads, size_t shared_bytes) {
    if (CUresult error = usable()) return error;
    int by_threads = threads > 0 ? 2048 / threads : 0;
    int by_shared = shared_bytes > 0 ? static_cast<int>(164 * 1024 / (shared_bytes + 1024)) : 32;
    *blocks = std::min({32, by_threads, by_shared});
    return CUDA_SUCCESS;
}

static CUresult enqueue_launch(Call call, void *stream_handle, void **parameters, void **extra) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(stream_handle);
    if (!call.function || !stream) return CUDA_ERROR_INVALID_HANDLE;
    if (extra) return CUDA_ERROR_NOT_SUPPORTED;
    Function &function = *call.function;
    if (CUresult error = check_shape(function, call.grid, call.threads, call.shared_bytes)) return error;
    // Modules are loaded lazily: to load a kernel the driver may wait for the device, streams that wait for the host too.
    if (!function.loaded.exchange(true)) synchronize_device();
    for (uint32_t at = 0; at < function.kernel->arguments; ++at) {
        uint64_t value = 0;
        std::memcpy(&value, parameters[at], function.kernel->argument_bytes[at]);
        call.values.push_back(value);
    }
    bool begins_early = call.begins_early;
    enqueue_kernel(stream, [call = std::move(call)](const Front *front) { run(call, front); }, begins_early);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads_x,
                               unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void *stream,
                               void **parameters, void **extra) {
    Dim3 grid{grid_x, grid_y, grid_z}, threads{threads_x, threads_y, threads_z};
    return enqueue_launch({static_cast<Function *>(function), grid, threads, shared_bytes, false, {}}, stream, parameters,
                          extra);
}

struct LaunchAttribute {
    unsigned id;
    alignas(8) unsigned value[16];
};
constexpr unsigned PROGRAMMATIC_STREAM_SERIALIZATION = 6;
struct LaunchConfig {
    Dim3 grid, threads;
    unsigned shared_bytes;
    void *stream;
    const LaunchAttribute *attributes;
    unsigned attribute_count;
};
// A kernel that may begin early does so by chance (`Turns`), and each of its lanes must wait.
EXPORT CUresult cuLaunchKernelEx(const LaunchConfig *config, void *function, void **parameters, void **extra) {
    bool begins_early = false;
    for (unsigned at = 0; at < config->attribute_count; ++at) {
        const LaunchAttribute &attribute = config->attributes[at];
        if (attribute.id != PROGRAMMATIC_STREAM_SERIALIZATION) return CUDA_ERROR_NOT_SUPPORTED;
        begins_early = attribute.value[0] != 0;
    }
    return enqueue_launch({static_cast<Function *>(function), config->grid, config->threads, config->shared_bytes,
                           begins_early, {}}, config->stream, parameters, extra);
}
