// The device itself: how many there are, which one a thread uses, its streams, memory and random
// numbers.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "checker.h"

namespace sim {

constexpr c10::DeviceType SIM = c10::DeviceType::PrivateUse1;
constexpr int MAX_DEVICES = 16;

int device_count();
void set_device_count(int64_t count);  // before the first use
void check_index(int64_t index);

c10::DeviceIndex current_device();
c10::DeviceIndex index_or_current(c10::Device);
StreamKey key_of(const c10::Stream&);
StreamKey current_stream(int device);  // of this thread

// Mutation of a whole program: from now on calls of this kind ("waits", "record_stream",
// "synchronize") do nothing.
void leave_out(std::string kind, bool on);

c10::DeviceAllocator& device_allocator();
// Memory that a CPU kernel allocated for a result becomes memory of the device, counted like any
// other.
void account(const void* base, size_t bytes, int device);
void discount(const void* base, size_t bytes, int device);

at::Generator default_generator(c10::DeviceIndex);
// The CPU generator that draws this device's numbers.
at::Generator cpu_generator(const at::Generator&);

}  // namespace sim
