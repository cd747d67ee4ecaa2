// Copies and fills. Between device memory and page-locked memory they are work of the stream; pageable memory is staged
// before the call returns, after a wait for the stream.
#include "driver.h"

#include <cstring>

namespace sim {

namespace {

struct Side {
    Address address;
    bool device;
    bool locked;
    int owner;  // the device whose window shows it

    bool known() const { return device || locked; }  // to the work: pageable memory is not touched by it
};

Side side(Address address, size_t bytes, int device) {
    Side side{address, on_device(address), false, device};
    if (side.device) {
        const Mapping *mapping = mapping_at(address);
        if (mapping) side.owner = mapping->physical->device;
    } else {
        side.locked = page_locked(address, bytes, device);
    }
    return side;
}

// Shown by the window of the owner when it is plain memory, else by that of the device that copies.
char *reached(const Side &side, int device) {
    if (!side.device) return (char *)side.address;
    const Mapping *mapping = mapping_at(side.address);
    return window(mapping && mapping->physical->plain ? side.owner : device, side.address);
}

CUresult copy_pageable_to_device(const Side &to, const Side &from, size_t bytes, Stream *stream, Work work) {
    counter("pageable_h2d")++;
    counter("pageable_h2d_bytes") += bytes;
    if (CUresult error = wait_for_stream(stream)) return error;
    auto staged = std::make_shared<std::vector<char>>((char *)from.address, (char *)from.address + bytes);
    work.run = [=] { memcpy(reached(to, stream->device), staged->data(), bytes); };
    return enqueue(stream, std::move(work));
}

CUresult copy(Address to_address, Address from_address, size_t bytes, Stream *stream, bool asynchronous) {
    counter("memcpy")++;
    Side to = side(to_address, bytes, stream->device), from = side(from_address, bytes, stream->device);
    if (!to.device && !from.device) {
        if (CUresult error = wait_for_stream(stream)) return error;
        memmove((void *)to_address, (void *)from_address, bytes);
        return CUDA_SUCCESS;
    }
    if (!to.device || !from.device) counter("host_bytes") += bytes;
    Work work;
    work.name = to.device && from.device ? "memcpy D2D" : to.device ? "memcpy H2D" : "memcpy D2H";
    if (from.known()) work.accesses.push_back({from_address, bytes, 0, from.device ? SIM_COPY : SIM_HOST, 0});
    if (to.known()) work.accesses.push_back({to_address, bytes, 1, to.device ? SIM_COPY : SIM_HOST, 0});
    if (!from.known()) return copy_pageable_to_device(to, from, bytes, stream, std::move(work));
    work.run = [=] { memmove(reached(to, stream->device), reached(from, stream->device), bytes); };
    if (CUresult error = enqueue(stream, std::move(work))) return error;
    if (!to.known()) counter("pageable_d2h")++;
    bool waits = !to.known() || (!asynchronous && !(to.device && from.device));
    return waits ? wait_for_stream(stream) : sticky;
}

// By cuMemcpyPeerAsync: each side is reached by the device that is named for it.
CUresult copy_between(Address to, int to_device, Address from, int from_device, size_t bytes, Stream *stream) {
    counter("memcpy")++;
    Work work;
    work.name = "memcpy peer";
    work.accesses = {{from, bytes, 0, SIM_PEER, from_device}, {to, bytes, 1, SIM_PEER, to_device}};
    work.run = [=] { memmove(window(to_device, to), window(from_device, from), bytes); };
    return enqueue(stream, std::move(work));
}

CUresult fill(Address address, int value, size_t count, int width, Stream *stream) {
    Work work;
    work.name = "memset";
    work.accesses.push_back({address, count * width, 1, SIM_KERNEL, 0});
    work.run = [=] {
        char *at = window(stream->device, address);
        if (width == 1) memset(at, value, count);
        else
            for (size_t i = 0; i < count; i++) ((int *)at)[i] = value;
    };
    return enqueue(stream, std::move(work));
}

}  // namespace

}  // namespace sim

using namespace sim;

// A copy of nothing is done; else the stream is looked up.
#define STREAM_FOR(bytes, device, handle)         \
    if (!(bytes)) return CUDA_SUCCESS;            \
    Stream *stream = find_stream(device, handle); \
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;

EXPORT int sim_copy(uint64_t to, uint64_t from, size_t bytes, void *handle, int device, int asynchronous) {
    ENTER(cuMemcpyAsync)
    STREAM_FOR(bytes, device, handle)
    return copy(to, from, bytes, stream, asynchronous);
}

EXPORT int sim_copy_between(uint64_t to, int to_device, uint64_t from, int from_device, size_t bytes, void *handle,
                            int device) {
    ENTER(cuMemcpyPeerAsync)
    STREAM_FOR(bytes, device, handle)
    return copy_between(to, to_device, from, from_device, bytes, stream);
}

EXPORT int sim_fill(uint64_t address, int value, size_t count, int width, void *handle, int device) {
    ENTER(cuMemsetD8Async)
    STREAM_FOR(count, device, handle)
    return fill(address, value, count, width, stream);
}

#define COPY(call, to, from, bytes, handle, asynchronous) \
    ENTER(call)                                           \
    NEED_CONTEXT                                          \
    STREAM_FOR(bytes, current_device(), handle)           \
    return copy((Address)to, (Address)from, bytes, stream, asynchronous);

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from,
                         size_t n){COPY(cuMemcpy, to, from, n, nullptr, false)} EXPORT CUresult
    cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n,
                  CUstream s){COPY(cuMemcpyAsync, to, from, n, s, true)} EXPORT CUresult
    cuMemcpyHtoD(CUdeviceptr to, const void *from,
                 size_t n){COPY(cuMemcpyHtoD, to, from, n, nullptr, false)} EXPORT CUresult
    cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t n,
                      CUstream s){COPY(cuMemcpyHtoDAsync, to, from, n, s, true)} EXPORT CUresult
    cuMemcpyDtoH(void *to, CUdeviceptr from, size_t n){COPY(cuMemcpyDtoH, to, from, n, nullptr, false)} EXPORT CUresult
    cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t n,
                      CUstream s){COPY(cuMemcpyDtoHAsync, to, from, n, s, true)} EXPORT CUresult
    cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from,
                 size_t n){COPY(cuMemcpyDtoD, to, from, n, nullptr, false)} EXPORT CUresult
    cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t n,
                      CUstream s){COPY(cuMemcpyDtoDAsync, to, from, n, s, true)}

EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                                  size_t n, CUstream handle) {
    ENTER(cuMemcpyPeerAsync)
    NEED_CONTEXT
    STREAM_FOR(n, current_device(), handle)
    return copy_between(to, device_of(to_context), from, device_of(from_context), n, stream);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t n, CUstream handle) {
    ENTER(cuMemsetD8Async)
    NEED_CONTEXT
    STREAM_FOR(n, current_device(), handle)
    return fill(address, value, n, 1, stream);
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t n, CUstream handle) {
    ENTER(cuMemsetD32Async)
    NEED_CONTEXT
    STREAM_FOR(n, current_device(), handle)
    return fill(address, value, n, 4, stream);
}

EXPORT CUresult cuMemsetD8(CUdeviceptr address, unsigned char value, size_t n) {
    return cuMemsetD8Async(address, value, n, nullptr);
}
