#include "job.hpp"

#include <limits>
#include <set>

namespace specmodel {
namespace {

// Reads the members of one object, each at most once, and refuses those that nobody asked for.
class Reader {
public:
    Reader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
        if (!object.is_object()) throw UsageError(where_ + " must be an object");
    }

    const Json* get(const std::string& key, bool required = false) {
        seen_.insert(key);
        const Json* member = object_.find(key);
        if (!member && required) throw UsageError(where_ + " lacks the key '" + key + "'");
        return member && member->is_null() ? nullptr : member;
    }

    double number(const std::string& key, double otherwise, double least, double most, bool required = false) {
        const Json* member = get(key, required);
        if (!member) return otherwise;
        if (!member->is_number() || member->number() < least || member->number() > most)
            fail(key, *member, "a number from " + Json(least).dump() + " to " + Json(most).dump());
        return member->number();
    }

    int integer(const std::string& key, int otherwise, int least, bool required = false, int most = 1 << 30) {
        const double value = number(key, otherwise, least, most, required);
        if (value != std::floor(value)) fail(key, Json(value), "a whole number");
        return static_cast<int>(value);
    }

    bool boolean(const std::string& key, bool otherwise) {
        const Json* member = get(key);
        if (!member) return otherwise;
        if (!member->is_bool()) fail(key, *member, "true or false");
        return member->boolean();
    }

    std::string text(const std::string& key, const std::string& otherwise, bool required = false) {
        const Json* member = get(key, required);
        if (!member) return otherwise;
        if (!member->is_string()) fail(key, *member, "a text");
        return member->text();
    }

    // The position of the text among the allowed ones.
    std::size_t choice(const std::string& key, const std::vector<std::string>& allowed, bool required = false) {
        const std::string value = text(key, allowed.front(), required);
        std::string list;
        for (std::size_t i = 0; i < allowed.size(); ++i) {
            if (allowed[i] == value) return i;
            list += (i ? ", " : "") + allowed[i];
        }
        fail(key, Json(value), "one of " + list);
    }

    void finish() const {
        for (const auto& [key, value] : object_.members())
            if (!seen_.contains(key)) throw UsageError(where_ + " has the unknown key '" + key + "'");
    }

    [[noreturn]] void fail(const std::string& key, const Json& value, const std::string& allowed) const {
        throw UsageError(where_ + ": '" + key + "' is " + value.dump() + ", but must be " + allowed);
    }

private:
    const Json& object_;
    std::string where_;
    std::set<std::string> seen_;
};

ModelShape read_shape(Reader& r) {
    ModelShape s;
    s.hidden_size = r.integer("hidden_size", 0, 64, true);
    s.intermediate_size = r.integer("intermediate_size", 0, 0);
    s.num_layers = r.integer("num_layers", 0, 1, true, 1000);
    s.num_attention_heads = r.integer("num_attention_heads", 0, 1, true, 1024);
    s.num_key_value_heads = r.integer("num_key_value_heads", s.num_attention_heads, 1, false, 1024);
    s.head_dim = r.integer("head_dim", s.hidden_size / s.num_attention_heads, 1);
    s.vocab_size = r.integer("vocab_size", 0, 1, true);
    s.rope_theta = r.number("rope_theta", 10000.0, 1.0, 1e12);
    s.rms_norm_eps = r.number("rms_norm_eps", 1e-5, 0.0, 1.0);
    s.qk_norm = r.boolean("qk_norm", false);
    s.num_experts = r.integer("num_experts", 0, 0);
    s.experts_per_token = r.integer("experts_per_token", 0, 0);
    s.moe_intermediate_size = r.integer("moe_intermediate_size", 0, 0);
    s.shared_expert_intermediate_size = r.integer("shared_expert_intermediate_size", 0, 0);
    s.norm_topk_prob = r.boolean("norm_topk_prob", true);
    return s;
}

Limits read_limits(const Json* object, Limits l, const std::string& where) {
    if (!object) return l;
    Reader r(*object, where);
    constexpr double most = 1e9;
    l.min_samples = r.integer("min_samples", l.min_samples, 1, false, 1000000);
    l.max_samples = r.integer("max_samples", l.max_samples, 1, false, 1000000);
    l.min_ms = r.number("min_ms", l.min_ms, 0, most);
    l.max_ms = r.number("max_ms", l.max_ms, 0, most);
    l.half_width = r.number("half_width", l.half_width, 0, 1);
    l.half_width_floor_ms = r.number("half_width_floor_ms", l.half_width_floor_ms, 0, most);
    l.warmup_samples = r.integer("warmup_samples", l.warmup_samples, 1, false, 1000);
    l.warmup_ms = r.number("warmup_ms", l.warmup_ms, 0, most);
    l.timeout_ms = r.number("timeout_ms", l.timeout_ms, 1, most);
    l.power_share = r.number("power_share", l.power_share, 0, 1);
    r.finish();
    return l;
}

Point read_point(const Json& object, const Limits& limits, std::size_t index) {
    const std::string where = "points[" + std::to_string(index) + "]";
    Reader r(object, where);
    Point p;
    p.key = r.text("key", "", true);
    p.kind = static_cast<PointKind>(r.choice("kind", {"verify", "draft", "cycle", "allreduce"}, true));
    p.limits = read_limits(r.get("limits"), limits, where + ".limits");
    if (p.kind == PointKind::allreduce) {
        p.size_bytes = r.number("size_bytes", 0, 2, 1e10, true);
        p.in_graph = r.boolean("in_graph", true);
        p.cold = r.choice("regime", {"hot", "cold"}) == 1;
    } else {
        p.batch = r.integer("batch", 1, 1, false, 65536);
        p.context_tokens = r.integer("context_tokens", 0, 1, true);
        p.cuda_graph = r.boolean("cuda_graph", true);
    }
    if (p.kind == PointKind::verify) {
        p.tokens = r.integer("tokens", 0, 1, true, 65536);
        p.part = static_cast<Part>(r.choice("part", {"all", "compute", "comm"}));
        if (p.tokens % p.batch != 0)
            r.fail("tokens", Json(p.tokens), "a multiple of batch (" + std::to_string(p.batch) + ")");
    }
    if (p.kind == PointKind::draft || p.kind == PointKind::cycle) {
        p.num_steps = r.integer("num_steps", 0, p.kind == PointKind::draft ? 1 : 0, true, 63);
        p.graph_scope_cycle = r.choice("graph_scope", {"step", "cycle"}) == 1;
    }
    if (p.kind == PointKind::cycle) {
        p.verify_cuda_graph = r.boolean("verify_cuda_graph", true);
        p.cycles = r.integer("cycles", 200, 200, false, 1000000);
        p.tokens = p.batch * (p.num_steps + 1);
    }
    if (p.kind == PointKind::cycle && p.context_tokens < 128)
        r.fail("context_tokens", Json(p.context_tokens), "at least 128 for cycles");
    r.finish();
    for (const auto& [key, value] : object.members())
        if (key != "key" && key != "kind" && key != "limits") p.described.set(key, value);
    return p;
}

}  // namespace

Job parse_job(const Json& document) {
    Reader r(document, "the job");
    Job job;
    if (r.text("protocol", "", true) != "specmodel.harness-job/1")
        throw UsageError("the job's 'protocol' must be specmodel.harness-job/1");
    job.seed = static_cast<std::uint64_t>(r.number("seed", 1, 0, 9e15));
    job.device = r.integer("device", -1, 0);
    job.allow_nvls = r.boolean("allow_nvls", false);
    job.nccl_library = r.text("nccl_library", job.nccl_library);
    job.gemm_cache = r.text("gemm_cache", "");
    Reader model(*r.get("model", true), "model");
    job.model = read_shape(model);
    model.finish();
    if (const Json* draft = r.get("draft")) {
        Reader d(*draft, "draft");
        job.draft.kind = d.choice("kind", {"eagle3", "model"}, true) == 0 ? DraftKind::eagle3 : DraftKind::model;
        job.draft.first_step_accepted = d.choice("first_step_rows", {"one", "accepted"}) == 1;
        job.draft.shape = read_shape(d);
        job.draft.draft_vocab_size = d.integer("draft_vocab_size", job.draft.shape.vocab_size, 1);
        d.finish();
    }
    if (const Json* curve = r.get("conditional")) {
        if (!curve->is_array()) throw UsageError("'conditional' must be a list of probabilities");
        for (const Json& value : curve->items()) {
            if (!value.is_number() || value.number() < 0 || value.number() > 1)
                throw UsageError("'conditional' has " + value.dump() + ", which is no probability");
            job.conditional.push_back(value.number());
        }
    }
    job.limits = read_limits(r.get("limits"), Limits{}, "limits");
    const Json& points = *r.get("points", true);
    if (!points.is_array()) throw UsageError("'points' must be a list");
    std::set<std::string> keys;
    for (std::size_t i = 0; i < points.items().size(); ++i) {
        Point p = read_point(points.items()[i], job.limits, i);
        if (!keys.insert(p.key).second) throw UsageError("two points have the key '" + p.key + "'");
        const bool drafts = p.kind == PointKind::draft || (p.kind == PointKind::cycle && p.num_steps > 0);
        if (drafts && job.draft.kind == DraftKind::none)
            throw UsageError("point '" + p.key + "' drafts, but the job has no 'draft'");
        if (p.kind == PointKind::cycle && p.num_steps > 0 && job.conditional.empty())
            throw UsageError("point '" + p.key + "' accepts drafts, but the job has no 'conditional'");
        job.points.push_back(std::move(p));
    }
    r.finish();
    return job;
}

void check_shape(const ModelShape& s, int world, const std::string& which) {
    auto refuse = [&](const std::string& why) {
        throw Refused("the " + which + " shape cannot be represented: " + why);
    };
    auto share = [&](int size, const char* name) {
        if (size % world != 0 || size / world % 64 != 0)
            refuse(std::string(name) + " " + std::to_string(size) + " over " + std::to_string(world) +
                   " ranks is not a multiple of 64");
    };
    if (s.head_dim != 64 && s.head_dim != 128)
        refuse("head_dim " + std::to_string(s.head_dim) + " (64 and 128 are supported)");
    if (s.hidden_size % 64 != 0 || s.hidden_size > 16384)
        refuse("hidden_size " + std::to_string(s.hidden_size) + " (a multiple of 64, up to 16384)");
    if (s.num_attention_heads % world != 0) refuse("num_attention_heads is not divisible by the number of ranks");
    if (s.num_attention_heads % s.num_key_value_heads != 0)
        refuse("num_attention_heads is not divisible by num_key_value_heads");
    if (s.num_key_value_heads >= world ? s.num_key_value_heads % world != 0 : world % s.num_key_value_heads != 0)
        refuse("num_key_value_heads and the number of ranks do not divide");
    if (s.vocab_size % (8 * world) != 0)
        refuse("vocab_size " + std::to_string(s.vocab_size) + " is not a multiple of 8 per rank (pad it)");
    if (s.num_experts == 0) {
        if (s.intermediate_size == 0) refuse("intermediate_size is missing");
        share(s.intermediate_size, "intermediate_size");
        return;
    }
    if (s.num_experts > 512 || s.num_experts % 8 != 0)
        refuse("num_experts " + std::to_string(s.num_experts) + " (a multiple of 8, up to 512)");
    if (s.experts_per_token < 1 || s.experts_per_token > 16 || s.experts_per_token > s.num_experts)
        refuse("experts_per_token " + std::to_string(s.experts_per_token) + " (1 to 16, and at most num_experts)");
    if (s.moe_intermediate_size == 0) refuse("moe_intermediate_size is missing");
    share(s.moe_intermediate_size, "moe_intermediate_size");
    if (s.shared_expert_intermediate_size > 0)
        share(s.shared_expert_intermediate_size, "shared_expert_intermediate_size");
}

}  // namespace specmodel
