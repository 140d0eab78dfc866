// The few ways in which the harness gives up, each with its exit code (PROTOCOL.md).
#pragma once

#include <stdexcept>
#include <string>

namespace specmodel {

// A bad command line or job file: exit 2.
struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Something this machine or this binary cannot represent: exit 3.
struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A failed CUDA, cuBLASLt, NCCL or system call: exit 1.
struct CallError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The ranks did not meet, or a gate was not opened, in time: exit 124.
struct Timeout : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace specmodel
