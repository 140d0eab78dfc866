#include "reference.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "check.hpp"

namespace specmodel {
namespace {

Rows product(const Rows& x, const Rows& w, std::size_t outer, std::size_t inner) {
    const std::size_t rows = x.size() / inner;
    Rows y(rows * outer);
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t o = 0; o < outer; ++o) {
            double sum = 0;
            for (std::size_t i = 0; i < inner; ++i) sum += static_cast<double>(x[r * inner + i]) * w[o * inner + i];
            y[r * outer + o] = static_cast<float>(sum);
        }
    return y;
}

Rows norm(const Rows& x, const bf16* weight, std::size_t width, double epsilon) {
    const Rows w = download(weight, width);
    Rows y(x.size());
    for (std::size_t r = 0; r < x.size() / width; ++r) {
        double squares = 0;
        for (std::size_t i = 0; i < width; ++i) squares += static_cast<double>(x[r * width + i]) * x[r * width + i];
        const double inverse = 1.0 / std::sqrt(squares / static_cast<double>(width) + epsilon);
        for (std::size_t i = 0; i < width; ++i)
            y[r * width + i] = static_cast<float>(x[r * width + i] * inverse * w[i]);
    }
    return y;
}

void add(Rows& to, const Rows& from) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] += from[i];
}

float silu(float x) {
    return x / (1.0F + std::exp(-x));
}

void rotate(float* head, int dim, int position, double theta) {
    for (int i = 0; i < dim / 2; ++i) {
        const double angle = position * std::pow(theta, -static_cast<double>(i) / (dim / 2.0));
        const double low = head[i];
        const double high = head[i + dim / 2];
        head[i] = static_cast<float>(low * std::cos(angle) - high * std::sin(angle));
        head[i + dim / 2] = static_cast<float>(high * std::cos(angle) + low * std::sin(angle));
    }
}

Rows attention(const Model& m, const Layer& l, const KvCache& cache, std::size_t layer, const Pass& p,
               const std::vector<int>& lengths, const Rows& input) {
    const int dim = m.shape.head_dim;
    const int all = m.heads + 2 * m.kv_heads;
    Rows qkv = product(input, download(l.qkv, static_cast<std::size_t>(all) * dim * m.qkv_input),
                       static_cast<std::size_t>(all) * dim, m.qkv_input);
    const std::size_t count = static_cast<std::size_t>(p.batch) * m.kv_heads * p.capacity * dim;
    const Rows keys = download(cache.keys[layer], count);
    const Rows values = download(cache.values[layer], count);
    const int rows = p.total_rows();
    for (int r = 0; r < rows; ++r) {
        const int position = lengths[static_cast<std::size_t>(r / p.rows)] + p.offset + r % p.rows;
        for (int h = 0; h < m.heads + m.kv_heads; ++h) {
            float* head = qkv.data() + (static_cast<std::size_t>(r) * all + h) * dim;
            if (const bf16* weight = h < m.heads ? l.query_norm : l.key_norm) {
                const Rows normed = norm(Rows(head, head + dim), weight, dim, m.shape.rms_norm_eps);
                std::copy(normed.begin(), normed.end(), head);
            }
            rotate(head, dim, position, m.shape.rope_theta);
        }
    }
    Rows out(static_cast<std::size_t>(rows) * m.heads * dim);
    const int group = m.heads / m.kv_heads;
    for (int r = 0; r < rows; ++r) {
        const int sequence = r / p.rows;
        const int past = lengths[static_cast<std::size_t>(sequence)] + p.offset;
        for (int h = 0; h < m.heads; ++h) {
            const int kv_head = h / group;
            const float* query = qkv.data() + (static_cast<std::size_t>(r) * all + h) * dim;
            // Token t of this sequence: from the cache, or from the new rows.
            auto at = [&](int t, bool value) -> const float* {
                if (t < past)
                    return (value ? values : keys).data() +
                           ((static_cast<std::size_t>(sequence) * m.kv_heads + kv_head) * p.capacity + t) * dim;
                const int column = m.heads + (value ? m.kv_heads : 0) + kv_head;
                return qkv.data() + (static_cast<std::size_t>(sequence * p.rows + t - past) * all + column) * dim;
            };
            const int visible = past + r % p.rows + 1;
            std::vector<double> score(static_cast<std::size_t>(visible));
            double most = -std::numeric_limits<double>::infinity();
            for (int t = 0; t < visible; ++t) {
                double sum = 0;
                for (int i = 0; i < dim; ++i) sum += static_cast<double>(query[i]) * at(t, false)[i];
                score[static_cast<std::size_t>(t)] = sum / std::sqrt(static_cast<double>(dim));
                most = std::max(most, score[static_cast<std::size_t>(t)]);
            }
            double total = 0;
            for (double& s : score) total += s = std::exp(s - most);
            for (int i = 0; i < dim; ++i) {
                double sum = 0;
                for (int t = 0; t < visible; ++t) sum += score[static_cast<std::size_t>(t)] * at(t, true)[i];
                out[(static_cast<std::size_t>(r) * m.heads + h) * dim + i] = static_cast<float>(sum / total);
            }
        }
    }
    return product(out, download(l.output, static_cast<std::size_t>(m.shape.hidden_size) * m.heads * dim),
                   m.shape.hidden_size, static_cast<std::size_t>(m.heads) * dim);
}

// gate, up: rows of the two matrices; down [hidden, size].
Rows gated(const Rows& x, const Rows& gate_weights, const Rows& up_weights, const Rows& down, std::size_t hidden,
           std::size_t size) {
    Rows gate = product(x, gate_weights, size, hidden);
    const Rows up = product(x, up_weights, size, hidden);
    for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = silu(gate[i]) * up[i];
    return product(gate, down, hidden, size);
}

Rows experts(const Model& m, const Layer& l, const Rows& x, const std::vector<int>& chosen) {
    const ModelShape& s = m.shape;
    const auto hidden = static_cast<std::size_t>(s.hidden_size);
    const auto size = static_cast<std::size_t>(m.expert_size);
    const auto count = static_cast<std::size_t>(s.num_experts);
    const auto top = static_cast<std::size_t>(s.experts_per_token);
    Rows scores = product(x, download(l.router, count * hidden), count, hidden);
    const Rows interleaved = download(l.expert_gate_up, count * 2 * size * hidden);
    const Rows downs = download(l.expert_down, count * hidden * size);
    Rows out(x.size(), 0.0F);
    for (std::size_t r = 0; r < x.size() / hidden; ++r) {
        float* score = scores.data() + r * count;
        const float most = *std::max_element(score, score + count);
        double total = 0;
        for (std::size_t e = 0; e < count; ++e) total += score[e] = std::exp(score[e] - most);
        std::vector<float> sorted(score, score + count);
        std::sort(sorted.begin(), sorted.end(), std::greater<>());
        double chosen_total = 0;
        for (std::size_t k = 0; k < top; ++k) chosen_total += score[chosen[r * top + k]];
        const Rows row(x.begin() + static_cast<std::ptrdiff_t>(r * hidden),
                       x.begin() + static_cast<std::ptrdiff_t>((r + 1) * hidden));
        for (std::size_t k = 0; k < top; ++k) {
            const auto e = static_cast<std::size_t>(chosen[r * top + k]);
            const bool is_top = score[e] >= 0.97F * sorted[top - 1];
            Rows gate;
            Rows up;
            for (std::size_t i = 0; i < 2 * size; ++i) {
                const auto from = interleaved.begin() + static_cast<std::ptrdiff_t>((e * 2 * size + i) * hidden);
                Rows& to = i % 16 < 8 ? gate : up;
                to.insert(to.end(), from, from + static_cast<std::ptrdiff_t>(hidden));
            }
            const Rows down(downs.begin() + static_cast<std::ptrdiff_t>(e * hidden * size),
                            downs.begin() + static_cast<std::ptrdiff_t>((e + 1) * hidden * size));
            const Rows y = gated(row, gate, up, down, hidden, size);
            const double weight = is_top ? score[e] / (s.norm_topk_prob ? chosen_total : total)
                                         : std::numeric_limits<double>::quiet_NaN();
            for (std::size_t i = 0; i < hidden; ++i) out[r * hidden + i] += static_cast<float>(weight * y[i]);
        }
    }
    return out;
}

Rows mlp(const Model& m, const Layer& l, const Rows& x, const std::vector<int>& chosen) {
    const auto hidden = static_cast<std::size_t>(m.shape.hidden_size);
    const auto size = static_cast<std::size_t>(m.size);
    Rows out(x.size(), 0.0F);
    if (size > 0)
        out = gated(x, download(l.gate_up, size * hidden), download(l.gate_up + size * hidden, size * hidden),
                    download(l.down, size * hidden), hidden, size);
    if (m.shape.num_experts > 0) add(out, experts(m, l, x, chosen));
    return out;
}

Rows embedding(const Model& m, const std::vector<int>& tokens) {
    const auto hidden = static_cast<std::size_t>(m.shape.hidden_size);
    Rows x;
    for (int token : tokens) {
        const Rows row = download(m.embedding + static_cast<std::size_t>(token) * hidden, hidden);
        x.insert(x.end(), row.begin(), row.end());
    }
    return x;
}

void finish(const Model& m, ReferenceResult& result) {
    const auto hidden = static_cast<std::size_t>(m.shape.hidden_size);
    result.normed = norm(result.residual, m.final_norm, hidden, m.shape.rms_norm_eps);
    result.logits = product(result.normed, download(m.head, m.vocab * hidden), m.vocab, hidden);
}

}  // namespace

Rows reference_product(const Rows& x, const bf16* weights, int outer, int inner) {
    return product(x, download(weights, static_cast<std::size_t>(outer) * inner), outer, inner);
}

ReferenceResult reference_model(const Model& m, const KvCache& cache, const Pass& p, const std::vector<int>& lengths,
                                const std::vector<int>& tokens, const std::vector<int>& chosen) {
    const auto hidden = static_cast<std::size_t>(m.shape.hidden_size);
    ReferenceResult result;
    Rows& x = result.residual;
    x = embedding(m, tokens);
    for (std::size_t i = 0; i < m.layers.size(); ++i) {
        const Layer& l = m.layers[i];
        add(x, attention(m, l, cache, i, p, lengths, norm(x, l.input_norm, hidden, m.shape.rms_norm_eps)));
        add(x, mlp(m, l, norm(x, l.mlp_norm, hidden, m.shape.rms_norm_eps), chosen));
    }
    finish(m, result);
    return result;
}

ReferenceResult reference_eagle3(const Model& m, const KvCache& cache, const Pass& p, const std::vector<int>& lengths,
                                 const std::vector<int>& tokens, const Rows& hidden_state) {
    const auto hidden = static_cast<std::size_t>(m.shape.hidden_size);
    const double epsilon = m.shape.rms_norm_eps;
    const Layer& l = m.layers.front();
    ReferenceResult result;
    Rows& x = result.residual;
    x = hidden_state;
    const Rows left = norm(embedding(m, tokens), m.embedding_norm, hidden, epsilon);
    const Rows right = norm(x, m.hidden_norm, hidden, epsilon);
    Rows input;
    for (std::size_t r = 0; r < x.size() / hidden; ++r)
        for (const Rows* half : {&left, &right})
            input.insert(input.end(), half->begin() + static_cast<std::ptrdiff_t>(r * hidden),
                         half->begin() + static_cast<std::ptrdiff_t>((r + 1) * hidden));
    add(x, attention(m, l, cache, 0, p, lengths, input));
    add(x, mlp(m, l, norm(x, l.mlp_norm, hidden, epsilon), {}));
    finish(m, result);
    return result;
}

}  // namespace specmodel
