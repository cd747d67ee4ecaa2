// Device memory: physical memory in a memory file, addresses that the host cannot touch, and for each device a window
// beside them in which only what that device may reach is mapped.
#include "driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace sim {

std::vector<Device> devices;
std::map<Address, size_t> reservations;
std::map<Address, Mapping> mappings;

namespace {

constexpr size_t SPACE = 8ull << 40;  // addresses; the windows of the devices follow
constexpr size_t ALIGNMENT = 2 << 20;
constexpr int READ_WRITE = PROT_READ | PROT_WRITE;
constexpr const char *SHAREABLE = "simulated-cuda-of-device-";
constexpr size_t LARGE = 64 << 20;  // beyond it memory is not poisoned, and goes back to the system when it is freed
Address space_begin = 0;
Address next_address = 0;
std::set<Physical *> shareable;  // that are in files of their own

void must(bool done, const char *what) {
    if (done) return;
    perror(what);
    abort();
}

char *reserve_pages(void *at, size_t bytes, int fixed) {
    void *pages = mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
    return pages == MAP_FAILED ? nullptr : (char *)pages;
}

Device open_device() {
    Device device;
    device.file = memfd_create("simulated-cuda", MFD_CLOEXEC);
    must(device.file >= 0 && !ftruncate(device.file, settings.capacity), "memory of the simulated device");
    void *all = mmap(nullptr, settings.capacity, READ_WRITE, MAP_SHARED | MAP_NORESERVE, device.file, 0);
    must(all != MAP_FAILED, "memory of the simulated device");
    device.contents = (char *)all;
    device.free[0] = settings.capacity;
    return device;
}

off_t take(Device &device, size_t bytes) {  // first fit: memory that was touched is used again
    for (auto hole = device.free.begin(); hole != device.free.end(); ++hole) {
        auto [offset, size] = *hole;
        if (size < bytes) continue;
        device.free.erase(hole);
        if (size > bytes) device.free[offset + bytes] = size - bytes;
        device.used += bytes;
        return offset;
    }
    return -1;
}

void give_back(Device &device, off_t offset, size_t bytes) {
    device.used -= bytes;
    if (bytes > LARGE) fallocate(device.file, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, offset, bytes);
    auto hole = device.free.emplace(offset, bytes).first;
    auto next = std::next(hole);
    if (next != device.free.end() && offset + (off_t)bytes == next->first) {
        hole->second += next->second;
        device.free.erase(next);
    }
    if (hole == device.free.begin()) return;
    auto before = std::prev(hole);
    if (before->first + (off_t)before->second != offset) return;
    before->second += hole->second;
    device.free.erase(hole);
}

// The end of the reservation that [address, address + bytes) meets; 0: none.
Address busy_until(Address address, size_t bytes) {
    auto next = reservations.upper_bound(address);
    if (next != reservations.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second > address) return before->first + before->second;
    }
    return next != reservations.end() && next->first < address + bytes ? next->first + next->second : 0;
}

}  // namespace

bool open_memory() {
    char *all = reserve_pages(nullptr, SPACE * (settings.devices + 1) + ALIGNMENT, 0);
    if (!all) return false;
    space_begin = ((Address)all + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    next_address = space_begin + ALIGNMENT;
    for (int i = 0; i < settings.devices; i++) devices.push_back(open_device());
    return true;
}

bool on_device(Address address) { return space_begin && address >= space_begin && address < space_begin + SPACE; }

char *window(int device, Address address) { return (char *)(address + SPACE * (device + 1)); }

// Next fit, so that addresses are not soon used again: who goes on using old ones meets nothing there.
Address find_addresses(size_t bytes, size_t alignment) {
    alignment = std::max(alignment, settings.granularity);
    auto aligned = [&](Address address) { return (address + alignment - 1) / alignment * alignment; };
    for (int round = 0; round < 2; round++) {
        Address at = aligned(next_address);
        while (at + bytes < space_begin + SPACE) {
            Address busy = busy_until(at, bytes);
            if (!busy) {
                next_address = at + bytes + settings.granularity;
                return at;
            }
            at = aligned(busy);
        }
        next_address = space_begin + ALIGNMENT;
    }
    return 0;
}

bool reserved(Address address, size_t bytes) {
    auto next = reservations.upper_bound(address);
    if (next == reservations.begin()) return false;
    auto [begin, size] = *std::prev(next);
    return address + bytes <= begin + size;
}

// Physical memory, full of NaN (in every floating type; -1 in integers): the driver promises no contents.
Physical *create(int device, size_t bytes, bool plain) {
    off_t offset = take(devices[device], bytes);
    if (offset < 0) return nullptr;
    if (settings.poison) memset(devices[device].contents + offset, 0xFF, std::min(bytes, LARGE));
    return new Physical{device, bytes, offset, plain, 1, {}, {}};
}

// Physical memory in a file of its own, so that its descriptor is all that another process needs.
Physical *create_shareable(int device, size_t bytes) {
    if (devices[device].used + bytes > settings.capacity) return nullptr;
    int file = memfd_create((SHAREABLE + std::to_string(device)).c_str(), MFD_CLOEXEC);
    must(file >= 0 && !ftruncate(file, bytes), "shareable memory of the simulated device");
    if (settings.poison) {
        std::vector<char> nan(std::min(bytes, LARGE), (char)0xFF);
        must(pwrite(file, nan.data(), nan.size(), 0) == (ssize_t)nan.size(), "shareable memory");
    }
    devices[device].used += bytes;
    Physical *physical = new Physical{device, bytes, 0, false, 1, {}, {}, file};
    shareable.insert(physical);
    return physical;
}

// The memory that a descriptor is of: the same object where this process has it already; null: it is of none.
Physical *import_shared(int file) {
    struct stat facts, own;
    char path[64], name[128] = {};
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    if (fstat(file, &facts) || readlink(path, name, sizeof name - 1) < 0) return nullptr;
    size_t prefix = strlen("/memfd:") + strlen(SHAREABLE);
    if (strncmp(name, (std::string("/memfd:") + SHAREABLE).c_str(), prefix)) return nullptr;
    int device = atoi(name + prefix);
    if (device >= settings.devices) return nullptr;
    for (Physical *physical : shareable) {
        must(!fstat(physical->file, &own), "shareable memory");
        if (own.st_ino != facts.st_ino || own.st_dev != facts.st_dev) continue;
        physical->held++;
        return physical;
    }
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    Physical *physical = new Physical{device, (size_t)facts.st_size, 0, false, 1, {}, properties, dup(file), true};
    shareable.insert(physical);
    return physical;
}

// Memory lives as long as a handle or a mapping of it.
void destroy_if_unused(Physical *physical) {
    if (physical->held || !physical->shown_at.empty()) return;
    Device &device = devices[physical->device];
    if (physical->file < 0) {
        give_back(device, physical->offset, physical->bytes);
    } else {
        close(physical->file);
        shareable.erase(physical);
        if (!physical->imported) device.used -= physical->bytes;
    }
    delete physical;
}

Mapping *mapping_at(Address address) {
    auto next = mappings.upper_bound(address);
    if (next == mappings.begin()) return nullptr;
    Mapping &mapping = std::prev(next)->second;
    return address < mapping.end() ? &mapping : nullptr;
}

bool overlaps_mapping(Address address, size_t bytes) {
    auto next = mappings.lower_bound(address);
    return mapping_at(address) || (next != mappings.end() && next->first < address + bytes);
}

Mapping &add_mapping(Address address, size_t bytes, Physical *physical) {
    physical->shown_at.insert(address);
    return mappings[address] = {address, bytes, physical, std::vector<int>(settings.devices, PROT_NONE)};
}

void remove_mapping(Address address) {
    Mapping &mapping = mappings.at(address);
    for (int device = 0; device < settings.devices; device++)
        if (mapping.rights[device]) grant(mapping, device, PROT_NONE);
    Physical *physical = mapping.physical;
    physical->shown_at.erase(address);
    mappings.erase(address);
    destroy_if_unused(physical);
}

void grant(Mapping &mapping, int device, int rights) {
    char *at = window(device, mapping.address);
    if (rights == PROT_NONE) {
        must(reserve_pages(at, mapping.bytes, MAP_FIXED), "window of the simulated device");
    } else {
        const Physical &physical = *mapping.physical;
        int file = physical.file < 0 ? devices[physical.device].file : physical.file;
        void *shown = mmap(at, mapping.bytes, rights, MAP_SHARED | MAP_FIXED, file, physical.offset);
        must(shown != MAP_FAILED, "window of the simulated device");
    }
    mapping.rights[device] = rights;
}

// The other addresses, [first, last), at which the memory at [begin, end) is mapped too.
std::vector<std::pair<Address, Address>> aliases(Address begin, Address end) {
    std::vector<std::pair<Address, Address>> found;
    for (const Mapping *mapping; begin < end && (mapping = mapping_at(begin)); begin = mapping->end()) {
        size_t offset = begin - mapping->address, bytes = std::min(end, mapping->end()) - begin;
        for (Address other : mapping->physical->shown_at) {
            Address first = other + offset, last = std::min(first + bytes, mappings.at(other).end());
            if (other != mapping->address && first < last) found.push_back({first, last});
        }
    }
    return found;
}

bool accessible(int device, const SimAccess &access, std::string *why) {
    for (Address at = access.address; at < access.address + access.bytes;) {
        const Mapping *mapping = mapping_at(at);
        if (!mapping) {
            *why = "nothing is mapped there";
            return false;
        }
        if (!(mapping->rights[device] & (access.write ? PROT_WRITE : PROT_READ))) {
            *why = "device " + std::to_string(device) + " was given no access to memory of device " +
                   std::to_string(mapping->physical->device);
            return false;
        }
        at = mapping->end();
    }
    return true;
}

// Says what an address at which the process faulted is to the simulation.
bool explain_address(Address fault, char *text, size_t length) {
    if (!space_begin || fault < space_begin || fault >= space_begin + SPACE * (settings.devices + 1)) return false;
    size_t space = (fault - space_begin) / SPACE;
    if (space == 0) snprintf(text, length, "the host touches device memory at %#lx", fault);
    else snprintf(text, length, "device %zu touches %#lx, where it has no access", space - 1, fault - space * SPACE);
    return true;
}

}  // namespace sim

using namespace sim;

EXPORT int64_t sim_window(int device) { return window(device, 0) - (char *)nullptr; }

EXPORT int sim_kind(uint64_t address, int *device) {
    Lock lock(mutex);
    *device = 0;
    if (!on_device(address)) return page_locked(address, 1, -1) ? 1 : 0;
    const Mapping *mapping = mapping_at(address);
    if (!mapping) return 3;
    *device = mapping->physical->device;
    return 2;
}
