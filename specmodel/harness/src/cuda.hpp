// CUDA runtime basics: checked calls, owned device memory, streams, events and graphs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "errors.hpp"

namespace specmodel {

using bf16 = __nv_bfloat16;

inline void check_cuda(cudaError_t status, const char* call) {
    if (status == cudaSuccess) return;
    const std::string text = std::string(call) + ": " + cudaGetErrorString(status);
    if (status == cudaErrorMemoryAllocation) throw Refused("not enough GPU memory: " + text);
    throw CallError(text);
}

#define CUDA_CHECK(call) ::specmodel::check_cuda((call), #call)
// After a kernel launch: a bad launch configuration shows here, a fault at the next synchronisation.
#define LAUNCH_CHECK(kernel) ::specmodel::check_cuda(cudaGetLastError(), "launch of " kernel)

// Asks for the largest shared-memory share of L1 on every multiprocessor, as matrix-product kernels have it: between
// kernels of different shares a multiprocessor must drain and change over.
template <typename Kernel>
void prefer_shared(Kernel* kernel) {
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
}

// Owns device allocations until it goes out of scope.
class Arena {
public:
    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() { clear(); }

    template <typename T>
    T* array(std::size_t count) {
        void* block = nullptr;
        const std::size_t bytes = count * sizeof(T) + 256;  // room for a vector access that starts at the last element
        CUDA_CHECK(cudaMalloc(&block, bytes));
        blocks_.push_back(block);
        bytes_ += bytes;
        return static_cast<T*>(block);
    }

    void clear() {
        for (void* block : blocks_) cudaFree(block);
        blocks_.clear();
        bytes_ = 0;
    }

    std::size_t bytes() const { return bytes_; }

private:
    std::vector<void*> blocks_;
    std::size_t bytes_ = 0;
};

class Event {
public:
    Event() { CUDA_CHECK(cudaEventCreate(&event_)); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    ~Event() { cudaEventDestroy(event_); }
    void record(cudaStream_t stream) { CUDA_CHECK(cudaEventRecord(event_, stream)); }
    cudaEvent_t get() const { return event_; }

private:
    cudaEvent_t event_ = nullptr;
};

inline double between_ms(const Event& first, const Event& second) {
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, first.get(), second.get()));
    return static_cast<double>(ms);
}

// One executable graph, captured from what `enqueue(stream)` launches.
class Graph {
public:
    Graph() = default;
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    Graph(Graph&& other) noexcept : exec_(std::exchange(other.exec_, nullptr)), nodes_(other.nodes_) {}
    Graph& operator=(Graph&& other) noexcept {
        std::swap(exec_, other.exec_);
        std::swap(nodes_, other.nodes_);
        return *this;
    }
    ~Graph() {
        if (exec_) cudaGraphExecDestroy(exec_);
    }

    // Thread-local capture: another thread (the watchdog, NCCL's proxy) may call the runtime meanwhile.
    template <typename Enqueue>
    static Graph capture(cudaStream_t stream, Enqueue&& enqueue) {
        cudaGraph_t graph = nullptr;
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        try {
            enqueue();
        } catch (...) {  // end the capture, then report what broke it
            cudaStreamEndCapture(stream, &graph);
            if (graph) cudaGraphDestroy(graph);
            throw;
        }
        CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
        Graph result;
        CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &result.nodes_));
        const cudaError_t status = cudaGraphInstantiate(&result.exec_, graph, 0);
        cudaGraphDestroy(graph);
        CUDA_CHECK(status);
        CUDA_CHECK(cudaGraphUpload(result.exec_, stream));
        return result;
    }

    void launch(cudaStream_t stream) const { CUDA_CHECK(cudaGraphLaunch(exec_, stream)); }
    std::size_t nodes() const { return nodes_; }
    explicit operator bool() const { return exec_ != nullptr; }

private:
    cudaGraphExec_t exec_ = nullptr;
    std::size_t nodes_ = 0;
};

}  // namespace specmodel
