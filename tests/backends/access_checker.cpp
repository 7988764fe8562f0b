// Every access of an emulated kernel to memory, for kernels compiled with -fsanitize=thread, whose calls end up here in place of
// its runtime. Reported are: what one thread reads and another writes with no barrier of their block between, or another block
// at all (unless its block has met the other at an atomic addition, with fences between); shared memory that is read before its block wrote it; memory of the device that is no operand of the kernel.
// Writes of several threads to one place are left to the order in which threads run: they may all write the same.
#include <stdio.h>
#include <string.h>
#include <algorithm>
#include <map>
#include <set>
#include <vector>

typedef unsigned long long u64;
struct Range { u64 begin, end; int unit; };  // unit: bytes of an element; 0: memory of the device that is no operand
struct Cell { int writer_block, writer, written, reader_block, reader, read; };
enum { NOBODY = -1, SEVERAL = -2 };

static std::vector<Range> ranges;
static std::vector<std::vector<Cell>> cells;
static u64 shared_begin, shared_end;
static std::vector<Cell> shared;
static int block, thread, epoch;
static char* message;
static size_t room;

// What a block has written reaches another block so: each thread has a fence behind its writes; then a barrier; then one of the
// threads adds to a counter. Whoever adds to the counter later, and has a barrier and a fence behind that, may read it.
struct Order { bool unfenced; int fenced, seen; };  // of a thread: writes since its fence; the epoch of its fence; the meeting it sees
static std::vector<Order> threads;
static std::map<u64, std::set<int>> counted;  // counter → blocks that have added to it
static std::set<int> met;                     // blocks that this block may read, once a thread has a fence behind `meeting`
static int meeting, meeting_thread;

extern "C" void watch(const Range* given, int count, char* begin, char* end, char* to, size_t length) {
  ranges.assign(given, given + count);
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  cells.clear();
  for (const Range& r : ranges)
    cells.emplace_back(r.unit ? (r.end - r.begin + r.unit - 1) / r.unit : 0, Cell{NOBODY, NOBODY, 0, NOBODY, NOBODY, 0});
  shared_begin = (u64)begin, shared_end = (u64)end, message = to, room = length;
  threads.clear(), counted.clear(), met.clear(), meeting = 0;
  block = -1;
  shared.assign(count ? end - begin : 0, Cell{NOBODY, NOBODY, 0, NOBODY, NOBODY, 0});
}
extern "C" void position(int b, int t, int e) {
  if (b != block) threads.assign(1024, Order{false, 0, 0}), met.clear(), meeting = 0;
  block = b, thread = t, epoch = e;
}
extern "C" void fence() {
  if (threads.empty()) return;
  Order& own = threads[thread];
  own.unfenced = false, own.fenced = epoch;
  if (meeting && (meeting < epoch || meeting_thread == thread)) own.seen = meeting;
}

static void say(const char* what, u64 place, const Cell& c) {
  if (message && !message[0])
    snprintf(message, room, "%s: block %d thread %d at byte %llu; written by %d/%d, read by %d/%d", what, block, thread, place,
             c.writer_block, c.writer, c.reader_block, c.reader);
}

static void touch(Cell& c, bool write, bool of_block, u64 place) {
  const bool written_here = c.writer_block == block;
  if (!write) {
    if (of_block && !written_here) say("shared memory is read that the block did not write", place, c);
    const bool ordered = met.count(c.writer_block) && threads[thread].seen == meeting;
    if (!of_block && c.writer_block != NOBODY && !written_here && !ordered) say("a block reads what another writes", place, c);
    if (written_here && c.written == epoch && c.writer != thread) say("a thread reads what another writes", place, c);
    if (c.reader_block != block && !of_block && c.reader_block != NOBODY) c.reader_block = SEVERAL;
    else if (c.reader_block == block && c.read == epoch && c.reader != thread) c.reader = SEVERAL;
    else c.reader_block = block, c.reader = thread;
    c.read = epoch;
  } else {
    const bool read_here = c.reader_block == block;
    if (!of_block && c.reader_block != NOBODY && !read_here) say("a block writes what another reads", place, c);
    if (read_here && c.read == epoch && c.reader != thread) say("a thread writes what another reads", place, c);
    c.writer_block = block, c.writer = thread, c.written = epoch;
    if (!of_block) threads[thread].unfenced = true;
  }
}

static void access(void* address, u64 size, bool write) {
  const u64 first = (u64)address;
  if (ranges.empty()) return;
  if (first >= shared_begin && first < shared_end) {
    for (u64 k = first; k < first + size; ++k) touch(shared[k - shared_begin], write, true, k - shared_begin);
    return;
  }
  auto found = std::upper_bound(ranges.begin(), ranges.end(), first, [](u64 a, const Range& r) { return a < r.begin; });
  if (found == ranges.begin()) return;
  const size_t index = --found - ranges.begin();
  if (first >= found->end) return;
  if (!found->unit || first + size > found->end) {
    say("memory that is no operand", first - found->begin, Cell{});
    return;
  }
  const u64 begin = (first - found->begin) / found->unit, end = (first - found->begin + size - 1) / found->unit;
  for (u64 k = begin; k <= end; ++k) touch(cells[index][k], write, false, k * found->unit);
}

extern "C" void atomic(void* place) {
  if (ranges.empty()) return;
  for (const Range& r : ranges)
    if (r.unit && (u64)place >= r.begin && (u64)place < r.end) {
      for (int k = 0; k < (int)threads.size(); ++k)
        if (threads[k].unfenced || (k != thread && threads[k].fenced == epoch))
          say("a block is counted before what it wrote is fenced", (u64)place - r.begin, Cell{block, k, 0, 0, 0, 0});
      std::set<int>& others = counted[(u64)place];
      met.insert(others.begin(), others.end());
      others.insert(block);
      meeting = epoch, meeting_thread = thread;
      return;
    }
  say("an atomic addition to memory that is no operand", 0, Cell{});
}

extern "C" {
#define ACCESS(N)                                                       \
  void __tsan_read##N(void* p) { access(p, N, false); }                 \
  void __tsan_write##N(void* p) { access(p, N, true); }                 \
  void __tsan_unaligned_read##N(void* p) { access(p, N, false); }       \
  void __tsan_unaligned_write##N(void* p) { access(p, N, true); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_read_range(void* p, u64 size) { access(p, size, false); }
void __tsan_write_range(void* p, u64 size) { access(p, size, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
}
