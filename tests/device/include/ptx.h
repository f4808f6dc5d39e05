// The instructions that FlashInfer's SM120 kernels for DSV4 are written in, by what PTX's manual says of
// them, for the block of cuda_runtime.h. Operands come in the order of the `asm` statement.
#pragma once
#include "cuda_fp8.h"

namespace ptx {
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;

template <typename... Any>
void unknown(Any&&...) { block::fail("an instruction that isn't known here"); }
template <typename... Any>
void nothing(Any&&...) {}

inline char* shared_at(u32 at) { return reinterpret_cast<char*>(uintptr_t(at)); }

inline void barrier_arrive(int id, int count) { block::arrive(id, count); }
inline void barrier_sync(int id, int count) { block::sync(id, count); }
inline void mbarrier_init(u32 at, u32 count) { block::mbarriers[at] = {count, count, 0, 0}; }
inline void mbarrier_expect(u32 at, u32 bytes) {
  block::Mbarrier& barrier = block::mbarriers.at(at);
  barrier.bytes += bytes, barrier.pending--;
  block::complete(barrier);
}
inline void mbarrier_arrive(u32 at) {
  block::mbarriers.at(at).pending--;
  block::complete(block::mbarriers.at(at));
}
inline void mbarrier_wait(u32& done, u32 at, u32 parity) {
  const block::Mbarrier& barrier = block::mbarriers.at(at);
  if ((barrier.phase & 1) == parity) block::wait(barrier.phase, barrier.phase);
  done = (barrier.phase & 1) != parity;
}
template <typename From>
void bulk_copy(u32 to, const From* from, u32 bytes, u32 at, uint64_t = 0) {
  if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16)
    block::fail("a bulk copy that isn't aligned");
  std::memcpy(shared_at(to), from, bytes);
  block::Mbarrier& barrier = block::mbarriers.at(at);
  barrier.bytes -= bytes;
  block::complete(barrier);
}
inline void policy(uint64_t& made) { made = 0; }

inline void select_bytes(u32& d, u32 a, u32 b, u32 selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  d = 0;
  for (int i = 0; i < 4; i++) d |= u32(u8(both >> 8 * ((selector >> 4 * i) & 7))) << 8 * i;
}
inline void select_halves(u32& d, u32 a, u32 b) { select_bytes(d, a, b, 0x5410); }

inline u16 to_half(float v) {  // of an e4m3, which a half holds exactly
  for (u32 h = 0; h < 0x7C00; h++)
    if (half_value(h) == std::fabs(v)) return h | (std::signbit(v) ? 0x8000 : 0);
  return 0x7E00;
}
inline void halves_of_e4m3(u32& d, u16 pair) {
  static const std::vector<u16> table = [] {
    std::vector<u16> made;
    for (int i = 0; i < 256; i++) made.push_back(to_half(e4m3_value(i)));
    return made;
  }();
  d = u32(table[pair >> 8]) << 16 | table[pair & 255];
}
inline void bfloats(u32& d, float high, float low) {
  d = u32(__float2bfloat16(high).x) << 16 | __float2bfloat16(low).x;
}

template <int N>
void ldmatrix(u32* const (&d)[N], u32 at) {
  struct Slot { u32 at; u32 got[N]; } mine{at, {}};
  if (at % 16) block::fail("a row of ldmatrix that isn't aligned");
  block::together("ldmatrix", mine, [](Slot** lanes) {
    for (int i = 0; i < 32; i++)
      for (int j = 0; j < N; j++)
        std::memcpy(&lanes[i]->got[j], shared_at(lanes[8 * j + i / 4]->at) + 4 * (i % 4), 4);
  });
  for (int j = 0; j < N; j++) *d[j] = mine.got[j];
}
inline void ldmatrix_x4(u32& a, u32& b, u32& c, u32& d, u32 at) { ldmatrix<4>({&a, &b, &c, &d}, at); }
inline void ldmatrix_x2(u32& a, u32& b, u32 at) { ldmatrix<2>({&a, &b}, at); }

// D[16, 8] = C + A[16, K] B[K, 8], each lane with its part of them
struct Mma {
  u32 a[4], b[2];
  float c[4];
  u32 scale_a, scale_b;
  float d[4];
};
template <int K>
float element(u32 word, int at) {
  return K == 32 ? e4m3_value(word >> 8 * at) : __bfloat162float({u16(word >> 16 * at)});
}
template <int K, bool Scaled>
void multiply(Mma** lanes) {
  constexpr int P = K / 8;  // elements in a register
  static float A[16][K], B[K][8];
  for (int i = 0; i < 32; i++) {
    const int group = i / 4, t = i % 4;
    for (int at = 0; at < P; at++)
      for (int half = 0; half < 2; half++) {
        const int k = half * K / 2 + t * P + at;
        A[group][k] = element<K>(lanes[i]->a[2 * half], at);
        A[group + 8][k] = element<K>(lanes[i]->a[2 * half + 1], at);
        B[k][group] = element<K>(lanes[i]->b[half], at);
      }
  }
  for (int i = 0; i < 32; i++)
    for (int r = 0; r < 4; r++) {
      const int row = i / 4 + (r / 2) * 8, column = i % 4 * 2 + r % 2;
      float sum = 0;
      for (int k = 0; k < K; k++) sum += A[row][k] * B[k][column];
      if (Scaled) {  // of a row from lane 0 or 1 of its quad, of a column from lane 0 of its own
        const u32 a = lanes[row % 8 * 4 + row / 8]->scale_a, b = lanes[column * 4]->scale_b;
        sum = std::ldexp(sum, int(a & 255) + int(b & 255) - 254);
      }
      lanes[i]->d[r] = lanes[i]->c[r] + sum;
    }
}
template <int K>
void mma(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
         float c0, float c1, float c2, float c3) {
  Mma mine{{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}, 0, 0, {}};
  block::together(K == 32 ? "mma e4m3" : "mma bf16", mine, multiply<K, false>);
  d0 = mine.d[0], d1 = mine.d[1], d2 = mine.d[2], d3 = mine.d[3];
}
inline void mma_scaled(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3,
                       u32 b0, u32 b1, float c0, float c1, float c2, float c3, u32 scale_a, int byte_a,
                       int thread_a, u32 scale_b, int byte_b, int thread_b) {
  if (byte_a || thread_a || byte_b || thread_b) block::fail("a choice of scales that isn't known");
  Mma mine{{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}, scale_a, scale_b, {}};
  block::together("mma scaled", mine, multiply<32, true>);
  d0 = mine.d[0], d1 = mine.d[1], d2 = mine.d[2], d3 = mine.d[3];
}
}  // namespace ptx
