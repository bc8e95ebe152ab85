// RMSNorm, rotary embedding, KV-cache writes and SwiGLU. Bound by pellucid/kernels/cpu_library.py.
// Rows are independent and each is computed in one fixed order: results do not depend on the batch.
#include <cmath>

#include "pool.h"
#include "vec.h"

using namespace pellucid;

namespace {

// Elements that are worth another thread.
constexpr int64_t WORTH = 8192;

static inline void rotate(float* x, const float* cos, const float* sin, int64_t half, int interleaved) {
  for (int64_t i = 0; i < half; ++i) {
    float& a = interleaved ? x[2 * i] : x[i];
    float& b = interleaved ? x[2 * i + 1] : x[i + half];
    const float u = a, v = b;
    a = u * cos[i] - v * sin[i];
    b = v * cos[i] + u * sin[i];
  }
}

}  // namespace

extern "C" {

// y[o, i, :] = w * x[o, i, :] / sqrt(mean(x^2) + eps); x and y may be the same memory.
void pellucid_rms_norm(const float* x, int64_t x_outer, const float* w, float* y, int64_t y_outer, int64_t outer,
                       int64_t inner, int64_t n, float eps, int threads) {
  Pool::run(threads, outer * inner, WORTH / n, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = x + row / inner * x_outer + row % inner * n;
      float* to = y + row / inner * y_outer + row % inner * n;
      const float scale = 1.0f / std::sqrt(dot(from, from, n) / n + eps);
      for (int64_t i = 0; i < n; ++i) to[i] = from[i] * scale * w[i];
    }
  });
}

// Rotates `heads` slices of width `dim`, `head_stride` apart, in place. table: [positions, dim], cos then sin.
void pellucid_rope(float* x, int64_t x_stride, int64_t head_stride, int64_t heads, int64_t dim, const float* table,
                   const int64_t* position, int64_t tokens, int interleaved) {
  for (int64_t t = 0; t < tokens; ++t) {
    const float* row = table + position[t] * dim;
    for (int64_t h = 0; h < heads; ++h)
      rotate(x + t * x_stride + h * head_stride, row, row + dim / 2, dim / 2, interleaved);
  }
}

// cache[slot[t]] = x[t] for rows of `width` bytes, those of x x_stride bytes apart; a negative slot writes nothing.
void pellucid_cache_write(const char* x, int64_t x_stride, const int64_t* slot, char* cache, int64_t tokens,
                          int64_t width) {
  for (int64_t t = 0; t < tokens; ++t)
    if (slot[t] >= 0) std::memcpy(cache + slot[t] * width, x + t * x_stride, width);
}

// out = silu(gate) * up for rows [gate | up] of width 2n.
void pellucid_silu_mul(const float* gate_up, int64_t stride, float* out, int64_t rows, int64_t n, int threads) {
  Pool::run(threads, rows, WORTH / n, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float *gate = gate_up + r * stride, *up = gate + n;
      float* to = out + r * n;
      int64_t i = 0;
      for (; i + WIDTH <= n; i += WIDTH) {
        const f32v g = load<f32v>(gate + i);
        store(to + i, g / (vexp(-g) + 1.0f) * load<f32v>(up + i));
      }
      for (; i < n; ++i) to[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
    }
  });
}
}
