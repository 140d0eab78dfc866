// The self-tests (harness selftest): a table on stdout, a record for each item.
#pragma once

#include <functional>
#include <string>

#include "bench.hpp"

namespace specmodel {

// Returns the exit code: 0 unless an item failed. `comm` is null with one rank; `self` is the path of this binary.
int selftest(Device& device, HostGroup& group, Comm* comm, const std::string& self,
             const std::function<void(const Json&)>& write);

}  // namespace specmodel
