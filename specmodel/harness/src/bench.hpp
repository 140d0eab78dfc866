// Everything that a run holds on the GPU, the passes that it times, and how they are sampled.
#pragma once

#include <functional>
#include <memory>

#include "check.hpp"
#include "model.hpp"
#include "timing.hpp"

namespace specmodel {

// Models, caches and scratch, sized for the points of the job. What no point needs is not allocated.
struct Bench {
    const Job& job;
    HostGroup& group;
    Device& device;
    Gemm gemm;
    std::unique_ptr<Comm> graph_comm;  // for captured work
    std::unique_ptr<Comm> eager_comm;  // for direct calls
    Model target;
    Model draft;
    KvCache target_cache;
    KvCache draft_cache;
    Workspace workspace;
    Arena arena;
    int* tokens = nullptr;  // [batch, steps + 1], what a verify pass reads
    int* predicted = nullptr;
    int* lengths = nullptr;
    int* accepted = nullptr;
    int* result = nullptr;
    float* conditional = nullptr;
    bf16* hidden_states = nullptr;  // the target's three hidden states of each row, for an EAGLE-3 drafter
    bf16* picked_states = nullptr;  // those of the last accepted rows
    int* lengths_host = nullptr;    // pinned
    int* result_host = nullptr;
    double copy_bytes_per_ms = 0;  // this card's measured roofs
    double gemm_flops_per_ms = 0;

    Bench(const Job& job, HostGroup& group, Device& device, const std::string& rendezvous);
    Bench(const Bench&) = delete;
    Bench& operator=(const Bench&) = delete;
    ~Bench();
    Engine engine(bool captured);
    bool has_target() const { return !target.layers.empty(); }
    // No machine of this kind is faster: the larger of bytes over bandwidth and operations over rate. What fits in the
    // L2 cache may not have come from memory.
    double bound_ms(const Work& work) const;
};

// One verification pass of the target.
class Verifier {
public:
    Verifier(Bench& bench, int batch, int rows, int context, bool captured, Part part);
    void enqueue();
    // What a cycle pays: lengths up, pass, accept, result down; returns when the host has the result.
    void round_trip(std::uint64_t cycle);
    void queue_accept(std::uint64_t cycle);
    // The captured pass against the direct one, on poisoned outputs; false if they differ or are not finite.
    bool graph_equals_eager() const { return equal_; }
    bool finite() const { return finite_; }
    std::size_t kernels() const { return kernels_; }
    double experts_touched() const { return touched_; }
    void count_touched();
    void draw_tokens();
    Work work() const;

private:
    Bench& b_;
    Pass pass_;
    int context_;
    bool captured_;
    Graph graph_;
    bool equal_ = true;
    bool finite_ = true;
    std::size_t kernels_ = 0;
    double touched_ = 0;
    std::uint64_t draws_ = 0;

    void run_directly(bool on_graph_comm);
    void check(const std::vector<float>& direct);
    std::vector<float> outcome();
};

// All draft passes of one cycle.
class Drafter {
public:
    Drafter(Bench& bench, int batch, int steps, int context, bool captured, bool one_graph);
    void enqueue();
    int steps() const { return steps_; }
    std::size_t kernels() const { return kernels_; }
    Work work() const;
    bool can_launch_steps() const { return graphs_.size() == static_cast<std::size_t>(steps_); }
    void enqueue_step(int step) { graphs_[static_cast<std::size_t>(step)].launch(b_.device.stream()); }

private:
    Bench& b_;
    int batch_;
    int steps_;
    int context_;
    bool captured_;
    std::vector<Pass> passes_;
    std::vector<Graph> graphs_;  // one a step, or one for all
    std::size_t kernels_ = 0;

    void run_step(Engine& e, int step);
};

// Capacity of the cache for a point, a multiple of the attention tile: context, what is added, and the cycles' window.
inline constexpr int cycle_window = 64;
int cache_capacity(int context, int rows, int steps);
int draft_first_rows(const Job& job, int steps);

// What is timed and how.
struct Region {
    std::function<void()> enqueue;     // one operation, or `repeats` of them
    std::function<void()> before;      // queued before the start of either, untimed; may be empty
    std::function<void()> round_trip;  // the same work seen by the host, in turn with the other; may be empty
    bool gated = true;                 // queue the whole before it may start
    bool host_time = false;            // also the host's clock over launch to completion, of the same samples
    double repeats = 1;
};

struct Samples {
    std::vector<std::vector<double>> gpu_ms;  // [rank][sample]
    std::vector<std::vector<double>> host_ms;
    std::vector<std::vector<double>> enqueue_ms;
    std::vector<std::vector<double>> sm_clock_mhz;
    Summary gpu;
    Summary host;
    Summary enqueue;
    std::size_t dropped = 0;
    double skew_median_ms = 0;
    double skew_p95_ms = 0;
    bool precise = false;
};
// Collective over the ranks: all take the same number of samples.
Samples take_samples(Device& device, HostGroup& group, const Region& region, const Limits& limits);

// Bursts of measured work between two looks at the power, and what runs unmeasured after a pause: the clock starts high
// and takes some 50 ms to settle where steady work keeps it.
inline constexpr double burst_ms = 100;
inline constexpr double settle_ms = 50;
// On all ranks together: pauses where any card needs it, then calls `settle(operations)` with what fills `settle_ms`.
void pace_together(Device& device, HostGroup& group, double share, double each_ms, bool begins,
                   const std::function<void(int)>& settle);

Json to_json(const Summary& s);
Json to_json(const std::vector<std::vector<double>>& ranks);

// Measures one point; the record without `record` and `key`.
Json measure_point(Bench& bench, const Point& point);
Json measure_cycle(Bench& bench, const Point& point);
Json measure_allreduce(Bench& bench, const Point& point);

}  // namespace specmodel
