// Sixteen float lanes, as GCC/Clang vectors: AVX-512, AVX2 and NEON all come from the same source.
#pragma once
#include <cstdint>
#include <cstring>

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

constexpr int LANES = 16;

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

static inline f32x16 from_bf16(u16x16 h) {
  u32x16 w = __builtin_convertvector(h, u32x16) << 16;
  return (f32x16)w;
}

// IEEE half to float without F16C: exact for every finite half, subnormals included, so that one
// source serves every target. (Rebias through a multiplication by 2^112, then fix infinities.)
static inline f32x16 from_fp16(u16x16 h) {
  u32x16 w = __builtin_convertvector(h, u32x16);
  u32x16 sign = (w & 0x8000u) << 16;
  u32x16 magnitude = (w & 0x7fffu) << 13;
  f32x16 scaled = (f32x16)magnitude * 0x1p112f;
  u32x16 special = (u32x16)((w & 0x7c00u) == 0x7c00u);
  u32x16 bits = ((u32x16)scaled & ~special) | ((magnitude | 0x7f800000u) & special);
  return (f32x16)(bits | sign);
}

static inline float sum(f32x16 v) {
  // A fixed tree, so that a row's result never depends on what it is batched with.
  const f32x8 eight = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                      __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  const f32x4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// fp16 bits of -8 d. Exact unless it overflows (|d| > 8188, which no quantizer writes).
static inline uint16_t times_minus_eight(uint16_t d) {
  _Float16 value;
  std::memcpy(&value, &d, 2);
  value = (_Float16)(-8.0f * (float)value);
  std::memcpy(&d, &value, 2);
  return d;
}

// exp(x) to about 1 ulp: x = n ln2 + r, |r| <= ln2/2, then a degree-6 polynomial and a shift of n.
static inline f32x16 exp16(f32x16 x) {
  const f32x16 low = f32x16{} - 87.0f, high = f32x16{} + 88.0f;
  const i32x16 below = x < low, above = x > high;
  x = (f32x16)(((i32x16)x & ~below) | ((i32x16)low & below));
  x = (f32x16)(((i32x16)x & ~above) | ((i32x16)high & above));
  // Adding 1.5 * 2^23 rounds to the nearest integer, which then sits in the low mantissa bits.
  const f32x16 shifted = x * 1.44269504088896341f + 12582912.0f;
  const f32x16 n = shifted - 12582912.0f;
  f32x16 r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  f32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const i32x16 power = __builtin_convertvector(n, i32x16) + 127;
  return p * (f32x16)(power << 23);
}
