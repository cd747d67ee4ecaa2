// libcudart over the simulated driver: what torch's libraries import.
#include "simulator.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#undef cudaGetDeviceProperties
#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" CUresult cuGetProcAddress_v2(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);

namespace {

using Address = uint64_t;
thread_local cudaError_t last_error = cudaSuccess;
thread_local int chosen_device = 0;  // by cudaSetDevice; its context is made with the first call that needs one

// The runtime keeps the last error of each thread until somebody asks; "not ready" is none.
cudaError_t returned(int code) {
    cudaError_t error = (cudaError_t)code;
    if (error && error != cudaErrorNotReady) last_error = error;
    return error;
}

int device() {
    if (sim_current_device() < 0) sim_use_device(chosen_device);
    return sim_current_device();
}

// A call that passes on to the driver, with a context.
#define PASS(call) return (device(), returned(call))

cudaError_t not_simulated(const char *name) {
    sim_report("NOT SIMULATED", name);
    return returned(cudaErrorNotSupported);
}

cudaError_t not_simulated_kernel(const void *function) {
    Dl_info info = {};
    return not_simulated(dladdr(function, &info) && info.dli_sname ? info.dli_sname : "a kernel");
}

}  // namespace

// ---- errors, devices

EXPORT cudaError_t cudaPeekAtLastError() { return sim_sticky_error() ? (cudaError_t)sim_sticky_error() : last_error; }

EXPORT cudaError_t cudaGetLastError() {
    cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    static thread_local char text[40];
    snprintf(text, sizeof text, "cudaError %d", error);
    return text;
}

EXPORT const char *cudaGetErrorString(cudaError_t error) {
    static thread_local char text[60];
    switch (error) {
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
        case cudaErrorNotSupported: return "operation not supported";
        case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        default: break;
    }
    snprintf(text, sizeof text, "simulated runtime error %d", error);
    return text;
}

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    *count = 0;
    CUresult error = cuInit(0);
    if (error) return returned(error == CUDA_ERROR_NO_DEVICE ? cudaErrorNoDevice : cudaErrorInsufficientDriver);
    return returned(cuDeviceGetCount(count));
}

EXPORT cudaError_t cudaGetDevice(int *ordinal) {
    *ordinal = sim_current_device() < 0 ? chosen_device : sim_current_device();
    return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int ordinal) {
    int count;
    if (cudaError_t error = cudaGetDeviceCount(&count)) return error;
    if (ordinal < 0 || ordinal >= count) return returned(cudaErrorInvalidDevice);
    chosen_device = ordinal;
    sim_use_device(ordinal);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int ordinal) {
    *properties = {};
    cuDeviceGetName(properties->name, sizeof properties->name, ordinal);
    cuDeviceTotalMem(&properties->totalGlobalMem, ordinal);
    memset(&properties->uuid, ordinal + 1, sizeof properties->uuid);
    properties->major = 9;
    properties->multiProcessorCount = 132;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = 227 << 10;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 64 << 10;
    properties->l2CacheSize = 50 << 20;
    properties->textureAlignment = 512;
    properties->unifiedAddressing = properties->canMapHostMemory = properties->concurrentKernels = 1;
    properties->hostRegisterSupported = 1;
    properties->asyncEngineCount = 3;
    properties->pciBusID = ordinal + 1;
    for (int i = 0; i < 3; i++) {
        properties->maxThreadsDim[i] = 1024;
        properties->maxGridSize[i] = i ? 65535 : 2147483647;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int ordinal) {
    snprintf(text, length, "0000:%02d:00.0", ordinal + 1);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return returned(cuDriverGetVersion(version)); }
EXPORT cudaError_t cudaDriverGetVersion(int *version) { return returned(cuDriverGetVersion(version)); }
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int ordinal) {
    return returned(cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, ordinal));
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int ordinal, int peer) {
    return returned(cuDeviceCanAccessPeer(can, ordinal, peer));
}
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) { PASS(sim_enable_peer(device(), peer)); }
EXPORT cudaError_t cudaDeviceSynchronize() { PASS(sim_device_synchronize(device())); }

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags, cudaDriverEntryPointQueryResult *status) {
    CUresult error = cuGetProcAddress_v2(name, function, version, flags, nullptr);
    if (status) *status = error ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// ---- memory

EXPORT cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    *pointer = nullptr;
    if (!bytes) return cudaSuccess;
    PASS(cuMemAlloc((CUdeviceptr *)pointer, bytes));
}

EXPORT cudaError_t cudaFree(void *pointer) { PASS(cuMemFree((CUdeviceptr)pointer)); }
EXPORT cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
EXPORT cudaError_t cudaFreeAsync(void *pointer, cudaStream_t) { return cudaFree(pointer); }
EXPORT cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { PASS(cuMemGetInfo(free, total)); }
EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    PASS(cuMemHostAlloc(pointer, bytes, flags));
}
EXPORT cudaError_t cudaFreeHost(void *pointer) { PASS(cuMemFreeHost(pointer)); }
EXPORT cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    PASS(cuMemHostRegister(pointer, bytes, flags));
}
EXPORT cudaError_t cudaHostUnregister(void *pointer) { PASS(cuMemHostUnregister(pointer)); }
EXPORT cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    PASS(sim_fill((Address)to, value, bytes, 1, nullptr, device()));
}
EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    PASS(sim_fill((Address)to, value, bytes, 1, stream, device()));
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    PASS(sim_copy((Address)to, (Address)from, bytes, nullptr, device(), false));
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    PASS(sim_copy((Address)to, (Address)from, bytes, stream, device(), true));
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                       cudaStream_t stream) {
    PASS(sim_copy_between((Address)to, to_device, (Address)from, from_device, bytes, stream, device()));
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++) {
        auto *to_row = (char *)to + row * to_pitch;
        auto *from_row = (const char *)from + row * from_pitch;
        if (cudaError_t error = cudaMemcpyAsync(to_row, from_row, width, kind, stream)) return error;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
    *attributes = {};
    int kind = sim_kind((Address)pointer, &attributes->device);
    if (kind == 2) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->devicePointer = (void *)pointer;
    } else if (kind == 1) {
        attributes->type = cudaMemoryTypeHost;
        attributes->hostPointer = attributes->devicePointer = (void *)pointer;
    } else {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = cudaInvalidDeviceId;
        attributes->hostPointer = (void *)pointer;
    }
    return cudaSuccess;
}

// ---- streams, events, capture

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    PASS(cuStreamCreateWithPriority(stream, flags, priority));
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    PASS(cuStreamCreate(stream, flags));
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { PASS(cuStreamCreate(stream, 0)); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) { PASS(cuStreamDestroy(stream)); }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) { PASS(cuStreamSynchronize(stream)); }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { PASS(cuStreamQuery(stream)); }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    PASS(cuStreamWaitEvent(stream, event, flags));
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    PASS(cuLaunchHostFunc(stream, function, argument));
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { PASS(cuEventCreate(event, 0)); }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { PASS(cuEventCreate(event, flags)); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { return returned(cuEventDestroy(event)); }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { PASS(cuEventRecord(event, stream)); }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    PASS(cuEventRecord(event, stream));
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) { return returned(cuEventQuery(event)); }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) { return returned(cuEventSynchronize(event)); }
EXPORT cudaError_t cudaEventElapsedTime(float *elapsed, cudaEvent_t from, cudaEvent_t to) {
    return returned(cuEventElapsedTime(elapsed, from, to));
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    PASS(cuStreamBeginCapture(stream, (CUstreamCaptureMode)mode));
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    PASS(cuStreamEndCapture(stream, graph));
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    PASS(cuStreamIsCapturing(stream, (CUstreamCaptureStatus *)status));
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    return returned(cuThreadExchangeStreamCaptureMode((CUstreamCaptureMode *)mode));
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    return returned(cuGraphGetNodes(graph, nodes, count));
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                                 unsigned long long flags) {
    return returned(cuGraphInstantiateWithFlags(executable, graph, flags));
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    return returned(cuGraphLaunch(executable, stream));
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return returned(cuGraphDestroy(graph)); }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return returned(cuGraphExecDestroy(executable)); }

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **,
                                            const cudaGraphEdgeData **, size_t *dependencies) {
    PASS(cuStreamGetCaptureInfo(stream, (CUstreamCaptureStatus *)status, (cuuint64_t *)id, graph, nullptr, nullptr,
                                dependencies));
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    device();
    *priority = sim_stream_priority(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *argument, unsigned) {
    if (cudaError_t error = cudaStreamSynchronize(stream)) return error;
    callback(stream, cudaSuccess, argument);
    return cudaSuccess;
}

// ---- kernels: torch registers them; those that are launched past the simulated operators are not simulated

EXPORT void **__cudaRegisterFatBinary(void *) {
    static void *handle;
    return &handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **) {}
EXPORT void __cudaUnregisterFatBinary(void **) {}
EXPORT char __cudaInitModule(void **) { return 1; }
EXPORT void __cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *,
                                   int *) {}
EXPORT void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
EXPORT unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void *) { return 0; }
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *) { return cudaSuccess; }
EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3, dim3, void **, size_t, cudaStream_t) {
    return not_simulated_kernel(function);
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **, size_t, cudaStream_t) {
    return not_simulated_kernel(kernel);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *function, void **) {
    return not_simulated_kernel(function);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3, dim3, void **, size_t, cudaStream_t) {
    return not_simulated_kernel(function);
}
EXPORT cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t,
                                                                          unsigned) {
    *blocks = 2;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}

// ---- the rest of what torch imports: there, and refused when called

#define NOT_SIMULATED(name)                             \
    EXPORT cudaError_t refused_##name() __asm__(#name); \
    cudaError_t refused_##name() { return not_simulated(#name); }

NOT_SIMULATED(cudaDeviceGetDefaultMemPool)
NOT_SIMULATED(cudaDeviceGetGraphMemAttribute)
NOT_SIMULATED(cudaDeviceSetGraphMemAttribute)
NOT_SIMULATED(cudaGetSymbolAddress)
NOT_SIMULATED(cudaGraphDebugDotPrint)
NOT_SIMULATED(cudaGraphAddNode)
NOT_SIMULATED(cudaGraphConditionalHandleCreate)
NOT_SIMULATED(cudaGraphNodeGetDependencies)
NOT_SIMULATED(cudaGraphRetainUserObject)
NOT_SIMULATED(cudaIpcCloseMemHandle)
NOT_SIMULATED(cudaIpcGetEventHandle)
NOT_SIMULATED(cudaIpcGetMemHandle)
NOT_SIMULATED(cudaIpcOpenEventHandle)
NOT_SIMULATED(cudaIpcOpenMemHandle)
NOT_SIMULATED(cudaKernelSetAttributeForDevice)
NOT_SIMULATED(cudaLibraryGetKernel)
NOT_SIMULATED(cudaLibraryLoadData)
NOT_SIMULATED(cudaLibraryUnload)
NOT_SIMULATED(cudaMemPoolGetAttribute)
NOT_SIMULATED(cudaMemPoolSetAccess)
NOT_SIMULATED(cudaMemPoolSetAttribute)
NOT_SIMULATED(cudaMemPoolTrimTo)
NOT_SIMULATED(cudaMemcpyToSymbol)
NOT_SIMULATED(cudaProfilerStart)
NOT_SIMULATED(cudaProfilerStop)
NOT_SIMULATED(cudaStreamBeginCaptureToGraph)
NOT_SIMULATED(cudaStreamUpdateCaptureDependencies)
NOT_SIMULATED(cudaUserObjectCreate)
NOT_SIMULATED(cudaUserObjectRelease)
