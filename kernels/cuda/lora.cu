// Low-rank deltas of many adapters at once:  out[row, column..] += scale * B (A x[row])
//
// Rows of one adapter are a *segment*; a launch serves every segment of a group of linear layers (all
// adapters, and all of q, k and v, say). Two launches a group: *shrink* leaves the sums A x in scratch
// memory, *expand* multiplies them with B and adds. Every adapter keeps its own rank (S-LoRA's MBGMV; nothing
// is padded), so the work is a list:
//
//   unit of the shrink:  one tile of rows x one block of 16 ranks x one chunk of A's columns  (about 32 KB)
//   unit of the expand:  one tile of rows x some panels of 16 outputs, all rank blocks        (about 32 KB)
//
// A thread block takes one unit, whichever adapter it is of, so large and small ranks share the machine
// evenly. It finds its segment in the table `first`: the number of the first unit of each segment, ascending,
// the rest of the table filled with the number of all units. Blocks beyond that leave at once: grids have
// some spare, so that a recorded launch is good for the next step's segments too.
//
// Layout. Factors lie as on the host (kernels/src/lora/layout.rs): cut into blocks of 16 ranks, the last may
// be short,
//
//   A, block of w ranks:  [columns][w ranks]        B, block of w ranks:  [panels of 16 outputs][w ranks][16]
//
// which is the same thing twice: a *panel*, [depth][lanes], summed along depth. bf16 factors come in pairs
// along depth, the lower first in A, the upper first in B; they are read as they are, B's pairs turned in the
// register.
//
// Arithmetic. Everything runs on the tensor cores in bf16, whatever the kinds: a number is split into bf16
// pieces that add up to it, 1 for bf16, 2 for f16 (8 + 3 bits: exactly), 3 for f32, and the products of
// pieces are summed in f32. So bf16 activations meet f16 adapters without a loss, and neither range nor
// precision of f32 is given up. Products of two late pieces are left out; they are as small as the rounding
// of the operands' own kinds. Inputs are permuted along depth so that a lane reads neighbours: lane (group,
// four) of a warp has depths 4 * four..+3 of each 16, and panel lanes 2 * group and the next. A warp's loads
// of a panel cover 512 bytes without a gap.
//
// One row costs as much as 16: few rows are bound by the bytes of A and B anyway, each read once from memory,
//   bytes = sum over segments of rank * (columns + outputs) * bytes of a number   (+ x, out, sums)
// and so a row's delta has the same bits whatever stands beside it: sums run over the columns of a chunk in
// an order that only A's shape decides, then over chunks, then over rank blocks, ascending.
//
// Padding (Punica's BGMV), for comparison: a segment's `blocks` may exceed its rank. The blocks beyond are
// computed with bytes of its own blocks, and their sums thrown away.

#include "common.cuh"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / LANES;
static constexpr unsigned BLOCK = 16;      // ranks of a block, outputs of a panel, depth of a step
static constexpr unsigned TILE_ROWS = 32;  // rows of a unit
static constexpr int AHEAD = 4;            // steps whose bytes are asked for before the first is used

// As the host writes it (kernels/src/cuda/lora/plan.rs): 64 bytes.
struct __align__(16) Segment {
    unsigned long long a, b;      // addresses of the factors
    unsigned first_row, rows;     // of x and out
    unsigned columns, outputs;    // of A, of B
    unsigned rank;                // the true one
    unsigned first_block, blocks; // rank blocks to compute
    unsigned chunk;               // columns of a unit of the shrink
    unsigned column;              // of out, for the first output
    unsigned kinds_and_panels;    // kind of A | kind of B << 8 | panels of a unit of the expand << 16
    unsigned sums;                // first number of its sums
    float scale;

    __device__ unsigned kind_of_a() const { return kinds_and_panels & 0xFF; }
    __device__ unsigned kind_of_b() const { return kinds_and_panels >> 8 & 0xFF; }
    __device__ unsigned panels() const { return kinds_and_panels >> 16; }
    __device__ unsigned chunks() const { return (columns + chunk - 1) / chunk; }
    __device__ unsigned own_blocks() const { return (rank + BLOCK - 1) / BLOCK; }
    __device__ unsigned rows_of(unsigned tile) const { return min(TILE_ROWS, rows - tile * TILE_ROWS); }

    // Where the bytes of block `block` are: those of a padding block, of any.
    __device__ unsigned read_block(unsigned block) const {
        unsigned own = own_blocks();
        return block < own ? block : first_block + (block - own) % (own - first_block);
    }
    __device__ unsigned ranks_of(unsigned own_block) const { return min(BLOCK, rank - own_block * BLOCK); }

    // Sums of a tile, a block, a chunk: [rows of the tile][16 ranks].
    __device__ size_t sums_at(unsigned tile, unsigned block, unsigned at_chunk) const {
        size_t of_tile = size_t(blocks - first_block) * chunks() * BLOCK;
        size_t before = size_t(block - first_block) * chunks() + at_chunk;
        return sums + of_tile * tile * TILE_ROWS + before * rows_of(tile) * BLOCK;
    }
};

// Brings the segment that this block's unit is of, and the unit's number within it. False if there is no such
// unit.
__device__ bool find_segment(const unsigned *first, const Segment *table, unsigned segments, Segment &segment,
                             unsigned &unit) {
    __shared__ unsigned found, before;
    if (threadIdx.x == 0) found = segments;
    __syncthreads();
    for (unsigned at = threadIdx.x; at < segments; at += THREADS) {
        unsigned begin = first[at];
        if (begin <= blockIdx.x && blockIdx.x < first[at + 1]) found = at, before = begin;
    }
    __syncthreads();
    if (found == segments) return false;
    if (threadIdx.x < sizeof(Segment) / 4)
        reinterpret_cast<unsigned *>(&segment)[threadIdx.x] =
            reinterpret_cast<const unsigned *>(table + found)[threadIdx.x];
    __syncthreads();
    unit = blockIdx.x - before;
    return true;
}

// ---- Numbers as sums of bf16 pieces -----------------------------------------------------------------------

template <typename T> struct PiecesOf;
template <> struct PiecesOf<bf16> { static constexpr int COUNT = 1; };
template <> struct PiecesOf<f16> { static constexpr int COUNT = 2; };
template <> struct PiecesOf<float> { static constexpr int COUNT = 3; };

// Two numbers as pieces, each a register for the tensor cores: the largest first.
template <int PIECES>
__device__ __forceinline__ void split(float low, float high, unsigned (&pieces)[PIECES]) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        unsigned pair = pack_pair<bf16>(low, high);
        pieces[piece] = pair;
        low -= __uint_as_float(pair << 16);
        high -= __uint_as_float(pair & 0xFFFF0000u);
    }
}

// The half in the lower bits.
__device__ __forceinline__ float half_of(unsigned bits) {
    return to_float(__ushort_as_half(static_cast<unsigned short>(bits & 0xFFFF)));
}

// ---- Panels: [depth][lanes] of one kind -------------------------------------------------------------------
// A lane's part of 16 depths: depths `depth_at`..+3, lanes 2 * group and the next; zeros where there is none.
// `pieces` is what mma reads: [piece][even lanes, odd lanes][depths 0 and 1, depths 2 and 3]. EVEN: `lanes`
// is even, so that two lie at a multiple of their size and are there or not together.

template <int PIECES> using PanelPieces = unsigned[PIECES][2][2];

struct HalfPanel {
    static constexpr int PIECES = 2;
    static constexpr unsigned BYTES = 2, PAIR = 1;
    unsigned pair[4]; // of lanes, for each depth

    template <bool EVEN>
    __device__ __forceinline__ void load(const char *panel, unsigned depth_at, unsigned depth,
                                         unsigned lanes) {
        unsigned lane = 2 * (lane_index() / 4);
        const unsigned short *from =
            reinterpret_cast<const unsigned short *>(panel) + size_t(depth_at) * lanes + lane;
#pragma unroll
        for (unsigned at = 0; at < 4; ++at) {
            bool there = depth_at + at < depth && lane < lanes;
            if constexpr (EVEN) {
                pair[at] = there ? __ldg(reinterpret_cast<const unsigned *>(from + at * lanes)) : 0;
            } else {
                unsigned high = there && lane + 1 < lanes ? __ldg(from + at * lanes + 1) : 0;
                pair[at] = (there ? __ldg(from + at * lanes) : 0) | high << 16;
            }
        }
    }
    __device__ __forceinline__ void to_pieces(PanelPieces<PIECES> &pieces) const {
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            unsigned first = pair[2 * word], second = pair[2 * word + 1], even[PIECES], odd[PIECES];
            split(half_of(first), half_of(second), even);
            split(half_of(first >> 16), half_of(second >> 16), odd);
            for (int piece = 0; piece < PIECES; ++piece) {
                pieces[piece][0][word] = even[piece];
                pieces[piece][1][word] = odd[piece];
            }
        }
    }
};

struct FloatPanel {
    static constexpr int PIECES = 3;
    static constexpr unsigned BYTES = 4, PAIR = 1;
    float2 pair[4];

    template <bool EVEN>
    __device__ __forceinline__ void load(const char *panel, unsigned depth_at, unsigned depth,
                                         unsigned lanes) {
        unsigned lane = 2 * (lane_index() / 4);
        const float *from = reinterpret_cast<const float *>(panel) + size_t(depth_at) * lanes + lane;
#pragma unroll
        for (unsigned at = 0; at < 4; ++at) {
            bool there = depth_at + at < depth && lane < lanes;
            if constexpr (EVEN) {
                pair[at] = there ? __ldg(reinterpret_cast<const float2 *>(from + at * lanes)) : float2{0, 0};
            } else {
                pair[at].x = there ? __ldg(from + at * lanes) : 0.0f;
                pair[at].y = there && lane + 1 < lanes ? __ldg(from + at * lanes + 1) : 0.0f;
            }
        }
    }
    __device__ __forceinline__ void to_pieces(PanelPieces<PIECES> &pieces) const {
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            unsigned even[PIECES], odd[PIECES];
            split(pair[2 * word].x, pair[2 * word + 1].x, even);
            split(pair[2 * word].y, pair[2 * word + 1].y, odd);
            for (int piece = 0; piece < PIECES; ++piece) {
                pieces[piece][0][word] = even[piece];
                pieces[piece][1][word] = odd[piece];
            }
        }
    }
};

// Pairs along depth are what mma reads already. An odd depth was filled up with zeroes by who wrote the
// panel.
template <bool UPPER_FIRST> struct PairPanel {
    static constexpr int PIECES = 1;
    static constexpr unsigned BYTES = 2, PAIR = 2;
    uint2 word[2]; // for each pair of depths, two lanes

    template <bool EVEN>
    __device__ __forceinline__ void load(const char *panel, unsigned depth_at, unsigned depth,
                                         unsigned lanes) {
        unsigned lane = 2 * (lane_index() / 4);
        const unsigned *words = reinterpret_cast<const unsigned *>(panel);
        const unsigned *from = words + size_t(depth_at / 2) * lanes + lane;
#pragma unroll
        for (unsigned at = 0; at < 2; ++at) {
            bool there = depth_at + 2 * at < depth && lane < lanes;
            if constexpr (EVEN) {
                word[at] = there ? __ldg(reinterpret_cast<const uint2 *>(from + at * lanes)) : uint2{0, 0};
            } else {
                word[at].x = there ? __ldg(from + at * lanes) : 0;
                word[at].y = there && lane + 1 < lanes ? __ldg(from + at * lanes + 1) : 0;
            }
        }
    }
    __device__ __forceinline__ void to_pieces(PanelPieces<PIECES> &pieces) const {
#pragma unroll
        for (int at = 0; at < 2; ++at) {
            pieces[0][0][at] = UPPER_FIRST ? __byte_perm(word[at].x, 0, 0x1032) : word[at].x;
            pieces[0][1][at] = UPPER_FIRST ? __byte_perm(word[at].y, 0, 0x1032) : word[at].y;
        }
    }
};

// sums[0] are the even lanes of a panel, sums[1] the odd ones.
template <int LEFT, int RIGHT>
__device__ __forceinline__ void multiply(float (&sums)[2][4], const unsigned (&left)[LEFT][4],
                                         const PanelPieces<RIGHT> &right) {
    constexpr int MOST = LEFT > RIGHT ? LEFT : RIGHT;
#pragma unroll
    for (int i = 0; i < LEFT; ++i) {
#pragma unroll
        for (int j = 0; j < RIGHT; ++j) {
            if (i + j < MOST) {
                mma_16x8x16<bf16>(sums[0], left[i], right[j][0]);
                mma_16x8x16<bf16>(sums[1], left[i], right[j][1]);
            }
        }
    }
}

// The sums of row `group + 8 * lower` for panel lanes 4 * four..+3: neighbours again.
__device__ __forceinline__ float4 row_of(const float (&sums)[2][4], int lower) {
    int at = 2 * lower;
    return make_float4(sums[0][at], sums[1][at], sums[0][at + 1], sums[1][at + 1]);
}

// ---- Shrink -----------------------------------------------------------------------------------------------

// Columns `at`..+3 of a row of x as pieces; zeros beyond its width. WIDE: the width is a multiple of 4.
template <bool WIDE, typename T>
__device__ __forceinline__ void load_four(const T *row, unsigned at, unsigned width,
                                          unsigned (&pieces)[PiecesOf<T>::COUNT][2]) {
    constexpr int PIECES = PiecesOf<T>::COUNT;
    float number[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if constexpr (WIDE && sizeof(T) == 4) {
        float4 four = at < width ? __ldg(reinterpret_cast<const float4 *>(row + at)) : float4{0, 0, 0, 0};
        number[0] = four.x, number[1] = four.y, number[2] = four.z, number[3] = four.w;
    } else if constexpr (WIDE) {
        uint2 two = at < width ? __ldg(reinterpret_cast<const uint2 *>(row + at)) : uint2{0, 0};
        if constexpr (PIECES == 1) {
            pieces[0][0] = two.x, pieces[0][1] = two.y;
            return;
        }
        number[0] = half_of(two.x), number[1] = half_of(two.x >> 16);
        number[2] = half_of(two.y), number[3] = half_of(two.y >> 16);
    } else {
#pragma unroll
        for (unsigned i = 0; i < 4; ++i)
            if (at + i < width) number[i] = to_float(row[at + i]);
    }
#pragma unroll
    for (int word = 0; word < 2; ++word) {
        unsigned two[PIECES];
        split(number[2 * word], number[2 * word + 1], two);
        for (int piece = 0; piece < PIECES; ++piece) pieces[piece][word] = two[piece];
    }
}

// Sixteen rows from `x` on, of which `rows` exist, as mma's left side.
template <bool WIDE, typename T>
__device__ __forceinline__ void load_rows(const T *x, unsigned rows, unsigned at, unsigned width,
                                          unsigned (&left)[PiecesOf<T>::COUNT][4]) {
    unsigned group = lane_index() / 4;
#pragma unroll
    for (unsigned lower = 0; lower < 2; ++lower) {
        unsigned row = group + 8 * lower, words[PiecesOf<T>::COUNT][2] = {};
        if (row < rows) load_four<WIDE>(x + size_t(row) * width, at, width, words);
        for (int piece = 0; piece < PiecesOf<T>::COUNT; ++piece) {
            left[piece][lower] = words[piece][0];
            left[piece][lower + 2] = words[piece][1];
        }
    }
}

// This warp's steps of a chunk: sums[half of the tile] += x A. FAST: x is WIDE and A is EVEN.
template <typename Panel, bool FAST, typename T>
__device__ __forceinline__ void shrink_steps(const char *a, unsigned ranks, unsigned begin, unsigned end,
                                             const T *x, unsigned rows, unsigned width,
                                             float (&sums)[2][2][4]) {
    constexpr unsigned TOGETHER = FAST && Panel::BYTES == 2 ? AHEAD : 1;
    unsigned four = 4 * (lane_index() % 4);
#pragma unroll 1
    for (unsigned at = begin + BLOCK * warp_index(); at < end; at += TOGETHER * BLOCK * WARPS) {
        Panel ahead[TOGETHER];
#pragma unroll
        for (unsigned step = 0; step < TOGETHER; ++step)
            ahead[step].template load<FAST>(a, at + step * BLOCK * WARPS + four, end, ranks);
#pragma unroll
        for (unsigned step = 0; step < TOGETHER; ++step) {
            unsigned column = at + step * BLOCK * WARPS;
            if (column >= end) break;
            PanelPieces<Panel::PIECES> right;
            ahead[step].to_pieces(right);
#pragma unroll
            for (unsigned half = 0; half < 2; ++half) {
                if (16 * half >= rows) continue;
                unsigned left[PiecesOf<T>::COUNT][4];
                load_rows<FAST>(x + size_t(16 * half) * width, rows - 16 * half, column + four, width, left);
                multiply(sums[half], left, right);
            }
        }
    }
}

// A unit: A's block `own`, columns begin..end.
template <typename Panel, typename T>
__device__ __forceinline__ void shrink_unit(const Segment &segment, unsigned own, unsigned begin,
                                            unsigned end, const T *x, unsigned rows, unsigned width,
                                            float (&sums)[2][2][4]) {
    unsigned ranks = segment.ranks_of(own), stored = segment.columns + segment.columns % Panel::PAIR;
    const char *a = reinterpret_cast<const char *>(segment.a) + size_t(own) * BLOCK * stored * Panel::BYTES;
    if (ranks % 2 == 0 && width % 4 == 0) {
        shrink_steps<Panel, true>(a, ranks, begin, end, x, rows, width, sums);
    } else {
        shrink_steps<Panel, false>(a, ranks, begin, end, x, rows, width, sums);
    }
}

template <typename T>
__device__ void shrink(const unsigned *first, const Segment *table, unsigned segments, const T *x,
                       unsigned width, float *sums) {
    __shared__ __align__(16) float of_warp[WARPS][TILE_ROWS][BLOCK];
    __shared__ Segment segment;
    unsigned unit;
    if (!find_segment(first, table, segments, segment, unit)) return;
    unsigned computed = segment.blocks - segment.first_block;
    unsigned block = segment.first_block + unit % computed;
    unsigned chunk = unit / computed % segment.chunks(), tile = unit / computed / segment.chunks();
    unsigned rows = segment.rows_of(tile), begin = chunk * segment.chunk;
    unsigned end = min(segment.columns, begin + segment.chunk);
    x += size_t(segment.first_row + tile * TILE_ROWS) * width;

    unsigned own = segment.read_block(block);
    float mine[2][2][4] = {};
    if (segment.kind_of_a() == 0) {
        shrink_unit<FloatPanel>(segment, own, begin, end, x, rows, width, mine);
    } else if (segment.kind_of_a() == 1) {
        shrink_unit<HalfPanel>(segment, own, begin, end, x, rows, width, mine);
    } else {
        shrink_unit<PairPanel<false>>(segment, own, begin, end, x, rows, width, mine);
    }

#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            int row = 16 * half + 8 * lower + lane_index() / 4;
            float *to = &of_warp[warp_index()][row][4 * (lane_index() % 4)];
            *reinterpret_cast<float4 *>(to) = row_of(mine[half], lower);
        }
    __syncthreads();
    sums += segment.sums_at(tile, block, chunk);
    for (unsigned at = threadIdx.x; at < rows * BLOCK; at += THREADS) {
        float sum = 0.0f;
        for (int warp = 0; warp < WARPS; ++warp) sum += of_warp[warp][at / BLOCK][at % BLOCK];
        sums[at] = block < segment.own_blocks() ? sum : 0.0f;
    }
}

// ---- Expand -----------------------------------------------------------------------------------------------

// The sums of a tile and a rank block: all chunks of them together, scaled. For all threads of a block, which
// have met before they read `to`, and meet before it is written again.
__device__ __forceinline__ void gather_sums(const Segment &segment, unsigned tile, unsigned block,
                                            const float *sums, float (&to)[TILE_ROWS][BLOCK]) {
    unsigned rows = segment.rows_of(tile), chunks = segment.chunks();
    const float *from = sums + segment.sums_at(tile, block, 0) + 4 * threadIdx.x;
    if (threadIdx.x < TILE_ROWS * BLOCK / 4) {
        float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
        if (threadIdx.x < rows * BLOCK / 4) {
#pragma unroll 4
            for (unsigned chunk = 0; chunk < chunks; ++chunk) {
                float4 part = *reinterpret_cast<const float4 *>(from + chunk * rows * BLOCK);
                total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
            }
        }
        float scale = segment.scale;
        total = {scale * total.x, scale * total.y, scale * total.z, scale * total.w};
        *reinterpret_cast<float4 *>(&to[threadIdx.x / 4][4 * (threadIdx.x % 4)]) = total;
    }
}

// Sixteen rows of sums from `first_row` on, as mma's left side.
template <int PIECES>
__device__ __forceinline__ void load_sums(const float (&sums)[TILE_ROWS][BLOCK], unsigned first_row,
                                          unsigned (&left)[PIECES][4]) {
#pragma unroll
    for (unsigned lower = 0; lower < 2; ++lower) {
        const float *row = &sums[first_row + lane_index() / 4 + 8 * lower][4 * (lane_index() % 4)];
        float4 four = *reinterpret_cast<const float4 *>(row);
        unsigned low[PIECES], high[PIECES];
        split(four.x, four.y, low);
        split(four.z, four.w, high);
        for (int piece = 0; piece < PIECES; ++piece) {
            left[piece][lower] = low[piece];
            left[piece][lower + 2] = high[piece];
        }
    }
}

// out[..4] += delta, or as many of them as `count` says. WIDE: all, and they lie at a multiple of their size.
template <bool WIDE, typename T>
__device__ __forceinline__ void add_four(T *out, float4 delta, unsigned count) {
    struct __align__(4 * sizeof(T)) Four { T at[4]; };
    float of[4] = {delta.x, delta.y, delta.z, delta.w};
    if constexpr (WIDE) {
        Four four = *reinterpret_cast<Four *>(out);
#pragma unroll
        for (int i = 0; i < 4; ++i) four.at[i] = from_float<T>(to_float(four.at[i]) + of[i]);
        *reinterpret_cast<Four *>(out) = four;
    } else {
#pragma unroll
        for (unsigned i = 0; i < 4; ++i)
            if (i < count) out[i] = from_float<T>(to_float(out[i]) + of[i]);
    }
}

// HALVES of a tile times this warp's PANELS: every eighth from `panel` on, before `end`. FAST: B is EVEN, out
// is WIDE. All warps come, those without a panel too.
template <typename Panel, bool FAST, int HALVES, unsigned PANELS, typename T>
__device__ __forceinline__ void expand_panels(const Segment &segment, unsigned tile, unsigned panel,
                                              unsigned end, const float *sums,
                                              float (&gathered)[TILE_ROWS][BLOCK], T *out, unsigned stride) {
    // Twice the bits of 16-bit outputs are enough for what is multiplied with B.
    constexpr int PIECES = sizeof(T) == 4 ? 3 : 2;
    unsigned rows = segment.rows_of(tile), four = 4 * (lane_index() % 4);
    float mine[HALVES][PANELS][2][4] = {};
#pragma unroll 1
    for (unsigned block = segment.first_block; block < segment.blocks; ++block) {
        unsigned own = segment.read_block(block), ranks = segment.ranks_of(own);
        unsigned panel_bytes = BLOCK * (ranks + ranks % Panel::PAIR) * Panel::BYTES;
        size_t before = size_t(own) * BLOCK * segment.outputs * Panel::BYTES;
        const char *b = reinterpret_cast<const char *>(segment.b) + before;
        Panel ahead[PANELS];
#pragma unroll
        for (unsigned at = 0; at < PANELS; ++at) {
            unsigned which = panel + WARPS * at;
            unsigned lanes = which < end ? min(BLOCK, segment.outputs - which * BLOCK) : 0;
            ahead[at].template load<FAST>(b + size_t(which) * panel_bytes, four, ranks, lanes);
        }
        __syncthreads();
        gather_sums(segment, tile, block, sums, gathered);
        __syncthreads();
        unsigned left[HALVES][PIECES][4];
#pragma unroll
        for (int half = 0; half < HALVES; ++half) load_sums(gathered, 16 * half, left[half]);
#pragma unroll
        for (unsigned at = 0; at < PANELS; ++at) {
            if (panel + WARPS * at >= end) break;
            PanelPieces<Panel::PIECES> right;
            ahead[at].to_pieces(right);
#pragma unroll
            for (int half = 0; half < HALVES; ++half) multiply(mine[half][at], left[half], right);
        }
    }

#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            unsigned row = 16 * half + 8 * lower + lane_index() / 4;
            if (row >= rows) continue;
            T *to = out + size_t(segment.first_row + tile * TILE_ROWS + row) * stride + segment.column;
#pragma unroll
            for (unsigned at = 0; at < PANELS; ++at) {
                unsigned output = (panel + WARPS * at) * BLOCK + four;
                if (panel + WARPS * at < end && output < segment.outputs)
                    add_four<FAST>(to + output, row_of(mine[half][at], lower), segment.outputs - output);
            }
        }
}

// Panels begin..end, as many at a time as registers hold.
template <typename Panel, typename T>
__device__ __forceinline__ void expand_unit(const Segment &segment, unsigned tile, unsigned begin,
                                            unsigned end, const float *sums,
                                            float (&gathered)[TILE_ROWS][BLOCK], T *out, unsigned stride) {
    // f32 fills twice the registers, and is too rare to be written out several times.
    constexpr bool RARE = Panel::BYTES == 4;
    bool fast = segment.outputs % 4 == 0 && segment.column % 4 == 0 && stride % 4 == 0;
    bool few = !RARE && segment.rows_of(tile) <= 16;
    unsigned step = !fast || RARE ? 1 : few ? AHEAD : AHEAD / 2;
#pragma unroll 1
    for (; begin < end; begin += step * WARPS) {
        unsigned panel = begin + warp_index();
        if (!fast) {
            expand_panels<Panel, false, 2, 1>(segment, tile, panel, end, sums, gathered, out, stride);
        } else if constexpr (RARE) {
            expand_panels<Panel, true, 2, 1>(segment, tile, panel, end, sums, gathered, out, stride);
        } else if (few) {
            expand_panels<Panel, true, 1, AHEAD>(segment, tile, panel, end, sums, gathered, out, stride);
        } else {
            expand_panels<Panel, true, 2, AHEAD / 2>(segment, tile, panel, end, sums, gathered, out, stride);
        }
    }
}

template <typename T>
__device__ void expand(const unsigned *first, const Segment *table, unsigned segments, const float *sums,
                       T *out, unsigned stride) {
    __shared__ Segment segment;
    __shared__ __align__(16) float gathered[TILE_ROWS][BLOCK];
    unsigned unit;
    if (!find_segment(first, table, segments, segment, unit)) return;
    unsigned all = (segment.outputs + BLOCK - 1) / BLOCK;
    unsigned parts = (all + segment.panels() - 1) / segment.panels();
    unsigned tile = unit / parts, begin = unit % parts * segment.panels();
    unsigned end = min(all, begin + segment.panels());
    if (segment.kind_of_b() == 0) {
        expand_unit<FloatPanel>(segment, tile, begin, end, sums, gathered, out, stride);
    } else if (segment.kind_of_b() == 1) {
        expand_unit<HalfPanel>(segment, tile, begin, end, sums, gathered, out, stride);
    } else {
        expand_unit<PairPanel<true>>(segment, tile, begin, end, sums, gathered, out, stride);
    }
}

// ---- Kernels ----------------------------------------------------------------------------------------------
// `first`: of each segment, `segments` + 1 of them. `table`: the segments. x is [rows, width], out is [rows,
// stride].

extern "C" __global__ void __launch_bounds__(THREADS, 2)
lora_shrink_f32(const unsigned *first, const unsigned *table, unsigned segments, const float *x,
                unsigned width, float *sums) {
    shrink(first, reinterpret_cast<const Segment *>(table), segments, x, width, sums);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
lora_shrink_f16(const unsigned *first, const unsigned *table, unsigned segments, const f16 *x,
                unsigned width, float *sums) {
    shrink(first, reinterpret_cast<const Segment *>(table), segments, x, width, sums);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
lora_shrink_bf16(const unsigned *first, const unsigned *table, unsigned segments, const bf16 *x,
                 unsigned width, float *sums) {
    shrink(first, reinterpret_cast<const Segment *>(table), segments, x, width, sums);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
lora_expand_f32(const unsigned *first, const unsigned *table, unsigned segments, const float *sums,
                float *out, unsigned stride) {
    expand(first, reinterpret_cast<const Segment *>(table), segments, sums, out, stride);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
lora_expand_f16(const unsigned *first, const unsigned *table, unsigned segments, const float *sums,
                f16 *out, unsigned stride) {
    expand(first, reinterpret_cast<const Segment *>(table), segments, sums, out, stride);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
lora_expand_bf16(const unsigned *first, const unsigned *table, unsigned segments, const float *sums,
                 bf16 *out, unsigned stride) {
    expand(first, reinterpret_cast<const Segment *>(table), segments, sums, out, stride);
}

ON_CPU_KERNEL(lora_shrink_f32);
ON_CPU_KERNEL(lora_shrink_f16);
ON_CPU_KERNEL(lora_shrink_bf16);
ON_CPU_KERNEL(lora_expand_f32);
ON_CPU_KERNEL(lora_expand_f16);
ON_CPU_KERNEL(lora_expand_bf16);
