// The statistics of a measured point. Plain C++: tested on the CPU by tests/harness_cpp.
//
// The estimate is the median, its uncertainty the distribution-free 95 % interval from order statistics: samples of a
// GPU are skewed and bimodal, so a mean and a normal interval would promise what they do not hold.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace specmodel {

inline constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
inline constexpr double infinite = std::numeric_limits<double>::infinity();

// Quantile by linear interpolation between order statistics (Hyndman and Fan, type 7) of sorted values.
inline double quantile(const std::vector<double>& sorted, double p) {
    if (sorted.empty()) return not_a_number;
    double position = p * static_cast<double>(sorted.size() - 1);
    auto low = static_cast<std::size_t>(position);
    std::size_t high = std::min(low + 1, sorted.size() - 1);
    double share = position - static_cast<double>(low);
    return sorted[low] + share * (sorted[high] - sorted[low]);
}

// The largest r such that [x_(r), x_(n+1-r)] (order statistics, from 1) covers the median with at least `level`;
// 0 when n is too small for any: P(B <= r-1) <= (1-level)/2 with B ~ Binomial(n, 1/2).
inline std::size_t median_interval_rank(std::size_t n, double level = 0.95) {
    const double tail = 0.5 * (1.0 - level);
    const double log_half = std::log(0.5);
    const auto count = static_cast<double>(n);
    double below = 0.0;
    std::size_t rank = 0;
    for (std::size_t k = 0; 2 * k < n; ++k) {
        const auto i = static_cast<double>(k);
        below += std::exp(std::lgamma(count + 1) - std::lgamma(i + 1) - std::lgamma(count - i + 1) + count * log_half);
        if (below > tail) break;
        rank = k + 1;
    }
    return rank;
}

struct Summary {
    std::size_t samples = 0;
    double median = not_a_number;
    double low = not_a_number;  // 95 % interval of the median
    double high = not_a_number;
    double half_width = infinite;  // (high - low) / 2; infinite under 6 samples
    double q1 = not_a_number;
    double q3 = not_a_number;
    double sd = not_a_number;
    double cv = not_a_number;
    double p95 = not_a_number;  // only with at least 100 samples
    double p99 = not_a_number;  // only with at least 500 samples
    double total = 0.0;
};

inline Summary summarize(std::vector<double> values) {
    Summary s;
    s.samples = values.size();
    if (values.empty()) return s;
    std::sort(values.begin(), values.end());
    for (double v : values) s.total += v;
    const auto n = static_cast<double>(values.size());
    const double mean = s.total / n;
    double squares = 0.0;
    for (double v : values) squares += (v - mean) * (v - mean);
    s.median = quantile(values, 0.5);
    s.q1 = quantile(values, 0.25);
    s.q3 = quantile(values, 0.75);
    if (values.size() > 1) {
        s.sd = std::sqrt(squares / (n - 1));
        s.cv = s.sd / mean;
    }
    if (values.size() >= 100) s.p95 = quantile(values, 0.95);
    if (values.size() >= 500) s.p99 = quantile(values, 0.99);
    if (std::size_t rank = median_interval_rank(values.size()); rank > 0) {
        s.low = values[rank - 1];
        s.high = values[values.size() - rank];
        s.half_width = 0.5 * (s.high - s.low);
    }
    return s;
}

// Sample by sample, the slowest rank: a collective step is done when the last rank is.
inline std::vector<double> max_over_ranks(const std::vector<std::vector<double>>& ranks) {
    if (ranks.empty()) return {};
    std::vector<double> slowest = ranks.front();
    for (const auto& rank : ranks) {
        if (rank.size() != slowest.size()) throw std::invalid_argument("the ranks have different numbers of samples");
        for (std::size_t i = 0; i < rank.size(); ++i) slowest[i] = std::max(slowest[i], rank[i]);
    }
    return slowest;
}

// Sample by sample, slowest minus fastest rank. Ranks leave a collective together, so this is how far apart they began.
inline std::vector<double> skew_over_ranks(const std::vector<std::vector<double>>& ranks) {
    std::vector<double> skew = max_over_ranks(ranks);
    for (std::size_t i = 0; i < skew.size(); ++i) {
        double fastest = infinite;
        for (const auto& rank : ranks) fastest = std::min(fastest, rank[i]);
        skew[i] -= fastest;
    }
    return skew;
}

// Which samples ran at full clock: on every rank at least `fraction` of that rank's median clock.
// A clock that could not be read (0 or NaN) drops nothing.
inline std::vector<char> keep_by_clock(const std::vector<std::vector<double>>& clocks_mhz, std::size_t count,
                                       double fraction = 0.97) {
    std::vector<char> keep(count, 1);
    for (const auto& rank : clocks_mhz) {
        std::vector<double> known;
        for (double clock : rank)
            if (clock > 0) known.push_back(clock);
        if (known.size() < 3) continue;
        std::sort(known.begin(), known.end());
        const double least = fraction * quantile(known, 0.5);
        for (std::size_t i = 0; i < std::min(count, rank.size()); ++i)
            if (rank[i] > 0 && rank[i] < least) keep[i] = 0;
    }
    return keep;
}

inline std::vector<double> kept(const std::vector<double>& values, const std::vector<char>& keep) {
    std::vector<double> out;
    for (std::size_t i = 0; i < values.size(); ++i)
        if (i >= keep.size() || keep[i]) out.push_back(values[i]);
    return out;
}

// When to stop sampling, and what counts as precise enough.
struct Limits {
    int min_samples = 30;
    int max_samples = 2000;
    double min_ms = 500;
    double max_ms = 15000;
    double half_width = 0.005;  // of the median
    double half_width_floor_ms = 0.0002;
    int warmup_samples = 3;
    double warmup_ms = 1000;
    double timeout_ms = 120000;
    double power_share = 0.8;  // pause while the mean power is above this share of the card's limit; 0: never
};

inline bool precise(const Summary& s, const Limits& limits) {
    return s.half_width <= std::max(limits.half_width * s.median, limits.half_width_floor_ms);
}

// `elapsed_ms` is the whole time spent on the series, gaps included; `repeats` operations make one sample of `s`.
inline bool enough(const Summary& s, const Limits& limits, double elapsed_ms, double repeats = 1.0) {
    if (s.samples >= static_cast<std::size_t>(limits.max_samples) || elapsed_ms >= limits.max_ms) return true;
    return s.samples >= static_cast<std::size_t>(limits.min_samples) && s.total * repeats >= limits.min_ms &&
           precise(s, limits);
}

enum class Disposition {
    ok,
    noisy,
    throttled,
    skewed,
    wrong,
    impossible,
    not_supported,
    timeout,
    not_run,
    not_measured
};

inline const char* name_of(Disposition d) {
    switch (d) {
        case Disposition::ok:
            return "ok";
        case Disposition::noisy:
            return "noisy";
        case Disposition::throttled:
            return "throttled";
        case Disposition::skewed:
            return "skewed";
        case Disposition::wrong:
            return "wrong";
        case Disposition::impossible:
            return "impossible";
        case Disposition::not_supported:
            return "not_supported";
        case Disposition::timeout:
            return "timeout";
        case Disposition::not_run:
            return "not_run";
        case Disposition::not_measured:
            return "not_measured";
    }
    return "not_run";
}

// What a point's disposition is judged from.
struct Judgement {
    bool check_passed = true;
    bool is_precise = true;
    double median_ms = 0;
    double bound_ms = 0;       // no machine is faster than this; 0: unknown
    double dropped_share = 0;  // of samples, by clock
    double skew_median_ms = 0;
};

// The gravest fault first: a wrong result is wrong however steady it is.
inline Disposition judge(const Judgement& j) {
    if (!j.check_passed) return Disposition::wrong;
    if (!(j.median_ms > 0)) return Disposition::not_run;
    if (j.median_ms < j.bound_ms) return Disposition::impossible;
    if (j.dropped_share > 0.10) return Disposition::throttled;
    if (j.skew_median_ms > 0.05 * j.median_ms && j.skew_median_ms > 0.005) return Disposition::skewed;
    return j.is_precise ? Disposition::ok : Disposition::noisy;
}

enum class Comparison { same, faster, slower, ambiguous };

// Is b different from a? Different only if the intervals of the medians are apart by more than `tolerance` of a's
// median; the same if the medians are within it; else ambiguous (the samples cannot tell).
inline Comparison compare(const Summary& a, const Summary& b, double tolerance = 0.005) {
    const double margin = tolerance * a.median;
    if (b.low - a.high > margin) return Comparison::slower;
    if (a.low - b.high > margin) return Comparison::faster;
    return std::fabs(b.median - a.median) <= margin ? Comparison::same : Comparison::ambiguous;
}

}  // namespace specmodel
