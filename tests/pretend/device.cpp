// A device that is not there, which finds what a GPU would.
//
// Nobody may touch the addresses of its memory but a kernel of the device; those that were freed are never used
// again, unless `pretend_reuse` says so. A kernel is the CPU's own, run on aliases of the memory. Kernels run when they are called, after all that
// their stream was given before. Copies that do not block are made as late as is allowed: when their stream, or one
// that waits for it, has a kernel to run, or when the host waits. All that makes the host wait calls a hook.

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "operators.h"

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { Streams().setDevice(Device(kPretend, device)); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Streams().exchangeDevice(Device(kPretend, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device : std::exchange(current_device, device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return new_generator(device); }
  bool isPinnedPtr(const void* address) const override { return PinnedMemory::has(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void* address) const override {
    Guard guard(state().lock);
    auto* base = find_block(address);
    TORCH_CHECK(base, "this is no memory of the pretend device");
    return Device(kPretend, state().blocks.at(base).device);
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t nbytes) const override { resize_storage(storage, nbytes); }
};

const bool registered = [] {
  c10::SetAllocator(kPretend, &device_memory);
  at::setHostAllocator(kPretend, &pinned_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Streams)

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
}

// Where torch would make one of others for a device that has none: the bits are to be those of the CPU.
void take_kernels_of_cpu() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  using c10::DispatchKey;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (name.name.rfind("aten::", 0) || !op->hasKernelForDispatchKey(DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(DispatchKey::PrivateUse1))
      continue;
    for (auto key : {DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeExplicitAutogradNonFunctional,
                     DispatchKey::CompositeImplicitAutograd})
      if (op->hasKernelForDispatchKey(key)) {
        library->impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
        break;
      }
  }
}

TORCH_LIBRARY(pretend, m) {
  m.def("take_kernels_of_cpu() -> ()", take_kernels_of_cpu);
  m.def("open(Tensor self) -> Tensor");
  m.def("unowned(Tensor self) -> Tensor");
  m.def("new_pool() -> int", [] { return ++last_pool; });
  m.def("is_capturing() -> bool", is_capturing);
  m.def("capture_begin(int pool) -> int", capture_begin);
  m.def("capture_end() -> ()", capture_end);
  m.def("capture_drop(int graph) -> ()", [](int64_t number) { graphs().erase(number); });
  m.def("replay(int graph) -> ()", replay);
  m.def("record_call(int token) -> ()", record_call);
  m.def("default_generator(int device) -> Generator?",
        [](int64_t device) { return default_generator((DeviceIndex)device); });
}
TORCH_LIBRARY_IMPL(pretend, PrivateUse1, m) { 
  m.impl("open", open_for_host);
  m.impl("unowned", unowned_tensor);
}

}  // namespace

extern "C" {

void pretend_on_wait(int (*hook)(const char*)) { wait_hook = hook; }

// The devices that threads have made current since the last call, a bit for each.
uint64_t pretend_opened() { return opened_devices.exchange(0); }

// Whether memory that is taken from now on may have the addresses of what was freed.
void pretend_reuse(int reuses) {
  Guard guard(state().lock);
  state().reuses = reuses;
}

// What a recorded call of Python is made by.
void pretend_on_call(void (*hook)(int64_t)) { call_hook = hook; }

// Runs what the current stream was given. No wait of the host: it learns nothing by it.
void pretend_settle() { force_current(current_device); }

// Has `run(token)` called as a task of the stream.
void pretend_issue(int device, int64_t stream, void (*run)(int64_t), int64_t token) {
  issue(device, stream, [run, token] { run(token); });
}
}
