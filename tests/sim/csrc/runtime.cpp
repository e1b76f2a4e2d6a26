#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>

namespace sim {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

int configured_devices = 4;
thread_local DeviceIndex thread_device = 0;
thread_local std::array<c10::StreamId, MAX_DEVICES> thread_streams{};

struct LeftOut {
  std::atomic<bool> waits{false}, record_stream{false}, synchronize{false};
} left_out;

// ---- memory

constexpr size_t TOTAL_BYTES = size_t{16} << 30;
constexpr size_t ALIGNMENT = 64;
constexpr int POISON = 0xFF;  // NaN in every floating-point type: reading fresh memory shows

std::mutex statistics_mutex;
std::array<c10::CachingAllocator::Stat, MAX_DEVICES> statistics;

void* aligned(size_t bytes) {
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, ALIGNMENT, bytes ? bytes : 1) == 0,
              "sim: the host is out of memory");
  std::memset(memory, POISON, bytes);
  return memory;
}

struct Allocation {
  void* memory;
  size_t bytes;
  int device;
};

void release(void* context) {
  auto* allocation = static_cast<Allocation*>(context);
  discount(allocation->memory, allocation->bytes, allocation->device);
  std::free(allocation->memory);
  delete allocation;
}

struct SimAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const Device device(SIM, thread_device);
    if (bytes == 0) return {nullptr, device};
    auto* allocation = new Allocation{aligned(bytes), bytes, thread_device};
    account(allocation->memory, bytes, thread_device);
    return {allocation->memory, allocation, &release, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    if (!left_out.record_stream) checker().used_on(pointer.get(), key_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard lock(statistics_mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.reserved_bytes[0] = stats.active_bytes[0] = statistics[device];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    std::lock_guard lock(statistics_mutex);
    statistics[device].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard lock(statistics_mutex);
    statistics[device].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard lock(statistics_mutex);
    return {TOTAL_BYTES - statistics[device].current, TOTAL_BYTES};
  }
} allocator_instance;
REGISTER_ALLOCATOR(SIM, &allocator_instance);

void release_pinned(void* memory) {
  checker().freed(memory);
  std::free(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = aligned(bytes);
    checker().allocated(memory, bytes, HOST);
    return {memory, memory, &release_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} pinned_allocator;

// ---- devices, streams, events

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point time;
  bool asked = false;
};
Event* event_of(void* handle) { return static_cast<Event*>(handle); }

std::array<std::atomic<c10::StreamId>, MAX_DEVICES> streams_made{};

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = SIM;
  SimGuard() = default;
  explicit SimGuard(c10::DeviceType) {}

  c10::DeviceType type() const override { return SIM; }
  Device getDevice() const override { return Device(SIM, thread_device); }
  void setDevice(Device device) const override {
    check_index(device.index());
    thread_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { thread_device = device.index(); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(device_count());
  }

  Stream make(Device device, c10::StreamId id) const {
    return Stream(Stream::UNSAFE, Device(SIM, index_or_current(device)), id);
  }
  Stream getStream(Device device) const override {
    return make(device, thread_streams[index_or_current(device)]);
  }
  Stream getDefaultStream(Device device) const override { return make(device, 0); }
  Stream getNewStream(Device device, int) const override {
    return make(device, ++streams_made[index_or_current(device)]);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    thread_streams[stream.device_index()] = stream.id();
    return before;
  }

  void record(void** handle, const Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    if (!*handle) *handle = new Event;
    *event_of(*handle) = Event{checker().record(key_of(stream)), std::chrono::steady_clock::now()};
  }
  void destroyEvent(void* handle, const DeviceIndex) const noexcept override {
    delete event_of(handle);
  }
  void block(void* handle, const Stream& stream) const override {
    if (handle && !left_out.waits) checker().wait(key_of(stream), event_of(handle)->clock);
  }
  void synchronizeEvent(void* handle) const override {
    if (handle && !left_out.synchronize) checker().synchronize(event_of(handle)->clock);
  }
  void synchronizeStream(const Stream& stream) const override {
    if (!left_out.synchronize) checker().synchronize(key_of(stream));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    if (!left_out.synchronize) checker().synchronize_device(device);
  }

  // Work that nobody has waited for is answered "not yet" once and "done" the next time, so that
  // both branches of a caller that polls are run and every polling loop ends. "Done" tells the
  // host, as it does on a real device.
  bool queryEvent(void* handle) const override {
    if (!handle || checker().complete(event_of(handle)->clock)) return true;
    if (!event_of(handle)->asked) {
      event_of(handle)->asked = true;
      return false;
    }
    checker().synchronize(event_of(handle)->clock);
    return true;
  }
  bool queryStream(const Stream& stream) const override {
    static thread_local std::map<StreamKey, Clock> asked;
    const StreamKey key = key_of(stream);
    const Clock clock = checker().clock_of(key);
    if (checker().complete(clock)) return true;
    if (asked[key] != clock) {
      asked[key] = clock;
      return false;
    }
    checker().synchronize(clock);
    return true;
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    allocator_instance.recordStream(pointer, stream);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(event_of(end)->time - event_of(start)->time)
        .count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

// ---- random numbers: each device has its own generator, drawing as the CPU's would

struct SimGenerator final : c10::GeneratorImpl {
  at::Generator cpu;
  SimGenerator(DeviceIndex device, at::Generator draws)
      : GeneratorImpl(Device(SIM, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(draws)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  SimGenerator* clone_impl() const override {
    return new SimGenerator(device().index(), cpu.clone());
  }
};

at::Generator new_generator(DeviceIndex device) {
  return at::make_generator<SimGenerator>(device, at::detail::createCPUGenerator());
}

at::Generator& default_generator_slot(DeviceIndex device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>;
    for (int i = 0; i < MAX_DEVICES; ++i)
      all->push_back(new_generator(static_cast<DeviceIndex>(i)));
    return all;
  }();
  return generators->at(device < 0 ? thread_device : device);
}

// ---- what torch asks of an accelerator

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  DeviceIndex getCurrentDevice() const override { return thread_device; }
  void setCurrentDevice(DeviceIndex device) const override {
    check_index(device);
    thread_device = device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = thread_device;
    if (device >= 0) setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator_slot(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return new_generator(device < 0 ? thread_device : device);
  }
  bool isPinnedPtr(const void* address) const override { return checker().is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void* address) const override {
    const int device = checker().device_of(address);
    TORCH_CHECK(device >= 0, "sim: not an address of device memory");
    return Device(SIM, static_cast<DeviceIndex>(device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto grown = allocator_instance.allocate(bytes);
    if (storage.nbytes() && bytes)
      std::memcpy(grown.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
} hooks;
const bool hooks_registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

}  // namespace

// ---- the face towards the other files

int device_count() { return configured_devices; }

void set_device_count(int64_t count) {
  TORCH_CHECK(count >= 1 && count <= MAX_DEVICES, "sim: between 1 and ", MAX_DEVICES,
              " devices, not ", count);
  configured_devices = static_cast<int>(count);
}

void check_index(int64_t index) {
  const bool valid = index >= 0 && index < device_count();
  TORCH_CHECK(valid, "sim: invalid device ordinal ", index, ", there are ", device_count());
}

void leave_out(std::string kind, bool on) {
  if (kind == "waits")
    left_out.waits = on;
  else if (kind == "record_stream")
    left_out.record_stream = on;
  else if (kind == "synchronize")
    left_out.synchronize = on;
  else
    TORCH_CHECK(false, "sim: cannot leave out ", kind);
}

DeviceIndex current_device() { return thread_device; }
DeviceIndex index_or_current(Device device) {
  return device.index() < 0 ? thread_device : device.index();
}
StreamKey key_of(const Stream& stream) { return {stream.device_index(), stream.id()}; }
StreamKey current_stream(int device) { return {device, thread_streams[device]}; }
c10::DeviceAllocator& device_allocator() { return allocator_instance; }

void account(const void* base, size_t bytes, int device) {
  checker().allocated(base, bytes, current_stream(device));
  std::lock_guard lock(statistics_mutex);
  statistics[device].increase(bytes);
}

void discount(const void* base, size_t bytes, int device) {
  checker().freed(base);
  std::lock_guard lock(statistics_mutex);
  statistics[device].decrease(bytes);
}

at::Generator default_generator(DeviceIndex device) { return default_generator_slot(device); }
at::Generator cpu_generator(const at::Generator& generator) {
  return static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

}  // namespace sim
