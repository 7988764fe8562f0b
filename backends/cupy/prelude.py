"""What every generated source begins with: once for CUDA, once for a C compiler that runs the same kernels on the host.

A kernel is written against these names only: ``BLOCK``, ``THREAD``, ``LANES`` (threads that share a row), ``reduce_lanes``
over the lanes of a row; where a whole block works on a row, ``SHARED`` memory and ``SYNC`` between loops that step by
``THREADS``. On the host one thread plays every role, so a row has one lane; the order of a sum is then another one than on
the device.
"""

from __future__ import annotations

COMMON = r"""
typedef unsigned short half_bits;
typedef struct { unsigned short bits; } bfloat_bits;
static DEVICE inline float bfloat_load(bfloat_bits x) { return bits_to_float((unsigned int)x.bits << 16); }
static DEVICE inline bfloat_bits bfloat_store(float x) {
  unsigned int bits = float_to_bits(x);
  bfloat_bits y;
  if (x != x) y.bits = (unsigned short)((bits >> 16) | 0x40u);
  else y.bits = (unsigned short)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  return y;
}
static DEVICE inline float bfloat_round(float x) { return bfloat_load(bfloat_store(x)); }
static DEVICE inline float half_round(float x) { return half_load(half_store(x)); }
static DEVICE inline long long clamp_index(long long index, long long size) {
  return index < 0 ? 0 : index >= size ? size - 1 : index;
}
static DEVICE inline INDEX lesser(INDEX a, INDEX b) { return a < b ? a : b; }
#define LANE (THREAD % LANES)
#define SPLIT ((INDEX)(BLOCK % SPLITS))
#define FOR_ROWS(r) \
  for (INDEX r##_start = (INDEX)(BLOCK / SPLITS) * SPAN, r##_end = lesser(r##_start + SPAN, ROWS), \
       r = r##_start + THREAD / LANES; r < r##_end; r += THREADS / LANES)
#define FOR_COLUMNS(c) \
  for (INDEX c = SPLIT * CHUNK + LANE, c##_end = lesser(SPLIT * CHUNK + CHUNK, COLUMNS); c < c##_end; c += LANES)
#define NAN_VALUE bits_to_float(0x7FC00000u)
#define INFINITY_VALUE bits_to_float(0x7F800000u)
"""

CUDA = (
    r"""
#define DEVICE __device__
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
template <> __device__ inline float floor_mod(float a, float b) { return with_sign_of(b, fmodf(a, b)); }
template <> __device__ inline double floor_mod(double a, double b) { return with_sign_of(b, fmod(a, b)); }
struct Sum { template <class T> static __device__ T of(T a, T b) { return a + b; } };
struct Prod { template <class T> static __device__ T of(T a, T b) { return a * b; } };
struct Maximum { template <class T> static __device__ T of(T a, T b) { return (a > b || a != a) ? a : b; } };
struct Minimum { template <class T> static __device__ T of(T a, T b) { return (a < b || a != a) ? a : b; } };
// Over the lanes of a row: a butterfly inside each warp, then warp totals through shared memory, in a fixed order.
template <int WIDTH, class OP, class T> static __device__ inline T reduce_lanes(T value) {
  if (WIDTH == 1) return value;
#pragma unroll
  for (int step = (WIDTH < 32 ? WIDTH : 32) / 2; step > 0; step /= 2)
    value = OP::of(value, __shfl_xor_sync(0xffffffffu, value, step));
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
#define KERNEL extern "C" __global__ void
#define SHARED __shared__
#define SYNC __syncthreads()
#define BLOCK ((long long)blockIdx.x)
#define THREAD ((int)threadIdx.x)
"""
)

HOST = (
    r"""
#include <math.h>
#include <string.h>
#define DEVICE
static inline float bits_to_float(unsigned int bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline unsigned int float_to_bits(float value) { unsigned int bits; memcpy(&bits, &value, 4); return bits; }
static inline float half_load(unsigned short x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
static inline unsigned short half_store(float x) { _Float16 h = (_Float16)x; unsigned short y; memcpy(&y, &h, 2); return y; }
"""
    + COMMON
    + r"""
template <class T> static inline T with_sign_of(T b, T r) { return (r != 0 && ((r < 0) != (b < 0))) ? r + b : r; }
template <class T> static inline T floor_mod(T a, T b) { return with_sign_of(b, (T)(a % b)); }
template <> inline float floor_mod(float a, float b) { return with_sign_of(b, fmodf(a, b)); }
template <> inline double floor_mod(double a, double b) { return with_sign_of(b, fmod(a, b)); }
struct Sum { template <class T> static T of(T a, T b) { return a + b; } };
struct Prod { template <class T> static T of(T a, T b) { return a * b; } };
struct Maximum { template <class T> static T of(T a, T b) { return (a > b || a != a) ? a : b; } };
struct Minimum { template <class T> static T of(T a, T b) { return (a < b || a != a) ? a : b; } };
template <int WIDTH, class OP, class T> static inline T reduce_lanes(T value) { return value; }
#define KERNEL extern "C" void
#define SHARED static
#define SYNC
static long long BLOCK;
static const int THREAD = 0;
"""
)
