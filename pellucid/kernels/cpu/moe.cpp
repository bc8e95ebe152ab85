// Routed experts: gather rows by expert, gate_up, SwiGLU, down, and the weighted sum per token.
// Bound by pellucid/kernels/cpu_library.py. A token's sum runs over its top-k slots in their order,
// so it does not depend on which other tokens the batch holds.
#include <algorithm>
#include <memory>
#include <vector>

#include "linear.h"
#include "pool.h"

using namespace pellucid;

namespace {

// Rows that are all written before they are read: for a long prefill, clearing them first costs as much again.
using Scratch = std::unique_ptr<float[]>;
static Scratch scratch(int64_t floats) { return Scratch(new float[floats]); }

struct Experts {
  int format;
  const uint8_t* w;
  const uint16_t *scale, *minimum;
  int64_t n, k;

  Args args(int64_t expert, const float* x, const float* x_sum, float* y, int64_t rows) const {
    const int64_t tiles = (n + LANES - 1) / LANES;
    const int64_t scales = tiles * (k / GROUP) * LANES;
    return Args{x, k, w + expert * tiles * column_bytes(format) * k, scale ? scale + expert * scales : nullptr,
                minimum ? minimum + expert * scales : nullptr, x_sum, nullptr, y, n, rows, n, k, 0};
  }
};

// The tiles of every expert that was taken, as one range of work.
void run(const Experts& e, const std::vector<int64_t>& offset, const float* x, const float* x_sum, float* y,
         int threads) {
  const int64_t tiles = (e.n + LANES - 1) / LANES, groups = e.format == Q4 ? e.k / GROUP : 0;
  std::vector<int64_t> taken;
  for (size_t i = 0; i + 1 < offset.size(); ++i)
    if (offset[i + 1] > offset[i]) taken.push_back(i);
  const int64_t strips = (tiles + STRIP - 1) / STRIP;
  Pool::run(threads, (int64_t)taken.size() * strips, 1, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t expert = taken[begin / strips], strip = begin % strips;
      const int64_t count = std::min(end - begin, strips - strip);
      const int64_t first = offset[expert], rows = offset[expert + 1] - first;
      const Args a = e.args(expert, x + first * e.k, x_sum + first * groups, y + first * e.n, rows);
      linear_tiles(e.format, a, strip * STRIP, std::min((strip + count) * STRIP, tiles));
      begin += count;
    }
  });
}

}  // namespace

extern "C" {

// x [tokens, hidden]; expert, weight [tokens, top_k]; packed per expert: gate_up [2 inter, hidden], down
// [hidden, inter]. out [tokens, hidden] = (or +=) sum over k of weight[t, k] * experts[expert[t, k]](x[t]).
void pellucid_moe(int format, const float* x, int64_t tokens, int64_t hidden, int64_t inter, int64_t num_experts,
                  int64_t top_k, const int64_t* expert, const float* weight, const uint8_t* gate_up,
                  const uint16_t* gate_up_scale, const uint16_t* gate_up_minimum, int down_format, const uint8_t* down,
                  const uint16_t* down_scale, const uint16_t* down_minimum, float* out, int accumulate, int threads) {
  const int64_t pairs = tokens * top_k;
  std::vector<int64_t> offset(num_experts + 1, 0), place(pairs);
  for (int64_t p = 0; p < pairs; ++p) ++offset[expert[p] + 1];
  for (int64_t e = 0; e < num_experts; ++e) offset[e + 1] += offset[e];
  {
    std::vector<int64_t> next(offset.begin(), offset.end() - 1);
    for (int64_t p = 0; p < pairs; ++p) place[p] = next[expert[p]]++;
  }
  const Experts first{format, gate_up, gate_up_scale, gate_up_minimum, 2 * inter, hidden};
  const Experts second{down_format, down, down_scale, down_minimum, hidden, inter};
  const int64_t first_groups = format == Q4 ? hidden / GROUP : 0, second_groups = down_format == Q4 ? inter / GROUP : 0;
  const Scratch gathered = scratch(pairs * hidden), gate = scratch(pairs * 2 * inter), act = scratch(pairs * inter);
  const Scratch result = scratch(pairs * hidden);
  const Scratch first_sum = scratch(pairs * first_groups), second_sum = scratch(pairs * second_groups);

  Pool::run(threads, pairs, 4, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      float* row = gathered.get() + place[p] * hidden;
      std::memcpy(row, x + p / top_k * hidden, hidden * sizeof(float));
      if (first_groups) group_sums(row, hidden, first_groups, 0, 1, first_sum.get() + place[p] * first_groups);
    }
  });
  run(first, offset, gathered.get(), first_sum.get(), gate.get(), threads);
  Pool::run(threads, pairs, 4, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const float *g = gate.get() + p * 2 * inter, *up = g + inter;
      float* to = act.get() + p * inter;
      for (int64_t i = 0; i < inter; i += WIDTH) {
        const int64_t n = std::min<int64_t>(WIDTH, inter - i);
        f32v a = {}, b = {};
        std::memcpy(&a, g + i, n * sizeof(float));
        std::memcpy(&b, up + i, n * sizeof(float));
        const f32v y = a / (vexp(-a) + 1.0f) * b;
        std::memcpy(to + i, &y, n * sizeof(float));
      }
      if (second_groups) group_sums(to, inter, second_groups, 0, 1, second_sum.get() + p * second_groups);
    }
  });
  run(second, offset, act.get(), second_sum.get(), result.get(), threads);
  Pool::run(threads, tokens, 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i = 0; i < hidden; ++i) {
        float total = accumulate ? out[t * hidden + i] : 0.0f;
        for (int64_t j = 0; j < top_k; ++j)
          total += weight[t * top_k + j] * result[place[t * top_k + j] * hidden + i];
        out[t * hidden + i] = total;
      }
  });
}
}
