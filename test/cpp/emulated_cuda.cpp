// A CUDA runtime without a GPU, preloaded before PyTorch's own: two devices whose memory is the host's. It runs our
// kernels on the CPU, thread by thread, and so the operators as a whole, from Python to the launch: devices, streams,
// allocation, failures, graphs. gpu_model.cpp has the closer look at the kernels themselves.
//
// It defines what PyTorch calls to allocate and copy and what the library calls to launch; the rest comes from the real
// runtime, which finds no driver and says so. Kernels of PyTorch's own cannot run here: to launch one is an error.
//
// As on a device: memory is never clean, a launch that asks for more than was agreed on fails, and what a graph records
// is not done before its replay. Whatever reaches for memory that is not its own ends the process. Work is done at
// once, so that an order of streams that is wrong goes unnoticed.
//
// The library is also loaded in the place of libcuda.so.1, whose functions PyTorch looks for without calling them.
#include <cuda/depthwise_blocks.h>
#include <cuda/norm_blocks.h>
#include <cuda/resample_blocks.h>
#include <cuda/rms_blocks.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch_nhwc/cuda/launch_plan.h>
#include <torch_nhwc/cuda/tile.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

using namespace nhwc::cuda;

static_assert(CUDART_VERSION / 1000 == 13, "other major versions have other structs and signatures");

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int devices = 2, processors = 4;
constexpr std::size_t opt_in_shared_bytes = 227 << 10;

[[noreturn]] void die(const char* sentence) {
  std::fprintf(stderr, "emulated CUDA: %s\n", sentence);
  std::abort();
}

// What our kernels are called with, as launch_kernel has it.
struct Kernel {
  Elements elements;
  bool is_long;
  unsigned capacity;
};

// One of our launches on its way, or recorded.
struct Work {
  Kernel kernel;
  int device;
  std::vector<Filters> filters;
  char* scratch;
  std::uint64_t scratch_bytes;
  unsigned blocks, shared_bytes;
};

struct Memory {
  char *begin, *end;
  int device;  // -1 for the host's
};

using Graph = std::vector<std::function<void()>>;

struct Stream {
  std::unique_ptr<Graph> captured = {};
};

// Never destroyed: PyTorch gives memory back as late as it can.
struct Runtime {
  std::recursive_mutex mutex;
  std::map<const void*, std::string> kernels;  // by the functions that stand for them
  std::map<std::pair<int, const void*>, std::size_t> shared_bytes;
  std::map<const char*, Memory> memory;  // by their ends
  std::map<cudaStream_t, Stream> streams;
};

Runtime& runtime() {
  static auto* runtime = new Runtime;
  return *runtime;
}

using Lock = std::lock_guard<std::recursive_mutex>;

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) { return last_error = error; }

cudaError_t fail(cudaError_t error, const char* sentence) {
  std::fprintf(stderr, "emulated CUDA: %s\n", sentence);
  return fail(error);
}

const Memory* find_memory(const void* pointer) {
  const auto* byte = static_cast<const char*>(pointer);
  const auto found = runtime().memory.upper_bound(byte);
  return found != runtime().memory.end() && found->second.begin <= byte ? &found->second : nullptr;
}

}  // namespace

// What the tests set and read.
struct Emulation {
  std::int64_t memory_limit = std::int64_t{8} << 30;  // of both devices together
  std::int64_t used = 0, peak = 0;
  std::int32_t driver_version = 13000;
  std::int32_t launches_that_work = -1;  // before those that fail; -1 for all
  std::int32_t device_without_image = -1;
  std::int32_t wrong_lane = -1;  // the element of each norm's output of which a bit is wrong
};
API Emulation emulation;
Emulation emulation;

struct LaunchRecord {
  std::uint64_t stream;
  // Of other kernels than those for weights: -1 less the step, after norms' those of convolutions; of a copy of rows
  // -100, of a sum -101; of an RMS norm's forward -102, of its backward -103.
  std::int32_t device, elements, is_long;
  std::uint32_t weights, blocks, shared_bytes;
};

namespace {
std::vector<LaunchRecord>& launches() {
  static auto* launches = new std::vector<LaunchRecord>;
  return *launches;
}
}  // namespace

/// The launches since the last call, `room` of them at most; returns their number.
API int take_launches(LaunchRecord* out, int room) {
  const Lock lock(runtime().mutex);
  const int number = static_cast<int>(launches().size());
  std::copy_n(launches().begin(), std::min(number, room), out);
  launches().clear();
  return number;
}

// ---- Devices.

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = devices;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return 0;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = emulation.driver_version;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof(*properties));
  std::strcpy(properties->name, "emulated");
  properties->major = 9;
  properties->warpSize = 32;
  properties->multiProcessorCount = processors;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->totalGlobalMem = emulation.memory_limit;
  properties->sharedMemPerBlock = plain_shared_bytes;
  properties->sharedMemPerBlockOptin = opt_in_shared_bytes;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 8 + device; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *value = processors; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = opt_in_shared_bytes; return cudaSuccess;
    default: return fail(cudaErrorInvalidValue, "an attribute that it does not have");
  }
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last_error; }

// ---- Memory.

namespace {
void* allocate(std::size_t bytes, int device) {
  void* pointer = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  std::memset(pointer, 0xEE, bytes);
  char* begin = static_cast<char*>(pointer);
  runtime().memory[begin + bytes] = {begin, begin + bytes, device};
  return pointer;
}
cudaError_t release(void* pointer) {
  if (!pointer) return cudaSuccess;
  const Lock lock(runtime().mutex);
  const Memory* memory = find_memory(pointer);
  if (!memory || memory->begin != pointer) die("memory is given back that was never given out");
  if (memory->device >= 0) emulation.used -= memory->end - memory->begin;
  runtime().memory.erase(memory->end);
  std::free(pointer);
  return cudaSuccess;
}
}  // namespace

API cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  const Lock lock(runtime().mutex);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  const auto used = emulation.used + static_cast<std::int64_t>(bytes);
  if (used > emulation.memory_limit) return fail(cudaErrorMemoryAllocation);
  *pointer = allocate(bytes, current_device);
  emulation.used = used;
  emulation.peak = std::max(emulation.peak, used);
  return cudaSuccess;
}
API cudaError_t cudaFree(void* pointer) { return release(pointer); }
API cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  const Lock lock(runtime().mutex);
  *pointer = allocate(bytes, -1);
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }
API cudaError_t cudaMemGetInfo(std::size_t* available, std::size_t* total) {
  *total = emulation.memory_limit;
  *available = emulation.memory_limit - emulation.used;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const Lock lock(runtime().mutex);
  std::memset(attributes, 0, sizeof(*attributes));
  const Memory* memory = find_memory(pointer);
  attributes->type = !memory               ? cudaMemoryTypeUnregistered
                     : memory->device >= 0 ? cudaMemoryTypeDevice
                                           : cudaMemoryTypeHost;
  attributes->device = memory ? memory->device : -2;
  return cudaSuccess;
}

// ---- Streams and graphs. Events need not do anything.

namespace {
Graph* graph_of(cudaStream_t stream) {
  const auto found = runtime().streams.find(stream);
  return found != runtime().streams.end() ? found->second.captured.get() : nullptr;
}
cudaError_t submit(cudaStream_t stream, std::function<void()> work) {
  const Lock lock(runtime().mutex);
  if (Graph* graph = graph_of(stream)) {
    graph->push_back(std::move(work));
  } else {
    work();
  }
  return cudaSuccess;
}
}  // namespace

API cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return submit(stream, [=] { std::memmove(to, from, bytes); });
}
API cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
API cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return submit(stream, [=] { std::memset(to, value, bytes); });
}
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  const Lock lock(runtime().mutex);
  static std::uintptr_t next = 0;
  *stream = reinterpret_cast<cudaStream_t>(++next << 8);
  runtime().streams.emplace(*stream, Stream());
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -1;
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(1);
  return cudaSuccess;
}
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const Lock lock(runtime().mutex);
  runtime().streams[stream].captured = std::make_unique<Graph>();
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const Lock lock(runtime().mutex);
  *graph = reinterpret_cast<cudaGraph_t>(runtime().streams[stream].captured.release());
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const Lock lock(runtime().mutex);
  *status = graph_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                         std::size_t*) {
  const Lock lock(runtime().mutex);
  if (id) *id = reinterpret_cast<std::uintptr_t>(graph_of(stream));
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(graph_of(stream));
  return cudaStreamIsCapturing(stream, status);
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<const Graph*>(graph)));
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const auto& work : *reinterpret_cast<const Graph*>(exec)) submit(stream, work);
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<const Graph*>(graph);
  return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete reinterpret_cast<const Graph*>(exec);
  return cudaSuccess;
}

// ---- Kernels.

namespace {

// The memory around a pointer that a kernel is given, which has to be its device's.
Memory memory_around(const void* pointer, int device) {
  const Memory* memory = find_memory(pointer);
  if (!memory) die("a kernel is given memory that is no device's");
  if (memory->device != device) die("a kernel is given memory of another device");
  return *memory;
}

// What one thread stores as a word another may load as a byte, which C++ allows by way of memcpy only.
struct SharedAccess {
  std::size_t shared_bytes;

  template <typename Value>
  static void check(const Memory& memory, const void* pointer) {
    const auto* byte = static_cast<const char*>(pointer);
    if (byte < memory.begin || byte + sizeof(Value) > memory.end) die("a kernel leaves its memory");
    if (reinterpret_cast<std::uintptr_t>(pointer) % sizeof(Value) != 0) die("a kernel's access is misaligned");
  }
  template <typename Value>
  void check_shared(std::uint32_t offset) const {
    if (offset + sizeof(Value) > shared_bytes) die("a kernel leaves its shared memory");
    if (offset % sizeof(Value) != 0) die("a kernel's access to shared memory is misaligned");
  }
  template <typename Value>
  Value load_shared(const char* shared, std::uint32_t offset) const {
    check_shared<Value>(offset);
    Value value;
    std::memcpy(&value, shared + offset, sizeof(Value));
    return value;
  }
  template <typename Value>
  void store_shared(char* shared, std::uint32_t offset, const Value& value) const {
    check_shared<Value>(offset);
    std::memcpy(shared + offset, &value, sizeof(Value));
  }
};

// Loads from the one memory and stores to the other, and to the tile.
struct CheckedAccess : SharedAccess {
  Memory source, destination;

  template <typename Value>
  Value load(const void* from) const {
    check<Value>(source, from);
    Value value;
    std::memcpy(&value, from, sizeof(Value));
    return value;
  }
  template <typename Value>
  void store(void* to, const Value& value) const {
    check<Value>(destination, to);
    std::memcpy(to, &value, sizeof(Value));
  }
};

// Loads and stores any memory of a device.
struct DeviceAccess : SharedAccess {
  int device;

  template <typename Value>
  Value load(const void* from) const {
    check<Value>(memory_around(from, device), from);
    Value value;
    std::memcpy(&value, from, sizeof(Value));
    return value;
  }
  template <typename Value>
  void store(void* to, const Value& value) const {
    check<Value>(memory_around(to, device), to);
    std::memcpy(to, &value, sizeof(Value));
  }
};

template <Elements elements>
void run_tile(const Work& work, const Filters& filters, std::uint32_t index, char* shared) {
  const CheckedAccess access{
      {work.shared_bytes}, memory_around(filters.source, work.device), memory_around(filters.destination, work.device)};
  const Tile<elements, CheckedAccess> tile(filters, index, shared, access);
  for (unsigned thread = 0; thread < threads_of_a_block; ++thread) tile.load(thread);
  for (unsigned thread = 0; thread < threads_of_a_block; ++thread) tile.store(thread);
}

// As the kernels themselves go about it.
template <Elements elements>
void run(const Work& work) {
  const auto quads = std::make_unique<Quad[]>(work.shared_bytes / sizeof(Quad) + 1);
  char* shared = reinterpret_cast<char*>(quads.get());
  for (std::uint32_t block = 0; block < work.blocks; ++block) {
    const Filters* list = work.filters.data();
    const std::uint32_t size = work.filters.size();
    if (!work.kernel.is_long) {
      const Filters& filters = filters_of_block(list, size, block);
      run_tile<elements>(work, filters, block - filters.first_block, shared);
      continue;
    }
    for (std::uint32_t number = block; number < LongFilter::count(list, size); number += work.blocks) {
      const LongFilter filter(list, size, number, elements, work.scratch + block * work.scratch_bytes);
      run_tile<elements>(work, filter.copy, 0, shared);
      for (std::uint32_t part = 0; part < filter.tiles; ++part)
        run_tile<elements>(work, filter.transpose, part, shared);
    }
  }
}

constexpr void (*run_of[])(const Work&) = {
    run<Elements::bytes1>,        run<Elements::bytes2>,
    run<Elements::bytes4>,        run<Elements::bytes8>,
    run<Elements::bytes16>,       run<Elements::float_to_bfloat16>,
    run<Elements::float_to_half>, run<Elements::bfloat16_to_float>,
    run<Elements::half_to_float>,
};
static_assert(std::size(run_of) == kinds_of_elements);

// Of its mangled name: _ZN4nhwc4cuda6detail13convert_tilesILNS0_8ElementsE2ELj101EEE..., or permute_long_filters.
bool parse(const std::string& name, Kernel& kernel) {
  const char* arguments = std::strstr(name.c_str(), "8ElementsE");
  if (!arguments || name.rfind("_ZN4nhwc4cuda", 0) != 0) return false;
  int elements = 0;
  if (std::sscanf(arguments, "8ElementsE%dELj%u", &elements, &kernel.capacity) != 2) return false;
  kernel.elements = static_cast<Elements>(elements);
  kernel.is_long = name.find("permute_long_filters") != std::string::npos;
  return true;
}

// The kernels of a step: by what follows, by type, of elements and of vectors.
constexpr int norm_kinds = followers * norm_types * 2;

// A launch of one of a norm's kernels.
struct NormWork {
  NormArguments arguments;
  int device;
  unsigned blocks, shared_bytes;
};

template <NormStep step, NormType type, bool is_vector, Follower follower>
void run_norm(const NormWork& work) {
  constexpr unsigned lanes = is_vector ? 16 / bytes_of(type) : 1;
  const auto quads = std::make_unique<Quad[]>(work.shared_bytes / sizeof(Quad) + 1);
  const DeviceAccess access{{work.shared_bytes}, work.device};
  for (std::uint32_t block = 0; block < work.blocks; ++block) {
    const BlockOfStep<step, type, lanes, follower, DeviceAccess> each(work.arguments, block,
                                                                      reinterpret_cast<char*>(quads.get()), access);
    each.run([](const auto& phase) {
      for (unsigned thread = 0; thread < norm_threads; ++thread) phase(thread);
    });
  }
}

using RunNorm = void (*)(const NormWork&);

constexpr Follower follower_of_kind(std::size_t kind) {
  const auto step = static_cast<NormStep>(kind / norm_kinds);
  return has_followers(step) ? static_cast<Follower>(kind / 2 / norm_types % followers) : Follower::nothing;
}

template <std::size_t... kinds>
RunNorm find_norm(std::size_t kind, std::index_sequence<kinds...>) {
  static constexpr RunNorm all[] = {
      run_norm<static_cast<NormStep>(kinds / norm_kinds), static_cast<NormType>(kinds / 2 % norm_types),
               (kinds % 2 != 0), follower_of_kind(kinds)>...};
  return all[kind];
}

// Of its mangled name: ...9run_blockILNS0_8NormStepE0ELNS0_8NormTypeE1ELj8ELNS0_8FollowerE0EEEvNS0_13NormArgumentsE.
RunNorm parse_norm(const std::string& name, int& step) {
  const char* arguments = std::strstr(name.c_str(), "run_blockILNS0_8NormStepE");
  int type = 0, lanes = 0, follower = 0;
  if (!arguments || std::sscanf(arguments, "run_blockILNS0_8NormStepE%dELNS0_8NormTypeE%dELj%dELNS0_8FollowerE%d",
                                &step, &type, &lanes, &follower) != 4) {
    return nullptr;
  }
  return find_norm(((step * followers + follower) * norm_types + type) * 2 + (lanes > 1),
                   std::make_index_sequence<norm_steps * norm_kinds>());
}

// A launch of one of a depthwise convolution's kernels, whose name says the step and the type:
// ...9run_blockINS0_17DepthwiseConvolveILNS0_8NormTypeE0ELj4ELj3ELj1ENS0_12DirectAccessEEEEEvNS0_18DepthwiseArgumentsE.
struct DepthwiseWork {
  DepthwiseStep step;
  NormType type;
  DepthwiseArguments arguments;
  int device;
};

bool parse_depthwise(const std::string& name, DepthwiseStep& step, NormType& type) {
  const char* block = std::strstr(name.c_str(), "Depthwise");
  char kind = 0;
  int number = 0;
  const char* of_type = block ? std::strstr(block, "NormTypeE") : nullptr;
  if (!of_type || std::sscanf(block, "Depthwise%c", &kind) != 1 || std::sscanf(of_type, "NormTypeE%d", &number) != 1) {
    return false;
  }
  step = kind == 'C'   ? DepthwiseStep::convolve
         : kind == 'G' ? DepthwiseStep::chunk_gradients
                       : DepthwiseStep::merge_gradients;
  type = static_cast<NormType>(number);
  return true;
}

void run_depthwise(const DepthwiseWork& work) {
  const DepthwisePlan& plan = work.arguments.plan;
  const std::size_t bytes = shared_bytes_of(work.step, plan);
  const auto quads = std::make_unique<Quad[]>(bytes / sizeof(Quad) + 1);
  with_depthwise_block<DeviceAccess>(work.step, work.type, plan, [&](auto block_type) {
    for (std::uint32_t block = 0; block < blocks_of(work.step, plan); ++block) {
      const DeviceAccess access{{bytes}, work.device};
      char* shared = reinterpret_cast<char*>(quads.get());
      typename decltype(block_type)::Type(work.arguments, block, shared, access).run_phases([&](const auto& phase) {
        for (unsigned thread = 0; thread < threads_of(work.step, plan); ++thread) phase(thread);
      });
    }
  });
}

// A launch that resamples.
struct ResampleWork {
  ResampleArguments arguments;
  int device;
  unsigned blocks, shared_bytes;
};

template <typename Block>
void run_resampling(const ResampleWork& work) {
  const auto quads = std::make_unique<Quad[]>(work.shared_bytes / sizeof(Quad) + 1);
  const DeviceAccess access{{work.shared_bytes}, work.device};
  for (std::uint32_t block = 0; block < work.blocks; ++block) {
    const Block each(work.arguments, block, reinterpret_cast<char*>(quads.get()), access);
    each.run([](const auto& phase) {
      for (unsigned thread = 0; thread < resample_threads; ++thread) phase(thread);
    });
  }
}

using RunResampling = void (*)(const ResampleWork&);

template <std::size_t... sizes>
RunResampling find_copy(int bytes, std::index_sequence<sizes...>) {
  RunResampling found = nullptr;
  ((bytes == 1 << sizes ? found = run_resampling<CopiedRows<(1 << sizes), DeviceAccess>> : nullptr), ...);
  return found;
}

template <std::size_t... types>
RunResampling find_sum(std::size_t type, bool is_vector, int rows, std::index_sequence<types...>) {
  static constexpr RunResampling all[][2][2] = {
      {{run_resampling<SummedRows<static_cast<NormType>(types), 1, 1, DeviceAccess>>,
        run_resampling<SummedRows<static_cast<NormType>(types), 1, 4, DeviceAccess>>},
       {run_resampling<
            SummedRows<static_cast<NormType>(types), 16 / bytes_of(static_cast<NormType>(types)), 1, DeviceAccess>>,
        run_resampling<SummedRows<static_cast<NormType>(types), 16 / bytes_of(static_cast<NormType>(types)), 4,
                                  DeviceAccess>>}}...};
  return all[type][is_vector][rows > 1];
}

// Of its mangled name: ...14run_resamplingINS0_10CopiedRowsILj16E... or
// ...INS0_10SummedRowsILNS0_8NormTypeE1ELj8ELj4E...
RunResampling parse_resampling(const std::string& name, int& kind) {
  int bytes = 0, type = 0, lanes = 0, rows = 0;
  const char* copied = std::strstr(name.c_str(), "CopiedRowsILj");
  const char* summed = std::strstr(name.c_str(), "SummedRowsILNS0_8NormTypeE");
  if (name.find("run_resampling") == std::string::npos) return nullptr;
  kind = copied ? -100 : -101;
  if (copied && std::sscanf(copied, "CopiedRowsILj%d", &bytes) == 1) {
    return find_copy(bytes, std::make_index_sequence<5>());
  }
  if (!summed || std::sscanf(summed, "SummedRowsILNS0_8NormTypeE%dELj%dELj%d", &type, &lanes, &rows) != 3) {
    return nullptr;
  }
  return find_sum(type, lanes > 1, rows, std::make_index_sequence<summed_types>());
}

// A launch of one of an RMS norm's kernels.
struct RmsWork {
  bool is_backward, has_silu;
  NormType type;
  std::uint32_t lanes;
  RmsArguments arguments;
  int device;
};

// Of its mangled name: ...7run_rmsINS0_10RmsForwardILNS0_8NormTypeE1ELj8ELb1E... or ...INS0_11RmsBackwardI...
bool parse_rms(const std::string& name, RmsWork& work) {
  const char* block = std::strstr(name.c_str(), "run_rmsI");
  const char* arguments = block ? std::strstr(block, "ILNS0_8NormTypeE") : nullptr;
  int type = 0, has_silu = 0;
  if (!arguments || std::sscanf(arguments, "ILNS0_8NormTypeE%dELj%uELb%d", &type, &work.lanes, &has_silu) != 3) {
    return false;
  }
  work.is_backward = std::strstr(block, "RmsBackward") != nullptr;
  work.has_silu = has_silu != 0;
  work.type = static_cast<NormType>(type);
  return true;
}

void run_rms(const RmsWork& work) {
  const RmsPlan& plan = work.arguments.plan;
  const std::size_t bytes = plan.shared_bytes(work.is_backward, work.type == NormType::float64 ? 8 : 4);
  const auto quads = std::make_unique<Quad[]>(bytes / sizeof(Quad) + 1);
  const DeviceAccess access{{bytes}, work.device};
  with_rms_block<DeviceAccess>(work.is_backward, work.type, work.has_silu, plan, [&](auto block_type) {
    for (std::uint64_t block = 0; block < plan.blocks(work.is_backward); ++block) {
      const typename decltype(block_type)::Type each(work.arguments, static_cast<std::uint32_t>(block),
                                                     reinterpret_cast<char*>(quads.get()), access);
      each.run([](const auto& phase) {
        for (unsigned thread = 0; thread < rms_threads; ++thread) phase(thread);
      });
    }
  });
  if (emulation.wrong_lane >= 0 && !work.is_backward) {
    static_cast<char*>(work.arguments.out)[emulation.wrong_lane] ^= 0x40;
  }
}

}  // namespace

API void __cudaRegisterFunction(void** module, const char* function, char* device_function, const char* name,
                                int thread_limit, uint3* thread, uint3* block, dim3* block_size, dim3* grid_size,
                                int* warp_size) {
  const Lock lock(runtime().mutex);
  runtime().kernels[function] = name;
  static const auto real =
      reinterpret_cast<decltype(&__cudaRegisterFunction)>(dlsym(RTLD_NEXT, "__cudaRegisterFunction"));
  real(module, function, device_function, name, thread_limit, thread, block, block_size, grid_size, warp_size);
}

API cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  const Lock lock(runtime().mutex);
  if (runtime().kernels.count(function) == 0) return fail(cudaErrorInvalidDeviceFunction);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<std::size_t>(value) > opt_in_shared_bytes) return fail(cudaErrorInvalidValue);
  runtime().shared_bytes[{current_device, function}] = value;
  return cudaSuccess;
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  const Lock lock(runtime().mutex);
  if (current_device == emulation.device_without_image) return fail(cudaErrorNoKernelImageForDevice);
  *attributes = {};
  return runtime().kernels.count(function) == 0 ? fail(cudaErrorInvalidDeviceFunction) : cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                                 std::size_t shared_bytes, cudaStream_t stream) {
  const Lock lock(runtime().mutex);
  const std::string& name = runtime().kernels[function];
  Kernel kernel;
  int step = 0;
  const RunNorm run_norm = parse_norm(name, step);
  DepthwiseWork depthwise{};
  const bool is_depthwise = parse_depthwise(name, depthwise.step, depthwise.type);
  const RunResampling run_resampling = parse_resampling(name, step);
  RmsWork rms{};
  const bool is_rms = parse_rms(name, rms);
  if (!run_norm && !is_depthwise && !run_resampling && !is_rms && !parse(name, kernel)) {
    return fail(cudaErrorNotSupported, ("PyTorch's own kernel " + name).c_str());
  }
  if (current_device == emulation.device_without_image) return fail(cudaErrorNoKernelImageForDevice);
  if (emulation.launches_that_work == 0) return fail(cudaErrorLaunchFailure);
  if (emulation.launches_that_work > 0) --emulation.launches_that_work;

  if (run_norm) {
    if (shared_bytes > plain_shared_bytes || grid.x == 0 || block.x != norm_threads) return fail(cudaErrorInvalidValue);
    const NormWork work{*static_cast<const NormArguments*>(arguments[0]), current_device, grid.x,
                        static_cast<unsigned>(shared_bytes)};
    launches().push_back(
        {reinterpret_cast<std::uintptr_t>(stream), current_device, -1 - step, 0, 0, grid.x, work.shared_bytes});
    return submit(stream, [=] {
      run_norm(work);
      const bool writes =
          step == static_cast<int>(NormStep::normalise) || step == static_cast<int>(NormStep::whole_forward);
      if (emulation.wrong_lane >= 0 && writes) static_cast<char*>(work.arguments.out)[emulation.wrong_lane] ^= 0x40;
    });
  }

  if (is_depthwise) {
    depthwise.arguments = *static_cast<const DepthwiseArguments*>(arguments[0]);
    depthwise.device = current_device;
    const DepthwisePlan& plan = depthwise.arguments.plan;
    if (shared_bytes > plain_shared_bytes || shared_bytes != shared_bytes_of(depthwise.step, plan) ||
        grid.x != blocks_of(depthwise.step, plan) || block.x != threads_of(depthwise.step, plan)) {
      return fail(cudaErrorInvalidValue);
    }
    launches().push_back({reinterpret_cast<std::uintptr_t>(stream), current_device,
                          -1 - norm_steps - static_cast<int>(depthwise.step), 0, 0, grid.x,
                          static_cast<unsigned>(shared_bytes)});
    return submit(stream, [=] { run_depthwise(depthwise); });
  }

  if (run_resampling) {
    if (shared_bytes > plain_shared_bytes || grid.x == 0 || block.x != resample_threads) {
      return fail(cudaErrorInvalidValue);
    }
    const ResampleWork work{*static_cast<const ResampleArguments*>(arguments[0]), current_device, grid.x,
                            static_cast<unsigned>(shared_bytes)};
    launches().push_back(
        {reinterpret_cast<std::uintptr_t>(stream), current_device, step, 0, 0, grid.x, work.shared_bytes});
    return submit(stream, [=] { run_resampling(work); });
  }

  if (is_rms) {
    rms.arguments = *static_cast<const RmsArguments*>(arguments[0]);
    rms.device = current_device;
    const RmsPlan& plan = rms.arguments.plan;
    if (shared_bytes > plain_shared_bytes || plan.lanes != rms.lanes || block.x != rms_threads ||
        shared_bytes != plan.shared_bytes(rms.is_backward, rms.type == NormType::float64 ? 8 : 4) ||
        grid.x != plan.blocks(rms.is_backward)) {
      return fail(cudaErrorInvalidValue);
    }
    launches().push_back({reinterpret_cast<std::uintptr_t>(stream), current_device, rms.is_backward ? -103 : -102, 0, 0,
                          grid.x, static_cast<unsigned>(shared_bytes)});
    return submit(stream, [=] { run_rms(rms); });
  }

  const auto agreed = runtime().shared_bytes.find({current_device, function});
  const std::size_t most = agreed != runtime().shared_bytes.end() ? agreed->second : plain_shared_bytes;
  const auto& list = *static_cast<const FilterList<1>*>(arguments[0]);  // of any capacity: they begin alike
  const bool fits_driver = kernel.capacity <= capacity_of(4 << 10) || emulation.driver_version >= 12010;
  if (shared_bytes > most || grid.x == 0 || block.x != threads_of_a_block || list.size > kernel.capacity ||
      !fits_driver) {
    return fail(cudaErrorInvalidValue);
  }
  Work work{kernel, current_device, {}, nullptr, 0, grid.x, static_cast<unsigned>(shared_bytes)};
  work.filters.assign(list.filters, list.filters + list.size);
  if (kernel.is_long) {
    work.scratch = *static_cast<char**>(arguments[1]);
    work.scratch_bytes = *static_cast<std::uint64_t*>(arguments[2]);
  }
  launches().push_back({reinterpret_cast<std::uintptr_t>(stream), current_device, static_cast<int>(kernel.elements),
                        kernel.is_long, list.size, grid.x, work.shared_bytes});
  return submit(stream, [work = std::move(work)] { run_of[static_cast<int>(work.kernel.elements)](work); });
}

// The compiler's own call of a kernel, by what __cudaGetKernel gave for the function; ours are launched by function.
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                                   std::size_t shared_bytes, cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments, shared_bytes, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes,
                          config->stream);
}
