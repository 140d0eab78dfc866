// specmodel-harness: measures the points of a job on one GPU, or as one rank of several (PROTOCOL.md).
#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

#include "check.hpp"
#include "record.hpp"
#include "roofs.hpp"
#include "selftest.hpp"

namespace specmodel {
namespace {

struct Arguments {
    std::string command;
    std::map<std::string, std::string> options;

    std::string text(const std::string& name, const std::string& otherwise) const {
        const auto found = options.find(name);
        return found == options.end() ? otherwise : found->second;
    }
    std::string required(const std::string& name) const {
        const std::string value = text(name, "");
        if (value.empty()) throw UsageError(command + " needs --" + name);
        return value;
    }
    int integer(const std::string& name, int otherwise) const {
        const std::string value = text(name, "");
        if (value.empty()) return otherwise;
        if (value.size() > 6 || value.find_first_not_of("0123456789") != std::string::npos)
            throw UsageError("--" + name + " must be a whole number, not " + value);
        return std::stoi(value);
    }
};

constexpr const char* usage =
    "specmodel-harness run --job FILE --output FILE [--rank R --world N --rendezvous DIR]\n"
    "specmodel-harness selftest --output FILE [--device D] [--nccl-library FILE] [--rank R --world N --rendezvous "
    "DIR]\n"
    "specmodel-harness check [--device D]\n"
    "specmodel-harness products --shapes ROWSxOUTERxINNER,... [--device D] < LINES\n"
    "specmodel-harness version\n";

Arguments parse_arguments(int count, char** words) {
    static const std::map<std::string, std::string> allowed{
        {"run", " job output rank world rendezvous "},
        {"selftest", " output device nccl-library rank world rendezvous "},
        {"check", " device "},
        {"products", " device shapes "},
        {"version", " "}};
    Arguments a;
    a.command = count > 1 ? words[1] : "";
    const auto known = allowed.find(a.command);
    if (known == allowed.end()) throw UsageError("the first word must be run, selftest, check, products or version");
    for (int i = 2; i < count; i += 2) {
        const std::string word = words[i];
        const std::string name = word.rfind("--", 0) == 0 ? word.substr(2) : "";
        if (name.empty() || known->second.find(" " + name + " ") == std::string::npos)
            throw UsageError("unknown option '" + word + "' of " + a.command);
        if (i + 1 >= count) throw UsageError("option '" + word + "' needs a value");
        a.options[name] = words[i + 1];
    }
    return a;
}

struct Place {
    int rank;
    int world;
    std::string rendezvous;
};

Place place_of(const Arguments& a) {
    Place p{a.integer("rank", 0), a.integer("world", 1), a.text("rendezvous", "")};
    if (p.world < 1 || p.rank < 0 || p.rank >= p.world) throw UsageError("--rank must be below --world");
    if (p.world > 1 && p.rendezvous.empty()) throw UsageError("several ranks need --rendezvous");
    return p;
}

// Stays on the cores next to the GPU; where the system does not say which they are, everywhere.
void pin_to_gpu(const cudaDeviceProp& properties) {
    char path[96];
    std::snprintf(path, sizeof path, "/sys/bus/pci/devices/%04x:%02x:%02x.0/local_cpulist",
                  static_cast<unsigned>(properties.pciDomainID), static_cast<unsigned>(properties.pciBusID),
                  static_cast<unsigned>(properties.pciDeviceID));
    std::ifstream file(path);
    std::string range;
    cpu_set_t set;
    CPU_ZERO(&set);
    while (std::getline(file, range, ',')) {
        int first = 0;
        int last = 0;
        const int read = std::sscanf(range.c_str(), "%d-%d", &first, &last);
        for (int core = first; read > 0 && core <= (read == 2 ? last : first) && core < CPU_SETSIZE; ++core)
            CPU_SET(core, &set);
    }
    if (CPU_COUNT(&set) > 1) sched_setaffinity(0, sizeof set, &set);
}

bool report_checks(const std::vector<CheckResult>& results, Output* output) {
    bool passed = true;
    for (const CheckResult& c : results) {
        passed = passed && c.passed();
        if (output)
            output->write(Json()
                              .set("record", "check")
                              .set("name", c.name)
                              .set("max_relative_error", c.max_relative_error)
                              .set("limit", c.limit)
                              .set("passed", c.passed()));
        else
            std::printf("%-55s %10.5f  %s\n", c.name.c_str(), c.max_relative_error, c.passed() ? "passed" : "FAILED");
    }
    return passed;
}

Job read_job(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw UsageError("cannot read the job file " + path);
    std::ostringstream text;
    text << file.rdbuf();
    return parse_job(Json::parse(text.str()));
}

Json head_of(const Point& p) {
    static constexpr const char* kinds[] = {"verify", "draft", "cycle", "allreduce"};
    Json j;
    j.set("record", "point").set("key", p.key).set("kind", kinds[static_cast<int>(p.kind)]);
    for (const auto& [key, value] : p.described.members()) j.set(key, value);
    return j;
}

int run(const Arguments& a) {
    const Job job = read_job(a.required("job"));
    const Place place = place_of(a);
    Output output(a.required("output"));
    const Stopwatch total;
    std::string key;
    auto fail = [&](const std::string& text, int code) {
        output.write(Json()
                         .set("record", "error")
                         .set("rank", place.rank)
                         .set("key", key.empty() ? Json() : Json(key))
                         .set("text", text));
        output.write(Json().set("record", "end").set("elapsed_ms", total.ms()).set("exit_code", code));
        std::fprintf(stderr, "error %s\n", text.c_str());
        std::fflush(stderr);
        if (place.world > 1) _exit(code);  // the other ranks may never answer a tidy end
        return code;
    };
    try {
        Watchdog watchdog(output, place.rank == 0);
        const double setup_ms = job.limits.timeout_ms + 120000;
        watchdog.begin(setup_ms, Json().set("record", "error").set("text", "the setting up"));
        HostGroup group(place.rank, place.world, place.rendezvous, job.limits.timeout_ms);
        Device device(job.device >= 0 ? job.device : place.rank, group);
        if (place.world > 1) pin_to_gpu(device.properties());
        if (place.rank == 0 && !report_checks(run_checks(device), &output))
            return fail("a small problem differs from its fp32 reference", 1);
        group.barrier();
        const double copy = copy_bytes_per_ms(
            device, std::min<std::size_t>(std::size_t{1} << 30U, device.properties().totalGlobalMem / 16));
        const double rate = gemm_flops_per_ms(device, 4096);
        Bench bench(job, group, device, place.rendezvous);
        bench.copy_bytes_per_ms = copy;
        bench.gemm_flops_per_ms = rate;
        if (bench.eager_comm) {
            const bool sliced = report_checks(run_parallel_checks(device, group, *bench.eager_comm), &output);
            if (!group.all(sliced)) return fail("a small problem sliced over the ranks differs from the whole", 1);
        }
        output.write(start_record(&bench, device, group, job.seed));
        warm_up(device, job.limits.warmup_ms);
        watchdog.end();
        int wrong = 0;
        for (std::size_t i = 0; i < job.points.size(); ++i) {
            const Point& p = job.points[i];
            key = p.key;
            const Stopwatch watch;
            Json record = head_of(p);
            watchdog.begin(p.limits.timeout_ms, record);
            const Json measured = measure_point(bench, p);
            watchdog.end();
            for (const auto& [name, value] : measured.members()) record.set(name, value);
            record.set("elapsed_ms", watch.ms());
            const std::string disposition = record.find("disposition")->text();
            wrong += disposition == "wrong" ? 1 : 0;
            if (place.rank != 0) continue;
            output.write(record);
            double median = not_a_number;
            if (const Json* summary = record.find("summary"))
                median = summary->members().front().second.find("median")->number();
            std::fprintf(stderr, "progress %zu %zu %s %s %.5f %.0f\n", i + 1, job.points.size(), p.key.c_str(),
                         disposition.c_str(), median, watch.ms());
        }
        key.clear();
        const int code = wrong ? 1 : 0;
        output.write(Json()
                         .set("record", "end")
                         .set("points", job.points.size())
                         .set("wrong", wrong)
                         .set("elapsed_ms", total.ms())
                         .set("exit_code", code));
        return code;
    } catch (const Refused& e) {
        return fail(e.what(), 3);
    } catch (const Timeout& e) {
        return fail(e.what(), 124);
    } catch (const CallError& e) {
        return fail(e.what(), 1);
    }
}

int run_selftest(const Arguments& a, const std::string& self) {
    const Place place = place_of(a);
    Output output(a.required("output"));
    HostGroup group(place.rank, place.world, place.rendezvous, 120000);
    Device device(a.integer("device", place.rank), group);
    std::unique_ptr<Comm> comm;
    if (place.world > 1)
        comm =
            std::make_unique<Comm>("selftest", a.text("nccl-library", "libnccl.so.2"), place.rendezvous, group, false);
    output.write(start_record(nullptr, device, group, 0));
    const Stopwatch total;
    const int code = selftest(device, group, comm.get(), self, [&](const Json& record) { output.write(record); });
    output.write(Json().set("record", "end").set("elapsed_ms", total.ms()).set("exit_code", code));
    return code;
}

// Times of single matrix products, to compare with another program's: a round for each line of standard input, so that
// both can take their samples in turn. One line of JSON for each shape and round.
int run_products(const Arguments& a) {
    HostGroup group(0, 1, "", 60000);
    Device device(a.integer("device", 0), group);
    std::vector<GemmShape> shapes;
    std::istringstream list(a.required("shapes"));
    std::string item;
    while (std::getline(list, item, ',')) {
        GemmShape s;
        char more = 0;
        if (std::sscanf(item.c_str(), "%dx%dx%d%c", &s.rows, &s.outer, &s.inner, &more) != 3 || s.rows < 1 ||
            s.outer < 8 || s.inner < 8)
            throw UsageError("--shapes takes ROWSxOUTERxINNER, not " + item);
        shapes.push_back(s);
    }
    warm_up(device, 1000);
    Products products(device, shapes);
    auto say = [](const Json& json) {
        std::printf("%s\n", json.dump().c_str());
        std::fflush(stdout);
    };
    say(Json().set("shapes", shapes.size()).set("max_relative_error", products.worst_error()));
    std::string line;
    for (int round = 0; std::getline(std::cin, line); ++round) {
        for (std::size_t i = 0; i < shapes.size(); ++i) {
            const ProductTimes t = products.sample(i);
            say(Json()
                    .set("round", round)
                    .set("rows", shapes[i].rows)
                    .set("outer", shapes[i].outer)
                    .set("inner", shapes[i].inner)
                    .set("tuned_ms", t.tuned_ms)
                    .set("first_choice_ms", t.first_ms)
                    .set("tuned_mhz", t.tuned_mhz)
                    .set("first_choice_mhz", t.first_mhz));
        }
    }
    return 0;
}

int dispatch(const Arguments& a, const std::string& self) {
    if (a.command == "run") return run(a);
    if (a.command == "selftest") return run_selftest(a, self);
    if (a.command == "products") return run_products(a);
    if (a.command == "version") {
        std::printf("%s\n", version_facts().dump().c_str());
        return 0;
    }
    HostGroup group(0, 1, "", 60000);
    Device device(a.integer("device", 0), group);
    return report_checks(run_checks(device), nullptr) ? 0 : 1;
}

std::string own_path() {
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    return length > 0 ? std::string(path, static_cast<std::size_t>(length)) : "specmodel-harness";
}

}  // namespace
}  // namespace specmodel

int main(int count, char** words) {
    using namespace specmodel;
    auto fail = [](const std::string& text, int code) {
        std::fprintf(stderr, "error %s\n%s", text.c_str(), code == 2 ? usage : "");
        return code;
    };
    try {
        return dispatch(parse_arguments(count, words), own_path());
    } catch (const UsageError& e) {
        return fail(e.what(), 2);
    } catch (const Refused& e) {
        return fail(e.what(), 3);
    } catch (const Timeout& e) {
        return fail(e.what(), 124);
    } catch (const std::exception& e) {
        return fail(e.what(), 1);
    }
}
