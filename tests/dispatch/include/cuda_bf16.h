// Stands in for CUDA's header: sizes alone count. Written for this project's tests.
#pragma once
#include "cuda_runtime.h"
struct __nv_bfloat16 { uint16_t x; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
float __bfloat162float(__nv_bfloat16);
__nv_bfloat16 __float2bfloat16(float);
