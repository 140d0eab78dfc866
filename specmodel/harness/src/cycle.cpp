// Whole speculative cycles, as an engine runs them: the held-out check of every prediction made from the other points.
#include <algorithm>
#include <cmath>

#include "bench.hpp"

namespace specmodel {
namespace {

// What the host knows of each sequence, and its decision after every cycle.
class Sequences {
public:
    Sequences(Bench& b, int batch, int context, int steps) : b_(b), batch_(batch), least_(context - cycle_window), most_(context + cycle_window), counts_(static_cast<std::size_t>(steps), 0.0) {
        // Spread over the window, so that its mean is the context from the first cycle on.
        for (int s = 0; s < batch; ++s) b_.lengths_host[s] = least_ + (s * 37) % (2 * cycle_window);
        history_.resize(static_cast<std::size_t>(batch));
        for (auto& tokens : history_) tokens.reserve(static_cast<std::size_t>(1) << 14U);
    }

    // Takes in what was accepted: history, end of sequence, next positions. A sequence that leaves the window starts again
    // at its lower end, as a new request would take the place of a finished one.
    void decide() {
        for (int s = 0; s < batch_; ++s) {
            const int emitted = b_.result_host[2 * s];
            const int next = b_.result_host[2 * s + 1];
            auto& tokens = history_[static_cast<std::size_t>(s)];
            tokens.push_back(next);
            int length = b_.lengths_host[s] + emitted;
            if (length > most_) {
                length -= 2 * cycle_window;
                tokens.clear();
            }
            b_.lengths_host[s] = length;
            emitted_ += emitted;
            for (int k = 0; k + 1 < emitted; ++k) counts_[static_cast<std::size_t>(k)] += 1;
        }
    }

    void reset_counts() {
        emitted_ = 0;
        std::fill(counts_.begin(), counts_.end(), 0.0);
    }

    double emitted() const { return emitted_; }
    const std::vector<double>& counts() const { return counts_; }

private:
    Bench& b_;
    int batch_;
    int least_;
    int most_;
    double emitted_ = 0;
    std::vector<double> counts_;
    std::vector<std::vector<int>> history_;
};

}  // namespace

Json measure_cycle(Bench& b, const Point& p) {
    cudaStream_t stream = b.device.stream();
    std::unique_ptr<Drafter> draft;
    if (p.num_steps > 0) draft = std::make_unique<Drafter>(b, p.batch, p.num_steps, p.context_tokens, p.cuda_graph, p.graph_scope_cycle);
    Verifier verify(b, p.batch, p.num_steps + 1, p.context_tokens, p.verify_cuda_graph, Part::all);
    Sequences sequences(b, p.batch, p.context_tokens, p.num_steps);
    const auto batch = static_cast<std::size_t>(p.batch);
    std::vector<double> cycle_ms;
    std::vector<double> busy_ms;
    double last_ms = 0;
    const Stopwatch watch;
    // Chunks, so that the ranks can agree to stop early, and so that few events are alive at once.
    constexpr int chunk = 50;
    std::vector<Event> begins(chunk);
    std::vector<Event> ends(chunk);
    const int warmup = std::max(10, p.limits.warmup_samples);
    const State before = b.device.state();
    bool early = false;
    std::uint64_t number = 0;
    for (int done = -warmup; done < p.cycles && !early;) {
        const int count = done < 0 ? warmup : std::min(chunk, p.cycles - done);
        CUDA_CHECK(cudaStreamSynchronize(stream));
        b.group.barrier();
        Stopwatch since;
        last_ms = 0;
        for (int i = 0; i < count; ++i, ++number) {
            CUDA_CHECK(cudaMemcpyAsync(b.lengths, b.lengths_host, batch * sizeof(int), cudaMemcpyHostToDevice, stream));
            auto& begin = begins[static_cast<std::size_t>(i % chunk)];
            auto& end = ends[static_cast<std::size_t>(i % chunk)];
            begin.record(stream);
            if (draft) draft->enqueue();
            verify.enqueue();
            verify.queue_accept(number);
            end.record(stream);
            CUDA_CHECK(cudaMemcpyAsync(b.result_host, b.result, 2 * batch * sizeof(int), cudaMemcpyDeviceToHost, stream));
            CUDA_CHECK(cudaStreamSynchronize(stream));
            sequences.decide();
            const double now = since.ms();
            if (done >= 0) cycle_ms.push_back(now - last_ms);
            last_ms = now;
        }
        for (int i = 0; i < count && done >= 0; ++i) busy_ms.push_back(between_ms(begins[static_cast<std::size_t>(i)], ends[static_cast<std::size_t>(i)]));
        if (done < 0) sequences.reset_counts();
        done = std::max(done, 0) + (done < 0 ? 0 : count);
        early = b.group.decide(done >= 200 && watch.ms() > p.limits.max_ms);
    }
    const State after = b.device.state();
    const auto all_cycle = b.group.gather(cycle_ms);
    const auto all_busy = b.group.gather(busy_ms);
    const Summary cycle = summarize(max_over_ranks(all_cycle));
    const Summary busy = summarize(max_over_ranks(all_busy));
    const double sequences_cycles = static_cast<double>(cycle.samples * batch);

    Work work = verify.work();
    if (draft) {
        const Work d = draft->work();
        work.flops += d.flops;
        work.weight_bytes += d.weight_bytes;
        work.kv_bytes += d.kv_bytes;
        work.comm_bytes += d.comm_bytes;
    }
    const double bound = b.bound_ms(work);
    Judgement j;
    const bool checked = verify.finite() && verify.graph_equals_eager() && b.gemm.worst_error() < 0.01;
    j.check_passed = b.group.all(checked);
    j.is_precise = precise(cycle, p.limits);
    j.median_ms = cycle.median;
    j.bound_ms = bound;
    const Disposition d = judge(j);
    Json::Array reasons;
    if (d == Disposition::wrong) reasons.emplace_back("the captured pass does not repeat the direct one, a result is not finite, or a matrix product is off");
    if (d == Disposition::noisy) reasons.emplace_back("the half-width of the median was not reached");
    if (d == Disposition::impossible) reasons.emplace_back("faster than the roofline bound of " + Json(bound).dump() + " ms");

    Json record;
    record.set("disposition", name_of(d)).set("reasons", Json(reasons));
    record.set("work", Json().set("flops", work.flops).set("weight_bytes", work.weight_bytes).set("kv_bytes", work.kv_bytes).set("comm_bytes", work.comm_bytes)
                           .set("kernels", verify.kernels() + (draft ? draft->kernels() : 0)).set("experts_touched", verify.experts_touched()).set("bound_ms", bound));
    record.set("samples", Json().set("cycle_ms", to_json(all_cycle)).set("gpu_busy_ms", to_json(all_busy)));
    record.set("summary", Json().set("cycle_ms", to_json(cycle)).set("gpu_busy_ms", to_json(busy)));
    record.set("cycles", cycle.samples).set("tokens_emitted", sequences.emitted()).set("accepted_per_position", Json::numbers(sequences.counts()));
    record.set("drafts", sequences_cycles).set("acceptance_length", sequences.emitted() / sequences_cycles);
    record.set("tok_s", 1000.0 * sequences.emitted() / cycle.total).set("total_ms", cycle.total).set("gap_ms", cycle.median - busy.median);
    record.set("clocks", Json().set("before_mhz", before.sm_clock_mhz).set("after_mhz", after.sm_clock_mhz)
                             .set("reasons_before", static_cast<double>(before.reasons)).set("reasons_after", static_cast<double>(after.reasons))
                             .set("temperature_before", before.temperature).set("temperature_after", after.temperature)
                             .set("power_w_before", before.power_w).set("power_w_after", after.power_w));
    return record;
}

}  // namespace specmodel
