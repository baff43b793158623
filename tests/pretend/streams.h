// What torch asks of a device: streams, events, and generators of random numbers.

#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "memory.h"

namespace {

struct Event {
  DeviceIndex device;
  StreamId stream;
  uint64_t number;
  Clock clock;
  std::chrono::steady_clock::time_point time;
  int num_queries = 0;
};

struct Streams final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kPretend; }
  Device exchangeDevice(Device device) const override {
    const auto old = current_device;
    setDevice(device);
    return Device(kPretend, old);
  }
  Device getDevice() const override { return Device(kPretend, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no ", device);
    // As CUDA makes a context.
    if (device.index() >= 0 && device.index() != current_device) opened_devices |= uint64_t{1} << device.index();
    uncheckedSetDevice(device);
  }
  // CUDA's functions for events make the device current, and then the one before.
  void visit(DeviceIndex device) const {
    const auto before = getDevice();
    setDevice(Device(kPretend, device));
    setDevice(before);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  static Device whole(Device device) { return device.has_index() ? device : Device(kPretend, current_device); }
  static Stream made(Device device, StreamId id) { return Stream(Stream::UNSAFE, whole(device), id); }
  Stream getStream(Device device) const override { return made(device, current_streams[whole(device).index()]); }
  Stream getDefaultStream(Device device) const override { return made(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device); }
  Stream getNewStream(Device device, int = 0) const override {
    Guard guard(state().lock);
    return made(device, ++state().last_stream);
  }
  Stream exchangeStream(Stream stream) const override {
    return made(stream.device(), std::exchange(current_streams[stream.device_index()], stream.id()));
  }
  void* getStreamNativeHandle(const Stream stream) const override { return (void*)stream.id(); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event) visit(((Event*)event)->device);
    delete (Event*)event;
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    delete (Event*)*event;
    visit(stream.device_index());
    const auto number = issued(stream.device_index(), stream.id());
    const Key key{stream.device_index(), stream.id()};
    *event = new Event{key.first, key.second, number, clock_of(key), std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    visit(stream.device_index());
    const auto first = *(Event*)event;
    stream_waits({stream.device_index(), stream.id()}, first.clock);
    issue(stream.device_index(), stream.id(), [first] { force(first.device, first.stream, first.number); });
  }
  // Asking helps nothing: the work is done as late as is allowed. But whoever polls comes to an end.
  bool queryEvent(void* event) const override {
    if (!event) return true;
    if (is_capturing()) host_waits("an event is asked for");
    auto& e = *(Event*)event;
    const bool was_done = is_done(e.device, e.stream, e.number);
    if (was_done) host_has_waited(e.clock);
    if (++e.num_queries > 3) force(e.device, e.stream, e.number);
    return was_done;
  }
  bool queryStream(const Stream& stream) const override {
    if (is_capturing()) host_waits("a stream is asked for");
    const bool was_done = is_done(stream.device_index(), stream.id(), issued(stream.device_index(), stream.id()));
    force_stream(stream.device_index(), stream.id());
    return was_done;
  }
  static bool is_done(DeviceIndex device, StreamId stream, uint64_t number) {
    Guard guard(state().lock);
    return state().queues[{device, stream}].done >= number;
  }
  void synchronizeStream(const Stream& stream) const override {
    host_waits("a stream is synchronized");
    host_has_waited(clock_of({stream.device_index(), stream.id()}));
    force_stream(stream.device_index(), stream.id());
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    host_waits("an event is synchronized");
    const auto& e = *(Event*)event;
    host_has_waited(e.clock);
    force(e.device, e.stream, e.number);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    host_waits("the device is synchronized");
    host_has_waited_for_all();
    force_device(device < 0 ? current_device : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    device_memory.recordStream(pointer, stream);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first && second, "both events must have been recorded");
    return std::chrono::duration<double, std::milli>(((Event*)second)->time - ((Event*)first)->time).count();
  }
};

// The CPU's generator under another device's name: the same seed gives the same numbers.
struct Randomness final : c10::GeneratorImpl {
  at::Generator cpu;
  Randomness(DeviceIndex device, at::Generator source)
      : GeneratorImpl(Device(kPretend, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(source) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& to) override { cpu.unsafeGetGeneratorImpl()->set_state(to); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Randomness* clone_impl() const override { return new Randomness(device().index(), cpu.clone()); }
};

at::Generator new_generator(DeviceIndex device) {
  return at::make_generator<Randomness>(device < 0 ? current_device : device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (DeviceIndex i = 0; i < kDevices; ++i) made->push_back(new_generator(i));
    return made;
  }();
  return (*all)[device < 0 ? current_device : device];
}

// An operator without an argument for it, such as dropout, draws from the CPU's own generator: for a while that is the
// device's. keeps: nothing is drawn.
struct Drawing {
  const bool draws, keeps;
  at::Generator own, other;
  at::Tensor before;
  Drawing(bool draws, bool keeps, DeviceIndex device);
  ~Drawing();
};

at::Generator cpu_generator(const at::Generator& generator) {
  return static_cast<Randomness*>(generator.unsafeGetGeneratorImpl())->cpu;
}

Drawing::Drawing(bool draws, bool keeps, DeviceIndex device) : draws(draws), keeps(keeps) {
  if (!draws) return;
  own = at::detail::getDefaultCPUGenerator(), other = cpu_generator(default_generator(device));
  before = own.get_state();
  own.set_state(other.get_state());
}

Drawing::~Drawing() {
  if (!draws) return;
  if (!keeps) other.set_state(own.get_state());
  own.set_state(before);
}

}  // namespace
