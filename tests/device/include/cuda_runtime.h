// A CUDA block on the host: each thread a fiber, one running at a time, so that FlashInfer's own
// kernels run on a machine without a GPU. What a block of threads can wait for is here; the
// instructions are in ptx.h. Written for this project's tests; no line of CUDA's is in it.
//
// What it can't show: two threads that race without a barrier between them, since fibers change
// only where they wait, and what fast math or a tensor core's order of sums does to the last bits.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other
#define __align__(n) alignas(n)
#define __grid_constant__

using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaFuncAttributeMaxDynamicSharedMemorySize = 8;
constexpr int cudaDevAttrMultiProcessorCount = 16;
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline dim3 threadIdx, blockIdx;
struct cudaLaunchConfig_t {
  dim3 grid, block;
  size_t bytes;
  cudaStream_t stream;
  void* attributes;
  unsigned count;
};
inline const char* cudaGetErrorString(cudaError_t) { return "refused"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = 188, cudaSuccess; }

constexpr size_t kSharedLimit = 101376;  // bytes a block may have on SM120

namespace block {
alignas(1024) inline char shared[2 * kSharedLimit];

[[noreturn]] inline void fail(const char* what) {
  std::printf("FAULT %s in block %u, thread %u\n", what, blockIdx.x, threadIdx.x);
  std::fflush(stdout);
  std::_Exit(3);
}

struct Thread {
  ucontext_t context;
  const uint64_t* watched = nullptr;  // waits while this is still `seen`
  uint64_t seen = 0;
  bool done = false;
};
struct Barrier { unsigned arrived = 0, expected = 0; uint64_t generation = 0; };
struct Mbarrier { unsigned count = 0, pending = 0; int64_t bytes = 0; uint64_t phase = 0; };
struct Warp { unsigned arrived = 0; const char* what = nullptr; uint64_t generation = 0; void* slots[32]; };

inline ucontext_t scheduler;
inline std::vector<Thread> threads;
inline std::map<unsigned, Barrier> barriers;
inline std::map<uint32_t, Mbarrier> mbarriers;
inline std::vector<Warp> warps;
inline void (*body)(void*);
inline void* given;
inline bool backwards = false;  // blocks from the last to the first

inline void wait(const uint64_t& generation, uint64_t seen) {
  Thread& self = threads[threadIdx.x];
  self.watched = &generation, self.seen = seen;
  swapcontext(&self.context, &scheduler);
}

inline void arrive(unsigned id, unsigned count) {
  Barrier& barrier = barriers[id];
  if (barrier.arrived != 0 && barrier.expected != count) fail("a barrier with two counts");
  barrier.expected = count;
  if (++barrier.arrived == count) barrier.arrived = 0, barrier.generation++;
}
inline void sync(unsigned id, unsigned count) {
  const uint64_t before = barriers[id].generation;
  arrive(id, count);
  if (barriers[id].generation == before) wait(barriers[id].generation, before);
}

inline void complete(Mbarrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) barrier.phase++, barrier.pending = barrier.count;
}

// What a warp does as one: the last lane that comes computes for all
template <typename Slot, typename Compute>
void together(const char* what, Slot& mine, Compute compute) {
  Warp& warp = warps[threadIdx.x / 32];
  if (warp.arrived != 0 && warp.what != what) fail("a warp that has parted");
  warp.what = what, warp.slots[threadIdx.x % 32] = &mine;
  if (++warp.arrived == 32) {
    Slot* lanes[32];
    for (int lane = 0; lane < 32; lane++) lanes[lane] = static_cast<Slot*>(warp.slots[lane]);
    compute(lanes);
    warp.arrived = 0, warp.generation++;
  } else {
    wait(warp.generation, warp.generation);
  }
}

inline void enter() {
  body(given);
  threads[threadIdx.x].done = true;
  swapcontext(&threads[threadIdx.x].context, &scheduler);
}

inline void run(unsigned count, size_t bytes) {
  constexpr size_t kStack = 256 * 1024;
  static std::vector<char*> stacks;
  while (stacks.size() < count) stacks.push_back(static_cast<char*>(std::malloc(kStack)));
  std::memset(shared, 0xFF, sizeof shared);  // every float of it is a NaN
  threads.assign(count, {}), warps.assign(count / 32, {}), barriers.clear(), mbarriers.clear();
  for (unsigned i = 0; i < count; i++) {
    getcontext(&threads[i].context);
    threads[i].context.uc_stack.ss_sp = stacks[i], threads[i].context.uc_stack.ss_size = kStack;
    makecontext(&threads[i].context, enter, 0);
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (unsigned i = 0; i < count; i++) {
      Thread& thread = threads[i];
      if (thread.done || (thread.watched != nullptr && *thread.watched == thread.seen)) continue;
      thread.watched = nullptr, threadIdx.x = i, moved = true;
      swapcontext(&scheduler, &thread.context);
    }
  }
  for (const Thread& thread : threads)
    if (!thread.done) fail("threads that wait for ever");
  for (size_t i = bytes; i < sizeof shared; i++)
    if (shared[i] != char(0xFF)) fail("a write beyond the shared memory that was asked");
}

template <typename... Given, size_t... At>
void call(void (*kernel)(Given...), void** args, std::index_sequence<At...>) {
  kernel(*static_cast<std::remove_const_t<std::remove_reference_t<Given>>*>(args[At])...);
}

template <typename... Given>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Given...), void** args) {
  if (config->bytes > kSharedLimit) fail("more shared memory than an SM120 has");
  static void (*called)(Given...);
  called = kernel, given = args;
  body = [](void* a) { call(called, static_cast<void**>(a), std::index_sequence_for<Given...>{}); };
  const dim3 grid = config->grid;
  for (unsigned i = 0, all = grid.x * grid.y * grid.z; i < all; i++) {
    const unsigned at = backwards ? all - 1 - i : i;
    blockIdx = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
    run(config->block.x, config->bytes);
  }
  return cudaSuccess;
}
// For <<< >>>, whose arguments become those of the kernel before they are handed over
struct Start {
  cudaLaunchConfig_t config;
  Start(dim3 grid, dim3 block, size_t bytes, cudaStream_t stream)
      : config{grid, block, bytes, stream, nullptr, 0} {}
  template <typename... Wanted, typename... Has>
  void operator()(void (*kernel)(Wanted...), const Has&... has) {
    std::tuple<Wanted...> made{has...};
    std::apply([&](auto&... one) { void* args[] = {(void*)&one...}; launch(&config, kernel, args); }, made);
  }
};
}  // namespace block

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, size_t bytes) { return bytes > kSharedLimit; }
// `kernel` is the launcher's own name for what it starts; CUDA's function gets it without a type
#define cudaLaunchKernelExC(config, erased, args) block::launch(config, kernel, args)

inline uint32_t __float_as_uint(float value) { uint32_t b; return std::memcpy(&b, &value, 4), b; }
inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }
inline float __uint_as_float(uint32_t bits) { float v; return std::memcpy(&v, &bits, 4), v; }
template <typename T>
T __ldg(const T* at) { return *at; }
inline void __threadfence_block() {}
inline void __syncthreads() { block::sync(0, block::threads.size()); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int atomicMax(int* at, int value) { return std::exchange(*at, std::max(*at, value)); }
// Shared memory is static, so without -pie its addresses are short; stacks and the heap lie apart
extern "C" char __data_start, _end;
inline uint32_t __cvta_generic_to_shared(const void* at) {
  if (at < &__data_start || at >= &_end) block::fail("an address that isn't shared");
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at));
}
inline float __shfl_xor_sync(uint32_t, float value, int mask) {
  struct Slot { float value; int mask; float got; } mine{value, mask, 0};
  block::together("shfl", mine, [](Slot** lanes) {
    for (int i = 0; i < 32; i++) lanes[i]->got = lanes[i ^ lanes[i]->mask]->value;
  });
  return mine.got;
}
