// NCCL on the host: the ranks of one world meet in a file in shared memory.
//   HOSTCUDA_NCCL_FAULT=6@collective:9   from when it is set, the ninth collective fails on this rank: it does not end, and the
//                                        communicator's asynchronous error is 6
#include "hostcuda.h"
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>
#define NCCL extern "C" __attribute__((visibility("default")))
enum { OK = 0, CUDA_ERROR_OF = 1, SYSTEM = 2, INTERNAL = 3, ARGUMENT = 4, USAGE = 5 };
static const size_t SLOT = 512u << 20, HEAD = 4096;
struct Mail { std::atomic<size_t> sent, taken; size_t bytes; };  // of a channel: one message at a time
struct Head { std::atomic<int> came, turn, aborted; Mail mail[2]; };
struct Comm { int rank, size, device; Head* head; char* slots; volatile bool aborted = false; volatile int error = OK; };
struct Id { char name[128]; };
static bool meet(Comm* c) {  // false: the communicator was aborted
  int turn = c->head->turn.load();
  if (c->head->came.fetch_add(1) + 1 == c->size) { c->head->came = 0; c->head->turn++; return true; }
  while (c->head->turn.load() == turn) { if (c->aborted) return false; usleep(50); }
  return true;
}
static size_t size_of(int t) { static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2}; return sizes[t]; }
static double get(const char* p, int t, size_t k) {
  switch (t) {
    case 0: return ((signed char*)p)[k]; case 1: return ((unsigned char*)p)[k]; case 2: return ((int*)p)[k]; case 3: return ((unsigned*)p)[k];
    case 4: return ((long long*)p)[k]; case 5: return ((unsigned long long*)p)[k]; case 6: return (float)((_Float16*)p)[k];
    case 7: return ((float*)p)[k]; case 8: return ((double*)p)[k];
  }
  unsigned bits = (unsigned)((unsigned short*)p)[k] << 16; float v; memcpy(&v, &bits, 4); return v;
}
static void put(char* p, int t, size_t k, double v) {
  switch (t) {
    case 0: ((signed char*)p)[k] = v; return; case 1: ((unsigned char*)p)[k] = v; return; case 2: ((int*)p)[k] = v; return;
    case 3: ((unsigned*)p)[k] = v; return; case 4: ((long long*)p)[k] = v; return; case 5: ((unsigned long long*)p)[k] = v; return;
    case 6: ((_Float16*)p)[k] = (_Float16)(float)v; return; case 7: ((float*)p)[k] = v; return; case 8: ((double*)p)[k] = v; return;
  }
  float f = v; unsigned bits; memcpy(&bits, &f, 4); ((unsigned short*)p)[k] = f != f ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static void reduce(Comm* c, char* to, size_t first, size_t count, int t, int op) {
  for (size_t k = 0; k < count; ++k) {
    double v = 0;
    for (int r = 0; r < c->size; ++r) {
      double x = get(c->slots + r * SLOT, t, first + k);
      v = r == 0 ? x : op == 0 || op == 4 ? (t == 7 ? (float)((float)v + (float)x) : v + x) : op == 1 ? v * x : op == 2 ? (x > v || x != x ? x : v) : (x < v || x != x ? x : v);
    }
    put(to, t, k, op == 4 ? v / c->size : v);
  }
}
// Everybody gives `bytes` (none from who has no part), all meet, `take` reads the slots, all meet.
static int queue(Comm* c, const void* send, size_t bytes, const void* receive, size_t written, cudaStream_t s, std::function<void()> take) {
  if (!c) return ARGUMENT;
  if (bytes > SLOT) return INTERNAL;
  {
    host::Guard guard;
    if ((bytes && host::kind_of(send, bytes) != 2) || (written && host::kind_of(receive, written) != 2)) { fprintf(stderr, "hostcuda: NCCL: no memory of the GPU\n"); return ARGUMENT; }
  }
  int error = host::push(s, [=] {
    int wrong;
    if (host::injected("HOSTCUDA_NCCL_FAULT", "collective", &wrong)) c->error = wrong;
    while (c->error && !c->aborted) usleep(50);
    if (c->aborted) return;
    if (bytes) memcpy(c->slots + c->rank * SLOT, send, bytes);
    if (!meet(c)) return;
    take();
    meet(c);
  });
  return error ? CUDA_ERROR_OF : OK;
}
NCCL int ncclGetVersion(int* v) { *v = 22907; return OK; }
NCCL const char* ncclGetErrorString(int e) {
  return e == 6 ? "remote process exited or there was a network error" : e ? "an error of NCCL's" : "no error";
}
NCCL const char* ncclGetLastError(Comm*) { return ""; }
NCCL int ncclGetUniqueId(Id* id) { memset(id, 0, sizeof *id); snprintf(id->name, 128, "/hostcuda-nccl-%d-%ld", getpid(), random()); return OK; }
static int join(Comm** made, int size, Id id, int rank) {
  if (rank < 0 || rank >= size) return ARGUMENT;
  int file = shm_open(id.name, O_RDWR | O_CREAT, 0600);
  size_t bytes = HEAD + size * SLOT;
  if (file < 0 || ftruncate(file, bytes)) return SYSTEM;
  char* at = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (at == MAP_FAILED) return SYSTEM;
  *made = new Comm{rank, size, 0, (Head*)at, at + HEAD};
  cudaGetDevice(&(*made)->device);
  meet(*made);
  if (rank == 0) shm_unlink(id.name);
  return OK;
}
NCCL int ncclCommInitRank(Comm** c, int size, Id id, int rank) { return join(c, size, id, rank); }
NCCL int ncclCommInitRankConfig(Comm** c, int size, Id id, int rank, void*) { return join(c, size, id, rank); }
NCCL int ncclCommFinalize(Comm*) { return OK; }
NCCL int ncclCommDestroy(Comm*) { return OK; }
NCCL int ncclCommAbort(Comm* c) { c->aborted = true; return OK; }
NCCL int ncclCommGetAsyncError(Comm* c, int* e) { *e = c->error; return OK; }
NCCL int ncclCommCount(Comm* c, int* n) { *n = c->size; return OK; }
NCCL int ncclCommCuDevice(Comm* c, int* n) { *n = c->device; return OK; }
NCCL int ncclCommUserRank(Comm* c, int* n) { *n = c->rank; return OK; }
NCCL int ncclGroupStart() { return OK; }
NCCL int ncclGroupEnd() { return OK; }
NCCL int ncclAllReduce(const void* from, void* to, size_t n, int t, int op, Comm* c, cudaStream_t s) {
  return queue(c, from, n * size_of(t), to, n * size_of(t), s, [=] { reduce(c, (char*)to, 0, n, t, op); });
}
NCCL int ncclReduce(const void* from, void* to, size_t n, int t, int op, int root, Comm* c, cudaStream_t s) {
  return queue(c, from, n * size_of(t), to, c->rank == root ? n * size_of(t) : 0, s, [=] { if (c->rank == root) reduce(c, (char*)to, 0, n, t, op); });
}
NCCL int ncclReduceScatter(const void* from, void* to, size_t n, int t, int op, Comm* c, cudaStream_t s) {
  return queue(c, from, n * size_of(t) * c->size, to, n * size_of(t), s, [=] { reduce(c, (char*)to, n * c->rank, n, t, op); });
}
NCCL int ncclAllGather(const void* from, void* to, size_t n, int t, Comm* c, cudaStream_t s) {
  size_t bytes = n * size_of(t);
  return queue(c, from, bytes, to, bytes * c->size, s, [=] { for (int r = 0; r < c->size; ++r) memcpy((char*)to + r * bytes, c->slots + r * SLOT, bytes); });
}
NCCL int ncclBroadcast(const void* from, void* to, size_t n, int t, int root, Comm* c, cudaStream_t s) {
  size_t bytes = n * size_of(t);
  return queue(c, from, c->rank == root ? bytes : 0, to, bytes, s, [=] { memcpy(to, c->slots + root * SLOT, bytes); });
}
NCCL int ncclBcast(void* at, size_t n, int t, int root, Comm* c, cudaStream_t s) { return ncclBroadcast(at, at, n, t, root, c, s); }
NCCL int ncclCommInitAll() { return USAGE; }
NCCL int ncclCommSplit() { return USAGE; }
// A channel of two ranks: a message lies in the sender's slot until it is taken. NCCL's stream works on its own, so what is sent
// runs when it is queued; what is received as late as possible. Groups of several transfers are not made up.
static int transfer(const void* at, size_t bytes, int peer, Comm* c, cudaStream_t s, bool sends) {
  if (!c || c->size != 2 || peer != 1 - c->rank || bytes > SLOT) return ARGUMENT;
  if (host::capturing(s)) return USAGE;
  {
    host::Guard guard;
    if (host::kind_of(at, bytes) != 2) { fprintf(stderr, "hostcuda: NCCL: no memory of the GPU\n"); return ARGUMENT; }
  }
  Mail* mail = &c->head->mail[sends ? c->rank : peer];
  int error = host::push(s, [=] {
    int wrong;
    if (host::injected("HOSTCUDA_NCCL_FAULT", sends ? "send" : "recv", &wrong)) c->error = wrong;
    while (c->error && !c->aborted) usleep(50);
    while ((mail->sent == mail->taken) != sends) { if (c->aborted) return; usleep(50); }
    if (sends) {
      memcpy(c->slots + c->rank * SLOT, at, bytes);
      mail->bytes = bytes;
      mail->sent++;
      return;
    }
    if (mail->bytes != bytes) return host::fail(719, "NCCL: what is received is not as long as what was sent");
    memcpy((void*)at, c->slots + peer * SLOT, bytes);
    mail->taken++;
  });
  if (!error && sends) error = cudaStreamSynchronize(s);
  return error ? CUDA_ERROR_OF : OK;
}
NCCL int ncclSend(const void* from, size_t n, int t, int peer, Comm* c, cudaStream_t s) { return transfer(from, n * size_of(t), peer, c, s, true); }
NCCL int ncclRecv(void* to, size_t n, int t, int peer, Comm* c, cudaStream_t s) { return transfer(to, n * size_of(t), peer, c, s, false); }
