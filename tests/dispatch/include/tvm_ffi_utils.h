// Stands in for FlashInfer's and TVM's headers: tensors that have a shape and no data, and checks
// that throw. Written for this project's tests.
#pragma once
#include "cuda_bf16.h"

#include <climits>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace tvm::ffi {
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
using String = std::string;
template <typename T>
struct Array : std::vector<T> {
  using std::vector<T>::vector;
};
template <typename K, typename V>
struct Map : std::map<K, V> {
  using std::map<K, V>::map;
  void Set(const K& key, const V& value) { (*this)[key] = value; }
};
template <typename T>
using Optional = std::optional<T>;
struct DataType { int bits; };
struct Device { int device_id; };
struct TensorView {
  std::vector<int64_t> shape;
  int bits;
  int ndim() const { return int(shape.size()); }
  int64_t size(int at) const { return shape.at(at < 0 ? ndim() + at : at); }
  int64_t stride(int at) const {
    int64_t made = 1;
    for (int i = (at < 0 ? ndim() + at : at) + 1; i < ndim(); ++i) made *= shape[i];
    return made;
  }
  DataType dtype() const { return {bits}; }
  Device device() const { return {0}; }
  void* data_ptr() const { return reinterpret_cast<void*>(16); }
};
struct CUDADeviceGuard {
  explicit CUDADeviceGuard(int) {}
};
// Plans are packed for Python, which isn't here: these have the names, and do nothing
struct Any {
  template <typename T>
  Any(const T&) {}
};
struct Function {
  Function() = default;
  explicit Function(std::nullptr_t) {}
  template <typename Any>
  static Function FromTyped(Any) { return {}; }
};
struct ModuleObj {
  virtual ~ModuleObj() = default;
  virtual const char* kind() const { return ""; }
  virtual Optional<Function> GetFunction(const String&) { return {}; }
};
struct Module {
  Module() = default;
  explicit Module(std::shared_ptr<ModuleObj> object) : held(std::move(object)) {}
  const ModuleObj* get() const { return held.get(); }
  std::shared_ptr<ModuleObj> held;
};
template <typename T, typename... Given>
std::shared_ptr<T> make_object(Given&&... given) {
  return std::make_shared<T>(std::forward<Given>(given)...);
}
}  // namespace tvm::ffi
namespace ffi = tvm::ffi;
using tvm::ffi::TensorView;
namespace flashinfer { namespace ffi = tvm::ffi; }

struct Thrower {
  std::ostringstream words;
  explicit Thrower(const char* text) { words << text << ": "; }
  template <typename T>
  Thrower& operator<<(const T& word) { return words << word, *this; }
  ~Thrower() noexcept(false) { throw tvm::ffi::Error(words.str()); }
};
#define TVM_FFI_ICHECK(held) \
  if (held) {                \
  } else                     \
    Thrower(#held)
#define TVM_FFI_ICHECK_EQ(a, b) TVM_FFI_ICHECK((a) == (b))
#define TVM_FFI_ICHECK_NE(a, b) TVM_FFI_ICHECK((a) != (b))
#define TVM_FFI_ICHECK_LT(a, b) TVM_FFI_ICHECK((a) < (b))
#define TVM_FFI_ICHECK_LE(a, b) TVM_FFI_ICHECK((a) <= (b))
#define TVM_FFI_ICHECK_GT(a, b) TVM_FFI_ICHECK((a) > (b))
#define TVM_FFI_ICHECK_GE(a, b) TVM_FFI_ICHECK((a) >= (b))
#define TVM_FFI_THROW(kind) Thrower(#kind)
#define CHECK_CUDA(x)
#define CHECK_DIM(n, x) TVM_FFI_ICHECK_EQ((x).ndim(), n)
#define CHECK_INPUT_TYPE(x, type)
#define CHECK_INPUT_AND_TYPE(x, type)
#define CHECK_LAST_DIM_CONTIGUOUS(x)
inline cudaStream_t get_stream(tvm::ffi::Device) { return nullptr; }

// What a module exports is called through main.cpp
#define TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, function) \
  namespace exported {                                \
  auto name = &function;                              \
  }
