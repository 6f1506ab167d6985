// The embeddings of tokens.
//
//     out[r, c] = table[tokens[r], c]
//
// The table is a weight of [rows, columns] as `quant.cuh` lays it out, of any form; out is f32.
//
// A block takes a row. Of block formats a thread takes an octet, of float formats a number: a batch's rows
// are few, and each is read once. A token that the table does not have is not looked up: its row is NaN, so
// that a mistake of the caller's shows, and nothing beyond the table is read. (NO_TOKEN of `sample.cu` is
// such a token.)
#include "quant.cuh"

constexpr int THREADS = 128;

template <typename T> __device__ __forceinline__ void
embed_floats(const void *table, unsigned rows, unsigned columns, const unsigned *tokens, float *out) {
    unsigned token = tokens[blockIdx.x];
    const T *row = static_cast<const T *>(table) + size_t(token) * columns;
    for (unsigned c = threadIdx.x; c < columns; c += THREADS)
        out[size_t(blockIdx.x) * columns + c] = token < rows ? to_float(row[c]) : NAN;
}

template <Form F> __device__ __forceinline__ void
embed_octets(const void *table, unsigned rows, unsigned columns, const unsigned *tokens, float *out) {
    unsigned token = tokens[blockIdx.x];
    for (unsigned c = threadIdx.x * 8; c < columns; c += THREADS * 8) {
        float values[8];
        if (token < rows) {
            octet<F>(table, rows, columns, token, c, values);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = NAN;
        }
        float *to = out + size_t(blockIdx.x) * columns + c;
        store_pack(to, Pack<float>{{values[0], values[1], values[2], values[3]}});
        store_pack(to + 4, Pack<float>{{values[4], values[5], values[6], values[7]}});
    }
}

#define EMBED_FLOATS(name, type)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                    \
        name(const void *table, unsigned rows, unsigned columns, const unsigned *tokens, float *out) {       \
        embed_floats<type>(table, rows, columns, tokens, out);                                               \
    }
#define EMBED_OCTETS(name, form)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                    \
        name(const void *table, unsigned rows, unsigned columns, const unsigned *tokens, float *out) {       \
        embed_octets<Form::form>(table, rows, columns, tokens, out);                                         \
    }

// Columns of block formats are whole blocks.
EMBED_FLOATS(embed_f32, float)
EMBED_FLOATS(embed_f16, f16)
EMBED_FLOATS(embed_bf16, bf16)
EMBED_OCTETS(embed_q4_0, q4_0)
EMBED_OCTETS(embed_q4_1, q4_1)
EMBED_OCTETS(embed_q5_0, q5_0)
EMBED_OCTETS(embed_q5_1, q5_1)
EMBED_OCTETS(embed_q8_0, q8_0)
EMBED_OCTETS(embed_q4_k, q4_k)
EMBED_OCTETS(embed_q5_k, q5_k)
EMBED_OCTETS(embed_q6_k, q6_k)

ON_CPU_KERNEL(embed_f32);
ON_CPU_KERNEL(embed_f16);
ON_CPU_KERNEL(embed_bf16);
ON_CPU_KERNEL(embed_q4_0);
ON_CPU_KERNEL(embed_q4_1);
ON_CPU_KERNEL(embed_q5_0);
ON_CPU_KERNEL(embed_q5_1);
ON_CPU_KERNEL(embed_q8_0);
ON_CPU_KERNEL(embed_q4_k);
ON_CPU_KERNEL(embed_q5_k);
ON_CPU_KERNEL(embed_q6_k);
