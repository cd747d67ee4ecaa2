// The simulated driver from the inside: what its files know of each other.
#pragma once
#include "simulator.h"

#include <cuda.h>
#include <sys/types.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace sim {

using Address = uint64_t;
using Lock = std::lock_guard<std::recursive_mutex>;

// Held in every call: one thread at a time is in the driver, and runs the kernels. Host threads count as ordered.
extern std::recursive_mutex mutex;

// ---- settings.cpp: settings, violations, counters, failures on purpose

enum class Schedule { eager, lazy, random };

struct Settings {
    int devices = 1;
    size_t granularity = 2 << 20;
    size_t capacity = 16ull << 30;  // of each device
    bool poison = true;
    bool races = true;
    bool peers = true;
    bool trace = false;
    Schedule schedule = Schedule::lazy;
};
extern Settings settings;
extern CUresult sticky;  // after an illegal address no call works any more, as on a GPU

CUresult initialize();
uint64_t &counter(const std::string &name);
void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
CUresult injected(const char *call);
CUresult enter(const char *call, uint64_t &calls);
uint64_t random_number();

// The beginning of each call: counted, refused where a test wants it, and after a sticky error.
#define ENTER(call)                                \
    sim::Lock entered(sim::mutex);                 \
    static uint64_t &calls_ = sim::counter(#call); \
    if (CUresult refused_ = sim::enter(#call, calls_)) return refused_;

// ---- races.cpp: happens-before

// For each stream, how much of its work is known to be done. Work, events, streams and the host have one.
class Clock {
  public:
    void join(const Clock &other);
    void set(int stream, uint64_t sequence);
    bool covers(int stream, uint64_t sequence) const;

  private:
    std::vector<uint64_t> done_;
};
extern Clock host_clock;

void touch(const SimAccess &access, const std::string &work, int stream, uint64_t sequence, const Clock &clock);
void taken_by_host(Address address, size_t bytes, const char *call);

// ---- memory.cpp: devices, addresses, physical memory, mappings

struct Stream;

struct Physical {
    int device;
    size_t bytes;
    off_t offset;
    bool plain;  // from cudaMalloc, not from cuMemCreate
    int held;    // by so many handles
    std::set<Address> shown_at;
    CUmemAllocationProp properties;
    int file = -1;          // of its own, which other processes may have, too; -1: it is in the device's
    bool imported = false;  // another process made it, whose device counts its bytes
};

struct Mapping {
    Address address;
    size_t bytes;
    Physical *physical;
    std::vector<int> rights;  // device -> PROT_READ | PROT_WRITE
    Address end() const { return address + bytes; }
};

struct Device {
    int file;
    char *contents;
    std::map<off_t, size_t> free;
    size_t used = 0;
    int retained = 0;
    bool has_runtime = false;
    std::set<int> peers;
    Stream *legacy = nullptr;
};
extern std::vector<Device> devices;
extern std::map<Address, size_t> reservations;
extern std::map<Address, Mapping> mappings;

bool open_memory();
bool on_device(Address address);
char *window(int device, Address address);
Address find_addresses(size_t bytes, size_t alignment);
bool reserved(Address address, size_t bytes);
Physical *create(int device, size_t bytes, bool plain);
Physical *create_shareable(int device, size_t bytes);
Physical *import_shared(int file);
void destroy_if_unused(Physical *physical);
Mapping *mapping_at(Address address);
bool overlaps_mapping(Address address, size_t bytes);
Mapping &add_mapping(Address address, size_t bytes, Physical *physical);
void remove_mapping(Address address);
void grant(Mapping &mapping, int device, int rights);
std::vector<std::pair<Address, Address>> aliases(Address begin, Address end);
bool accessible(int device, const SimAccess &access, std::string *why);
bool explain_address(Address fault, char *text, size_t length);

// ---- host_memory.cpp

bool page_locked(Address address, size_t bytes, int device);

// ---- streams.cpp: streams, events, schedules

struct Capture;

struct Work {
    std::string name;
    std::function<void()> run;
    std::vector<SimAccess> accesses;
    int device = -1;
    uint64_t sequence = 0;
    Stream *awaited = nullptr;  // instead of `run`: what must be done before
    uint64_t awaited_sequence = 0;
};

struct Stream {
    int id;
    int device;
    bool blocking;  // it and the legacy stream wait for each other
    int priority;
    std::deque<Work> queue;
    uint64_t issued = 0;
    uint64_t done = 0;
    Clock clock;
    Capture *capture = nullptr;
    size_t captured = 0;
};

// One recording of an event.
struct Record {
    Stream *stream;
    uint64_t sequence = 0;
    Clock clock;
    double milliseconds = 0;
    uint64_t capture = 0;  // its id, when recorded in one
    size_t captured = 0;
    int asked = 0;
};

struct Event {
    int device;
    bool timed;
    std::shared_ptr<Record> last;
};

extern std::vector<std::unique_ptr<Stream>> streams;
extern const Work *running;

Stream *new_stream(int device, bool blocking, int priority);
Stream *find_stream(int device, void *handle);
CUresult close_stream(Stream *stream);
CUresult enqueue(Stream *stream, Work work);
CUresult wait_for_stream(Stream *stream);
void wait_for_device(int device);
CUresult record(Event &event, Stream *stream);
CUresult wait_in_stream(Stream *stream, Event &event);
CUresult wait_for_event(Event &event);
CUresult query_event(Event &event);
CUresult query_stream(Stream *stream);

// ---- capture.cpp: stream capture, and graphs of what was captured

struct Capture {
    uint64_t id;
    CUstreamCaptureMode mode;
    std::thread::id thread;
    Stream *origin;
    std::set<Stream *> members;
    std::set<Stream *> loose;  // members whose work the origin does not wait for yet
    bool invalidated = false;
    std::vector<Work> nodes;
};

CUresult capture_work(Stream *stream, Work work);
CUresult capture_record(Event &event, Stream *stream);
CUresult capture_wait(Stream *stream, Event &event);
CUresult forbid_wait(Stream *stream);
CUresult forbid_device_wait(int device);
CUresult forbid_unsafe(const char *call);
CUresult forbid_legacy(Stream *stream);

// A call that the driver calls potentially unsafe while a stream is captured.
#define UNSAFE_IN_CAPTURE(call) \
    if (CUresult forbidden_ = sim::forbid_unsafe(#call)) return forbidden_;

// ---- context_api.cpp

int current_device();  // -1: this thread has no context
int device_of(CUcontext context);

#define NEED_CONTEXT \
    if (sim::current_device() < 0) return CUDA_ERROR_INVALID_CONTEXT;

}  // namespace sim
