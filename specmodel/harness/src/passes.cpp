// The verification pass and the drafter's passes as they are timed: captured or direct, checked once before.
#include <algorithm>
#include <cmath>

#include "bench.hpp"

namespace specmodel {
namespace {

// Lengths of all sequences equal to the context.
void set_lengths(Bench& b, int batch, int context) {
    std::fill_n(b.lengths_host, batch, context);
    CUDA_CHECK(cudaMemcpyAsync(b.lengths, b.lengths_host, static_cast<std::size_t>(batch) * sizeof(int),
                               cudaMemcpyHostToDevice, b.device.stream()));
}

}  // namespace

Verifier::Verifier(Bench& bench, int batch, int rows, int context, bool captured, Part part)
    : b_(bench), context_(context), captured_(captured) {
    const Model& m = b_.target;
    pass_.batch = batch;
    pass_.rows = rows;
    pass_.capacity = cache_capacity(context, rows, 0);
    pass_.splits = attention_splits(batch, rows, m.heads, m.kv_heads, m.shape.head_dim, context);
    pass_.lengths = b_.lengths;
    pass_.tokens = b_.tokens;
    pass_.predicted = b_.predicted;
    pass_.hidden_states = b_.hidden_states;
    pass_.part = part;
    set_lengths(b_, batch, context);
    fill_tokens(b_.tokens, static_cast<std::size_t>(pass_.total_rows()), m.shape.vocab_size, b_.job.seed,
                b_.device.stream());
    Engine e = b_.engine(captured);
    prepare_pass(e, m, pass_, pass_.total_rows());
    const bool routed = m.shape.num_experts > 0 && part != Part::comm;
    if (routed) CUDA_CHECK(cudaMemsetAsync(b_.workspace.plan, 0, 4 * sizeof(int), b_.device.stream()));
    run_directly(captured);
    if (routed) count_touched();
    if (part == Part::comm) {
        CUDA_CHECK(cudaStreamSynchronize(b_.device.stream()));
    } else {
        const std::vector<float> direct = outcome();
        finite_ = std::isfinite(relative_error(direct, direct));
        if (captured) {
            graph_ = Graph::capture(b_.device.stream(), [&] { run_directly(true); });
            check(direct);
        }
    }
    if (captured && part == Part::comm) graph_ = Graph::capture(b_.device.stream(), [&] { run_directly(true); });
    kernels_ = graph_ ? graph_.nodes() : 0;
}

// The mean over all layers of all passes since this object was made. A routed drafter counts in the same place; then
// the first pass's count stands.
void Verifier::count_touched() {
    if (b_.target.shape.num_experts == 0 || (touched_ > 0 && b_.draft.shape.num_experts > 0)) return;
    int head[4] = {};
    CUDA_CHECK(cudaMemcpyAsync(head, b_.workspace.plan, sizeof head, cudaMemcpyDeviceToHost, b_.device.stream()));
    CUDA_CHECK(cudaStreamSynchronize(b_.device.stream()));
    if (head[2] > 0) touched_ = static_cast<double>(head[plan_touched]) / head[2];
}

// New random tokens: other experts are touched.
void Verifier::draw_tokens() {
    fill_tokens(b_.tokens, static_cast<std::size_t>(pass_.total_rows()), b_.target.shape.vocab_size,
                b_.job.seed + 1 + draws_++, b_.device.stream());
}

void Verifier::run_directly(bool on_graph_comm) {
    Engine e = b_.engine(on_graph_comm);
    run_model(e, b_.target, b_.target_cache, pass_);
}

// The last hidden states and the predicted tokens.
std::vector<float> Verifier::outcome() {
    const auto rows = static_cast<std::size_t>(pass_.total_rows());
    CUDA_CHECK(cudaStreamSynchronize(b_.device.stream()));
    std::vector<float> values = download(b_.workspace.normed, rows * b_.target.shape.hidden_size);
    std::vector<int> predicted(rows);
    CUDA_CHECK(cudaMemcpy(predicted.data(), b_.predicted, rows * sizeof(int), cudaMemcpyDeviceToHost));
    for (int token : predicted)
        values.push_back(static_cast<float>(token) / static_cast<float>(b_.target.shape.vocab_size));
    return values;
}

void Verifier::check(const std::vector<float>& direct) {
    const auto rows = static_cast<std::size_t>(pass_.total_rows());
    cudaStream_t stream = b_.device.stream();
    CUDA_CHECK(cudaMemsetAsync(b_.workspace.normed, 0xFF, rows * b_.target.shape.hidden_size * sizeof(bf16), stream));
    CUDA_CHECK(cudaMemsetAsync(b_.predicted, 0xFF, rows * sizeof(int), stream));
    graph_.launch(stream);
    equal_ = relative_error(outcome(), direct) < 1e-3;
}

void Verifier::enqueue() {
    if (captured_)
        graph_.launch(b_.device.stream());
    else
        run_directly(false);
}

void Verifier::queue_accept(std::uint64_t cycle) {
    Accept a;
    a.tokens = b_.tokens;
    a.predicted = b_.predicted;
    a.conditional = b_.conditional;
    a.accepted = b_.accepted;
    a.result = b_.result;
    a.batch = pass_.batch;
    // A pass wider than any chain of this job (a verify point) accepts as far as the curve goes.
    a.steps = pass_.rows - 1;
    a.spread = b_.target.shape.vocab_size;
    a.seed = b_.job.seed;
    a.cycle = cycle;
    accept_drafts(a, b_.device.stream());
}

void Verifier::round_trip(std::uint64_t cycle) {
    cudaStream_t stream = b_.device.stream();
    const auto batch = static_cast<std::size_t>(pass_.batch);
    CUDA_CHECK(cudaMemcpyAsync(b_.lengths, b_.lengths_host, batch * sizeof(int), cudaMemcpyHostToDevice, stream));
    enqueue();
    queue_accept(cycle);
    CUDA_CHECK(cudaMemcpyAsync(b_.result_host, b_.result, 2 * batch * sizeof(int), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

Work Verifier::work() const {
    Work w = work_of(b_.target, pass_, context_, touched_, pass_.total_rows());
    if (pass_.part == Part::comm) w.flops = w.weight_bytes = w.kv_bytes = 0;
    if (pass_.part == Part::compute) w.comm_bytes = 0;
    return w;
}

Drafter::Drafter(Bench& bench, int batch, int steps, int context, bool captured, bool one_graph)
    : b_(bench), batch_(batch), steps_(steps), context_(context), captured_(captured) {
    const Model& m = b_.draft;
    const int first_rows = draft_first_rows(b_.job, steps);
    set_lengths(b_, batch, context);
    cudaStream_t stream = b_.device.stream();
    Engine e = b_.engine(captured);
    for (int step = 0; step < steps; ++step) {
        Pass p;
        p.batch = batch;
        p.rows = step == 0 ? first_rows : 1;
        p.capacity = cache_capacity(context, first_rows, steps);
        p.splits = attention_splits(batch, p.rows, m.heads, m.kv_heads, m.shape.head_dim, context);
        p.lengths = b_.lengths;
        p.offset = step == 0 ? 0 : first_rows + step - 1;
        // A step reads what the one before wrote into the tokens that will be verified.
        p.tokens = b_.tokens + step;
        p.token_stride = p.rows > 1 ? 1 : steps + 1;
        p.predicted = b_.tokens + step + 1;
        p.predicted_stride = steps + 1;
        p.spread = b_.target.shape.vocab_size;
        passes_.push_back(p);
        if (step > 1) continue;
        const bool eagle = m.fc_input > 0;
        prepare_pass(e, m, p, batch);
        if (eagle && step == 0)
            b_.gemm.prepare({p.total_rows(), m.shape.hidden_size, m.fc_input},
                            p.rows > 1 ? b_.hidden_states : b_.picked_states, b_.workspace.x, {m.fc});
    }
    fill_tokens(b_.tokens, static_cast<std::size_t>(batch) * (steps + 1), b_.target.shape.vocab_size, b_.job.seed,
                stream);
    for (int step = 0; step < steps; ++step) run_step(e, step);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    if (!captured) return;
    if (one_graph) {
        graphs_.push_back(Graph::capture(stream, [&] {
            for (int step = 0; step < steps; ++step) run_step(e, step);
        }));
    } else {
        for (int step = 0; step < steps; ++step) graphs_.push_back(Graph::capture(stream, [&] { run_step(e, step); }));
    }
    for (const Graph& graph : graphs_) kernels_ += graph.nodes();
}

void Drafter::run_step(Engine& e, int step) {
    const Pass& p = passes_[static_cast<std::size_t>(step)];
    const Model& m = b_.draft;
    if (m.fc_input == 0) {
        run_model(e, m, b_.draft_cache, p);
        return;
    }
    const bf16* states = nullptr;
    if (step == 0) {
        states = b_.hidden_states;
        if (p.rows ==
            1) {  // only the last accepted row of each sequence; the pass before verified steps + 1 rows of each
            gather_rows(b_.picked_states, b_.hidden_states, b_.accepted, batch_, steps_ + 1, m.fc_input, e.stream());
            states = b_.picked_states;
        }
    }
    run_eagle3(e, m, b_.draft_cache, p, states, b_.accepted);
}

void Drafter::enqueue() {
    if (!captured_) {
        Engine e = b_.engine(false);
        for (int step = 0; step < steps_; ++step) run_step(e, step);
        return;
    }
    for (const Graph& graph : graphs_) graph.launch(b_.device.stream());
}

Work Drafter::work() const {
    const Model& m = b_.draft;
    Work total;
    for (const Pass& p : passes_) {
        // A routed drafter touches at least the experts of one row.
        const Work w = work_of(m, p, context_, m.shape.experts_per_token, batch_);
        total.flops += w.flops;
        total.weight_bytes += w.weight_bytes;
        total.kv_bytes += w.kv_bytes;
        total.comm_bytes += w.comm_bytes;
    }
    if (m.fc_input > 0) {
        total.weight_bytes += 2.0 * m.fc_input * m.shape.hidden_size;
        total.flops += 2.0 * passes_.front().total_rows() * m.fc_input * m.shape.hidden_size;
    }
    return total;
}

}  // namespace specmodel
