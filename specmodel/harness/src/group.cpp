#include "group.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <thread>

#include "errors.hpp"
#include "timing.hpp"

namespace specmodel {
namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t slot_values = 16384;  // of one rank in one exchange

}  // namespace

// First page: the gate's flag. Second page: barrier and broadcast. Then one slot of values for each rank.
struct HostGroup::Header {
    std::atomic<std::uint32_t> arrived;
    std::atomic<std::uint32_t> generation;
    unsigned char message[page];
};

HostGroup::Header& HostGroup::header() const {
    return *reinterpret_cast<Header*>(static_cast<unsigned char*>(base_) + page);
}

double* HostGroup::slot(int rank) const {
    return reinterpret_cast<double*>(static_cast<unsigned char*>(base_) + 4 * page) +
           static_cast<std::size_t>(rank) * slot_values;
}

HostGroup::HostGroup(int rank, int world, const std::string& directory, double timeout_ms)
    : rank_(rank),
      world_(world),
      timeout_ms_(timeout_ms),
      bytes_(4 * page + static_cast<std::size_t>(world) * slot_values * sizeof(double)) {
    if (world == 1) {
        base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (base_ == MAP_FAILED) throw CallError("cannot map memory for the start flag");
        return;
    }
    meet(directory);
}

// The shared block is POSIX shared memory (a driver pins no pages of an ordinary file); rank 0 chooses its name and
// writes it to DIRECTORY/shared. Once all have mapped it the name is removed, so that nothing stays behind.
void HostGroup::meet(const std::string& directory) {
    const std::string where = directory + "/shared";
    std::string name;
    int file = -1;
    if (rank_ == 0) {
        name = "/specmodel-" + std::to_string(std::random_device{}()) + "-" + std::to_string(getpid());
        file = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
        if (file < 0 || ftruncate(file, static_cast<off_t>(bytes_)) != 0)
            throw CallError("cannot create shared memory for the ranks");
        std::ofstream(where + ".new") << name << '\n';
        if (std::rename((where + ".new").c_str(), where.c_str()) != 0)
            throw CallError("cannot write to the rendezvous directory");
    } else {
        const Stopwatch waiting;
        while (true) {
            std::ifstream in(where);
            if (in && std::getline(in, name) && !name.empty()) break;
            if (waiting.ms() > timeout_ms_) throw Timeout("rank 0 did not come to the rendezvous directory");
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
        file = shm_open(name.c_str(), O_RDWR, 0600);
        if (file < 0) throw CallError("cannot open the ranks' shared memory");
    }
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (base_ == MAP_FAILED) throw CallError("cannot map the ranks' shared memory");
    barrier();
    if (rank_ == 0) shm_unlink(name.c_str());
}

HostGroup::~HostGroup() {
    if (base_ && base_ != MAP_FAILED) munmap(base_, bytes_);
}

void HostGroup::barrier() {
    if (world_ == 1) return;
    Header& h = header();
    const std::uint32_t generation = h.generation.load(std::memory_order_acquire);
    if (h.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<std::uint32_t>(world_)) {
        h.arrived.store(0, std::memory_order_relaxed);
        h.generation.fetch_add(1, std::memory_order_release);
        return;
    }
    const Stopwatch waiting;
    for (std::uint64_t spins = 0; h.generation.load(std::memory_order_acquire) == generation; ++spins)
        if (spins % 65536 == 0 && waiting.ms() > timeout_ms_) throw Timeout("the ranks did not meet at a barrier");
}

std::vector<std::vector<double>> HostGroup::gather(const std::vector<double>& mine) {
    if (world_ == 1) return {mine};
    std::vector<std::vector<double>> all(static_cast<std::size_t>(world_));
    for (std::size_t done = 0; done < mine.size() || done == 0; done += slot_values) {
        const std::size_t count = std::min(slot_values, mine.size() - done);
        std::memcpy(slot(rank_), mine.data() + done, count * sizeof(double));
        barrier();
        for (int r = 0; r < world_; ++r)
            all[static_cast<std::size_t>(r)].insert(all[static_cast<std::size_t>(r)].end(), slot(r), slot(r) + count);
        barrier();
    }
    return all;
}

void HostGroup::broadcast(void* data, std::size_t bytes) {
    if (world_ == 1) return;
    if (bytes > page) throw CallError("a broadcast larger than a page");
    if (rank_ == 0) std::memcpy(header().message, data, bytes);
    barrier();
    std::memcpy(data, header().message, bytes);
    barrier();
}

bool HostGroup::decide(bool on_rank_zero) {
    broadcast(&on_rank_zero, sizeof on_rank_zero);
    return on_rank_zero;
}

bool HostGroup::all(bool mine) {
    for (const auto& rank : gather({mine ? 1.0 : 0.0}))
        if (rank.front() == 0.0) return false;
    return true;
}

void HostGroup::open_gate(std::uint32_t ticket) {
    barrier();
    if (rank_ == 0)
        std::atomic_ref<std::uint32_t>(*static_cast<std::uint32_t*>(base_)).store(ticket, std::memory_order_release);
}

}  // namespace specmodel
