#include "roofs.hpp"

#include <algorithm>
#include <map>
#include <thread>

#include "device_helpers.cuh"

namespace specmodel {
namespace {

__global__ void read_kernel(float* out, const uint4* in, std::size_t vectors) {
    const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
    std::uint32_t sum = 0;
    for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < vectors; i += step) {
        const uint4 v = in[i];
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x12345678U) *out = 1;  // keeps the loads; random data will not meet it
}

// Median time of what `enqueue` queues, gated; `before` is queued untimed.
template <typename Enqueue, typename Before>
double median_ms(Device& device, int samples, Enqueue&& enqueue, Before&& before) {
    Event first;
    Event last;
    std::vector<double> times;
    enqueue();  // once without a gate: a kernel that is loaded at its first launch could wait for the gate's for ever
    for (int i = 0; i < samples + 3; ++i) {
        device.pace(0.8);
        before();
        device.close_gate();
        first.record(device.stream());
        enqueue();
        last.record(device.stream());
        device.open_gate();
        CUDA_CHECK(cudaStreamSynchronize(device.stream()));
        if (device.gate_failed()) throw Timeout("a gate was not opened in time");
        if (i >= 3) times.push_back(between_ms(first, last));
    }
    return summarize(times).median;
}

void nothing() {}

bf16* random(Arena& arena, std::size_t count, float scale, Device& device) {
    auto* out = arena.array<bf16>(count);
    fill_normal(out, {.columns = count, .global_columns = count, .seed = 9, .scale = scale}, device.stream());
    return out;
}

}  // namespace

double copy_bytes_per_ms(Device& device, std::size_t bytes) {
    Arena arena;
    auto* from = random(arena, bytes / 2, 1.0F, device);
    auto* to = arena.array<bf16>(bytes / 2);
    auto copy = [&] { CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, device.stream())); };
    return 2.0 * static_cast<double>(bytes) / median_ms(device, 12, copy, nothing);
}

double gemm_flops_per_ms(Device& device, int size) {
    Arena arena;
    const std::size_t count = static_cast<std::size_t>(size) * size;
    auto* x = random(arena, count, 1.0F, device);
    auto* w = random(arena, count, 1.0F, device);
    auto* y = arena.array<bf16>(count);
    Gemm gemm(device.stream(), GemmOptions{});
    const GemmShape shape{size, size, size};
    gemm.prepare(shape, x, y, {w});
    const double flops = 2.0 * static_cast<double>(size) * size * size;
    return flops / median_ms(device, 12, [&] { gemm.run(shape, x, w, y, device.stream()); }, nothing);
}

double attention_bytes_per_ms(Device& device, int rows_per_sequence) {
    prepare_attention();
    constexpr int batch = 16;
    constexpr int context = 8192;
    Arena arena;
    Attention a;
    a.batch = batch;
    a.rows_per_sequence = rows_per_sequence;
    a.heads = 32;
    a.kv_heads = 8;
    a.head_dim = 128;
    a.capacity = context + 64;
    a.splits = attention_splits(batch, rows_per_sequence, a.heads, a.kv_heads, a.head_dim, context);
    const std::size_t positions = static_cast<std::size_t>(batch) * a.kv_heads * a.capacity * a.head_dim;
    const auto rows = static_cast<std::size_t>(batch) * rows_per_sequence;
    a.qkv = random(arena, rows * (a.heads + 2 * a.kv_heads) * a.head_dim, 1.0F, device);
    a.keys = random(arena, positions, 1.0F, device);
    a.values = random(arena, positions, 1.0F, device);
    a.out = arena.array<bf16>(rows * a.heads * a.head_dim);
    a.partial = arena.array<float>(a.splits * rows * a.heads * a.head_dim);
    a.partial_log = arena.array<float>(a.splits * rows * a.heads);
    const std::vector<int> host(batch, context - rows_per_sequence);
    auto* lengths = arena.array<int>(batch);
    CUDA_CHECK(cudaMemcpy(lengths, host.data(), batch * sizeof(int), cudaMemcpyHostToDevice));
    a.lengths = lengths;
    const double bytes = 4.0 * batch * a.kv_heads * context * a.head_dim;
    return bytes / median_ms(device, 20, [&] { attend(a, device.stream()); }, nothing);
}

double expert_bytes_per_ms(Device& device, int rows) {
    prepare_experts();
    Arena arena;
    Experts e;
    e.rows = rows;
    e.hidden = 2048;
    e.size = 768;
    e.experts = 128;
    e.top = 8;
    const auto r = static_cast<std::size_t>(rows);
    const std::size_t weights = static_cast<std::size_t>(e.experts) * e.size * e.hidden;
    e.input = random(arena, r * e.hidden, 1.0F, device);
    e.logits = random(arena, r * e.experts, 1.0F, device);
    e.gate_up = random(arena, 2 * weights, 0.02F, device);
    e.down = random(arena, weights, 0.03F, device);
    e.active = arena.array<bf16>(r * e.top * e.size);
    e.slots = arena.array<bf16>(r * e.top * e.hidden);
    e.out = arena.array<bf16>(r * e.hidden);
    e.chosen = arena.array<int>(r * e.top);
    e.weights = arena.array<float>(r * e.top);
    e.plan = arena.array<int>(expert_plan_size(rows, e.experts, e.top));
    CUDA_CHECK(cudaMemset(e.plan, 0, 4 * sizeof(int)));
    route(e, device.stream());
    int head[4] = {};
    CUDA_CHECK(cudaMemcpyAsync(head, e.plan, sizeof head, cudaMemcpyDeviceToHost, device.stream()));
    CUDA_CHECK(cudaStreamSynchronize(device.stream()));
    const double bytes = 6.0 * head[plan_touched] * e.size * e.hidden;
    return bytes / median_ms(device, 20, [&] { run_experts(e, device.stream()); }, [&] { device.flush_l2(); });
}

double read_ms(Device& device, std::size_t bytes, bool flushed) {
    Arena arena;
    auto* in = random(arena, bytes / 2, 1.0F, device);
    auto* out = arena.array<float>(1);
    const auto blocks = static_cast<unsigned>(8 * device.properties().multiProcessorCount);
    auto read = [&] {
        read_kernel<<<blocks, 256, 0, device.stream()>>>(out, reinterpret_cast<const uint4*>(in), bytes / 16);
        LAUNCH_CHECK("read");
    };
    return median_ms(device, 30, read, [&] {
        if (flushed) device.flush_l2();
    });
}

double event_pair_ms(Device& device) {
    return median_ms(device, 100, nothing, nothing);
}

double empty_graph_ms(Device& device) {
    const Graph graph = Graph::capture(device.stream(), [&] { device.empty_kernel(); });
    return median_ms(device, 100, [&] { graph.launch(device.stream()); }, nothing);
}

struct Products::State {
    struct Item {
        std::size_t copies = 0;
        Graph tuned{};
        Graph first{};
    };

    Device& device;
    Gemm gemm;
    Arena arena{};
    Event begin{};
    Event end{};
    std::vector<Item> items{};

    explicit State(Device& d) : device(d), gemm(d.stream(), GemmOptions{}) {}

    void add(const GemmShape& shape, const std::vector<const bf16*>& weights) {
        auto* x = random(arena, static_cast<std::size_t>(shape.rows) * shape.inner, 1.0F, device);
        auto* y = arena.array<bf16>(static_cast<std::size_t>(shape.rows) * shape.outer);
        gemm.prepare(shape, x, y, weights);
        auto all = [&] {
            for (const bf16* weight : weights) gemm.run(shape, x, weight, y, device.stream());
        };
        Item item;
        item.copies = weights.size();
        for (bool first : {false, true}) {
            gemm.use_first_choice(first);
            all();
            (first ? item.first : item.tuned) = Graph::capture(device.stream(), all);
        }
        items.push_back(std::move(item));
    }

    void time(const Graph& graph, std::size_t copies, double& ms, double& mhz) {
        cudaStream_t stream = device.stream();
        // A rest before every sample: products alone draw more power than the card may.
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        device.close_gate();
        device.stamp(0);
        begin.record(stream);
        graph.launch(stream);
        end.record(stream);
        device.stamp(1);
        device.open_gate();
        CUDA_CHECK(cudaStreamSynchronize(stream));
        if (device.gate_failed()) throw Timeout("a gate was not opened in time");
        ms = between_ms(begin, end) / static_cast<double>(copies);
        mhz = device.clock_mhz();
    }
};

Products::Products(Device& device, const std::vector<GemmShape>& shapes) : state_(std::make_unique<State>(device)) {
    std::map<std::pair<int, int>, std::vector<const bf16*>> weights;
    for (const GemmShape& s : shapes) {
        auto& copies = weights[{s.outer, s.inner}];
        const std::size_t count = static_cast<std::size_t>(s.outer) * s.inner;
        const std::size_t wanted = std::clamp<std::size_t>(5 * device.l2_bytes() / (2 * count) + 1, 3, 64);
        while (copies.size() < wanted) copies.push_back(random(state_->arena, count, 0.02F, device));
        state_->add(s, copies);
    }
}

Products::~Products() = default;

double Products::worst_error() const {
    return state_->gemm.worst_error();
}

ProductTimes Products::sample(std::size_t shape) {
    const State::Item& item = state_->items.at(shape);
    ProductTimes t;
    state_->time(item.tuned, item.copies, t.tuned_ms, t.tuned_mhz);
    state_->time(item.first, item.copies, t.first_ms, t.first_mhz);
    return t;
}

void warm_up(Device& device, double ms) {
    Arena arena;
    constexpr int size = 4096;
    constexpr std::size_t count = static_cast<std::size_t>(size) * size;
    auto* x = random(arena, count, 1.0F, device);
    auto* y = arena.array<bf16>(count);
    Gemm gemm(device.stream(), GemmOptions{.cache_path = "", .may_write = false, .share = {}, .tune = false});
    gemm.prepare({size, size, size}, x, y, {x});
    const Stopwatch watch;
    while (watch.ms() < ms) {
        for (int i = 0; i < 20; ++i) gemm.run({size, size, size}, x, x, y, device.stream());
        CUDA_CHECK(cudaStreamSynchronize(device.stream()));
    }
}

}  // namespace specmodel
