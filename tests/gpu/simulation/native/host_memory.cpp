// Page-locked host memory: allocated by the driver, or registered with it.
#include "driver.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace sim {

namespace {

struct Block {
    size_t bytes;
    bool registered;
    bool portable;  // page-locked for all devices, not only for the one that was current
    int device;
};
std::map<Address, Block> blocks;

size_t whole_pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

const std::pair<const Address, Block> *block_at(Address address) {
    auto next = blocks.upper_bound(address);
    if (next == blocks.begin()) return nullptr;
    auto &found = *std::prev(next);
    return address < found.first + found.second.bytes ? &found : nullptr;
}

// The rights of the system's mapping that holds the address, as in "rw-p", and its end. Empty: none does.
std::string system_mapping(Address address, Address *end) {
    FILE *maps = fopen("/proc/self/maps", "r");
    std::string rights;
    char line[512], found[8];
    Address first, last;
    while (rights.empty() && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %7s", &first, &last, found) == 3 && first <= address && address < last) {
            rights = found;
            *end = last;
        }
    fclose(maps);
    return rights;
}

bool can_be_locked(Address address, size_t bytes, bool read_only) {
    for (Address at = address; at < address + bytes;) {
        std::string rights = system_mapping(at, &at);
        if (rights.empty() || rights[0] != 'r' || (rights[1] != 'w' && !read_only)) return false;
    }
    return true;
}

}  // namespace

// Allocated memory is page-locked for all devices, registered memory for all only when it was registered as portable.
// device: -1: for any.
bool page_locked(Address address, size_t bytes, int device) {
    auto *found = block_at(address);
    if (!found || address + bytes > found->first + found->second.bytes) return false;
    return device < 0 || found->second.portable || found->second.device == device;
}

}  // namespace sim

using namespace sim;

EXPORT CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned) {
    ENTER(cuMemHostAlloc)
    NEED_CONTEXT
    UNSAFE_IN_CAPTURE(cuMemHostAlloc)
    bytes = whole_pages(bytes);
    void *pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    if (settings.poison) memset(pages, 0xFF, bytes);
    blocks[(Address)pages] = {bytes, false, true, current_device()};
    *pointer = pages;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFreeHost(void *pointer) {
    ENTER(cuMemFreeHost)
    if (!pointer) return CUDA_SUCCESS;
    UNSAFE_IN_CAPTURE(cuMemFreeHost)
    auto found = blocks.find((Address)pointer);
    if (found == blocks.end() || found->second.registered) {
        violation("cuMemFreeHost of %p, which the driver did not allocate", pointer);
        return CUDA_ERROR_INVALID_VALUE;
    }
    taken_by_host(found->first, found->second.bytes, "cuMemFreeHost");
    munmap(pointer, found->second.bytes);
    blocks.erase(found);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostRegister(void *pointer, size_t bytes, unsigned flags) {
    ENTER(cuMemHostRegister)
    NEED_CONTEXT
    UNSAFE_IN_CAPTURE(cuMemHostRegister)
    Address begin = (Address)pointer;
    if (!begin || !bytes) return CUDA_ERROR_INVALID_VALUE;
    auto next = blocks.lower_bound(begin);
    if (block_at(begin) || (next != blocks.end() && next->first < begin + bytes))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (!can_be_locked(begin, bytes, flags & CU_MEMHOSTREGISTER_READ_ONLY)) return CUDA_ERROR_INVALID_VALUE;
    blocks[begin] = {bytes, true, bool(flags & CU_MEMHOSTREGISTER_PORTABLE), current_device()};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostUnregister(void *pointer) {
    ENTER(cuMemHostUnregister)
    UNSAFE_IN_CAPTURE(cuMemHostUnregister)
    auto found = blocks.find((Address)pointer);
    if (found == blocks.end() || !found->second.registered) {
        violation("cuMemHostUnregister of %p, which is not registered", pointer);
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    }
    Address end;
    if (system_mapping(found->first, &end).empty())
        violation("cuMemHostUnregister of %p after the memory was given back to the system", pointer);
    taken_by_host(found->first, found->second.bytes, "cuMemHostUnregister");
    blocks.erase(found);
    return CUDA_SUCCESS;
}
