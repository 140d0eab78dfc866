// A decoder with random weights, its KV cache, and one pass over it: target and drafter alike.
#pragma once

#include <vector>

#include "device.hpp"
#include "gemm.hpp"
#include "job.hpp"
#include "kernels.hpp"
#include "nccl.hpp"

namespace specmodel {

struct Layer {
    bf16* input_norm = nullptr;
    bf16* qkv = nullptr;         // [(heads + 2 kv_heads) head_dim, qkv_input]
    bf16* query_norm = nullptr;  // [head_dim], with qk_norm
    bf16* key_norm = nullptr;
    bf16* output = nullptr;  // [hidden, heads head_dim]
    bf16* mlp_norm = nullptr;
    bf16* gate_up = nullptr;         // [2 size, hidden]: dense, or the shared expert
    bf16* down = nullptr;            // [hidden, size]
    bf16* router = nullptr;          // [experts, hidden]
    bf16* expert_gate_up = nullptr;  // see kernels.hpp
    bf16* expert_down = nullptr;
};

// This rank's slice of a model. Every element is a function of the seed and its place in the whole matrix, so slices of
// different widths belong to the same model.
struct Model {
    ModelShape shape;
    int rank = 0;
    int world = 1;
    int heads = 0;  // of this rank, as the next three
    int kv_heads = 0;
    int size = 0;  // dense or shared-expert intermediate size; 0: none
    int expert_size = 0;
    int vocab = 0;      // of this rank's slice of the LM head
    int qkv_input = 0;  // hidden_size, or twice that for an EAGLE-3 layer
    int fc_input = 0;   // width of the target's three hidden states; 0: no fc
    std::vector<Layer> layers;
    bf16* embedding = nullptr;       // [vocab_size, hidden], whole on every rank
    bf16* embedding_norm = nullptr;  // EAGLE-3: norms of the two halves of the QKV input
    bf16* hidden_norm = nullptr;
    bf16* fc = nullptr;  // [hidden, fc_input]
    bf16* final_norm = nullptr;
    bf16* head = nullptr;            // [vocab, hidden]
    int* draft_to_target = nullptr;  // [draft vocabulary], EAGLE-3
    Arena arena;
    double weight_bytes = 0;  // of one pass that touches every expert; the embedding not counted
};

// An EAGLE-3 drafter of the target's width shares its embedding.
void build_model(Model& m, const ModelShape& shape, int rank, int world, std::uint64_t seed, cudaStream_t stream);
void build_eagle3(Model& m, const DraftShape& draft, const Model& target, std::uint64_t seed, cudaStream_t stream);

struct KvCache {
    std::vector<bf16*> keys;  // of each layer: [batch, kv_heads, capacity, head_dim], the pass sets batch and capacity
    std::vector<bf16*> values;
    Arena arena;
};
// Random content for `positions` = the largest batch * capacity of any pass.
void build_cache(KvCache& cache, const Model& m, std::size_t positions, std::uint64_t seed, cudaStream_t stream);

// Scratch of a pass, large enough for `rows` rows of any of the models that use it.
struct Workspace {
    bf16* x = nullptr;       // the residual stream
    bf16* normed = nullptr;  // [rows, 2 hidden]
    bf16* embedded = nullptr;
    bf16* qkv = nullptr;
    bf16* attended = nullptr;
    bf16* projected = nullptr;  // output of a block on this rank
    bf16* reduced = nullptr;    // the same, summed over ranks
    bf16* gate_up = nullptr;
    bf16* active = nullptr;
    bf16* router = nullptr;
    bf16* expert_active = nullptr;
    bf16* slots = nullptr;
    int* chosen = nullptr;
    float* expert_weights = nullptr;
    int* plan = nullptr;
    bf16* logits = nullptr;
    std::uint64_t* parts = nullptr;
    std::uint64_t* best = nullptr;   // [rows]
    std::uint64_t* bests = nullptr;  // [world, rows]
    float* partial = nullptr;
    float* partial_log = nullptr;
    Arena arena;
};
// `partial_rows`: the largest splits * rows of any pass (0 if none is split).
void build_workspace(Workspace& w, const std::vector<const Model*>& models, int rows, std::size_t partial_rows,
                     int head_rows);

// One pass: `rows` new rows for each of `batch` sequences.
struct Pass {
    int batch = 1;
    int rows = 1;
    int capacity = 0;
    int splits = 1;
    const int* lengths = nullptr;  // device: tokens in the cache before this pass, less offset
    int offset = 0;
    const int* tokens = nullptr;  // device, [batch * rows] with a stride
    int token_stride = 1;
    int* predicted = nullptr;  // device: argmax of each row with a head, with a stride
    int predicted_stride = 1;
    int spread = 0;                 // see argmax_final: a drafter's tokens
    bf16* hidden_states = nullptr;  // [batch * rows, 3 hidden]: three of the target's hidden states, if wanted
    Part part = Part::all;
    int total_rows() const { return batch * rows; }
};

// What the passes share. `comm` is null with one rank; it is swapped between captured and direct work.
struct Engine {
    Device& device;
    Gemm& gemm;
    Workspace& workspace;
    Comm* comm = nullptr;
    cudaStream_t stream() const { return device.stream(); }
};

// Chooses the algorithms of all matrix products of such a pass.
void prepare_pass(Engine& e, const Model& m, const Pass& p, int head_rows);
// Embedding to argmax. The hidden states after the last norm stay in workspace.normed.
void run_model(Engine& e, const Model& m, KvCache& cache, const Pass& p);
// One step of an EAGLE-3 head. `target_hidden` [batch * rows, fc_input] on the first step, else null (its own hidden
// state, in workspace.x, goes on). With several rows, `picked` says which row of each sequence goes on.
void run_eagle3(Engine& e, const Model& m, KvCache& cache, const Pass& p, const bf16* target_hidden, const int* picked);

struct Work {
    double flops = 0;
    double weight_bytes = 0;
    double kv_bytes = 0;
    double comm_bytes = 0;
};
// `experts_touched` per layer, as measured. `context` tokens before the pass. Per rank.
Work work_of(const Model& m, const Pass& p, int context, double experts_touched, int head_rows);

}  // namespace specmodel
