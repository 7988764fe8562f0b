"""The prelude of every generated source: one for CUDA, one for a host C compiler.

Kernels use only these names: ``BLOCK``, ``THREAD``, ``LANES`` (threads that share a row) and ``reduce_lanes`` over the lanes
of a row. Where a whole block works on a row, they also use ``SHARED`` memory and ``SYNC`` between loops that step by
``THREADS``. On the host one thread plays every role, so a row has one lane and sums run in another order than on the device.
"""

from __future__ import annotations

COMMON = r"""
#define NAN_VALUE bits_to_float(0x7FC00000u)
#define INFINITY_VALUE bits_to_float(0x7F800000u)
#ifdef BATCH
constexpr int AT_ONCE = BATCH;  // a pragma takes constants, and not every preprocessor expands macros in it
#else
constexpr int AT_ONCE = 1;
#endif
#ifdef IN_SHARED
constexpr int UNROLLED = HOLD;
#else
constexpr int UNROLLED = HOLD && HOLD * VECTOR <= 64 ? HOLD : 2;  // 64: vectorize.UNROLLED
#endif
typedef unsigned short half_bits;
typedef struct { unsigned short bits; } bfloat_bits;
static DEVICE inline float bfloat_load(bfloat_bits x) { return bits_to_float((unsigned int)x.bits << 16); }
#ifdef HAS_BFLOAT
static DEVICE inline bfloat_bits bfloat_store(float x) {
  bfloat_bits y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));  // two of these become one instruction where both are packed
  return y;
}
static DEVICE inline float bfloat_round(float x) {  // alone, as half of a pair: other conversions have an eighth of the rate
  unsigned int bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(x), "f"(0.0f));
  return bits_to_float(bits);
}
#else
static DEVICE inline bfloat_bits bfloat_store(float x) {
  unsigned int bits = float_to_bits(x);
  bfloat_bits y;
  if (x != x) y.bits = (unsigned short)((bits >> 16) | 0x40u);
  else y.bits = (unsigned short)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  return y;
}
static DEVICE inline float bfloat_round(float x) { return bfloat_load(bfloat_store(x)); }
#endif
// Of a number that is a bfloat already.
static DEVICE inline bfloat_bits bfloat_exact(float x) {
  bfloat_bits y;
  y.bits = (unsigned short)(float_to_bits(x) >> 16);
  return y;
}
static DEVICE inline float half_round(float x) { return half_load(half_store(x)); }
static DEVICE inline long long clamp_index(long long index, long long size) {
  return index < 0 ? 0 : index >= size ? size - 1 : index;
}
// The place that a class has, counted from the end where it is negative; -1 where there is none.
static DEVICE inline INDEX class_index(long long index, long long size) {
  const long long place = index < 0 ? index + size : index;
  return place >= 0 && place < size ? (INDEX)place : (INDEX)-1;
}
static DEVICE inline INDEX lesser(INDEX a, INDEX b) { return a < b ? a : b; }
// Σ exp(x − most) while the maximum grows: once a vector the sum is brought to the new one. What each thread has is brought to
// the maximum of all at the end. Where nothing but −∞ has been met, the sum is 0.
template <int N> static DEVICE inline void add_exponentials(float& sum, float& most, const float (&x)[N]) {
  float more = most;
  UNROLL for (int v = 0; v < N; ++v) more = fmaxf(more, x[v]);
  const float base = more == -INFINITY_VALUE ? 0.0f : more;
  sum *= FAST_EXP(most - base);
  UNROLL for (int v = 0; v < N; ++v) sum += FAST_EXP(x[v] - base);
  most = more;
}
static DEVICE inline float rescaled(float sum, float own, float most) { return own == most ? sum : sum * FAST_EXP(own - most); }
#define ACROSS (THREADS / LANES)
#define LANE (STRIDED ? THREAD / ACROSS : THREAD % LANES)
#define SPLIT ((INDEX)(BLOCK % SPLITS))
#define FOR_ROWS(r) \
  for (INDEX r##_start = (INDEX)(BLOCK / SPLITS) * SPAN, r##_end = lesser(r##_start + SPAN, ROWS), \
       r = r##_start + THREAD / LANES; r < r##_end; r += THREADS / LANES)
#define FOR_COLUMNS(c) \
  UNROLL_COLUMNS for (INDEX c = SPLIT * CHUNK + LANE, c##_end = lesser(SPLIT * CHUNK + CHUNK, COLUMNS); c < c##_end; c += LANES)
// A vector of neighbours at a time: of elements; of the columns of a row; of rows, whose columns threads further apart share.
// Blocks of the last kind meet at barriers, so that threads beyond the last row do its work again.
#define FOR_ROW_CHUNKS(r) \
  for (INDEX r = (INDEX)BLOCK * SPAN + THREAD * VECTOR, r##_end = lesser((INDEX)BLOCK * SPAN + SPAN, ROWS); r < r##_end; \
       r += THREADS * VECTOR)
#define FOR_CHUNKS(c, k) \
  UNROLL_SHORT for (INDEX k = 0, c = SPLIT * CHUNK + LANE * VECTOR, c##_end = lesser(SPLIT * CHUNK + CHUNK, COLUMNS); \
              HOLD ? k < HOLD : c < c##_end; ++k, c += LANES * VECTOR) if (!HOLD || c < c##_end)
#define ROW_CHUNK(r) const INDEX r = lesser(((INDEX)(BLOCK / SPLITS) * ACROSS + THREAD % ACROSS) * VECTOR, ROWS - VECTOR);
// The rows of a block that has come last; threads beyond the last row do its work again.
#define LAST_ROWS(r) \
  for (INDEX r##_start = (INDEX)(BLOCK / SPLITS) * SPAN, r##_end = lesser(r##_start + SPAN, ROWS); r##_start < r##_end; \
       r##_start += ACROSS * VECTOR) \
    for (INDEX r = lesser(r##_start + THREAD % ACROSS * VECTOR, r##_end - VECTOR), r##_once = 1; r##_once; r##_once = 0)
#define EACH(v) UNROLL for (int v = 0; v < VECTOR; ++v)
template <class T, int N> struct Pack { T at[N]; };
"""

CUDA = (
    r"""
#define DEVICE __device__
#define RESTRICT __restrict__
#define FAST_EXP fast_exp
#define FAST_RECIPROCAL fast_reciprocal
#if __CUDA_ARCH__ >= 800
#define HAS_BFLOAT
#endif
// What is smaller than normal numbers becomes 0: __expf takes three instructions more to keep it.
static __device__ inline float fast_exp(float x) {
#ifdef __CUDA_ARCH__
  float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f)); return y;
#else
  return __expf(x);
#endif
}
static __device__ inline float fast_reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
#else
  return 1.0f / x;
#endif
}
#define UNROLL _Pragma("unroll")
#define UNROLL_SHORT _Pragma("unroll UNROLLED")
#define UNROLL_COLUMNS _Pragma("unroll AT_ONCE")
#define UNROLL_TOTALS _Pragma("unroll 2")
#define UNROLL_PARTS _Pragma("unroll 8")
#define BLOCK ((long long)blockIdx.x)
#define THREAD ((int)threadIdx.x)
static __device__ inline float bits_to_float(unsigned int bits) { return __uint_as_float(bits); }
static __device__ inline unsigned int float_to_bits(float value) { return __float_as_uint(value); }
static __device__ inline float half_load(unsigned short x) {
  float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y;
}
static __device__ inline unsigned short half_store(float x) {
  unsigned short y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y;
}
"""
    + COMMON
    + r"""
template <class T> static __device__ inline T with_sign_of(T b, T r) { return (r != 0 && ((r < 0) != (b < 0))) ? r + b : r; }
template <class T> static __device__ inline T floor_mod(T a, T b) { return with_sign_of(b, (T)(a % b)); }
template <class T> static __device__ inline T signed_zero(T b, T r) { return r == 0 ? (T)copysign(0.0, (double)b) : r; }
template <> __device__ inline float floor_mod(float a, float b) { return signed_zero(b, with_sign_of(b, fmodf(a, b))); }
template <> __device__ inline double floor_mod(double a, double b) { return signed_zero(b, with_sign_of(b, fmod(a, b))); }
struct Sum { template <class T> static __device__ T of(T a, T b) { return a + b; } };
struct Prod { template <class T> static __device__ T of(T a, T b) { return a * b; } };
struct Maximum { template <class T> static __device__ T of(T a, T b) { return (a > b || a != a) ? a : b; } };
struct Minimum { template <class T> static __device__ T of(T a, T b) { return (a < b || a != a) ? a : b; } };
// Over the lanes of a row: a butterfly inside each warp, then warp totals through shared memory, in a fixed order.
template <int WIDTH, class OP, class T> static __device__ inline T reduce_lanes(T value) {
  if (WIDTH == 1) return value;
  const unsigned int mask = WIDTH < 32 ? ((1u << (WIDTH % 32)) - 1) << (threadIdx.x % 32 / WIDTH * WIDTH) : 0xffffffffu;
#pragma unroll
  for (int step = (WIDTH < 32 ? WIDTH : 32) / 2; step > 0; step /= 2)
    value = OP::of(value, (T)__shfl_xor_sync(mask, value, step));
  if (WIDTH <= 32) return value;
  __shared__ T totals[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  if (lane == 0) totals[warp] = value;
  __syncthreads();
  T total = totals[0];
#pragma unroll
  for (int k = 1; k < WIDTH / 32; ++k) total = OP::of(total, totals[k]);
  return total;
}
// Vectors are read and written as whole words: the compiler does not join neighbouring elements by itself.
template <int BYTES> struct Words { typedef unsigned char type; };
template <> struct Words<2> { typedef unsigned short type; };
template <> struct Words<4> { typedef unsigned int type; };
template <> struct Words<8> { typedef uint2 type; };
template <> struct Words<16> { typedef uint4 type; };
template <int N, class T> static __device__ inline Pack<T, N> load_pack(const T* place) {
  typedef typename Words<sizeof(T) * N % 16 == 0 ? 16 : sizeof(T) * N % 8 == 0 ? 8 : sizeof(T) * N>::type Word;
  const int count = sizeof(T) * N / sizeof(Word);
  union { Word words[count]; Pack<T, N> pack; } both;
#pragma unroll
  for (int k = 0; k < count; ++k) both.words[k] = __ldg(reinterpret_cast<const Word*>(place) + k);
  return both.pack;
}
// Of an array that the kernel writes over.
template <int N, class T> static __device__ inline Pack<T, N> load_changing(const T* place) {
  typedef typename Words<sizeof(T) * N % 16 == 0 ? 16 : sizeof(T) * N % 8 == 0 ? 8 : sizeof(T) * N>::type Word;
  const int count = sizeof(T) * N / sizeof(Word);
  union { Word words[count]; Pack<T, N> pack; } both;
#pragma unroll
  for (int k = 0; k < count; ++k) both.words[k] = reinterpret_cast<const Word*>(place)[k];
  return both.pack;
}
template <int N, class T> static __device__ inline void store_pack(T* place, const Pack<T, N>& pack) {
  typedef typename Words<sizeof(T) * N % 16 == 0 ? 16 : sizeof(T) * N % 8 == 0 ? 8 : sizeof(T) * N>::type Word;
  const int count = sizeof(T) * N / sizeof(Word);
  union { Word words[count]; Pack<T, N> pack; } both;
  both.pack = pack;
#pragma unroll
  for (int k = 0; k < count; ++k) reinterpret_cast<Word*>(place)[k] = both.words[k];
}
// Over threads of a block that are ACROSS apart, for each row of their vectors; all of them get the totals.
template <class OP, class T> static __device__ inline void reduce_across(T (&value)[VECTOR]) {
  if (LANES == 1) return;
  __shared__ T parts[VECTOR][THREADS];
  __syncthreads();
  EACH(v) parts[v][THREAD] = value[v];
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    __syncthreads();
    if (LANE < step) EACH(v) parts[v][THREAD] = OP::of(parts[v][THREAD], parts[v][THREAD + step * ACROSS]);
  }
  __syncthreads();
  EACH(v) value[v] = parts[v][THREAD % ACROSS];
}
// Whether the block is the last of `blocks` that share a counter; it then sees what all of them have written. The counter is 0
// again for the next launch. A launch that is broken off ends the context, and counters begin at 0 in the next.
static __device__ inline bool is_last(unsigned int* counter, unsigned int blocks) {
  __shared__ bool last;
  __threadfence();  // each thread's totals, before the block is counted
  __syncthreads();
  if (THREAD == 0) last = atomicAdd(counter, 1u) == blocks - 1;
  __syncthreads();
  if (!last) return false;
  if (THREAD == 0) *counter = 0;  // all others have been counted
  __threadfence();
  return true;
}
// What other blocks have written in this launch: from the cache that multiprocessors share.
template <int N, class T> static __device__ inline Pack<T, N> load_total(const T* place) {
  typedef typename Words<sizeof(T) * N % 16 == 0 ? 16 : sizeof(T) * N % 8 == 0 ? 8 : sizeof(T) * N>::type Word;
  const int count = sizeof(T) * N / sizeof(Word);
  union { Word words[count]; Pack<T, N> pack; } both;
#pragma unroll
  for (int k = 0; k < count; ++k) both.words[k] = __ldcg(reinterpret_cast<const Word*>(place) + k);
  return both.pack;
}
// As reduce_across, over WIDTH lanes.
template <int WIDTH, class OP, class T, int N> static __device__ inline void reduce_last(T (&value)[N]) {
  if (WIDTH == 1) return;
  __shared__ T parts[N][THREADS];
  const int across = THREADS / WIDTH;
  __syncthreads();
#pragma unroll
  for (int v = 0; v < N; ++v) parts[v][THREAD] = value[v];
#pragma unroll
  for (int step = WIDTH / 2; step > 0; step /= 2) {
    __syncthreads();
    if (THREAD / across < step) {
#pragma unroll
      for (int v = 0; v < N; ++v) parts[v][THREAD] = OP::of(parts[v][THREAD], parts[v][THREAD + step * across]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < N; ++v) value[v] = parts[v][THREAD % across];
}
#if RESIDENT
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
#else
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#endif
#define SHARED __shared__
#define SYNC __syncthreads()
// Of the threads that share a row; all of a block's rows take the same number of steps where a row has more than a warp.
#define SYNC_LANES sync_lanes<LANES>()
template <int WIDTH> static __device__ inline void sync_lanes() {
  if (WIDTH > 32) __syncthreads();
  else if (WIDTH > 1) __syncwarp(WIDTH < 32 ? ((1u << (WIDTH % 32)) - 1) << (threadIdx.x % 32 / WIDTH * WIDTH) : 0xffffffffu);
}
"""
)

HOST = (
    r"""
#include <math.h>
#include <string.h>
#define DEVICE
#define RESTRICT __restrict__
#define FAST_EXP expf
#define FAST_RECIPROCAL 1.0f /
#define UNROLL
#define UNROLL_SHORT
#define UNROLL_COLUMNS
#define UNROLL_TOTALS
#define UNROLL_PARTS
static long long BLOCK;
static const int THREAD = 0;
static inline float bits_to_float(unsigned int bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline unsigned int float_to_bits(float value) { unsigned int bits; memcpy(&bits, &value, 4); return bits; }
static inline float half_load(unsigned short x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
static inline unsigned short half_store(float x) { _Float16 h = (_Float16)x; unsigned short y; memcpy(&y, &h, 2); return y; }
"""
    + COMMON
    + r"""
template <class T> static inline T with_sign_of(T b, T r) { return (r != 0 && ((r < 0) != (b < 0))) ? r + b : r; }
template <class T> static inline T floor_mod(T a, T b) { return with_sign_of(b, (T)(a % b)); }
template <class T> static inline T signed_zero(T b, T r) { return r == 0 ? (T)copysign(0.0, (double)b) : r; }
template <> inline float floor_mod(float a, float b) { return signed_zero(b, with_sign_of(b, fmodf(a, b))); }
template <> inline double floor_mod(double a, double b) { return signed_zero(b, with_sign_of(b, fmod(a, b))); }
struct Sum { template <class T> static T of(T a, T b) { return a + b; } };
struct Prod { template <class T> static T of(T a, T b) { return a * b; } };
struct Maximum { template <class T> static T of(T a, T b) { return (a > b || a != a) ? a : b; } };
struct Minimum { template <class T> static T of(T a, T b) { return (a < b || a != a) ? a : b; } };
template <int WIDTH, class OP, class T> static inline T reduce_lanes(T value) { return value; }
template <class OP, class T> static inline void reduce_across(T (&value)[VECTOR]) {}
template <int N, class T> static inline Pack<T, N> load_pack(const T* place) {
  Pack<T, N> pack;
  memcpy(&pack, place, sizeof(pack));
  return pack;
}
template <int WIDTH, class OP, class T, int N> static inline void reduce_last(T (&value)[N]) {}
static inline bool is_last(unsigned int* counter, unsigned int blocks) {
  if (++*counter < blocks) return false;
  *counter = 0;
  return true;
}
template <int N, class T> static inline Pack<T, N> load_total(const T* place) { return load_pack<N>(place); }
template <int N, class T> static inline Pack<T, N> load_changing(const T* place) { return load_pack<N>(place); }
template <int N, class T> static inline void store_pack(T* place, const Pack<T, N>& pack) {
  memcpy(place, &pack, sizeof(pack));
}
#define KERNEL extern "C" void
#define SHARED static
#define SYNC
#define SYNC_LANES
"""
)
