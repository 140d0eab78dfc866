// Split-KV attention of a few new rows per sequence (verification: K + 1) over a long cache, with grouped queries.
//
// All query heads that share a KV head are packed with the rows of the sequence into one tile of 16, 32, 48, 64 or 128
// matrix rows, so that each key and value is read once per tile; the tensor cores (mma.sync) multiply. Keys and values
// stream through a ring of shared-memory stages by asynchronous copies. With few rows the warps of a block share the
// rows and divide the tokens of a tile; with many they divide the rows. The cache of a sequence may be split over
// blocks (flash-decoding); a second kernel merges the parts. The number of splits is fixed at launch, their bounds
// follow the lengths on the device: a captured graph stays right while the context grows.
#include <algorithm>
#include <cmath>

#include "device_helpers.cuh"
#include "kernels.hpp"

namespace specmodel {
namespace {

constexpr int tile_tokens = 64;

template <int D, int MW, int NW, int STAGES>
constexpr std::size_t attention_shared_bytes() {
    return static_cast<std::size_t>(STAGES * 2 * tile_tokens + 16 * MW) * D * sizeof(bf16);
}

// 16-byte chunk `chunk` of row `row` in a tile of D / 8 chunks a row; the swizzle keeps ldmatrix free of bank
// conflicts.
template <int D>
__device__ __forceinline__ std::uint32_t chunk_offset(int row, int chunk) {
    return static_cast<std::uint32_t>((row * (D / 8) + (chunk ^ (row & 7))) * 16);
}

// MW warps divide the 16 MW matrix rows, NW warps divide the tokens of each tile.
template <int D, int MW, int NW, int STAGES>
__global__ void __launch_bounds__(32 * MW * NW, MW* NW <= 6 ? 2 : 1) attend_kernel(Attention a) {
    constexpr int threads = 32 * MW * NW;
    constexpr int chunks = D / 8;
    constexpr int warp_tokens = tile_tokens / NW;
    constexpr int score_tiles = warp_tokens / 8;
    constexpr std::uint32_t tile_bytes = tile_tokens * D * sizeof(bf16);
    extern __shared__ uint4 shared[];
    const std::uint32_t ring = shared_address(shared);
    const std::uint32_t query_tile = ring + STAGES * 2 * tile_bytes;

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row_warp = warp % MW;
    const int token_warp = warp / MW;
    const int group = a.heads / a.kv_heads;
    const int tile_rows = a.rows_per_sequence * group;
    const int first_row = blockIdx.x * 16 * MW;
    const int kv_head = blockIdx.y;
    const int sequence = blockIdx.z / a.splits;
    const int split = blockIdx.z % a.splits;
    const int all_heads = a.heads + 2 * a.kv_heads;

    const int past = a.lengths[sequence] + a.offset;
    const int total = past + a.rows_per_sequence;
    const int visible = past + (min(first_row + 16 * MW, tile_rows) - 1) / group + 1;  // to the last row of this tile
    const int per_split = ((total + a.splits - 1) / a.splits + tile_tokens - 1) / tile_tokens * tile_tokens;
    const int begin = split * per_split;
    const int end = min(begin + per_split, visible);
    // Matrix row r of this tile is head r % group of token r / group; its result goes to this row of [T, heads].
    auto result_row = [&](int r) {
        return (static_cast<std::size_t>(sequence) * a.rows_per_sequence + r / group) * a.heads + kv_head * group +
               r % group;
    };
    const std::size_t result_rows = static_cast<std::size_t>(gridDim.z / a.splits) * a.rows_per_sequence * a.heads;
    if (begin >= end) {  // nothing for this split; the merge skips it
        for (int r = threadIdx.x; r < 16 * MW; r += threads)
            if (first_row + r < tile_rows) a.partial_log[split * result_rows + result_row(first_row + r)] = -INFINITY;
        return;
    }

    const std::size_t cache_row = (static_cast<std::size_t>(sequence) * a.kv_heads + kv_head) * a.capacity + begin;
    const bf16* keys = a.keys + cache_row * D;
    const bf16* values = a.values + cache_row * D;
    const int count = end - begin;
    const int tiles = (count + tile_tokens - 1) / tile_tokens;
    auto load_tile = [&](int tile) {
        if (tile < tiles) {
            const std::uint32_t key_stage = ring + (tile % STAGES) * 2 * tile_bytes;
#pragma unroll
            for (int i = threadIdx.x; i < tile_tokens * chunks; i += threads) {
                const int token = i / chunks;
                const int chunk = i % chunks;
                const int from = tile * tile_tokens + token;
                const bool valid = from < count;
                const std::size_t element = static_cast<std::size_t>(valid ? from : 0) * D + chunk * 8;
                copy16(key_stage + chunk_offset<D>(token, chunk), keys + element, valid);
                copy16(key_stage + tile_bytes + chunk_offset<D>(token, chunk), values + element, valid);
            }
        }
        copy_commit();
    };

    for (int i = threadIdx.x; i < 16 * MW * chunks; i += threads) {
        const int r = i / chunks;
        const bool valid = first_row + r < tile_rows;
        const int row = valid ? first_row + r : first_row;
        const std::size_t token = static_cast<std::size_t>(sequence) * a.rows_per_sequence + row / group;
        const bf16* from = a.qkv + (token * all_heads + kv_head * group + row % group) * D + (i % chunks) * 8;
        copy16(query_tile + chunk_offset<D>(r, i % chunks), from, valid);
    }
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; ++tile) load_tile(tile);

    std::uint32_t query[D / 16][4];
    float out[chunks][4] = {};
    float peak[2] = {-INFINITY, -INFINITY};  // running maximum of rows lane / 4 and lane / 4 + 8
    float sum[2] = {0, 0};                   // this lane's share of the sum of exponentials
    const float scale = 1.4426950408889634F * rsqrtf(static_cast<float>(D));
    const int row0 = first_row + row_warp * 16 + lane / 4;
    const int bound[2] = {min(past + row0 / group + 1, end) - begin, min(past + (row0 + 8) / group + 1, end) - begin};
    const int unmasked = min(past + first_row / group + 1, end) - begin;  // below this every row sees every token

    for (int tile = 0; tile < tiles; ++tile) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        if (tile == 0) {
#pragma unroll
            for (int k = 0; k < D / 16; ++k)
                load_matrices(query[k], query_tile + chunk_offset<D>(row_warp * 16 + lane % 16, 2 * k + lane / 16));
        }
        load_tile(tile + STAGES - 1);
        const std::uint32_t key_stage = ring + (tile % STAGES) * 2 * tile_bytes;
        const std::uint32_t value_stage = key_stage + tile_bytes;
        const int first_token = token_warp * warp_tokens;

        float score[score_tiles][4] = {};
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
#pragma unroll
            for (int t = 0; t < score_tiles; t += 2) {
                std::uint32_t b[4];
                const int token = first_token + t * 8 + (lane / 16) * 8 + lane % 8;
                load_matrices(b, key_stage + chunk_offset<D>(token, 2 * k + (lane / 8) % 2));
                multiply(score[t], query[k], b[0], b[1]);
                multiply(score[t + 1], query[k], b[2], b[3]);
            }
        }
        const int tile_first = tile * tile_tokens;
        if (tile_first + tile_tokens > unmasked) {
#pragma unroll
            for (int t = 0; t < score_tiles; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (tile_first + first_token + t * 8 + 2 * (lane % 4) + i % 2 >= bound[i / 2])
                        score[t][i] = -INFINITY;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = peak[half];
#pragma unroll
            for (int t = 0; t < score_tiles; ++t) most = fmaxf(most, fmaxf(score[t][2 * half], score[t][2 * half + 1]));
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, 2));
            const float base = most == -INFINITY ? 0.0F : most * scale;
            const float shrink = exp2_fast(peak[half] * scale - base);
            peak[half] = most;
            sum[half] *= shrink;
#pragma unroll
            for (int t = 0; t < score_tiles; ++t)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    score[t][i] = exp2_fast(score[t][i] * scale - base);
                    sum[half] += score[t][i];
                }
#pragma unroll
            for (int c = 0; c < chunks; ++c) {
                out[c][2 * half] *= shrink;
                out[c][2 * half + 1] *= shrink;
            }
        }
#pragma unroll
        for (int t = 0; t < score_tiles; t += 2) {
            const std::uint32_t p[4] = {pack2(score[t][0], score[t][1]), pack2(score[t][2], score[t][3]),
                                        pack2(score[t + 1][0], score[t + 1][1]),
                                        pack2(score[t + 1][2], score[t + 1][3])};
#pragma unroll
            for (int c = 0; c < chunks; c += 2) {
                std::uint32_t b[4];
                load_matrices_transposed(b,
                                         value_stage + chunk_offset<D>(first_token + t * 8 + lane % 16, c + lane / 16));
                multiply(out[c], p, b[0], b[1]);
                multiply(out[c + 1], p, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum[half] += __shfl_xor_sync(0xFFFFFFFFU, sum[half], 1);
        sum[half] += __shfl_xor_sync(0xFFFFFFFFU, sum[half], 2);
    }

    if constexpr (NW > 1) {  // merge the token warps into warp row_warp of token_warp 0, through shared memory
        copy_wait<0>();
        __syncthreads();
        auto* merge = reinterpret_cast<float*>(shared);  // [NW][16 MW][D], then [NW][16 MW][2]
        float* logs = merge + NW * 16 * MW * D;
        const int r = row_warp * 16 + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = token_warp * 16 * MW + r + 8 * half;
#pragma unroll
            for (int c = 0; c < chunks; ++c)
                *reinterpret_cast<float2*>(merge + row * D + c * 8 + 2 * (lane % 4)) =
                    make_float2(out[c][2 * half], out[c][2 * half + 1]);
            if (lane % 4 == 0) {
                logs[2 * row] = peak[half];
                logs[2 * row + 1] = sum[half];
            }
        }
        __syncthreads();
        if (token_warp != 0) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = r + 8 * half;
            float most = -INFINITY;
#pragma unroll
            for (int w = 0; w < NW; ++w) most = fmaxf(most, logs[2 * (w * 16 * MW + row)]);
            const float base = most == -INFINITY ? 0.0F : most * scale;
            sum[half] = 0;
#pragma unroll
            for (int c = 0; c < chunks; ++c) out[c][2 * half] = out[c][2 * half + 1] = 0;
#pragma unroll
            for (int w = 0; w < NW; ++w) {
                const int from = w * 16 * MW + row;
                const float weight = exp2_fast(logs[2 * from] * scale - base);
                sum[half] += weight * logs[2 * from + 1];
#pragma unroll
                for (int c = 0; c < chunks; ++c) {
                    const float2 pair = *reinterpret_cast<const float2*>(merge + from * D + c * 8 + 2 * (lane % 4));
                    out[c][2 * half] += weight * pair.x;
                    out[c][2 * half + 1] += weight * pair.y;
                }
            }
            peak[half] = most;
        }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = row0 + 8 * half;
        if (row >= tile_rows) continue;
        const std::size_t to = result_row(row);
        const float inverse = sum[half] > 0 ? 1.0F / sum[half] : 0.0F;
        if (a.splits == 1) {
            bf16* target = a.out + to * D;
#pragma unroll
            for (int c = 0; c < chunks; ++c)
                *reinterpret_cast<std::uint32_t*>(target + c * 8 + 2 * (lane % 4)) =
                    pack2(out[c][2 * half] * inverse, out[c][2 * half + 1] * inverse);
        } else {
            float* target = a.partial + (split * result_rows + to) * D;
#pragma unroll
            for (int c = 0; c < chunks; ++c)
                *reinterpret_cast<float2*>(target + c * 8 + 2 * (lane % 4)) =
                    make_float2(out[c][2 * half] * inverse, out[c][2 * half + 1] * inverse);
            if (lane % 4 == 0)
                a.partial_log[split * result_rows + to] =
                    sum[half] > 0 ? peak[half] * scale + log2f(sum[half]) : -INFINITY;
        }
    }
}

// One warp per (row, head): the parts weighted by their sums of exponentials.
template <int D>
__global__ void __launch_bounds__(128) merge_kernel(Attention a, int result_rows) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= result_rows) return;
    const int lane = threadIdx.x % 32;
    float most = -INFINITY;
    for (int s = 0; s < a.splits; ++s)
        most = fmaxf(most, a.partial_log[static_cast<std::size_t>(s) * result_rows + row]);
    float total = 0;
    float sums[D / 32] = {};
    for (int s = 0; s < a.splits; ++s) {
        const std::size_t from = static_cast<std::size_t>(s) * result_rows + row;
        const float log = a.partial_log[from];
        if (log == -INFINITY) continue;
        const float weight = exp2_fast(log - most);
        total += weight;
#pragma unroll
        for (int j = 0; j < D / 32; ++j) sums[j] += weight * a.partial[from * D + lane + 32 * j];
    }
#pragma unroll
    for (int j = 0; j < D / 32; ++j)
        a.out[static_cast<std::size_t>(row) * D + lane + 32 * j] = __float2bfloat16(sums[j] / total);
}

struct Variant {
    void (*kernel)(Attention) = nullptr;
    int tile_rows = 0;
    unsigned threads = 0;
    std::size_t shared_bytes = 0;
};

template <int D, int MW, int NW, int STAGES>
Variant variant() {
    return {attend_kernel<D, MW, NW, STAGES>, 16 * MW, 32 * MW * NW, attention_shared_bytes<D, MW, NW, STAGES>()};
}

template <int D>
Variant choose(int tile_rows, bool large_shared) {
    if (tile_rows <= 16) return large_shared ? variant<D, 1, 4, 3>() : variant<D, 1, 4, 2>();
    if (tile_rows <= 32) return large_shared ? variant<D, 2, 2, 3>() : variant<D, 2, 2, 2>();
    if (tile_rows <= 48) return large_shared ? variant<D, 3, 2, 3>() : variant<D, 3, 2, 2>();
    if (tile_rows <= 64) return large_shared ? variant<D, 4, 1, 3>() : variant<D, 4, 1, 2>();
    return large_shared ? variant<D, 8, 1, 3>() : variant<D, 8, 1, 2>();
}

// Three stages where two blocks of them fit on a multiprocessor (Hopper, Blackwell of the data centre), else two.
bool has_large_shared() {
    static const bool large = [] {
        int device = 0;
        int bytes = 0;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
        return bytes >= 220 * 1024;
    }();
    return large;
}

Variant choose(int rows_per_sequence, int heads, int kv_heads, int head_dim) {
    const int tile_rows = rows_per_sequence * (heads / kv_heads);
    return head_dim == 128 ? choose<128>(tile_rows, has_large_shared()) : choose<64>(tile_rows, has_large_shared());
}

}  // namespace

void prepare_attention() {
    for (int head_dim : {64, 128})
        for (int rows : {16, 32, 48, 64, 128}) {
            const Variant v = choose(rows, 1, 1, head_dim);
            CUDA_CHECK(cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(v.shared_bytes)));
            prefer_shared(v.kernel);
        }
    prefer_shared(merge_kernel<64>);
    prefer_shared(merge_kernel<128>);
}

int attention_splits(int batch, int rows_per_sequence, int heads, int kv_heads, int head_dim, int context_tokens) {
    const Variant v = choose(rows_per_sequence, heads, kv_heads, head_dim);
    int device = 0;
    int multiprocessors = 0;
    int resident = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, v.kernel, static_cast<int>(v.threads),
                                                             v.shared_bytes));
    const int tile_rows = rows_per_sequence * (heads / kv_heads);
    const int slots = multiprocessors * std::max(resident, 1);
    const int blocks = (tile_rows + v.tile_rows - 1) / v.tile_rows * kv_heads * batch;
    const int most = std::clamp(context_tokens / (2 * tile_tokens), 1, 64);
    // The fewest splits whose last wave is nearly as full as the best possible (a split costs a merge).
    auto efficiency = [&](int splits) {
        const double waves = static_cast<double>(blocks) * splits / slots;
        return waves / std::ceil(waves);
    };
    double best = 0;
    for (int s = 1; s <= most; ++s) best = std::max(best, efficiency(s));
    for (int s = 1; s <= most; ++s)
        if (efficiency(s) >= 0.85 * best) return s;
    return 1;
}

void attend(const Attention& a, cudaStream_t stream) {
    const Variant v = choose(a.rows_per_sequence, a.heads, a.kv_heads, a.head_dim);
    const int tile_rows = a.rows_per_sequence * (a.heads / a.kv_heads);
    const dim3 grid(static_cast<unsigned>((tile_rows + v.tile_rows - 1) / v.tile_rows),
                    static_cast<unsigned>(a.kv_heads), static_cast<unsigned>(a.batch * a.splits));
    v.kernel<<<grid, v.threads, v.shared_bytes, stream>>>(a);
    LAUNCH_CHECK("attend");
    if (a.splits == 1) return;
    const int result_rows = a.batch * a.rows_per_sequence * a.heads;
    const auto blocks = static_cast<unsigned>((result_rows + 3) / 4);
    if (a.head_dim == 128)
        merge_kernel<128><<<blocks, 128, 0, stream>>>(a, result_rows);
    else
        merge_kernel<64><<<blocks, 128, 0, stream>>>(a, result_rows);
    LAUNCH_CHECK("attend (merge)");
}

}  // namespace specmodel
