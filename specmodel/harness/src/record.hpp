// The output file and the facts that go into it.
#pragma once

#include <atomic>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>

#include "bench.hpp"

namespace specmodel {

// JSON lines, each flushed when written. The file must not exist before.
class Output {
public:
    explicit Output(const std::string& path);
    Output(const Output&) = delete;
    Output& operator=(const Output&) = delete;
    ~Output();
    void write(const Json& record);

private:
    std::mutex mutex_;
    std::FILE* file_ = nullptr;
};

// Ends the process with exit code 124 when a step takes too long: a hung collective cannot be cancelled from outside
// its thread. Writes the point's record first.
class Watchdog {
public:
    explicit Watchdog(Output& output, bool records_points);
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;
    ~Watchdog();
    // `record` describes the step that begins; it is written with disposition timeout if the step does not end in time.
    void begin(double timeout_ms, Json record);
    void end();

private:
    Output& output_;
    bool records_points_;
    std::mutex mutex_;
    double deadline_ms_ = 0;  // 0: nothing is watched
    Json record_;
    Stopwatch clock_;
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

std::string now_utc();
Json version_facts();
// The `start` record.
Json start_record(const Bench* bench, Device& device, HostGroup& group, std::uint64_t seed);

}  // namespace specmodel
