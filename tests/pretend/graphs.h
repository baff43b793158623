// Graphs: what streams were given while a graph was captured, to be run again on the same addresses.
//
// Capture runs nothing that anybody could see. Each kernel runs once on copies, for the shapes of its results; results
// are NaN, or 0, until the graph is replayed. A graph keeps no tensor: its memory is a pool of its own, and what it uses
// of other memory must be there when it is replayed.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <memory>
#include <unordered_map>

#include "streams.h"

namespace {

using torch::jit::Stack;

struct Touched {
  const char *base, *low, *high;
  bool writes;
};

struct Node {
  std::string who;
  std::function<void()> run;
  std::vector<Touched> touched;
};

struct Graph {
  Key stream;  // that is captured
  std::vector<Node> nodes;
  std::vector<Touched> touched;  // by the node that comes next
  Clock given;                   // the last work of each stream
};

std::map<int64_t, Graph>& graphs() {
  static auto* all = new std::map<int64_t, Graph>;
  return *all;
}

int64_t last_graph = 0;  // the one that is captured, if any is
int64_t last_pool = 0;

Graph& graph() { return graphs().at(last_graph); }

void record(const std::string& who, DeviceIndex device, std::function<void()> run) {
  auto& g = graph();
  const Key stream{device, current_streams[device]};
  g.given[stream] = clock_of(stream)[stream];
  g.nodes.push_back({who, std::move(run), std::move(g.touched)});
  g.touched.clear();
}

int64_t capture_begin(int64_t pool) {
  TORCH_CHECK(!is_capturing(), "a graph of the pretend device is captured already");
  for (DeviceIndex device = 0; device < kDevices; ++device) force_device(device);
  graphs()[++last_graph].stream = {current_device, current_streams[current_device]};
  capturing_pool = pool;
  return last_graph;
}

void capture_end() {
  TORCH_CHECK(is_capturing(), "no graph of the pretend device is captured");
  capturing_pool = 0;
  auto& g = graph();
  auto joined = clock_of(g.stream);
  for (const auto& [stream, number] : g.given)
    TORCH_CHECK(joined[stream] >= number, "the captured stream ", g.stream.second, " has not waited for stream ",
                stream.second, ", which was given work of the graph");
}

struct Replaying {
  Replaying() { ++num_replays; }
  ~Replaying() { --num_replays; }
};

void replay(int64_t number) {
  Replaying replaying;
  const Key stream{current_device, current_streams[current_device]};
  c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  at::AutoDispatchBelowADInplaceOrView guard;
  for (auto& node : graphs().at(number).nodes) {
    force_current(current_device);
    begin_work(stream);
    for (const auto& one : node.touched) {
      bool is_kept;
      {
        Guard held(state().lock);
        is_kept = is_there(one.base);
      }
      TORCH_CHECK(is_kept, node.who, " of a graph uses memory that was freed since it was captured");
      use(stream, one.base, one.low, one.high, one.writes, node.who);
    }
    node.run();
  }
}

void (*call_hook)(int64_t) = nullptr;

// Has a function of Python called at each replay.
void record_call(int64_t token) {
  record("a call", current_device, [token] { call_hook(token); });
}

// The storage's memory as that of the CPU, or of the device; it is not kept.
Storage unowned(const Storage& storage, bool is_of_cpu) {
  auto* base = (char*)storage.data_ptr().get();
  const auto device = is_of_cpu ? Device(c10::kCPU) : storage.device();
  c10::DataPtr data(is_of_cpu ? bytes_at(base) : base, nullptr, [](void*) {}, device);
  return Storage(Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
}

Storage copied(const Storage& storage) {
  auto made = Storage(Storage::use_byte_size_t(), storage.nbytes(), c10::GetCPUAllocator(), true);
  if (storage.nbytes()) std::memcpy(made.mutable_data(), bytes_at(storage.data_ptr().get()), storage.nbytes());
  return made;
}

Tensor on_storage(Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

// As `like`, also where it is a number that torch has wrapped.
Tensor like_on(Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto made = on_storage(std::move(storage), like, key);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

Tensor unowned_alias(const Tensor& tensor) {
  return like_on(unowned(tensor.storage(), true), tensor, c10::DispatchKey::CPU);
}

Tensor unowned_tensor(const Tensor& tensor) {
  return like_on(unowned(tensor.storage(), false), tensor, c10::DispatchKey::PrivateUse1);
}

bool draws_from_default(const c10::OperatorHandle& op) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  for (const auto& argument : op.schema().arguments())
    if (argument.type()->str() == "Generator?") return false;
  return true;
}

void poison(const Tensor& made) {
  auto values = unowned_alias(made);
  made.is_floating_point() ? values.fill_(NAN) : values.zero_();
}

// The arguments of a kernel as they are at each replay, and where its results go.
struct Recorded {
  struct State {
    std::optional<c10::OperatorHandle> op;
    DeviceIndex device = 0;
    std::vector<c10::IValue> arguments;
    size_t num_results = 0;
    std::vector<std::tuple<size_t, int64_t, Tensor>> results;  // (number, number in a list or -1, where to)
  };
  std::shared_ptr<State> state = std::make_shared<State>();
  std::vector<c10::IValue> given;  // the arguments on the device; a kernel may resize those that it writes

  void take(const c10::OperatorHandle& op, Device device, c10::ArrayRef<c10::IValue> results) {
    state->op = op, state->device = device.index();
    const auto& arguments = op.schema().arguments();
    std::unordered_map<c10::TensorImpl*, Tensor> found;
    auto own = [&](const Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      if (!tensor.is_privateuseone()) return tensor.is_cpu() ? tensor.clone() : tensor;
      auto& kept = found[tensor.unsafeGetTensorImpl()];
      if (!kept.defined()) kept = unowned_alias(tensor);
      return kept;
    };
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto value = given[i];
      if (value.isTensor())
        value = own(value.toTensor());
      else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& one : value.toTensorList()) list.push_back(own(one));
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor>& one : value.toOptionalTensorList())
          list.push_back(one ? std::optional<Tensor>(own(*one)) : std::nullopt);
        value = list;
      } else if (value.isGenerator())
        value = cpu_generator(value.toGenerator());
      else if (value.isDevice())
        value = Device(c10::kCPU);
      else if (value.isNone() && arguments[i].type()->str() == "Generator?")
        value = cpu_generator(default_generator(device.index()));
      state->arguments.push_back(value);
    }
    given.clear();
    find_new(results);
  }

  template <class Act>
  static void each(c10::ArrayRef<c10::IValue> values, const Act& act) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i].isTensor()) act(i, -1, values[i].toTensor());
      if (values[i].isTensorList())
        for (size_t j = 0; j < values[i].toTensorList().size(); ++j) act(i, j, (Tensor)values[i].toTensorList().get(j));
    }
  }

  // Results in new memory of the device, to which they are copied at each replay.
  void find_new(c10::ArrayRef<c10::IValue> results) {
    state->num_results = results.size();
    std::set<const void*> arguments;
    each(state->arguments, [&](size_t, int64_t, const Tensor& one) {
      if (one.defined()) arguments.insert(one.storage().data_ptr().get());
    });
    each(results, [&](size_t i, int64_t j, const Tensor& one) {
      if (!one.defined() || !one.is_privateuseone() || !one.numel()) return;
      if (arguments.count(bytes_at(one.storage().data_ptr().get()))) return;
      state->results.push_back({i, j, unowned_alias(one)});
    });
  }

  std::function<void()> kernel() const {
    return [state = state] {
      Stack stack;
      for (const auto& value : state->arguments) {
        auto fresh = [](const Tensor& one) {
          return one.defined() ? like_on(one.storage(), one, c10::DispatchKey::CPU) : one;
        };
        if (value.isTensor())
          stack.push_back(fresh(value.toTensor()));
        else if (value.isTensorList()) {
          c10::List<Tensor> list;
          for (const Tensor& one : value.toTensorList()) list.push_back(fresh(one));
          stack.push_back(list);
        } else
          stack.push_back(value);
      }
      {
        Drawing drawing(draws_from_default(*state->op), false, state->device);
        state->op->redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      }
      each(torch::jit::last(stack, state->num_results), [&](size_t i, int64_t j, const Tensor& one) {
        for (const auto& [number, place, to] : state->results)
          if (number == i && place == j) const_cast<Tensor&>(to).copy_(one);
      });
    };
  }
};

}  // namespace
