// The GPU of this process: its facts, its state before and after a point, and the tools of a timed region.
#pragma once

#include <string>
#include <vector>

#include "cuda.hpp"
#include "group.hpp"
#include "json.hpp"
#include "timing.hpp"

namespace specmodel {

// Clocks, temperature and power as NVML reports them; zeros where it cannot be loaded.
struct State {
    double sm_clock_mhz = 0;
    double temperature = 0;
    double power_w = 0;
    std::uint64_t reasons = 0;  // why the clock is below its maximum (NVML's bit mask)
};

class Device {
public:
    Device(int index, HostGroup& group);
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
    ~Device();

    cudaStream_t stream() const { return stream_; }
    const cudaDeviceProp& properties() const { return properties_; }
    std::size_t l2_bytes() const { return static_cast<std::size_t>(properties_.l2CacheSize); }

    // Queues a kernel that waits until all ranks' gates are opened, or the time is up (then `gate_failed` is true).
    void close_gate();
    // Waits for the other ranks, then releases all of them.
    void open_gate();
    bool gate_failed();

    // Queues a stamp of the SM clock's cycles and of the nanosecond timer, taken on multiprocessor 0; slot 0 or 1.
    void stamp(int slot);
    // Mean SM clock between the two stamps; 0 when unknown or the time between them is too short for the timer's
    // resolution.
    double clock_mhz();
    // Writes twice the L2 cache, so that nothing of interest is left in it.
    void flush_l2();
    // Keeps the GPU busy for a known time, by the nanosecond timer.
    void sleep_ms(double ms);
    void empty_kernel();

    State state() const;
    // Waits (at most 2 s) while the card's mean power is above `share` of its limit, so that its clocks are not being
    // lowered when the next work starts. Where a point `begins`, also (at most 0.3 s) until the work before it no
    // longer holds the clocks down. True if it waited.
    bool pace(double share, bool begins = false);
    double peak_bandwidth_bytes_per_ms() const;
    double peak_flops_per_ms() const;  // dense bf16
    double link_bytes_per_ms() const;  // to the other GPUs, one way
    Json facts() const;                // the `device` object of a `start` record
    bool gate_is_shared() const { return gate_is_shared_; }
    int other_processes() const;

private:
    struct Nvml;
    HostGroup& group_;
    int index_;
    cudaDeviceProp properties_{};
    cudaStream_t stream_ = nullptr;
    Arena arena_;
    std::uint32_t ticket_ = 0;
    bool gate_is_shared_ = true;
    std::uint32_t* gate_host_ = nullptr;  // this rank's own flag, when the shared page cannot be mapped
    std::uint32_t* gate_device_ = nullptr;
    std::uint32_t* gate_failed_ = nullptr;  // mapped host memory
    std::uint64_t* stamps_ = nullptr;       // mapped host memory: [slot][cycles, ns]
    unsigned char* flush_ = nullptr;
    double timer_step_ns_ = 1000;
    Nvml* nvml_ = nullptr;

    void measure_timer_step();
};

}  // namespace specmodel
