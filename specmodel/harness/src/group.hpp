// The ranks of one run on one host: where they meet, wait for each other and exchange samples. One process, one GPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace specmodel {

class HostGroup {
public:
    // `directory` is private to the run and empty at the start; unused with one rank. Throws Timeout if the ranks do
    // not meet.
    HostGroup(int rank, int world, const std::string& directory, double timeout_ms);
    HostGroup(const HostGroup&) = delete;
    HostGroup& operator=(const HostGroup&) = delete;
    ~HostGroup();

    int rank() const { return rank_; }
    int world() const { return world_; }
    void barrier();
    // [rank][i]: everybody's values, which must be equally many on every rank.
    std::vector<std::vector<double>> gather(const std::vector<double>& mine);
    // Rank 0's bytes (at most 4096), for every rank.
    void broadcast(void* data, std::size_t bytes);
    // True on every rank if it is on rank 0 / on all ranks.
    bool decide(bool on_rank_zero);
    bool all(bool mine);

    // The flag that opens the gates of all ranks: one word, shared, page-aligned.
    void* gate_page() const { return base_; }
    std::size_t gate_bytes() const { return 4096; }
    void open_gate(std::uint32_t ticket);

private:
    struct Header;
    int rank_;
    int world_;
    double timeout_ms_;
    void* base_ = nullptr;
    std::size_t bytes_ = 0;

    Header& header() const;
    double* slot(int rank) const;
    void meet(const std::string& directory);
};

}  // namespace specmodel
