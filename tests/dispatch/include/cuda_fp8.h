// Stands in for CUDA's header: sizes alone count. Written for this project's tests.
#pragma once
#include "cuda_bf16.h"
struct __nv_fp8_e4m3 {
  uint8_t __x;
  __nv_fp8_e4m3() = default;
  explicit __nv_fp8_e4m3(float);
  operator float() const;
};
struct __half2 { uint16_t x, y; };
