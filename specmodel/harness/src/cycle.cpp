// Whole speculative cycles, as an engine runs them: the held-out check of every prediction made from the other points.
#include <algorithm>
#include <cmath>

#include "bench.hpp"

namespace specmodel {
namespace {

// What the host knows of each sequence, and its decision after every cycle.
class Sequences {
public:
    Sequences(Bench& b, int batch, int context, int steps)
        : b_(b),
          batch_(batch),
          least_(context - cycle_window),
          most_(context + cycle_window),
          counts_(static_cast<std::size_t>(steps), 0.0) {
        // Spread over the window, so that its mean is the context from the first cycle on.
        for (int s = 0; s < batch; ++s) b_.lengths_host[s] = least_ + (s * 37) % (2 * cycle_window);
        history_.resize(static_cast<std::size_t>(batch));
        for (auto& tokens : history_) tokens.reserve(static_cast<std::size_t>(1) << 14U);
    }

    // Takes in what was accepted: history, end of sequence, next positions. A sequence that leaves the window starts
    // again at its lower end, as a new request would take the place of a finished one.
    void decide(bool count) {
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
            if (!count) continue;
            emitted_ += emitted;
            for (int k = 0; k + 1 < emitted; ++k) counts_[static_cast<std::size_t>(k)] += 1;
        }
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

Json rounded(std::vector<std::vector<double>> ranks) {
    for (auto& rank : ranks)
        for (double& clock : rank) clock = std::round(clock);
    return to_json(ranks);
}

double median_clock(const std::vector<std::vector<double>>& ranks) {
    std::vector<double> known;
    for (const auto& rank : ranks)
        for (double clock : rank)
            if (clock > 0) known.push_back(std::round(clock));
    std::sort(known.begin(), known.end());
    return quantile(known, 0.5);
}

}  // namespace

Json measure_cycle(Bench& b, const Point& p) {
    cudaStream_t stream = b.device.stream();
    std::unique_ptr<Drafter> draft;
    if (p.num_steps > 0)
        draft = std::make_unique<Drafter>(b, p.batch, p.num_steps, p.context_tokens, p.cuda_graph, p.graph_scope_cycle);
    Verifier verify(b, p.batch, p.num_steps + 1, p.context_tokens, p.verify_cuda_graph, Part::all);
    Sequences sequences(b, p.batch, p.context_tokens, p.num_steps);
    const auto batch = static_cast<std::size_t>(p.batch);
    // Bursts of cycles back to back, with a look at the power between them. The first of a burst starts on an idle GPU
    // and is not counted; the mean clock of a burst is the clock of its cycles.
    constexpr int longest_burst = 50;
    std::vector<double> cycle_ms;
    std::vector<double> busy_ms;
    std::vector<double> clock_mhz;
    std::vector<double> draft_ms;  // the parts of the busy time: drafts, then verify and accept
    std::vector<double> verify_ms;
    std::vector<Event> begins(longest_burst + 1);
    std::vector<Event> drafted(longest_burst + 1);
    std::vector<Event> ends(longest_burst + 1);
    std::uint64_t number = 0;
    auto run_burst = [&](int count, bool keep) {
        CUDA_CHECK(cudaStreamSynchronize(stream));
        b.group.barrier();
        b.device.stamp(0);
        CUDA_CHECK(cudaStreamSynchronize(stream));
        Stopwatch since;
        for (int i = 0; i <= count; ++i, ++number) {
            const auto slot = static_cast<std::size_t>(i);
            CUDA_CHECK(cudaMemcpyAsync(b.lengths, b.lengths_host, batch * sizeof(int), cudaMemcpyHostToDevice, stream));
            begins[slot].record(stream);
            if (draft) draft->enqueue();
            drafted[slot].record(stream);
            verify.enqueue();
            verify.queue_accept(number);
            ends[slot].record(stream);
            CUDA_CHECK(
                cudaMemcpyAsync(b.result_host, b.result, 2 * batch * sizeof(int), cudaMemcpyDeviceToHost, stream));
            CUDA_CHECK(cudaStreamSynchronize(stream));
            sequences.decide(keep && i > 0);
            if (keep && i > 0) cycle_ms.push_back(since.ms());
            since.restart();
        }
        b.device.stamp(1);
        CUDA_CHECK(cudaStreamSynchronize(stream));
        for (int i = 1; i <= count && keep; ++i) {
            const auto slot = static_cast<std::size_t>(i);
            busy_ms.push_back(between_ms(begins[slot], ends[slot]));
            draft_ms.push_back(between_ms(begins[slot], drafted[slot]));
            verify_ms.push_back(between_ms(drafted[slot], ends[slot]));
            clock_mhz.push_back(b.device.clock_mhz());
        }
    };
    const State before = b.device.state();
    const Stopwatch warming;
    const int warmup = std::clamp(p.limits.warmup_samples, 5, longest_burst);
    run_burst(warmup, false);
    double each_ms = warming.ms() / (warmup + 1);
    b.group.broadcast(&each_ms, sizeof each_ms);
    const int burst = std::clamp(static_cast<int>(burst_ms / each_ms), 4, longest_burst);
    const Stopwatch watch;
    for (int done = 0; done < p.cycles; done += burst) {
        pace_together(b.device, b.group, p.limits.power_share, each_ms, done == 0,
                      [&](int cycles) { run_burst(std::min(cycles, longest_burst), false); });
        run_burst(std::min(burst, p.cycles - done), true);
        if (b.group.decide(done >= 200 && watch.ms() > p.limits.max_ms)) break;
    }
    const State after = b.device.state();
    const auto all_cycle = b.group.gather(cycle_ms);
    const auto all_busy = b.group.gather(busy_ms);
    const auto all_clocks = b.group.gather(clock_mhz);
    const std::vector<char> keep = keep_by_clock(all_clocks, cycle_ms.size());
    const Summary cycle = summarize(kept(max_over_ranks(all_cycle), keep));
    const Summary busy = summarize(kept(max_over_ranks(all_busy), keep));
    const Summary drafts = summarize(kept(max_over_ranks(b.group.gather(draft_ms)), keep));
    const Summary verifies = summarize(kept(max_over_ranks(b.group.gather(verify_ms)), keep));
    // Acceptance of all cycles, speed of those at full clock: what is accepted does not depend on the clock.
    const double sequences_cycles = static_cast<double>(cycle_ms.size() * batch);
    const double acceptance_length = sequences.emitted() / sequences_cycles;
    const double mean_ms = cycle.total / static_cast<double>(cycle.samples);

    verify.count_touched();
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
    j.dropped_share = 1 - static_cast<double>(cycle.samples) / static_cast<double>(cycle_ms.size());
    const Disposition d = judge(j);
    Json::Array reasons;
    if (d == Disposition::wrong)
        reasons.emplace_back(
            "the captured pass does not repeat the direct one, a result is not finite, or a matrix product is off");
    if (d == Disposition::throttled)
        reasons.emplace_back(Json(cycle_ms.size() - cycle.samples).dump() +
                             " cycles ran under 97 % of the median SM clock");
    if (d == Disposition::noisy) reasons.emplace_back("the half-width of the median was not reached");
    if (d == Disposition::impossible)
        reasons.emplace_back("faster than the roofline bound of " + Json(bound).dump() + " ms");

    Json record;
    record.set("disposition", name_of(d)).set("reasons", Json(reasons));
    record.set("work", Json()
                           .set("flops", work.flops)
                           .set("weight_bytes", work.weight_bytes)
                           .set("kv_bytes", work.kv_bytes)
                           .set("comm_bytes", work.comm_bytes)
                           .set("kernels", verify.kernels() + (draft ? draft->kernels() : 0))
                           .set("experts_touched", verify.experts_touched())
                           .set("bound_ms", bound));
    record.set("samples", Json()
                              .set("cycle_ms", to_json(all_cycle))
                              .set("gpu_busy_ms", to_json(all_busy))
                              .set("sm_clock_mhz", rounded(all_clocks)));
    record.set("dropped", Json().set("clock", cycle_ms.size() - cycle.samples));
    record.set("summary", Json().set("cycle_ms", to_json(cycle)).set("gpu_busy_ms", to_json(busy)));
    record.set("cycles", cycle_ms.size())
        .set("tokens_emitted", sequences.emitted())
        .set("accepted_per_position", Json::numbers(sequences.counts()));
    record.set("drafts", sequences_cycles).set("acceptance_length", acceptance_length);
    record.set("tok_s", 1000.0 * static_cast<double>(batch) * acceptance_length / mean_ms)
        .set("total_ms", cycle.total)
        .set("gap_ms", cycle.median - busy.median)
        .set("parts", Json().set("draft_ms", drafts.median).set("verify_ms", verifies.median));
    record.set("clocks", Json()
                             .set("median_mhz", median_clock(all_clocks))
                             .set("reasons_before", static_cast<double>(before.reasons))
                             .set("reasons_after", static_cast<double>(after.reasons))
                             .set("temperature_before", before.temperature)
                             .set("temperature_after", after.temperature)
                             .set("power_w_before", before.power_w)
                             .set("power_w_after", after.power_w));
    return record;
}

}  // namespace specmodel
