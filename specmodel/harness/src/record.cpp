#include "record.hpp"

#include <sys/utsname.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <ctime>
#include <fstream>

#include "roofs.hpp"

#ifndef SPECMODEL_COMPILER
#define SPECMODEL_COMPILER "unknown"
#endif
#ifndef SPECMODEL_FLAGS
#define SPECMODEL_FLAGS ""
#endif
#ifndef SPECMODEL_ARCHITECTURES
#define SPECMODEL_ARCHITECTURES ""
#endif

extern char** environ;

namespace specmodel {
namespace {

std::string version_text(int v) {
    return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
}

// Only what changes a measurement; never the whole environment, which may hold secrets.
Json environment() {
    static constexpr std::array exact{"CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS",
                                      "OMP_NUM_THREADS"};
    Json j{Json::Object{}};
    for (char** entry = environ; *entry; ++entry) {
        const std::string text = *entry;
        const auto equals = text.find('=');
        const std::string name = text.substr(0, equals);
        bool listed = name.rfind("NCCL_", 0) == 0;
        for (const char* one : exact) listed = listed || name == one;
        if (listed && equals != std::string::npos) j.set(name, text.substr(equals + 1));
    }
    return j;
}

Json host_facts() {
    Json j;
    std::ifstream info("/proc/cpuinfo");
    std::string line;
    std::string cpu;
    while (cpu.empty() && std::getline(info, line))
        if (line.rfind("model name", 0) == 0) cpu = line.substr(line.find(':') + 2);
    utsname kernel{};
    uname(&kernel);
    double load = 0;
    std::ifstream("/proc/loadavg") >> load;
    return j.set("cpu", cpu)
        .set("cores", static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)))
        .set("kernel", kernel.release)
        .set("load_average", load);
}

}  // namespace

Output::Output(const std::string& path) : file_(std::fopen(path.c_str(), "wx")) {
    if (!file_)
        throw UsageError("cannot create the output file (it must not exist): " + std::string(std::strerror(errno)));
}

Output::~Output() {
    std::fclose(file_);
}

void Output::write(const Json& record) {
    const std::string line = record.dump() + "\n";
    const std::lock_guard lock(mutex_);
    if (std::fwrite(line.data(), 1, line.size(), file_) != line.size() || std::fflush(file_) != 0)
        throw CallError("cannot write to the output file: " + std::string(std::strerror(errno)));
}

Watchdog::Watchdog(Output& output, bool records_points) : output_(output), records_points_(records_points) {
    thread_ = std::thread([this] {
        while (!stop_) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            const std::lock_guard lock(mutex_);
            if (deadline_ms_ == 0 || clock_.ms() < deadline_ms_) continue;
            if (records_points_) {
                record_.set("disposition", name_of(Disposition::timeout))
                    .set("reasons", Json(Json::Array{Json("it did not end within its time limit")}));
                output_.write(record_);
                output_.write(Json().set("record", "end").set("exit_code", 124));
            }
            std::fprintf(stderr, "error a point did not end within its time limit\n");
            _exit(124);
        }
    });
}

Watchdog::~Watchdog() {
    stop_ = true;
    thread_.join();
}

void Watchdog::begin(double timeout_ms, Json record) {
    const std::lock_guard lock(mutex_);
    record_ = std::move(record);
    deadline_ms_ = clock_.ms() + timeout_ms;
}

void Watchdog::end() {
    const std::lock_guard lock(mutex_);
    deadline_ms_ = 0;
}

std::string now_utc() {
    const std::time_t now = std::time(nullptr);
    std::tm parts{};
    gmtime_r(&now, &parts);
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
    return text;
}

Json version_facts() {
    int runtime = 0;
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
    Json j;
    j.set("protocol", "specmodel.harness-points/1")
        .set("cuda_runtime", version_text(runtime))
        .set("cublaslt", Gemm::version());
    return j.set("compiler", SPECMODEL_COMPILER)
        .set("flags", SPECMODEL_FLAGS)
        .set("architectures", SPECMODEL_ARCHITECTURES);
}

Json start_record(const Bench* bench, Device& device, HostGroup& group, std::uint64_t seed) {
    Json software = version_facts();
    Json facts = device.facts();
    software.set("driver", *facts.find("driver"));
    Json::Array flags;
    if (bench && bench->graph_comm) software.set("nccl", bench->graph_comm->version());
    if (facts.find("other_processes")->number() > 0) flags.emplace_back("other_process_on_gpu");
    if (facts.find("mig")->boolean()) flags.emplace_back("mig_on");
    if (!device.gate_is_shared()) flags.emplace_back("gate_not_shared");
    const Json host = host_facts();
    if (host.find("load_average")->number() > 0.5 * host.find("cores")->number()) flags.emplace_back("load_high");
    Json j;
    j.set("record", "start")
        .set("protocol", "specmodel.harness-points/1")
        .set("rank", group.rank())
        .set("world", group.world());
    j.set("seed", static_cast<std::int64_t>(seed))
        .set("started", now_utc())
        .set("software", software)
        .set("device", facts);
    if (bench)
        j.set("measured", Json()
                              .set("copy_bytes_per_ms", bench->copy_bytes_per_ms)
                              .set("gemm_flops_per_ms", bench->gemm_flops_per_ms));
    j.set("host", host)
        .set("overhead",
             Json().set("event_pair_ms", event_pair_ms(device)).set("empty_graph_ms", empty_graph_ms(device)));
    if (bench) {
        std::size_t free_bytes = 0;
        std::size_t total_bytes = 0;
        CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
        Json memory;
        memory.set("weight_bytes", bench->target.arena.bytes() + bench->draft.arena.bytes());
        memory.set("kv_bytes", bench->target_cache.arena.bytes() + bench->draft_cache.arena.bytes());
        j.set("memory", memory.set("scratch_bytes", bench->workspace.arena.bytes()).set("free_bytes", free_bytes));
    }
    return j.set("environment", environment()).set("flags", Json(flags));
}

}  // namespace specmodel
