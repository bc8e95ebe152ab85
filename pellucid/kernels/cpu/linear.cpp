// y = x W^T (+ bias) (+ y) with W packed in sixteen-row tiles (linear.h), dequantized in registers.
// Bound by pellucid/kernels/cpu_library.py.
//
// Every output element is accumulated over k in one fixed order by one chain of FMAs, whatever the
// number of rows: results are bit-identical for any batch, chunk or position in it.
#include "linear.h"

#include <algorithm>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "pool.h"

using namespace pellucid;

namespace {

#if defined(__AVX512F__)
// One permute maps nibbles to floats: it reads only the low four bits of each lane.
static inline f32v nibble(u32v words, int shift) {
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (f32v)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)words, shift), table);
}
#else
static inline f32v nibble(u32v words, int shift) {
  return __builtin_convertvector((i32v)((words >> shift) & 15u), f32v);
}
#endif

// The processor's own prefetcher stops at every 4 KB page, which is about a tile: ask for the next tiles ourselves.
static inline void prefetch(const uint8_t* data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(data + i, 0, 2);
}

// One vector of a tile: WIDTH of its sixteen rows.
template <Format F>
struct Slice {
  const uint8_t* data;
  f32v column(int64_t k) const {
    if constexpr (F == F32) return load<f32v>(data + k * 64);
    if constexpr (F == BF16) return from_bf16(load<u16v>(data + k * 32));
    if constexpr (F == F16) return from_fp16(load<u16v>(data + k * 32));
    if constexpr (F == Q8) {
      const u32v words = load<u32v>(data + (k / 4) * 64);
      return __builtin_convertvector((i32v)(words << (24 - 8 * (int)(k % 4))) >> 24, f32v);
    }
    if constexpr (F == Q4) return nibble(load<u32v>(data + (k / 8) * 64), 4 * (int)(k % 8));
  }
};

// M rows of x against T neighbouring tiles.
template <Format F, int M, int T>
static inline void block(const Args& a, int64_t row, int64_t tile) {
  constexpr int V = T * PARTS, ELEMENT = F == BF16 || F == F16 ? 2 : 4;
  f32v total[M][V] = {};
  const int64_t tile_bytes = column_bytes(F) * a.k;
  Slice<F> w[V];
  for (int v = 0; v < V; ++v) w[v].data = a.w + (tile + v / PARTS) * tile_bytes + v % PARTS * WIDTH * ELEMENT;
  const float* x = a.x + row * a.x_stride;

  if constexpr (F == Q8 || F == Q4) {
    const int64_t groups = a.k / GROUP, group_bytes = column_bytes(F) * GROUP;
    for (int64_t g = 0; g < groups; ++g) {
      f32v partial[M][V] = {};
      for (int t = 0; t < T; ++t) prefetch(a.w + (tile + t + T) * tile_bytes + g * group_bytes, group_bytes);
      for (int j = 0; j < GROUP; j += 8) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          const int64_t k = g * GROUP + j + i;
          f32v q[V];
          for (int v = 0; v < V; ++v) q[v] = w[v].column(k);
          for (int r = 0; r < M; ++r) {
            const float s = x[r * a.x_stride + k];
            for (int v = 0; v < V; ++v) partial[r][v] += q[v] * s;
          }
        }
      }
      for (int v = 0; v < V; ++v) {
        const int64_t at = ((tile + v / PARTS) * groups + g) * LANES + v % PARTS * WIDTH;
        const f32v d = from_fp16(load<u16v>(a.scale + at));
        for (int r = 0; r < M; ++r) total[r][v] += d * partial[r][v];
        if constexpr (F == Q4) {
          const f32v low = from_fp16(load<u16v>(a.minimum + at));
          for (int r = 0; r < M; ++r) total[r][v] += low * a.x_sum[(row + r) * groups + g];
        }
      }
    }
  } else {
    for (int64_t k = 0; k < a.k; ++k) {
      f32v q[V];
      for (int v = 0; v < V; ++v) q[v] = w[v].column(k);
      for (int r = 0; r < M; ++r) {
        const float s = x[r * a.x_stride + k];
        for (int v = 0; v < V; ++v) total[r][v] += q[v] * s;
      }
    }
  }

  for (int r = 0; r < M; ++r)
    for (int v = 0; v < V; ++v) {
      float out[WIDTH];
      store(out, total[r][v]);
      const int64_t first = tile * LANES + v * WIDTH;
      const int64_t lanes = std::min<int64_t>(WIDTH, a.n - first);
      float* y = a.y + (row + r) * a.y_stride + first;
      for (int64_t i = 0; i < lanes; ++i) {
        float value = out[i] + (a.bias ? a.bias[first + i] : 0.0f);
        y[i] = a.accumulate ? y[i] + value : value;
      }
    }
}

template <Format F, int M, int T>
static inline void tiles(const Args& a, int64_t row, int64_t begin, int64_t end) {
  int64_t t = begin;
  for (; t + T <= end; t += T) block<F, M, T>(a, row, t);
  for (; t < end; ++t) block<F, M, 1>(a, row, t);
}

// A tile stays in L1/L2 while all rows pass over it, so weights are read from memory once. A block's partial sums
// are eight vectors (sixteen of NEON): all that the registers hold beside what is multiplied.
template <Format F>
static void rows(const Args& a, int64_t begin, int64_t end) {
  constexpr int64_t SPAN = 8;
  constexpr int MOST = WIDTH == 16 ? 8 : 4;
  for (int64_t t = begin; t < end; t += SPAN) {
    const int64_t stop = std::min(end, t + SPAN);
    int64_t row = 0;
    for (; row + MOST <= a.m; row += MOST) tiles<F, MOST, 1>(a, row, t, stop);
    if constexpr (MOST > 4)
      if (row + 4 <= a.m) { tiles<F, 4, 2>(a, row, t, stop); row += 4; }
    if (row + 2 <= a.m) { tiles<F, 2, MOST / 2>(a, row, t, stop); row += 2; }
    if (row < a.m) tiles<F, 1, 4>(a, row, t, stop);
  }
}

template <typename T>
static void pack_dense(const T* rows, int64_t n, int64_t k, T* out, int threads) {
  const int64_t tiles = (n + LANES - 1) / LANES;
  Pool::run(threads, tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t lane = 0; lane < LANES; ++lane) {
        const int64_t row = t * LANES + lane;
        T* to = out + t * k * LANES + lane;
        for (int64_t c = 0; c < k; ++c) to[c * LANES] = row < n ? rows[row * k + c] : T{0};
      }
  });
}

// The low nibbles of eight bytes as one word, first byte lowest.
static inline uint32_t gather_nibbles(uint64_t x) {
  x &= 0x0f0f0f0f0f0f0f0fu;
  x = (x | x >> 4) & 0x00ff00ff00ff00ffu;
  x = (x | x >> 8) & 0x0000ffff0000ffffu;
  return (uint32_t)(x | x >> 16);
}

}  // namespace

void pellucid::linear_tiles(int format, const Args& a, int64_t begin, int64_t end) {
  switch (format) {
    case F32: return rows<F32>(a, begin, end);
    case BF16: return rows<BF16>(a, begin, end);
    case F16: return rows<F16>(a, begin, end);
    case Q8: return rows<Q8>(a, begin, end);
    case Q4: return rows<Q4>(a, begin, end);
  }
}

extern "C" {

// y = x W^T (+ bias) or y += ...; x [m, k] and y [m, n] with any row stride.
void pellucid_linear(int format, const float* x, int64_t x_stride, const uint8_t* w, const uint16_t* scale,
                     const uint16_t* minimum, const float* bias, float* y, int64_t y_stride, int64_t m, int64_t n,
                     int64_t k, int accumulate, int threads) {
  const int64_t groups = format == Q4 ? k / GROUP : 0;
  std::vector<float> x_sum(m * groups);
  const Args a{x, x_stride, w, scale, minimum, x_sum.data(), bias, y, y_stride, m, n, k, accumulate};
  const int64_t tile_count = (n + LANES - 1) / LANES;
  if (groups)
    Pool::run(threads, m, 16, [&](int64_t begin, int64_t end) {
      group_sums(x, x_stride, groups, begin, end, x_sum.data());
    });
  Pool::run(threads, (tile_count + STRIP - 1) / STRIP, 1, [&](int64_t begin, int64_t end) {
    linear_tiles(format, a, begin * STRIP, std::min(end * STRIP, tile_count));
  });
}

// `batch` dense products side by side: y[b] = x[b] W[b]^T, x[b] = x + b * x_batch and so on; no groups.
void pellucid_batched_linear(int format, const float* x, int64_t x_stride, int64_t x_batch, const uint8_t* w, float* y,
                             int64_t y_stride, int64_t y_batch, int64_t batch, int64_t m, int64_t n, int64_t k,
                             int threads) {
  const int64_t tile_count = (n + LANES - 1) / LANES;
  const int64_t w_batch = tile_count * k * LANES * (format == F32 ? 4 : 2);
  Pool::run(threads, batch, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const Args a{x + b * x_batch, x_stride, w + b * w_batch, nullptr, nullptr, nullptr, nullptr,
                   y + b * y_batch, y_stride, m, n, k, 0};
      linear_tiles(format, a, 0, tile_count);
    }
  });
}

// Dense rows [n, k] of 2- or 4-byte elements into 16-row tiles; rows past n are zeros.
void pellucid_pack_dense(int itemsize, const void* rows, int64_t n, int64_t k, void* out, int threads) {
  if (itemsize == 4) pack_dense((const uint32_t*)rows, n, k, (uint32_t*)out, threads);
  else pack_dense((const uint16_t*)rows, n, k, (uint16_t*)out, threads);
}

// GGUF blocks of 32 columns, as stored in the file: [n, k/32] blocks.
//   Q8_0: fp16 d, 32 int8.   Q4_0: fp16 d, 16 bytes.   Q4_1: fp16 d, fp16 m, 16 bytes.
// Byte j of a 4-bit block holds column j (low nibble) and column j + 16 (high nibble).
// Q4_0 is stored with an offset of 8, so its minimum is -8 d.
enum GgufType : int { Q4_0_BLOCK = 2, Q4_1_BLOCK = 3, Q8_0_BLOCK = 8 };

void pellucid_pack_gguf(int type, const uint8_t* blocks, int64_t n, int64_t k, uint32_t* out, uint16_t* scale,
                        uint16_t* minimum, int threads) {
  const int64_t tiles = (n + LANES - 1) / LANES, groups = k / GROUP;
  const int64_t header = type == Q4_1_BLOCK ? 4 : 2;
  const int64_t words = type == Q8_0_BLOCK ? 8 : 4;  // int32 words per block and lane
  const int64_t block_bytes = header + words * 4;
  Pool::run(threads, tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t g = 0; g < groups; ++g)
        for (int64_t lane = 0; lane < LANES; ++lane) {
          const int64_t row = t * LANES + lane, at = (t * groups + g) * LANES + lane;
          uint32_t* to = out + (t * groups + g) * words * LANES + lane;
          if (row >= n) {
            for (int64_t i = 0; i < words; ++i) to[i * LANES] = 0;
            scale[at] = 0;
            if (minimum) minimum[at] = 0;
            continue;
          }
          const uint8_t* b = blocks + (row * groups + g) * block_bytes;
          std::memcpy(scale + at, b, 2);
          if (type == Q8_0_BLOCK) {
            for (int64_t i = 0; i < words; ++i) std::memcpy(to + i * LANES, b + header + 4 * i, 4);
            continue;
          }
          if (type == Q4_1_BLOCK) std::memcpy(minimum + at, b + 2, 2);
          // -8 d is exact in fp16: the exponent grows by three and the sign flips.
          else minimum[at] = times_minus_eight(scale[at]);
          uint64_t half[2];
          std::memcpy(half, b + header, 16);
          for (int64_t i = 0; i < 2; ++i) {
            to[i * LANES] = gather_nibbles(half[i]);
            to[(i + 2) * LANES] = gather_nibbles(half[i] >> 4);
          }
        }
  });
}
}
