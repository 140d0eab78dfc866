// The self-tests that earn trust: known bandwidths and durations must come out as they are.
#include "selftest.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <thread>

#include "roofs.hpp"

namespace specmodel {
namespace {

class Table {
public:
    Table(const std::function<void(const Json&)>& write, bool speaks) : write_(write), speaks_(speaks) {}

    void add(const std::string& item, const std::string& name, bool passed, double measured, double expected,
             const std::string& unit, const std::string& text) {
        row(item, name, passed ? "passed" : "failed", measured, expected, unit, text);
        failed_ += passed ? 0 : 1;
    }
    void not_run(const std::string& item, const std::string& name, const std::string& why) {
        row(item, name, "not_run", not_a_number, not_a_number, "", why);
    }
    int failed() const { return failed_; }

private:
    const std::function<void(const Json&)>& write_;
    bool speaks_;
    int failed_ = 0;

    void row(const std::string& item, const std::string& name, const char* disposition, double measured,
             double expected, const std::string& unit, const std::string& text) {
        Json j;
        j.set("record", "selftest")
            .set("item", item)
            .set("name", name)
            .set("disposition", disposition)
            .set("measured", measured);
        j.set("expected", expected).set("unit", unit).set("text", text);
        if (!speaks_) return;
        write_(j);
        std::printf("%-3s %-42s %-8s %12.5g %12.5g  %-10s %s\n", item.c_str(), name.c_str(), disposition, measured,
                    expected, unit.c_str(), text.c_str());
        std::fflush(stdout);
    }
};

// 1: roofs, and how near the memory-bound kernels come to them. Known values are of this very part; another card is
// held to its datasheet's bandwidth.
void roofs(Table& t, Device& device) {
    const bool h200 = std::string(device.properties().name) == "NVIDIA H200";
    const std::size_t bytes = std::min<std::size_t>(std::size_t{4} << 30U, device.properties().totalGlobalMem / 8);
    const double copy = copy_bytes_per_ms(device, bytes);
    const double peak = device.peak_bandwidth_bytes_per_ms();
    const double known = h200 ? 4.3e9 : 0.85 * peak;
    t.add("1a", "copy bandwidth", copy > 0.95 * known && copy <= peak, copy / 1e9, known / 1e9, "TB/s",
          "read + written, peak " + Json(peak / 1e9).dump());
    if (device.properties().totalGlobalMem > (std::size_t{16} << 30U)) {
        // No load for a while: the product is to run before the card's power limit lowers the clocks
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        const double rate = gemm_flops_per_ms(device, 8192);
        t.add("1b", "8192^3 bf16 product, random data",
              h200 ? rate > 7.3e11 && rate < 8.6e11 : rate < device.peak_flops_per_ms(), rate / 1e9,
              h200 ? 785 : device.peak_flops_per_ms() / 1e9, "TFLOP/s",
              h200 ? "known: 770-800 under load, more from rest" : "at most the datasheet's");
    }
    for (int rows : {1, 5, 11}) {
        const double share = attention_bytes_per_ms(device, rows) / copy;
        t.add("1c", "attention, " + std::to_string(rows) + " rows, of copy bandwidth", share >= 0.7 && share < 1.1,
              share, 0.7, "share", "16 x 8k tokens, 32/8 heads; at least 0.7");
    }
    for (int rows : {16, 64}) {
        const double share = expert_bytes_per_ms(device, rows) / copy;
        t.add("1d", "experts, " + std::to_string(rows) + " rows, of copy bandwidth", share >= 0.7 && share < 1.1, share,
              0.7, "share", "8 of 128, 2048 x 768; at least 0.7");
    }
}

void known_sleep(Table& t, Device& device) {
    Event first;
    Event last;
    std::vector<double> times;
    for (int i = 0; i < 12; ++i) {
        device.close_gate();
        first.record(device.stream());
        device.sleep_ms(1.0);
        last.record(device.stream());
        device.open_gate();
        CUDA_CHECK(cudaStreamSynchronize(device.stream()));
        if (i >= 2) times.push_back(between_ms(first, last));
    }
    const double median = summarize(times).median;
    t.add("2", "kernel of a known duration", std::fabs(median - 1.0) < 0.01, median, 1.0, "ms", "within 1 %");
}

// 3: rank 1 arrives 0.1 ms late: the others' all-reduce lasts that much longer, its own does not.
void injected_delay(Table& t, Device& device, HostGroup& group, Comm* comm) {
    const char* name = "0.1 ms late rank, in max not in min";
    if (!comm) {
        t.not_run("3", name, "needs at least two ranks");
        return;
    }
    Arena arena;
    constexpr std::size_t count = 8192;
    auto* in = arena.array<bf16>(count);
    auto* out = arena.array<bf16>(count);
    fill_normal(in, {.columns = count, .global_columns = count, .seed = 2}, device.stream());
    comm->all_reduce(in, out, count, device.stream());  // connects and loads: never behind a closed gate
    CUDA_CHECK(cudaStreamSynchronize(device.stream()));
    double most[2];
    double least[2];
    for (int late = 0; late < 2; ++late) {
        Event first;
        Event last;
        std::vector<double> times;
        for (int i = 0; i < 40; ++i) {
            device.close_gate();
            if (late && group.rank() == 1) device.sleep_ms(0.1);
            first.record(device.stream());
            comm->all_reduce(in, out, count, device.stream());
            last.record(device.stream());
            device.open_gate();
            CUDA_CHECK(cudaStreamSynchronize(device.stream()));
            if (device.gate_failed()) throw Timeout("a gate was not opened in time");
            if (i >= 10) times.push_back(between_ms(first, last));
        }
        const auto all = group.gather(times);
        most[late] = summarize(max_over_ranks(all)).median;
        std::vector<double> fastest = max_over_ranks(all);
        const std::vector<double> skew = skew_over_ranks(all);
        for (std::size_t i = 0; i < fastest.size(); ++i) fastest[i] -= skew[i];
        least[late] = summarize(fastest).median;
    }
    const double more = most[1] - most[0];
    t.add("3", name, std::fabs(more - 0.1) < 0.02 && std::fabs(least[1] - least[0]) < 0.02, more, 0.1, "ms",
          "min moved by " + Json(least[1] - least[0]).dump() + " ms");
}

void hot_and_cold(Table& t, Device& device) {
    const double small = read_ms(device, 20U << 20U, true) / read_ms(device, 20U << 20U, false);
    t.add("4a", "20 MB read, cold over hot", small > 1.15, small, 1.15, "ratio", "must differ");
    const double large = read_ms(device, std::size_t{2} << 30U, true) / read_ms(device, std::size_t{2} << 30U, false);
    t.add("4b", "2 GB read, cold over hot", std::fabs(large - 1) < 0.03, large, 1, "ratio", "must agree within 3 %");
}

// 5: eager launches of empty kernels cost their launch, one by one; a graph of them does not. What an eager launch
// costs is measured on another number of kernels.
void launch_gaps(Table& t, Device& device) {
    cudaStream_t stream = device.stream();
    const Graph graph = Graph::capture(stream, [&] {
        for (int k = 0; k < 100; ++k) device.empty_kernel();
    });
    // In turn, so that a drift of the host's clock moves all of them; the graph is number 0.
    const std::array<int, 5> counts{0, 1, 100, 200, 400};
    std::array<std::vector<double>, 5> times;
    for (int i = 0; i < 65; ++i) {
        for (std::size_t which = 0; which < counts.size(); ++which) {
            CUDA_CHECK(cudaStreamSynchronize(stream));
            const Stopwatch watch;
            if (which == 0) graph.launch(stream);
            for (int k = 0; k < counts[which]; ++k) device.empty_kernel();
            CUDA_CHECK(cudaStreamSynchronize(stream));
            if (i >= 5) times[which].push_back(watch.ms());
        }
    }
    auto median = [&](std::size_t which) { return summarize(times[which]).median; };
    const double in_graph = median(0);
    const double launch = (median(4) - median(3)) / 200;
    const double once = median(1) - launch;  // what a synchronisation costs, whatever was queued
    const double gap = median(2) - in_graph;
    const double expected = once + 100 * launch - in_graph;
    t.add("5", "100 empty kernels, eager minus graph", std::fabs(gap - expected) < 0.15 * (100 * launch), gap, expected,
          "ms", "launch " + Json(launch).dump() + " ms, graph " + Json(in_graph).dump() + " ms");
}

void same_twice(Table& t, Device& device, HostGroup& group) {
    Arena arena;
    // Half a millisecond of copying on a large card: a jitter of a microsecond at the start is then no difference.
    const std::size_t bytes = std::min<std::size_t>(std::size_t{1} << 30U, device.properties().totalGlobalMem / 32);
    auto* from = arena.array<bf16>(bytes / 2);
    auto* to = arena.array<bf16>(bytes / 2);
    fill_normal(from, {.columns = bytes / 2, .global_columns = bytes / 2, .seed = 4}, device.stream());
    Region region;
    region.enqueue = [&] { CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, device.stream())); };
    Limits limits;
    limits.min_ms = 0;
    limits.max_samples = 32;
    limits.warmup_samples = 1;
    int same = 0;
    int unsure = 0;
    for (int i = 0; i < 100; ++i) {
        const Samples a = take_samples(device, group, region, limits);
        const Samples b = take_samples(device, group, region, limits);
        const Comparison judged = compare(a.gpu, b.gpu);
        same += judged == Comparison::same ? 1 : 0;
        unsure += judged == Comparison::ambiguous ? 1 : 0;
    }
    t.add("6", "the same twice, judged SAME", same >= 95, same, 95, "of 100",
          "32 samples a side, tolerance 0.5 %; " + std::to_string(unsure) + " ambiguous");
}

std::string find_program(const std::string& name) {
    std::string where;
    if (const char* path = std::getenv("PATH")) where = path;
    where += ":/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer";
    for (std::size_t at = 0; at < where.size();) {
        std::size_t end = where.find(':', at);
        if (end == std::string::npos) end = where.size();
        const std::string candidate = where.substr(at, end - at) + "/" + name;
        if (access(candidate.c_str(), X_OK) == 0) return candidate;
        at = end + 1;
    }
    return "";
}

// Median time of one of twenty captured all-reduces, the slowest rank of each sample.
double allreduce_ms(Device& device, HostGroup& group, Comm& comm, std::size_t bytes) {
    constexpr int operations = 20;
    const std::size_t count = bytes / sizeof(bf16);
    Arena arena;
    auto* in = arena.array<bf16>(count);
    auto* out = arena.array<bf16>(count);
    fill_normal(in, {.columns = count, .global_columns = count, .seed = 5}, device.stream());
    auto all = [&] {
        for (int i = 0; i < operations; ++i) comm.all_reduce(in, out, count, device.stream());
    };
    all();
    CUDA_CHECK(cudaStreamSynchronize(device.stream()));
    const Graph graph = Graph::capture(device.stream(), all);
    graph.launch(device.stream());
    CUDA_CHECK(cudaStreamSynchronize(device.stream()));
    group.barrier();
    Region region;
    region.enqueue = [&] { graph.launch(device.stream()); };
    region.repeats = operations;
    Limits limits;
    limits.min_ms = 100;
    limits.max_ms = 2000;
    return take_samples(device, group, region, limits).gpu.median;
}

// What all_reduce_perf prints for each size: its time out of place, in ms; empty if it does not run.
std::map<std::size_t, double> nccl_tests_ms(const std::string& program, int world) {
    // One process with a thread for each GPU: a build without MPI has no other way. Captured, as ours.
    const std::string command = "timeout 60 '" + program + "' -t " + std::to_string(world) +
                                " -g 1 -d bfloat16 -b 16K -e 4M -f 16 -w 10 -n 20 -G 20 2>&1";
    FILE* pipe = popen(command.c_str(), "r");
    if (!pipe) throw CallError("cannot start all_reduce_perf");
    std::map<std::size_t, double> found;
    std::array<char, 1024> line{};
    while (std::fgets(line.data(), line.size(), pipe)) {
        std::size_t bytes = 0;
        double us = 0;
        // size, count, type, operation, root, time
        if (std::sscanf(line.data(), " %zu %*u %*s %*s %*d %lf", &bytes, &us) == 2) found[bytes] = us / 1000;
    }
    if (pclose(pipe) != 0) found.clear();
    return found;
}

// 7: another program's all-reduce, within 5 %.
void cross_check(Table& t, Device& device, HostGroup& group, Comm* comm) {
    const char* name = "cross-check with nccl-tests";
    const std::string program = find_program("all_reduce_perf");
    if (!comm || !group.decide(!program.empty())) {
        t.not_run("7", name, comm ? "all_reduce_perf is not on the PATH" : "needs at least two ranks");
        return;
    }
    std::map<std::size_t, double> ours;
    for (const std::size_t bytes : {std::size_t{16} << 10U, std::size_t{256} << 10U, std::size_t{4} << 20U})
        ours[bytes] = allreduce_ms(device, group, *comm, bytes);
    std::map<std::size_t, double> theirs;
    if (group.rank() == 0) theirs = nccl_tests_ms(program, group.world());
    group.barrier();
    if (group.rank() == 0 && theirs.empty()) t.not_run("7", name, "all_reduce_perf gave no times");
    for (const auto& [bytes, ms] : theirs) {
        const double ratio = ours[bytes] / ms;
        t.add("7", "all-reduce of " + std::to_string(bytes >> 10U) + " KiB over nccl-tests",
              std::fabs(ratio - 1) < 0.05, ratio, 1, "ratio",
              "ours " + Json(ours[bytes]).dump() + " ms, theirs " + Json(ms).dump() + " ms, within 5 %");
    }
}

void sanitizer(Table& t, const std::string& self) {
    const std::string tool = find_program("compute-sanitizer");
    for (const char* kind : {"memcheck", "racecheck"}) {
        const std::string name = std::string("compute-sanitizer ") + kind;
        if (tool.empty()) {
            t.not_run("8", name, "compute-sanitizer is not on the PATH");
            continue;
        }
        const std::string command = "'" + tool + "' --tool " + kind + " --error-exitcode 9 '" + self + "' check 2>&1";
        FILE* pipe = popen(command.c_str(), "r");
        if (!pipe) throw CallError("cannot start compute-sanitizer");
        std::string summary = "no summary";
        std::array<char, 1024> line{};
        while (std::fgets(line.data(), line.size(), pipe)) {
            const std::string text = line.data();
            if (const auto at = text.find("SUMMARY"); at != std::string::npos)
                summary = text.substr(at, text.find('\n') - at);
        }
        const int status = pclose(pipe);
        t.add("8", name, status == 0, status == 0 ? 0 : 1, 0, "failures", summary);
    }
}

}  // namespace

int selftest(Device& device, HostGroup& group, Comm* comm, const std::string& self,
             const std::function<void(const Json&)>& write) {
    Table t(write, group.rank() == 0);
    if (group.rank() == 0) std::printf("%-3s %-42s %-8s %12s %12s\n", "", "self-test", "", "measured", "expected");
    warm_up(device, 1000);
    roofs(t, device);
    known_sleep(t, device);
    injected_delay(t, device, group, comm);
    hot_and_cold(t, device);
    launch_gaps(t, device);
    same_twice(t, device, group);
    cross_check(t, device, group, comm);
    if (group.world() == 1)
        sanitizer(t, self);
    else
        t.not_run("8", "compute-sanitizer", "run with one rank");
    return t.failed() == 0 ? 0 : 1;
}

}  // namespace specmodel
