// What a run holds on the GPU, sized for the points of its job.
#include "bench.hpp"

#include <algorithm>

namespace specmodel {
namespace {

constexpr int tile = 64;

struct Needs {
    bool target = false;
    bool draft = false;
    int rows = 0;  // of the largest pass
    int sequences = 1;
    std::size_t target_positions = 0;  // batch * capacity
    std::size_t draft_positions = 0;
    std::size_t partial_rows = 0;  // splits * rows
};

void need_splits(Needs& n, const ModelShape& s, int world, int batch, int rows, int context) {
    const int heads = s.num_attention_heads / world;
    const int kv_heads = std::max(1, s.num_key_value_heads / world);
    const int splits = attention_splits(batch, rows, heads, kv_heads, s.head_dim, context);
    if (splits > 1) n.partial_rows = std::max(n.partial_rows, static_cast<std::size_t>(splits) * batch * rows);
}

Needs needs_of(const Job& job, int world) {
    Needs n;
    for (const Point& p : job.points) {
        if (p.kind == PointKind::allreduce) continue;
        const bool verifies = p.kind != PointKind::draft;
        const bool drafts = p.kind == PointKind::draft || p.num_steps > 0;
        // A drafter needs the target's sizes and embedding, hence the target; its weights are also what a cycle evicts.
        n.target = true;
        n.sequences = std::max(n.sequences, p.batch);
        if (verifies) {
            const int rows = p.tokens / p.batch;
            n.rows = std::max(n.rows, p.tokens);
            n.target_positions = std::max(n.target_positions, static_cast<std::size_t>(p.batch) *
                                                                  cache_capacity(p.context_tokens, rows, p.num_steps));
            need_splits(n, job.model, world, p.batch, rows, p.context_tokens);
        }
        if (drafts) {
            n.draft = true;
            const int rows = draft_first_rows(job, p.num_steps);
            n.rows = std::max(n.rows, p.batch * (p.num_steps + 1));
            n.draft_positions = std::max(n.draft_positions, static_cast<std::size_t>(p.batch) *
                                                                cache_capacity(p.context_tokens, rows, p.num_steps));
            need_splits(n, job.draft.shape, world, p.batch, rows, p.context_tokens);
            need_splits(n, job.draft.shape, world, p.batch, 1, p.context_tokens);
        }
    }
    return n;
}

GemmOptions gemm_options(const Job& job, HostGroup& group) {
    GemmOptions options;
    options.cache_path = job.gemm_cache;
    options.may_write = group.rank() == 0;
    if (group.world() > 1) options.share = [&group](void* data, std::size_t bytes) { group.broadcast(data, bytes); };
    return options;
}

}  // namespace

int cache_capacity(int context, int rows, int steps) {
    return (context + cycle_window + 2 * (rows + steps + 1) + 2 * tile - 1) / tile * tile;
}

int draft_first_rows(const Job& job, int steps) {
    return job.draft.kind == DraftKind::eagle3 && job.draft.first_step_accepted ? steps + 1 : 1;
}

Bench::Bench(const Job& job_, HostGroup& group_, Device& device_, const std::string& rendezvous)
    : job(job_), group(group_), device(device_), gemm(device_.stream(), gemm_options(job_, group_)) {
    const int world = group.world();
    prepare_elementwise();
    prepare_attention();
    prepare_experts();
    if (world > 1) {
        graph_comm = std::make_unique<Comm>("graph", job.nccl_library, rendezvous, group, job.allow_nvls);
        eager_comm = std::make_unique<Comm>("eager", job.nccl_library, rendezvous, group, job.allow_nvls);
    }
    check_shape(job.model, world, "model");
    ModelShape drafted = job.draft.shape;
    if (job.draft.kind == DraftKind::eagle3) drafted.vocab_size = job.draft.draft_vocab_size;
    if (job.draft.kind != DraftKind::none) check_shape(drafted, world, "draft");
    const Needs n = needs_of(job, world);
    if (!n.target) return;
    cudaStream_t stream = device.stream();
    build_model(target, job.model, group.rank(), world, job.seed, stream);
    if (n.target_positions > 0) build_cache(target_cache, target, n.target_positions, job.seed, stream);
    std::vector<const Model*> models{&target};
    if (n.draft) {
        if (job.draft.kind == DraftKind::eagle3) {
            build_eagle3(draft, job.draft, target, job.seed + 1, stream);
            hidden_states = arena.array<bf16>(static_cast<std::size_t>(n.rows) * draft.fc_input);
            picked_states = arena.array<bf16>(static_cast<std::size_t>(n.sequences) * draft.fc_input);
            const std::size_t count = static_cast<std::size_t>(n.rows) * draft.fc_input;
            fill_normal(hidden_states, {.columns = count, .global_columns = count, .seed = job.seed}, stream);
        } else {
            if (job.draft.shape.vocab_size != job.model.vocab_size)
                throw Refused("a draft model must have the target's vocab_size");
            build_model(draft, job.draft.shape, group.rank(), world, job.seed + 1, stream);
        }
        build_cache(draft_cache, draft, n.draft_positions, job.seed + 1, stream);
        models.push_back(&draft);
    }
    build_workspace(workspace, models, n.rows, n.partial_rows, n.rows);

    const auto sequences = static_cast<std::size_t>(n.sequences);
    const auto rows = static_cast<std::size_t>(std::max(n.rows, n.sequences));
    tokens = arena.array<int>(rows);
    fill_tokens(tokens, rows, job.model.vocab_size, job.seed, stream);
    predicted = arena.array<int>(rows);
    lengths = arena.array<int>(sequences);
    accepted = arena.array<int>(sequences);
    result = arena.array<int>(2 * sequences);
    CUDA_CHECK(cudaMemsetAsync(accepted, 0, sequences * sizeof(int), stream));
    CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&lengths_host), sequences * sizeof(int), cudaHostAllocDefault));
    CUDA_CHECK(
        cudaHostAlloc(reinterpret_cast<void**>(&result_host), 2 * sequences * sizeof(int), cudaHostAllocDefault));
    // As long as the widest pass: a verify point accepts too, along the same curve.
    std::vector<float> curve(rows, 0.0F);
    for (std::size_t k = 0; k < curve.size() && !job.conditional.empty(); ++k)
        curve[k] = static_cast<float>(job.conditional[std::min(k, job.conditional.size() - 1)]);
    conditional = arena.array<float>(curve.size());
    CUDA_CHECK(
        cudaMemcpyAsync(conditional, curve.data(), curve.size() * sizeof(float), cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

Bench::~Bench() {
    cudaFreeHost(lengths_host);
    cudaFreeHost(result_host);
}

Engine Bench::engine(bool captured) {
    return {device, gemm, workspace, captured ? graph_comm.get() : eager_comm.get()};
}

double Bench::bound_ms(const Work& work) const {
    const double bandwidth = std::max(device.peak_bandwidth_bytes_per_ms(), copy_bytes_per_ms);
    const double rate = std::max(device.peak_flops_per_ms(), gemm_flops_per_ms);
    const double bytes = std::max(0.0, work.weight_bytes + work.kv_bytes - static_cast<double>(device.l2_bytes()));
    return std::max(bytes / bandwidth, work.flops / rate);
}

}  // namespace specmodel
