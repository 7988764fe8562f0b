// CUDA C on the host, thread by thread: every thread of a block is a fiber with a stack of its own, barriers and shuffles meet
// as on a device, and the order in which threads run between them is chosen by the caller, so that a missing barrier shows as a
// result that depends on it. One operating system thread runs everything. x86-64, System V.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <utility>

#define QUIET __attribute__((no_sanitize_thread))  // touches no memory of a kernel
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __constant__ static
#define __launch_bounds__(...)

struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };

struct emulated_index { unsigned int x, y, z; };
#define INDEX_OF_A_THREAD __attribute__((section("emulated_indices")))  // apart from what a block shares
INDEX_OF_A_THREAD static emulated_index threadIdx = {0, 0, 0}, blockIdx = {0, 0, 0}, blockDim = {0, 0, 0}, gridDim = {0, 0, 0};

#ifdef WATCHED  // access_checker.cpp
extern "C" {
void watch(const void* ranges, int count, char* shared_begin, char* shared_end, char* message, unsigned long room);
void position(int block, int thread, int epoch);
void fence();
void atomic(void* place);
extern char __bss_start[] __attribute__((visibility("hidden"))), _end[] __attribute__((visibility("hidden")));
}
#else
static inline void position(int, int, int) {}
static inline void fence() {}
static inline void atomic(void*) {}
#endif

namespace emulated {

enum State { RUNNING, AT_BARRIER, AT_SHUFFLE, DONE };
struct Fiber {
  void* stack;
  char* memory;
  State state;
  unsigned int mask;      // of lanes that meet in a shuffle
  unsigned char value[16];
};

static const int MOST = 1024, STACK = 64 << 10;
static Fiber fibers[MOST];
static void* scheduler;
static int current, count, epoch;  // the epoch ends with a barrier
static void (*body)(void**);
static void** arguments;
static char message[200];

// Saves what a callee has to keep, and goes on with the other stack. Anything in memory may be another after it.
QUIET __attribute__((naked, noipa)) static void change(void** from, void* to) {
  asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15; movq %rsp, (%rdi); movq %rsi, %rsp;"
      "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}

QUIET static void stop(State state) {
  fibers[current].state = state;
  change(&fibers[current].stack, scheduler);
}

QUIET static void enter() {
  body(arguments);
  stop(DONE);
}

QUIET static void prepare(int index) {
  Fiber& fiber = fibers[index];
  if (!fiber.memory) fiber.memory = (char*)malloc(STACK);
  memset(fiber.memory + STACK - 4096, 0xCD, 4096);  // locals that nobody set
  void** top = (void**)(((unsigned long long)(fiber.memory + STACK) & ~15ull) - 16);
  *top = (void*)&enter;
  memset(top - 6, 0, 48);
  fiber.stack = top - 6;
  fiber.state = RUNNING;
}

QUIET static void resume(int index) {
  current = index;
  threadIdx = {(unsigned int)index, 0, 0};
  position(blockIdx.x, index, epoch);
  change(&scheduler, fibers[index].stack);
}

// Lets go on who waits for nobody any more; whether there was any.
QUIET static bool release() {
  int waiting = 0, running = 0;
  for (int k = 0; k < count; ++k) {
    waiting += fibers[k].state == AT_BARRIER;
    running += fibers[k].state != DONE;
  }
  bool any = false;
  if (waiting && waiting == running) {
    for (int k = 0; k < count; ++k)
      if (fibers[k].state == AT_BARRIER) fibers[k].state = RUNNING;
    ++epoch;
    return true;
  }
  for (int k = 0; k < count; ++k) {
    if (fibers[k].state != AT_SHUFFLE) continue;
    const int warp = k / 32 * 32;
    bool complete = true;
    for (int lane = 0; lane < 32; ++lane)
      if (fibers[k].mask >> lane & 1)
        complete = complete && warp + lane < count && fibers[warp + lane].state == AT_SHUFFLE && fibers[warp + lane].mask == fibers[k].mask;
    if (!complete) continue;
    for (int lane = 0; lane < 32; ++lane)
      if (fibers[k].mask >> lane & 1) fibers[warp + lane].state = RUNNING;
    any = true;
  }
  return any;
}

// A step through `length` numbers that meets all of them.
QUIET static long long stride(long long length, unsigned int random) {
  for (long long step = 1 + random % length;; ++step) {
    long long a = length, b = step;
    while (b) { const long long rest = a % b; a = b, b = rest; }
    if (a == 1) return step;
  }
}

// order: of threads between barriers, and of blocks: 0: ascending, 1: descending, above: as chance has it.
QUIET static const char* run(void (*kernel)(void**), void** a, long long blocks, int threads, int order) {
  body = kernel, arguments = a, count = threads, message[0] = 0;
  if (threads > MOST) return "a block has more than 1024 threads";
  blockDim = {(unsigned int)threads, 1, 1}, gridDim = {(unsigned int)blocks, 1, 1};
  unsigned int random = 12345u + order;
  const long long jump = order < 2 || blocks < 1 ? 1 : stride(blocks, random);
  for (long long block = 0; block < blocks; ++block) {
    blockIdx = {(unsigned int)(order == 1 ? blocks - 1 - block : block * jump % blocks), 0, 0};
    ++epoch;
    for (int k = 0; k < threads; ++k) prepare(k);
    for (;;) {
      const int step = order < 2 ? 1 : (int)stride(threads, (random = random * 1664525u + 1013904223u) >> 8);
      bool alive = false;
      for (int k = 0; k < threads; ++k) {
        const int index = order == 1 ? threads - 1 - k : (int)((long long)(k + 1) * step % threads);
        if (fibers[index].state == RUNNING) resume(index);
        alive = alive || fibers[index].state != DONE;
      }
      if (message[0]) return message;
      if (!alive) break;
      if (!release()) {
        int at[4] = {0, 0, 0, 0};
        for (int k = 0; k < threads; ++k) ++at[fibers[k].state];
        snprintf(message, sizeof message, "block %lld hangs: %d threads at a barrier, %d in a shuffle, %d at their end", block,
                 at[AT_BARRIER], at[AT_SHUFFLE], at[DONE]);
        return message;
      }
    }
  }
  return 0;
}

template <class T> QUIET static T shuffle(unsigned int mask, T value, int source) {
  static_assert(sizeof(T) <= 16, "a shuffle of more than 16 bytes");
  Fiber& own = fibers[current];
  const int warp = current / 32 * 32, lane = current % 32;
  if (!(mask >> lane & 1)) snprintf(message, sizeof message, "lane %d shuffles with a mask that leaves it out", lane);
  memcpy(own.value, &value, sizeof(T));
  own.mask = mask;
  stop(AT_SHUFFLE);
  T found = value;
  if (source >= 0 && source < 32) {
    if (!(mask >> source & 1)) snprintf(message, sizeof message, "lane %d reads lane %d, which the mask leaves out", lane, source);
    else memcpy(&found, fibers[warp + source].value, sizeof(T));
  }
  own.mask = mask;
  stop(AT_SHUFFLE);  // nobody writes his next value before all have read this one
  return found;
}

template <class... A, std::size_t... I> QUIET static void call(void (*f)(A...), void** a, std::index_sequence<I...>) { f((A)a[I]...); }

}  // namespace emulated

QUIET static inline void __syncthreads() { emulated::stop(emulated::AT_BARRIER); }
QUIET static inline void __syncwarp(unsigned int mask = 0xffffffffu) { emulated::shuffle(mask, 0, emulated::current % 32); }
QUIET static inline void __threadfence() { fence(); }  // blocks run one after another: only the access checker has to know
QUIET static inline void __threadfence_block() {}
template <class T> QUIET static inline T __shfl_xor_sync(unsigned int mask, T value, int step, int width = 32) {
  return emulated::shuffle(mask, value, emulated::current % 32 ^ step);
}
template <class T> QUIET static inline T __shfl_sync(unsigned int mask, T value, int source, int width = 32) {
  const int lane = emulated::current % 32;
  return emulated::shuffle(mask, value, lane / width * width + source % width);
}
template <class T> QUIET static inline T __shfl_up_sync(unsigned int mask, T value, int step, int width = 32) {
  const int lane = emulated::current % 32;
  return emulated::shuffle(mask, value, lane % width < step ? lane : lane - step);
}
template <class T> QUIET static inline T __shfl_down_sync(unsigned int mask, T value, int step, int width = 32) {
  const int lane = emulated::current % 32;
  return emulated::shuffle(mask, value, lane % width + step >= width ? lane : lane + step);
}
QUIET static inline unsigned int __ballot_sync(unsigned int mask, int predicate) {
  unsigned int found = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) found |= (unsigned int)(emulated::shuffle(mask, predicate, lane) != 0) << lane;
  return found;
}
QUIET static inline int __any_sync(unsigned int mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
QUIET static inline int __all_sync(unsigned int mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

static inline float __uint_as_float(unsigned int bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline unsigned int __float_as_uint(float value) { unsigned int bits; memcpy(&bits, &value, 4); return bits; }
static inline float __int_as_float(int bits) { return __uint_as_float((unsigned int)bits); }
static inline int __float_as_int(float value) { return (int)__float_as_uint(value); }
static inline double __longlong_as_double(long long bits) { double value; memcpy(&value, &bits, 8); return value; }
static inline long long __double_as_longlong(double value) { long long bits; memcpy(&bits, &value, 8); return bits; }
static inline unsigned int __umulhi(unsigned int a, unsigned int b) { return (unsigned int)((unsigned long long)a * b >> 32); }
static inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline int __clz(int x) { return x ? __builtin_clz((unsigned int)x) : 32; }
static inline int __popc(unsigned int x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline long long clock64() {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}
#define __expf expf
#define __logf logf
#define __sinf sinf
#define __cosf cosf
#define __powf powf
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float x) { return 1 / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline double rsqrt(double x) { return 1 / sqrt(x); }
template <class T> static inline T __ldg(const T* place) { return *place; }
template <class T> static inline T __ldcg(const T* place) { return *place; }
template <class T> static inline T __ldcs(const T* place) { return *place; }
template <class T> static inline void __stcs(T* place, T value) { *place = value; }
template <class T> QUIET static inline T atomicAdd(T* place, T value) { atomic(place); T old = *place; *place = old + value; return old; }
template <class T> static inline T atomicMax(T* place, T value) { T old = *place; if (value > old) *place = value; return old; }
template <class T> static inline T atomicMin(T* place, T value) { T old = *place; if (value < old) *place = value; return old; }
template <class T> static inline T atomicOr(T* place, T value) { T old = *place; *place = old | value; return old; }
template <class T> static inline T atomicExch(T* place, T value) { T old = *place; *place = value; return old; }
template <class T> static inline T atomicCAS(T* place, T compare, T value) { T old = *place; if (old == compare) *place = value; return old; }

// What the compiler's checks call where an address is not aligned as its type asks, or an index is outside an array.
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void* place) {
  snprintf(emulated::message, sizeof emulated::message, "an address is not aligned: %p", place);
  emulated::stop(emulated::DONE);  // the access itself would fault
}
extern "C" void __ubsan_handle_out_of_bounds(void*, void* index) {
  snprintf(emulated::message, sizeof emulated::message, "an index is outside its array: %lld", (long long)index);
  emulated::stop(emulated::DONE);
}
