// Vectors as wide as the target's registers, as GCC and Clang have them: AVX-512, AVX2 and NEON all come from the same
// source. (Wider ones would compile too, but GCC keeps what fits no register in memory.)
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float f32v __attribute__((vector_size(WIDTH * 4)));
typedef int32_t i32v __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t u32v __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t u16v __attribute__((vector_size(WIDTH * 2)));

// Output rows of a tile of weights, and the vectors that hold one value of each.
constexpr int LANES = 16, PARTS = LANES / WIDTH;

template <typename V, typename T>
static inline V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <typename V, typename T>
static inline void store(T* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

static inline f32v from_bf16(u16v h) {
  u32v w = __builtin_convertvector(h, u32v) << 16;
  return (f32v)w;
}

// IEEE half to float without F16C: exact for every finite half, subnormals included, so that one
// source serves every target. (Rebias through a multiplication by 2^112, then fix infinities.)
static inline f32v from_fp16(u16v h) {
  u32v w = __builtin_convertvector(h, u32v);
  u32v sign = (w & 0x8000u) << 16;
  u32v magnitude = (w & 0x7fffu) << 13;
  f32v scaled = (f32v)magnitude * 0x1p112f;
  u32v special = (u32v)((w & 0x7c00u) == 0x7c00u);
  u32v bits = ((u32v)scaled & ~special) | ((magnitude | 0x7f800000u) & special);
  return (f32v)(bits | sign);
}

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x16 __attribute__((vector_size(64)));

#if __has_builtin(__builtin_shufflevector)
static inline f32x4 fold(f32x8 v) {
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
}
static inline f32x8 fold(f32x16 v) {
  return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
         __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
}
#else  // GCC 11: by way of memory
static inline f32x4 fold(f32x8 v) { return load<f32x4>((const float*)&v) + load<f32x4>((const float*)&v + 4); }
static inline f32x8 fold(f32x16 v) { return load<f32x8>((const float*)&v) + load<f32x8>((const float*)&v + 8); }
#endif

// The sum in a fixed tree, so that a row's result never depends on what it is batched with.
static inline float sum(f32x4 v) { return (v[0] + v[2]) + (v[1] + v[3]); }
static inline float sum(f32x8 v) { return sum(fold(v)); }
static inline float sum(f32x16 v) { return sum(fold(v)); }

// One accumulator a lane whatever the width, so that narrow vectors wait no longer for one another.
static inline float dot(const float* a, const float* b, int64_t n) {
  f32v acc[PARTS] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int p = 0; p < PARTS; ++p) acc[p] += load<f32v>(a + i + p * WIDTH) * load<f32v>(b + i + p * WIDTH);
  for (int p = 1; p < PARTS; ++p) acc[0] += acc[p];
  float total = sum(acc[0]);
  for (; i < n; ++i) total += a[i] * b[i];
  return total;
}

// fp16 bits of -8 d: three doublings. Exact unless it overflows to infinity (|d| > 8188, which no quantizer writes).
static inline uint16_t times_minus_eight(uint16_t d) {
  uint32_t magnitude = d & 0x7fffu;
  for (int i = 0; i < 3; ++i) {
    // Subnormals double by a shift, which carries into the exponent as it should.
    magnitude = magnitude < 0x400 ? magnitude << 1 : magnitude + 0x400;
    if (magnitude > 0x7c00) magnitude = 0x7c00;
  }
  return (uint16_t)(magnitude | (~d & 0x8000u));
}

// exp(x) to about 1 ulp: x = n ln2 + r, |r| <= ln2/2, then a degree-6 polynomial and a shift of n.
static inline f32v vexp(f32v x) {
  const f32v low = f32v{} - 87.0f, high = f32v{} + 88.0f;
  const i32v below = x < low, above = x > high;
  x = (f32v)(((i32v)x & ~below) | ((i32v)low & below));
  x = (f32v)(((i32v)x & ~above) | ((i32v)high & above));
  // Adding 1.5 * 2^23 rounds to the nearest integer, which then sits in the low mantissa bits.
  const f32v shifted = x * 1.44269504088896341f + 12582912.0f;
  const f32v n = shifted - 12582912.0f;
  f32v r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  f32v p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const u32v power = ((u32v)shifted + 127u) << 23;
  return p * (f32v)power;
}
