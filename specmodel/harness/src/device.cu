#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "device.hpp"

namespace specmodel {
namespace {

constexpr std::uint64_t gate_timeout_ns = 10'000'000'000;

__device__ __forceinline__ std::uint64_t timer_ns() {
    std::uint64_t ns = 0;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

__global__ void gate_kernel(const volatile std::uint32_t* flag, std::uint32_t ticket, std::uint32_t* failed) {
    const std::uint64_t begin = timer_ns();
    while (static_cast<std::int32_t>(*flag - ticket) < 0) {
        if (timer_ns() - begin > gate_timeout_ns) {
            *failed = 1;
            return;
        }
    }
}

// Blocks spread over the multiprocessors; the one that lands on number 0 writes, so that both stamps are of one
// counter.
__global__ void stamp_kernel(std::uint64_t* out) {
    std::uint32_t multiprocessor = 0;
    asm volatile("mov.u32 %0, %smid;" : "=r"(multiprocessor));
    if (multiprocessor != 0) return;
    out[0] = static_cast<std::uint64_t>(clock64());
    out[1] = timer_ns();
}

__global__ void sleep_kernel(std::uint64_t ns) {
    const std::uint64_t begin = timer_ns();
    while (timer_ns() - begin < ns) {
    }
}

__global__ void timer_step_kernel(std::uint64_t* out) {
    std::uint64_t least = ~0ULL;
    std::uint64_t last = timer_ns();
    for (int changes = 0; changes < 64;) {
        const std::uint64_t now = timer_ns();
        if (now == last) continue;
        if (now - last < least) least = now - last;
        last = now;
        ++changes;
    }
    *out = least;
}

__global__ void nothing_kernel() {}

}  // namespace

// The few NVML calls that are needed, loaded at run time: the driver brings the library, the toolkit is not asked for
// it.
struct Device::Nvml {
    using Handle = void*;
    void* library = nullptr;
    Handle device = nullptr;
    int (*shutdown)() = nullptr;
    int (*clock)(Handle, unsigned, unsigned*) = nullptr;
    int (*temperature)(Handle, unsigned, unsigned*) = nullptr;
    int (*power)(Handle, unsigned*) = nullptr;
    int (*power_limit)(Handle, unsigned*) = nullptr;
    int (*reasons)(Handle, unsigned long long*) = nullptr;
    int (*driver)(char*, unsigned) = nullptr;
    int (*mig)(Handle, unsigned*, unsigned*) = nullptr;
    int (*link)(Handle, unsigned, unsigned*) = nullptr;
    int (*processes)(Handle, unsigned*, void*) = nullptr;

    template <typename F>
    void find(F& function, const char* name) {
        function = reinterpret_cast<F>(dlsym(library, name));
    }

    static Nvml* open(const cudaDeviceProp& properties) {
        void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!library) return nullptr;
        auto* n = new Nvml;
        n->library = library;
        int (*init)() = nullptr;
        int (*by_bus)(const char*, Handle*) = nullptr;
        n->find(init, "nvmlInit_v2");
        n->find(by_bus, "nvmlDeviceGetHandleByPciBusId_v2");
        n->find(n->shutdown, "nvmlShutdown");
        n->find(n->clock, "nvmlDeviceGetClockInfo");
        n->find(n->temperature, "nvmlDeviceGetTemperature");
        n->find(n->power, "nvmlDeviceGetPowerUsage");
        n->find(n->power_limit, "nvmlDeviceGetEnforcedPowerLimit");
        n->find(n->reasons, "nvmlDeviceGetCurrentClocksThrottleReasons");
        n->find(n->driver, "nvmlSystemGetDriverVersion");
        n->find(n->mig, "nvmlDeviceGetMigMode");
        n->find(n->link, "nvmlDeviceGetNvLinkState");
        n->find(n->processes, "nvmlDeviceGetComputeRunningProcesses_v3");
        char bus[32];
        std::snprintf(bus, sizeof bus, "%08x:%02x:%02x.0", static_cast<unsigned>(properties.pciDomainID),
                      static_cast<unsigned>(properties.pciBusID), static_cast<unsigned>(properties.pciDeviceID));
        if (!init || !by_bus || init() != 0 || by_bus(bus, &n->device) != 0) {
            dlclose(library);
            delete n;
            return nullptr;
        }
        return n;
    }

    ~Nvml() {
        if (shutdown) shutdown();
        dlclose(library);
    }
};

Device::Device(int index, HostGroup& group) : group_(group), index_(index) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) throw Refused("no CUDA GPU is visible");
    if (index >= count)
        throw Refused("GPU " + std::to_string(index) + " was asked for, " + std::to_string(count) + " are visible");
    CUDA_CHECK(cudaInitDevice(index, cudaDeviceScheduleSpin | cudaDeviceMapHost, cudaInitDeviceFlagsAreValid));
    CUDA_CHECK(cudaSetDevice(index));
    CUDA_CHECK(cudaGetDeviceProperties(&properties_, index));
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CUDA_CHECK(cudaCtxResetPersistingL2Cache());
    // One page shared by the ranks lets a single store release all of them; where it cannot be pinned, each rank opens
    // its own after a barrier of the hosts, which adds their jitter to the skew.
    void* page = nullptr;
    if (cudaHostRegister(group.gate_page(), group.gate_bytes(), cudaHostRegisterMapped | cudaHostRegisterPortable) ==
            cudaSuccess &&
        cudaHostGetDevicePointer(&page, group.gate_page(), 0) == cudaSuccess) {
        gate_device_ = static_cast<std::uint32_t*>(page);
    } else {
        static_cast<void>(cudaGetLastError());
        gate_is_shared_ = false;
        CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&gate_host_), sizeof(std::uint32_t), cudaHostAllocMapped));
        *gate_host_ = 0;
        gate_device_ = gate_host_;
    }
    CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&gate_failed_), sizeof(std::uint32_t), cudaHostAllocMapped));
    CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&stamps_), 4 * sizeof(std::uint64_t), cudaHostAllocMapped));
    *gate_failed_ = 0;
    std::fill_n(stamps_, 4, 0);
    flush_ = arena_.array<unsigned char>(2 * l2_bytes());
    nvml_ = Nvml::open(properties_);
    measure_timer_step();
    // Every tool once, before any gate is closed: a kernel that is loaded at its first launch would wait for the gate.
    gate_kernel<<<1, 1, 0, stream_>>>(gate_device_, 0, gate_failed_);
    LAUNCH_CHECK("gate");
    stamp(0);
    sleep_ms(0);
    empty_kernel();
    flush_l2();
    CUDA_CHECK(cudaStreamSynchronize(stream_));
}

Device::~Device() {
    cudaStreamSynchronize(stream_);
    if (gate_is_shared_)
        cudaHostUnregister(group_.gate_page());
    else
        cudaFreeHost(gate_host_);
    cudaFreeHost(gate_failed_);
    cudaFreeHost(stamps_);
    cudaStreamDestroy(stream_);
    delete nvml_;
}

void Device::measure_timer_step() {
    timer_step_kernel<<<1, 1, 0, stream_>>>(stamps_);
    LAUNCH_CHECK("timer_step");
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    timer_step_ns_ = static_cast<double>(*static_cast<volatile std::uint64_t*>(stamps_));
}

void Device::close_gate() {
    ++ticket_;
    gate_kernel<<<1, 1, 0, stream_>>>(gate_device_, ticket_, gate_failed_);
    LAUNCH_CHECK("gate");
}

void Device::open_gate() {
    if (gate_is_shared_) {
        group_.open_gate(ticket_);
    } else {
        group_.barrier();
        *static_cast<volatile std::uint32_t*>(gate_host_) = ticket_;
    }
}

bool Device::gate_failed() {
    return *static_cast<volatile std::uint32_t*>(gate_failed_) != 0;
}

void Device::stamp(int slot) {
    stamp_kernel<<<static_cast<unsigned>(4 * properties_.multiProcessorCount), 32, 0, stream_>>>(stamps_ + 2 * slot);
    LAUNCH_CHECK("stamp");
}

double Device::clock_mhz() {
    const auto* s = static_cast<volatile std::uint64_t*>(stamps_);
    const double cycles = static_cast<double>(s[2]) - static_cast<double>(s[0]);
    const double ns = static_cast<double>(s[3]) - static_cast<double>(s[1]);
    if (cycles <= 0 || ns < 200 * timer_step_ns_) return 0;  // half a percent at worst
    return cycles / ns * 1000.0;
}

void Device::flush_l2() {
    CUDA_CHECK(cudaMemsetAsync(flush_, static_cast<int>(ticket_ & 0x7FU), 2 * l2_bytes(), stream_));
}

void Device::sleep_ms(double ms) {
    sleep_kernel<<<1, 1, 0, stream_>>>(static_cast<std::uint64_t>(ms * 1e6));
    LAUNCH_CHECK("sleep");
}

void Device::empty_kernel() {
    nothing_kernel<<<1, 32, 0, stream_>>>();
    LAUNCH_CHECK("nothing");
}

State Device::state() const {
    State s;
    if (!nvml_) return s;
    unsigned value = 0;
    unsigned long long bits = 0;
    if (nvml_->clock && nvml_->clock(nvml_->device, 1, &value) == 0) s.sm_clock_mhz = value;
    if (nvml_->temperature && nvml_->temperature(nvml_->device, 0, &value) == 0) s.temperature = value;
    if (nvml_->power && nvml_->power(nvml_->device, &value) == 0) s.power_w = value / 1000.0;
    if (nvml_->reasons && nvml_->reasons(nvml_->device, &bits) == 0) s.reasons = bits;
    return s;
}

bool Device::pace(double share, bool begins) {
    constexpr std::uint64_t power_cap = 4;  // nvmlClocksEventReasonSwPowerCap
    constexpr double rest_ms = 300;
    constexpr double most_ms = 2000;
    unsigned limit_mw = 0;
    if (share <= 0 || !nvml_ || !nvml_->power || !nvml_->power_limit ||
        nvml_->power_limit(nvml_->device, &limit_mw) != 0)
        return false;
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    const Stopwatch waiting;
    unsigned power_mw = 0;
    bool waited = false;
    while (nvml_->power(nvml_->device, &power_mw) == 0 && power_mw > share * limit_mw && waiting.ms() < most_ms) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        waited = true;
    }
    while (begins && (state().reasons & power_cap) && waiting.ms() < rest_ms) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        waited = true;
    }
    return waited;
}

int Device::other_processes() const {
    // nvmlProcessInfo_t: pid, used memory, two instance numbers.
    struct Process {
        unsigned pid;
        unsigned long long memory;
        unsigned gpu_instance;
        unsigned compute_instance;
    };
    std::vector<Process> list(64);
    auto count = static_cast<unsigned>(list.size());
    if (!nvml_ || !nvml_->processes || nvml_->processes(nvml_->device, &count, list.data()) != 0) return 0;
    return std::max(0, static_cast<int>(count) - 1);
}

double Device::peak_bandwidth_bytes_per_ms() const {
    int memory_khz = 0;
    int bus_bits = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, index_));
    CUDA_CHECK(cudaDeviceGetAttribute(&bus_bits, cudaDevAttrGlobalMemoryBusWidth, index_));
    return 2.0 * memory_khz * bus_bits / 8;  // double data rate; kHz are cycles per ms
}

double Device::peak_flops_per_ms() const {
    int clock_khz = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, index_));
    // Dense bf16 operations per cycle and multiprocessor, by architecture (NVIDIA's tuning guides).
    double per_cycle = 1024;  // consumer parts
    if (properties_.major == 8 && properties_.minor == 0) per_cycle = 2048;
    if (properties_.major == 9) per_cycle = 4096;
    if (properties_.major >= 10) per_cycle = 8192;
    return per_cycle * properties_.multiProcessorCount * clock_khz;
}

double Device::link_bytes_per_ms() const {
    int links = 0;
    if (nvml_ && nvml_->link) {
        unsigned active = 0;
        for (unsigned l = 0; l < 18; ++l)
            if (nvml_->link(nvml_->device, l, &active) == 0 && active == 1) ++links;
    }
    if (links == 0) return 64e6;                             // PCIe 5.0 x16
    return links * (properties_.major >= 10 ? 50e6 : 25e6);  // NVLink 5; 4 and 3
}

Json Device::facts() const {
    int clock_khz = 0;
    int memory_khz = 0;
    int bus_bits = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, index_));
    CUDA_CHECK(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, index_));
    CUDA_CHECK(cudaDeviceGetAttribute(&bus_bits, cudaDevAttrGlobalMemoryBusWidth, index_));
    char driver[96] = "";
    unsigned mig = 0;
    unsigned pending = 0;
    int links = 0;
    if (nvml_) {
        if (nvml_->driver) nvml_->driver(driver, sizeof driver);
        if (nvml_->mig && nvml_->mig(nvml_->device, &mig, &pending) != 0) mig = 0;
        unsigned active = 0;
        for (unsigned l = 0; nvml_->link && l < 18; ++l)
            if (nvml_->link(nvml_->device, l, &active) == 0 && active == 1) ++links;
    }
    Json facts;
    facts.set("name", properties_.name)
        .set("architecture", "sm_" + std::to_string(properties_.major * 10 + properties_.minor))
        .set("multiprocessors", properties_.multiProcessorCount)
        .set("l2_bytes", l2_bytes())
        .set("memory_bytes", properties_.totalGlobalMem)
        .set("memory_clock_mhz", memory_khz / 1000)
        .set("sm_clock_max_mhz", clock_khz / 1000)
        .set("memory_bus_bits", bus_bits)
        .set("peak_bandwidth_bytes_per_ms", peak_bandwidth_bytes_per_ms())
        .set("ecc", properties_.ECCEnabled != 0)
        .set("mig", mig == 1)
        .set("other_processes", other_processes())
        .set("nvlink_links", links)
        .set("timer_step_ms", timer_step_ns_ * 1e-6)
        .set("driver", driver);
    return facts;
}

}  // namespace specmodel
