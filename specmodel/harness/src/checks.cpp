// Small problems, one for each path through the kernels, against the fp32 reference.
#include <algorithm>
#include <cmath>
#include <limits>

#include "bench.hpp"
#include "reference.hpp"

namespace specmodel {
namespace {

struct Case {
    const char* name;
    ModelShape shape;
    int batch;
    int rows;
    int context;
};

ModelShape small(int heads, int kv_heads, int head_dim, int layers, bool qk_norm) {
    ModelShape s;
    s.hidden_size = 256;
    s.intermediate_size = 384;
    s.num_layers = layers;
    s.num_attention_heads = heads;
    s.num_key_value_heads = kv_heads;
    s.head_dim = head_dim;
    s.vocab_size = 512;
    s.qk_norm = qk_norm;
    return s;
}

ModelShape routed(int experts, int top, int shared, bool normalize) {
    ModelShape s = small(4, 2, 64, 1, false);
    s.num_experts = experts;
    s.experts_per_token = top;
    s.moe_intermediate_size = 192;
    s.shared_expert_intermediate_size = shared;
    s.norm_topk_prob = normalize;
    return s;
}

std::vector<Case> cases() {
    return {
        {"dense, 4 query rows per key head", small(8, 2, 128, 3, false), 2, 1, 300},
        {"dense, 20 rows, split cache", small(4, 1, 128, 2, false), 1, 5, 900},
        {"dense, 22 rows, query and key norms, head_dim 64", small(4, 2, 64, 3, true), 2, 11, 130},
        {"dense, 48 rows", small(8, 2, 128, 2, false), 2, 12, 250},
        {"dense, 160 rows, two tiles", small(4, 1, 128, 2, true), 1, 40, 200},
        {"dense, 96 rows, head_dim 64, one token before", small(4, 1, 64, 2, false), 1, 24, 1},
        {"routed, 8 rows a tile, shared expert", routed(64, 4, 128, true), 2, 3, 40},
        {"routed, 16 rows a tile, weights not renormalised", routed(64, 8, 0, false), 2, 32, 40},
        {"routed, 32 rows a tile", routed(16, 4, 0, true), 1, 50, 40},
        {"routed, 64 rows a tile, several tiles an expert", routed(8, 2, 0, true), 3, 61, 40},
    };
}

// One pass of `m` on the GPU and in fp32; the error is of hidden states and logits, and an argmax that is not (nearly)
// the reference's is an infinite error.
struct Trial {
    Device& device;
    HostGroup group{0, 1, "", 60000};
    Gemm gemm;
    Model m;
    KvCache cache;
    Workspace w;
    Arena arena;
    Pass p;
    std::vector<int> lengths;
    std::vector<int> tokens;
    int* predicted = nullptr;

    explicit Trial(Device& d)
        : device(d), gemm(d.stream(), GemmOptions{.cache_path = "", .may_write = false, .share = {}, .tune = false}) {}

    void set_up(int batch, int rows, int context) {
        p.batch = batch;
        p.rows = rows;
        p.capacity = cache_capacity(context, rows, 1);
        p.splits = attention_splits(batch, rows, m.heads, m.kv_heads, m.shape.head_dim, context);
        build_cache(cache, m, static_cast<std::size_t>(batch) * p.capacity, 3, device.stream());
        build_workspace(w, {&m}, p.total_rows(), static_cast<std::size_t>(std::max(2, p.splits)) * p.total_rows(),
                        p.total_rows());
        auto* lengths_device = arena.array<int>(static_cast<std::size_t>(batch));
        auto* tokens_device = arena.array<int>(static_cast<std::size_t>(p.total_rows()));
        predicted = arena.array<int>(static_cast<std::size_t>(p.total_rows()));
        for (int b = 0; b < batch; ++b) lengths.push_back(std::max(1, context - 13 * b));
        CUDA_CHECK(cudaMemcpy(lengths_device, lengths.data(), lengths.size() * sizeof(int), cudaMemcpyHostToDevice));
        for (int t = 0; t < p.total_rows(); ++t) tokens.push_back((t * 97 + 11) % 512);
        CUDA_CHECK(cudaMemcpy(tokens_device, tokens.data(), tokens.size() * sizeof(int), cudaMemcpyHostToDevice));
        p.lengths = lengths_device;
        p.tokens = tokens_device;
        p.predicted = predicted;
    }

    void poison() {
        const auto rows = static_cast<std::size_t>(p.total_rows());
        for (auto [pointer, width] :
             {std::pair{w.normed, m.shape.hidden_size}, std::pair{w.qkv, (m.heads + 2 * m.kv_heads) * m.shape.head_dim},
              std::pair{w.attended, m.heads * m.shape.head_dim}, std::pair{w.logits, m.vocab}})
            CUDA_CHECK(cudaMemsetAsync(pointer, 0xFF, rows * width * sizeof(bf16), device.stream()));
        CUDA_CHECK(cudaMemsetAsync(predicted, 0xFF, rows * sizeof(int), device.stream()));
    }

    double compare(const ReferenceResult& expected, int head_rows) {
        const auto rows = static_cast<std::size_t>(head_rows);
        const auto vocab = static_cast<std::size_t>(m.vocab);
        double error = relative_error(download(w.normed, rows * m.shape.hidden_size), expected.normed);
        error = std::max(error, relative_error(download(w.logits, rows * vocab), expected.logits));
        std::vector<int> best(rows);
        CUDA_CHECK(cudaMemcpy(best.data(), predicted, rows * sizeof(int), cudaMemcpyDeviceToHost));
        for (std::size_t r = 0; r < rows && !m.draft_to_target; ++r) {
            const float* logits = expected.logits.data() + r * vocab;
            const float most = *std::max_element(logits, logits + vocab);
            const bool known = best[r] >= 0 && static_cast<std::size_t>(best[r]) < vocab;
            if (!known || logits[best[r]] < most - 0.1F) return std::numeric_limits<double>::infinity();
        }
        return error;
    }
};

double check_model(Device& device, const Case& c) {
    Trial t(device);
    build_model(t.m, c.shape, 0, 1, 7, device.stream());
    t.set_up(c.batch, c.rows, c.context);
    Engine e{device, t.gemm, t.w, nullptr};
    prepare_pass(e, t.m, t.p, t.p.total_rows());
    t.poison();
    run_model(e, t.m, t.cache, t.p);
    CUDA_CHECK(cudaStreamSynchronize(device.stream()));
    std::vector<int> chosen(static_cast<std::size_t>(t.p.total_rows()) * c.shape.experts_per_token);
    if (!chosen.empty())
        CUDA_CHECK(cudaMemcpy(chosen.data(), t.w.chosen, chosen.size() * sizeof(int), cudaMemcpyDeviceToHost));
    return t.compare(reference_model(t.m, t.cache, t.p, t.lengths, t.tokens, chosen), t.p.total_rows());
}

// The first step of an EAGLE-3 head with `rows` rows per sequence, of which the third goes on.
double check_eagle3(Device& device, int rows) {
    Trial t(device);
    cudaStream_t stream = device.stream();
    Model target;
    build_model(target, small(4, 2, 64, 3, false), 0, 1, 7, stream);
    DraftShape draft;
    draft.kind = DraftKind::eagle3;
    draft.shape = small(4, 2, 64, 1, false);
    draft.draft_vocab_size = 256;
    build_eagle3(t.m, draft, target, 8, stream);
    const int batch = 2;
    t.set_up(batch, rows, 150);
    Engine e{device, t.gemm, t.w, nullptr};
    prepare_pass(e, t.m, t.p, batch);
    const std::size_t count = static_cast<std::size_t>(t.p.total_rows()) * t.m.fc_input;
    auto* states = t.arena.array<bf16>(count);
    fill_normal(states, {.columns = count, .global_columns = count, .seed = 5}, stream);
    auto* picked = t.arena.array<int>(2);
    const int which[2] = {0, std::min(2, rows - 1)};
    CUDA_CHECK(cudaMemcpy(picked, which, sizeof which, cudaMemcpyHostToDevice));
    t.gemm.prepare({t.p.total_rows(), t.m.shape.hidden_size, t.m.fc_input}, states, t.w.x, {t.m.fc});
    t.poison();
    run_eagle3(e, t.m, t.cache, t.p, states, picked);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    const Rows hidden = reference_product(download(states, count), t.m.fc, t.m.shape.hidden_size, t.m.fc_input);
    ReferenceResult expected = reference_eagle3(t.m, t.cache, t.p, t.lengths, t.tokens, hidden);
    auto pick = [&](const Rows& all, int width) {
        Rows out;
        for (int b = 0; b < batch; ++b) {
            const auto from = all.begin() + static_cast<std::ptrdiff_t>(b * rows + which[b]) * width;
            out.insert(out.end(), from, from + width);
        }
        return out;
    };
    expected.normed = pick(expected.normed, t.m.shape.hidden_size);
    expected.logits = pick(expected.logits, t.m.vocab);
    return t.compare(expected, batch);
}

// Slices of every rank together against the whole model on this one: every weight is a function of its place in the
// whole.
double check_slices(Device& device, HostGroup& group, Comm& comm, const ModelShape& shape) {
    std::vector<std::vector<float>> results;
    for (int world : {group.world(), 1}) {
        Trial t(device);
        build_model(t.m, shape, world > 1 ? group.rank() : 0, world, 7, device.stream());
        t.set_up(2, 3, 100);
        // The caches hold other random numbers than slices of each other; without a past they do not matter.
        CUDA_CHECK(cudaMemset(const_cast<int*>(t.p.lengths), 0, 2 * sizeof(int)));
        Engine e{device, t.gemm, t.w, world > 1 ? &comm : nullptr};
        prepare_pass(e, t.m, t.p, t.p.total_rows());
        t.poison();
        run_model(e, t.m, t.cache, t.p);
        CUDA_CHECK(cudaStreamSynchronize(device.stream()));
        results.push_back(download(t.w.normed, static_cast<std::size_t>(t.p.total_rows()) * shape.hidden_size));
    }
    return relative_error(results[0], results[1]);
}

// A sequence of acceptances must follow the given curve: 4 standard deviations of each position's share.
double check_acceptance(Device& device) {
    Arena arena;
    constexpr int batch = 64;
    constexpr int steps = 3;
    constexpr int cycles = 100;
    const float curve[steps] = {0.8F, 0.6F, 0.5F};
    auto* conditional = arena.array<float>(steps);
    CUDA_CHECK(cudaMemcpy(conditional, curve, sizeof curve, cudaMemcpyHostToDevice));
    Accept a;
    a.tokens = arena.array<int>(batch * (steps + 1));
    a.predicted = a.tokens;
    a.conditional = conditional;
    a.accepted = arena.array<int>(batch);
    a.result = arena.array<int>(2 * batch);
    a.batch = batch;
    a.steps = steps;
    a.seed = 12;
    CUDA_CHECK(cudaMemset(a.tokens, 0, batch * (steps + 1) * sizeof(int)));
    double reached[steps + 1] = {};
    for (int c = 0; c < cycles; ++c) {
        a.cycle = static_cast<std::uint64_t>(c);
        accept_drafts(a, device.stream());
        int accepted[batch];
        CUDA_CHECK(cudaMemcpyAsync(accepted, a.accepted, sizeof accepted, cudaMemcpyDeviceToHost, device.stream()));
        CUDA_CHECK(cudaStreamSynchronize(device.stream()));
        for (int n : accepted)
            for (int k = 0; k <= n; ++k) reached[k] += 1;
    }
    for (int k = 0; k < steps; ++k) {
        const double share = reached[k + 1] / reached[k];
        if (std::fabs(share - curve[k]) > 4 * std::sqrt(curve[k] * (1 - curve[k]) / reached[k]))
            return std::numeric_limits<double>::infinity();
    }
    return 0;
}

}  // namespace

std::vector<CheckResult> run_parallel_checks(Device& device, HostGroup& group, Comm& comm) {
    ModelShape dense = small(2 * group.world(), group.world(), 64, 2, false);
    dense.intermediate_size = 128 * group.world();
    dense.vocab_size = 512 * group.world();
    ModelShape all_experts = dense;  // every expert chosen: no near tie can fall differently
    all_experts.num_layers = 1;
    all_experts.num_experts = 16;
    all_experts.experts_per_token = 16;
    all_experts.moe_intermediate_size = 64 * group.world();
    all_experts.shared_expert_intermediate_size = 64 * group.world();
    std::vector<CheckResult> results;
    results.push_back({"dense, sliced over the ranks", check_slices(device, group, comm, dense)});
    results.push_back({"routed, sliced over the ranks", check_slices(device, group, comm, all_experts)});
    return results;
}

std::vector<CheckResult> run_checks(Device& device) {
    prepare_elementwise();
    prepare_attention();
    prepare_experts();
    std::vector<CheckResult> results;
    for (const Case& c : cases()) results.push_back({c.name, check_model(device, c)});
    for (int rows : {1, 4})
        results.push_back({"EAGLE-3 head, " + std::to_string(rows) + " rows", check_eagle3(device, rows)});
    results.push_back({"acceptance follows its curve", check_acceptance(device)});
    return results;
}

}  // namespace specmodel
