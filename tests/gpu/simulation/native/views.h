// Tensors of the device as its simulated kernels see them, and the memory that they touch.
#pragma once
#include "simulator.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <algorithm>

namespace {

using at::Tensor;
using c10::IValue;

constexpr int MOST_PIECES = 64;  // of a strided view; beyond, its whole extent counts as touched

bool on_gpu(const Tensor &tensor) { return tensor.defined() && tensor.is_cuda(); }

Tensor copy_flags(const Tensor &to, const Tensor &from) {
    if (from.is_conj()) to._set_conj(true);
    if (from.is_neg()) to._set_neg(true);
    if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
    return to;
}

// A CPU tensor over the same memory, in the window of the device; it keeps nothing alive, as a kernel does not.
Tensor seen_by(int device, const Tensor &tensor) {
    auto options = tensor.options().device(at::kCPU).requires_grad(false).pinned_memory(false);
    if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    char *address = (char *)tensor.data_ptr() + sim_window(device);
    return copy_flags(at::from_blob(address, tensor.sizes(), tensor.strides(), [](void *) {}, options), tensor);
}

// The memory of a view: its contiguous pieces where there are few, else its whole extent.
class Accesses {
  public:
    void add(const Tensor &tensor, bool write, int reach = SIM_KERNEL) {
        if (!tensor.numel()) return;
        sort_dimensions(tensor);
        uint64_t piece = tensor.element_size();
        size_t inner = 0;
        while (inner < dimensions_.size() && (uint64_t)dimensions_[inner].first == piece)
            piece *= dimensions_[inner++].second;
        dimensions_.erase(dimensions_.begin(), dimensions_.begin() + inner);
        int64_t pieces = 1, extent = piece;
        for (auto [stride, size] : dimensions_) {
            pieces *= size;
            extent += stride * (size - 1);
        }
        bool apart = dimensions_.empty() || (uint64_t)dimensions_[0].first >= piece;
        bool few = pieces <= MOST_PIECES && apart && reach == SIM_KERNEL;
        if (!few) piece = extent, dimensions_.clear();
        add_pieces((uint64_t)tensor.data_ptr(), piece, dimensions_.size(), write, reach);
    }

    const SimAccess *data() const { return all_.data(); }
    int size() const { return all_.size(); }

  private:
    void sort_dimensions(const Tensor &tensor) {  // (stride in bytes, size) of those along which addresses differ
        dimensions_.clear();
        for (int64_t d = 0; d < tensor.dim(); d++)
            if (tensor.size(d) > 1 && tensor.stride(d))
                dimensions_.push_back({tensor.stride(d) * tensor.element_size(), tensor.size(d)});
        std::sort(dimensions_.begin(), dimensions_.end());
    }

    void add_pieces(uint64_t address, uint64_t bytes, size_t depth, bool write, int reach) {
        if (!depth) {
            all_.push_back({address, bytes, write, reach, 0});
            return;
        }
        auto [stride, size] = dimensions_[depth - 1];
        for (int64_t i = 0; i < size; i++) add_pieces(address + i * stride, bytes, depth - 1, write, reach);
    }

    std::vector<std::pair<int64_t, int64_t>> dimensions_;
    std::vector<SimAccess> all_;
};

template <class Function>
IValue each_tensor(const IValue &value, Function function) {
    auto apply = [&](const Tensor &tensor) { return tensor.defined() ? function(tensor) : tensor; };
    if (value.isTensor()) return apply(value.toTensor());
    if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor &tensor : value.toTensorVector()) list.push_back(apply(tensor));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor> &tensor : value.toOptionalTensorVector())
            list.push_back(tensor ? std::optional<Tensor>(apply(*tensor)) : tensor);
        return list;
    }
    return value;
}

}  // namespace
