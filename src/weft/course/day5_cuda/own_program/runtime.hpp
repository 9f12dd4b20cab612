// CUDA's run-time on a CPU, as far as a first program needs it: device memory that the host may not touch, kernels that run later.
// weft writes kernel<<<grid, block>>>(arguments) as weft::launch(kernel, grid, block, arguments). WEFT_FAILS names a call that fails;
// what the program did is written to WEFT_REPORT when it ends.
#pragma once
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <sys/mman.h>
#include <type_traits>
#include <unistd.h>
#include <vector>

#define __global__
#define __device__
#define __host__

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorInvalidConfiguration = 9,
                   cudaErrorLaunchFailure = 719, cudaErrorIllegalAddress = 700 };
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };

inline const char *cudaGetErrorString(cudaError_t e) {
  switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    default: return "unspecified launch failure";
  }
}

namespace weft {

struct Allocation {
  char *pages;
  std::size_t pages_size, size;
};
inline std::map<char *, Allocation> device;  // by the pointer that the program has
inline std::vector<std::function<void()>> pending;
inline cudaError_t last = cudaSuccess, sticky = cudaSuccess;
inline long launches, blocks, copied;
inline bool in_kernel;

inline bool fails(const char *call) {
  const char *named = std::getenv("WEFT_FAILS");
  return named && !std::strcmp(named, call);
}
inline cudaError_t give(cudaError_t e) {
  if (sticky != cudaSuccess) e = sticky;
  if (e != cudaSuccess) last = e;
  return e;
}
inline void report(const char *end) {
  if (const char *path = std::getenv("WEFT_REPORT"))
    if (std::FILE *f = std::fopen(path, "w")) {
      std::fprintf(f, "%s %zu %ld %ld %ld %zu\n", end, device.size(), launches, blocks, copied, pending.size());
      std::fclose(f);
    }
}
inline void fault(int) {
  report(in_kernel ? "kernel" : "host");
  _exit(139);
}
struct AtEnd {
  AtEnd() { std::signal(SIGSEGV, fault), std::signal(SIGBUS, fault); }
  ~AtEnd() { report("end"); }
};
inline AtEnd at_end;

inline void open_device(bool open) {
  for (auto &[pointer, a] : device) mprotect(a.pages, a.pages_size, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}
inline void wait() {
  for (auto &run : pending) run();
  pending.clear();
}
// Whether size bytes from p lie in one allocation.
inline bool on_device(const void *p, std::size_t size) {
  auto found = device.upper_bound(const_cast<char *>(static_cast<const char *>(p)));
  if (found == device.begin()) return false;
  --found;
  return static_cast<const char *>(p) + size <= found->first + found->second.size;
}
template <typename T> bool usable(T value) {
  if constexpr (std::is_pointer_v<T>) return on_device(value, 1);
  return true;
}
template <typename... P, typename... A> void launch(void (*kernel)(P...), dim3 grid, dim3 block, A... arguments) {
  if (std::uint64_t(block.x) * block.y * block.z > 1024 || !block.x || !grid.x || fails("launch")) {
    give(fails("launch") ? cudaErrorLaunchFailure : cudaErrorInvalidConfiguration);
    return;
  }
  launches++, blocks += long(grid.x) * grid.y * grid.z;
  pending.push_back([=] {
    if (!(usable(arguments) && ...)) {
      sticky = cudaErrorIllegalAddress;
      return;
    }
    open_device(true), in_kernel = true;
    gridDim = grid, blockDim = block;
    for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++)
      for (threadIdx.x = 0; threadIdx.x < block.x; threadIdx.x++) kernel(P(arguments)...);
    open_device(false), in_kernel = false;
  });
}

}  // namespace weft

template <typename T> cudaError_t cudaMalloc(T **pointer, std::size_t size) {
  if (weft::fails("cudaMalloc")) return weft::give(cudaErrorMemoryAllocation);
  const std::size_t page = sysconf(_SC_PAGESIZE), whole = (size + page - 1) / page * page;
  char *pages = static_cast<char *>(mmap(nullptr, whole + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(pages, whole, PROT_READ | PROT_WRITE);
  std::memset(pages, 0xCD, whole);
  mprotect(pages, whole, PROT_NONE);
  char *begin = pages + (whole - (size + 3) / 4 * 4);  // ends before the page that stays closed
  weft::device[begin] = {pages, whole, size};
  *pointer = reinterpret_cast<T *>(begin);
  return weft::give(cudaSuccess);
}
inline cudaError_t cudaFree(void *pointer) {
  weft::wait();
  if (!pointer) return weft::give(cudaSuccess);
  return weft::give(weft::device.erase(static_cast<char *>(pointer)) ? cudaSuccess : cudaErrorInvalidValue);
}
inline cudaError_t cudaMemcpy(void *to, const void *from, std::size_t size, cudaMemcpyKind kind) {
  weft::wait();
  const bool to_device = weft::on_device(to, size), from_device = weft::on_device(from, size);
  if (kind != cudaMemcpyDefault && (to_device != (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) ||
                                    from_device != (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice)))
    return weft::give(cudaErrorInvalidValue);
  if (weft::fails("cudaMemcpy")) return weft::give(cudaErrorInvalidValue);
  if (weft::sticky == cudaSuccess) {
    weft::open_device(true), std::memcpy(to, from, size), weft::open_device(false);
    weft::copied += long(size);
  }
  return weft::give(cudaSuccess);
}
inline cudaError_t cudaDeviceSynchronize() {
  weft::wait();
  return weft::give(cudaSuccess);
}
inline cudaError_t cudaPeekAtLastError() { return weft::last; }
inline cudaError_t cudaGetLastError() {
  const cudaError_t e = weft::last;
  weft::last = weft::sticky;
  return e;
}
