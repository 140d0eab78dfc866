// The sampling loop: gated samples by GPU events, in turn with round trips by the host's clock, until the median is
// known.
#include <algorithm>

#include "bench.hpp"

namespace specmodel {
namespace {

constexpr int chunk = 8;  // samples between two looks at the statistics

void append(std::vector<std::vector<double>>& to, const std::vector<std::vector<double>>& from) {
    if (to.empty()) to.resize(from.size());
    for (std::size_t r = 0; r < from.size(); ++r) to[r].insert(to[r].end(), from[r].begin(), from[r].end());
}

struct Sampler {
    Device& device;
    HostGroup& group;
    const Region& region;
    Event first{};
    Event last{};
    std::vector<double> gpu_ms{};
    std::vector<double> host_ms{};
    std::vector<double> enqueue_ms{};
    std::vector<double> clock_mhz{};

    // flush - gate - stamp - event - work - event - stamp; the gate opens once every rank has queued all of it.
    void by_gpu(bool keep) {
        cudaStream_t stream = device.stream();
        if (region.before) region.before();
        if (region.gated) {
            device.close_gate();
        } else {
            CUDA_CHECK(cudaStreamSynchronize(stream));
            group.barrier();
        }
        device.stamp(0);
        if (!region.gated)
            CUDA_CHECK(cudaStreamSynchronize(stream));  // launch gaps are part of the work, the stamp is not
        const Stopwatch host;
        first.record(stream);
        const Stopwatch launching;
        region.enqueue();
        const double launched = launching.ms();
        last.record(stream);
        double host_time = 0;
        if (region.host_time) {
            CUDA_CHECK(cudaEventSynchronize(last.get()));
            host_time = host.ms();
        }
        device.stamp(1);
        if (region.gated) device.open_gate();
        CUDA_CHECK(cudaStreamSynchronize(stream));
        if (device.gate_failed()) throw Timeout("a gate was not opened in time");
        if (!keep) return;
        gpu_ms.push_back(between_ms(first, last) / region.repeats);
        enqueue_ms.push_back(launched / region.repeats);
        clock_mhz.push_back(device.clock_mhz());
        if (region.host_time) host_ms.push_back(host_time / region.repeats);
    }

    void by_host(bool keep) {
        if (region.before) region.before();
        CUDA_CHECK(cudaStreamSynchronize(device.stream()));
        group.barrier();
        const Stopwatch host;
        region.round_trip();
        const double elapsed = host.ms();
        if (keep) host_ms.push_back(elapsed / region.repeats);
    }
};

}  // namespace

void pace_together(Device& device, HostGroup& group, double share, double each_ms, bool begins,
                   const std::function<void(int)>& settle) {
    const bool waited = device.pace(share, begins);
    if (!group.all(!waited)) settle(std::max(1, static_cast<int>(settle_ms / each_ms)));
}

Samples take_samples(Device& device, HostGroup& group, const Region& region, const Limits& limits) {
    Sampler sampler{device, group, region};
    // Once without a gate: a kernel that is loaded at its first launch could wait for the gate's for ever.
    region.enqueue();
    CUDA_CHECK(cudaStreamSynchronize(device.stream()));
    const Stopwatch warming;
    for (int i = 0; i < limits.warmup_samples; ++i) {
        sampler.by_gpu(false);
        if (region.round_trip) sampler.by_host(false);
    }
    double each_ms = std::max(0.01, warming.ms() / limits.warmup_samples);
    group.broadcast(&each_ms, sizeof each_ms);
    const int burst = std::max(1, static_cast<int>(burst_ms / each_ms));
    int since_look = burst;
    auto settle = [&](int operations) {
        for (int i = 0; i < operations; ++i) {
            region.enqueue();
            CUDA_CHECK(cudaStreamSynchronize(device.stream()));
        }
    };
    Samples s;
    const Stopwatch watch;
    while (true) {
        sampler.gpu_ms.clear();
        sampler.host_ms.clear();
        sampler.enqueue_ms.clear();
        sampler.clock_mhz.clear();
        for (int i = 0; i < chunk; ++i) {
            if (since_look++ >= burst) {
                pace_together(device, group, limits.power_share, region.round_trip ? each_ms / 2 : each_ms,
                              s.gpu_ms.empty(), settle);
                since_look = 1;
            }
            sampler.by_gpu(true);
            if (region.round_trip) sampler.by_host(true);
        }
        append(s.gpu_ms, group.gather(sampler.gpu_ms));
        append(s.host_ms, group.gather(sampler.host_ms));
        append(s.enqueue_ms, group.gather(sampler.enqueue_ms));
        append(s.sm_clock_mhz, group.gather(sampler.clock_mhz));

        const std::vector<double> slowest = max_over_ranks(s.gpu_ms);
        const std::vector<char> keep = keep_by_clock(s.sm_clock_mhz, slowest.size());
        s.dropped = static_cast<std::size_t>(std::count(keep.begin(), keep.end(), 0));
        s.gpu = summarize(kept(slowest, keep));
        s.enqueue = summarize(kept(max_over_ranks(s.enqueue_ms), keep));
        s.host = summarize(region.host_time ? kept(max_over_ranks(s.host_ms), keep) : max_over_ranks(s.host_ms));
        const bool host_precise = !region.round_trip || precise(s.host, limits);
        s.precise = precise(s.gpu, limits) && host_precise;
        // Both series count as measured time.
        Limits rest = limits;
        if (region.round_trip) rest.min_ms = std::max(0.0, limits.min_ms - s.host.total * region.repeats);
        const double elapsed = watch.ms();
        const bool capped = elapsed >= limits.max_ms || s.gpu.samples >= static_cast<std::size_t>(limits.max_samples);
        if (group.decide(capped || (host_precise && enough(s.gpu, rest, elapsed, region.repeats)))) break;
    }
    if (group.world() > 1) {
        std::vector<double> skew = skew_over_ranks(s.gpu_ms);
        std::sort(skew.begin(), skew.end());
        s.skew_median_ms = quantile(skew, 0.5);
        s.skew_p95_ms = quantile(skew, 0.95);
    }
    return s;
}

Json to_json(const Summary& s) {
    Json j;
    j.set("median", s.median)
        .set("half_width", s.half_width)
        .set("low", s.low)
        .set("high", s.high)
        .set("q1", s.q1)
        .set("q3", s.q3);
    j.set("sd", s.sd).set("cv", s.cv).set("samples", s.samples).set("p95", s.p95).set("p99", s.p99);
    return j;
}

Json to_json(const std::vector<std::vector<double>>& ranks) {
    Json::Array lists;
    for (const auto& rank : ranks) {
        Json::Array values;  // to a nanosecond: the clocks know no better
        for (double v : rank) values.emplace_back(std::round(v * 1e6) / 1e6);
        lists.emplace_back(std::move(values));
    }
    return Json(std::move(lists));
}

}  // namespace specmodel
