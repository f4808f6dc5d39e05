// Asks the dispatch code of 0.6.14 to 0.7.0, whole calls as Python makes them: a shape a line on
// standard input, on standard output 1 and the launchers reached, or 0 and the refusal.
#include <iostream>

#include "sparse_mla_sm120_jit_binding.cpp"

using Views = std::optional<TensorView>;
struct Asked {
  int phase, model, width, bytes, heads, topk, page, extra_topk, extra_page, rows, variant, lengths;
};

template <typename... Given>
void prefill(void (*call)(Given...), const Asked& a, TensorView q, TensorView kv, TensorView ids,
             TensorView out, TensorView lse, Views len, Views kv2, Views ids2, Views len2) {
  if constexpr (sizeof...(Given) == 12) {
    call(q, kv, ids, out, lse, 1.0, a.model, len, {}, kv2, ids2, len2);
  } else {
    call(q, kv, ids, out, lse, 1.0, a.model, a.variant, len, {}, kv2, ids2, len2);
  }
}

void ask(const Asked& a) {
  auto cache = [&](int page) { return TensorView{{4, page, a.bytes}, 8}; };
  TensorView q{{a.rows, a.heads, a.width}, 16}, ids{{a.rows, a.topk}, 32};
  TensorView out{{a.rows, a.heads, 512}, 16}, lse{{a.rows, a.heads}, 32};
  Views len, kv2, ids2, len2;
  if (a.lengths) len = TensorView{{a.rows}, 32};
  if (a.extra_topk > 0) {
    kv2 = cache(a.extra_page);
    ids2 = TensorView{{a.rows, a.extra_topk}, 32};
    if (a.lengths) len2 = TensorView{{a.rows}, 32};
  }
  const int splits = (a.topk + 63) / 64 + (a.extra_topk + 63) / 64;
  if (a.phase == 1) {
    prefill(exported::sparse_mla_sm120_paged_attention, a, q, cache(a.page), ids, out, lse, len, kv2,
            ids2, len2);
  } else if (a.model == 1) {
    exported::sparse_mla_sm120_decode_dsv4(q, cache(a.page), ids, out, lse, out, lse, splits, 1.0,
                                           len, {}, kv2, ids2, len2, 0);
  } else {
    exported::sparse_mla_sm120_decode_dsv3_2(q, cache(a.page), ids, out, lse, out, lse, splits, 1.0,
                                             len, {}, a.model, 0);
  }
}

int main() {
  Asked a;
  while (std::cin >> a.phase >> a.model >> a.width >> a.bytes >> a.heads >> a.topk >> a.page >>
         a.extra_topk >> a.extra_page >> a.rows >> a.variant >> a.lengths) {
    recorder::launches.clear();
    std::string said = "1 ";
    try {
      ask(a);
      said += recorder::launches;
    } catch (const tvm::ffi::Error& error) {
      said = std::string("0 ") + error.what();
    }
    for (char& c : said) c = c == '\n' ? ';' : c;
    std::cout << said << "\n";
  }
}
