// Shapes of the results of operators: by torch's meta kernels, remembered by signature.
#pragma once
#include "views.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <mutex>
#include <unordered_map>

namespace {

using torch::jit::Stack;

constexpr size_t MOST_SIGNATURES = 50000;

struct Result {
    bool defined;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
};
using Results = std::optional<std::vector<Result>>;  // none: they depend on values

class Signature {
  public:
    explicit Signature(const c10::OperatorHandle &op) { put(&op.schema()); }

    void add(const IValue &value) {
        put((char)value.isTensor());
        if (value.isNone()) put('n');
        else if (value.isInt()) put('i'), put(value.toInt());
        else if (value.isDouble()) put('d'), put(value.toDouble());
        else if (value.isBool()) put('b'), put(value.toBool());
        else if (value.isComplexDouble()) put('c'), put(value.toComplexDouble());
        else if (value.isString()) put('s'), key_ += value.toStringRef(), put('\0');
        else if (value.isDevice() || value.isGenerator()) put('x');
        else if (value.isTensor()) add_tensor(value.toTensor());
        else if (value.isList()) add_list(value.toListRef());
        else known_ = false;
    }

    bool known() const { return known_; }
    const std::string &key() const { return key_; }

  private:
    template <class T>
    void put(const T &value) {
        key_.append((const char *)&value, sizeof value);
    }

    void add_tensor(const Tensor &tensor) {
        put(tensor.defined());
        if (!tensor.defined()) return;
        put(tensor.scalar_type());
        put(tensor.device().type());
        put(tensor.unsafeGetTensorImpl()->is_wrapped_number());
        put(tensor.dim());
        for (int64_t size : tensor.sizes()) put(size);
        for (int64_t stride : tensor.strides()) put(stride);
    }

    void add_list(c10::ArrayRef<IValue> list) {
        put('l');
        put(list.size());
        for (const IValue &value : list) add(value);
    }

    std::string key_;
    bool known_ = true;
};

Tensor on_meta(const Tensor &tensor) {
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;  // a Python number, which has no device
    auto options = tensor.options().device(at::kMeta).requires_grad(false).pinned_memory(false);
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

void call_below_autograd(const c10::OperatorHandle &op, Stack &stack) {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op.callBoxed(&stack);
}

IValue argument_for(const c10::Argument &argument, const IValue &value, at::Device device) {
    if (value.isDevice() && value.toDevice().is_cuda()) return device;
    return argument.name() == "pin_memory" ? IValue() : value;
}

Results infer(const c10::OperatorHandle &op, c10::ArrayRef<IValue> arguments) {
    Stack stack;
    for (size_t i = 0; i < arguments.size(); i++) {
        IValue meta = arguments[i].isGenerator() ? IValue() : each_tensor(arguments[i], on_meta);
        stack.push_back(argument_for(op.schema().arguments()[i], meta, at::kMeta));
    }
    try {
        call_below_autograd(op, stack);
    } catch (const std::exception &) {
        return std::nullopt;  // or the call is wrong: the CPU kernel says so
    }
    std::vector<Result> results;
    for (const IValue &value : stack) {
        const Tensor &meta = value.toTensor();
        if (!meta.defined()) results.push_back({});
        else results.push_back({true, meta.sizes().vec(), meta.strides().vec(), meta.scalar_type()});
    }
    return results;
}

Results results_of(const c10::OperatorHandle &op, c10::ArrayRef<IValue> arguments) {
    static std::mutex mutex;
    static std::unordered_map<std::string, Results> remembered;
    for (const c10::Argument &result : op.schema().returns())
        if (result.type()->kind() != c10::TypeKind::TensorType) return std::nullopt;
    Signature signature(op);
    for (const IValue &argument : arguments) signature.add(argument);
    if (!signature.known()) return infer(op, arguments);
    {
        std::lock_guard<std::mutex> lock(mutex);
        auto found = remembered.find(signature.key());
        if (found != remembered.end()) return found->second;
        if (remembered.size() > MOST_SIGNATURES) remembered.clear();
    }
    Results results = infer(op, arguments);
    std::lock_guard<std::mutex> lock(mutex);
    return remembered[signature.key()] = results;
}

}  // namespace
