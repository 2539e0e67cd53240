// The cast kernel that Triton compiled, launched through the CUDA driver.
//
// Triton compiles a kernel anew for every kind of arguments: types, addresses and integers that are multiples of 16, integers that are 1 (those it
// leaves out). `Cast::key` holds exactly that. The first launch of a kind is Python's (`resolve`); it registers the kernel for those that follow.
// CUDA's headers are not needed: one entry of the driver and one of torch's C interface, both looked up where they are.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace ampplug {

// cuLaunchKernel
using LaunchKernel =
    int (*)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared, void* stream, void** parameters, void** extra);
// aoti_torch_get_current_cuda_stream
using CurrentStream = int (*)(int32_t device, void** stream);

using GetContext = int (*)(void** context);                      // cuCtxGetCurrent
using SetContext = int (*)(void* context);                       // cuCtxSetCurrent
using GetDevice = int (*)(int* device, int index);               // cuDeviceGet
using RetainContext = int (*)(void** context, int device);       // cuDevicePrimaryCtxRetain

struct Kernel {
  void* function;
  unsigned threads, shared;
};

// Arguments of `cast_kernel` with a delayed scale, in the order of its signature.
struct Cast {
  const void *x, *rows, *columns, *scale_inv, *slot_scale, *partials, *record, *scratch;
  int32_t integers[10];  // M, K, stride_m, stride_k, row_stride, column_stride, n_partials, tiles_m, span, menders
  float zero = 0.0f;
  // what else the kernel is compiled for
  uint8_t device, x_type, fp8_type;
  bool has_rows, has_columns, has_record, power_of_two;
  unsigned programs;

  static constexpr int POINTERS = 8, INTEGERS = 10;

  uint64_t key() const {
    uint64_t k = device;
    k = k << 3 | x_type;
    k = k << 1 | fp8_type;
    k = k << 4 | uint64_t(has_rows) << 3 | uint64_t(has_columns) << 2 | uint64_t(has_record) << 1 | uint64_t(power_of_two);
    for (const void* p : {x, rows, columns, scale_inv, slot_scale, partials, record, scratch}) k = k << 1 | (reinterpret_cast<uintptr_t>(p) % 16 == 0);
    for (int32_t i : integers) k = k << 2 | uint64_t(i == 1) << 1 | uint64_t(i % 16 == 0);
    return k;
  }

  // Pointers to the values, as the driver wants them; integers that are 1 are constants of the kernel. Behind them as many null addresses as any
  // Triton adds (scratch memory, of which the kernel has none): the driver reads as many as the kernel has.
  int parameters(void** out) {
    static void* nothing = nullptr;
    int n = 0;
    for (const void** p : {&x, &rows, &columns, &scale_inv, &slot_scale, &partials, &record, &scratch}) out[n++] = p;
    for (int32_t& i : integers)
      if (i != 1) out[n++] = &i;
    out[n++] = &zero;
    for (int i = 0; i < 4; ++i) out[n + i] = &nothing;
    return n;
  }
  static constexpr int MOST = POINTERS + INTEGERS + 1 + 4;
};

// Sizes in bytes of the parameters of the kernel of this key, without what Triton adds behind them.
inline std::vector<int> parameter_sizes(uint64_t key) {
  std::vector<int> sizes(Cast::POINTERS, 8);
  for (int i = Cast::INTEGERS - 1; i >= 0; --i)
    if (!(key >> (2 * i + 1) & 1)) sizes.push_back(4);
  sizes.push_back(4);
  return sizes;
}

class Launcher {
 public:
  LaunchKernel launch_kernel = nullptr;
  CurrentStream current_stream = nullptr;
  std::atomic<int64_t> launches{0};  // since they were last taken

  // Look the entries up; what is missing stays null.
  void find() {
    if (void* driver = dlopen("libcuda.so.1", RTLD_LAZY)) {
      get_context_ = reinterpret_cast<GetContext>(dlsym(driver, "cuCtxGetCurrent"));
      set_context_ = reinterpret_cast<SetContext>(dlsym(driver, "cuCtxSetCurrent"));
      get_device_ = reinterpret_cast<GetDevice>(dlsym(driver, "cuDeviceGet"));
      retain_context_ = reinterpret_cast<RetainContext>(dlsym(driver, "cuDevicePrimaryCtxRetain"));
      if (get_context_ && set_context_ && get_device_ && retain_context_) launch_kernel = reinterpret_cast<LaunchKernel>(dlsym(driver, "cuLaunchKernel"));
    }
    if (void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD))
      current_stream = reinterpret_cast<CurrentStream>(dlsym(torch, "aoti_torch_get_current_cuda_stream"));
  }

  void* stream(int device) const {
    void* found = nullptr;
    if (device >= 0 && current_stream(device, &found) != 0) throw std::runtime_error("ampplug: torch gives no current stream");
    return found;
  }

  void add(uint64_t key, Kernel kernel) {
    std::lock_guard<std::mutex> lock(mutex_);
    kernels_[key] = kernel;
  }

  bool find(uint64_t key, Kernel& kernel) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = kernels_.find(key);
    if (found == kernels_.end()) return false;
    kernel = found->second;
    return true;
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    kernels_.clear();
  }

  // device: of the stream; -1 where there is none.
  void launch(const Kernel& kernel, Cast& cast, int device, void* stream) {
    if (device >= 0) ensure_context(device);
    void* parameters[Cast::MOST];
    cast.parameters(parameters);
    int error = launch_kernel(kernel.function, cast.programs, 1, 1, kernel.threads, 1, 1, kernel.shared, stream, parameters, nullptr);
    if (error != 0) throw std::runtime_error("ampplug: the launch of cast_kernel failed, CUDA driver error " + std::to_string(error));
    launches.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  // A thread in which nothing ran yet on its device, as autograd's own may be, has no context: CUDA's runtime makes it current on first use, and
  // the driver, which is called here, does not.
  void ensure_context(int index) const {
    void* context = nullptr;
    int device = 0;
    if (get_context_(&context) == 0 && context != nullptr) return;
    if (get_device_(&device, index) != 0 || retain_context_(&context, device) != 0 || set_context_(context) != 0)
      throw std::runtime_error("ampplug: this thread gets no CUDA context");
  }

  GetContext get_context_ = nullptr;
  SetContext set_context_ = nullptr;
  GetDevice get_device_ = nullptr;
  RetainContext retain_context_ = nullptr;
  std::mutex mutex_;
  std::unordered_map<uint64_t, Kernel> kernels_;
};

}  // namespace ampplug
