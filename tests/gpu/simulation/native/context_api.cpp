// Initialization, devices, contexts, and the look-up of all calls by name.
#include "driver.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

namespace sim {

namespace {

thread_local std::vector<int> current;  // a stack: the device of each context, the current one last

CUcontext context_of(int device) { return (CUcontext)&devices[device]; }

bool no_device(int device) { return device < 0 || device >= settings.devices; }

void make_current(int device) {
    if (current.empty()) current.push_back(device);
    current.back() = device;
}

bool holds_anything(int device) {
    for (auto &[address, mapping] : mappings)
        if (mapping.physical->device == device) return true;
    return false;
}

}  // namespace

int current_device() { return current.empty() ? -1 : current.back(); }

int device_of(CUcontext context) { return (Device *)context - devices.data(); }

}  // namespace sim

using namespace sim;

EXPORT int sim_current_device() { return current_device(); }

EXPORT void sim_use_device(int device) {
    Lock lock(mutex);
    if (initialize() || no_device(device)) return;
    if (!devices[device].has_runtime) devices[device].retained++;  // the runtime keeps it for as long as the process
    devices[device].has_runtime = true;
    make_current(device);
}

EXPORT int sim_device_synchronize(int device) {
    ENTER(cuCtxSynchronize)
    counter("device_sync")++;
    if (CUresult forbidden = forbid_device_wait(device)) return forbidden;
    wait_for_device(device);
    return sticky;
}

EXPORT CUresult cuInit(unsigned) {
    Lock lock(mutex);
    return initialize();
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    ENTER(cuDeviceGetCount)
    *count = settings.devices;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(cuDeviceGet)
    if (no_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER(cuDeviceGetName)
    snprintf(name, length, "Simulated GPU %d", device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER(cuDeviceGetUuid)
    memset(uuid, device + 1, sizeof *uuid);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem(size_t *bytes, CUdevice) {
    ENTER(cuDeviceTotalMem)
    *bytes = settings.capacity;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    static const std::map<CUdevice_attribute, int> known = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    };
    ENTER(cuDeviceGetAttribute)
    if (no_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    auto found = known.find(attribute);
    *value = found == known.end() ? 0 : found->second;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    ENTER(cuDeviceCanAccessPeer)
    *can = device != peer && settings.peers;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(cuDevicePrimaryCtxRetain)
    if (no_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    devices[device].retained++;
    *context = context_of(device);
    return CUDA_SUCCESS;
}

// The last release resets the context: all that it holds is lost.
EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER(cuDevicePrimaryCtxRelease)
    if (no_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (!devices[device].retained) {
        violation("the primary context of device %d is released more often than it was retained", device);
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (!--devices[device].retained && holds_anything(device))
        violation("the primary context of device %d is reset by its last release, with memory in it", device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    ENTER(cuDevicePrimaryCtxGetState)
    *flags = 0;
    *active = devices[device].retained > 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(cuCtxSetCurrent)
    if (context) make_current(device_of(context));
    else if (!current.empty()) current.pop_back();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(cuCtxGetCurrent)
    *context = current.empty() ? nullptr : context_of(current.back());
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent(CUcontext context) {
    ENTER(cuCtxPushCurrent)
    current.push_back(device_of(context));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent(CUcontext *context) {
    ENTER(cuCtxPopCurrent)
    NEED_CONTEXT
    if (context) *context = context_of(current.back());
    current.pop_back();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER(cuCtxGetDevice)
    NEED_CONTEXT
    *device = current_device();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize() {
    if (current_device() < 0) return CUDA_ERROR_INVALID_CONTEXT;
    return (CUresult)sim_device_synchronize(current_device());
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **name) {
    static thread_local char text[32];
    snprintf(text, sizeof text, "CUDA_ERROR_%d", error);
    *name = text;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **description) {
    static thread_local char text[48];
    snprintf(text, sizeof text, "simulated driver error %d", error);
    *description = text;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               CUstream, void **, void **) {
    sim_report("NOT SIMULATED", "cuLaunchKernel");
    return CUDA_ERROR_NOT_SUPPORTED;
}

// Calls are looked up by name without their version; the newest one is meant.
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int, cuuint64_t,
                                    CUdriverProcAddressQueryResult *status) {
    static void *self = [] {
        Dl_info info;
        dladdr((void *)&cuInit, &info);
        return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }();
    *function = nullptr;
    for (const char *version : {"_v4", "_v3", "_v2", ""})
        if (!*function) *function = dlsym(self, (std::string(name) + version).c_str());
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

#undef cuGetProcAddress
EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
