// What every kernel begins with: the emulation of threads, and how a launch hands over its operands.
#ifdef __CUDA_RUNTIME_H__  // kernels of CuPy's include CUDA's own headers, which have these already
#define uint2 emulated_uint2
#define uint4 emulated_uint4
#define rsqrt emulated_rsqrt
#define rsqrtf emulated_rsqrtf
#endif
#include "cuda_emulator.h"
#ifdef __CUDA_RUNTIME_H__
#undef uint2
#undef uint4
#undef rsqrt
#undef rsqrtf
#endif
#include <tuple>

static inline void __threadfence_system() {}
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }

namespace hostcuda {
template <class... A, size_t... I> static void* pack(void (*)(A...), void** p, std::index_sequence<I...>) {
  return new std::tuple<std::decay_t<A>...>(*(std::decay_t<A>*)p[I]...);
}
template <class... A> static void* pack(void (*f)(A...), void** p) { return pack(f, p, std::index_sequence_for<A...>()); }
// How many operands there are, and which are pointers.
template <class... A> static int check(void (*)(A...), int* pointers) {
  int is[] = {std::is_pointer<A>::value..., 0};
  if (pointers) memcpy(pointers, is, sizeof is);
  return sizeof...(A);
}
template <class... A> static void apply(void (*f)(A...), void** a) { std::apply(f, *(std::tuple<std::decay_t<A>...>*)(void*)a); }
}  // namespace hostcuda
