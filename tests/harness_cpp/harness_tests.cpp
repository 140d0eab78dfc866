// CPU tests of the harness's plain C++: statistics, dispositions, JSON, jobs, the ranks' meeting place. Exits 0 when
// all pass.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>

#include "group.hpp"
#include "job.hpp"
#include "json.hpp"
#include "stats.hpp"

namespace {

using namespace specmodel;

int failures = 0;
int checks = 0;

void expect(bool holds, const std::string& what) {
    ++checks;
    if (holds) return;
    ++failures;
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

void expect_near(double value, double expected, double tolerance, const std::string& what) {
    expect(std::fabs(value - expected) <= tolerance,
           what + ": " + std::to_string(value) + ", expected " + std::to_string(expected));
}

template <typename Error>
void expect_error(const std::function<void()>& action, const std::string& words) {
    try {
        action();
    } catch (const Error& e) {
        expect(std::string(e.what()).find(words) != std::string::npos,
               "the error says '" + words + "', but was: " + e.what());
        return;
    }
    expect(false, "no error that says '" + words + "'");
}

void test_quantiles() {
    expect_near(quantile({1, 2, 3, 4}, 0.5), 2.5, 1e-12, "median of four");
    expect_near(quantile({1, 2, 3, 4, 5}, 0.25), 2, 1e-12, "first quartile of five");
    expect_near(quantile({7}, 0.9), 7, 0, "quantile of one");
    expect(std::isnan(quantile({}, 0.5)), "no quantile of nothing");
}

// Ranks from tables of the binomial distribution (Conover, Practical Nonparametric Statistics): n = 6 is the first with
// a 95 % interval.
void test_interval_ranks() {
    const std::size_t expected[][2] = {{1, 0},  {5, 0},  {6, 1},   {8, 1},   {9, 2},
                                       {12, 3}, {20, 6}, {30, 10}, {50, 18}, {100, 40}};
    for (const auto& [n, rank] : expected)
        expect(median_interval_rank(n) == rank,
               "rank for " + std::to_string(n) + " is " + std::to_string(median_interval_rank(n)));
    for (std::size_t n = 6; n < 3000; n += 37) {
        const double normal = 0.5 * (static_cast<double>(n) - 1.96 * std::sqrt(static_cast<double>(n)));
        expect_near(static_cast<double>(median_interval_rank(n)), normal, 1.6,
                    "rank near the normal approximation, n = " + std::to_string(n));
    }
}

// The interval must cover the true median in at least 95 % of samples, whatever the distribution: here skewed and
// bimodal.
void test_coverage() {
    std::mt19937_64 generator(1);
    std::lognormal_distribution<double> skewed(0.0, 1.0);
    std::bernoulli_distribution slow(0.2);
    int covered = 0;
    int covered_bimodal = 0;
    constexpr int trials = 4000;
    // The bimodal median: four in five samples are below 2, so it is the 0.625 quantile of the first mode.
    std::vector<double> mode;
    for (int i = 0; i < 400000; ++i) mode.push_back(skewed(generator));
    std::sort(mode.begin(), mode.end());
    const double bimodal_median = quantile(mode, 0.625);
    for (int t = 0; t < trials; ++t) {
        std::vector<double> a;
        std::vector<double> b;
        for (int i = 0; i < 31; ++i) {
            a.push_back(skewed(generator));
            b.push_back(slow(generator) ? 1000 + skewed(generator) : skewed(generator));
        }
        const Summary sa = summarize(a);
        const Summary sb = summarize(b);
        covered += sa.low <= 1.0 && 1.0 <= sa.high;
        covered_bimodal += sb.low <= bimodal_median && bimodal_median <= sb.high;
    }
    expect(covered >= 0.945 * trials,
           "coverage of a skewed median: " + std::to_string(covered) + " of " + std::to_string(trials));
    expect(covered_bimodal >= 0.945 * trials, "coverage of a bimodal median: " + std::to_string(covered_bimodal));
    expect(covered < 0.99 * trials, "the interval is not needlessly wide");
}

void test_summary() {
    std::vector<double> values;
    for (int i = 100; i >= 1; --i) values.push_back(i);
    const Summary s = summarize(values);
    expect_near(s.median, 50.5, 1e-12, "median");
    expect_near(s.low, 40, 0, "low end");
    expect_near(s.high, 61, 0, "high end");
    expect_near(s.half_width, 10.5, 1e-12, "half-width");
    expect_near(s.p95, 95.05, 1e-9, "p95 of a hundred");
    expect(std::isnan(s.p99), "no p99 under 500 samples");
    expect_near(s.sd, 29.011491975882016, 1e-9, "standard deviation");
    const Summary few = summarize({1, 2, 3});
    expect(std::isinf(few.half_width) && std::isnan(few.p95), "three samples have no interval");
    expect(summarize({}).samples == 0 && std::isnan(summarize({}).median), "nothing has no median");
}

void test_ranks_of_processes() {
    const std::vector<std::vector<double>> ranks{{1, 5, 3}, {2, 4, 3}, {0, 9, 3}};
    expect(max_over_ranks(ranks) == std::vector<double>({2, 9, 3}), "maximum over ranks");
    expect(skew_over_ranks(ranks) == std::vector<double>({2, 5, 0}), "skew over ranks");
    expect_error<std::invalid_argument>([] { max_over_ranks({{1, 2}, {1}}); }, "different numbers");
}

void test_clock_filter() {
    std::vector<double> clocks(20, 1980);
    clocks[3] = 1900;  // 96.0 %
    clocks[7] = 1930;  // 97.5 %
    clocks[9] = 0;     // unknown
    const auto keep = keep_by_clock({clocks}, 20);
    expect(!keep[3] && keep[7] && keep[9] && keep[0], "only the slow sample is dropped");
    expect(kept(clocks, keep).size() == 19, "nineteen are kept");
    const auto both = keep_by_clock({std::vector<double>(20, 1000), clocks}, 20);
    expect(!both[3] && both[4], "a slow clock on any rank drops the sample");
    const auto unknown = keep_by_clock({std::vector<double>(20, 0)}, 20);
    expect(std::count(unknown.begin(), unknown.end(), 1) == 20, "unknown clocks drop nothing");
}

void test_stopping() {
    Limits limits;
    limits.min_samples = 30;
    limits.min_ms = 100;
    limits.max_ms = 1000;
    limits.max_samples = 500;
    Summary s = summarize(std::vector<double>(30, 4.0));
    expect(enough(s, limits, 130), "steady and long enough");
    expect(!enough(summarize(std::vector<double>(29, 4.0)), limits, 130), "too few samples");
    expect(!enough(summarize(std::vector<double>(40, 1.0)), limits, 60), "too short");
    expect(enough(summarize(std::vector<double>(40, 1.0)), limits, 60, 10), "repeats count");
    std::vector<double> wide;
    for (int i = 0; i < 60; ++i) wide.push_back(4.0 + (i % 7) * 0.5);
    expect(!enough(summarize(wide), limits, 300), "not precise");
    expect(enough(summarize(wide), limits, 1000), "the time is up");
    expect(enough(summarize(std::vector<double>(500, 0.0001)), limits, 10), "the samples are up");
    limits.half_width_floor_ms = 2;
    expect(precise(summarize(wide), limits), "the floor counts where it is larger");
}

void test_dispositions() {
    Judgement j;
    j.median_ms = 4;
    j.bound_ms = 3;
    expect(judge(j) == Disposition::ok, "ok");
    j.is_precise = false;
    expect(judge(j) == Disposition::noisy, "noisy");
    j.skew_median_ms = 0.21;
    expect(judge(j) == Disposition::skewed, "skewed before noisy");
    j.skew_median_ms = 0.19;
    expect(judge(j) == Disposition::noisy, "5 % of skew is allowed");
    j.dropped_share = 0.11;
    expect(judge(j) == Disposition::throttled, "throttled");
    j.bound_ms = 4.1;
    expect(judge(j) == Disposition::impossible, "faster than physics");
    j.check_passed = false;
    expect(judge(j) == Disposition::wrong, "wrong before all");
    Judgement small;
    small.median_ms = 0.01;
    small.skew_median_ms = 0.004;
    expect(judge(small) == Disposition::ok, "0.004 ms of skew is no finding");
    expect(judge(Judgement{}) == Disposition::not_run, "no median");
    for (int d = 0; d <= static_cast<int>(Disposition::not_measured); ++d)
        for (int e = 0; e < d; ++e)
            expect(std::string(name_of(static_cast<Disposition>(d))) != name_of(static_cast<Disposition>(e)),
                   "names of dispositions differ");
}

void test_comparison() {
    std::mt19937_64 generator(2);
    std::normal_distribution<double> noise(1.0, 0.002);
    auto sample = [&](double scale) {
        std::vector<double> values;
        for (int i = 0; i < 40; ++i) values.push_back(scale * noise(generator));
        return summarize(values);
    };
    int same = 0;
    for (int i = 0; i < 200; ++i) same += compare(sample(1), sample(1)) == Comparison::same;
    expect(same >= 190, "the same twice is SAME: " + std::to_string(same) + " of 200");
    expect(compare(sample(1), sample(1.05)) == Comparison::slower, "5 % slower");
    expect(compare(sample(1), sample(0.95)) == Comparison::faster, "5 % faster");
    std::normal_distribution<double> wild(1.0, 0.2);
    Summary a = sample(1);
    Summary b = a;
    b.median = 1.03 * a.median;
    b.low = 0.97 * a.median;
    b.high = 1.06 * a.median;
    expect(compare(a, b) == Comparison::ambiguous, "wide and apart is ambiguous");
}

void test_json() {
    const Json j = Json::parse(R"( {"a": [1, -2.5e-3, true, null, "x\n\u00e9\ud83d\ude00"], "b": {"c": {}}} )");
    expect(j.find("a")->items().size() == 5 && j.find("b")->find("c")->is_object(), "structure");
    expect_near(j.find("a")->items()[1].number(), -0.0025, 1e-15, "number");
    expect(j.find("a")->items()[4].text() == "x\n\xc3\xa9\xf0\x9f\x98\x80", "escapes become UTF-8");
    expect(Json::parse(j.dump()).dump() == j.dump(), "what is written is read again");
    expect(Json(not_a_number).dump() == "null" && Json(infinite).dump() == "null", "no NaN in JSON");
    expect(Json(1234567890123.0).dump() == "1234567890123", "whole numbers stay whole");
    for (const char* bad : {"", "{", "[1,]", "{\"a\":1,}", "{\"a\":1,\"a\":2}", "01", "1.", "nul", "[1] 2", "\"\\x\"",
                            "\"\\ud800\"", "{a:1}", "1e999", "[\"\n\"]"})
        expect_error<UsageError>([&] { Json::parse(bad); }, "not JSON");
    std::string deep(100, '[');
    expect_error<UsageError>([&] { Json::parse(deep); }, "nested too deeply");
}

const std::string shape =
    R"("hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256)";

std::string job_text(const std::string& points, const std::string& more = "") {
    return R"({"protocol": "specmodel.harness-job/1", "model": {)" + shape + "}, \"points\": [" + points + "]" + more +
           "}";
}

void test_jobs() {
    const std::string draft =
        R"(, "draft": {"kind": "eagle3", "draft_vocab_size": 32000, "first_step_rows": "accepted", )" + shape +
        R"(}, "conditional": [0.8, 0.7])";
    const Job job = parse_job(Json::parse(job_text(
        R"({"key": "v", "kind": "verify", "tokens": 20, "batch": 4, "context_tokens": 1024, "limits": {"min_ms": 5}},
           {"key": "d", "kind": "draft", "num_steps": 3, "context_tokens": 8, "graph_scope": "cycle"},
           {"key": "c", "kind": "cycle", "num_steps": 3, "batch": 2, "context_tokens": 1024, "cycles": 300},
           {"key": "a", "kind": "allreduce", "size_bytes": 32768, "regime": "cold"})",
        draft + R"(, "limits": {"min_samples": 12})")));
    expect(job.points.size() == 4 && job.points[0].limits.min_samples == 12 && job.points[0].limits.min_ms == 5,
           "limits of the job and of the point");
    expect(job.points[1].graph_scope_cycle && job.points[2].tokens == 8 && job.points[3].cold, "points as written");
    expect(job.draft.first_step_accepted && job.draft.draft_vocab_size == 32000, "draft as written");
    expect(job.points[0].described.find("tokens") && !job.points[0].described.find("limits"),
           "a record repeats the point without limits");
    const std::string verify = R"({"key": "v", "kind": "verify", "tokens": 4, "context_tokens": 8)";
    expect_error<UsageError>([&] { parse_job(Json::parse(job_text(verify + R"(, "contexts": 1})"))); },
                             "unknown key 'contexts'");
    expect_error<UsageError>([&] { parse_job(Json::parse(job_text(verify + R"(, "batch": 3})"))); },
                             "multiple of batch");
    expect_error<UsageError>([&] { parse_job(Json::parse(job_text(verify + R"(, "part": "half"})"))); },
                             "one of all, compute, comm");
    expect_error<UsageError>([&] { parse_job(Json::parse(job_text(verify + "}, " + verify + "}"))); }, "two points");
    expect_error<UsageError>(
        [&] {
            parse_job(Json::parse(job_text(R"({"key": "d", "kind": "draft", "num_steps": 1, "context_tokens": 8})")));
        },
        "no 'draft'");
    expect_error<UsageError>(
        [&] {
            parse_job(Json::parse(
                job_text(R"({"key": "c", "kind": "cycle", "num_steps": 0, "context_tokens": 1024, "cycles": 50})")));
        },
        "'cycles'");
    expect_error<UsageError>([&] { parse_job(Json::parse(R"({"protocol": "specmodel.harness-job/2"})")); },
                             "harness-job/1");
    expect_error<UsageError>([&] { parse_job(Json::parse(job_text("", R"(, "seeds": 1)"))); }, "unknown key 'seeds'");
    expect_error<UsageError>([&] { parse_job(Json::parse(job_text("", R"(, "conditional": [1.5])"))); },
                             "no probability");
}

void test_shapes() {
    ModelShape s;
    s.hidden_size = 4096;
    s.intermediate_size = 14336;
    s.num_layers = 32;
    s.num_attention_heads = 32;
    s.num_key_value_heads = 8;
    s.head_dim = 128;
    s.vocab_size = 128256;
    for (int world : {1, 2, 4, 8, 16}) check_shape(s, world, "model");
    auto refused = [&](auto change, int world, const std::string& words) {
        ModelShape other = s;
        change(other);
        expect_error<Refused>([&] { check_shape(other, world, "model"); }, words);
    };
    refused([](ModelShape& m) { m.head_dim = 96; }, 1, "head_dim 96");
    refused([](ModelShape& m) { m.intermediate_size = 14300; }, 1, "multiple of 64");
    refused([](ModelShape&) {}, 3, "ranks");
    refused([](ModelShape& m) { m.vocab_size = 128257; }, 1, "vocab_size");
    refused([](ModelShape& m) { m.num_experts = 128; }, 1, "experts_per_token");
    refused(
        [](ModelShape& m) {
            m.num_experts = 128;
            m.experts_per_token = 8;
            m.moe_intermediate_size = 768;
        },
        8, "moe_intermediate_size 768 over 8");
    refused([](ModelShape& m) { m.hidden_size = 4100; }, 1, "hidden_size 4100");
}

// Three processes meet, exchange values and agree, as the ranks of a run do.
void test_group() {
    char directory[] = "/tmp/specmodel-test-XXXXXX";
    if (!mkdtemp(directory)) {
        expect(false, "a temporary directory");
        return;
    }
    constexpr int world = 3;
    auto rank_passes = [&](int rank) {
        HostGroup group(rank, world, directory, 20000);
        for (int round = 0; round < 200; ++round) {
            std::vector<double> mine(static_cast<std::size_t>(round % 5), rank + 10.0 * round);
            const auto all = group.gather(mine);
            for (int r = 0; r < world; ++r)
                for (double v : all[static_cast<std::size_t>(r)])
                    if (v != r + 10.0 * round || all[static_cast<std::size_t>(r)].size() != mine.size()) return false;
            double said = rank == 0 ? 7.0 + round : -1.0;
            group.broadcast(&said, sizeof said);
            if (said != 7.0 + round || group.decide(rank == 0 && round % 2 == 0) != (round % 2 == 0)) return false;
            if (group.all(rank != round % 4) != (round % 4 == 3)) return false;
        }
        const std::vector<double> large(40000, rank);
        return group.gather(large)[2].back() == 2.0;
    };
    std::vector<pid_t> children;
    for (int rank = 1; rank < world; ++rank) {
        const pid_t child = fork();
        if (child == 0) {
            bool passed = false;
            try {
                passed = rank_passes(rank);
            } catch (const std::exception& e) {
                std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
            }
            _exit(passed ? 0 : 1);
        }
        children.push_back(child);
    }
    expect(rank_passes(0), "rank 0 of the group");
    for (pid_t child : children) {
        int status = 1;
        waitpid(child, &status, 0);
        expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "another rank of the group");
    }
    unlink((std::string(directory) + "/shared").c_str());
    rmdir(directory);
    char empty[] = "/tmp/specmodel-test-XXXXXX";
    if (mkdtemp(empty)) {
        expect_error<Timeout>([&] { HostGroup(1, 2, empty, 50); }, "rank 0 did not come");
        rmdir(empty);
    }
}

}  // namespace

int main() {
    test_quantiles();
    test_interval_ranks();
    test_coverage();
    test_summary();
    test_ranks_of_processes();
    test_clock_filter();
    test_stopping();
    test_dispositions();
    test_comparison();
    test_json();
    test_jobs();
    test_shapes();
    test_group();
    std::printf("%d passed, %d failed\n", checks - failures, failures);
    return failures == 0 ? 0 : 1;
}
