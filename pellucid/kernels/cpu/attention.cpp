// Attention over a paged KV cache, for GQA (K and V apart) and absorbed MLA (V is the head of the K row).
// Bound by pellucid/kernels/cpu_library.py. One (token, head) is one task with one fixed order of sums:
// a query's result depends on nothing but its own context.
#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "vec.h"

using namespace pellucid;

namespace {

static inline void add_scaled(float* acc, const float* v, float p, int64_t n) {
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) store(acc + i, load<f32v>(acc + i) + load<f32v>(v + i) * p);
  for (; i < n; ++i) acc[i] += p * v[i];
}

// Turns scores into exp(score - max) in place; returns their sum. `n` is padded to whole vectors with -inf.
static float exponentiate(float* score, int64_t n) {
  float top = -INFINITY;
  for (int64_t i = 0; i < n; ++i) top = std::max(top, score[i]);
  const int64_t padded = (n + WIDTH - 1) / WIDTH * WIDTH;
  for (int64_t i = n; i < padded; ++i) score[i] = -INFINITY;
  f32v total = {};
  for (int64_t i = 0; i < padded; i += WIDTH) {
    f32v p = vexp(load<f32v>(score + i) - top);
    if (i + WIDTH > n)
      for (int64_t j = n - i; j < WIDTH; ++j) p[j] = 0.0f;
    store(score + i, p);
    total += p;
  }
  return sum(total);
}

}  // namespace

extern "C" {

// q [tokens, heads, dk], tokens q_stride apart; out [tokens, heads, dv]. Key of context position j of sequence s:
//   k + (page_table[s][j / page] * page + j % page) * k_row + kv_head * dk, and v likewise with v_row, v_head.
// context[t] is the number of keys token t sees; 0 (a padded row) gives zeros and reads nothing.
void pellucid_paged_attention(const float* q, int64_t q_stride, float* out, const float* k, const float* v,
                              int64_t k_row, int64_t v_row, int64_t v_head, const int32_t* page_table,
                              int64_t table_stride, const int32_t* sequence, const int32_t* context, int64_t tokens,
                              int64_t heads, int64_t kv_heads, int64_t dk, int64_t dv, int64_t page, float scale,
                              int threads) {
  int64_t longest = 0;
  for (int64_t t = 0; t < tokens; ++t) longest = std::max<int64_t>(longest, context[t]);
  const int64_t group = heads / kv_heads;
  // The last tokens of a prefill see most keys: begin with them.
  const int64_t tasks = tokens * heads, worth = std::max<int64_t>(1, 4096 / std::max<int64_t>(1, longest * dk / 64));
  Pool::run(threads, tasks, worth, [&](int64_t begin, int64_t end) {
    std::vector<float> score((longest + WIDTH - 1) / WIDTH * WIDTH);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t task = tasks - 1 - i;
      const int64_t t = task / heads, h = task % heads, kv_head = h / group, n = context[t];
      const float* query = q + t * q_stride + h * dk;
      const int32_t* pages = page_table + sequence[t] * table_stride;
      float* to = out + task * dv;
      std::fill(to, to + dv, 0.0f);
      if (n == 0) continue;
      for (int64_t first = 0; first < n; first += page) {
        const float* keys = k + pages[first / page] * page * k_row + kv_head * dk;
        const int64_t count = std::min(page, n - first);
        for (int64_t j = 0; j < count; ++j) score[first + j] = scale * dot(query, keys + j * k_row, dk);
      }
      const float inverse = 1.0f / exponentiate(score.data(), n);
      for (int64_t first = 0; first < n; first += page) {
        const float* values = v + pages[first / page] * page * v_row + kv_head * v_head;
        const int64_t count = std::min(page, n - first);
        for (int64_t j = 0; j < count; ++j) add_scaled(to, values + j * v_row, score[first + j], dv);
      }
      for (int64_t d = 0; d < dv; ++d) to[d] *= inverse;
    }
  });
}
}
