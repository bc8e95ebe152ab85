// The packed linear layer as the other sources see it: formats, arguments, and one entry over a range of tiles.
//
// Packed layout of one tile (16 output rows), k-major so that lane n is output row n of the tile:
//   q4   K/8 vectors of 16 int32; lane n holds columns 8j..8j+7 of row n, lowest nibble first
//   q8   K/4 vectors of 16 int32; lane n holds columns 4j..4j+3 of row n, lowest byte first
//   f16, bf16, f32   K vectors of 16 elements
// Groups of 32 columns have a scale and (q4) a minimum per row: fp16, 16 lanes each, group-major.
#pragma once
#include <algorithm>
#include <cstdint>

#include "vec.h"

namespace pellucid {

enum Format : int { F32 = 0, BF16 = 1, F16 = 2, Q8 = 3, Q4 = 4 };
constexpr int GROUP = 32;

// Bytes of one column of one tile.
static inline int64_t column_bytes(int format) {
  return format == F32 ? 64 : format == BF16 || format == F16 ? 32 : format == Q8 ? 16 : 8;
}

struct Args {
  const float* x;       // [m, k], rows x_stride apart
  int64_t x_stride;
  const uint8_t* w;     // packed tiles
  const uint16_t* scale;  // [tiles, k/32, 16] fp16, or null
  const uint16_t* minimum;
  const float* x_sum;   // [m, k/32]: sum of x over each group (q4 only)
  const float* bias;    // [n] or null
  float* y;             // [m, n], rows y_stride apart
  int64_t y_stride;
  int64_t m, n, k;
  int accumulate;       // y += instead of y =
};

// Rows of x against the 16-row tiles [begin, end) of W; called by every thread with its share.
void linear_tiles(int format, const Args& a, int64_t begin, int64_t end);

// Tiles that one row of x takes side by side: work is shared out in strips of so many.
constexpr int64_t STRIP = 4;

// Sums of x over each group of 32 columns, for rows [begin, end).
static inline void group_sums(const float* x, int64_t x_stride, int64_t groups, int64_t begin, int64_t end,
                              float* out) {
  for (int64_t r = begin; r < end; ++r)
    for (int64_t g = 0; g < groups; ++g) {
      const float* p = x + r * x_stride + g * GROUP;
      f32v total = load<f32v>(p);
      for (int i = WIDTH; i < GROUP; i += WIDTH) total += load<f32v>(p + i);
      out[r * groups + g] = sum(total);
    }
}

}  // namespace pellucid
