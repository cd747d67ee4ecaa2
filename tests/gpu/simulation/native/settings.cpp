// Settings from the environment, violations, counters, and failures on purpose.
#include "driver.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

namespace sim {

std::recursive_mutex mutex;
Settings settings;
CUresult sticky = CUDA_SUCCESS;

namespace {

struct Failure {
    int calls_left;
    CUresult code;
};

pid_t owner = 0;  // the process that initialized: the driver does not survive a fork
std::mt19937_64 generator(1);
std::vector<std::string> violations;
std::map<std::string, uint64_t> counters;
std::map<std::string, Failure> failures;
void (*on_violation)(const char *) = nullptr;

long number(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? strtol(value, nullptr, 0) : otherwise;
}

void read_settings() {
    settings.devices = number("SIMCUDA_DEVICES", settings.devices);
    settings.granularity = number("SIMCUDA_GRANULARITY", settings.granularity);
    settings.capacity = (size_t)number("SIMCUDA_MEMORY", settings.capacity >> 20) << 20;
    settings.poison = number("SIMCUDA_POISON", 1);
    settings.races = number("SIMCUDA_RACES", 1);
    settings.peers = number("SIMCUDA_P2P", 1);
    settings.trace = number("SIMCUDA_TRACE", 0);
    if (const char *schedule = getenv("SIMCUDA_SCHED")) sim_set_sched(schedule);
}

// Into a file as well, for whoever does not see how a process ends.
void log_violation(const char *text) {
    const char *path = getenv("SIMCUDA_LOG");
    FILE *log = path && *path ? fopen(path, "a") : nullptr;
    if (!log) return;
    fprintf(log, "%s\n", text);
    fclose(log);
}

}  // namespace

CUresult initialize() {
    if (owner) return owner == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    read_settings();
    if (settings.devices < 1) return CUDA_ERROR_NO_DEVICE;
    if (!open_memory()) return CUDA_ERROR_OUT_OF_MEMORY;
    owner = getpid();
    return CUDA_SUCCESS;
}

uint64_t &counter(const std::string &name) {
    Lock lock(mutex);
    return counters[name];
}

uint64_t random_number() { return generator(); }

void violation(const char *format, ...) {
    char text[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    violations.push_back(text);
    if (on_violation) on_violation(text);
    log_violation(text);
    if (violations.size() <= 50) fprintf(stderr, "[simulated CUDA] %s\n", text);
}

CUresult injected(const char *call) {
    if (failures.empty()) return CUDA_SUCCESS;
    auto found = failures.find(call);
    if (found == failures.end() || --found->second.calls_left > 0) return CUDA_SUCCESS;
    CUresult code = found->second.code;
    failures.erase(found);
    return code;
}

CUresult enter(const char *call, uint64_t &calls) {
    calls++;
    if (settings.trace) fprintf(stderr, "[simulated CUDA] %s\n", call);
    if (owner != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
    if (CUresult error = injected(call)) return error;
    return sticky;
}

}  // namespace sim

using namespace sim;

EXPORT void sim_set_sched(const char *name) {
    Lock lock(mutex);
    if (!strcmp(name, "eager")) {
        settings.schedule = Schedule::eager;
    } else if (!strcmp(name, "lazy")) {
        settings.schedule = Schedule::lazy;
    } else if (!strncmp(name, "random:", 7)) {
        settings.schedule = Schedule::random;
        generator.seed(strtoull(name + 7, nullptr, 10));
    } else {
        violation("SIMCUDA_SCHED is eager, lazy or random:SEED, not %s", name);
    }
}

EXPORT void sim_fail(const char *call, int nth, int code) {
    Lock lock(mutex);
    failures.erase(call);
    if (nth) failures[call] = {nth, (CUresult)code};
}

EXPORT uint64_t sim_stat(const char *name) { return counter(name); }

EXPORT int sim_violations() {
    Lock lock(mutex);
    return violations.size();
}

EXPORT const char *sim_violation(int index) {
    Lock lock(mutex);
    return violations.at(index).c_str();
}

EXPORT void sim_clear_violations() {
    Lock lock(mutex);
    violations.clear();
    failures.clear();
}

EXPORT void sim_report(const char *kind, const char *text) {
    Lock lock(mutex);
    violation("%s: %s", kind, text);
}

EXPORT void sim_on_violation(void (*hook)(const char *)) {
    Lock lock(mutex);
    on_violation = hook;
}

EXPORT int sim_sticky_error() { return sticky; }

EXPORT void sim_reset_sticky() {
    Lock lock(mutex);
    sticky = CUDA_SUCCESS;
}
