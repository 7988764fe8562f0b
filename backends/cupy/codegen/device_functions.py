"""C helper functions; a kernel includes only those that it calls."""

from __future__ import annotations

PHILOX = r"""
// Words 4 · block … 4 · block + 3 of the stream with this key: Philox4x32-10, as graphc.ir.ops.random defines it.
static DEVICE inline Pack<unsigned int, 4> philox_block(
    unsigned long long block, long long step, long long seed, unsigned int tag) {
  const unsigned long long moment = (unsigned long long)step;
  unsigned int c0 = (unsigned int)block, c1 = (unsigned int)(block >> 32);
  unsigned int c2 = (unsigned int)moment, c3 = (unsigned int)(moment >> 32);
  unsigned int k0 = (unsigned int)((unsigned long long)seed ^ ((unsigned long long)seed >> 32)), k1 = tag;
  UNROLL for (int round = 0; round < 10; ++round) {
    const unsigned long long first = 0xD2511F53ULL * c0, second = 0xCD9E8D57ULL * c2;
    c0 = (unsigned int)(second >> 32) ^ c1 ^ k0;
    c2 = (unsigned int)(first >> 32) ^ c3 ^ k1;
    c1 = (unsigned int)second;
    c3 = (unsigned int)first;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
static DEVICE inline unsigned int philox_word(unsigned long long element, long long step, long long seed, unsigned int tag) {
  const Pack<unsigned int, 4> words = philox_block(element / 4, step, seed, tag);
  const int word = (int)(element & 3);
  return word == 0 ? words.at[0] : word == 1 ? words.at[1] : word == 2 ? words.at[2] : words.at[3];
}
// The words of N elements, of which the first has a number that 4 divides.
template <int N>
static DEVICE inline Pack<unsigned int, N> philox_words(
    unsigned long long element, long long step, long long seed, unsigned int tag) {
  Pack<unsigned int, N> words;
  UNROLL for (int k = 0; k < N / 4; ++k) {
    const Pack<unsigned int, 4> block = philox_block(element / 4 + k, step, seed, tag);
    UNROLL for (int word = 0; word < 4; ++word) words.at[4 * k + word] = block.at[word];
  }
  return words;
}
"""

SMALL_FLOATS = r"""
// Floats of EXPONENT and MANTISSA bits below a sign. KIND 0: infinities and NaN as IEEE has them; 1: no infinity, one NaN;
// 2: neither infinity nor negative zero, whose code is the NaN; 3: numbers only.
template <int EXPONENT, int MANTISSA, int BIAS, int KIND> struct small_float {
  static DEVICE inline unsigned int top() {
    const unsigned int all = (1u << (EXPONENT + MANTISSA)) - 1u;
    return KIND == 0 ? all - (1u << MANTISSA) : KIND == 1 ? all - 1u : all;
  }
  static DEVICE inline float magnitude(unsigned int code) {
    const unsigned int e = code >> MANTISSA, m = code & ((1u << MANTISSA) - 1u);
    return e == 0 ? ldexpf((float)m, 1 - BIAS - MANTISSA) : ldexpf((float)(m | (1u << MANTISSA)), (int)e - BIAS - MANTISSA);
  }
  static DEVICE inline float load(unsigned char bits) {
    const unsigned int code = bits & ((1u << (EXPONENT + MANTISSA)) - 1u);
    const bool negative = bits >> (EXPONENT + MANTISSA) & 1;
    if (KIND == 2 && negative && code == 0) return NAN_VALUE;
    if (KIND == 0 && code == top() + 1u) return negative ? -INFINITY_VALUE : INFINITY_VALUE;
    if (KIND < 2 && code > top()) return NAN_VALUE;
    return negative ? -magnitude(code) : magnitude(code);
  }
  static DEVICE inline unsigned char nan() {
    return KIND >= 2 ? 1u << (EXPONENT + MANTISSA) : (1u << (EXPONENT + MANTISSA)) - 1u;
  }
  // The nearest code, ties to even; `saturate`: what is too large becomes the greatest number.
  static DEVICE inline unsigned char store(float x, bool saturate) {
    if (x != x) return nan();
    const unsigned int sign = (float_to_bits(x) >> 31) << (EXPONENT + MANTISSA);
    const float a = fabsf(x);
    unsigned int code;
    if (a == 0.0f) {
      code = 0;
    } else if (a > magnitude(top()) * 4.0f) {
      code = top() + 1u;
    } else {
      int e = 0;
      frexpf(a, &e);
      e = e - 1 > 1 - BIAS ? e - 1 : 1 - BIAS;
      const unsigned int whole = (unsigned int)rintf(ldexpf(a, MANTISSA - e));
      code = whole + ((unsigned int)(e - (1 - BIAS)) << MANTISSA);
    }
    if (code > top()) {
      if (saturate || KIND == 3) code = top();
      else if (KIND == 0) code = top() + 1u;
      else return KIND == 2 ? nan() : (unsigned char)(sign | ((1u << (EXPONENT + MANTISSA)) - 1u));
    }
    if (KIND == 2 && code == 0) return 0;
    return (unsigned char)(sign | code);
  }
  static DEVICE inline float round(float x, bool saturate) { return load(store(x, saturate)); }
};
typedef small_float<4, 3, 7, 1> e4m3fn;
typedef small_float<4, 3, 8, 2> e4m3fnuz;
typedef small_float<5, 2, 15, 0> e5m2;
typedef small_float<5, 2, 16, 2> e5m2fnuz;
typedef small_float<2, 1, 1, 3> e2m1;
// Powers of two without a sign; WAY 0: rounded up, 1: down, 2: to the nearest.
struct e8m0 {
  static DEVICE inline float load(unsigned char bits) { return bits == 255 ? NAN_VALUE : ldexpf(1.0f, (int)bits - 127); }
  static DEVICE inline unsigned char store(float x, bool saturate) { return rounded(x, saturate, 2); }
  static DEVICE inline unsigned char rounded(float x, bool saturate, int way) {
    if (x != x || (x < 0 && !saturate)) return 255;
    const float a = fabsf(x);
    if (a > 1.70141183e38f) return saturate ? 254 : 255;
    int e = 0;
    const float fraction = frexpf(a, &e);  // in [0.5, 1)
    if (a == 0.0f) return 0;
    int code = e - 1 + 127;
    if (fraction > 0.5f && (way == 0 || (way == 2 && fraction >= 0.75f))) ++code;
    return code < 0 ? 0 : code > 254 ? (saturate ? 254 : 255) : code;
  }
  static DEVICE inline float round(float x, bool saturate) { return load(store(x, saturate)); }
};
"""

BITS = r"""
template <class TO, class FROM> static DEVICE inline TO same_bits(FROM x) {
  static_assert(sizeof(TO) == sizeof(FROM), "types of one size");
  union { FROM from; TO to; } both;
  both.from = x;
  return both.to;
}
"""

POWER = r"""
// base to a whole power, modulo the size of T; to a negative one 0, but for 1 and -1.
template <class T> static DEVICE inline T power_of_whole(T base, long long exponent) {
  if (exponent < 0) return base == 1 ? (T)1 : base == (T)-1 ? (T)(exponent % 2 ? -1 : 1) : (T)0;
  unsigned long long result = 1, factor = (unsigned long long)base;
  for (; exponent; exponent >>= 1, factor *= factor) if (exponent & 1) result *= factor;
  return (T)result;
}
template <class T, class E> static DEVICE inline T whole_power(T base, E exponent) {
  const long long whole = (long long)exponent;
  return (E)whole == exponent ? power_of_whole<T>(base, whole) : (T)pow((double)base, (double)exponent);
}
"""

GELU = r"""
// Φ(x) and √(2π)·φ(x), off by up to 1.5e-7, in half the instructions of erff (Abramowitz and Stegun, "Handbook of Mathematical
// Functions", 7.1.26).
static DEVICE inline float normal(float x, float& bell) {
  bell = FAST_EXP(-0.5f * x * x);
  const float t = FAST_RECIPROCAL(1.0f + 0.231641888f * fabsf(x));
  const float series = 0.127414796f + t * (-0.142248368f + t * (0.710706871f + t * (-0.726576014f + t * 0.530702715f)));
  const float tail = t * series * bell;
  return x < 0.0f ? tail : 1.0f - tail;
}
// x·Φ(x)
static DEVICE inline float gelu(float x) {
  float bell;
  return x * normal(x, bell);
}
static DEVICE inline double gelu(double x) { return 0.5 * x * (1.0 + erf(x * 0.70710678118654752)); }
// Φ(x) + x·φ(x), the slope of x·Φ(x).
static DEVICE inline float gelu_slope(float x) {
  float bell;
  const float below = normal(x, bell);
  return below + x * 0.398942280f * bell;
}
static DEVICE inline double gelu_slope(double x) {
  return 0.5 + 0.5 * erf(x * 0.70710678118654752) + x * (0.39894228040143268 * exp(x * x * -0.5));
}
// s + x·s·(1 - s)·2u' with s = (1 + tanh u) / 2 = 1 / (1 + exp -2u) and u = √(2/π)(x + 0.044715x³).
static DEVICE inline float gelu_tanh_slope(float x) {
  const float square = x * x, s = 1.0f / (1.0f + expf(x * (-1.59576912f - 0.0713548163f * square)));
  return s + x * s * (1.0f - s) * (1.59576912f + 0.214064449f * square);
}
static DEVICE inline double gelu_tanh_slope(double x) {
  const double square = x * x, s = 1.0 / (1.0 + exp(x * (-1.5957691216057308 - 0.07135481627260025 * square)));
  return s + x * s * (1.0 - s) * (1.5957691216057308 + 0.21406444881780076 * square);
}
"""

HELD = r"""
// What a thread keeps of its row: first in shared memory, where no other thread looks at it, then in registers. What it has
// loaded last is still in the cache.
#define HOLD_BOTH(T, h) alignas(16) SHARED T h##_shared[IN_SHARED * THREADS * VECTOR]; Pack<T, VECTOR> h[IN_REGISTERS];
#define HELD_IN_REGISTERS(h, k) h[k < IN_SHARED || k >= IN_SHARED + IN_REGISTERS ? 0 : k - IN_SHARED]
#define HOLD_PACK(h, k, pack) \
  if (k < IN_SHARED) store_pack<VECTOR>(h##_shared + (k * THREADS + THREAD) * VECTOR, pack); \
  else if (k < IN_SHARED + IN_REGISTERS) HELD_IN_REGISTERS(h, k) = pack
#define HELD_PACK(h, k, load) \
  (k < IN_SHARED ? load_changing<VECTOR>(h##_shared + (k * THREADS + THREAD) * VECTOR) \
   : k < IN_SHARED + IN_REGISTERS ? HELD_IN_REGISTERS(h, k) : load)
"""

FUNCTIONS = {"HOLD_BOTH": HELD, "philox_word": PHILOX, "gelu": GELU, "same_bits": BITS, "whole_power": POWER}
SMALL_NAMES = ("e4m3fn", "e5m2", "e2m1", "e8m0")


def needed(body: str) -> str:
    """The functions that ``body`` calls."""
    found = [text for name, text in FUNCTIONS.items() if name in body]
    if any(name in body for name in SMALL_NAMES):
        found.append(SMALL_FLOATS)
    return "".join(found)
