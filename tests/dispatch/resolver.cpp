// Asks the resolver of 0.7.1 and later: a shape a line on standard input; on standard output what
// candidates() says for pages of 64 in the secondary cache, what it says for the real ones, and
// which variants resolve_attention() takes with the whole shape.
#include <iostream>

#include "sparse_mla_sm120/attention_resolve.cpp"

using namespace flashinfer::sparse_mla_sm120;
using namespace flashinfer::sparse_mla_sm120::execution;

template <typename Metadata>
void set_extra_row(Metadata& m, size_t bytes) {
  if constexpr (requires { m.extra_row_stride_bytes; }) m.extra_row_stride_bytes = bytes;
}

std::string listed(const ffi::Array<int64_t>& variants) {
  std::string made;
  for (const int64_t variant : variants) made += char('0' + variant);
  return made.empty() ? "-" : made;
}

int main() {
  int model, heads, topk, page, extra_topk, extra_page, rows, lengths;
  while (std::cin >> model >> heads >> topk >> page >> extra_topk >> extra_page >> rows >> lengths) {
    const bool dual = extra_topk > 0;
    const size_t bytes = cache_format_info(static_cast<ModelType>(model)).bytes_per_token;
    const auto page_bytes = [&](int rows_of) { return (size_t(rows_of) * bytes + 15) / 16 * 16; };
    std::cout << listed(candidates(model, heads, topk, page, dual, 64, "default")) << " "
              << listed(candidates(model, heads, topk, page, dual, dual ? extra_page : 64, "default"))
              << " ";
    ffi::Array<int64_t> taken;
    for (int variant = 0; variant <= 4; ++variant) {
      AttentionMetadata m{};
      m.model = model;
      m.tokens = rows;
      m.heads = heads;
      m.topk = topk;
      m.extra_topk = extra_topk;
      m.page_size = page;
      m.extra_page_size = extra_page;
      m.page_stride_bytes = page_bytes(page);
      m.extra_page_stride_bytes = page_bytes(extra_page);
      m.row_stride_bytes = int(bytes);
      m.indices_stride = topk;
      m.extra_indices_stride = extra_topk;
      m.lse_stride = heads;
      m.has_lengths = lengths != 0;
      m.has_extra_lengths = lengths != 0 && dual;
      m.variant = variant;
      set_extra_row(m, dual ? bytes : 0);
      try {
        // What an SM120 has: 188 multiprocessors, 99 KiB of shared memory a block
        resolve_attention(m, NumericRoute::QkBF16PvFP8, 1, {188, 101376});
        taken.push_back(variant);
      } catch (const ffi::Error&) {
      }
    }
    std::cout << listed(taken) << "\n";
  }
}
