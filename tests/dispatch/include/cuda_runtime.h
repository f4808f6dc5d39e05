// Stands in for CUDA's header, so that FlashInfer's dispatch code compiles for the host: enough
// names to parse its headers, and a launch that is written down instead of made. Written for this
// project's tests; no line of CUDA's is in it.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__
#define __constant__
#define __align__(n)
#define __grid_constant__
#define __CUDA_ALIGN__(n)

using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidDeviceFunction = 98;
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaDevAttrMultiProcessorCount = 16;
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline dim3 threadIdx, blockIdx, blockDim, gridDim;
struct cudaLaunchConfig_t {
  dim3 grid, block;
  size_t bytes;
  cudaStream_t stream;
  void* attributes;
  unsigned count;
};

inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = 188, cudaSuccess; }
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, size_t) { return cudaSuccess; }

// The recorder: every launch adds the launcher, with its template's arguments as the compiler
// spells them
namespace recorder {
inline std::string launches;
inline cudaError_t note(const char* launcher) {
  launches += std::string(launcher) + "\n";
  return cudaSuccess;
}
inline void kernel() {}
}  // namespace recorder
#define cudaLaunchKernelExC(...) recorder::note(__PRETTY_FUNCTION__)

// What device code calls. It is parsed, and never run.
#define DEVICE_ONLY(kind, name) \
  template <typename... Any>    \
  kind name(Any...);
DEVICE_ONLY(unsigned, __cvta_generic_to_shared)
DEVICE_ONLY(unsigned, __float_as_uint)
DEVICE_ONLY(float, __uint_as_float)
DEVICE_ONLY(float, __high2float)
DEVICE_ONLY(float, __low2float)
DEVICE_ONLY(float, __shfl_xor_sync)
DEVICE_ONLY(int, __float_as_int)
