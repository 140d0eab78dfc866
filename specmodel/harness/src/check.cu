#include <cmath>
#include <limits>

#include "check.hpp"
#include "device_helpers.cuh"

namespace specmodel {
namespace {

constexpr int sampled = 256;

// One warp per sampled element: the exact product of the stored bf16 numbers, in fp32.
__global__ void product_error_kernel(float* out, const bf16* x, const bf16* w, const bf16* y, int rows, int outer,
                                     int inner) {
    const int sample = blockIdx.x;
    const std::size_t row = static_cast<std::size_t>(sample) * 2654435761U % rows;
    const std::size_t column = static_cast<std::size_t>(sample) * 40503U * 7919U % outer;
    float sum = 0;
    for (int i = threadIdx.x; i < inner; i += 32)
        sum += __bfloat162float(x[row * inner + i]) * __bfloat162float(w[column * inner + i]);
    sum = warp_sum(sum);
    if (threadIdx.x == 0) {
        out[2 * sample] = sum;
        out[2 * sample + 1] = __bfloat162float(y[row * outer + column]);
    }
}

}  // namespace

double product_error(const bf16* x, const bf16* w, const bf16* y, int rows, int outer, int inner, cudaStream_t stream) {
    Arena arena;
    auto* pairs = arena.array<float>(2 * sampled);
    product_error_kernel<<<sampled, 32, 0, stream>>>(pairs, x, w, y, rows, outer, inner);
    LAUNCH_CHECK("product_error");
    std::vector<float> host(2 * sampled);
    CUDA_CHECK(cudaMemcpyAsync(host.data(), pairs, host.size() * sizeof(float), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    double squares = 0;
    double worst = 0;
    for (int i = 0; i < sampled; ++i) {
        const double exact = host[2 * static_cast<std::size_t>(i)];
        const double stored = host[2 * static_cast<std::size_t>(i) + 1];
        if (!std::isfinite(exact) || !std::isfinite(stored)) return std::numeric_limits<double>::infinity();
        squares += exact * exact;
    }
    const double typical = std::sqrt(squares / sampled);
    for (std::size_t i = 0; i < host.size(); i += 2)
        worst = std::max(worst, std::fabs(static_cast<double>(host[i]) - host[i + 1]) /
                                    std::max(std::fabs(static_cast<double>(host[i])), typical));
    return typical > 0 ? worst : std::numeric_limits<double>::infinity();
}

double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
    double difference = 0;
    double size = 0;
    if (a.size() != b.size() || a.empty()) return std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < a.size(); ++i) {
        difference += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
        size += static_cast<double>(b[i]) * b[i];
    }
    const double error = std::sqrt(difference / size);
    return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

std::vector<float> download(const bf16* from, std::size_t count) {
    std::vector<std::uint16_t> raw(count);
    CUDA_CHECK(cudaMemcpy(raw.data(), from, count * sizeof(bf16), cudaMemcpyDeviceToHost));
    std::vector<float> out(count);
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t bits = static_cast<std::uint32_t>(raw[i]) << 16U;
        __builtin_memcpy(&out[i], &bits, sizeof bits);
    }
    return out;
}

}  // namespace specmodel
