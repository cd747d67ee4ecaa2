// torch's CUDA operators, computed by its CPU kernels when the simulated stream gets to them.
//
// A call works out the shapes of its results (by torch's meta kernels, remembered by signature), allocates them with
// torch's own caching allocator, and queues a work item that names the memory it reads and writes. Operators whose
// results depend on values wait for the stream first, as they do on a GPU.
#include "results.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <set>

namespace {

// Views, allocation, and what works through the runtime alone: torch's own code.
const std::set<std::string> OWN = {
    "aten::_copy_from",
    "aten::_copy_from_and_resize",
    "aten::_cudnn_init_dropout_state",
    "aten::_efficientzerotensor",
    "aten::_has_compatible_shallow_copy_type",
    "aten::_local_scalar_dense",
    "aten::_pin_memory",
    "aten::_reshape_alias",
    "aten::alias",
    "aten::as_strided",
    "aten::empty",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::is_set_to",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::unfold",
    "aten::view",
    "aten::view_as_complex",
    "aten::view_as_real",
};

// Random numbers follow the seed and offset of the CUDA generator, in the order of the calls under any schedule.
at::Generator drawn_from(const IValue &given, int device) {
    at::Generator cuda = given.isGenerator() ? given.toGenerator() : at::cuda::detail::getDefaultCUDAGenerator(device);
    if (cuda.device().is_cpu()) return cuda;
    std::lock_guard<std::mutex> lock(cuda.mutex());
    uint64_t offset = cuda.get_offset();
    cuda.set_offset(offset + 4);
    return at::detail::createCPUGenerator(cuda.current_seed() * 0x9E3779B97F4A7C15 + offset);
}

bool is_written(const c10::Argument &argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// The position of the argument that a result is an alias of; -1: it is a new tensor.
int aliased(const c10::FunctionSchema &schema, const c10::Argument &result) {
    if (!result.alias_info()) return -1;
    for (size_t i = 0; i < schema.arguments().size(); i++) {
        const auto *alias = schema.arguments()[i].alias_info();
        if (alias && *alias == *result.alias_info()) return i;
    }
    return -1;
}

int device_of(c10::ArrayRef<IValue> arguments) {
    int device = -1;
    for (const IValue &argument : arguments) {
        each_tensor(argument, [&](const Tensor &tensor) {
            if (on_gpu(tensor) && device < 0) device = tensor.device().index();
            return tensor;
        });
        bool named = argument.isDevice() && argument.toDevice().is_cuda() && argument.toDevice().has_index();
        if (device < 0 && named) device = argument.toDevice().index();
    }
    return device < 0 ? c10::cuda::current_device() : device;
}

// By whichever thread: what was made in inference mode may be written outside of it.
void write(const Tensor &to, const Tensor &from) {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
}

// What the work item owns: the operator, its arguments on the CPU, and where new results go.
struct Kernel {
    std::string name;
    c10::OperatorHandle op;
    Stack stack;
    std::vector<Tensor> results;  // undefined where the result is an argument

    void compute() {
        Stack returned = stack;  // a graph computes it again
        call_below_autograd(op, returned);
        for (size_t i = 0; i < results.size(); i++) {
            if (!results[i].defined()) continue;
            const Tensor &computed = returned.at(i).toTensor();
            TORCH_CHECK(computed.sizes() == results[i].sizes(), "shapes of the meta kernel and the CPU kernel differ");
            write(results[i], computed);
        }
    }

    static void run(void *kernel) {
        try {
            ((Kernel *)kernel)->compute();
        } catch (const std::exception &error) {
            sim_report("KERNEL FAILED", (((Kernel *)kernel)->name + ": " + error.what()).c_str());
        }
    }
    static void drop(void *kernel) { delete (Kernel *)kernel; }
};

void must_launch(int error, const std::string &name) {
    TORCH_CHECK(!error, "CUDA error: ", cudaGetErrorString((cudaError_t)error), " (simulated ", name, ")");
}

class Call {
  public:
    Call(const c10::OperatorHandle &op, c10::ArrayRef<IValue> arguments)
        : op_(op),
          schema_(op.schema()),
          arguments_(arguments),
          device_(device_of(arguments)),
          name_(toString(op.operator_name())),
          guard_(device_),
          stream_(c10::cuda::getCurrentCUDAStream(device_)) {
        bool sparse = false;
        for (const char *word : {"index", "gather", "scatter", "embedding"})
            sparse |= name_.find(word) != std::string::npos;
        reach_ = sparse ? SIM_SPARSE : SIM_KERNEL;
        for (size_t i = 0; i < arguments.size(); i++) cpu_.push_back(on_cpu(i));
    }

    Stack operator()() {
        C10_CUDA_CHECK(cudaGetLastError());  // as after each launch: an error that nobody took shows here
        Results results = results_of(op_, arguments_);
        return results ? launch(*results) : compute_now();
    }

  private:
    IValue on_cpu(size_t i) {
        const c10::Argument &argument = schema_.arguments()[i];
        if (argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())))
            return drawn_from(arguments_[i], device_);
        bool written = is_written(argument);
        IValue value = each_tensor(arguments_[i], [&](const Tensor &tensor) { return tensor_on_cpu(tensor, written); });
        return argument_for(argument, value, at::kCPU);
    }

    Tensor tensor_on_cpu(const Tensor &tensor, bool written) {
        TORCH_CHECK(!tensor.is_cpu() || !tensor.dim() || takes_host_tensors(),
                    "Expected all tensors to be on the same device (simulated ", name_, ")");
        if (tensor.is_cpu()) return written ? tensor : copy_flags(tensor.detach().clone(), tensor);
        if (!on_gpu(tensor)) return tensor;
        TORCH_CHECK(tensor.device().index() == device_ || tensor.dim() == 0,
                    "Expected all tensors to be on the same device (simulated ", name_, ")");
        accesses_.add(tensor, written, reach_);
        return seen_by(device_, tensor);
    }

    // Indices may be in host memory, and so may what a copy is from.
    bool takes_host_tensors() const {
        return name_.find("aten::index") == 0 || name_.find("copy") != std::string::npos;
    }

    Tensor new_result(const Result &result) {
        auto options = at::TensorOptions(result.dtype).device(at::Device(at::kCUDA, device_));
        Tensor tensor = at::empty_strided(result.sizes, result.strides, options);
        accesses_.add(tensor, true);
        return tensor;
    }

    Stack launch(const std::vector<Result> &results) {
        Stack returned;
        auto *kernel = new Kernel{name_, op_, {}, std::vector<Tensor>(results.size())};
        for (size_t i = 0; i < results.size(); i++) {
            int same = aliased(schema_, schema_.returns()[i]);
            if (same >= 0) {
                returned.push_back(arguments_[same]);
                resize_out(same, results[i]);
            } else if (results[i].defined) {
                Tensor result = new_result(results[i]);
                kernel->results[i] = seen_by(device_, result);
                returned.push_back(result);
            } else {
                returned.push_back(Tensor());
            }
        }
        kernel->stack = std::move(cpu_);
        submit(name_, Kernel::run, Kernel::drop, kernel);
        return returned;
    }

    void resize_out(int index, const Result &result) {
        Tensor out = arguments_[index].toTensor();
        if (out.sizes() == result.sizes) return;
        out.resize_(result.sizes);
        accesses_.add(out, true);
        cpu_[index] = seen_by(device_, out);
    }

    // The results depend on values: they are computed now, and written by a work item of the stream.
    Stack compute_now() {
        auto nothing = [](void *) {};
        submit(name_, nothing, nothing, nullptr);
        must_launch(sim_wait_for_stream(device_, stream_.stream()), name_);
        call_below_autograd(op_, cpu_);
        Stack returned;
        for (size_t i = 0; i < schema_.returns().size(); i++) {
            int same = aliased(schema_, schema_.returns()[i]);
            if (same >= 0) returned.push_back(arguments_[same]);
            else returned.push_back(each_tensor(cpu_.at(i), [&](const Tensor &tensor) { return brought(tensor); }));
        }
        return returned;
    }

    Tensor brought(const Tensor &computed) {
        using Pair = std::pair<Tensor, Tensor>;
        accesses_ = {};
        Tensor result = new_result({true, computed.sizes().vec(), computed.strides().vec(), computed.scalar_type()});
        auto run = [](void *pair) { write(((Pair *)pair)->first, ((Pair *)pair)->second); };
        submit(
            name_ + " (result)", run, [](void *pair) { delete (Pair *)pair; },
            new Pair(seen_by(device_, result), computed));
        return result;
    }

    void submit(const std::string &name, SimRun run, SimRun drop, void *argument) {
        int count = accesses_.size();
        must_launch(sim_launch(device_, stream_.stream(), name.c_str(), run, drop, argument, accesses_.data(), count),
                    name);
    }

    const c10::OperatorHandle &op_;
    const c10::FunctionSchema &schema_;
    c10::ArrayRef<IValue> arguments_;
    int device_;
    std::string name_;
    c10::cuda::CUDAGuard guard_;
    c10::cuda::CUDAStream stream_;
    int reach_;
    Stack cpu_;
    Accesses accesses_;
};

void simulated(const c10::OperatorHandle &op, Stack *stack) {
    size_t count = op.schema().arguments().size();
    Stack returned = Call(op, c10::ArrayRef<IValue>(*stack).slice(stack->size() - count))();
    torch::jit::drop(*stack, count);
    for (IValue &value : returned) stack->push_back(std::move(value));
}

void not_simulated(const c10::OperatorHandle &op, Stack *) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the simulator cannot compute ", op.operator_name(), ": it has no CPU kernel");
}

// ---- operators that are not computed by their CPU kernel alone

void copy_on_device(const Tensor &to, const Tensor &from) {
    using Pair = std::pair<Tensor, Tensor>;
    int device = to.device().index();
    c10::cuda::CUDAGuard guard(device);
    Accesses accesses;
    accesses.add(from, false);
    accesses.add(to, true);
    auto run = [](void *pair) { write(((Pair *)pair)->first, ((Pair *)pair)->second); };
    auto *pair = new Pair(seen_by(device, to), seen_by(device, from));
    auto stream = c10::cuda::getCurrentCUDAStream(device).stream();
    auto drop = [](void *pair) { delete (Pair *)pair; };
    must_launch(sim_launch(device, stream, "copy_", run, drop, pair, accesses.data(), accesses.size()), "copy_");
}

// Copies between devices, and from and to the host, are torch's own; but what it does by kernels is made plain before.
Tensor &copy_(Tensor &self, const Tensor &source, bool non_blocking) {
    if (!on_gpu(self) || !on_gpu(source)) return at::native::copy_(self, source, non_blocking);
    if (self.is_same(source) || !self.numel()) return self;
    Tensor from = source.expand_as(self);
    if (self.device() == source.device()) {
        copy_on_device(self, from);
    } else if (self.is_contiguous()) {
        at::native::copy_(self, from.to(self.dtype()).contiguous(), non_blocking);
    } else {
        Tensor brought = at::empty(self.sizes(), self.options(), at::MemoryFormat::Contiguous);
        self.copy_(brought.copy_(from, non_blocking));
    }
    return self;
}

bool equal(const Tensor &self, const Tensor &other) {
    TORCH_CHECK(self.device() == other.device(), "Expected all tensors to be on the same device (simulated equal)");
    return self.sizes() == other.sizes() && self.cpu().equal(other.cpu());
}

class Silent : public c10::WarningHandler {
    void process(const c10::Warning &) override {}
};

}  // namespace

// Takes over torch's CUDA operators; returns how many.
extern "C" __attribute__((visibility("default"))) int sim_install_operators() {
    Silent silent;  // that torch's kernels are replaced is meant
    c10::WarningUtils::WarningHandlerGuard guard(&silent);
    static auto *library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    auto &dispatcher = c10::Dispatcher::singleton();
    int installed = 0;
    for (const auto &name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
        if (name.name.rfind("aten::", 0) || OWN.count(name.name)) continue;
        auto op = dispatcher.findOp(name);
        bool computable = op && op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
        auto kernel = computable ? torch::CppFunction::makeFromBoxedFunction<&simulated>()
                                 : torch::CppFunction::makeFromBoxedFunction<&not_simulated>();
        library->impl(toString(name).substr(6).c_str(), std::move(kernel));
        installed++;
    }
    library->impl("convolution", torch::CppFunction::makeFromBoxedFunction<&simulated>());
    library->impl("copy_", TORCH_FN(copy_));
    library->impl("equal", TORCH_FN(equal));
    at::globalContext().setSDPUseFlash(false);  // attention by the operators that it is composed of
    at::globalContext().setSDPUseMemEfficient(false);
    at::globalContext().setSDPUseCuDNN(false);
    return installed;
}
