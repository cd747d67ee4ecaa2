// What the tests, the simulated runtime and torch's simulated operators ask of the simulated driver.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

// Who reaches for the bytes of an access, and so which rights it needs.
enum SimReach {
    SIM_KERNEL = 0,  // device memory; the device that runs the work must have been given access
    SIM_SPARSE = 1,  // device memory of which some rows are touched: gaps in it are allowed, and not looked into
    SIM_HOST = 2,    // page-locked host memory
    SIM_COPY = 3,    // device memory in a copy: the driver reaches what cudaMalloc gave on any device
    SIM_PEER = 4,    // device memory in a copy between two named devices: the owner's access is enough
};

struct SimAccess {
    uint64_t address;
    uint64_t bytes;
    int write;
    int reach;   // a SimReach
    int device;  // whose access counts, for SIM_PEER
};

typedef void (*SimRun)(void *argument);

// Queues work on a stream (a handle of the driver, or null for the legacy stream). `run` is called once the schedule
// says so, or never; `drop` is called once, after it. Returns an error of the driver.
int sim_launch(int device, void *stream, const char *name, SimRun run, SimRun drop, void *argument,
               const SimAccess *accesses, int count);
int sim_wait_for_stream(int device, void *stream);

// Device address + sim_window = the address through which simulated kernels of that device reach the memory.
int64_t sim_window(int device);

// 0: pageable host memory, 1: page-locked, 2: device memory (of *device), 3: a device address with nothing there.
int sim_kind(uint64_t address, int *device);

int sim_copy(uint64_t to, uint64_t from, size_t bytes, void *stream, int device, int asynchronous);
int sim_copy_between(uint64_t to, int to_device, uint64_t from, int from_device, size_t bytes, void *stream,
                     int device);
int sim_fill(uint64_t address, int value, size_t count, int width, void *stream, int device);

int sim_current_device();         // of this thread's current context; -1: none
void sim_use_device(int device);  // makes its primary context current, as cudaSetDevice does
int sim_enable_peer(int device, int peer);
int sim_device_synchronize(int device);
int sim_stream_priority(void *stream);
int sim_sticky_error();

// Control from the tests
void sim_set_sched(const char *name);  // eager | lazy | random:SEED
void sim_fail(const char *call, int nth, int code);
uint64_t sim_stat(const char *name);
int sim_violations();
const char *sim_violation(int index);
void sim_clear_violations();  // and the failures that are still to come
void sim_reset_sticky();
void sim_report(const char *kind, const char *text);  // a violation found elsewhere
void sim_on_violation(void (*hook)(const char *text));
void sim_explain_faults();  // a fault of this process is explained before it dies
}
