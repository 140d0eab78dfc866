// Matrix products through cuBLASLt, with the algorithm chosen by measurement on cold weights.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda.hpp"

namespace specmodel {

// y [rows, outer] = x [rows, inner] * w [outer, inner]^T, bf16 in and out, fp32 accumulation.
struct GemmShape {
    int rows = 0;
    int outer = 0;
    int inner = 0;
    auto operator<=>(const GemmShape&) const = default;
};

struct GemmOptions {
    std::string cache_path;  // empty: none
    bool may_write = true;   // the cache file
    // Given rank 0's choice, makes it everyone's; empty with one rank.
    std::function<void(void*, std::size_t)> share;
    bool tune = true;  // false: the library's first choice
};

class Gemm {
public:
    Gemm(cudaStream_t stream, GemmOptions options);
    Gemm(const Gemm&) = delete;
    Gemm& operator=(const Gemm&) = delete;
    ~Gemm();

    // Chooses the algorithm for a shape (once), trying the library's candidates on `weights` in turn, so that each use
    // finds its weights cold when together they exceed the L2 cache.
    void prepare(const GemmShape& shape, const bf16* x, bf16* y, const std::vector<const bf16*>& weights);
    void run(const GemmShape& shape, const bf16* x, const bf16* w, bf16* y, cudaStream_t stream);
    // The library's own first choice instead of the measured one: equal conditions with other users of the library.
    void use_first_choice(bool first) { first_choice_ = first; }

    // The largest error of any prepared shape against fp32 dot products at sampled places (check.hpp).
    double worst_error() const { return worst_error_; }

    static std::string version();

private:
    struct Layouts;
    struct Choice {
        cublasLtMatmulAlgo_t best{};
        cublasLtMatmulAlgo_t first{};
        std::shared_ptr<Layouts> layouts;
    };

    cudaStream_t stream_;
    GemmOptions options_;
    cublasLtHandle_t handle_ = nullptr;
    cublasLtMatmulDesc_t operation_ = nullptr;
    Arena arena_;
    void* workspace_ = nullptr;
    bool first_choice_ = false;
    double worst_error_ = 0;
    std::string cache_tag_;
    std::map<GemmShape, Choice> choices_;
    std::map<GemmShape, std::string> cached_;  // hexadecimal, from the file

    std::vector<cublasLtMatmulAlgo_t> candidates(const Layouts& layouts);
    bool usable(const cublasLtMatmulAlgo_t& algorithm, const Layouts& layouts);
    // Upper quartile of `replays` replays of a graph of products: an algorithm that is fast only now and then does not
    // win.
    double time_ms(const cublasLtMatmulAlgo_t& algorithm, const Layouts& layouts, const bf16* x, bf16* y,
                   const std::vector<const bf16*>& weights, int repeats, int replays);
    void launch(const cublasLtMatmulAlgo_t& algorithm, const Layouts& layouts, const bf16* x, const bf16* w, bf16* y,
                cudaStream_t stream);
    void read_cache();
    void write_cache(const GemmShape& shape, const cublasLtMatmulAlgo_t& algorithm);
};

}  // namespace specmodel
