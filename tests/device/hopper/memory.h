// Buffers for a real card: what is written past one is found afterwards, what is read is not.
#pragma once
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

constexpr int kTokens = 301;
constexpr size_t kSharedLimit = 101376;  // bytes a block may have on SM120; this card has more

struct Wall { unsigned char* at; std::string name; };
inline std::vector<Wall> walls;
constexpr int kWall = 1 << 16;

inline void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("FAULT %s\n", cudaGetErrorString(error));
  std::exit(3);
}
template <typename T>
T* guarded(size_t count, const char* name) {
  unsigned char* made = nullptr;
  must(cudaMallocManaged(&made, count * sizeof(T) + kWall));
  walls.push_back({made + count * sizeof(T), name});
  for (int i = 0; i < kWall; i++) walls.back().at[i] = 0xA5;
  return reinterpret_cast<T*>(made);
}
inline void begin(bool) {}
inline void finish() {
  must(cudaDeviceSynchronize());
  for (const Wall& wall : walls)
    for (int i = 0; i < kWall; i++)
      if (wall.at[i] != 0xA5) {
        std::printf("FAULT a write past %s\n", wall.name.c_str());
        std::exit(3);
      }
}
