// The same passes in fp32 on the CPU, written for clarity: what the kernels are checked against.
#pragma once

#include <vector>

#include "model.hpp"

namespace specmodel {

using Rows = std::vector<float>;  // row-major

struct ReferenceResult {
    Rows normed;    // hidden states after the last norm, [T, hidden]
    Rows logits;    // [rows with a head, vocab]
    Rows residual;  // the residual stream after the last block, [T, hidden]
};

// `cache` must hold what was there before the pass (the pass itself only appends). `chosen` [T, top]: the experts that
// the GPU chose in its only layer: near ties may fall either way, so they are taken over, and refused (NaN results) if
// they are no top choice.
ReferenceResult reference_model(const Model& m, const KvCache& cache, const Pass& p, const std::vector<int>& lengths,
                                const std::vector<int>& tokens, const std::vector<int>& chosen);
// One step of an EAGLE-3 head: `hidden` is its input hidden state (after fc), [T, hidden].
ReferenceResult reference_eagle3(const Model& m, const KvCache& cache, const Pass& p, const std::vector<int>& lengths,
                                 const std::vector<int>& tokens, const Rows& hidden);
Rows reference_product(const Rows& x, const bf16* weights, int outer, int inner);

}  // namespace specmodel
