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
// Pieces. An adapter lies in blocks of the pool that holds keys and values, in any that were free. A rank
// block's part of a factor is a *piece*, or, where that does not fit a block, as many of its columns or outputs
// as do (kernels/src/lora/pieces.rs). A table that lies there too has their addresses: [rank blocks][pieces of
// each]. Mostly each is in one piece, and all that this costs is that a unit reads an address. The shrink goes on
// from piece to piece; units of the expand are made so that each lies within one.
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
// an order that only A's shape decides, however it is cut, then over chunks, then over rank blocks, ascending.
//
// Few rows and small ranks make launches as short as their latency. So both find their work, and ask for factors,
// before what is in front has ended (`await_front`), and the shrink's kernel for bf16 keeps to
// 80 registers: three blocks fit a multiprocessor of an H100, and 384 units, which 32 adapters on q, k and v
// of 4096 columns are, run at once on its 132.
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
    unsigned long long a, b;      // addresses of the tables of the factors' pieces
    unsigned first_row, rows;     // of x and out
    unsigned columns, outputs;    // of A, of B
    unsigned rank;                // the true one
    unsigned first_block, blocks; // rank blocks to compute
    unsigned chunk;               // columns of a unit of the shrink
    unsigned column;              // of out, for the first output
    unsigned packed;              // kind of A | of B << 4 | shift of A << 8 | of B << 16 | panels << 24
    unsigned sums;                // first number of its sums
    float scale;

    __device__ unsigned kind_of_a() const { return packed & 0xF; }
    __device__ unsigned kind_of_b() const { return packed >> 4 & 0xF; }
    // A piece has 1 << shift columns or outputs, the last one perhaps fewer; 31: all of them.
    __device__ unsigned shift_of_a() const { return packed >> 8 & 0xFF; }
    __device__ unsigned shift_of_b() const { return packed >> 16 & 0xFF; }
    // Of a unit of the expand.
    __device__ unsigned panels() const { return packed >> 24; }
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

// Where the piece of rank block `own_block` lies that has the column or output `feature`, of `features`.
__device__ __forceinline__ const char *piece_at(unsigned long long table, unsigned own_block,
                                                unsigned features, unsigned shift, unsigned feature) {
    unsigned of_each = ((features - 1) >> shift) + 1;
    const unsigned long long *pieces = reinterpret_cast<const unsigned long long *>(table);
    return reinterpret_cast<const char *>(__ldg(pieces + (own_block * of_each + (feature >> shift))));
}

// Brings the segment that this block's unit is of, and the unit's number within it. False if there is no such
// unit; the block has waited then, and leaves.
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
    if (found == segments) {
        await_front();
        return false;
    }
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
// `pieces` is what mma reads: [piece][even lanes, odd lanes][depths 0 and 1, depths 2 and 3]. Of
// panels that are WIDE `lanes` is even, so that two lie at a multiple of their size and are there or not
// together.

// Bytes of `depth` deep `lanes` of a kind: pairs are whole.
__device__ __forceinline__ size_t panel_bytes(unsigned kind, unsigned depth, unsigned lanes) {
    return size_t(kind == 2 ? depth + depth % 2 : depth) * lanes * (kind == 0 ? 4 : 2);
}

template <int PIECES> using PanelPieces = unsigned[PIECES][2][2];

// pair[depth] are two lanes.
template <int PIECES>
__device__ __forceinline__ void split_pairs(const float2 (&pair)[4], PanelPieces<PIECES> &pieces) {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
        unsigned even[PIECES], odd[PIECES];
        split(pair[2 * word].x, pair[2 * word + 1].x, even);
        split(pair[2 * word].y, pair[2 * word + 1].y, odd);
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            pieces[piece][0][word] = even[piece];
            pieces[piece][1][word] = odd[piece];
        }
    }
}

// Not __ldg, which may be moved behind `await_front`. Where a table's address leads only we know.
template <typename T> __device__ __forceinline__ T load_factors(const void *from);
#ifdef ON_CPU
template <typename T> inline T load_factors(const void *from) { return *static_cast<const T *>(from); }
#else
template <> __device__ __forceinline__ unsigned load_factors<unsigned>(const void *from) {
    unsigned word;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(from));
    return word;
}
template <> __device__ __forceinline__ uint2 load_factors<uint2>(const void *from) {
    uint2 two;
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(two.x), "=r"(two.y) : "l"(from));
    return two;
}
#endif

struct HalfPanel {
    static constexpr int PIECES = 2;
    static constexpr bool WIDE = true;
    unsigned pair[4]; // of lanes, for each depth

    __device__ __forceinline__ void load(unsigned, const char *panel, unsigned depth_at, unsigned depth,
                                         unsigned lanes) {
        unsigned lane = 2 * (lane_index() / 4);
        const unsigned short *from =
            reinterpret_cast<const unsigned short *>(panel) + (depth_at * lanes + lane);
#pragma unroll
        for (unsigned at = 0; at < 4; ++at) {
            bool there = depth_at + at < depth && lane < lanes;
            pair[at] = there ? load_factors<unsigned>(from + at * lanes) : 0;
        }
    }
    __device__ __forceinline__ void to_pieces(PanelPieces<PIECES> &pieces) const {
        float2 numbers[4];
#pragma unroll
        for (int at = 0; at < 4; ++at) numbers[at] = {half_of(pair[at]), half_of(pair[at] >> 16)};
        split_pairs<PIECES>(numbers, pieces);
    }
};

// Pairs along depth are what mma reads already. An odd depth was filled up with zeroes by who wrote the
// panel.
template <bool UPPER_FIRST> struct PairPanel {
    static constexpr int PIECES = 1;
    static constexpr bool WIDE = true;
    uint2 word[2]; // for each pair of depths, two lanes

    __device__ __forceinline__ void load(unsigned, const char *panel, unsigned depth_at, unsigned depth,
                                         unsigned lanes) {
        unsigned lane = 2 * (lane_index() / 4);
        const unsigned *words = reinterpret_cast<const unsigned *>(panel);
        const unsigned *from = words + (depth_at / 2 * lanes + lane);
#pragma unroll
        for (unsigned at = 0; at < 2; ++at) {
            bool there = depth_at + 2 * at < depth && lane < lanes;
            word[at] = there ? load_factors<uint2>(from + at * lanes) : uint2{0, 0};
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

// Of any kind, number by number: for f32, and for shapes that no wide load fits. Both are too rare to be
// written out one by one.
template <bool UPPER_FIRST> struct AnyPanel {
    static constexpr int PIECES = 3;
    static constexpr bool WIDE = false;
    float2 pair[4];

    __device__ __forceinline__ void load(unsigned kind, const char *panel, unsigned depth_at, unsigned depth,
                                         unsigned lanes) {
        unsigned lane = 2 * (lane_index() / 4);
#pragma unroll
        for (unsigned at = 0; at < 4; ++at) {
            bool there = depth_at + at < depth;
            pair[at].x = there && lane < lanes ? number(kind, panel, depth_at + at, lane, lanes) : 0.0f;
            there = there && lane + 1 < lanes;
            pair[at].y = there ? number(kind, panel, depth_at + at, lane + 1, lanes) : 0.0f;
        }
    }
    __device__ __forceinline__ void to_pieces(PanelPieces<PIECES> &pieces) const {
        split_pairs<PIECES>(pair, pieces);
    }

    static __device__ __forceinline__ float number(unsigned kind, const char *panel, unsigned depth,
                                                   unsigned lane, unsigned lanes) {
        if (kind == 0) return __ldg(reinterpret_cast<const float *>(panel) + size_t(depth) * lanes + lane);
        const unsigned short *halves = reinterpret_cast<const unsigned short *>(panel);
        if (kind == 1) return half_of(__ldg(halves + size_t(depth) * lanes + lane));
        unsigned in_pair = UPPER_FIRST ? 1 - depth % 2 : depth % 2;
        unsigned bits = __ldg(halves + 2 * (size_t(depth / 2) * lanes + lane) + in_pair);
        return __uint_as_float(bits << 16);
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

// Four neighbours of a row, as they are loaded, and as pieces for the tensor cores.
template <typename T> struct Four {
    uint2 two;

    __device__ __forceinline__ void load(const T *from) {
        two = *reinterpret_cast<const uint2 *>(from);
    }
    __device__ __forceinline__ void to_pieces(unsigned (&pieces)[PiecesOf<T>::COUNT][2]) const {
        if constexpr (PiecesOf<T>::COUNT == 1) {
            pieces[0][0] = two.x, pieces[0][1] = two.y;
        } else {
            const unsigned words[2] = {two.x, two.y};
#pragma unroll
            for (int word = 0; word < 2; ++word) {
                unsigned of_word[PiecesOf<T>::COUNT];
                split(half_of(words[word]), half_of(words[word] >> 16), of_word);
#pragma unroll
                for (int piece = 0; piece < PiecesOf<T>::COUNT; ++piece) pieces[piece][word] = of_word[piece];
            }
        }
    }
};
template <> struct Four<float> {
    float4 four;

    __device__ __forceinline__ void load(const float *from) {
        four = *reinterpret_cast<const float4 *>(from);
    }
    __device__ __forceinline__ void to_pieces(unsigned (&pieces)[3][2]) const {
        unsigned low[3], high[3];
        split(four.x, four.y, low);
        split(four.z, four.w, high);
#pragma unroll
        for (int piece = 0; piece < 3; ++piece) pieces[piece][0] = low[piece], pieces[piece][1] = high[piece];
    }
};

// Columns `at`..+3 of rows `group` and `group + 8` of sixteen, of which `rows` exist; zeros from column `end`
// on.
template <typename T>
__device__ __forceinline__ void load_rows(Four<T> (&fours)[2], const T *x, unsigned rows, unsigned at,
                                          unsigned end, unsigned width) {
#pragma unroll
    for (unsigned lower = 0; lower < 2; ++lower) {
        unsigned row = lane_index() / 4 + 8 * lower;
        fours[lower] = {};
        if (row < rows && at < end) fours[lower].load(x + (row * width + at));
    }
}

// Both as mma's left side.
template <typename T>
__device__ __forceinline__ void to_left(const Four<T> (&fours)[2], unsigned (&left)[PiecesOf<T>::COUNT][4]) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
        unsigned words[PiecesOf<T>::COUNT][2];
        fours[lower].to_pieces(words);
#pragma unroll
        for (int piece = 0; piece < PiecesOf<T>::COUNT; ++piece) {
            left[piece][lower] = words[piece][0];
            left[piece][lower + 2] = words[piece][1];
        }
    }
}

// The first of this warp's columns from `begin` on: it has every eighth sixteen, wherever pieces end.
__device__ __forceinline__ unsigned first_column(unsigned begin) {
    return begin + (BLOCK * warp_index() - begin) % (BLOCK * WARPS);
}

// This warp's steps of a chunk, or of a piece's part of it: sums[half of the tile] += x A. x's width is a
// multiple of 4. A's part of AHEAD steps is asked for together, and x's of two, for the first sixteen rows:
// mostly all there are.
template <typename Panel, typename T>
__device__ __forceinline__ void shrink_steps(const char *a, unsigned ranks, unsigned begin, unsigned end,
                                             const T *x, unsigned rows, unsigned width,
                                             float (&sums)[2][2][4]) {
    constexpr unsigned OF_X = 2, STEP = BLOCK * WARPS;
    unsigned four = 4 * (lane_index() % 4);
#pragma unroll 1
    for (unsigned at = first_column(begin); at < end; at += AHEAD * STEP) {
        Panel ahead[AHEAD];
#pragma unroll
        for (unsigned step = 0; step < AHEAD; ++step)
            ahead[step].load(0, a, at + step * STEP + four, end, ranks);
        await_front(); // for x
        Four<T> fours[OF_X][2];
#pragma unroll
        for (unsigned step = 0; step < AHEAD; ++step) {
            if (step % OF_X == 0) {
#pragma unroll
                for (unsigned i = 0; i < OF_X; ++i)
                    load_rows(fours[i], x, rows, at + (step + i) * STEP + four, end, width);
            }
            PanelPieces<Panel::PIECES> right;
            ahead[step].to_pieces(right);
            unsigned left[PiecesOf<T>::COUNT][4];
            to_left(fours[step % OF_X], left);
            multiply(sums[0], left, right);
            if (rows <= 16) continue;
            Four<T> others[2];
            load_rows(others, x + 16 * width, rows - 16, at + step * STEP + four, end, width);
            to_left(others, left);
            multiply(sums[1], left, right);
        }
    }
}

// The same, number by number, for any kind of A.
template <typename T>
__device__ __forceinline__ void shrink_slowly(unsigned kind, const char *a, unsigned ranks, unsigned begin,
                                              unsigned end, const T *x, unsigned rows, unsigned width,
                                              float (&sums)[2][2][4]) {
    unsigned four = 4 * (lane_index() % 4);
    await_front();
#pragma unroll 1
    for (unsigned at = first_column(begin); at < end; at += BLOCK * WARPS) {
        AnyPanel<false> panel;
        panel.load(kind, a, at + four, end, ranks);
        PanelPieces<3> right;
        panel.to_pieces(right);
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
            if (16 * half >= rows) continue;
            Four<float> fours[2];
#pragma unroll
            for (unsigned lower = 0; lower < 2; ++lower) {
                unsigned row = 16 * half + lane_index() / 4 + 8 * lower;
                float number[4];
#pragma unroll
                for (unsigned i = 0; i < 4; ++i) {
                    bool there = row < rows && at + four + i < end;
                    number[i] = there ? to_float(x[size_t(row) * width + at + four + i]) : 0.0f;
                }
                fours[lower].four = make_float4(number[0], number[1], number[2], number[3]);
            }
            unsigned left[3][4];
            to_left(fours, left);
            multiply(sums[half], left, right);
        }
    }
}

// Where a unit's part of the segment is.
struct ShrinkUnit {
    unsigned block, chunk, tile; // of all
    unsigned begin, end;         // columns
};

__device__ ShrinkUnit shrink_unit(const Segment &segment, unsigned number) {
    unsigned computed = segment.blocks - segment.first_block, chunks = segment.chunks();
    unsigned chunk = number / computed % chunks, begin = chunk * segment.chunk;
    return {segment.first_block + number % computed, chunk, number / computed / chunks, begin,
            min(segment.columns, begin + segment.chunk)};
}

template <typename T>
__device__ void shrink(const unsigned *first, const Segment *table, unsigned segments, const T *x,
                       unsigned width, float *sums) {
    __shared__ __align__(16) float of_warp[WARPS][TILE_ROWS][BLOCK];
    __shared__ Segment segment;
    __shared__ ShrinkUnit unit;
    unsigned number;
    if (!find_segment(first, table, segments, segment, number)) return;
    if (threadIdx.x == 0) unit = shrink_unit(segment, number);
    __syncthreads();

    float mine[2][2][4] = {};
#pragma unroll 1
    for (unsigned begin = unit.begin, end; begin < unit.end; begin = end) {
        // What the table says is read again for each piece: it would take registers from what is under way.
        __syncwarp();
        unsigned own = segment.read_block(unit.block), ranks = segment.ranks_of(own);
        unsigned kind = segment.kind_of_a(), rows = segment.rows_of(unit.tile);
        const T *of_tile = x + size_t(segment.first_row + unit.tile * TILE_ROWS) * width;
        unsigned shift = segment.shift_of_a(), piece = begin >> shift << shift;
        end = min(unit.end, piece + (1u << shift));
        const char *a = piece_at(segment.a, own, segment.columns, shift, begin);
        // Columns are counted from A's first, which would lie here.
        a -= panel_bytes(kind, piece, ranks);
        if (kind == 0 || ranks % 2 != 0 || width % 4 != 0) {
            shrink_slowly(kind, a, ranks, begin, end, of_tile, rows, width, mine);
        } else if (kind == 1) {
            shrink_steps<HalfPanel>(a, ranks, begin, end, of_tile, rows, width, mine);
        } else {
            shrink_steps<PairPanel<false>>(a, ranks, begin, end, of_tile, rows, width, mine);
        }
    }

    await_front(); // warps without a column
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            int row = 16 * half + 8 * lower + lane_index() / 4;
            float *to = &of_warp[warp_index()][row][4 * (lane_index() % 4)];
            *reinterpret_cast<float4 *>(to) = row_of(mine[half], lower);
        }
    __syncthreads();
    unsigned rows = segment.rows_of(unit.tile);
    sums += segment.sums_at(unit.tile, unit.block, unit.chunk);
    for (unsigned at = threadIdx.x; at < rows * BLOCK; at += THREADS) {
        float sum = 0.0f;
        for (int warp = 0; warp < WARPS; ++warp) sum += of_warp[warp][at / BLOCK][at % BLOCK];
        sums[at] = unit.block < segment.own_blocks() ? sum : 0.0f;
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
#pragma unroll 2
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

// Four neighbours of a row of out.
template <typename T> struct __align__(4 * sizeof(T)) Outputs {
    T at[4];
};

// HALVES of a tile times this warp's PANELS: every eighth from `panel` on, before `end`, all in one piece.
// Panels that are WIDE come with outputs that lie at a multiple of four. All warps come, those without a panel
// too.
template <typename Panel, int HALVES, unsigned PANELS, typename T>
__device__ __forceinline__ void expand_panels(const Segment &segment, unsigned tile, unsigned panel,
                                              unsigned end, const float *sums,
                                              float (&gathered)[TILE_ROWS][BLOCK], T *out, unsigned stride) {
    // Twice the bits of 16-bit outputs are enough for what is multiplied with B.
    constexpr int PIECES = sizeof(T) == 4 ? 3 : 2;
    unsigned rows = segment.rows_of(tile), four = 4 * (lane_index() % 4), kind = segment.kind_of_b();
    out += size_t(segment.first_row + tile * TILE_ROWS) * stride + segment.column;
    // Where this lane's outputs are, and whether there are any.
    auto row_at = [&](int half, int lower) { return unsigned(16 * half + 8 * lower + lane_index() / 4); };
    auto output_at = [&](unsigned at) { return (panel + WARPS * at) * BLOCK + four; };
    auto has = [&](unsigned row, unsigned at) {
        return row < rows && panel + WARPS * at < end && output_at(at) < segment.outputs;
    };
    // An output of the piece that surely exists, as `panel` may not, and the piece's first panel.
    unsigned output = (end - 1) * BLOCK, shift = segment.shift_of_b();
    unsigned first = (output >> shift << shift) / BLOCK;
    auto piece_of = [&](unsigned block) {
        return piece_at(segment.b, segment.read_block(block), segment.outputs, shift, output);
    };
    const char *next = piece_of(segment.first_block);
    float mine[HALVES][PANELS][2][4] = {};
#pragma unroll 1
    for (unsigned block = segment.first_block; block < segment.blocks; ++block) {
        unsigned ranks = segment.ranks_of(segment.read_block(block));
        const char *b = next;
        Panel ahead[PANELS];
#pragma unroll
        for (unsigned at = 0; at < PANELS; ++at) {
            unsigned which = panel + WARPS * at;
            unsigned lanes = which < end ? min(BLOCK, segment.outputs - which * BLOCK) : 0;
            ahead[at].load(kind, b + (which - first) * panel_bytes(kind, ranks, BLOCK), four, ranks, lanes);
        }
        // Asked for before all meet, so that the next block's panels need not wait for it.
        if (block + 1 < segment.blocks) next = piece_of(block + 1);
        await_front(); // for the sums, and what they are added to
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
        for (int lower = 0; lower < 2; ++lower)
#pragma unroll
            for (unsigned at = 0; at < PANELS; ++at) {
                if (!has(row_at(half, lower), at)) continue;
                T *to = out + size_t(row_at(half, lower)) * stride + output_at(at);
                float4 delta = row_of(mine[half][at], lower);
                const float of[4] = {delta.x, delta.y, delta.z, delta.w};
                if constexpr (Panel::WIDE) {
                    Outputs<T> four = *reinterpret_cast<Outputs<T> *>(to);
#pragma unroll
                    for (int i = 0; i < 4; ++i) four.at[i] = from_float<T>(to_float(four.at[i]) + of[i]);
                    *reinterpret_cast<Outputs<T> *>(to) = four;
                } else {
#pragma unroll
                    for (unsigned i = 0; i < 4; ++i)
                        if (i < segment.outputs - output_at(at))
                            to[i] = from_float<T>(to_float(to[i]) + of[i]);
                }
            }
}

// Panels begin..end, as many at a time as registers hold.
template <typename Panel, int HALVES, unsigned PANELS, typename T>
__device__ __forceinline__ void expand_unit(const Segment &segment, unsigned tile, unsigned begin,
                                            unsigned end, const float *sums,
                                            float (&gathered)[TILE_ROWS][BLOCK], T *out, unsigned stride) {
#pragma unroll 1
    for (; begin < end; begin += PANELS * WARPS)
        expand_panels<Panel, HALVES, PANELS>(segment, tile, begin + warp_index(), end, sums, gathered, out,
                                             stride);
}

// The same of a kind that fits wide loads: for few rows more panels are under way.
template <typename Panel, typename T>
__device__ __forceinline__ void expand_wide(const Segment &segment, unsigned tile, unsigned begin,
                                            unsigned end, const float *sums,
                                            float (&gathered)[TILE_ROWS][BLOCK], T *out, unsigned stride) {
    // Outputs of f32 are too rare to be written out twice.
    if (sizeof(T) == 2 && segment.rows_of(tile) <= 16) {
        expand_unit<Panel, 1, AHEAD>(segment, tile, begin, end, sums, gathered, out, stride);
    } else {
        expand_unit<Panel, 2, AHEAD / 2>(segment, tile, begin, end, sums, gathered, out, stride);
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
    bool wide = segment.outputs % 4 == 0 && segment.column % 4 == 0 && stride % 4 == 0;
    if (!wide || segment.kind_of_b() == 0) {
        expand_unit<AnyPanel<true>, 2, 1>(segment, tile, begin, end, sums, gathered, out, stride);
    } else if (segment.kind_of_b() == 1) {
        expand_wide<HalfPanel>(segment, tile, begin, end, sums, gathered, out, stride);
    } else {
        expand_wide<PairPanel<true>>(segment, tile, begin, end, sums, gathered, out, stride);
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
extern "C" __global__ void __launch_bounds__(THREADS, 3)
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
