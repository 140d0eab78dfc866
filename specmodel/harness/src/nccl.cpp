#include "nccl.hpp"

#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace specmodel {
namespace {

struct UniqueId {
    char internal[128];
};
// Values of ncclDataType_t and ncclRedOp_t in nccl.h, fixed since NCCL 2.10.
constexpr int type_bf16 = 9;
constexpr int type_uint64 = 5;
constexpr int op_sum = 0;
constexpr int in_progress = 7;

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value ? value : "";
}

}  // namespace

struct Comm::Api {
    void* library = nullptr;
    int (*get_version)(int*) = nullptr;
    int (*get_unique_id)(UniqueId*) = nullptr;
    int (*comm_init_rank)(void**, int, UniqueId, int) = nullptr;
    int (*comm_destroy)(void*) = nullptr;
    int (*comm_get_async_error)(void*, int*) = nullptr;
    int (*all_reduce)(const void*, void*, std::size_t, int, int, void*, cudaStream_t) = nullptr;
    int (*all_gather)(const void*, void*, std::size_t, int, void*, cudaStream_t) = nullptr;
    const char* (*get_error_string)(int) = nullptr;
    const char* (*get_last_error)(void*) = nullptr;

    template <typename F>
    void find(F& function, const char* name) {
        function = reinterpret_cast<F>(dlsym(library, name));
        if (!function) throw Refused(std::string("the NCCL library has no ") + name);
    }

    explicit Api(const std::string& path) : library(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
        if (!library) throw Refused("NCCL cannot be loaded: " + std::string(dlerror()));
        find(get_version, "ncclGetVersion");
        find(get_unique_id, "ncclGetUniqueId");
        find(comm_init_rank, "ncclCommInitRank");
        find(comm_destroy, "ncclCommDestroy");
        find(comm_get_async_error, "ncclCommGetAsyncError");
        find(all_reduce, "ncclAllReduce");
        find(all_gather, "ncclAllGather");
        find(get_error_string, "ncclGetErrorString");
        find(get_last_error, "ncclGetLastError");
    }
};

Comm::Comm(const std::string& name, const std::string& library, const std::string& directory, HostGroup& group,
           bool allow_nvls) {
    const bool asks_for_nvls = environment("NCCL_ALGO").find("NVLS") != std::string::npos;
    if (!allow_nvls && (environment("NCCL_NVLS_ENABLE") != "0" || asks_for_nvls))
        throw Refused(
            "NVLS is refused unless the job allows it: set NCCL_NVLS_ENABLE=0 and name no NVLS algorithm in NCCL_ALGO");
    api_ = new Api(library);
    const std::string where = directory + "/nccl_id-" + name;
    UniqueId id{};
    if (group.rank() == 0) {
        check(api_->get_unique_id(&id), "ncclGetUniqueId");
        std::ofstream(where + ".new", std::ios::binary).write(id.internal, sizeof id.internal);
        if (std::rename((where + ".new").c_str(), where.c_str()) != 0)
            throw CallError("cannot write to the rendezvous directory");
    }
    group.barrier();
    if (group.rank() != 0) {
        std::ifstream file(where, std::ios::binary);
        if (!file.read(id.internal, sizeof id.internal)) throw CallError("cannot read the ncclUniqueId");
    }
    check(api_->comm_init_rank(&comm_, group.world(), id, group.rank()), "ncclCommInitRank");
    group.barrier();
}

Comm::~Comm() {
    if (comm_ && api_) api_->comm_destroy(comm_);
    delete api_;  // the library stays loaded: its threads may still be ending
}

void Comm::check(int status, const char* call) const {
    if (status == 0 || status == in_progress) return;
    std::string text = std::string(call) + ": " + api_->get_error_string(status);
    if (const char* last = api_->get_last_error(comm_); last && *last) text += " (" + std::string(last) + ")";
    // A setting that this machine cannot satisfy: NCCL 2.24 and later fail instead of falling back, some only at the
    // first call.
    constexpr int invalid_usage = 5;
    if (std::strcmp(call, "ncclCommInitRank") == 0 || status == invalid_usage)
        throw Refused("this NCCL setting does not start: " + text);
    throw CallError(text);
}

void Comm::all_reduce(const bf16* in, bf16* out, std::size_t count, cudaStream_t stream) {
    check(api_->all_reduce(in, out, count, type_bf16, op_sum, comm_, stream), "ncclAllReduce");
}

void Comm::all_gather(const std::uint64_t* in, std::uint64_t* out, std::size_t count, cudaStream_t stream) {
    check(api_->all_gather(in, out, count, type_uint64, comm_, stream), "ncclAllGather");
}

void Comm::check_async() {
    int status = 0;
    check(api_->comm_get_async_error(comm_, &status), "ncclCommGetAsyncError");
    check(status, "a collective");
}

std::string Comm::version() const {
    int v = 0;
    check(api_->get_version(&v), "ncclGetVersion");
    return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
}

}  // namespace specmodel
