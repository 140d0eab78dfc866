// What this card can do: the roofs that the kernels and the points are held against.
#pragma once

#include <memory>
#include <vector>

#include "bench.hpp"

namespace specmodel {

double copy_bytes_per_ms(Device& device, std::size_t bytes);  // device to device, read plus written
double gemm_flops_per_ms(Device& device, int size);           // size^3 in bf16, random data
// Attention over a large cache, and routed experts of which nearly all are touched: bytes that must be read, per ms.
double attention_bytes_per_ms(Device& device, int rows_per_sequence);
double expert_bytes_per_ms(Device& device, int rows);
// Median GPU time of a read of `bytes`, with the L2 cache flushed before each or not.
double read_ms(Device& device, std::size_t bytes, bool flushed);
double event_pair_ms(Device& device);
double empty_graph_ms(Device& device);
struct ProductTimes {
    double tuned_ms = 0;   // with the measured choice of algorithm
    double first_ms = 0;   // with the library's first choice
    double tuned_mhz = 0;  // the SM clock meanwhile; 0 where it was not seen
    double first_mhz = 0;
};
// Single matrix products with cold weights: as many copies in turn as exceed the L2 cache five times. All algorithms
// are chosen at the start, so that samples of two programs can be taken in turn, at the same clocks.
class Products {
public:
    Products(Device& device, const std::vector<GemmShape>& shapes);
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;
    ~Products();
    ProductTimes sample(std::size_t shape);  // one of each kind, each after a rest
    double worst_error() const;

private:
    struct State;
    std::unique_ptr<State> state_;
};
// Loads the GPU steadily, so that its clocks have risen before the first sample.
void warm_up(Device& device, double ms);

}  // namespace specmodel
