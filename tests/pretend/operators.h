// The operators: those that make memory and copy it, and all others as the CPU's, run on aliases of the memory.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <memory>
#include <set>
#include <unordered_map>

#include "graphs.h"

namespace {

using torch::jit::Stack;

// The storage of the device as memory of the CPU, which keeps it.
Storage opened(const Storage& storage, const char* who, bool is_used = true) {
  auto* base = (char*)storage.data_ptr().get();
  if (is_used) check_block(base, who);
  c10::DataPtr data(
      bytes_at(base), new Storage(storage), [](void* kept) { delete (Storage*)kept; }, Device(c10::kCPU));
  return Storage(Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
}

Tensor alias(const Tensor& tensor, const char* who) {
  return on_storage(opened(tensor.storage(), who), tensor, c10::DispatchKey::CPU);
}

void resize_storage(const Storage& storage, size_t nbytes) {
  c10::DeviceGuard device(storage.device());
  TORCH_CHECK(!is_capturing() || !std::min(nbytes, storage.nbytes()), "a graph is captured: expected a storage that is "
              "resized to or from nothing, found one whose bytes would have to move");
  force_current(storage.device().index());
  auto memory = device_memory.allocate(nbytes);
  if (const auto common = std::min(nbytes, storage.nbytes()); common && memory.get()) {
    std::memcpy(bytes_at(memory.get()), bytes_at(storage.data_ptr().get()), common);
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(nbytes);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  at::native::resize_impl_cpu_(impl, size, std::nullopt, /*resize_storage=*/false);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const auto wanted = self.numel() ? at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(),
                                                                      self.storage_offset())
                                   : 0;
  if (wanted > self.storage().nbytes()) resize_storage(self.storage(), wanted);
  return self;
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(Streams::whole(*device));
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(Streams::whole(*device));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& self, Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  std::vector<int64_t> strides(stride.begin(), stride.end());
  if (strides.size() != size.size()) {  // contiguous
    strides.assign(size.size(), 1);
    for (int64_t i = (int64_t)size.size() - 2; i >= 0; --i)
      strides[i] = strides[i + 1] * std::max<int64_t>(size[i + 1], 1);
  }
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, strides);
  const auto wanted = self.numel() ? at::detail::computeStorageNbytes(size, strides, self.itemsize(), offset) : 0;
  if (wanted > source.nbytes()) resize_storage(source, wanted);
  return self;
}

Tensor& set_whole_storage(Tensor& self, Storage source) {
  return set_storage(self, source, 0, {(int64_t)(source.nbytes() / self.itemsize())}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  return set_storage(self, Storage(Storage::use_byte_size_t(), 0, device_memory.allocate(0), &device_memory, true), 0,
                     {0}, {});
}

// The work that the current stream was given last uses the tensor.
void use(const Tensor& tensor, bool writes, const std::string& who) {
  if (!tensor.is_privateuseone() || !tensor.numel()) return;
  const auto device = tensor.device().index();
  auto* low = (const char*)tensor.unsafeGetTensorImpl()->data();
  const auto nbytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  auto* base = (const char*)tensor.storage().data_ptr().get();
  if (is_capturing()) graph().touched.push_back({base, low, low + nbytes, writes});
  use({device, current_streams[device]}, base, low, low + nbytes, writes, who);
}

// Both contiguous, of one dtype and shape. keep: what of the host must live until then.
void copy_bytes(const Tensor& dst, const Tensor& src, DeviceIndex device, Storage keep, bool later) {
  auto data_of = [](const Tensor& t) {
    auto* data = t.unsafeGetTensorImpl()->data();
    return t.is_cpu() ? (char*)data : bytes_at(data);
  };
  auto *to = data_of(dst), *from = data_of(src);
  auto base_of = [](const Tensor& t) { return t.is_cpu() ? nullptr : (char*)t.storage().data_ptr().get(); };
  auto *writes = base_of(dst), *reads = base_of(src);
  const auto stream = current_streams[device];
  begin_work({device, stream});
  use(src, false, "a copy"), use(dst, true, "a copy");
  auto run = [=, nbytes = dst.nbytes()] {
    const auto who = c10::str("a copy on stream ", stream);
    check_block(writes, who.c_str()), check_block(reads, who.c_str());
    std::memmove(to, from, nbytes);
    (void)keep;
  };
  if (is_capturing()) return record("a copy", device, [=, nbytes = dst.nbytes()] { std::memmove(to, from, nbytes); });
  if (later) return issue(device, stream, run, reads, writes);
  force_stream(device, stream);
  run();
}

Tensor copy_from(const Tensor& source, const Tensor& dst, bool non_blocking) {
  auto src = source.sizes() == dst.sizes() ? source : source.expand(dst.sizes());
  if (!dst.numel()) return dst;
  const auto& on_device = src.is_cpu() ? dst : src;
  const auto device = on_device.device().index();
  c10::DeviceGuard guard(on_device.device());
  const bool plain = src.dtype() == dst.dtype() && src.is_contiguous() && dst.is_contiguous() &&
                     src.is_neg() == dst.is_neg() && src.is_conj() == dst.is_conj();
  if (!src.is_cpu() && !dst.is_cpu()) {
    if (src.device() != dst.device()) force_current(dst.device().index());
    if (plain && src.device() == dst.device()) {
      copy_bytes(dst, src, device, Storage(), /*later=*/current_streams[device] != 0);
      return dst;
    }
    force_current(device);
    begin_work({device, current_streams[device]});
    use(src, false, "a copy"), use(dst, true, "a copy");
    const bool captures = is_capturing();
    auto target = captures ? unowned_alias(dst) : alias(dst, "copy_");
    auto values = captures ? unowned_alias(src) : alias(src, "copy_");
    if (src.is_neg()) values._set_neg(true);
    if (dst.is_neg()) target._set_neg(true);
    if (src.is_conj()) values._set_conj(true);
    if (dst.is_conj()) target._set_conj(true);
    auto copy = [target, values] { const_cast<Tensor&>(target).copy_(values); };
    captures ? record("copy_", device, copy) : copy();
    return dst;
  }
  if (!plain) {  // through contiguous memory, as CUDA does it: dtypes are changed on the host
    if (src.is_cpu()) {
      auto values = src.resolve_conj().resolve_neg().to(dst.scalar_type()).contiguous();
      auto target = dst.is_contiguous() ? dst : at::empty_like(dst, at::MemoryFormat::Contiguous);
      copy_from(values, target, non_blocking);
      if (!target.is_same(dst)) copy_from(target, dst, non_blocking);
    } else {
      auto values = src.resolve_conj().resolve_neg().contiguous();
      auto target = dst.is_contiguous() && dst.dtype() == src.dtype()
                        ? dst
                        : at::empty(dst.sizes(), dst.options().dtype(src.dtype()));
      copy_from(values, target, non_blocking);
      if (!target.is_same(dst)) const_cast<Tensor&>(dst).copy_(target);
    }
    return dst;
  }
  const auto& of_host = src.is_cpu() ? src : dst;
  const bool later = non_blocking && PinnedMemory::has(of_host.data_ptr());
  if (is_capturing()) host_waits("bytes are copied between host and device, which the graph would repeat");
  if (!later)
    host_waits(src.is_cpu()
                   ? (non_blocking ? "a copy from memory that is not pinned" : "a copy from the host that blocks")
                   : "a copy to the host that blocks");
  copy_bytes(dst, src, device, of_host.storage(), later);
  if (!later) host_has_waited(clock_of({device, current_streams[device]}));
  return dst;
}

Tensor copy_from_and_resize(const Tensor& src, const Tensor& dst) {
  if (dst.sizes() != src.sizes()) dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}

at::Scalar local_scalar(const Tensor& self) {
  host_waits("a value is read by the host");
  const auto device = self.device().index();
  force_current(device);
  begin_work({device, current_streams[device]});
  use(self, false, "item");
  host_has_waited(clock_of({device, current_streams[device]}));
  return alias(self, "item").item();
}

void record_stream(Tensor& self, Stream stream) { device_memory.recordStream(self.storage().data_ptr(), stream); }

// Operators whose result, or its shape, the host must know.
bool is_data_dependent(const c10::OperatorHandle& op, const Stack& arguments) {
  static const std::set<std::string> names = {"aten::nonzero",
                                              "aten::masked_select",
                                              "aten::_unique",
                                              "aten::_unique2",
                                              "aten::unique_dim",
                                              "aten::unique_consecutive",
                                              "aten::unique_dim_consecutive",
                                              "aten::equal",
                                              "aten::bincount",
                                              "aten::repeat_interleave"};
  const auto& name = op.schema().name();
  if (name == "aten::repeat_interleave" && !arguments.back().isNone()) return false;  // output_size
  return names.count(name) > 0;
}

// One call of an operator of the CPU in the place of the device's.
struct Call {
  const c10::OperatorHandle& op;
  const std::string name;
  const bool indexes;   // takes tensors of the host as indices
  bool is_view = true;  // touches no memory
  std::optional<Device> device;
  std::unordered_map<c10::TensorImpl*, std::pair<Tensor, Tensor>> aliases;  // by original: alias
  std::unordered_map<c10::StorageImpl*, Storage> storages;                  // by original: alias
  std::set<c10::TensorImpl*> written;                                       // of the originals
  std::set<c10::StorageImpl*> written_storages;                             // of them
  const bool captures = is_capturing();                                     // runs on copies of what it writes
  std::unordered_map<c10::TensorImpl*, void*> begun;                        // by original: the bytes of its alias
  std::unordered_map<c10::TensorImpl*, Tensor> originals;                   // by alias
  std::unordered_map<c10::StorageImpl*, Storage> original_storages;         // by alias

  explicit Call(const c10::OperatorHandle& op)
      : op(op),
        name(op.schema().name()),
        indexes(name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0 ||
                name.rfind("aten::_unsafe_index", 0) == 0) {
    for (const auto& result : op.schema().returns())
      if (!result.alias_info() || result.alias_info()->isWrite()) is_view = false;
    if (op.schema().returns().empty()) is_view = false;
  }

  void see(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return;
    TORCH_CHECK(!device || *device == tensor.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                tensor.device(), "! (in ", name, ")");
    device = tensor.device();
  }

  Tensor aliased(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_privateuseone()) {
      if (tensor.is_cpu() && tensor.dim() && device && indexes)
        host_waits("indices are copied from the host");
      else
        TORCH_CHECK(!device || !tensor.dim() || !tensor.is_cpu(),
                    "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                    tensor.device(), "! (in ", name, ")");
      return tensor;
    }
    auto* impl = tensor.unsafeGetTensorImpl();
    if (auto found = aliases.find(impl); found != aliases.end()) return found->second.second;
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (!storages.count(storage)) {
      auto made = captures && written_storages.count(storage) ? copied(tensor.storage())
                                                              : opened(tensor.storage(), name.c_str(), !is_view);
      original_storages[made.unsafeGetStorageImpl()] = tensor.storage();
      storages[storage] = made;
    }
    auto made = like_on(storages[storage], tensor, c10::DispatchKey::CPU);
    aliases[impl] = {tensor, made};
    begun[impl] = made.storage().data_ptr().get();
    originals[made.unsafeGetTensorImpl()] = tensor;
    return made;
  }

  Tensor given_back(const Tensor& result) {
    if (!result.defined() || !result.is_cpu()) return result;
    if (auto found = originals.find(result.unsafeGetTensorImpl()); found != originals.end()) return found->second;
    if (result.has_storage())
      if (auto found = original_storages.find(result.storage().unsafeGetStorageImpl());
          found != original_storages.end())
        return on_storage(found->second, result, c10::DispatchKey::PrivateUse1);
    c10::DeviceGuard guard(*device);
    const auto dense = result.is_non_overlapping_and_dense() ? result : result.contiguous();
    auto made = empty_strided(dense.sizes(), dense.strides(), dense.scalar_type(), {}, *device, {});
    use(made, true, name);
    if (captures)
      poison(made);
    else if (dense.numel())
      alias(made, name.c_str()).copy_(dense);
    if (result.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  }

  // What an operator has resized, or put elsewhere, is so on the device.
  void take_over() {
    for (auto& [impl, both] : aliases) {
      auto& [tensor, other] = both;
      const bool moved = other.storage().data_ptr().get() != begun.at(impl);
      if (!moved && other.sizes() == tensor.sizes() && other.strides() == tensor.strides()) continue;
      if (is_view) continue;
      resize_(tensor, other.sizes(), std::nullopt);
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(other.sizes(), other.strides());
      if (captures)
        use(tensor, true, name), poison(tensor);
      else if (moved && other.numel())
        alias(tensor, name.c_str()).copy_(other);
    }
  }

  void run(Stack* stack) {
    const auto count = op.schema().arguments().size();
    auto arguments = torch::jit::last(stack, count);
    for (const auto& value : arguments) {
      if (value.isTensor())
        see(value.toTensor());
      else if (value.isTensorList())
        for (const Tensor& one : value.toTensorList()) see(one);
      else if (value.isOptionalTensorList()) {
        for (const std::optional<Tensor>& one : value.toOptionalTensorList())
          if (one) see(*one);
      }
    }
    for (const auto& value : arguments)
      if (value.isDevice() && value.toDevice().is_privateuseone() && !device) device = Streams::whole(value.toDevice());
    if (!device) device = Device(kPretend, current_device);
    bool is_wait = is_data_dependent(op, *stack);
    const auto begin = stack->size() - count;
    for (size_t i = 0; i < count; ++i) {
      const auto& value = (*stack)[begin + i];
      const auto& argument = op.schema().arguments()[i];
      const auto* info = argument.alias_info();
      const bool is_statistic = argument.name().rfind("running_", 0) == 0;  // batch norms change them, and do not say so
      if (!is_statistic && (!info || !info->isWrite())) continue;
      if (value.isTensor()) writes(value.toTensor());
      if (value.isTensorList())
        for (const Tensor& one : value.toTensorList()) writes(one);
    }
    Recorded recorded;
    if (captures && !is_view) recorded.given.assign(stack->begin() + begin, stack->end());
    for (size_t i = 0; i < count; ++i) {
      auto& value = (*stack)[begin + i];
      if (value.isTensor())
        value = aliased(value.toTensor());
      else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& one : value.toTensorList()) list.push_back(aliased(one));
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor>& one : value.toOptionalTensorList()) {
          if (one && one->defined() && indexes && (one->scalar_type() == at::kBool || one->scalar_type() == at::kByte))
            is_wait = true;
          list.push_back(one ? std::optional<Tensor>(aliased(*one)) : std::nullopt);
        }
        value = list;
      } else if (value.isGenerator())
        value = random_for(value.toGenerator());
      else if (value.isDevice())
        value = Device(c10::kCPU);
      else if (value.isNone() && op.schema().arguments()[i].type()->str() == "Generator?")
        value = random_for(default_generator(device->index()));
    }
    if (is_wait) host_waits(("the host must know what " + name + " finds").c_str());
    const Key stream{device->index(), current_streams[device->index()]};
    if (!is_view) {
      begin_work(stream);
      for (auto& [impl, both] : aliases) use(both.first, written.count(impl), name);
      force_current(device->index());
    }
    if (is_wait) host_has_waited(clock_of(stream));
    {
      Drawing drawing(draws_from_default(op), captures, device->index());
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    take_over();
    for (auto& value : torch::jit::last(*stack, op.schema().returns().size())) {
      auto& result = const_cast<c10::IValue&>(value);
      if (result.isTensor())
        result = given_back(result.toTensor());
      else if (result.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& one : result.toTensorList()) list.push_back(given_back(one));
        result = list;
      }
    }
    if (captures && !is_view) {
      recorded.take(op, *device, torch::jit::last(*stack, op.schema().returns().size()));
      record(name, device->index(), recorded.kernel());
    }
  }

  void writes(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return;
    written.insert(tensor.unsafeGetTensorImpl());
    written_storages.insert(tensor.storage().unsafeGetStorageImpl());
  }

  // What is captured draws no numbers now.
  at::Generator random_for(const at::Generator& generator) const {
    auto own = cpu_generator(generator);
    return captures ? own.clone() : own;
  }
};

void fallback(const c10::OperatorHandle& op, Stack* stack) { Call(op).run(stack); }

Tensor open_for_host(const Tensor& self) {
  if (is_capturing()) host_waits("the host opens memory");
  force_current(self.device().index());
  return alias(self, "open");
}

}  // namespace
