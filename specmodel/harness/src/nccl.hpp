// NCCL, loaded at run time: the binary builds and runs without it on one GPU. Only what is used of its stable C
// interface.
#pragma once

#include <string>

#include "cuda.hpp"
#include "group.hpp"

namespace specmodel {

class Comm {
public:
    // Sets nothing in the environment; refuses NVLS unless allowed (PROTOCOL.md). `name` tells the communicators of a
    // run apart: one for captured work and one for direct calls, since mixing both on one costs ordering nodes in the
    // graph.
    Comm(const std::string& name, const std::string& library, const std::string& directory, HostGroup& group,
         bool allow_nvls);
    Comm(const Comm&) = delete;
    Comm& operator=(const Comm&) = delete;
    ~Comm();

    void all_reduce(const bf16* in, bf16* out, std::size_t count, cudaStream_t stream);
    void all_gather(const std::uint64_t* in, std::uint64_t* out, std::size_t count, cudaStream_t stream);
    // Throws CallError with NCCL's words if a collective failed in the background.
    void check_async();
    std::string version() const;

private:
    struct Api;
    Api* api_ = nullptr;
    void* comm_ = nullptr;

    void check(int status, const char* call) const;
};

}  // namespace specmodel
