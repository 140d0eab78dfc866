// Routed experts: softmax router with top-k, a work list built on the device, and two grouped matrix products that read
// only the experts that were touched.
//
// At verification sizes an expert sees few rows, so the time is that of streaming its weights: weights are the left
// (16-row) operand of the tensor-core product and the tokens the narrow right one (8 columns), and weights flow through
// a deep ring of shared-memory stages. The grid is sized for the most tiles that could be needed; blocks past the list
// leave at once.
#include <algorithm>

#include "device_helpers.cuh"
#include "kernels.hpp"

namespace specmodel {
namespace {

constexpr int most_experts = 512;
constexpr int weight_rows = 64;  // of one block: 16 per warp
constexpr int depth = 64;        // numbers of the inner dimension per stage

// The plan: [tiles, touched (summed over calls), calls, unused] then tile_expert, tile_start, tile_rows, slot_token,
// slot_of.
struct Plan {
    int* head;
    int* tile_expert;
    int* tile_start;
    int* tile_rows;
    int* slot_token;  // sorted by expert: the token of each slot
    int* slot_of;     // [T, top]: where a token's expert result is
};

int tile_tokens_for(int rows, int experts, int top) {
    const double mean = static_cast<double>(rows) * top / experts;
    for (int tokens : {8, 16, 32})
        if (tokens >= 2 * mean) return tokens;
    return 64;
}

int most_tiles(int rows, int experts, int top) {
    const int slots = rows * top;
    return std::min(experts, slots) + slots / tile_tokens_for(rows, experts, top);
}

__host__ __device__ Plan plan_of(int* block, int tiles, int slots) {
    Plan p{};
    p.head = block;
    p.tile_expert = block + 4;
    p.tile_start = p.tile_expert + tiles;
    p.tile_rows = p.tile_start + tiles;
    p.slot_token = p.tile_rows + tiles;
    p.slot_of = p.slot_token + slots;
    return p;
}

// One warp per row: softmax over the experts, then the best `top`, highest first.
__global__ void __launch_bounds__(128) top_experts_kernel(Experts e) {
    constexpr int per_lane = most_experts / 32;
    const int row = blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= e.rows) return;
    const int lane = threadIdx.x % 32;
    float score[per_lane];
    float most = -INFINITY;
#pragma unroll
    for (int j = 0; j < per_lane; ++j) {
        const int expert = lane + 32 * j;
        score[j] = expert < e.experts ? __bfloat162float(e.logits[static_cast<std::size_t>(row) * e.experts + expert])
                                      : -INFINITY;
        most = fmaxf(most, score[j]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, offset));
    float total = 0;
#pragma unroll
    for (int j = 0; j < per_lane; ++j) {
        score[j] = __expf(score[j] - most);
        total += score[j];
    }
    total = warp_sum(total);
    float chosen_total = 0;
    float mine = 0;  // lane k keeps the k-th choice
    int my_expert = 0;
    for (int k = 0; k < e.top; ++k) {
        float best = -1;
        int where = 0;
#pragma unroll
        for (int j = 0; j < per_lane; ++j)
            if (score[j] > best) {
                best = score[j];
                where = j;
            }
        int expert = lane + 32 * where;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            const float other = __shfl_xor_sync(0xFFFFFFFFU, best, offset);
            const int other_expert = __shfl_xor_sync(0xFFFFFFFFU, expert, offset);
            if (other > best || (other == best && other_expert < expert)) {
                best = other;
                expert = other_expert;
            }
        }
#pragma unroll
        for (int j = 0; j < per_lane; ++j)
            if (expert == lane + 32 * j) score[j] = -2;
        chosen_total += best;
        if (lane == k) {
            mine = best;
            my_expert = expert;
        }
    }
    if (lane < e.top) {
        e.chosen[row * e.top + lane] = my_expert;
        e.weights[row * e.top + lane] = mine / (e.normalize ? chosen_total : total);
    }
}

constexpr int most_slots = 65535;  // their prefix sum shares a word with that of the tiles

// One block: counts per expert, their prefix sums, the list of tiles, and the slots sorted by expert.
__global__ void __launch_bounds__(1024) plan_kernel(Experts e, int tiles_allowed, int tile_tokens) {
    __shared__ int counts[most_experts];
    __shared__ unsigned scan[most_experts];  // tiles in the high half, slots in the low half
    const Plan p = plan_of(e.plan, tiles_allowed, e.rows * e.top);
    const int slots = e.rows * e.top;
    const int me = threadIdx.x;
    if (me < most_experts) counts[me] = 0;
    __syncthreads();
    for (int i = me; i < slots; i += blockDim.x) atomicAdd(&counts[e.chosen[i]], 1);
    __syncthreads();
    const int count = me < most_experts ? counts[me] : 0;
    const unsigned own =
        static_cast<unsigned>((count + tile_tokens - 1) / tile_tokens) << 16 | static_cast<unsigned>(count);
    if (me < most_experts) scan[me] = own;
    __syncthreads();
    for (int step = 1; step < most_experts; step *= 2) {
        const unsigned before = me < most_experts && me >= step ? scan[me - step] : 0;
        __syncthreads();
        if (me < most_experts) scan[me] += before;
        __syncthreads();
    }
    const int touched = __syncthreads_count(count > 0);
    if (me == 0) {
        p.head[0] = static_cast<int>(scan[most_experts - 1] >> 16);
        p.head[plan_touched] += touched;
        p.head[2] += 1;
    }
    if (me < most_experts) {
        const unsigned before = scan[me] - own;
        const int start = static_cast<int>(before & 0xFFFFU);
        int tile = static_cast<int>(before >> 16);
        for (int done = 0; done < count; done += tile_tokens, ++tile) {
            p.tile_expert[tile] = me;
            p.tile_start[tile] = start + done;
            p.tile_rows[tile] = min(tile_tokens, count - done);
        }
        counts[me] = start;  // from here on the next free slot
    }
    __syncthreads();
    for (int i = me; i < slots; i += blockDim.x) {
        const int slot = atomicAdd(&counts[e.chosen[i]], 1);
        p.slot_token[slot] = i / e.top;
        p.slot_of[i] = slot;
    }
}

__device__ __forceinline__ std::uint32_t stage_offset(int row, int chunk) {
    return static_cast<std::uint32_t>((row * (depth / 8) + (chunk ^ (row & 7))) * 16);
}

template <int TOKENS>
constexpr int stages_of = TOKENS <= 16   ? 6
                          : TOKENS == 32 ? 5
                                         : 4;

template <int TOKENS>
constexpr std::size_t expert_shared_bytes =
    static_cast<std::size_t>(stages_of<TOKENS>) * (weight_rows + TOKENS) * depth * sizeof(bf16);

// UP: active = silu(gate) * up from the tokens' rows; otherwise slots = down * active.
template <int TOKENS, bool UP>
__global__ void __launch_bounds__(128) expert_kernel(Experts e, int tiles_allowed) {
    constexpr int stages = stages_of<TOKENS>;
    constexpr int chunks = depth / 8;
    constexpr std::uint32_t weight_bytes = weight_rows * depth * sizeof(bf16);
    constexpr std::uint32_t stage_bytes = (weight_rows + TOKENS) * depth * sizeof(bf16);
    extern __shared__ uint4 shared[];
    const Plan p = plan_of(e.plan, tiles_allowed, e.rows * e.top);
    const int tile = blockIdx.y;
    if (tile >= p.head[0]) return;
    const std::uint32_t ring = shared_address(shared);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int start = p.tile_start[tile];
    const int rows = p.tile_rows[tile];
    const int inner = UP ? e.hidden : e.size;
    const int outer = UP ? 2 * e.size : e.hidden;
    const int first = blockIdx.x * weight_rows;
    const bf16* weights =
        (UP ? e.gate_up : e.down) + (static_cast<std::size_t>(p.tile_expert[tile]) * outer + first) * inner;

    // What this thread copies in every stage: a fixed column chunk of several rows.
    const int chunk = threadIdx.x % chunks;
    const int first_row = threadIdx.x / chunks;  // then every 16th
    constexpr int row_step = 128 / chunks;
    constexpr int token_copies = (TOKENS + row_step - 1) / row_step;
    const bf16* token_rows[token_copies];
#pragma unroll
    for (int j = 0; j < token_copies; ++j) {
        const int r = first_row + j * row_step;
        const int slot = start + min(r, rows - 1);
        const std::size_t row = UP ? p.slot_token[slot] : slot;
        token_rows[j] = (UP ? e.input : e.active) + row * inner + chunk * 8;
    }
    const int steps = inner / depth;
    auto load_stage = [&](int step) {
        if (step < steps) {
            const std::uint32_t stage = ring + (step % stages) * stage_bytes;
            const bf16* from = weights + step * depth + chunk * 8;
#pragma unroll
            for (int j = 0; j < weight_rows / row_step; ++j) {
                const int r = first_row + j * row_step;
                copy16(stage + stage_offset(r, chunk), from + static_cast<std::size_t>(r) * inner, true);
            }
#pragma unroll
            for (int j = 0; j < token_copies; ++j) {
                const int r = first_row + j * row_step;
                if (r < TOKENS)
                    copy16(stage + weight_bytes + stage_offset(r, chunk), token_rows[j] + step * depth, r < rows);
            }
        }
        copy_commit();
    };
#pragma unroll
    for (int step = 0; step < stages - 1; ++step) load_stage(step);

    float sums[TOKENS / 8][4] = {};
    for (int step = 0; step < steps; ++step) {
        copy_wait<stages - 2>();
        __syncthreads();
        load_stage(step + stages - 1);
        const std::uint32_t stage = ring + (step % stages) * stage_bytes;
        const std::uint32_t tokens = stage + weight_bytes;
#pragma unroll
        for (int k = 0; k < depth / 16; k += 2) {
            std::uint32_t a[2][4];
            load_matrices(a[0], stage + stage_offset(warp * 16 + lane % 16, 2 * k + lane / 16));
            load_matrices(a[1], stage + stage_offset(warp * 16 + lane % 16, 2 * k + 2 + lane / 16));
#pragma unroll
            for (int t = 0; t < TOKENS / 8; ++t) {
                std::uint32_t b[4];  // 8 tokens, two steps of 16
                load_matrices(b, tokens + stage_offset(t * 8 + lane % 8, 2 * k + lane / 8));
                multiply(sums[t], a[0], b[0], b[1]);
                multiply(sums[t], a[1], b[2], b[3]);
            }
        }
    }
    const int weight_row = warp * 16 + lane / 4;
#pragma unroll
    for (int t = 0; t < TOKENS / 8; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = t * 8 + 2 * (lane % 4) + i;
            if (r >= rows) continue;
            const std::size_t slot = start + r;
            if constexpr (UP) {  // rows 0-7 of a group of 16 are gate rows, 8-15 the matching up rows
                e.active[slot * e.size + first / 2 + warp * 8 + lane / 4] =
                    __float2bfloat16(silu(sums[t][i]) * sums[t][2 + i]);
            } else {
                e.slots[slot * e.hidden + first + weight_row] = __float2bfloat16(sums[t][i]);
                e.slots[slot * e.hidden + first + weight_row + 8] = __float2bfloat16(sums[t][2 + i]);
            }
        }
}

__global__ void __launch_bounds__(128) combine_kernel(Experts e, int tiles_allowed) {
    const Plan p = plan_of(e.plan, tiles_allowed, e.rows * e.top);
    const int row = blockIdx.y;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= e.hidden / 8) return;
    auto* out = reinterpret_cast<uint4*>(e.out + static_cast<std::size_t>(row) * e.hidden);
    float sum[8] = {};
    if (e.add_to_out) unpack8(out[i], sum);
    for (int k = 0; k < e.top; ++k) {
        const std::size_t slot = p.slot_of[row * e.top + k];
        const float weight = e.weights[row * e.top + k];
        float v[8];
        unpack8(reinterpret_cast<const uint4*>(e.slots + slot * e.hidden)[i], v);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] += weight * v[j];
    }
    out[i] = pack8(sum);
}

template <int TOKENS>
void run_products(const Experts& e, cudaStream_t stream) {
    const int tiles = most_tiles(e.rows, e.experts, e.top);
    const dim3 up(static_cast<unsigned>(2 * e.size / weight_rows), static_cast<unsigned>(tiles));
    const dim3 down(static_cast<unsigned>(e.hidden / weight_rows), static_cast<unsigned>(tiles));
    expert_kernel<TOKENS, true><<<up, 128, expert_shared_bytes<TOKENS>, stream>>>(e, tiles);
    LAUNCH_CHECK("experts (gate and up)");
    expert_kernel<TOKENS, false><<<down, 128, expert_shared_bytes<TOKENS>, stream>>>(e, tiles);
    LAUNCH_CHECK("experts (down)");
}

template <int TOKENS>
void allow_shared() {
    const auto bytes = static_cast<int>(expert_shared_bytes<TOKENS>);
    CUDA_CHECK(cudaFuncSetAttribute(expert_kernel<TOKENS, true>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    CUDA_CHECK(cudaFuncSetAttribute(expert_kernel<TOKENS, false>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    prefer_shared(expert_kernel<TOKENS, true>);
    prefer_shared(expert_kernel<TOKENS, false>);
}

}  // namespace

std::size_t expert_plan_size(int rows, int experts, int top) {
    // The tile size steps with the rows, so the most tiles may belong to fewer rows than the most.
    const auto slots = static_cast<std::size_t>(rows) * top;
    const std::size_t tiles = std::min<std::size_t>(experts, slots) + slots / 8 + 1;
    return 4 + 3 * tiles + 2 * slots;
}

void route(const Experts& e, cudaStream_t stream) {
    if (e.rows * e.top > most_slots) throw Refused("a pass of so many rows to so many experts cannot be routed");
    top_experts_kernel<<<static_cast<unsigned>((e.rows + 3) / 4), 128, 0, stream>>>(e);
    LAUNCH_CHECK("route (top experts)");
    plan_kernel<<<1, 1024, 0, stream>>>(e, most_tiles(e.rows, e.experts, e.top),
                                        tile_tokens_for(e.rows, e.experts, e.top));
    LAUNCH_CHECK("route (plan)");
}

void run_experts(const Experts& e, cudaStream_t stream) {
    switch (tile_tokens_for(e.rows, e.experts, e.top)) {
        case 8:
            run_products<8>(e, stream);
            break;
        case 16:
            run_products<16>(e, stream);
            break;
        case 32:
            run_products<32>(e, stream);
            break;
        default:
            run_products<64>(e, stream);
            break;
    }
    const dim3 grid(static_cast<unsigned>((e.hidden / 8 + 127) / 128), static_cast<unsigned>(e.rows));
    combine_kernel<<<grid, 128, 0, stream>>>(e, most_tiles(e.rows, e.experts, e.top));
    LAUNCH_CHECK("experts (combine)");
}

void prepare_experts() {
    allow_shared<8>();
    allow_shared<16>();
    allow_shared<32>();
    allow_shared<64>();
    prefer_shared(top_experts_kernel);
    prefer_shared(plan_kernel);
    prefer_shared(combine_kernel);
}

}  // namespace specmodel
