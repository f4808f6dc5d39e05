// Runs FlashInfer's own attention for DSV4, from its dispatch to its kernels, and holds 8 heads
// against 16 of which they are the first half, and both against a plain softmax. A case a line on
// standard input (name, phase, topk, secondary topk, secondary page, lengths, sink); on standard
// output what came of it. memory.h says what a buffer is, and how an access past one is noticed.
#include <cmath>
#include <cstring>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "memory.h"
#include "sparse_mla_sm120_decode_dsv4.cpp"
#include "sparse_mla_sm120_prefill.cpp"

namespace sm120 = flashinfer::sparse_mla_sm120;
using KV = KVCacheTraits<ModelType::DSV4>;
constexpr int kPage = 64, kSlots = 320, kData = KV::D_NOPE + 2 * D_ROPE;
constexpr float kScale = 0.0625f;

// What a block may have, and what lies in one place by turns
template <ComputeMode CM>
constexpr bool layout_fits() {
  using L = SmemLayoutMG<ModelType::DSV4, CM>;
  static_assert(L::TOTAL <= kSharedLimit);
  static_assert(HPB * D_V * sizeof(bf16) <= L::SMEM_KV_BUF, "the output of a group, over tile 0");
  static_assert(L::N_HG * HPB * BI * sizeof(bf16) <= L::SMEM_W_FP8_MG, "weights for the rope part");
  static_assert(L::N_HG * HPB * D_ROPE * sizeof(bf16) <= L::SMEM_W_FP8_MG, "the rope part of Q");
  static_assert(HPB * KV::NUM_SCALES * sizeof(float) <= L::SMEM_REDUCE_MG, "maxima of Q");
  static_assert(L::OFF_W_FP8 + L::SMEM_W_FP8_MG <= L::OFF_MBAR_KV);
  static_assert(L::OFF_KV0 % 16 == 0 && L::SMEM_KV_BUF % 16 == 0 && L::OFF_W_FP8 % 16 == 0);
  return true;
}
static_assert(layout_fits<ComputeMode::FP8>() && layout_fits<ComputeMode::BF16>());

std::mt19937 random_bits(20261201);

float normal() { return std::normal_distribution<float>()(random_bits); }

struct Cache {
  int page = kPage;
  size_t stride = 0;
  uint8_t* bytes = nullptr;
  std::vector<std::vector<double>> rows;  // what a slot means
};
Cache make_cache(int page, const char* name) {
  Cache cache{page, size_t(page) * KV::KV_GMEM_STRIDE + 48};  // pages with a gap between them
  cache.bytes = guarded<uint8_t>(cache.stride * (kSlots / page), name);
  for (int slot = 0; slot < kSlots; slot++) {
    uint8_t* page_at = cache.bytes + slot / page * cache.stride;
    uint8_t* data = page_at + slot % page * kData;
    uint8_t* scales = page_at + page * kData + slot % page * KV::SCALE_BYTES_PER_TOKEN;
    std::vector<double> row;
    for (int tile = 0; tile < KV::NUM_SCALES; tile++) {
      scales[tile] = 119 + random_bits() % 4;
      for (int d = 0; d < KV::QUANT_TILE; d++) {
        const float scale = ue8m0_to_fp32(scales[tile]);
        const __nv_fp8_e4m3 byte(normal() / scale);
        data[tile * KV::QUANT_TILE + d] = byte.__x;
        row.push_back(double(float(byte)) * scale);
      }
    }
    for (int d = 0; d < D_ROPE; d++) {
      const bf16 value = __float2bfloat16(normal());
      std::memcpy(data + KV::D_NOPE + 2 * d, &value, 2);
      row.push_back(__bfloat162float(value));
    }
    cache.rows.push_back(row);
  }
  return cache;
}

struct Case { std::string name, phase; int topk, extra_topk, extra_page, lengths, sink; };
struct Given {
  Cache main, extra;
  int32_t *ids, *extra_ids;
  int *length, *extra_length;
};
struct Heads { bf16 *q, *out; float *lse, *sink; int count; };

int32_t* make_ids(int width, const char* name) {
  int32_t* ids = guarded<int32_t>(size_t(kTokens) * width, name);
  for (int i = 0; i < kTokens * width; i++) ids[i] = i % 7 == 5 ? -1 : int(random_bits() % kSlots);
  return ids;
}

Heads make_heads(int count) {
  Heads heads{guarded<bf16>(size_t(kTokens) * count * KV::D_QK, "the queries"),
              guarded<bf16>(size_t(kTokens) * count * D_V, "the output"),
              guarded<float>(size_t(kTokens) * count, "the LSE"),
              guarded<float>(count, "the sinks"), count};
  std::memset(heads.out, 0xFF, size_t(kTokens) * count * D_V * 2);
  std::memset(heads.lse, 0xFF, size_t(kTokens) * count * 4);
  return heads;
}

bool decode(const Case& c, const Given& g, Heads& h) {
  const int splits = (c.topk + 63) / 64 + (c.extra_topk + 63) / 64;
  bf16* parts = guarded<bf16>(size_t(kTokens) * h.count * splits * D_V, "the parts");
  float* sums = guarded<float>(size_t(kTokens) * h.count * splits, "the sums of the parts");
  return sm120::launch_sparse_mla_decode_dsv4(
      ModelType::DSV4, h.count, c.topk, kPage, kTokens, splits, h.q, g.main.bytes, g.ids, parts, sums,
      h.out, h.lse, g.length, c.sink ? h.sink : nullptr, g.extra.bytes, g.extra_ids, g.extra_length,
      c.extra_topk, c.extra_topk ? c.extra_page : 0, g.extra.stride, 0, kScale, g.main.stride, nullptr);
}

bool run(const Case& c, const Given& g, Heads& h) {
  if (c.phase == "decode") return decode(c, g, h);
  return sm120::sparse_mla_prefill_dispatch(
      ModelType::DSV4, h.count, c.topk, kPage, c.extra_topk, c.extra_topk ? c.extra_page : 0, h.q,
      g.main.bytes, g.ids, g.extra.bytes, g.extra_ids, h.out, h.lse, kScale, kTokens, g.main.stride,
      g.extra.stride, c.sink ? h.sink : nullptr, g.length, g.extra_length, nullptr);
}

// Largest error of the LSE, and the output's against its own size, of attention in double
std::pair<double, double> errors(const Case& c, const Given& g, const Heads& h) {
  double worst_lse = 0, wrong = 0, size = 0;
  for (int row = 0; row < kTokens * h.count; row++) {
    const int token = row / h.count, head = row % h.count;
    std::vector<const std::vector<double>*> taken;
    const auto take = [&](const Cache& cache, const int32_t* ids, int width, const int* length) {
      const int valid = length ? length[token] : width;
      for (int i = 0; i < valid; i++)
        if (ids[token * width + i] >= 0) taken.push_back(&cache.rows[ids[token * width + i]]);
    };
    take(g.main, g.ids, c.topk, g.length);
    if (c.extra_topk) take(g.extra, g.extra_ids, c.extra_topk, g.extra_length);
    double sum = c.sink ? std::exp(double(h.sink[head])) : 0;
    std::vector<double> value(D_V);
    for (const auto* key : taken) {
      double logit = 0;
      for (int d = 0; d < KV::D_QK; d++)
        logit += __bfloat162float(h.q[size_t(row) * KV::D_QK + d]) * (*key)[d];
      const double weight = std::exp(logit * kScale);
      sum += weight;
      for (int d = 0; d < D_V; d++) value[d] += weight * (*key)[d];
    }
    worst_lse = std::max(worst_lse, std::fabs(h.lse[row] - std::log2(sum)));
    if (!(h.lse[row] == h.lse[row])) worst_lse = INFINITY;
    for (int d = 0; d < D_V; d++) {
      const double got = __bfloat162float(h.out[size_t(row) * D_V + d]), want = value[d] / sum;
      wrong += (got - want) * (got - want), size += want * want;
    }
  }
  return {worst_lse, std::sqrt(wrong / size)};
}

void answer(const Case& c) {
  Given g{make_cache(kPage, "the cache"), {}, make_ids(c.topk, "the ids"), nullptr, nullptr, nullptr};
  if (c.extra_topk) {
    g.extra = make_cache(c.extra_page, "the secondary cache");
    g.extra_ids = make_ids(c.extra_topk, "the secondary ids");
  }
  if (c.lengths) {  // a full row, one that ends within a tile, and one of less than a tile
    const int lengths[] = {c.topk, c.topk - 37, 5}, extra[] = {3, c.extra_topk - 1, c.extra_topk};
    g.length = guarded<int>(kTokens, "the lengths");
    if (c.extra_topk) g.extra_length = guarded<int>(kTokens, "the secondary lengths");
    for (int t = 0; t < kTokens; t++) {
      g.length[t] = lengths[t % 3];
      if (c.extra_topk) g.extra_length[t] = extra[t % 3];
    }
  }
  Heads full = make_heads(16), half = make_heads(8);
  for (int i = 0; i < kTokens * 16 * KV::D_QK; i++) full.q[i] = __float2bfloat16(normal());
  for (int i = 0; i < 16; i++) full.sink[i] = 2 * normal();
  std::memcpy(half.sink, full.sink, 8 * sizeof(float));
  for (int t = 0; t < kTokens; t++)
    std::memcpy(half.q + t * 8 * KV::D_QK, full.q + t * 16 * KV::D_QK, 8 * KV::D_QK * sizeof(bf16));
  std::cout << c.name << " ";
  const bool served = run(c, g, full) && run(c, g, half);
  finish();
  if (!served) {
    std::cout << "refused" << std::endl;
    return;
  }
  bool same = true;
  for (int t = 0; t < kTokens; t++) {
    same &= !std::memcmp(half.out + t * 8 * D_V, full.out + t * 16 * D_V, 8 * D_V * sizeof(bf16));
    same &= !std::memcmp(half.lse + t * 8, full.lse + t * 16, 8 * sizeof(float));
  }
  const auto [lse, out] = errors(c, g, half);
  const auto [full_lse, full_out] = errors(c, g, full);
  std::cout << (same ? "same " : "other ") << lse << " " << out << " " << full_lse << " " << full_out
            << std::endl;
}

int main(int, char** words) {
  begin(words[1] != nullptr);
  Case c;
  while (std::cin >> c.name >> c.phase >> c.topk >> c.extra_topk >> c.extra_page >> c.lengths >> c.sink)
    answer(c);
}
