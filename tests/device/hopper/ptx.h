// The one instruction of these kernels that sm_90a lacks, made of one that it has: a product of e4m3
// whose rows and columns are scaled by powers of two.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace ptx {
__device__ inline void mma_scaled(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1,
                                  uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1,
                                  float c2, float c3, uint32_t scale_a, int, int, uint32_t scale_b, int,
                                  int) {
  float p0, p1, p2, p3;
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\n"
      : "=f"(p0), "=f"(p1), "=f"(p2), "=f"(p3)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f), "f"(0.f), "f"(0.f), "f"(0.f));
  // Of a row from lane 0 or 1 of its quad, of a column from lane 0 of its own
  const int lane = threadIdx.x & 31, quad = lane & ~3, column = (lane & 3) * 8;
  const int low = __shfl_sync(0xffffffff, scale_a, quad) - 254;
  const int high = __shfl_sync(0xffffffff, scale_a, quad + 1) - 254;
  const int left = __shfl_sync(0xffffffff, scale_b, column);
  const int right = __shfl_sync(0xffffffff, scale_b, column + 4);
  d0 = c0 + ldexpf(p0, low + left), d1 = c1 + ldexpf(p1, low + right);
  d2 = c2 + ldexpf(p2, high + left), d3 = c3 + ldexpf(p3, high + right);
}
}  // namespace ptx
