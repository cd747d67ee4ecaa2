// Virtual memory management and plain allocations, with the documented rules of each call.
#include "driver.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cstdio>

namespace sim {

namespace {

constexpr int READ_WRITE = PROT_READ | PROT_WRITE;
std::map<CUmemGenericAllocationHandle, Physical *> handles;
std::set<Address> plain_allocations;

bool in_pages(size_t bytes) { return bytes && bytes % settings.granularity == 0; }

bool on_known_device(const CUmemLocation &location) {
    return location.type == CU_MEM_LOCATION_TYPE_DEVICE && location.id >= 0 && location.id < settings.devices;
}

bool supported(const CUmemAllocationProp *properties) {
    return properties && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED && on_known_device(properties->location);
}

bool shareable(const CUmemAllocationProp &properties) {
    return properties.requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

CUmemGenericAllocationHandle new_handle(Physical *physical) {
    static CUmemGenericAllocationHandle last = 0xA110C0000;
    handles[++last] = physical;
    return last;
}

CUresult refuse(const char *call, Address address, size_t bytes, const char *rule) {
    violation("%s(%#lx, %#lx): %s", call, address, bytes, rule);
    return CUDA_ERROR_INVALID_VALUE;
}

// The mappings of cuMemMap that fill [address, address + bytes) exactly; none if they do not.
std::vector<Mapping *> whole_mappings(Address address, size_t bytes) {
    std::vector<Mapping *> found;
    Address at = address;
    while (at < address + bytes) {
        auto next = mappings.find(at);
        if (next == mappings.end() || next->second.physical->plain) return {};
        found.push_back(&next->second);
        at = next->second.end();
    }
    return at == address + bytes ? found : std::vector<Mapping *>();
}

int rights_of(const CUmemAccessDesc &access) {
    if (access.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return READ_WRITE;
    return access.flags == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ : PROT_NONE;
}

}  // namespace

}  // namespace sim

using namespace sim;

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                              CUmemAllocationGranularity_flags) {
    ENTER(cuMemGetAllocationGranularity)
    if (!supported(properties)) return CUDA_ERROR_INVALID_VALUE;
    *granularity = settings.granularity;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
    ENTER(cuMemCreate)
    NEED_CONTEXT
    UNSAFE_IN_CAPTURE(cuMemCreate)
    if (flags || !in_pages(bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (!supported(properties)) return CUDA_ERROR_INVALID_DEVICE;
    if (properties->requestedHandleTypes && !shareable(*properties)) return CUDA_ERROR_NOT_SUPPORTED;
    int device = properties->location.id;
    Physical *physical = shareable(*properties) ? create_shareable(device, bytes) : create(device, bytes, false);
    if (!physical) return CUDA_ERROR_OUT_OF_MEMORY;
    physical->properties = *properties;
    *handle = new_handle(physical);
    return CUDA_SUCCESS;
}

// For other processes, which import it: only of memory that was made for that.
EXPORT CUresult cuMemExportToShareableHandle(void *exported, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER(cuMemExportToShareableHandle)
    auto found = handles.find(handle);
    if (found == handles.end())
        return refuse("cuMemExportToShareableHandle", handle, 0, "the handle does not exist, or was released");
    if (flags || !type || found->second->properties.requestedHandleTypes != type)
        return refuse("cuMemExportToShareableHandle", handle, 0, "it was not created for handles of that type");
    int file = fcntl(found->second->file, F_DUPFD_CLOEXEC, 0);
    if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    *(int *)exported = file;
    return CUDA_SUCCESS;
}

// The memory lives until whoever imported it has released and unmapped it, too.
EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *exported,
                                               CUmemAllocationHandleType type) {
    ENTER(cuMemImportFromShareableHandle)
    NEED_CONTEXT
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    Physical *physical = import_shared((int)(intptr_t)exported);
    if (!physical) return CUDA_ERROR_INVALID_VALUE;
    *handle = new_handle(physical);
    return CUDA_SUCCESS;
}

// The memory lives on while it is mapped.
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(cuMemRelease)
    UNSAFE_IN_CAPTURE(cuMemRelease)
    auto found = handles.find(handle);
    if (found == handles.end()) return refuse("cuMemRelease", handle, 0, "the handle does not exist, or was released");
    found->second->held--;
    destroy_if_unused(found->second);
    handles.erase(found);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr,
                                    unsigned long long flags) {
    ENTER(cuMemAddressReserve)
    NEED_CONTEXT
    if (flags || !in_pages(bytes) || (alignment & (alignment - 1))) return CUDA_ERROR_INVALID_VALUE;
    Address address = find_addresses(bytes, alignment);
    if (!address) return CUDA_ERROR_OUT_OF_MEMORY;
    reservations[address] = bytes;
    *pointer = address;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    ENTER(cuMemAddressFree)
    auto found = reservations.find(address);
    if (found == reservations.end() || found->second != bytes || plain_allocations.count(address))
        return refuse("cuMemAddressFree", address, bytes, "no such reservation");
    if (overlaps_mapping(address, bytes))
        return refuse("cuMemAddressFree", address, bytes, "something is mapped there");
    reservations.erase(found);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    ENTER(cuMemMap)
    NEED_CONTEXT
    UNSAFE_IN_CAPTURE(cuMemMap)
    auto found = handles.find(handle);
    if (found == handles.end()) return refuse("cuMemMap", address, bytes, "the handle does not exist, or was released");
    if (offset || flags || !in_pages(bytes) || address % settings.granularity || bytes > found->second->bytes)
        return refuse("cuMemMap", address, bytes,
                      "offset and flags are 0, address and size multiples of the granularity");
    if (!reserved(address, bytes)) return refuse("cuMemMap", address, bytes, "outside of a reservation");
    if (overlaps_mapping(address, bytes))
        return refuse("cuMemMap", address, bytes, "something is mapped there already");
    add_mapping(address, bytes, found->second);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *accesses, size_t count) {
    ENTER(cuMemSetAccess)
    NEED_CONTEXT
    UNSAFE_IN_CAPTURE(cuMemSetAccess)
    std::vector<Mapping *> found = whole_mappings(address, bytes);
    if (found.empty()) return refuse("cuMemSetAccess", address, bytes, "not the range of whole mappings");
    for (size_t i = 0; i < count; i++)
        for (const Mapping *mapping : found) {
            bool foreign = accesses[i].location.id != mapping->physical->device;
            if (!on_known_device(accesses[i].location) || (foreign && !settings.peers))
                return CUDA_ERROR_INVALID_DEVICE;
        }
    for (size_t i = 0; i < count; i++)
        for (Mapping *mapping : found) grant(*mapping, accesses[i].location.id, rights_of(accesses[i]));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    ENTER(cuMemUnmap)
    UNSAFE_IN_CAPTURE(cuMemUnmap)
    std::vector<Mapping *> found = whole_mappings(address, bytes);
    if (found.empty()) return refuse("cuMemUnmap", address, bytes, "not the range of whole mappings");
    taken_by_host(address, bytes, "cuMemUnmap");
    for (Mapping *mapping : found) remove_mapping(mapping->address);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                       CUmemGenericAllocationHandle handle) {
    ENTER(cuMemGetAllocationPropertiesFromHandle)
    auto found = handles.find(handle);
    if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
    *properties = found->second->properties;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange(CUdeviceptr *begin, size_t *bytes, CUdeviceptr address) {
    ENTER(cuMemGetAddressRange)
    auto next = reservations.upper_bound(address);
    if (!reserved(address, 1)) return CUDA_ERROR_NOT_FOUND;
    if (begin) *begin = std::prev(next)->first;
    if (bytes) *bytes = std::prev(next)->second;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo(size_t *free, size_t *total) {
    ENTER(cuMemGetInfo)
    NEED_CONTEXT
    *free = settings.capacity - devices[current_device()].used;
    *total = settings.capacity;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc(CUdeviceptr *pointer, size_t bytes) {
    ENTER(cuMemAlloc)
    NEED_CONTEXT
    UNSAFE_IN_CAPTURE(cuMemAlloc)
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    bytes = (bytes + settings.granularity - 1) / settings.granularity * settings.granularity;
    Address address = find_addresses(bytes, 0);
    Physical *physical = address ? create(current_device(), bytes, true) : nullptr;
    if (!physical) return CUDA_ERROR_OUT_OF_MEMORY;
    physical->held = 0;  // the mapping alone keeps it
    reservations[address] = bytes;
    plain_allocations.insert(address);
    Mapping &mapping = add_mapping(address, bytes, physical);
    for (int device = 0; device < settings.devices; device++)
        if (device == current_device() || devices[device].peers.count(current_device()))
            grant(mapping, device, READ_WRITE);
    *pointer = address;
    return CUDA_SUCCESS;
}

// Waits for all work: no kernel may be running in what is freed.
EXPORT CUresult cuMemFree(CUdeviceptr address) {
    ENTER(cuMemFree)
    if (!address) return CUDA_SUCCESS;
    UNSAFE_IN_CAPTURE(cuMemFree)
    if (!plain_allocations.count(address)) return refuse("cuMemFree", address, 0, "no such allocation");
    for (int device = 0; device < settings.devices; device++) wait_for_device(device);
    taken_by_host(address, reservations[address], "cuMemFree");
    remove_mapping(address);
    reservations.erase(address);
    plain_allocations.erase(address);
    return CUDA_SUCCESS;
}

// Peer access is to what cudaMalloc gave, present and future; mappings of cuMemMap are left to cuMemSetAccess.
EXPORT int sim_enable_peer(int device, int peer) {
    Lock lock(mutex);
    if (device == peer || peer < 0 || peer >= settings.devices) return CUDA_ERROR_INVALID_DEVICE;
    if (!settings.peers) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    if (!devices[device].peers.insert(peer).second) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    for (auto &[address, mapping] : mappings)
        if (mapping.physical->plain && mapping.physical->device == peer) grant(mapping, device, READ_WRITE);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    ENTER(cuPointerGetAttribute)
    int device, kind = sim_kind(address, &device);
    if (kind == 0 || kind == 3) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *(unsigned *)value = kind == 2 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = device; return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_CONTEXT: *(void **)value = &devices[device]; return CUDA_SUCCESS;
        default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}
