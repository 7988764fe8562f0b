// CUDA on the host: the runtime, the driver and NVRTC, as far as CuPy calls them. A stream is a queue, which runs as late as CUDA
// allows: when somebody waits for it. Kernels are compiled by g++ over an emulation of threads (HOSTCUDA_EMULATOR).
//   HOSTCUDA_EAGER=1   work runs when it is queued           HOSTCUDA_ORDER=k    order of threads (0, 1, 2...) and of branches of a graph
//   HOSTCUDA_DEVICES   how many GPUs there are               HOSTCUDA_LOG        file to which kernels and errors are written
//   HOSTCUDA_FAULT=214@kernel:9   from when it is set, the ninth kernel that runs ends in error 214; 46@call:9: the ninth call that queues
//                                 work returns error 46, and every later one
#include "hostcuda.h"
#include <algorithm>
#include <chrono>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <fstream>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace host {
static std::recursive_mutex lock;
Guard::Guard() {
  if (lock.try_lock()) return;
  static auto held = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
  static auto save = (void* (*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
  static auto restore = (void (*)(void*))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
  void* state = held && held() ? save() : nullptr;
  lock.lock();
  if (state) restore(state);
}
Guard::~Guard() { lock.unlock(); }
static int number(const char* name, int otherwise) { const char* s = getenv(name); return s ? atoi(s) : otherwise; }
static const bool EAGER = number("HOSTCUDA_EAGER", 0);
static int devices() {
  const char* seen = getenv("CUDA_VISIBLE_DEVICES");
  return seen ? *seen ? 1 + std::count(seen, seen + strlen(seen), ',') : 0 : number("HOSTCUDA_DEVICES", 1);
}
static const int ORDER = number("HOSTCUDA_ORDER", 0), DEVICES = devices();
static const size_t TOTAL = 149600000000ull, CONTEXT = 600u << 20;
static void note(const char* format, ...) {
  static FILE* file = getenv("HOSTCUDA_LOG") ? fopen(getenv("HOSTCUDA_LOG"), "a") : nullptr;
  if (!file) return;
  va_list a; va_start(a, format); vfprintf(file, format, a); va_end(a); fputc('\n', file); fflush(file);
}

struct Node { Work work; std::set<int> after; };
struct Graph { std::vector<Node> nodes; bool broken = false; struct Stream* origin = nullptr; };
struct Stream;
struct Event { bool timing = true; long asked = 0, done = 0; double when = 0; Stream* stream = nullptr; Graph* graph = nullptr; std::set<int> at; };
struct Stream {
  bool blocking = true; std::deque<Work> queue; Graph* graph = nullptr; std::set<int> at; int mode = 0; bool alive = true;
};
static std::set<Stream*> streams;
static Stream null_stream;
static std::map<char*, std::pair<size_t, int>> memory;  // start -> bytes, kind
static size_t used[64];
static thread_local int device = 0;
static int sticky = 0;
static char sticky_text[400];

static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
static Stream* of(cudaStream_t s) { return (size_t)s <= 2 ? &null_stream : (Stream*)s; }
void fail(int error, const char* text, const char* more) {
  note("FAILED %d %s %s", error, text, more);
  fprintf(stderr, "hostcuda: error %d: %s %s\n", error, text, more);
  if (!sticky) sticky = error, snprintf(sticky_text, sizeof sticky_text, "%s %s", text, more);
}
int kind_of(const void* place, size_t bytes) {
  auto at = memory.upper_bound((char*)place);
  if (at == memory.begin()) return 0;
  --at;
  if ((char*)place >= at->first + at->second.first) return 0;
  return (char*)place + bytes <= at->first + at->second.first ? at->second.second : -1;
}
static void run(const Work& work) { if (!sticky) work(); }  // after an error nothing runs any more
static void drain(Stream* s) {
  while (!s->queue.empty()) {
    Work work = std::move(s->queue.front());
    s->queue.pop_front();
    run(work);
  }
}
static void drain_all() { drain(&null_stream); for (Stream* s : std::vector<Stream*>(streams.begin(), streams.end())) drain(s); }
bool capturing(cudaStream_t s) { return of(s)->graph; }
// Counts down what HOSTCUDA_FAULT names, from when it is set, and fails then.
bool injected(const char* name, const char* place, int* error) {
  static std::map<std::string, int> left;
  const char* text = getenv(name);
  if (!text || !strchr(text, '@')) return false;
  const char* at = strchr(text, '@') + 1;
  if (strncmp(at, place, strlen(place))) return false;
  int& count = left.insert({text, atoi(at + strlen(place) + 1)}).first->second;
  *error = atoi(text);
  return --count == 0;
}
static void inject(const char* place) { int error; if (injected("HOSTCUDA_FAULT", place, &error)) fail(error, "as HOSTCUDA_FAULT says"); }
static cudaError_t push_to(Stream* s, Work work) {
  inject("call");
  if (sticky) return (cudaError_t)sticky;
  if (s->graph) {
    if (s->graph->broken) return cudaErrorStreamCaptureInvalidated;
    s->graph->nodes.push_back({std::move(work), s->at});
    s->at = {(int)s->graph->nodes.size() - 1};
    return cudaSuccess;
  }
  if (s == &null_stream) {
    for (Stream* other : streams) if (other->blocking) {
      if (other->graph) { other->graph->broken = true; return cudaErrorStreamCaptureImplicit; }
      drain(other);
    }
  } else if (s->blocking) drain(&null_stream);
  s->queue.push_back(std::move(work));
  if (EAGER) drain(s);
  return (cudaError_t)sticky;
}
cudaError_t push(cudaStream_t s, Work work) { Guard g; return push_to(of(s), std::move(work)); }
static cudaError_t finish(Stream* s) {
  if (s->graph) { s->graph->broken = true; return cudaErrorStreamCaptureUnsupported; }
  if (s == &null_stream) { for (Stream* other : streams) if (other->blocking && !other->graph) drain(other); }
  drain(s);
  return (cudaError_t)sticky;
}
static void record(Event* e, Stream* s) {
  e->stream = s;
  if (s->graph) { e->graph = s->graph, e->at = s->at; return; }
  e->graph = nullptr;
  long mine = ++e->asked;
  push_to(s, [e, mine] { e->done = std::max(e->done, mine), e->when = now(); });
}
static void reach(Event* e, long wanted, Stream* s) {
  while (e->done < wanted && !s->queue.empty()) { Work work = std::move(s->queue.front()); s->queue.pop_front(); run(work); }
}
static cudaError_t wait_for(Stream* s, Event* e) {
  if (sticky) return (cudaError_t)sticky;
  if (e->graph) {
    if (!s->graph) s->graph = e->graph;
    if (s->graph != e->graph) return cudaErrorStreamCaptureMerge;
    s->at.insert(e->at.begin(), e->at.end());
    return cudaSuccess;
  }
  if (s->graph) { if (!e->asked) return cudaSuccess; s->graph->broken = true; return cudaErrorStreamCaptureIsolation; }
  if (!e->asked) return cudaSuccess;
  long wanted = e->asked; Stream* from = e->stream;
  return push_to(s, [=] { reach(e, wanted, from); });
}

// Kernels ----------------------------------------------------------------------------------------------------------------------
struct Function { std::string name; void* (*pack)(void**); int (*check)(void**, int*); const char* (*run)(void*, long long, int, int); };
static sigjmp_buf escape;
static volatile bool guarded = false;
static void* bad_place;
static struct sigaction before_segv;
static void on_fault(int signal, siginfo_t* info, void* context) {
  if (guarded) { guarded = false; bad_place = info->si_addr; siglongjmp(escape, 1); }
  sigaction(SIGSEGV, &before_segv, nullptr);
}
static void execute(const Function* f, void* packed, long long blocks, int threads) {
  inject("kernel");
  if (sticky) return;
  struct sigaction action{}; action.sa_sigaction = on_fault; action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before_segv);
  if (sigsetjmp(escape, 1) == 0) {
    guarded = true;
    const char* wrong = f->run(packed, blocks, threads, ORDER);
    guarded = false;
    if (wrong) fail(strstr(wrong, "aligned") ? 716 : strstr(wrong, "hangs") ? 702 : 719, wrong, f->name.c_str());
  } else { char text[64]; snprintf(text, sizeof text, "at %p by kernel", bad_place); fail(700, text, f->name.c_str()); }
  sigaction(SIGSEGV, &before_segv, nullptr);
}
static const char* error_name(int e) {
  switch (e) {
#define IS(x) case x: return #x;
    IS(cudaSuccess) IS(cudaErrorInvalidValue) IS(cudaErrorMemoryAllocation) IS(cudaErrorInvalidConfiguration) IS(cudaErrorInvalidDevice)
    IS(cudaErrorInvalidResourceHandle) IS(cudaErrorNotReady) IS(cudaErrorIllegalAddress) IS(cudaErrorLaunchTimeout) IS(cudaErrorLaunchFailure)
    IS(cudaErrorMisalignedAddress) IS(cudaErrorNotSupported) IS(cudaErrorStreamCaptureUnsupported) IS(cudaErrorStreamCaptureInvalidated)
    IS(cudaErrorStreamCaptureMerge) IS(cudaErrorStreamCaptureUnmatched) IS(cudaErrorStreamCaptureUnjoined) IS(cudaErrorStreamCaptureIsolation)
    IS(cudaErrorStreamCaptureImplicit) IS(cudaErrorCapturedEvent) IS(cudaErrorInvalidMemcpyDirection) IS(cudaErrorNoDevice)
    IS(cudaErrorInvalidDevicePointer) IS(cudaErrorSymbolNotFound) IS(cudaErrorDevicesUnavailable) IS(cudaErrorECCUncorrectable)
    IS(cudaErrorNvlinkUncorrectable) IS(cudaErrorHostMemoryNotRegistered) IS(cudaErrorPeerAccessUnsupported)
  }
  return "cudaErrorUnknown";
}
}  // namespace host
using namespace host;
#define LOCK Guard guard; if (sticky) return (cudaError_t)sticky

// Runtime ----------------------------------------------------------------------------------------------------------------------
EXPORT const char* cudaGetErrorName(cudaError_t e) { return error_name(e); }
EXPORT const char* cudaGetErrorString(cudaError_t e) { return e == sticky && sticky ? sticky_text : "made up on the host"; }
EXPORT cudaError_t cudaGetLastError() { return (cudaError_t)sticky; }
EXPORT cudaError_t cudaPeekAtLastError() { return (cudaError_t)sticky; }
EXPORT cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int* d) { *d = device; return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int d) { if (d < 0 || d >= DEVICES) return cudaErrorInvalidDevice; device = d; return cudaSuccess; }
EXPORT cudaError_t cudaGetDeviceCount(int* n) { *n = DEVICES; return DEVICES ? cudaSuccess : cudaErrorNoDevice; }
EXPORT cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  switch ((int)a) {
    case cudaDevAttrComputeCapabilityMajor: *v = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *v = 0; break;
    case cudaDevAttrMultiProcessorCount: *v = 132; break;
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 232448; break;
    case cudaDevAttrClockRate: *v = 1980000; break;
    case cudaDevAttrMemoryClockRate: *v = 3201000; break;
    case cudaDevAttrL2CacheSize: *v = 62914560; break;
    case cudaDevAttrMemoryPoolsSupported: case cudaDevAttrUnifiedAddressing: case cudaDevAttrManagedMemory: *v = 1; break;
    default: *v = 0;
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  if (d < 0 || d >= DEVICES) return cudaErrorInvalidDevice;
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H200 (on the host)");
  p->uuid.bytes[0] = (char)(d + 1);
  p->totalGlobalMem = TOTAL, p->sharedMemPerBlock = 49152, p->regsPerBlock = 65536, p->warpSize = 32, p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = 9, p->multiProcessorCount = 132, p->l2CacheSize = 62914560, p->maxThreadsPerMultiProcessor = 2048, p->memoryBusWidth = 6144;
  p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472, p->pciBusID = d + 1, p->unifiedAddressing = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", d + 1); return cudaSuccess; }
EXPORT cudaError_t cudaDeviceSynchronize() {
  LOCK;
  for (Stream* s : streams) if (s->graph) { s->graph->broken = true; return cudaErrorStreamCaptureUnsupported; }
  drain_all();
  return (cudaError_t)sticky;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

static cudaError_t allocate(void** p, size_t n, int kind) {
  LOCK;
  if (kind == 2 && used[device] + n + CONTEXT > TOTAL) return cudaErrorMemoryAllocation;
  size_t held = (n + 4095) / 4096 * 4096;
  char* made = (char*)mmap(nullptr, held + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return cudaErrorMemoryAllocation;
  mprotect(made + held, 4096, PROT_NONE);
  if (n <= (64u << 20)) memset(made, 0xFF, n);  // what nobody has written is NaN
  memory[made] = {n, kind};
  if (kind == 2) used[device] += n;
  *p = made;
  return cudaSuccess;
}
static cudaError_t release(void* p, int kind) {
  Guard guard;
  if (!p) return cudaSuccess;
  auto at = memory.find((char*)p);
  if (at == memory.end() || at->second.second != kind) return cudaErrorInvalidValue;
  if (!sticky) drain_all();
  if (kind == 2) used[device] -= at->second.first;
  munmap(p, (at->second.first + 4095) / 4096 * 4096 + 4096);
  memory.erase(at);
  return (cudaError_t)sticky;
}
EXPORT cudaError_t cudaMalloc(void** p, size_t n) {
  { Guard g; for (Stream* s : streams) if (s->graph && s->mode == 0) { s->graph->broken = true; return cudaErrorStreamCaptureUnsupported; } }
  return allocate(p, n, 2);
}
EXPORT cudaError_t cudaMallocManaged(void** p, size_t n, unsigned) { return allocate(p, n, 2); }
EXPORT cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return allocate(p, n, 2); }
EXPORT cudaError_t cudaFree(void* p) { return release(p, 2); }
EXPORT cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return release(p, 2); }
EXPORT cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { return allocate(p, n, 1); }
EXPORT cudaError_t cudaFreeHost(void* p) { return release(p, 1); }
EXPORT cudaError_t cudaHostRegister(void* p, size_t n, unsigned) { LOCK; memory[(char*)p] = {n, 1}; return cudaSuccess; }
EXPORT cudaError_t cudaHostUnregister(void* p) { LOCK; return memory.erase((char*)p) ? cudaSuccess : cudaErrorHostMemoryNotRegistered; }
EXPORT cudaError_t cudaMemGetInfo(size_t* f, size_t* t) { LOCK; *t = TOTAL, *f = TOTAL - CONTEXT - used[device]; return cudaSuccess; }
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  LOCK;
  int kind = kind_of(p, 1);
  memset(a, 0, sizeof *a);
  a->type = (cudaMemoryType)(kind == 2 ? 2 : kind == 1 ? 1 : 0), a->device = kind == 2 ? 0 : -1;
  a->devicePointer = kind ? (void*)p : nullptr, a->hostPointer = kind == 1 ? (void*)p : nullptr;
  return cudaSuccess;
}
static cudaError_t copy(void* to, const void* from, size_t n, int kind, Stream* s, bool waits) {
  LOCK;
  if (!n) return cudaSuccess;
  int target = kind_of(to, n), source = kind_of(from, n);
  bool to_device = kind == 1 || kind == 3, from_device = kind == 2 || kind == 3;
  if (kind == 4) to_device = target == 2, from_device = source == 2;
  if (target < 0 || source < 0) { note("COPY leaves its memory"); return cudaErrorInvalidValue; }
  if ((target == 2) != to_device || (source == 2) != from_device) { note("COPY of kind %d, but target %d source %d", kind, target, source); return cudaErrorInvalidValue; }
  bool pageable = target == 0 || source == 0;
  if (s->graph && (pageable || waits)) { note("COPY of pageable memory in a capture"); s->graph->broken = true; return cudaErrorStreamCaptureUnsupported; }
  cudaError_t e;
  if (source == 0) {  // the driver takes pageable bytes over
    if (n > 65536) drain(s);
    auto held = std::make_shared<std::string>((const char*)from, n);
    e = push_to(s, [=] { memcpy(to, held->data(), n); });
  } else e = push_to(s, [=] { memmove(to, from, n); });
  if (!e && (target == 0 || waits)) e = finish(s);
  return e;
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind kind) { return copy(to, from, n, kind, &null_stream, true); }
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t s) { return copy(to, from, n, kind, of(s), false); }
EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t s) { return copy(to, from, n, 3, of(s), false); }
EXPORT cudaError_t cudaMemsetAsync(void* to, int v, size_t n, cudaStream_t s) {
  LOCK;
  if (n && kind_of(to, n) != 2) return cudaErrorInvalidValue;
  return push_to(of(s), [=] { memset(to, v, n); });
}
EXPORT cudaError_t cudaMemset(void* to, int v, size_t n) { return cudaMemsetAsync(to, v, n, nullptr); }

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
  LOCK; Stream* made = new Stream; made->blocking = !(flags & 1); streams.insert(made); *s = (cudaStream_t)made; return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithFlags(s, 0); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int) { return cudaStreamCreateWithFlags(s, flags); }
EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned* f) { *f = !of(s)->blocking; return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) { *p = 0; return cudaSuccess; }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t s) { Guard g; if (!sticky) drain(of(s)); streams.erase(of(s)); return cudaSuccess; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s) { LOCK; return finish(of(s)); }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t s) { LOCK; return finish(of(s)); }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) { LOCK; return wait_for(of(s), (Event*)e); }
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* data) { return push(s, [=] { f(data); }); }
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* data, unsigned) { return push(s, [=] { f(s, cudaSuccess, data); }); }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) { LOCK; Event* made = new Event; made->timing = !(flags & 2); *e = (cudaEvent_t)made; return cudaSuccess; }
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }  // queued work may refer to it
EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { LOCK; record((Event*)e, of(s)); return (cudaError_t)sticky; }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  LOCK;
  Event* e = (Event*)event;
  if (e->graph) { if (e->stream->graph) e->stream->graph->broken = true; return cudaErrorCapturedEvent; }
  if (e->asked) reach(e, e->asked, e->stream);
  return (cudaError_t)sticky;
}
// Asking runs one more piece of work, so that who polls comes to an end.
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  LOCK;
  Event* e = (Event*)event;
  if (e->graph) { if (e->stream->graph) e->stream->graph->broken = true; return cudaErrorCapturedEvent; }
  if (e->done < e->asked && e->stream && !e->stream->queue.empty()) {
    Work work = std::move(e->stream->queue.front());
    e->stream->queue.pop_front();
    run(work);
  }
  return sticky ? (cudaError_t)sticky : e->done < e->asked ? cudaErrorNotReady : cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  LOCK;
  Event *x = (Event*)a, *y = (Event*)b;
  if (!x->timing || !y->timing || !x->asked || !y->asked) return cudaErrorInvalidResourceHandle;
  if (x->done < x->asked || y->done < y->asked) return cudaErrorNotReady;
  *ms = (float)((y->when - x->when) * 1e3);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
  LOCK;
  if (of(s) == &null_stream) return cudaErrorStreamCaptureUnsupported;
  if (of(s)->graph) return cudaErrorStreamCaptureUnmatched;
  of(s)->graph = new Graph, of(s)->graph->origin = of(s), of(s)->mode = mode, of(s)->at.clear();
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* made) {
  LOCK;
  Graph* graph = of(s)->graph;
  *made = nullptr;
  if (!graph || graph->origin != of(s)) return cudaErrorStreamCaptureUnmatched;
  std::set<int> seen; std::vector<int> open(of(s)->at.begin(), of(s)->at.end());
  while (!open.empty()) { int k = open.back(); open.pop_back(); if (seen.insert(k).second) for (int j : graph->nodes[k].after) open.push_back(j); }
  bool joined = seen.size() == graph->nodes.size();
  for (Stream* other : streams) if (other->graph == graph) other->graph = nullptr, other->at.clear();
  if (graph->broken) return cudaErrorStreamCaptureInvalidated;
  if (!joined) return cudaErrorStreamCaptureUnjoined;
  *made = (cudaGraph_t)graph;
  note("GRAPH of %zu nodes", graph->nodes.size());
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  *status = !of(s)->graph ? cudaStreamCaptureStatusNone : of(s)->graph->broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t g, unsigned long long) {
  LOCK;
  Graph* graph = (Graph*)g;
  auto* sorted = new std::vector<Work>;
  std::vector<bool> done(graph->nodes.size());
  unsigned random = ORDER * 7919u + 1;
  while (sorted->size() < graph->nodes.size()) {  // any order that the graph allows, as ORDER has it
    std::vector<int> ready;
    for (int k = 0; k < (int)graph->nodes.size() && ready.size() < 8; ++k)
      if (!done[k] && std::all_of(graph->nodes[k].after.begin(), graph->nodes[k].after.end(), [&](int j) { return done[j]; })) ready.push_back(k);
    random = random * 1664525u + 1013904223u;
    int k = ORDER == 0 ? ready[0] : ORDER == 1 ? ready.back() : ready[(random >> 8) % ready.size()];
    done[k] = true, sorted->push_back(graph->nodes[k].work);
  }
  *exec = (cudaGraphExec_t)sorted;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
  LOCK;
  if (of(s)->graph) return cudaErrorStreamCaptureUnsupported;
  auto works = *(std::vector<Work>*)exec;
  return push_to(of(s), [works] { for (auto& work : works) run(work); });
}
EXPORT cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t s) { LOCK; return push_to(of(s), [] {}); }
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) { Guard g; if (!sticky) drain_all(); delete (std::vector<Work>*)e; return cudaSuccess; }
EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t g, const char*, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

// Driver -----------------------------------------------------------------------------------------------------------------------
EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* v) { *v = 13000; return CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorName(CUresult e, const char** s) { static thread_local std::string text; text = "CUDA_ERROR_" + std::to_string((int)e); *s = e == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : e == 46 ? "CUDA_ERROR_DEVICE_UNAVAILABLE" : e == 214 ? "CUDA_ERROR_ECC_UNCORRECTABLE" : e == 1 ? "CUDA_ERROR_INVALID_VALUE" : e == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : e == 716 ? "CUDA_ERROR_MISALIGNED_ADDRESS" : text.c_str(); return CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorString(CUresult e, const char** s) { *s = cudaGetErrorString((cudaError_t)e); return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetCurrent(CUcontext* c) { *c = (CUcontext)(size_t)(device + 4096); return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetCurrent(CUcontext c) { if (c) device = (int)((size_t)c - 4096); return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice* d) { *d = device; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int* n) { *n = DEVICES; return CUDA_SUCCESS; }
EXPORT CUresult cuStreamGetCtx(CUstream, CUcontext* c) { return cuCtxGetCurrent(c); }
EXPORT CUresult cuModuleLoad(CUmodule* m, const char* path) {
  Guard g;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) { note("LOAD %s", dlerror()); return access(path, R_OK) ? CUDA_ERROR_FILE_NOT_FOUND : CUDA_ERROR_INVALID_IMAGE; }
  *m = (CUmodule)library;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadData(CUmodule* m, const void* image) {
  const unsigned char* bytes = (const unsigned char*)image;
  if (memcmp(bytes, "\x7f" "ELF", 4)) return CUDA_ERROR_INVALID_IMAGE;
  size_t sections = *(size_t*)(bytes + 40), size = sections + (size_t)*(unsigned short*)(bytes + 58) * *(unsigned short*)(bytes + 60);
  int file = memfd_create("cubin", 0);
  if (write(file, image, size) != (ssize_t)size) return CUDA_ERROR_INVALID_IMAGE;
  return cuModuleLoad(m, ("/proc/self/fd/" + std::to_string(file)).c_str());
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule* m, const void* image, unsigned, CUjit_option*, void**) { return cuModuleLoadData(m, image); }
EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction* f, CUmodule m, const char* name) {
  std::string n = name;
  auto* made = new Function{n, (void* (*)(void**))dlsym(m, ("pack_" + n).c_str()), (int (*)(void**, int*))dlsym(m, ("check_" + n).c_str()),
                            (const char* (*)(void*, long long, int, int))dlsym(m, ("run_" + n).c_str())};
  if (!made->pack || !made->run) { delete made; return CUDA_ERROR_NOT_FOUND; }
  *f = (CUfunction)made;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                               CUstream s, void** params, void** extra) {
  Guard guard;
  if (sticky) return (CUresult)sticky;
  auto* f = (Function*)function;
  if (!gx || !gy || !gz || !bx || !by || !bz || bx * by * bz > 1024 || gx > 2147483647u || extra) { note("LAUNCH %s grid %u block %u", f->name.c_str(), gx, bx); return CUDA_ERROR_INVALID_VALUE; }
  if (gy * gz * by * bz != 1 || shared) { fprintf(stderr, "hostcuda: %s: one dimension and no dynamic shared memory here\n", f->name.c_str()); return CUDA_ERROR_NOT_SUPPORTED; }
  void* places[256]; int count = f->check(params, nullptr); int pointers[256]; f->check(params, pointers);
  for (int k = 0; k < count; ++k) if (pointers[k]) {
    places[k] = *(void**)params[k];
    if (places[k] && kind_of(places[k], 1) <= 0) { fprintf(stderr, "hostcuda: operand %d of %s, %p, is no memory of the GPU\n", k, f->name.c_str(), places[k]); note("HOST POINTER %s", f->name.c_str()); }
  }
  note("LAUNCH %s grid %u block %u", f->name.c_str(), gx, bx);
  void* packed = f->pack(params);
  return (CUresult)push_to(of(s), [=] { execute(f, packed, gx, bx); });
}
EXPORT CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction) { *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0; return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int threads, size_t) { *n = std::min(32, 2048 / threads); return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction, CUoccupancyB2DSize, size_t, int) { *grid = 264, *block = 1024; return CUDA_SUCCESS; }

// NVRTC ------------------------------------------------------------------------------------------------------------------------
struct Program { std::string text, log, cubin, name; std::vector<std::pair<std::string, std::string>> headers; };
static std::string setting(const char* name) { const char* s = getenv(name); return s ? s : ""; }
static std::string read_file(const std::string& path) { std::ifstream in(path, std::ios::binary); std::stringstream s; s << in.rdbuf(); return s.str(); }
static void replace(std::string& text, const std::string& old, const std::string& with) {
  for (size_t at = 0; (at = text.find(old, at)) != std::string::npos; at += with.size()) text.replace(at, old.size(), with);
}
EXPORT const char* nvrtcGetErrorString(int e) { return e == 6 ? "NVRTC_ERROR_COMPILATION" : e ? "NVRTC_ERROR" : "NVRTC_SUCCESS"; }
EXPORT int nvrtcVersion(int* major, int* minor) { *major = 13, *minor = 0; return 0; }
EXPORT int nvrtcGetNumSupportedArchs(int* n) { *n = 2; return 0; }
EXPORT int nvrtcGetSupportedArchs(int* a) { a[0] = 80, a[1] = 90; return 0; }
EXPORT int nvrtcCreateProgram(Program** p, const char* text, const char* name, int n, const char* const* headers, const char* const* names) {
  *p = new Program{text, "", "", name ? name : ""};
  for (int k = 0; k < n; ++k) (*p)->headers.push_back({names[k], headers[k]});
  return 0;
}
EXPORT int nvrtcDestroyProgram(Program** p) { delete *p; *p = nullptr; return 0; }
static int command(const std::string& line, std::string& log) {
  FILE* pipe = popen((line + " 2>&1").c_str(), "r");
  char part[4096]; size_t n;
  while ((n = fread(part, 1, sizeof part, pipe))) log.append(part, n);
  return pclose(pipe);
}
EXPORT int nvrtcCompileProgram(Program* p, int count, const char* const* options) {
  std::string text = p->text, flags, known[] = {"-I", "-D", "--include-path", "--define-macro", "-std", "--std", "--gpu-architecture", "-arch", "--diag", "-diag", "-default-device", "--device-as-default", "-ftz", "--ftz", "--use_fast_math", "-fmad", "--fmad", "-lineinfo", "-dopt", "--split-compile"};
  for (int k = 0; k < count; ++k) {
    std::string o = options[k];
    if (std::none_of(std::begin(known), std::end(known), [&](const std::string& s) { return o.rfind(s, 0) == 0; })) { p->log = "nvrtc: error: unrecognized option " + o; return 5; }
    if (o.rfind("-I", 0) == 0 || o.rfind("-D", 0) == 0) flags += " '" + o + "'";
  }
  replace(text, R"(asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));)", "_Float16 h; memcpy(&h, &x, 2); y = (float)h;");
  replace(text, R"(asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));)", "_Float16 h = (_Float16)x; memcpy(&y, &h, 2);");
  std::set<std::string> names;
  std::string plain = std::regex_replace(text, std::regex(R"(__launch_bounds__\([^)]*\))"), "");
  for (const char* pattern : {R"(extern\s+"C"\s+__global__\s+void\s+(\w+)\s*\()", R"(\bKERNEL\s+(\w+)\s*\()"}) {
    std::regex r(pattern);
    for (std::sregex_iterator at(plain.begin(), plain.end(), r), end; at != end; ++at) names.insert((*at)[1]);
  }
  std::string source = "#include \"kernel.h\"\n#line 1 \"" + p->name + "\"\n" + plain + "\n";
  bool of_cupy = plain.find("#include <cupy/") != std::string::npos;
  if (of_cupy) source = "#include <cuda_runtime.h>\n#undef __shared__\n#undef __constant__\n#undef __launch_bounds__\n" + source;
  for (auto& n : names)
    source += "static void body_" + n + "(void** a) { hostcuda::apply(" + n + ", a); }\n"
              "extern \"C\" void* pack_" + n + "(void** p) { return hostcuda::pack(" + n + ", p); }\n"
              "extern \"C\" int check_" + n + "(void**, int* q) { return hostcuda::check(" + n + ", q); }\n"
              "extern \"C\" const char* run_" + n + "(void* a, long long blocks, int threads, int order) { return emulated::run(body_" + n + ", (void**)a, blocks, threads, order); }\n";
  std::string everything = source + flags;
  for (auto& h : p->headers) everything += h.first + h.second;
  char kept[64];
  snprintf(kept, sizeof kept, "/%016zx%016zx.so", std::hash<std::string>()(everything), std::hash<std::string>()(everything + "once more"));
  const std::string cache = setting("HOSTCUDA_KERNELS") + kept, first = names.empty() ? p->name : *names.begin();
  p->cubin = read_file(cache);
  if (!p->cubin.empty()) { p->cubin += '\0'; note("KEPT %s", first.c_str()); return 0; }
  char folder[] = "/tmp/hostcuda-XXXXXX";
  if (!mkdtemp(folder)) return 1;
  const std::string dir = folder;
  std::ofstream(dir + "/kernel.cc") << source;
  for (auto& h : p->headers) std::ofstream(dir + "/" + h.first) << h.second;
  int status = command("g++ " + setting("HOSTCUDA_FLAGS") + flags + " -shared -I" + dir + " -o " + dir + "/kernel.so " + dir + "/kernel.cc", p->log);
  if (!status) {
    p->cubin = read_file(dir + "/kernel.so") + '\0';
    std::string partial = cache + "." + std::to_string(getpid()) + (dir.c_str() + 14);
    std::ofstream(partial, std::ios::binary).write(p->cubin.data(), p->cubin.size() - 1);
    rename(partial.c_str(), cache.c_str());
  }
  note("COMPILED %s: %d %s", first.c_str(), status, status ? p->log.substr(0, 1500).c_str() : "");
  std::string ignored;
  command("rm -r " + dir, ignored);
  return status ? 6 : 0;
}
static const char PTX[] = "// made up on the host\n";  // CuPy reads the compiler's version there
EXPORT int nvrtcGetPTXSize(Program* p, size_t* n) { *n = sizeof PTX; return 0; }
EXPORT int nvrtcGetPTX(Program* p, char* to) { memcpy(to, PTX, sizeof PTX); return 0; }
EXPORT int nvrtcGetCUBINSize(Program* p, size_t* n) { *n = p->cubin.size(); return 0; }
EXPORT int nvrtcGetCUBIN(Program* p, char* to) { memcpy(to, p->cubin.data(), p->cubin.size()); return 0; }
EXPORT int nvrtcGetProgramLogSize(Program* p, size_t* n) { *n = p->log.size() + 1; return 0; }
EXPORT int nvrtcGetProgramLog(Program* p, char* to) { memcpy(to, p->log.c_str(), p->log.size() + 1); return 0; }
EXPORT int nvrtcAddNameExpression(Program*, const char*) { return 1; }
EXPORT int nvrtcGetLoweredName(Program*, const char*, const char**) { return 1; }
