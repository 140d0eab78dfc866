// Random weights, caches and scratch. Scales keep activations near unit size: weights N(0, 1 / inner size).
#include <algorithm>
#include <cmath>

#include "model.hpp"

namespace specmodel {
namespace {

// Fills matrices one after another, each with a seed of its own.
class Filler {
public:
    Filler(Model& m, std::uint64_t seed, cudaStream_t stream) : m_(m), seed_(seed), stream_(stream) {}

    // Rows [row_offset, row_offset + rows) and columns [column_offset, column_offset + columns) of a whole matrix with
    // `inner` columns.
    bf16* weights(std::size_t rows, std::size_t columns, std::size_t inner, std::size_t row_offset = 0,
                  std::size_t column_offset = 0) {
        auto* out = m_.arena.array<bf16>(rows * columns);
        part(out, rows, columns, inner, row_offset, column_offset);
        m_.weight_bytes += 2.0 * static_cast<double>(rows) * static_cast<double>(columns);
        return out;
    }

    void part(bf16* out, std::size_t rows, std::size_t columns, std::size_t inner, std::size_t row_offset,
              std::size_t column_offset) {
        const Fill fill{.rows = rows,
                        .columns = columns,
                        .global_columns = inner,
                        .row_offset = row_offset,
                        .column_offset = column_offset,
                        .seed = next(),
                        .scale = 1.0F / std::sqrt(static_cast<float>(inner)),
                        .mean = 0.0F};
        fill_normal(out, fill, stream_);
    }

    void part_again(bf16* out, std::size_t rows, std::size_t columns, std::size_t inner, std::size_t row_offset) {
        const Fill fill{.rows = rows,
                        .columns = columns,
                        .global_columns = inner,
                        .row_offset = row_offset,
                        .column_offset = 0,
                        .seed = seed_ * 65536 + tensor_,
                        .scale = 1.0F / std::sqrt(static_cast<float>(inner)),
                        .mean = 0.0F};
        fill_normal(out, fill, stream_);
    }

    bf16* norm(int size) {
        auto* out = m_.arena.array<bf16>(static_cast<std::size_t>(size));
        fill_normal(out,
                    {.columns = static_cast<std::size_t>(size),
                     .global_columns = static_cast<std::size_t>(size),
                     .seed = next(),
                     .scale = 0.1F,
                     .mean = 1.0F},
                    stream_);
        return out;
    }

    bf16* embedding(int rows, int columns) {
        auto* out = m_.arena.array<bf16>(static_cast<std::size_t>(rows) * columns);
        fill_normal(out,
                    {.rows = static_cast<std::size_t>(rows),
                     .columns = static_cast<std::size_t>(columns),
                     .global_columns = static_cast<std::size_t>(columns),
                     .seed = next()},
                    stream_);
        return out;
    }

    std::uint64_t next() { return seed_ * 65536 + ++tensor_; }

private:
    Model& m_;
    std::uint64_t seed_;
    std::uint64_t tensor_ = 0;
    cudaStream_t stream_;
};

void slice(Model& m, const ModelShape& shape, int rank, int world) {
    check_shape(shape, world, "model");
    m.shape = shape;
    m.rank = rank;
    m.world = world;
    m.heads = shape.num_attention_heads / world;
    m.kv_heads = std::max(1, shape.num_key_value_heads / world);
    m.size = (shape.num_experts > 0 ? shape.shared_expert_intermediate_size : shape.intermediate_size) / world;
    m.expert_size = shape.num_experts > 0 ? shape.moe_intermediate_size / world : 0;
    m.vocab = shape.vocab_size / world;
    m.qkv_input = shape.hidden_size;
}

Layer build_layer(Model& m, Filler& fill) {
    const ModelShape& s = m.shape;
    const auto hidden = static_cast<std::size_t>(s.hidden_size);
    const auto dim = static_cast<std::size_t>(s.head_dim);
    const auto input = static_cast<std::size_t>(m.qkv_input);
    const auto rank = static_cast<std::size_t>(m.rank);
    const std::size_t query_rows = m.heads * dim;
    const std::size_t kv_rows = m.kv_heads * dim;
    const std::size_t kv_offset = rank * static_cast<std::size_t>(s.num_key_value_heads) / m.world * dim;
    Layer l;
    l.input_norm = fill.norm(s.hidden_size);
    l.qkv = m.arena.array<bf16>((query_rows + 2 * kv_rows) * input);
    fill.part(l.qkv, query_rows, input, input, rank * query_rows, 0);
    fill.part(l.qkv + query_rows * input, kv_rows, input, input, kv_offset, 0);
    fill.part(l.qkv + (query_rows + kv_rows) * input, kv_rows, input, input, kv_offset, 0);
    m.weight_bytes += 2.0 * static_cast<double>((query_rows + 2 * kv_rows) * input);
    if (s.qk_norm) {
        l.query_norm = fill.norm(s.head_dim);
        l.key_norm = fill.norm(s.head_dim);
    }
    l.output =
        fill.weights(hidden, query_rows, static_cast<std::size_t>(s.num_attention_heads) * dim, 0, rank * query_rows);
    l.mlp_norm = fill.norm(s.hidden_size);
    if (m.size > 0) {
        const auto size = static_cast<std::size_t>(m.size);
        l.gate_up = m.arena.array<bf16>(2 * size * hidden);
        fill.part(l.gate_up, size, hidden, hidden, rank * size, 0);
        fill.part(l.gate_up + size * hidden, size, hidden, hidden, rank * size, 0);
        m.weight_bytes += 4.0 * static_cast<double>(size * hidden);
        l.down = fill.weights(hidden, size, size * m.world, 0, rank * size);
    }
    if (s.num_experts > 0) {
        const auto size = static_cast<std::size_t>(m.expert_size);
        const auto experts = static_cast<std::size_t>(s.num_experts);
        l.router = fill.weights(experts, hidden, hidden);
        l.expert_gate_up = m.arena.array<bf16>(experts * 2 * size * hidden);
        fill.next();
        for (std::size_t e = 0; e < experts;
             ++e)  // groups of 16 interleaved rows: a rank's share of an expert is contiguous
            fill.part_again(l.expert_gate_up + e * 2 * size * hidden, 2 * size, hidden, hidden,
                            (e * m.world + rank) * 2 * size);
        m.weight_bytes += 4.0 * static_cast<double>(experts * size * hidden);
        l.expert_down = fill.weights(experts * hidden, size, size * m.world, 0, rank * size);
    }
    return l;
}

}  // namespace

void build_model(Model& m, const ModelShape& shape, int rank, int world, std::uint64_t seed, cudaStream_t stream) {
    slice(m, shape, rank, world);
    Filler fill(m, seed, stream);
    m.embedding = fill.embedding(shape.vocab_size, shape.hidden_size);
    for (int l = 0; l < shape.num_layers; ++l) m.layers.push_back(build_layer(m, fill));
    m.final_norm = fill.norm(shape.hidden_size);
    const auto hidden = static_cast<std::size_t>(shape.hidden_size);
    m.head =
        fill.weights(static_cast<std::size_t>(m.vocab), hidden, hidden, static_cast<std::size_t>(m.rank) * m.vocab);
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

void build_eagle3(Model& m, const DraftShape& draft, const Model& target, std::uint64_t seed, cudaStream_t stream) {
    ModelShape shape = draft.shape;
    if (shape.num_layers != 1)
        throw Refused("an eagle3 drafter has one layer, not " + std::to_string(shape.num_layers));
    shape.vocab_size = draft.draft_vocab_size;
    slice(m, shape, target.rank, target.world);
    m.qkv_input = 2 * shape.hidden_size;
    m.fc_input = 3 * target.shape.hidden_size;
    Filler fill(m, seed, stream);
    // The token embedding is the target's; a drafter of another width has its own.
    m.embedding = shape.hidden_size == target.shape.hidden_size
                      ? target.embedding
                      : fill.embedding(target.shape.vocab_size, shape.hidden_size);
    m.embedding_norm = fill.norm(shape.hidden_size);
    m.hidden_norm = fill.norm(shape.hidden_size);
    const auto hidden = static_cast<std::size_t>(shape.hidden_size);
    m.fc = fill.weights(hidden, static_cast<std::size_t>(m.fc_input), static_cast<std::size_t>(m.fc_input));
    m.layers.push_back(build_layer(m, fill));
    m.final_norm = fill.norm(shape.hidden_size);
    m.head =
        fill.weights(static_cast<std::size_t>(m.vocab), hidden, hidden, static_cast<std::size_t>(m.rank) * m.vocab);
    m.draft_to_target = m.arena.array<int>(static_cast<std::size_t>(shape.vocab_size));
    fill_tokens(m.draft_to_target, static_cast<std::size_t>(shape.vocab_size), target.shape.vocab_size, fill.next(),
                stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

void build_cache(KvCache& cache, const Model& m, std::size_t positions, std::uint64_t seed, cudaStream_t stream) {
    const std::size_t count = positions * m.kv_heads * m.shape.head_dim;
    for (std::size_t l = 0; l < m.layers.size(); ++l) {
        for (auto* side : {&cache.keys, &cache.values}) {
            side->push_back(cache.arena.array<bf16>(count));
            fill_normal(side->back(),
                        {.columns = count,
                         .global_columns = count,
                         .seed = seed * 65536 + 32768 + 2 * l + (side == &cache.values ? 1 : 0)},
                        stream);
        }
    }
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

void build_workspace(Workspace& w, const std::vector<const Model*>& models, int rows, std::size_t partial_rows,
                     int head_rows) {
    std::size_t hidden = 0;
    std::size_t qkv = 0;
    std::size_t attended = 0;
    std::size_t size = 0;
    std::size_t logits = 0;
    std::size_t router = 0;
    std::size_t expert_active = 0;
    std::size_t slots = 0;
    std::size_t top = 0;
    std::size_t plan = 0;
    std::size_t head_dim_rows = 0;
    std::size_t query_heads = 0;
    int world = 1;
    for (const Model* m : models) {
        const ModelShape& s = m->shape;
        const auto dim = static_cast<std::size_t>(s.head_dim);
        world = m->world;
        hidden = std::max(hidden, static_cast<std::size_t>(s.hidden_size));
        qkv = std::max(qkv, (m->heads + 2 * static_cast<std::size_t>(m->kv_heads)) * dim);
        attended = std::max(attended, m->heads * dim);
        size = std::max(size, static_cast<std::size_t>(m->size));
        logits = std::max(logits, static_cast<std::size_t>(m->vocab));
        head_dim_rows = std::max(head_dim_rows, m->heads * dim);
        query_heads = std::max(query_heads, static_cast<std::size_t>(m->heads));
        if (s.num_experts == 0) continue;
        router = std::max(router, static_cast<std::size_t>(s.num_experts));
        top = std::max(top, static_cast<std::size_t>(s.experts_per_token));
        expert_active = std::max(expert_active, static_cast<std::size_t>(s.experts_per_token) * m->expert_size);
        slots = std::max(slots, static_cast<std::size_t>(s.experts_per_token) * s.hidden_size);
        plan = std::max(plan, expert_plan_size(rows, s.num_experts, s.experts_per_token));
    }
    const auto r = static_cast<std::size_t>(rows);
    const auto heads = static_cast<std::size_t>(std::max(head_rows, 1));
    w.x = w.arena.array<bf16>(r * hidden);
    w.normed = w.arena.array<bf16>(r * 2 * hidden);
    w.embedded = w.arena.array<bf16>(r * hidden);
    w.qkv = w.arena.array<bf16>(r * qkv);
    w.attended = w.arena.array<bf16>(r * attended);
    w.projected = w.arena.array<bf16>(r * hidden);
    w.reduced = w.arena.array<bf16>(r * hidden);
    // Random, not zero: algorithms are tried on these, and a pass of all-reduces alone sends the last.
    auto randomize = [](bf16* out, std::size_t count) {
        fill_normal(out, {.columns = count, .global_columns = count, .seed = 1}, nullptr);
    };
    randomize(w.normed, r * 2 * hidden);
    randomize(w.attended, r * attended);
    randomize(w.projected, r * hidden);
    if (size > 0) {
        w.gate_up = w.arena.array<bf16>(r * 2 * size);
        w.active = w.arena.array<bf16>(r * size);
        randomize(w.active, r * size);
    }
    if (router > 0) {
        w.router = w.arena.array<bf16>(r * router);
        w.expert_active = w.arena.array<bf16>(r * expert_active);
        w.slots = w.arena.array<bf16>(r * slots);
        w.chosen = w.arena.array<int>(r * top);
        w.expert_weights = w.arena.array<float>(r * top);
        w.plan = w.arena.array<int>(plan);
        CUDA_CHECK(cudaMemset(w.plan, 0, plan * sizeof(int)));
    }
    w.logits = w.arena.array<bf16>(heads * logits);
    w.parts = w.arena.array<std::uint64_t>(heads * argmax_parts);
    w.best = w.arena.array<std::uint64_t>(heads);
    w.bests = w.arena.array<std::uint64_t>(heads * world);
    if (partial_rows > 0) {
        w.partial = w.arena.array<float>(partial_rows * head_dim_rows);
        w.partial_log = w.arena.array<float>(partial_rows * query_heads);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
}

}  // namespace specmodel
