// The kernels of a transformer pass that are not plain matrix products, as host functions that launch them.
// All tensors are row-major bf16 unless said otherwise; T = rows (tokens) of the pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda.hpp"

namespace specmodel {

// out[r, c] ~ mean + scale N(0, 1), from a counter-based generator keyed by the element's position in the whole matrix
// of `global_columns` columns at (row_offset, column_offset): a rank's slice equals that slice of the full matrix.
struct Fill {
    std::size_t rows = 1;
    std::size_t columns = 0;
    std::size_t global_columns = 0;
    std::size_t row_offset = 0;
    std::size_t column_offset = 0;
    std::uint64_t seed = 0;
    float scale = 1.0F;
    float mean = 0.0F;
};
void fill_normal(bf16* out, const Fill& fill, cudaStream_t stream);
// Token numbers spread over [0, limit).
void fill_tokens(int* out, std::size_t count, int limit, std::uint64_t seed, cudaStream_t stream);

// out[t] = table[tokens[t * token_stride]]
void embed(bf16* out, const bf16* table, const int* tokens, int token_stride, int rows, int hidden,
           cudaStream_t stream);

// x += delta (if any); out = rmsnorm(x) * weight. `copy` (if any) receives the new x: the drafter's view of a hidden
// state.
struct Norm {
    bf16* x = nullptr;
    const bf16* delta = nullptr;
    const bf16* weight = nullptr;
    bf16* out = nullptr;
    int out_stride = 0;
    bf16* copy = nullptr;
    int copy_stride = 0;
    int rows = 0;
    int hidden = 0;
    float epsilon = 1e-5F;
};
void add_rmsnorm(const Norm& norm, cudaStream_t stream);

// out[t] = in[sequence t's row], the row being t * rows_per_sequence + min(picked[t], rows_per_sequence - 1).
void gather_rows(bf16* out, const bf16* in, const int* picked, int sequences, int rows_per_sequence, int width,
                 cudaStream_t stream);

// gate_up [T, 2 size] -> out [T, size] = silu(gate) * up
void silu_multiply(bf16* out, const bf16* gate_up, int rows, int size, cudaStream_t stream);

// out += in, elementwise
void add_rows(bf16* out, const bf16* in, std::size_t count, cudaStream_t stream);

// Argmax over `columns` of each row. Partial results [T, argmax_parts] (packed value and index); then the final index,
// mapped by `table` if given, is written to out[t * out_stride]. With tensor parallelism the ranks' bests are gathered
// in between.
inline constexpr int argmax_parts = 32;
void argmax_partial(std::uint64_t* parts, const bf16* logits, int rows, int columns, int index_offset,
                    cudaStream_t stream);
void argmax_reduce(std::uint64_t* best, const std::uint64_t* parts, int rows, cudaStream_t stream);
// Random weights soon predict the same few tokens over and over, and equal tokens choose equal experts, as text does
// not: with `spread` > 0 the token is instead drawn from [0, spread) by what was predicted and the token before it,
// out[t * out_stride - 1].
void argmax_final(int* out, int out_stride, const std::uint64_t* best, int ranks, int rows, const int* table,
                  int spread, cudaStream_t stream);

// Registers what the kernels above prefer. Once per process, like the other two.
void prepare_elementwise();

// Attention of `rows_per_sequence` new rows per sequence over a KV cache [batch, kv_heads, capacity, head_dim].
struct Attention {
    bf16* qkv = nullptr;  // [T, (heads + 2 kv_heads) head_dim]; queries are rotated in place
    bf16* keys = nullptr;
    bf16* values = nullptr;
    bf16* out = nullptr;           // [T, heads head_dim]
    float* partial = nullptr;      // [splits, T heads, head_dim], when splits > 1
    float* partial_log = nullptr;  // [splits, T heads]: log2 of the sum of exponentials
    const int* lengths = nullptr;  // [batch] tokens in the cache before this pass, less `offset`
    int offset = 0;
    const bf16* query_norm = nullptr;  // [head_dim], or null
    const bf16* key_norm = nullptr;
    int batch = 0;
    int rows_per_sequence = 0;
    int heads = 0;
    int kv_heads = 0;
    int head_dim = 0;
    int capacity = 0;
    int splits = 1;
    float rope_theta = 10000.0F;
    float epsilon = 1e-6F;
};
// Norms (if any) and rotates queries and keys, and appends keys and values to the cache.
void rotate_and_store(const Attention& a, cudaStream_t stream);
void attend(const Attention& a, cudaStream_t stream);
// How many ways to split the cache so that the multiprocessors are evenly busy.
int attention_splits(int batch, int rows_per_sequence, int heads, int kv_heads, int head_dim, int context_tokens);
// Registers what the attention kernels need beyond 48 KB of shared memory. Once per process.
void prepare_attention();

// Routed experts. Weights: gate_up [experts, 2 size, hidden], where rows come in groups of 16: 8 gate rows, then their
// 8 up rows (the fused epilogue finds both in one thread); down [experts, hidden, size].
struct Experts {
    const bf16* input = nullptr;   // [T, hidden]
    const bf16* logits = nullptr;  // [T, experts], the router's output
    const bf16* gate_up = nullptr;
    const bf16* down = nullptr;
    bf16* active = nullptr;    // [T top, size]
    bf16* slots = nullptr;     // [T top, hidden], one row per (token, expert)
    bf16* out = nullptr;       // [T, hidden]
    int* chosen = nullptr;     // [T, top]
    float* weights = nullptr;  // [T, top]
    int* plan = nullptr;       // work list; expert_plan_size() integers
    int rows = 0;
    int hidden = 0;
    int size = 0;
    int experts = 0;
    int top = 0;
    bool normalize = true;
    bool add_to_out = false;  // out already holds the shared expert's result
};
std::size_t expert_plan_size(int rows, int experts, int top);
// Router softmax, top-k, and the list of (expert, rows) tiles.
void route(const Experts& e, cudaStream_t stream);
// The two grouped products over the experts that were touched, and the weighted sum over each token's experts.
void run_experts(const Experts& e, cudaStream_t stream);
void prepare_experts();
// Position in `plan` of the count of experts touched by the last `route`.
inline constexpr int plan_touched = 1;

// Accepts the first drafts of each sequence, each with the probability of its position, and picks what goes on.
struct Accept {
    int* tokens = nullptr;           // [batch, steps + 1], verified in this cycle; [b, 0] becomes the next one's first
    const int* predicted = nullptr;  // [batch, steps + 1], the target's argmax
    const float* conditional = nullptr;  // [steps]
    int* accepted = nullptr;             // [batch]
    int* result = nullptr;               // [batch, 2]: tokens emitted, next token: what the host reads
    int batch = 0;
    int steps = 0;
    int spread = 0;  // > 0: the next token is drawn anew from [0, spread), see argmax_final
    std::uint64_t seed = 0;
    std::uint64_t cycle = 0;
};
void accept_drafts(const Accept& a, cudaStream_t stream);

}  // namespace specmodel
