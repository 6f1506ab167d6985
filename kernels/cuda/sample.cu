// Choosing the next token of each row of logits. It chooses what `model::sampling` chooses on the CPU.
//
//     weight(t) = e^((logit[t] - max) / temperature)
//
// Temperature 0 takes the most likely token. Else tokens are ranked, likelier first, the lower id first among
// equals, and each filter keeps a prefix of that ranking, so that together they keep the shortest of the
// three:
//   - top-k: `top_k` tokens;
//   - top-p: the fewest tokens that hold `top_p` of the weight of those that top-k left;
//   - min-p: tokens of at least `min_p` of the largest weight, which is 1.
// Of what is left the draw, in [0, 1), takes the token at which the running sum of the weights, in the order
// of the ranking, exceeds draw * total. Without any filter the order is that of the ids. A logit that is not
// a number counts as minus infinity, positive infinity as the largest number; a row without any finite logit
// yields NO_TOKEN.
//
// Weights have the CPU's bits: the same polynomial, no product fused with a sum. Running sums are f64, so
// their order does not matter for any draw that will ever be met, and the CPU's token is the token here.
//
// One block a row. No vocabulary is sorted. A token's key is its logit's bits, made to compare like the
// logit, above the complement of its id: keys are all different, and the ranking is their descending order.
// To find where a prefix ends, the range of keys that holds its end is narrowed: a pass over the row measures
// what lies above four bars, and the range shrinks to that between two of them, until it holds no more tokens
// than the block has threads. These go to shared memory and are sorted, a token a thread, and a running sum
// over the threads finds the end. Models are sure enough of themselves that the first bars do: a greedy row
// is read once, a drawn one three times.
#include "common.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / LANES;
constexpr unsigned NO_TOKEN = 0xFFFFFFFF;
constexpr float NO_LOG_PROBABILITY = -9999.0f;
constexpr float LARGEST = 3.402823466e+38f;
using u64 = unsigned long long;

// One row's, as `kernels::cuda::sample` uploads it.
struct Choice {
    float temperature;
    unsigned top_k; // 0: off
    float top_p;    // 1: off
    float min_p;    // 0: off
    double draw;
    unsigned wants_log_probability;
    unsigned unused;
};

// ---- Weights, with the CPU's bits ------------------------------------------------------------------------

__device__ __forceinline__ float clean(float logit) {
    if (isnan(logit)) return -INFINITY;
    if (logit > LARGEST) return LARGEST;
    return logit == 0.0f ? 0.0f : logit; // one zero: its two signs are the same logit
}

// e^x for x <= 0 as model::sampling::softmax computes it: Cody and Waite's reduction, a Taylor series to
// degree 6.
__device__ __forceinline__ float exp_of_negative(float x) {
    float clamped = fmaxf(x, -87.0f);
    float shifted = __fadd_rn(__fmul_rn(clamped, 1.44269504088896340736f), 12582912.0f);
    float n = __fsub_rn(shifted, 12582912.0f);
    float r = __fsub_rn(__fsub_rn(clamped, __fmul_rn(n, 0.6933594f)), __fmul_rn(n, -2.1219444e-4f));
    float p = 1.0f / 720.0f;
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 120.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 24.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 6.0f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f);
    float scaled = __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
    return x < -87.0f ? 0.0f : scaled;
}

struct Row {
    const float *logits;
    unsigned tokens;
    float max;
    float temperature;

    // Of a clean logit.
    __device__ __forceinline__ float weight(float logit) const {
        return exp_of_negative(__fdiv_rn(__fsub_rn(logit, max), temperature));
    }
};

// ---- Keys ------------------------------------------------------------------------------------------------

// No token has the key 0.
__device__ __forceinline__ u64 key_of(float logit, unsigned token) {
    unsigned bits = __float_as_uint(logit);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return u64(bits) << 32 | ~token;
}
__device__ __forceinline__ float logit_of(u64 key) {
    unsigned bits = unsigned(key >> 32);
    return __uint_as_float(bits >> 31 ? bits & 0x7FFFFFFFu : ~bits);
}
__device__ __forceinline__ unsigned token_of(u64 key) { return ~unsigned(key); }

// ---- What the threads of the block find together ---------------------------------------------------------
// All threads come, and all get the result. The barrier before a shared array is written lets a function be
// called again at once.

struct Larger {
    template <typename T> __device__ __forceinline__ T operator()(T x, T y) const { return x < y ? y : x; }
};
struct Smaller {
    template <typename T> __device__ __forceinline__ T operator()(T x, T y) const { return y < x ? y : x; }
};

template <typename Join, typename T> __device__ T block_join(T value) {
    __shared__ T of_warp[WARPS];
#pragma unroll
    for (int flip = LANES / 2; flip > 0; flip /= 2)
        value = Join()(value, __shfl_xor_sync(FULL_WARP, value, flip));
    __syncthreads();
    if (lane_index() == 0) of_warp[warp_index()] = value;
    __syncthreads();
    value = of_warp[lane_index()];
#pragma unroll
    for (int flip = LANES / 2; flip > 0; flip /= 2)
        value = Join()(value, __shfl_xor_sync(FULL_WARP, value, flip));
    return value;
}

__device__ __forceinline__ double warp_running_sum(double value) {
#pragma unroll
    for (unsigned by = 1; by < LANES; by *= 2) {
        double before = __shfl_up_sync(FULL_WARP, value, by);
        if (lane_index() >= int(by)) value += before;
    }
    return value;
}

// The sum over the threads up to this one, and over all.
struct Running {
    double sum, total;
};
__device__ Running running_sum(double value) {
    __shared__ double of_warp[WARPS];
    double sum = warp_running_sum(value);
    __syncthreads();
    if (lane_index() == LANES - 1) of_warp[warp_index()] = sum;
    __syncthreads();
    double warps = warp_running_sum(of_warp[lane_index()]);
    double before = __shfl_sync(FULL_WARP, warps, max(warp_index() - 1, 0));
    return {warp_index() == 0 ? sum : before + sum, __shfl_sync(FULL_WARP, warps, LANES - 1)};
}

// The first thread for which `holds`; else the last that `counts`: rounding may leave a goal just beyond the
// end. THREADS or more if there is none.
__device__ __forceinline__ unsigned find_thread(bool holds, bool counts) {
    unsigned self = threadIdx.x;
    unsigned found = block_join<Smaller>(holds ? self : counts ? 2 * THREADS - 1 - self : 2 * THREADS);
    return found < THREADS || found == 2 * THREADS ? found : 2 * THREADS - 1 - found;
}

// The most likely token's key.
__device__ u64 find_best(const float *logits, unsigned tokens) {
    u64 best = 0;
#pragma unroll 4
    for (unsigned token = threadIdx.x; token < tokens; token += THREADS)
        best = Larger()(best, key_of(clean(logits[token]), token));
    return block_join<Larger>(best);
}

// ---- Without filters: in the order of the ids ------------------------------------------------------------

// Weights are summed a span at a time, and spans one after another. So many spans there may be.
constexpr unsigned SPAN = THREADS;
constexpr unsigned MOST_SPANS = THREADS;
constexpr unsigned HALF_WARP = LANES / 2;

// The sum over 16 lanes, in their order.
__device__ __forceinline__ double sum_in_order(double value) {
    double sum = 0.0;
    unsigned first = lane_index() & HALF_WARP;
    for (unsigned lane = 0; lane < HALF_WARP; ++lane) sum += __shfl_sync(FULL_WARP, value, first + lane);
    return sum;
}

// Sums of the weights of each span, with the CPU's bits: sixteen f32 sums, token t in sum t % 16, those added
// in f64, then the tokens of a last incomplete sixteen in f64. Half a warp takes a span.
__device__ void sum_spans(const Row &row, double *sums) {
    unsigned spans = (row.tokens + SPAN - 1) / SPAN, lane = threadIdx.x % HALF_WARP;
    for (unsigned first = 0; first < spans; first += THREADS / HALF_WARP) {
        unsigned span = first + threadIdx.x / HALF_WARP;
        unsigned begin = min(span * SPAN, row.tokens), end = min(begin + SPAN, row.tokens);
        unsigned whole = begin + (end - begin) / HALF_WARP * HALF_WARP;
        float sum = 0.0f;
#pragma unroll 4
        for (unsigned token = begin + lane; token < whole; token += HALF_WARP)
            sum = __fadd_rn(sum, row.weight(clean(row.logits[token])));
        double rest = whole + lane < end ? row.weight(clean(row.logits[whole + lane])) : 0.0f;
        double of_span = sum_in_order(sum) + sum_in_order(rest);
        if (lane == 0 && span < spans) sums[span] = of_span;
    }
    __syncthreads();
}

// The key of the token at `draw` of the whole distribution; `best` if nothing else has any weight.
__device__ u64 draw_from_all(const Row &row, double draw, u64 best) {
    __shared__ double sums[MOST_SPANS];
    __shared__ double before;
    __shared__ u64 drawn;
    sum_spans(row, sums);
    double sum = threadIdx.x < (row.tokens + SPAN - 1) / SPAN ? sums[threadIdx.x] : 0.0;
    Running running = running_sum(sum);
    double goal = draw * running.total;
    unsigned span = find_thread(running.sum > goal && sum > 0.0, sum > 0.0);
    if (threadIdx.x == span) before = running.sum - sum;
    if (threadIdx.x == 0) drawn = best;
    __syncthreads();
    if (span >= THREADS) return best; // the whole block
    unsigned token = span * SPAN + threadIdx.x;
    float logit = token < row.tokens ? clean(row.logits[token]) : -INFINITY;
    double weight = row.weight(logit);
    double passed = before + running_sum(weight).sum;
    if (find_thread(passed > goal && weight > 0.0, weight > 0.0) == threadIdx.x) drawn = key_of(logit, token);
    __syncthreads();
    return drawn;
}

// ---- With filters: in the order of the ranking -----------------------------------------------------------

// How the end of a prefix is known: the first token at which
enum Goal {
    COUNT,  // so many tokens are reached;
    MASS,   // such a part of all weight is reached;
    BEYOND, // such a part of all weight is exceeded.
};

constexpr int BARS = 4;

// What the block knows of the tokens that concern it: those with any weight, and no less than is asked for.
struct Search {
    u64 listed[THREADS]; // keys, descending; 0 where there are no more
    unsigned length;
    bool complete; // the list begins with the first token of the ranking
    u64 bars[BARS];
    double tallies[2 * BARS]; // of the tokens at each bar and above: their mass, then their count
    u64 found;

    __device__ __forceinline__ double mass(int bar) const { return tallies[bar]; }
    __device__ __forceinline__ double count(int bar) const { return tallies[BARS + bar]; }
};

__device__ __forceinline__ double measured(Goal goal, double mass, double count) {
    return goal == COUNT ? count : mass;
}
__device__ __forceinline__ bool reaches(Goal goal, double measure, double target) {
    return goal == BEYOND ? measure > target : measure >= target;
}

// Measures what lies at each bar and above. The last bar is the lowest.
__device__ void measure(const Row &row, float least, Search &search) {
    __shared__ double of_warp[2 * BARS][WARPS];
    double mass[BARS] = {};
    unsigned count[BARS] = {};
    u64 lowest = search.bars[BARS - 1];
    for (unsigned token = threadIdx.x; token < row.tokens; token += THREADS) {
        float logit = clean(row.logits[token]);
        u64 key = key_of(logit, token);
        if (key < lowest) continue;
        float weight = row.weight(logit);
        if (weight <= 0.0f || weight < least) continue;
#pragma unroll
        for (int bar = 0; bar < BARS; ++bar) {
            if (key < search.bars[bar]) continue;
            mass[bar] += weight;
            count[bar] += 1;
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * BARS; ++i) {
        double sum = i < BARS ? mass[i] : double(count[i - BARS]);
        for (int flip = LANES / 2; flip > 0; flip /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, flip);
        if (lane_index() == 0) of_warp[i][warp_index()] = sum;
    }
    __syncthreads();
    if (warp_index() < 2 * BARS) {
        double sum = of_warp[warp_index()][lane_index()];
        for (int flip = LANES / 2; flip > 0; flip /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, flip);
        if (lane_index() == 0) search.tallies[warp_index()] = sum;
    }
    __syncthreads();
}

// Descending, by a bitonic network over as many places as are needed.
__device__ void sort_list(Search &search) {
    unsigned places = 1;
    while (places < search.length) places *= 2;
    unsigned self = threadIdx.x;
    for (unsigned run = 2; run <= places; run *= 2) {
        for (unsigned apart = run / 2; apart > 0; apart /= 2) {
            unsigned other = self ^ apart;
            if (other > self && self < places) {
                u64 mine = search.listed[self], its = search.listed[other];
                bool descending = (self & run) == 0;
                if (descending ? mine < its : mine > its) {
                    search.listed[self] = its;
                    search.listed[other] = mine;
                }
            }
            __syncthreads();
        }
    }
}

// Lists the tokens with low <= key < high.
__device__ void list_range(const Row &row, u64 low, u64 high, float least, Search &search) {
    search.listed[threadIdx.x] = 0;
    if (threadIdx.x == 0) search.length = 0;
    __syncthreads();
#pragma unroll 2
    for (unsigned token = threadIdx.x; token < row.tokens; token += THREADS) {
        float logit = clean(row.logits[token]);
        u64 key = key_of(logit, token);
        if (key < low || key >= high) continue;
        float weight = row.weight(logit);
        if (weight <= 0.0f || weight < least) continue;
        unsigned place = atomicAdd(&search.length, 1u);
        if (place < THREADS) search.listed[place] = key;
    }
    __syncthreads();
    sort_list(search);
}

// The first bars: at parts of the largest weight. Where these are makes a difference to the speed alone.
__device__ __forceinline__ u64 first_bar(const Row &row, unsigned bar, u64 floor) {
    if (bar == BARS - 1) return floor;
    float part = bar == 0 ? 0.1f : bar == 1 ? 3e-3f : 3e-5f;
    float logit = row.max + logf(part) * row.temperature;
    return Larger()(key_of(clean(logit), NO_TOKEN), floor);
}

// Lists a range of tokens that holds the end of the prefix. Returns the range's target and what lies above
// it.
struct Narrowed {
    double target, mass, count;
};
__device__ Narrowed narrow(const Row &row, Goal goal, double amount, u64 best, u64 floor, float least,
                           Search &search) {
    u64 low = floor, high = best + 1;
    Narrowed above = {-1.0, 0.0, 0.0};
    if (threadIdx.x < BARS) search.bars[threadIdx.x] = first_bar(row, threadIdx.x, floor);
    for (;;) {
        __syncthreads();
        measure(row, least, search);
        if (above.target < 0.0) above.target = goal == COUNT ? amount : amount * search.mass(BARS - 1);
        int part = 0; // the highest that reaches the target, or below which there is nothing
        while (part < BARS - 1 && search.count(part) < search.count(BARS - 1) &&
               !reaches(goal, measured(goal, search.mass(part), search.count(part)), above.target))
            ++part;
        low = search.bars[part];
        if (part > 0) {
            high = search.bars[part - 1];
            above.mass = search.mass(part - 1);
            above.count = search.count(part - 1);
        }
        bool few = search.count(part) - above.count <= double(THREADS);
        __syncthreads(); // all have read the bars
        if (few) break;
        if (threadIdx.x < BARS)
            search.bars[threadIdx.x] = low + (high - low) / BARS * (BARS - 1 - threadIdx.x);
    }
    list_range(row, low, high, least, search);
    if (threadIdx.x == 0) search.complete = above.count == 0.0;
    return above;
}

// The shortest prefix that reaches the goal; all tokens if none does. Tokens below `floor` or lighter than
// `least` do not count.
__device__ u64 seek(const Row &row, Goal goal, double amount, u64 best, u64 floor, float least,
                    Search &search) {
    __syncthreads(); // what was found before has been read
    Narrowed above = {-1.0, 0.0, 0.0};
    if (!search.complete) above = narrow(row, goal, amount, best, floor, least, search);
    u64 key = search.listed[threadIdx.x];
    float weight = key != 0 && key >= floor ? row.weight(logit_of(key)) : 0.0f;
    bool counts = weight > 0.0f && weight >= least;
    Running mass = running_sum(counts ? weight : 0.0);
    if (above.target < 0.0) above.target = goal == COUNT ? amount : amount * mass.total;
    // The list is sorted, and what counts stands at its head.
    double reached = measured(goal, above.mass + mass.sum, above.count + threadIdx.x + 1);
    unsigned end = find_thread(counts && reaches(goal, reached, above.target), counts);
    if (threadIdx.x == 0) search.found = best;
    __syncthreads();
    if (threadIdx.x == end) search.found = key;
    __syncthreads();
    return search.found;
}

__device__ u64 draw_filtered(const Row &row, const Choice &choice, u64 best) {
    __shared__ Search search;
    if (threadIdx.x == 0) search.complete = false;
    u64 floor = 0;
#pragma unroll 1
    for (int goal = COUNT; goal <= BEYOND; ++goal) { // one call: the compiler would write it out three times
        if (goal == COUNT && !(choice.top_k > 0 && choice.top_k < row.tokens)) continue;
        if (goal == MASS && choice.top_p >= 1.0f) continue;
        double amount = goal == COUNT ? choice.top_k : goal == MASS ? choice.top_p : choice.draw;
        float least = goal == BEYOND ? choice.min_p : 0.0f;
        floor = seek(row, Goal(goal), amount, best, floor, least, search);
    }
    return floor;
}

// ---- The kernel ------------------------------------------------------------------------------------------

__device__ __forceinline__ bool has_filter(const Choice &choice, unsigned tokens) {
    return (choice.top_k > 0 && choice.top_k < tokens) || choice.top_p < 1.0f || choice.min_p > 0.0f;
}

__device__ u64 choose(const Row &row, const Choice &choice, u64 best) {
    if (choice.temperature == 0.0f) return best;
    if (has_filter(choice, row.tokens)) return draw_filtered(row, choice, best);
    return draw_from_all(row, choice.draw, best);
}

// The logarithm of the probability that the model itself gives a token: at temperature 1, without filters.
__device__ float log_probability(const Row &row, u64 key) {
    __shared__ double sums[MOST_SPANS];
    Row plain = {row.logits, row.tokens, row.max, 1.0f};
    __syncthreads();
    sum_spans(plain, sums);
    double total = running_sum(threadIdx.x < (row.tokens + SPAN - 1) / SPAN ? sums[threadIdx.x] : 0.0).total;
    return fmaxf(float(double(logit_of(key)) - double(row.max) - log(total)), NO_LOG_PROBABILITY);
}

// One block a row of `tokens` logits, at most SPAN * MOST_SPANS. `chosen` stays on the device for the next
// pass; `told` is the host's: a token and the bits of its log-probability for each row.
extern "C" __global__ void __launch_bounds__(THREADS)
    choose_tokens(const float *logits, unsigned tokens, const unsigned *choices, unsigned *chosen,
                  unsigned *told) {
    const Choice &choice = reinterpret_cast<const Choice *>(choices)[blockIdx.x];
    Row row = {logits + size_t(blockIdx.x) * tokens, tokens, 0.0f, choice.temperature};
    u64 best = find_best(row.logits, tokens);
    row.max = logit_of(best);
    unsigned token = NO_TOKEN;
    float log_of_probability = NO_LOG_PROBABILITY;
    if (best != 0 && row.max > -INFINITY) { // the same for the whole block
        u64 key = choose(row, choice, best);
        token = token_of(key);
        if (choice.wants_log_probability) log_of_probability = log_probability(row, key);
    }
    if (threadIdx.x != 0) return;
    chosen[blockIdx.x] = token;
    told[2 * blockIdx.x] = token;
    told[2 * blockIdx.x + 1] = __float_as_uint(log_of_probability);
}

ON_CPU_KERNEL(choose_tokens);
