// Verify, draft and all-reduce points: build the pass, check it, sample it, judge it.
#include <algorithm>
#include <cmath>

#include "bench.hpp"

namespace specmodel {
namespace {

void add_reason(Json::Array& reasons, Disposition d, const Samples& s, double bound_ms) {
    switch (d) {
        case Disposition::impossible:
            reasons.emplace_back("faster than the roofline bound of " + Json(bound_ms).dump() + " ms");
            break;
        case Disposition::throttled:
            reasons.emplace_back(Json(s.dropped).dump() + " samples ran under 97 % of the median SM clock");
            break;
        case Disposition::skewed:
            reasons.emplace_back("the ranks differ by " + Json(s.skew_median_ms).dump() + " ms");
            break;
        case Disposition::noisy:
            reasons.emplace_back("the half-width of the median was not reached");
            break;
        default:
            break;
    }
}

Json clocks(const State& before, const State& after, const Samples& s) {
    std::vector<double> all;
    for (const auto& rank : s.sm_clock_mhz)
        for (double clock : rank)
            if (clock > 0) all.push_back(clock);
    std::sort(all.begin(), all.end());
    Json j;
    j.set("median_mhz", std::round(quantile(all, 0.5) * 10) / 10);
    j.set("reasons_before", static_cast<double>(before.reasons))
        .set("reasons_after", static_cast<double>(after.reasons));
    j.set("temperature_before", before.temperature).set("temperature_after", after.temperature);
    j.set("power_w_before", before.power_w).set("power_w_after", after.power_w);
    return j;
}

Json rounded_clocks(std::vector<std::vector<double>> ranks) {
    for (auto& rank : ranks)
        for (double& clock : rank) clock = std::round(clock);
    return to_json(ranks);
}

struct Outcome {
    Json record;
    Json::Array reasons;
    bool checked = true;
};

// What all points share: samples, summaries, clocks, disposition.
void finish(Outcome& o, const Samples& s, bool with_host, double bound_ms, const State& before, const State& after,
            HostGroup& group) {
    Judgement j;
    j.check_passed = group.all(o.checked);
    j.is_precise = s.precise;
    j.median_ms = s.gpu.median;
    j.bound_ms = bound_ms;
    const std::size_t taken = s.gpu.samples + s.dropped;
    j.dropped_share = taken ? static_cast<double>(s.dropped) / static_cast<double>(taken) : 0;
    j.skew_median_ms = s.skew_median_ms;
    const Disposition d = judge(j);
    add_reason(o.reasons, d, s, bound_ms);
    o.record.set("disposition", name_of(d)).set("reasons", Json(o.reasons));
    Json samples;
    Json summary;
    samples.set("gpu_ms", to_json(s.gpu_ms))
        .set("enqueue_ms", to_json(s.enqueue_ms))
        .set("sm_clock_mhz", rounded_clocks(s.sm_clock_mhz));
    summary.set("gpu_ms", to_json(s.gpu)).set("enqueue_ms", to_json(s.enqueue));
    if (with_host) {
        samples.set("host_ms", to_json(s.host_ms));
        summary.set("host_ms", to_json(s.host));
    }
    o.record.set("samples", samples).set("summary", summary);
    o.record.set("dropped", Json().set("clock", s.dropped));
    o.record.set("clocks", clocks(before, after, s));
    o.record.set("skew", Json().set("median_ms", s.skew_median_ms).set("p95_ms", s.skew_p95_ms));
}

Json work_json(const Work& w, std::size_t kernels, double touched, double bound_ms) {
    Json j;
    j.set("flops", w.flops)
        .set("weight_bytes", w.weight_bytes)
        .set("kv_bytes", w.kv_bytes)
        .set("comm_bytes", w.comm_bytes);
    j.set("kernels", kernels).set("experts_touched", touched).set("bound_ms", bound_ms);
    return j;
}

Json measure_verify(Bench& b, const Point& p) {
    Outcome o;
    Verifier pass(b, p.batch, p.tokens / p.batch, p.context_tokens, p.cuda_graph, p.part);
    o.checked = pass.graph_equals_eager() && pass.finite() && b.gemm.worst_error() < 0.01;
    if (!pass.graph_equals_eager()) o.reasons.emplace_back("the captured pass does not repeat the direct one");
    if (!pass.finite()) o.reasons.emplace_back("a result is not finite");
    if (b.gemm.worst_error() >= 0.01)
        o.reasons.emplace_back("a matrix product is off by more than 1 % of its reference");
    std::uint64_t cycle = 0;
    Region region;
    region.enqueue = [&] { pass.enqueue(); };
    region.gated = p.cuda_graph;
    if (p.part != Part::comm) region.round_trip = [&] { pass.round_trip(cycle++); };
    // Which experts are touched depends on the tokens: every sample is a draw, as every cycle is.
    if (b.target.shape.num_experts > 0 && p.part != Part::comm) region.before = [&] { pass.draw_tokens(); };
    const State before = b.device.state();
    const Samples s = take_samples(b.device, b.group, region, p.limits);
    pass.count_touched();
    const Work work = pass.work();
    const double bound = b.bound_ms(work);
    o.record.set("regime", "weights_cold").set("work", work_json(work, pass.kernels(), pass.experts_touched(), bound));
    finish(o, s, p.part != Part::comm, bound, before, b.device.state(), b.group);
    Json check;
    check.set("graph_equals_eager", pass.graph_equals_eager())
        .set("finite", pass.finite())
        .set("max_relative_error", b.gemm.worst_error());
    return o.record.set("check", check);
}

// The first step of a cycle, which finds its weights evicted, against a later one.
Json measure_steps(Bench& b, Drafter& draft) {
    Event events[3];
    std::vector<double> first;
    std::vector<double> later;
    for (int i = 0; i < 24; ++i) {
        b.device.flush_l2();
        b.device.close_gate();
        for (int step = 0; step < draft.steps(); ++step) {
            if (step == 0 || step == draft.steps() - 1) events[step == 0 ? 0 : 1].record(b.device.stream());
            draft.enqueue_step(step);
            if (step == 0 && draft.steps() > 1) events[2].record(b.device.stream());
        }
        Event end;
        end.record(b.device.stream());
        b.device.open_gate();
        CUDA_CHECK(cudaStreamSynchronize(b.device.stream()));
        if (b.device.gate_failed()) throw Timeout("a gate was not opened in time");
        if (i < 4) continue;
        first.push_back(between_ms(events[0], draft.steps() > 1 ? events[2] : end));
        if (draft.steps() > 1) later.push_back(between_ms(events[1], end));
    }
    return Json().set("first_ms", summarize(first).median).set("later_ms", summarize(later).median);
}

// Eager launches that all wait behind a closed gate: what the passes cost the GPU alone, without the host's launching.
Json measure_queued(Bench& b, Drafter& draft) {
    Event begin;
    Event end;
    std::vector<double> times;
    for (int i = 0; i < 24; ++i) {
        b.device.flush_l2();
        b.device.close_gate();
        begin.record(b.device.stream());
        draft.enqueue();
        end.record(b.device.stream());
        b.device.open_gate();
        CUDA_CHECK(cudaStreamSynchronize(b.device.stream()));
        if (b.device.gate_failed()) throw Timeout("a gate was not opened in time");
        if (i >= 4) times.push_back(between_ms(begin, end));
    }
    return Json().set("queued_ms", summarize(times).median);
}

Json measure_draft(Bench& b, const Point& p) {
    Outcome o;
    Drafter draft(b, p.batch, p.num_steps, p.context_tokens, p.cuda_graph, p.graph_scope_cycle);
    const Work work = draft.work();
    const double bound = b.bound_ms(work);
    o.checked = b.gemm.worst_error() < 0.01;
    if (!o.checked) o.reasons.emplace_back("a matrix product is off by more than 1 % of its reference");
    Region region;
    region.enqueue = [&] { draft.enqueue(); };
    region.before = [&] { b.device.flush_l2(); };
    region.gated = p.cuda_graph;
    const State before = b.device.state();
    const Samples s = take_samples(b.device, b.group, region, p.limits);
    if (p.cuda_graph && draft.can_launch_steps() && !p.graph_scope_cycle)
        o.record.set("steps", measure_steps(b, draft));
    // The launch queue holds about a thousand: no more than some hundreds wait behind a gate, and no all-reduce.
    if (!p.cuda_graph && draft.steps() <= 20 && b.draft.shape.num_layers == 1 && b.group.world() == 1)
        o.record.set("parts", measure_queued(b, draft));
    o.record.set("regime", "after_verify").set("work", work_json(work, draft.kernels(), 0, bound));
    finish(o, s, false, bound, before, b.device.state(), b.group);
    return o.record.set("check", Json().set("max_relative_error", b.gemm.worst_error()));
}

}  // namespace

Json measure_allreduce(Bench& b, const Point& p) {
    if (b.group.world() == 1)
        return Json()
            .set("disposition", "not_measured")
            .set("reasons", Json(Json::Array{Json("one rank has no all-reduce")}));
    Outcome o;
    const auto count = static_cast<std::size_t>(p.size_bytes / sizeof(bf16));
    Comm& comm = p.in_graph ? *b.graph_comm : *b.eager_comm;
    cudaStream_t stream = b.device.stream();
    Arena arena;
    auto* in = arena.array<bf16>(count);
    auto* out = arena.array<bf16>(count);
    // Rank r sends the pattern scaled by r + 1, so the sum is the pattern times n (n + 1) / 2 on every rank.
    const Fill pattern{.columns = count, .global_columns = count, .seed = b.job.seed};
    const double factor = b.group.world() * (b.group.world() + 1) / 2.0;
    double error = 0;
    auto verify = [&] {
        Fill mine = pattern;
        mine.scale = static_cast<float>(b.group.rank() + 1);
        fill_normal(in, mine, stream);
        CUDA_CHECK(cudaMemsetAsync(out, 0xFF, count * sizeof(bf16), stream));
        comm.all_reduce(in, out, count, stream);
        CUDA_CHECK(cudaStreamSynchronize(stream));
        comm.check_async();
        const std::vector<float> sum = download(out, count);
        fill_normal(in, pattern, stream);
        CUDA_CHECK(cudaStreamSynchronize(stream));
        std::vector<float> expected = download(in, count);
        for (float& value : expected) value *= static_cast<float>(factor);
        error = std::max(error, relative_error(sum, expected));
    };
    verify();
    // Operations in one region: at least 0.2 ms of work, few enough for the launch queue.
    const double guess_ms = 0.01 + 2 * p.size_bytes / b.device.link_bytes_per_ms();
    const int operations = std::clamp(static_cast<int>(0.2 / guess_ms), 1, 50);
    auto all = [&] {
        for (int i = 0; i < operations; ++i) comm.all_reduce(in, out, count, stream);
    };
    all();
    CUDA_CHECK(cudaStreamSynchronize(stream));
    Graph graph;
    if (p.in_graph) graph = Graph::capture(stream, all);
    Region region;
    if (p.in_graph)
        region.enqueue = [&] { graph.launch(stream); };
    else
        region.enqueue = all;
    if (p.cold) region.before = [&] { b.device.flush_l2(); };
    region.gated = p.in_graph;
    region.host_time = !p.in_graph;
    region.repeats = operations;
    const State before = b.device.state();
    const Samples s = take_samples(b.device, b.group, region, p.limits);
    verify();
    o.checked = error < 0.01;
    if (!o.checked) o.reasons.emplace_back("the sum differs from its closed form");
    const double share = 2.0 * (b.group.world() - 1) / b.group.world();
    const double bound = share * p.size_bytes / b.device.link_bytes_per_ms();
    Work work;
    work.comm_bytes = p.size_bytes;
    o.record.set("regime", p.cold ? "cold" : "hot")
        .set("operations", operations)
        .set("work", work_json(work, graph ? graph.nodes() : 0, 0, bound));
    finish(o, s, !p.in_graph, bound, before, b.device.state(), b.group);
    return o.record.set("check", Json().set("max_relative_error", error));
}

Json measure_point(Bench& b, const Point& p) {
    switch (p.kind) {
        case PointKind::verify:
            if (p.part != Part::all && b.group.world() == 1)
                return Json()
                    .set("disposition", "not_measured")
                    .set("reasons", Json(Json::Array{Json("with one rank a pass has no parts")}));
            return measure_verify(b, p);
        case PointKind::draft:
            return measure_draft(b, p);
        case PointKind::cycle:
            return measure_cycle(b, p);
        case PointKind::allreduce:
            return measure_allreduce(b, p);
    }
    return {};
}

}  // namespace specmodel
