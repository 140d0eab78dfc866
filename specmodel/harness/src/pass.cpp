// One pass of a decoder: which kernels run, in which order.
#include <algorithm>

#include "model.hpp"

namespace specmodel {
namespace {

// The layers whose input EAGLE-3 looks at: low, middle, high.
int watched_layer(const Model& m, int which) {
    const int layers = m.shape.num_layers;
    const int chosen[3] = {std::min(2, layers - 1), layers / 2, std::max(0, layers - 3)};
    return chosen[which];
}

// The state of a pass in flight.
struct Flow {
    Engine& e;
    const Model& m;
    KvCache& cache;
    const Pass& p;
    const bf16* delta = nullptr;  // the last block's result, not yet added to the residual

    Workspace& w() const { return e.workspace; }
    int rows() const { return p.total_rows(); }
    bool computes() const { return p.part != Part::comm; }

    void product(int outer, int inner, const bf16* x, const bf16* weights, bf16* y) {
        e.gemm.run({rows(), outer, inner}, x, weights, y, e.stream());
    }

    // Adds what is pending to the residual and norms the sum into `out`.
    void norm(const bf16* weight, bf16* out, int out_stride, bf16* copy = nullptr, int copy_stride = 0) {
        Norm n;
        n.x = w().x;
        n.delta = delta;
        n.weight = weight;
        n.out = out;
        n.out_stride = out_stride;
        n.copy = copy;
        n.copy_stride = copy_stride;
        n.rows = rows();
        n.hidden = m.shape.hidden_size;
        n.epsilon = static_cast<float>(m.shape.rms_norm_eps);
        add_rmsnorm(n, e.stream());
        delta = nullptr;
    }

    // The sum over ranks of a block's result, out of place: the next pass starts from fresh data.
    void reduce() {
        delta = w().projected;
        if (!e.comm || p.part == Part::compute) return;
        e.comm->all_reduce(w().projected, w().reduced, static_cast<std::size_t>(rows()) * m.shape.hidden_size,
                           e.stream());
        delta = w().reduced;
    }

    void attention_block(std::size_t layer) {
        const ModelShape& s = m.shape;
        const Layer& l = m.layers[layer];
        if (computes()) {
            product((m.heads + 2 * m.kv_heads) * s.head_dim, m.qkv_input, w().normed, l.qkv, w().qkv);
            Attention a;
            a.qkv = w().qkv;
            a.keys = cache.keys[layer];
            a.values = cache.values[layer];
            a.out = w().attended;
            a.partial = w().partial;
            a.partial_log = w().partial_log;
            a.lengths = p.lengths;
            a.offset = p.offset;
            a.query_norm = l.query_norm;
            a.key_norm = l.key_norm;
            a.batch = p.batch;
            a.rows_per_sequence = p.rows;
            a.heads = m.heads;
            a.kv_heads = m.kv_heads;
            a.head_dim = s.head_dim;
            a.capacity = p.capacity;
            a.splits = p.splits;
            a.rope_theta = static_cast<float>(s.rope_theta);
            a.epsilon = static_cast<float>(s.rms_norm_eps);
            rotate_and_store(a, e.stream());
            attend(a, e.stream());
            product(s.hidden_size, m.heads * s.head_dim, w().attended, l.output, w().projected);
        }
        reduce();
    }

    void mlp_block(std::size_t layer) {
        const Layer& l = m.layers[layer];
        if (computes()) {
            norm(l.mlp_norm, w().normed, m.shape.hidden_size);
            if (m.size > 0) {
                product(2 * m.size, m.shape.hidden_size, w().normed, l.gate_up, w().gate_up);
                silu_multiply(w().active, w().gate_up, rows(), m.size, e.stream());
                product(m.shape.hidden_size, m.size, w().active, l.down, w().projected);
            }
            if (m.shape.num_experts > 0) experts(l);
        }
        reduce();
    }

    void experts(const Layer& l) {
        const ModelShape& s = m.shape;
        product(s.num_experts, s.hidden_size, w().normed, l.router, w().router);
        Experts x;
        x.input = w().normed;
        x.logits = w().router;
        x.gate_up = l.expert_gate_up;
        x.down = l.expert_down;
        x.active = w().expert_active;
        x.slots = w().slots;
        x.out = w().projected;
        x.chosen = w().chosen;
        x.weights = w().expert_weights;
        x.plan = w().plan;
        x.rows = rows();
        x.hidden = s.hidden_size;
        x.size = m.expert_size;
        x.experts = s.num_experts;
        x.top = s.experts_per_token;
        x.normalize = s.norm_topk_prob;
        x.add_to_out = m.size > 0;
        route(x, e.stream());
        run_experts(x, e.stream());
    }

    // LM head and argmax of `head_rows` rows of workspace.normed.
    void head(int head_rows) {
        if (!computes()) return;
        cudaStream_t stream = e.stream();
        e.gemm.run({head_rows, m.vocab, m.shape.hidden_size}, w().normed, m.head, w().logits, stream);
        argmax_partial(w().parts, w().logits, head_rows, m.vocab, m.rank * m.vocab, stream);
        argmax_reduce(w().best, w().parts, head_rows, stream);
        const std::uint64_t* bests = w().best;
        if (e.comm && p.part != Part::compute) {
            e.comm->all_gather(w().best, w().bests, static_cast<std::size_t>(head_rows), stream);
            bests = w().bests;
        }
        argmax_final(p.predicted, p.predicted_stride, bests, bests == w().best ? 1 : m.world, head_rows,
                     m.draft_to_target, p.spread, stream);
    }
};

}  // namespace

void prepare_pass(Engine& e, const Model& m, const Pass& p, int head_rows) {
    const ModelShape& s = m.shape;
    Workspace& w = e.workspace;
    const int rows = p.total_rows();
    auto prepare = [&](int outer, int inner, const bf16* x, bf16* y, bf16* Layer::* weights) {
        std::vector<const bf16*> all;
        for (const Layer& l : m.layers) all.push_back(l.*weights);
        e.gemm.prepare({rows, outer, inner}, x, y, all);
    };
    prepare((m.heads + 2 * m.kv_heads) * s.head_dim, m.qkv_input, w.normed, w.qkv, &Layer::qkv);
    prepare(s.hidden_size, m.heads * s.head_dim, w.attended, w.projected, &Layer::output);
    if (m.size > 0) {
        prepare(2 * m.size, s.hidden_size, w.normed, w.gate_up, &Layer::gate_up);
        prepare(s.hidden_size, m.size, w.active, w.projected, &Layer::down);
    }
    if (s.num_experts > 0) prepare(s.num_experts, s.hidden_size, w.normed, w.router, &Layer::router);
    if (head_rows > 0) e.gemm.prepare({head_rows, m.vocab, s.hidden_size}, w.normed, w.logits, {m.head});
}

void run_model(Engine& e, const Model& m, KvCache& cache, const Pass& p) {
    Flow flow{e, m, cache, p};
    const int hidden = m.shape.hidden_size;
    if (flow.computes()) embed(e.workspace.x, m.embedding, p.tokens, p.token_stride, flow.rows(), hidden, e.stream());
    for (std::size_t l = 0; l < m.layers.size(); ++l) {
        if (flow.computes()) {
            bf16* copy = nullptr;
            for (int i = 0; i < 3 && p.hidden_states; ++i)
                if (watched_layer(m, i) == static_cast<int>(l))
                    copy = p.hidden_states + static_cast<std::size_t>(i) * hidden;
            flow.norm(m.layers[l].input_norm, e.workspace.normed, hidden, copy, 3 * hidden);
        }
        flow.attention_block(l);
        flow.mlp_block(l);
    }
    if (flow.computes()) flow.norm(m.final_norm, e.workspace.normed, hidden);
    flow.head(flow.rows());
}

void run_eagle3(Engine& e, const Model& m, KvCache& cache, const Pass& p, const bf16* target_hidden,
                const int* picked) {
    Flow flow{e, m, cache, p};
    Workspace& w = e.workspace;
    cudaStream_t stream = e.stream();
    const int hidden = m.shape.hidden_size;
    if (target_hidden) flow.product(hidden, m.fc_input, target_hidden, m.fc, w.x);
    embed(w.embedded, m.embedding, p.tokens, p.token_stride, flow.rows(), hidden, stream);
    Norm n;  // the token's half of the QKV input; the residual is the hidden state's half
    n.x = w.embedded;
    n.weight = m.embedding_norm;
    n.out = w.normed;
    n.out_stride = 2 * hidden;
    n.rows = flow.rows();
    n.hidden = hidden;
    n.epsilon = static_cast<float>(m.shape.rms_norm_eps);
    add_rmsnorm(n, stream);
    flow.norm(m.hidden_norm, w.normed + hidden, 2 * hidden);
    flow.attention_block(0);
    flow.mlp_block(0);
    if (p.rows > 1) {  // only the last accepted row of each sequence goes on
        add_rows(w.x, flow.delta, static_cast<std::size_t>(flow.rows()) * hidden, stream);
        gather_rows(w.embedded, w.x, picked, p.batch, p.rows, hidden, stream);
        CUDA_CHECK(cudaMemcpyAsync(w.x, w.embedded, static_cast<std::size_t>(p.batch) * hidden * sizeof(bf16),
                                   cudaMemcpyDeviceToDevice, stream));
        n.x = w.x;
        n.delta = nullptr;
        n.weight = m.final_norm;
        n.out_stride = hidden;
        n.rows = p.batch;
        add_rmsnorm(n, stream);
    } else {
        flow.norm(m.final_norm, w.normed, hidden);
    }
    flow.head(p.batch);
}

Work work_of(const Model& m, const Pass& p, int context, double experts_touched, int head_rows) {
    const ModelShape& s = m.shape;
    const double rows = p.total_rows();
    const double hidden = s.hidden_size;
    const double dim = s.head_dim;
    const double layers = static_cast<double>(m.layers.size());
    const double attention = (m.heads + 2.0 * m.kv_heads) * dim * m.qkv_input + m.heads * dim * hidden;
    const double dense = 3.0 * m.size * hidden + s.num_experts * hidden;
    const double expert = 3.0 * m.expert_size * hidden;
    const double head = head_rows > 0 ? m.vocab * hidden : 0.0;
    Work w;
    w.weight_bytes = 2 * (layers * (attention + dense + experts_touched * expert) + head);
    w.flops = 2 * (rows * layers * (attention + dense + s.experts_per_token * expert) + head_rows * head) +
              4 * rows * layers * (context + p.rows / 2.0) * m.heads * dim;
    w.kv_bytes = 4.0 * layers * p.batch * (context + p.rows) * m.kv_heads * dim;
    w.comm_bytes = m.world > 1 ? 2 * layers * rows * hidden * sizeof(bf16) : 0;
    return w;
}

}  // namespace specmodel
