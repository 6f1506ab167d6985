// Kernels that test the stand-in itself: what a barrier, a shuffle, shared memory and the tensor cores' layout must do.
// They are in no PTX that is shipped; kernels/tests/cuda/stand_in.rs brings declarations of its own.
#include "../common.cuh"

// out[i] = the sum over the block of in, by each of the ways there are.
extern "C" __global__ void selftest_sums(float *out, const float *in) {
    DYNAMIC_SHARED(float, tree);
    int at = int(blockIdx.x * blockDim.x + threadIdx.x), self = int(threadIdx.x);
    float mine = in[at];
    tree[self] = mine;
    __syncthreads();
    for (int half = int(blockDim.x) / 2; half > 0; half /= 2) {
        if (self < half) tree[self] += tree[self + half];
        __syncthreads();
    }
    float by_block = block_sum(mine), again = block_sum(1.0f);
    out[3 * at] = tree[0];
    out[3 * at + 1] = by_block;
    out[3 * at + 2] = again;
}

// Each kind of shuffle once; out is [5][lanes].
extern "C" __global__ void selftest_shuffles(int *out) {
    int self = int(threadIdx.x), lanes = int(blockDim.x);
    out[self] = __shfl_sync(FULL_WARP, self, 5);
    out[lanes + self] = __shfl_xor_sync(FULL_WARP, self, 9);
    out[2 * lanes + self] = __shfl_down_sync(FULL_WARP, self, 3u);
    out[3 * lanes + self] = __shfl_up_sync(FULL_WARP, self, 2u, 16);
    unsigned even = 0x55555555u, odd = ~even;
    if (self % 2 == 0) out[4 * lanes + self] = int(__ballot_sync(even, self % 3 == 0));
    else out[4 * lanes + self] = __popc(__ballot_sync(odd, self % 3 == 0));
}

// c[16x8] = a[16x16] b[16x8], row-major, f16 given as f32.
template <typename T> __device__ void product(float *c, const float *a, const float *b) {
    int group = lane_index() / 4, pair = 2 * (lane_index() % 4);
    unsigned left[4], right[2];
    for (int at = 0; at < 4; ++at) {
        const float *from = a + (group + 8 * (at % 2)) * 16 + pair + 8 * (at / 2);
        left[at] = pack_pair<T>(from[0], from[1]);
    }
    for (int at = 0; at < 2; ++at) {
        const float *from = b + (pair + 8 * at) * 8 + group;
        right[at] = pack_pair<T>(from[0], from[8]);
    }
    float sums[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    mma_16x8x16<T>(sums, left, right);
    for (int at = 0; at < 4; ++at) c[(group + 8 * (at / 2)) * 8 + pair + at % 2] = sums[at] - 1.0f;
}
extern "C" __global__ void selftest_product_f16(float *c, const float *a, const float *b) { product<f16>(c, a, b); }
extern "C" __global__ void selftest_product_bf16(float *c, const float *a, const float *b) { product<bf16>(c, a, b); }

// The same product with a and b read from shared memory: asynchronous copies, and matrices as mma wants them.
extern "C" __global__ void selftest_tiles(float *c, const f16 *a, const f16 *b) {
    __shared__ __align__(16) f16 left[16][16], right[32][8];
    int self = lane_index();
    cp_async16(&left[self / 2][8 * (self % 2)], a + 8 * self);
    cp_async16_or_zero(&right[self][0], b + 8 * self, self < 16); // rows 16 to 31 are zero, and b has none
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    unsigned held[4], columns[4];
    load_matrices_x4(held, &left[self % 16][8 * (self / 16)]);
    load_matrices_x4_transposed(columns, &right[self % 16][0]);
    float sums[4] = {};
    unsigned of_b[2] = {columns[0], columns[1]};
    mma_16x8x16<f16>(sums, held, of_b);
    int group = self / 4, pair = 2 * (self % 4);
    for (int at = 0; at < 4; ++at) c[(group + 8 * (at / 2)) * 8 + pair + at % 2] = sums[at] + to_float(right[16 + self % 16][at]);
}

// What the stand-in must report, by number.
extern "C" __global__ void selftest_fault(float *out, unsigned which) {
    __shared__ float never_written[64];
    DYNAMIC_SHARED(float, room);
    unsigned self = threadIdx.x;
    switch (which) {
    case 0: // a barrier that half of the block never reaches
        if (self < blockDim.x / 2) __syncthreads();
        else __syncwarp();
        break;
    case 1: // a shuffle that names lanes that have ended
        if (self % 2 == 1) return;
        out[self] = __shfl_xor_sync(FULL_WARP, 1.0f, 2);
        break;
    case 2: // shared memory that nobody wrote: not a fault, but NaN
        out[self] = never_written[self % 64] + room[self];
        break;
    case 3: // one float behind the allocation
        if (self == 0) out[blockDim.x] = 1.0f;
        break;
    case 4: // one float behind dynamic shared memory
        if (self == 0) room[blockDim.x] = 1.0f;
        break;
    case 5: // two barriers, each for half of the block
        if (self % 2 == 0) __syncthreads();
        else
            __syncthreads();
        break;
    }
}

extern "C" __global__ void selftest_write(unsigned *to, unsigned value) { to[threadIdx.x] = value; }

// What a kernel reads before it has waited for the one in front, and afterwards.
extern "C" __global__ void selftest_early(unsigned *before, unsigned *behind, const unsigned *from, unsigned waiting) {
    __shared__ unsigned read[64];
    unsigned self = threadIdx.x;
    read[self] = from[self];
    if (self < waiting) await_front();
    __syncthreads();
    before[self] = read[blockDim.x - 1 - self];
    behind[self] = from[self];
}

ON_CPU_KERNEL(selftest_write);
ON_CPU_KERNEL(selftest_early);
ON_CPU_KERNEL(selftest_sums);
ON_CPU_KERNEL(selftest_shuffles);
ON_CPU_KERNEL(selftest_product_f16);
ON_CPU_KERNEL(selftest_product_bf16);
ON_CPU_KERNEL(selftest_tiles);
ON_CPU_KERNEL(selftest_fault);
