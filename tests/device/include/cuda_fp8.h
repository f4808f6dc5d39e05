// Stands in for CUDA's header. Written for this project's tests.
#pragma once
#include "cuda_bf16.h"
inline float e4m3_value(uint8_t byte) {
  const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
  if ((byte & 127) == 127) return NAN;
  const float size = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return byte & 128 ? -size : size;
}
struct __nv_fp8_e4m3 {
  uint8_t __x;
  __nv_fp8_e4m3() = default;
  explicit __nv_fp8_e4m3(float v) {  // to nearest, ties to even; what is too large becomes 448
    const uint8_t sign = std::signbit(v) ? 128 : 0;
    const float size = std::fabs(v);
    if (v != v) { __x = 127; return; }
    if (size >= 448.f) { __x = sign | 126; return; }
    int exponent = 0;
    std::frexp(size, &exponent);
    const int step = std::max(exponent - 4, -9);  // of the last bit
    const float near = std::ldexp(std::nearbyint(std::ldexp(size, -step)), step);
    std::frexp(near, &exponent);
    if (near == 0.f) __x = sign;
    else if (exponent < -5) __x = sign | uint8_t(std::ldexp(near, 9));
    else __x = sign | uint8_t((exponent + 6) << 3) | (uint8_t(std::ldexp(near, 4 - exponent)) & 7);
  }
  operator float() const { return e4m3_value(__x); }
};
struct __half2 { uint16_t x, y; };
inline float half_value(uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 31) return mantissa ? NAN : h & 0x8000 ? -INFINITY : INFINITY;
  const float size = exponent ? std::ldexp(1024.f + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  return h & 0x8000 ? -size : size;
}
inline float __low2float(__half2 v) { return half_value(v.x); }
inline float __high2float(__half2 v) { return half_value(v.y); }
