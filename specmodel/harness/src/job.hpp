// The job file (PROTOCOL.md): what to measure, on which shapes.
#pragma once

#include <string>
#include <vector>

#include "json.hpp"
#include "stats.hpp"

namespace specmodel {

// A decoder: bf16, RMSNorm, rotary positions, grouped-query attention, SwiGLU or routed experts.
struct ModelShape {
    int hidden_size = 0;
    int intermediate_size = 0;
    int num_layers = 0;
    int num_attention_heads = 0;
    int num_key_value_heads = 0;
    int head_dim = 0;
    int vocab_size = 0;
    double rope_theta = 10000.0;
    double rms_norm_eps = 1e-5;
    bool qk_norm = false;
    int num_experts = 0;
    int experts_per_token = 0;
    int moe_intermediate_size = 0;
    int shared_expert_intermediate_size = 0;
    bool norm_topk_prob = true;
};

enum class DraftKind { none, eagle3, model };

struct DraftShape {
    DraftKind kind = DraftKind::none;
    ModelShape shape;
    int draft_vocab_size = 0;
    bool first_step_accepted = false;  // the first step has num_steps + 1 rows per sequence
};

enum class PointKind { verify, draft, cycle, allreduce };
enum class Part { all, compute, comm };

struct Point {
    std::string key;
    PointKind kind = PointKind::verify;
    int tokens = 0;
    int batch = 1;
    int context_tokens = 0;
    int num_steps = 0;
    int cycles = 200;
    bool cuda_graph = true;
    bool verify_cuda_graph = true;
    bool graph_scope_cycle = false;
    Part part = Part::all;
    double size_bytes = 0;
    bool in_graph = true;
    bool cold = false;
    Limits limits;
    Json described;  // the job's own words, repeated in the record
};

struct Job {
    std::uint64_t seed = 1;
    int device = -1;
    bool allow_nvls = false;
    std::string nccl_library = "libnccl.so.2";
    std::string gemm_cache;
    ModelShape model;
    DraftShape draft;
    std::vector<double> conditional;
    Limits limits;
    std::vector<Point> points;
};

// Throws UsageError with the key, the value and what is allowed.
Job parse_job(const Json& document);
// Throws Refused if the shape, sliced over `world` ranks, cannot be represented.
void check_shape(const ModelShape& shape, int world, const std::string& which);

}  // namespace specmodel
