// Is the result right? Sampled checks at full size on the GPU, and small problems against an fp32 reference on the CPU.
#pragma once

#include <string>
#include <vector>

#include "cuda.hpp"

namespace specmodel {

// The largest |y - x w^T| at sampled places, relative to the product or to the root mean square of all of them,
// whichever is larger; infinite if one is not finite.
double product_error(const bf16* x, const bf16* w, const bf16* y, int rows, int outer, int inner, cudaStream_t stream);

// ||a - b|| / ||b||; infinite if a or b has a value that is not finite, or the sizes differ.
double relative_error(const std::vector<float>& a, const std::vector<float>& b);
std::vector<float> download(const bf16* from, std::size_t count);

struct CheckResult {
    std::string name;
    double max_relative_error = 0;
    double limit = 0.02;  // bf16 against fp32 over a few layers
    bool passed() const { return max_relative_error <= limit; }
};

class Comm;
class Device;
class HostGroup;
// Small problems of every kind that the kernels distinguish. On the device's current GPU, alone.
std::vector<CheckResult> run_checks(Device& device);
// Collective: a small model sliced over the ranks against the whole one on every rank.
std::vector<CheckResult> run_parallel_checks(Device& device, HostGroup& group, Comm& comm);

}  // namespace specmodel
