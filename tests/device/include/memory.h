// Buffers that end where memory ends: a kernel that reads or writes past one is stopped there.
#pragma once
#include <signal.h>

#include <string>

#include "cuda_runtime.h"

constexpr int kTokens = 3;

inline std::vector<std::pair<const char*, const char*>> walls;  // where a buffer ends, and its name

template <typename T>
T* guarded(size_t count, const char* name) {
  const size_t bytes = count * sizeof(T), room = (bytes + 4095) / 4096 * 4096;
  void* made = mmap(nullptr, room + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char* wall = static_cast<char*>(made) + room;
  mprotect(wall, 4096, PROT_NONE);
  walls.emplace_back(wall, name);
  return reinterpret_cast<T*>(wall - bytes);
}
inline void on_fault(int, siginfo_t* info, void*) {
  const char* at = static_cast<const char*>(info->si_addr);
  for (const auto& [wall, name] : walls)
    if (at >= wall && at < wall + 4096) block::fail((std::string("an access past ") + name).c_str());
  block::fail("an access to nowhere");
}

inline void begin(bool backwards) {
  static char stack[1 << 16];
  stack_t other{stack, 0, sizeof stack};
  sigaltstack(&other, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  block::backwards = backwards;
}
inline void finish() {}
