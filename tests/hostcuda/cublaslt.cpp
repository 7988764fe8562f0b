// cuBLASLt on the host, after cublasLt.h: matrices column by column, D = epilogue(alpha op(A) op(B) + beta C + bias).
#include "hostcuda.h"
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>
#define LT extern "C" __attribute__((visibility("default")))
using host::kind_of;
enum { OK = 0, INVALID = 7, UNSUPPORTED = 15 };
struct Attributes {
  std::map<int, std::string> held;
  template <class T> T get(int name, T otherwise) const { auto at = held.find(name); if (at == held.end()) return otherwise; T v; memcpy(&v, at->second.data(), sizeof v); return v; }
};
typedef std::map<int, size_t> Sizes;
static const Sizes DESC = {{0, 4}, {1, 4}, {2, 4}, {3, 4}, {4, 4}, {5, 4}, {6, 4}, {7, 4}, {8, 8}, {10, 8}, {11, 8}, {12, 8}, {13, 8}, {15, 4}, {22, 4}, {26, 4}};
static const Sizes LAYOUT = {{0, 4}, {1, 4}, {2, 8}, {3, 8}, {4, 8}, {5, 4}, {6, 8}};
static const Sizes PREFERENCE = {{0, 4}, {1, 8}, {3, 4}, {5, 4}, {6, 4}, {7, 4}, {8, 4}, {9, 4}, {12, 8}};
static int refuse(int status, const char* why) { fprintf(stderr, "hostcuda: cublasLt: %s\n", why); return status; }
static int set(const Sizes& sizes, Attributes* a, int name, const void* from, size_t n) {
  auto at = sizes.find(name);
  if (at == sizes.end() || at->second != n) return refuse(INVALID, ("attribute " + std::to_string(name) + " of " + std::to_string(n) + " bytes").c_str());
  a->held[name] = std::string((const char*)from, n);
  return OK;
}
template <class T> static void put(Attributes* a, int name, T v) { a->held[name] = std::string((char*)&v, sizeof v); }
LT int cublasLtCreate(void** h) { *h = new int(0); return OK; }
LT int cublasLtDestroy(void*) { return OK; }
LT const char* cublasLtGetStatusName(int s) { return s == INVALID ? "CUBLAS_STATUS_INVALID_VALUE" : s == UNSUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS"; }
LT const char* cublasLtGetStatusString(int s) { return cublasLtGetStatusName(s); }
LT size_t cublasLtGetVersion() { return 130000; }
LT size_t cublasLtGetCudartVersion() { return 13000; }
LT int cublasLtMatmulDescCreate(Attributes** d, int compute, int scale) { *d = new Attributes; put(*d, 0, compute); put(*d, 1, scale); return OK; }
LT int cublasLtMatmulDescDestroy(Attributes* d) { delete d; return OK; }
LT int cublasLtMatmulDescSetAttribute(Attributes* d, int name, const void* p, size_t n) { return set(DESC, d, name, p, n); }
LT int cublasLtMatrixLayoutCreate(Attributes** l, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  *l = new Attributes; put(*l, 0, type); put(*l, 2, rows); put(*l, 3, cols); put(*l, 4, ld);
  return OK;
}
LT int cublasLtMatrixLayoutDestroy(Attributes* l) { delete l; return OK; }
LT int cublasLtMatrixLayoutSetAttribute(Attributes* l, int name, const void* p, size_t n) { return set(LAYOUT, l, name, p, n); }
LT int cublasLtMatmulPreferenceCreate(Attributes** p) { *p = new Attributes; return OK; }
LT int cublasLtMatmulPreferenceDestroy(Attributes* p) { delete p; return OK; }
LT int cublasLtMatmulPreferenceSetAttribute(Attributes* a, int name, const void* p, size_t n) { return set(PREFERENCE, a, name, p, n); }

struct Layout { int type, batch; int64_t rows, cols, ld, stride; };
static Layout layout(const Attributes* a) {
  return {a->get(0, 0), a->get(5, 1), (int64_t)a->get<uint64_t>(2, 0), (int64_t)a->get<uint64_t>(3, 0), a->get<int64_t>(4, 0), a->get<int64_t>(6, 0)};
}
static size_t size_of(int type) { return type == 1 ? 8 : type == 0 ? 4 : 2; }
static double read(const char* at, int type, int64_t k) {
  if (type == 0) return ((float*)at)[k];
  if (type == 1) return ((double*)at)[k];
  if (type == 2) return (float)((_Float16*)at)[k];
  unsigned bits = (unsigned)((unsigned short*)at)[k] << 16; float v; memcpy(&v, &bits, 4); return v;
}
static void write(char* at, int type, int64_t k, double x) {
  if (type == 0) ((float*)at)[k] = (float)x;
  else if (type == 1) ((double*)at)[k] = x;
  else if (type == 2) ((_Float16*)at)[k] = (_Float16)(float)x;
  else {
    float f = (float)x; unsigned bits; memcpy(&bits, &f, 4);
    ((unsigned short*)at)[k] = f != f ? 0x7FC0 : (unsigned short)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  }
}
struct Call {
  Layout a, b, c, d; bool ta, tb; int epilogue, scale, bias_type; int64_t aux_ld; char *bias, *aux; int64_t m, n, k; bool rounds;
};
// What the library checks before it looks for an algorithm.
static int describe(Call& x, const Attributes* desc, const Attributes* a, const Attributes* b, const Attributes* c, const Attributes* d) {
  x = {layout(a), layout(b), layout(c), layout(d), desc->get(3, 0) == 1, desc->get(4, 0) == 1, desc->get(7, 1), desc->get(1, 0), 0,
       desc->get<int64_t>(12, 0), desc->get<char*>(8, nullptr), desc->get<char*>(11, nullptr)};
  x.bias_type = desc->get(26, x.d.type);
  x.m = x.d.rows, x.n = x.d.cols, x.k = x.ta ? x.a.rows : x.a.cols;
  if ((x.ta ? x.a.cols : x.a.rows) != x.m || (x.tb ? x.b.cols : x.b.rows) != x.k || (x.tb ? x.b.rows : x.b.cols) != x.n) return refuse(INVALID, "shapes do not fit");
  if (x.c.rows != x.m || x.c.cols != x.n || x.c.type != x.d.type || x.a.type != x.b.type) return refuse(INVALID, "C or types do not fit");
  for (Layout* l : {&x.a, &x.b, &x.c, &x.d}) if (l->ld < l->rows || l->batch != x.d.batch) return refuse(INVALID, "leading dimension or batch");
  if (!x.m || !x.n || !x.k) return refuse(INVALID, "an empty product");
  int compute = desc->get(0, 0);
  if ((compute == 70) != (x.d.type == 1) || (x.scale == 1) != (compute == 70)) return refuse(UNSUPPORTED, "compute or scale type");
  bool half = x.a.type == 2 || x.a.type == 14;
  if (x.a.type != x.d.type && !(half && x.d.type == 0)) return refuse(UNSUPPORTED, "type of the result");
  int e = x.epilogue;
  if ((e & (4 | 16 | 256 | 512)) && !x.bias) return refuse(INVALID, "no bias pointer");
  if (e & 128) {
    bool relu = (e & 2) || (e & 8);
    if (!x.aux || x.aux_ld < x.m || x.aux_ld % (relu ? 128 : 8)) return refuse(INVALID, "aux pointer or leading dimension");
    if ((size_t)x.aux % 16) return refuse(INVALID, "aux alignment");
  }
  if (e & ~(1 | 2 | 4)) for (Layout* l : {&x.a, &x.b, &x.c, &x.d}) if (l->ld * size_of(l->type) % 16) return refuse(UNSUPPORTED, "an epilogue, and columns that do not begin at 16 bytes");
  if (x.d.batch > 1 && (e & 128)) return refuse(INVALID, "aux of a batch needs a stride");
  return OK;
}
LT int cublasLtMatmulAlgoGetHeuristic(void*, Attributes* desc, Attributes* a, Attributes* b, Attributes* c, Attributes* d, Attributes* preference, int asked,
                                      char* results, int* found) {
  Call x; *found = 0;
  if (int status = describe(x, desc, a, b, c, d)) return status;
  bool rounds = preference->get<uint32_t>(3, 7) & 4;  // parts of sums in the type of the result
  for (int k = 0; k < 4 && k < asked; ++k, ++*found) {
    uint64_t algo[8] = {77u + k, 0, 0, 0, 0, preference->get<uint64_t>(1, 0), rounds, ((size_t)x.bias | (size_t)x.aux | 16) & 31};
    for (int j = 0; j < 4; ++j) algo[1 + j] = preference->get<uint32_t>(5 + j, 256);
    memset(results + 96 * k, 0, 96);
    memcpy(results + 96 * k, algo, 64);
    *(size_t*)(results + 96 * k + 64) = 1 << 20;
  }
  return OK;
}
static double gelu(double x) { return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }
static double slope(double x) {
  double t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}
static void multiply(const Call& x, double alpha, double beta, const char* A, const char* B, const char* C, char* D) {
  const int64_t m = x.m, n = x.n, k = x.k;
  std::vector<double> a(m * k), b(n * k), sum_m(m), sum_n(n);
  const int e = x.epilogue;
  for (int batch = 0; batch < x.d.batch; ++batch) {
    const char *at = A + batch * x.a.stride * (int64_t)size_of(x.a.type), *bt = B + batch * x.b.stride * (int64_t)size_of(x.b.type);
    for (int64_t i = 0; i < m; ++i) for (int64_t l = 0; l < k; ++l) a[i * k + l] = read(at, x.a.type, x.ta ? l + i * x.a.ld : i + l * x.a.ld);
    for (int64_t j = 0; j < n; ++j) for (int64_t l = 0; l < k; ++l) b[j * k + l] = read(bt, x.b.type, x.tb ? j + l * x.b.ld : l + j * x.b.ld);
    const char* ct = C + batch * x.c.stride * (int64_t)size_of(x.c.type);
    char* dt = D + batch * x.d.stride * (int64_t)size_of(x.d.type);
    for (int64_t j = 0; j < n; ++j) {
      if ((e & 128) && (e & 2)) memset(x.aux + j * x.aux_ld / 8, 0, x.aux_ld / 8);
      for (int64_t i = 0; i < m; ++i) {
        double v = 0;
        const double *p = &a[i * k], *q = &b[j * k];
        for (int64_t l = 0; l < k; ++l) {
          v += p[l] * q[l];
          if (x.rounds && l == k / 2) { char part[8]; write(part, x.d.type, 0, v); v = read(part, x.d.type, 0); }
        }
        v *= alpha;
        if (beta) v += beta * read(ct, x.c.type, i + j * x.c.ld);
        if (e & 4) v += read(x.bias, x.bias_type, i);
        if (e & 2) { if ((e & 128) && v > 0) x.aux[(j * x.aux_ld + i) / 8] |= 1 << i % 8; v = v > 0 || v != v ? v : 0; }
        if (e & 32) { if (e & 128) write(x.aux, x.d.type, i + j * x.aux_ld, v); v = gelu(v); }
        if (e & 8) v = x.aux[(j * x.aux_ld + i) / 8] >> i % 8 & 1 ? v : 0;
        if (e & 64) v *= slope(read(x.aux, x.d.type, i + j * x.aux_ld));
        if (e & 16) sum_m[i] += v;
        write(dt, x.d.type, i + j * x.d.ld, v);
      }
    }
  }
  if (e & 256) for (int64_t i = 0; i < m; ++i) for (int64_t l = 0; l < k; ++l) sum_m[i] += a[i * k + l];
  if (e & 512) for (int64_t j = 0; j < n; ++j) { for (int64_t l = 0; l < k; ++l) sum_n[j] += b[j * k + l]; }
  if (e & (16 | 256)) for (int64_t i = 0; i < m; ++i) write(x.bias, x.bias_type, i, sum_m[i]);
  if (e & 512) for (int64_t j = 0; j < n; ++j) write(x.bias, x.bias_type, j, sum_n[j]);
}
static bool lies(const void* at, const Layout& l) {
  return kind_of(at, ((l.batch - 1) * l.stride + (l.cols - 1) * l.ld + l.rows) * size_of(l.type)) == 2;
}
LT int cublasLtMatmul(void*, Attributes* desc, const void* alpha, const char* A, Attributes* a, const char* B, Attributes* b, const void* beta, const char* C,
                      Attributes* c, char* D, Attributes* d, const uint64_t* algo, void* workspace, size_t bytes, cudaStream_t stream) {
  Call x;
  if (int status = describe(x, desc, a, b, c, d)) return status;
  if (!algo || algo[0] < 77 || algo[0] > 80) return refuse(INVALID, "algorithm");
  if (algo[0] == 80) return UNSUPPORTED;  // a proposal need not run
  x.rounds = algo[6];
  if (kind_of(workspace, bytes) != 2 || (size_t)workspace % 256) return refuse(INVALID, "workspace");
  double factor = x.scale == 1 ? *(double*)alpha : *(float*)alpha, share = x.scale == 1 ? *(double*)beta : *(float*)beta;
  {
    host::Guard guard;
    if (!lies(A, x.a) || !lies(B, x.b) || !lies(D, x.d) || (share && !lies(C, x.c))) return refuse(INVALID, "an operand is no memory of the GPU, or leaves it");
    if ((x.epilogue & (4 | 16 | 256 | 512)) && kind_of(x.bias, (x.epilogue & 512 ? x.n : x.m) * size_of(x.bias_type)) != 2) return refuse(INVALID, "bias");
    if ((x.epilogue & 128) && kind_of(x.aux, ((x.n - 1) * x.aux_ld + x.m) * (x.epilogue & 10 ? 1 : 8 * size_of(x.d.type)) / 8) != 2) return refuse(INVALID, "aux");
  }
  const char* at[] = {A, B, C, D};
  for (int k = 0; k < 4; ++k) if ((size_t)at[k] % algo[1 + k]) return refuse(INVALID, "an operand is not aligned as the algorithm was told");
  if (((size_t)x.bias | (size_t)x.aux) % (algo[7] & -algo[7])) return refuse(INVALID, "bias or aux is not aligned as the algorithm was told");
  return host::push(stream, [=] { multiply(x, factor, share, A, B, C, D); }) ? 13 : OK;
}
