// A stand-in for cuBLASLt: the matrix product D = alpha op(A) op(B) + beta C, in the order of a stand-in stream.
//
// Matrices are column-major unless their layout says otherwise, as NVIDIA documents; op is the identity or the
// transpose. Inputs are f32, f16 or bf16, sums f32, the output f32 or the inputs' kind. Anything else is refused as
// CUBLAS_STATUS_NOT_SUPPORTED, with a line on stderr. The promise of alignment that a caller makes when it asks for an
// algorithm (256 bytes, unless its preference says less) is checked against every pointer it then passes. Sums whose
// parts may be rounded to the output's kind (unless its preference says otherwise, they may) are.
#include "driver.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <thread>
#ifdef __F16C__
#include <immintrin.h>
#endif

#include "numbers.hpp"

enum Status : int { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum DataType : int { F32 = 0, F16 = 2, BF16 = 14 };

struct MatmulDesc {
    int compute = 0, scale = 0, pointer_mode = 0, transpose_a = 0, transpose_b = 0, epilogue = 1;
};

struct Layout {
    int type = 0, order = 0; // order: 0 column-major, 1 row-major
    uint64_t rows = 0, columns = 0;
    int64_t leading = 0;
    int batches = 1;
    int64_t batch_stride = 0;

    size_t element_bytes() const { return type == F32 ? 4 : 2; }
    size_t at(uint64_t row, uint64_t column) const {
        uint64_t stride = static_cast<uint64_t>(leading);
        return order == 0 ? column * stride + row : row * stride + column;
    }
    size_t extent_bytes() const {
        if (rows == 0 || columns == 0) return 0;
        size_t last = static_cast<size_t>(batches - 1) * static_cast<size_t>(batch_stride) + at(rows - 1, columns - 1);
        return (last + 1) * element_bytes();
    }
};

// CUBLASLT_REDUCTION_SCHEME_*: parts of a sum are joined in the output (1), in f32 (2), or rounded to its kind (4).
constexpr uint32_t ANY_REDUCTION = 7, ROUNDING_REDUCTIONS = 5;

struct Preference {
    uint64_t workspace_bytes = 0;
    uint32_t reductions = ANY_REDUCTION;
    uint32_t alignment[4] = {256, 256, 256, 256}; // of A, B, C, D
};

struct Algorithm {
    uint64_t magic, workspace_bytes;
    uint32_t alignment[4];
    uint64_t shape[3]; // m, n, k
    uint32_t types, reductions;
};
constexpr uint64_t MAGIC = 0x63707542'4c41534cULL;
static_assert(sizeof(Algorithm) == 64, "cublasLtMatmulAlgo_t has eight words");

struct HeuristicResult {
    Algorithm algorithm;
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

static Status refuse(const char *why, Status status = NOT_SUPPORTED) {
    std::fprintf(stderr, "cuda-on-cpu: cublasLtMatmul: %s\n", why);
    return status;
}

static bool is_kind(int type) { return type == F32 || type == F16 || type == BF16; }

struct Shape {
    uint64_t m, n, k;
};

static Status check(const MatmulDesc &desc, const Layout &a, const Layout &b, const Layout &c, const Layout &d,
                    Shape &shape) {
    // CUBLAS_COMPUTE_32F and its variants: pedantic, and f16, bf16 or tf32 where that is faster.
    if (desc.compute < 68 || desc.compute > 77 || desc.scale != F32) return refuse("only f32 sums and factors");
    if (desc.pointer_mode != 0) return refuse("only factors on the host");
    if (desc.epilogue != 1) return refuse("only the default epilogue");
    if (!is_kind(a.type) || a.type != b.type) return refuse("inputs must both be f32, f16 or bf16");
    if (c.type != d.type || (d.type != F32 && d.type != a.type)) return refuse("the output is f32 or as the inputs");
    for (const Layout *layout : {&a, &b, &c, &d}) {
        uint64_t least = layout->order == 0 ? layout->rows : layout->columns;
        if (layout->leading < static_cast<int64_t>(least)) return refuse("a leading dimension is too small", INVALID_VALUE);
        if (layout->batches != d.batches) return refuse("matrices differ in their number of batches", INVALID_VALUE);
        if (layout->extent_bytes() == 0) return refuse("a matrix is empty", INVALID_VALUE);
    }
    shape.m = desc.transpose_a ? a.columns : a.rows;
    shape.k = desc.transpose_a ? a.rows : a.columns;
    shape.n = desc.transpose_b ? b.rows : b.columns;
    uint64_t k_of_b = desc.transpose_b ? b.columns : b.rows;
    if (k_of_b != shape.k || d.rows != shape.m || d.columns != shape.n || c.rows != d.rows || c.columns != d.columns)
        return refuse("the shapes do not fit each other", INVALID_VALUE);
    return SUCCESS;
}

// `count` numbers, `stride` apart, as f32.
static void widen(float *to, const void *from, int type, size_t first, size_t stride, size_t count) {
    if (type == F32) {
        auto *numbers = static_cast<const float *>(from) + first;
        for (size_t at = 0; at < count; ++at) to[at] = numbers[at * stride];
        return;
    }
    auto *numbers = static_cast<const uint16_t *>(from) + first;
    if (type == BF16) {
        for (size_t at = 0; at < count; ++at) to[at] = on_cpu::bf16_to_float(numbers[at * stride]);
        return;
    }
    size_t at = 0;
#ifdef __F16C__
    if (stride == 1)
        for (; at + 8 <= count; at += 8)
            _mm256_storeu_ps(to + at, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(numbers + at))));
#endif
    for (; at < count; ++at) to[at] = on_cpu::half_to_float(numbers[at * stride]);
}

// Rows of a times rows of b, four by four, each a sum in sixteen lanes.
constexpr size_t LANES = 16, TILE = 4;
static void dots(float out[TILE][TILE], const float *a, const float *b, size_t k, size_t stride) {
    float sums[TILE][TILE][LANES] = {};
    for (size_t at = 0; at < k; at += LANES)
        for (size_t row = 0; row < TILE; ++row)
            for (size_t column = 0; column < TILE; ++column)
                for (size_t lane = 0; lane < LANES; ++lane)
                    sums[row][column][lane] += a[row * stride + at + lane] * b[column * stride + at + lane];
    for (size_t row = 0; row < TILE; ++row)
        for (size_t column = 0; column < TILE; ++column) {
            out[row][column] = 0;
            for (float sum : sums[row][column]) out[row][column] += sum;
        }
}

struct Product {
    MatmulDesc desc;
    Layout a, b, c, d;
    Shape shape;
    float alpha, beta;
    bool rounds_parts; // of sums, to the output's kind: what an algorithm that cuts them may do
    const char *at_a, *at_b, *at_c;
    char *at_d;
};

static float read(const void *from, int type, size_t at) {
    float value;
    widen(&value, from, type, at, 1, 1);
    return value;
}

static void store(const Product &p, const char *c, char *d, uint64_t row, uint64_t column, float product) {
    float value = p.alpha * product;
    if (p.beta != 0) value += p.beta * read(c, p.c.type, p.c.at(row, column)); // C is not read where beta is 0
    size_t at = p.d.at(row, column);
    if (p.d.type == F32) reinterpret_cast<float *>(d)[at] = value;
    else if (p.d.type == F16) reinterpret_cast<uint16_t *>(d)[at] = on_cpu::float_to_half(value);
    else reinterpret_cast<uint16_t *>(d)[at] = on_cpu::float_to_bf16(value);
}

static float rounded(float value, int type) {
    if (type == F32) return value;
    return type == F16 ? on_cpu::half_to_float(on_cpu::float_to_half(value))
                       : on_cpu::bf16_to_float(on_cpu::float_to_bf16(value));
}

// As `dots`; where parts of sums may be rounded, of parts of so many products.
constexpr size_t PART = 64;
static void tile(float out[TILE][TILE], const Product &p, const float *a, const float *b, size_t padded) {
    if (!p.rounds_parts) return dots(out, a, b, padded, padded);
    std::fill(&out[0][0], &out[0][0] + TILE * TILE, 0.0f);
    for (size_t at = 0; at < padded; at += PART) {
        float part[TILE][TILE];
        dots(part, a + at, b + at, std::min(PART, padded - at), padded);
        for (size_t row = 0; row < TILE; ++row)
            for (size_t column = 0; column < TILE; ++column)
                out[row][column] = rounded(out[row][column] + part[row][column], p.d.type);
    }
}

// Rows [first, end) of one batch of D; `b` holds the columns of op(B), each k numbers padded with zeros to `padded`.
static void multiply_rows(const Product &p, size_t batch, const std::vector<float> &b, size_t padded, uint64_t first,
                          uint64_t end) {
    auto offset = [batch](const Layout &layout) {
        return batch * static_cast<size_t>(layout.batch_stride) * layout.element_bytes();
    };
    std::vector<float> a(TILE * padded);
    size_t stride = p.a.at(p.desc.transpose_a ? 1 : 0, p.desc.transpose_a ? 0 : 1);
    for (uint64_t row = first; row < end; row += TILE) {
        uint64_t rows = std::min<uint64_t>(TILE, end - row);
        std::fill(a.begin(), a.end(), 0.0f);
        for (uint64_t at = 0; at < rows; ++at) {
            size_t start = p.desc.transpose_a ? p.a.at(0, row + at) : p.a.at(row + at, 0);
            widen(&a[at * padded], p.at_a + offset(p.a), p.a.type, start, stride, p.shape.k);
        }
        for (uint64_t column = 0; column < p.shape.n; column += TILE) {
            float out[TILE][TILE];
            tile(out, p, a.data(), &b[column * padded], padded);
            for (uint64_t r = 0; r < rows; ++r)
                for (uint64_t s = 0; s < std::min<uint64_t>(TILE, p.shape.n - column); ++s)
                    store(p, p.at_c + offset(p.c), p.at_d + offset(p.d), row + r, column + s, out[r][s]);
        }
    }
}

static void multiply(const Product &p) {
    size_t padded = (p.shape.k + LANES - 1) / LANES * LANES;
    size_t columns = (p.shape.n + TILE - 1) / TILE * TILE;
    size_t stride = p.b.at(p.desc.transpose_b ? 0 : 1, p.desc.transpose_b ? 1 : 0);
    std::vector<float> b(columns * padded);
    for (size_t batch = 0; batch < static_cast<size_t>(p.d.batches); ++batch) {
        const char *from = p.at_b + batch * static_cast<size_t>(p.b.batch_stride) * p.b.element_bytes();
        for (uint64_t column = 0; column < p.shape.n; ++column) {
            size_t start = p.desc.transpose_b ? p.b.at(column, 0) : p.b.at(0, column);
            widen(&b[column * padded], from, p.b.type, start, stride, p.shape.k);
        }
        uint64_t work = p.shape.m * p.shape.n * p.shape.k;
        uint64_t threads = work < 4000000 ? 1 : std::min(8u, std::max(1u, std::thread::hardware_concurrency()));
        uint64_t share = (p.shape.m + threads - 1) / threads;
        std::vector<std::thread> others;
        for (uint64_t at = 1; at < threads && at * share < p.shape.m; ++at)
            others.emplace_back([&, at] {
                multiply_rows(p, batch, b, padded, at * share, std::min(p.shape.m, (at + 1) * share));
            });
        multiply_rows(p, batch, b, padded, 0, std::min(p.shape.m, share));
        for (auto &other : others) other.join();
    }
}

// ---- Entry points -----------------------------------------------------------------------------------------------------

EXPORT Status cublasLtCreate(void **handle) {
    if (on_cpu::usable() != CUDA_SUCCESS) return NOT_INITIALIZED;
    *handle = new int;
    return SUCCESS;
}
EXPORT Status cublasLtDestroy(void *handle) { return delete static_cast<int *>(handle), SUCCESS; }
EXPORT size_t cublasLtGetVersion() { return 130000; }

EXPORT Status cublasLtMatmulDescCreate(MatmulDesc **out, int compute, int scale) {
    *out = new MatmulDesc;
    (*out)->compute = compute;
    (*out)->scale = scale;
    return SUCCESS;
}
EXPORT Status cublasLtMatmulDescDestroy(MatmulDesc *desc) { return delete desc, SUCCESS; }
EXPORT Status cublasLtMatmulDescSetAttribute(MatmulDesc *desc, int attribute, const void *from, size_t bytes) {
    int *const fields[] = {&desc->compute, &desc->scale, &desc->pointer_mode, &desc->transpose_a, &desc->transpose_b,
                           nullptr, nullptr, &desc->epilogue};
    if (attribute < 0 || attribute > 7 || !fields[attribute]) return refuse("an attribute of the product is unknown");
    if (bytes != sizeof(int)) return INVALID_VALUE;
    std::memcpy(fields[attribute], from, bytes);
    return SUCCESS;
}

EXPORT Status cublasLtMatrixLayoutCreate(Layout **out, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    *out = new Layout;
    (*out)->type = type;
    (*out)->rows = rows;
    (*out)->columns = columns;
    (*out)->leading = leading;
    return SUCCESS;
}
EXPORT Status cublasLtMatrixLayoutDestroy(Layout *layout) { return delete layout, SUCCESS; }
EXPORT Status cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const void *from, size_t bytes) {
    struct Field {
        void *at;
        size_t bytes;
    } const fields[] = {{&layout->type, 4}, {&layout->order, 4}, {&layout->rows, 8}, {&layout->columns, 8},
                        {&layout->leading, 8}, {&layout->batches, 4}, {&layout->batch_stride, 8}};
    if (attribute < 0 || attribute > 6) return refuse("an attribute of a matrix is unknown");
    if (bytes != fields[attribute].bytes) return INVALID_VALUE;
    std::memcpy(fields[attribute].at, from, bytes);
    return SUCCESS;
}

EXPORT Status cublasLtMatmulPreferenceCreate(Preference **out) { return *out = new Preference, SUCCESS; }
EXPORT Status cublasLtMatmulPreferenceDestroy(Preference *preference) { return delete preference, SUCCESS; }
EXPORT Status cublasLtMatmulPreferenceSetAttribute(Preference *preference, int attribute, const void *from, size_t bytes) {
    if (attribute == 1) {
        if (bytes != 8) return INVALID_VALUE;
        std::memcpy(&preference->workspace_bytes, from, bytes);
    } else if (attribute == 3) {
        if (bytes != 4) return INVALID_VALUE;
        std::memcpy(&preference->reductions, from, bytes);
    } else if (attribute >= 5 && attribute <= 8) {
        if (bytes != 4) return INVALID_VALUE;
        std::memcpy(&preference->alignment[attribute - 5], from, bytes);
    }
    return SUCCESS;
}

EXPORT Status cublasLtMatmulAlgoGetHeuristic(void *handle, MatmulDesc *desc, Layout *a, Layout *b, Layout *c, Layout *d,
                                             Preference *preference, int wanted, HeuristicResult *results, int *found) {
    *found = 0;
    if (!handle || wanted < 1) return INVALID_VALUE;
    Shape shape;
    if (Status status = check(*desc, *a, *b, *c, *d, shape)) return status;
    std::memset(results, 0, sizeof *results);
    Algorithm &algorithm = results->algorithm;
    algorithm.magic = MAGIC;
    // As much as it may have: so a caller that passes less than it was told notices.
    algorithm.workspace_bytes = std::min<uint64_t>(preference->workspace_bytes, 1 << 20);
    std::copy(std::begin(preference->alignment), std::end(preference->alignment), algorithm.alignment);
    algorithm.types = static_cast<uint32_t>(a->type) << 8 | static_cast<uint32_t>(d->type);
    algorithm.reductions = preference->reductions;
    uint64_t of[3] = {shape.m, shape.n, shape.k};
    std::copy(std::begin(of), std::end(of), algorithm.shape);
    results->workspace_bytes = algorithm.workspace_bytes;
    results->waves = 1.0f;
    *found = 1;
    return SUCCESS;
}

static Status check_algorithm(const Algorithm &algorithm, const Product &p, const void *workspace, size_t bytes) {
    if (algorithm.magic != MAGIC) return refuse("the algorithm is not one that the heuristic gave", INVALID_VALUE);
    if (bytes < algorithm.workspace_bytes || (bytes > 0 && !on_cpu::reachable(reinterpret_cast<CUdeviceptr>(workspace), bytes)))
        return refuse("the workspace is smaller than the algorithm needs, or not the device's", INVALID_VALUE);
    uint32_t types = static_cast<uint32_t>(p.a.type) << 8 | static_cast<uint32_t>(p.d.type);
    if (algorithm.types != types) return refuse("the algorithm is one for other number kinds", INVALID_VALUE);
    const void *const pointers[4] = {p.at_a, p.at_b, p.at_c, p.at_d};
    for (int at = 0; at < 4; ++at)
        if (on_cpu::offset_in_allocation(pointers[at]) % algorithm.alignment[at] != 0)
            return refuse("a pointer is not aligned as the preference promised (256 bytes unless it says less)");
    return SUCCESS;
}

EXPORT Status cublasLtMatmul(void *handle, MatmulDesc *desc, const float *alpha, const char *a, Layout *layout_a,
                             const char *b, Layout *layout_b, const float *beta, const char *c, Layout *layout_c, char *d,
                             Layout *layout_d, const Algorithm *algorithm, void *workspace, size_t workspace_bytes,
                             void *stream_handle) {
    if (!handle) return NOT_INITIALIZED;
    if (on_cpu::usable() != CUDA_SUCCESS) return EXECUTION_FAILED;
    Product product{*desc, *layout_a, *layout_b, *layout_c, *layout_d, {}, *alpha, *beta, true, a, b, c, d};
    product.rounds_parts = ((algorithm ? algorithm->reductions : ANY_REDUCTION) & ROUNDING_REDUCTIONS) != 0;
    if (Status status = check(*desc, *layout_a, *layout_b, *layout_c, *layout_d, product.shape)) return status;
    const std::pair<const char *, const Layout *> sides[] = {{a, layout_a}, {b, layout_b}, {c, layout_c}, {d, layout_d}};
    for (auto &[pointer, layout] : sides)
        if (!on_cpu::reachable(reinterpret_cast<CUdeviceptr>(pointer), layout->extent_bytes()))
            return refuse("a matrix is larger than its memory, or not the device's", EXECUTION_FAILED);
    if (algorithm)
        if (Status status = check_algorithm(*algorithm, product, workspace, workspace_bytes)) return status;
    auto stream = on_cpu::find_stream(stream_handle);
    if (!stream) return INVALID_VALUE;
    on_cpu::enqueue(stream, [product] { multiply(product); });
    return SUCCESS;
}
