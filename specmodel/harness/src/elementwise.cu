// Elementwise and row-wise kernels: random data, embedding, norms, rotary positions, SwiGLU, argmax, acceptance.
// All are bound by memory or latency; accesses are 16 bytes wide where rows allow it.
#include <cfloat>

#include "device_helpers.cuh"
#include "kernels.hpp"

namespace specmodel {
namespace {

// splitmix64's finaliser over (seed, counter): a counter-based generator, good enough for random weights.
__device__ __forceinline__ std::uint64_t mix(std::uint64_t seed, std::uint64_t counter) {
    std::uint64_t z = seed * 0x9E3779B97F4A7C15ULL + (counter + 1) * 0xD1B54A32D192ED03ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}

__device__ __forceinline__ float uniform(std::uint64_t bits) {  // in (0, 1)
    return (static_cast<float>(bits & 0xFFFFFFU) + 0.5F) * (1.0F / 16777216.0F);
}

__global__ void fill_normal_kernel(bf16* out, Fill f) {
    const std::size_t count = f.rows * f.columns;
    const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
    for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count; i += step) {
        const std::size_t row = i / f.columns;
        const std::size_t position = (f.row_offset + row) * f.global_columns + f.column_offset + (i - row * f.columns);
        const std::uint64_t bits = mix(f.seed, position);
        const float radius = sqrtf(-2.0F * __logf(uniform(bits)));  // Box and Muller
        out[i] = __float2bfloat16(f.mean + f.scale * radius * cospif(2.0F * uniform(bits >> 32)));
    }
}

__global__ void fill_tokens_kernel(int* out, std::size_t count, int limit, std::uint64_t seed) {
    const std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
    if (i < count) out[i] = static_cast<int>(mix(seed, i) % static_cast<std::uint64_t>(limit));
}

__global__ void embed_kernel(bf16* out, const bf16* table, const int* tokens, int token_stride, int hidden) {
    const std::size_t row = blockIdx.x;
    const auto* from =
        reinterpret_cast<const uint4*>(table + static_cast<std::size_t>(tokens[row * token_stride]) * hidden);
    auto* to = reinterpret_cast<uint4*>(out + row * hidden);
    for (int i = threadIdx.x; i < hidden / 8; i += blockDim.x) to[i] = from[i];
}

constexpr int norm_vectors = 4;  // of 8 numbers, held in registers by each thread between the two passes
constexpr int norm_threads = 512;

__global__ void __launch_bounds__(norm_threads) add_rmsnorm_kernel(Norm n) {
    __shared__ float sums[norm_threads / 32];
    const std::size_t row = blockIdx.x;
    auto* x = reinterpret_cast<uint4*>(n.x + row * n.hidden);
    const auto* delta = n.delta ? reinterpret_cast<const uint4*>(n.delta + row * n.hidden) : nullptr;
    auto* copy = n.copy ? reinterpret_cast<uint4*>(n.copy + row * n.copy_stride) : nullptr;
    const int vectors = n.hidden / 8;
    float held[norm_vectors][8];
    float squares = 0;
#pragma unroll
    for (int j = 0; j < norm_vectors; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i >= vectors) break;
        unpack8(x[i], held[j]);
        if (delta) {
            float add[8];
            unpack8(delta[i], add);
#pragma unroll
            for (int k = 0; k < 8; ++k) held[j][k] += add[k];
            const uint4 packed = pack8(held[j]);
            x[i] = packed;
            unpack8(packed, held[j]);  // norm what was stored
        }
        if (copy) copy[i] = pack8(held[j]);
#pragma unroll
        for (int k = 0; k < 8; ++k) squares += held[j][k] * held[j][k];
    }
    const float inverse = rsqrtf(block_sum(squares, sums) / static_cast<float>(n.hidden) + n.epsilon);
    const auto* weight = reinterpret_cast<const uint4*>(n.weight);
    auto* out = reinterpret_cast<uint4*>(n.out + row * n.out_stride);
#pragma unroll
    for (int j = 0; j < norm_vectors; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i >= vectors) break;
        float w[8];
        unpack8(weight[i], w);
#pragma unroll
        for (int k = 0; k < 8; ++k) held[j][k] *= inverse * w[k];
        out[i] = pack8(held[j]);
    }
}

__global__ void gather_rows_kernel(bf16* out, const bf16* in, const int* picked, int rows_per_sequence, int width) {
    const int sequence = blockIdx.x;
    const std::size_t row =
        static_cast<std::size_t>(sequence) * rows_per_sequence + min(max(picked[sequence], 0), rows_per_sequence - 1);
    const auto* from = reinterpret_cast<const uint4*>(in + row * width);
    auto* to = reinterpret_cast<uint4*>(out + static_cast<std::size_t>(sequence) * width);
    for (int i = threadIdx.x; i < width / 8; i += blockDim.x) to[i] = from[i];
}

__global__ void silu_multiply_kernel(bf16* out, const bf16* gate_up, int size) {
    const std::size_t row = blockIdx.y;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size / 8) return;
    const auto* gate = reinterpret_cast<const uint4*>(gate_up + row * 2 * size);
    const auto* up = reinterpret_cast<const uint4*>(gate_up + row * 2 * size + size);
    float g[8];
    float u[8];
    unpack8(gate[i], g);
    unpack8(up[i], u);
#pragma unroll
    for (int k = 0; k < 8; ++k) g[k] = silu(g[k]) * u[k];
    reinterpret_cast<uint4*>(out + row * size)[i] = pack8(g);
}

__global__ void add_rows_kernel(bf16* out, const bf16* in, std::size_t vectors) {
    const std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
    if (i >= vectors) return;
    float a[8];
    float b[8];
    unpack8(reinterpret_cast<const uint4*>(in)[i], a);
    unpack8(reinterpret_cast<uint4*>(out)[i], b);
#pragma unroll
    for (int k = 0; k < 8; ++k) b[k] += a[k];
    reinterpret_cast<uint4*>(out)[i] = pack8(b);
}

// One warp per (row, head): RMSNorm of queries and keys (Qwen3), rotary embedding, store into the cache.
template <int D>
__global__ void __launch_bounds__(256) rotate_kernel(Attention a) {
    constexpr int per_lane = D / 64;  // rotation pairs (i, i + D / 2) of one lane
    const int all_heads = a.heads + 2 * a.kv_heads;
    const int head = blockIdx.y * 8 + threadIdx.x / 32;
    if (head >= all_heads) return;
    const int lane = threadIdx.x % 32;
    const int row = blockIdx.x;
    const int sequence = row / a.rows_per_sequence;
    const int position = a.lengths[sequence] + a.offset + row % a.rows_per_sequence;
    bf16* source = a.qkv + (static_cast<std::size_t>(row) * all_heads + head) * D;
    float low[per_lane];
    float high[per_lane];
#pragma unroll
    for (int j = 0; j < per_lane; ++j) {
        low[j] = __bfloat162float(source[lane + 32 * j]);
        high[j] = __bfloat162float(source[lane + 32 * j + D / 2]);
    }
    const bool is_query = head < a.heads;
    const bool is_value = head >= a.heads + a.kv_heads;
    if (!is_value) {
        if (const bf16* weight = is_query ? a.query_norm : a.key_norm) {
            float squares = 0;
#pragma unroll
            for (int j = 0; j < per_lane; ++j) squares += low[j] * low[j] + high[j] * high[j];
            const float inverse = rsqrtf(warp_sum(squares) / D + a.epsilon);
#pragma unroll
            for (int j = 0; j < per_lane; ++j) {
                low[j] *= inverse * __bfloat162float(weight[lane + 32 * j]);
                high[j] *= inverse * __bfloat162float(weight[lane + 32 * j + D / 2]);
            }
        }
#pragma unroll
        for (int j = 0; j < per_lane; ++j) {
            const float frequency = exp2f(-log2f(a.rope_theta) * static_cast<float>(lane + 32 * j) / (D / 2));
            float sine;
            float cosine;
            sincosf(static_cast<float>(position) * frequency, &sine, &cosine);
            const float x = low[j];
            low[j] = x * cosine - high[j] * sine;
            high[j] = high[j] * cosine + x * sine;
        }
    }
    bf16* target = source;
    if (!is_query) {
        const int kv_head = (head - a.heads) % a.kv_heads;
        bf16* cache = is_value ? a.values : a.keys;
        target = cache + ((static_cast<std::size_t>(sequence) * a.kv_heads + kv_head) * a.capacity + position) * D;
    }
#pragma unroll
    for (int j = 0; j < per_lane; ++j) {
        target[lane + 32 * j] = __float2bfloat16(low[j]);
        target[lane + 32 * j + D / 2] = __float2bfloat16(high[j]);
    }
}

// Value in the high half, as an unsigned number of the same order; the complement of the index in the low half, so that
// of equal values the smallest index wins.
__device__ __forceinline__ std::uint64_t packed(float value, int index) {
    std::uint32_t bits = __float_as_uint(value);
    bits = bits & 0x80000000U ? ~bits : bits | 0x80000000U;
    return static_cast<std::uint64_t>(bits) << 32 | static_cast<std::uint32_t>(~index);
}

__device__ __forceinline__ std::uint64_t warp_max(std::uint64_t value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        const std::uint64_t other = __shfl_xor_sync(0xFFFFFFFFU, value, offset);
        value = other > value ? other : value;
    }
    return value;
}

__global__ void argmax_partial_kernel(std::uint64_t* parts, const bf16* logits, int columns, int index_offset) {
    __shared__ std::uint64_t bests[8];
    const std::size_t row = blockIdx.y;
    const auto* from = reinterpret_cast<const uint4*>(logits + row * columns);
    std::uint64_t best = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < columns / 8; i += gridDim.x * blockDim.x) {
        float v[8];
        unpack8(from[i], v);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const std::uint64_t candidate = packed(v[k], index_offset + i * 8 + k);
            best = candidate > best ? candidate : best;
        }
    }
    best = warp_max(best);
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < static_cast<int>(blockDim.x) / 32; ++i) best = bests[i] > best ? bests[i] : best;
        parts[row * argmax_parts + blockIdx.x] = best;
    }
}

__global__ void argmax_reduce_kernel(std::uint64_t* best, const std::uint64_t* parts) {
    const std::uint64_t value = warp_max(parts[static_cast<std::size_t>(blockIdx.x) * argmax_parts + threadIdx.x]);
    if (threadIdx.x == 0) best[blockIdx.x] = value;
}

__global__ void argmax_final_kernel(int* out, int out_stride, const std::uint64_t* best, int ranks, int rows,
                                    const int* table, int spread) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    std::uint64_t value = 0;
    for (int r = 0; r < ranks; ++r) {
        const std::uint64_t other = best[static_cast<std::size_t>(r) * rows + row];
        value = other > value ? other : value;
    }
    const int index = static_cast<int>(~static_cast<std::uint32_t>(value));
    int token = table ? table[index] : index;
    int* to = out + static_cast<std::size_t>(row) * out_stride;
    if (spread > 0)
        token = static_cast<int>(mix(static_cast<std::uint64_t>(token), static_cast<std::uint64_t>(to[-1])) %
                                 static_cast<std::uint64_t>(spread));
    *to = token;
}

__global__ void accept_kernel(Accept a) {
    const int b = blockIdx.x * blockDim.x + threadIdx.x;
    if (b >= a.batch) return;
    const int rows = a.steps + 1;
    int accepted = 0;
    while (accepted < a.steps) {
        const std::uint64_t draw = (a.cycle * static_cast<std::uint64_t>(a.batch) + b) * 64 + accepted;
        if (uniform(mix(a.seed, draw) >> 16) >= a.conditional[accepted]) break;
        ++accepted;
    }
    int next = a.predicted[b * rows + accepted];
    if (a.spread > 0) {
        const std::uint64_t draw = (a.cycle * static_cast<std::uint64_t>(a.batch) + b) * 64 + 63;
        next = static_cast<int>((mix(a.seed, draw) + static_cast<std::uint64_t>(next)) %
                                static_cast<std::uint64_t>(a.spread));
    }
    a.accepted[b] = accepted;
    a.tokens[b * rows] = next;
    a.result[2 * b] = accepted + 1;
    a.result[2 * b + 1] = next;
}

unsigned blocks_for(std::size_t count, unsigned threads) {
    return static_cast<unsigned>((count + threads - 1) / threads);
}

}  // namespace

void prepare_elementwise() {
    prefer_shared(embed_kernel);
    prefer_shared(add_rmsnorm_kernel);
    prefer_shared(gather_rows_kernel);
    prefer_shared(silu_multiply_kernel);
    prefer_shared(add_rows_kernel);
    prefer_shared(argmax_partial_kernel);
    prefer_shared(argmax_reduce_kernel);
    prefer_shared(argmax_final_kernel);
    prefer_shared(accept_kernel);
    prefer_shared(rotate_kernel<64>);
    prefer_shared(rotate_kernel<128>);
}

void fill_normal(bf16* out, const Fill& fill, cudaStream_t stream) {
    if (fill.rows * fill.columns == 0) return;
    fill_normal_kernel<<<2048, 256, 0, stream>>>(out, fill);
    LAUNCH_CHECK("fill_normal");
}

void fill_tokens(int* out, std::size_t count, int limit, std::uint64_t seed, cudaStream_t stream) {
    fill_tokens_kernel<<<blocks_for(count, 256), 256, 0, stream>>>(out, count, limit, seed);
    LAUNCH_CHECK("fill_tokens");
}

void embed(bf16* out, const bf16* table, const int* tokens, int token_stride, int rows, int hidden,
           cudaStream_t stream) {
    embed_kernel<<<static_cast<unsigned>(rows), 256, 0, stream>>>(out, table, tokens, token_stride, hidden);
    LAUNCH_CHECK("embed");
}

void add_rmsnorm(const Norm& norm, cudaStream_t stream) {
    const int vectors = norm.hidden / 8;
    const int threads = vectors >= norm_threads ? norm_threads : (vectors + 31) / 32 * 32;
    if (vectors > norm_vectors * threads) throw Refused("hidden_size above 16384 is not supported");
    add_rmsnorm_kernel<<<static_cast<unsigned>(norm.rows), static_cast<unsigned>(threads), 0, stream>>>(norm);
    LAUNCH_CHECK("add_rmsnorm");
}

void gather_rows(bf16* out, const bf16* in, const int* picked, int sequences, int rows_per_sequence, int width,
                 cudaStream_t stream) {
    gather_rows_kernel<<<static_cast<unsigned>(sequences), 256, 0, stream>>>(out, in, picked, rows_per_sequence, width);
    LAUNCH_CHECK("gather_rows");
}

void silu_multiply(bf16* out, const bf16* gate_up, int rows, int size, cudaStream_t stream) {
    const dim3 grid(blocks_for(static_cast<std::size_t>(size) / 8, 128), static_cast<unsigned>(rows));
    silu_multiply_kernel<<<grid, 128, 0, stream>>>(out, gate_up, size);
    LAUNCH_CHECK("silu_multiply");
}

void add_rows(bf16* out, const bf16* in, std::size_t count, cudaStream_t stream) {
    add_rows_kernel<<<blocks_for(count / 8, 256), 256, 0, stream>>>(out, in, count / 8);
    LAUNCH_CHECK("add_rows");
}

void rotate_and_store(const Attention& a, cudaStream_t stream) {
    const int all_heads = a.heads + 2 * a.kv_heads;
    const dim3 grid(static_cast<unsigned>(a.batch * a.rows_per_sequence), static_cast<unsigned>((all_heads + 7) / 8));
    if (a.head_dim == 128)
        rotate_kernel<128><<<grid, 256, 0, stream>>>(a);
    else
        rotate_kernel<64><<<grid, 256, 0, stream>>>(a);
    LAUNCH_CHECK("rotate_and_store");
}

void argmax_partial(std::uint64_t* parts, const bf16* logits, int rows, int columns, int index_offset,
                    cudaStream_t stream) {
    argmax_partial_kernel<<<dim3(argmax_parts, static_cast<unsigned>(rows)), 256, 0, stream>>>(parts, logits, columns,
                                                                                               index_offset);
    LAUNCH_CHECK("argmax_partial");
}

void argmax_reduce(std::uint64_t* best, const std::uint64_t* parts, int rows, cudaStream_t stream) {
    argmax_reduce_kernel<<<static_cast<unsigned>(rows), argmax_parts, 0, stream>>>(best, parts);
    LAUNCH_CHECK("argmax_reduce");
}

void argmax_final(int* out, int out_stride, const std::uint64_t* best, int ranks, int rows, const int* table,
                  int spread, cudaStream_t stream) {
    argmax_final_kernel<<<blocks_for(static_cast<std::size_t>(rows), 128), 128, 0, stream>>>(
        out, out_stride, best, ranks, rows, table, spread);
    LAUNCH_CHECK("argmax_final");
}

void accept_drafts(const Accept& a, cudaStream_t stream) {
    accept_kernel<<<blocks_for(static_cast<std::size_t>(a.batch), 64), 64, 0, stream>>>(a);
    LAUNCH_CHECK("accept_drafts");
}

}  // namespace specmodel
