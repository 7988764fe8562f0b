// What the made-up driver and the libraries over it share: streams as queues that run when somebody waits.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <functional>
#include <mutex>

namespace host {
typedef std::function<void()> Work;
// Held while work is queued or runs. Who waits for it lets go of Python's lock, since work may be a function of Python's.
struct Guard { Guard(); ~Guard(); };
// Queue work on a stream, or note it in the graph that the stream is captured into.
cudaError_t push(cudaStream_t stream, Work work);
bool capturing(cudaStream_t stream);
// Whether bytes lie in the memory of a device (kind 2) or in pinned memory (kind 1); 0: neither, -1: they leave what was allocated.
int kind_of(const void* place, size_t bytes);
// Whether the error that an environment variable asks for at `place` is due: "214@kernel:9", the ninth time from when it is set.
bool injected(const char* name, const char* place, int* error);
void fail(int error, const char* text, const char* more = "");  // an error of work that runs: it stays
}
