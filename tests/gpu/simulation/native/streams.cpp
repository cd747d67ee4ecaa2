// Streams, events, and the schedules by which queued work runs.
//
// eager runs work as it is queued. lazy runs nothing before somebody waits for it, and then no more than that wait
// needs. random runs now and then a step of any stream. All three are schedules that a GPU may choose.
#include "driver.h"

#include <execinfo.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>

namespace sim {

std::vector<std::unique_ptr<Stream>> streams;  // by id; destroyed ones stay, as their work may be queued
const Work *running = nullptr;

namespace {

constexpr size_t MOST_QUEUED = 100000;
constexpr int PATIENCE = 100;  // so often a poll is told "not yet" before a lazy schedule moves
std::set<Stream *> open_streams;
size_t queued = 0;
int standard_error = STDERR_FILENO;

double milliseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

// Whether the work may touch what it names. A copy by the driver reaches all that cudaMalloc gave, and page-locked
// memory, which the host may have given up since the copy was queued: this process may have nothing there any more.
bool may_touch(const Work &work, const SimAccess &access, std::string *why) {
    if (access.reach == SIM_SPARSE) return true;
    if (access.reach == SIM_HOST) {
        *why = "host memory that is not page-locked any more";
        return page_locked(access.address, access.bytes, -1);
    }
    if (access.reach == SIM_PEER) return accessible(access.device, access, why);
    if (access.reach == SIM_COPY) {
        const Mapping *mapping = mapping_at(access.address);
        if (mapping && mapping->physical->plain) return true;
    }
    return accessible(work.device, access, why);
}

bool check_accesses(const Work &work) {
    std::string why;
    for (const SimAccess &access : work.accesses) {
        if (may_touch(work, access, &why)) continue;
        violation("ILLEGAL ADDRESS: %s %s %#lx+%#lx on device %d: %s", work.name.c_str(),
                  access.write ? "writes" : "reads", access.address, access.bytes, work.device, why.c_str());
        sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
        return false;
    }
    return true;
}

void run_until(Stream *stream, uint64_t sequence);

void run_next(Stream *stream) {
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    queued--;
    if (work.awaited) {
        run_until(work.awaited, work.awaited_sequence);
    } else if (!sticky && check_accesses(work)) {
        const Work *before = running;
        running = &work;
        work.run();
        running = before;
    }
    stream->done = work.sequence;
}

void run_until(Stream *stream, uint64_t sequence) {
    while (stream->done < sequence) run_next(stream);
}

void run_any() {
    std::vector<Stream *> ready;
    for (auto &stream : streams)
        if (!stream->queue.empty()) ready.push_back(stream.get());
    if (!ready.empty()) run_next(ready[random_number() % ready.size()]);
}

void follow_schedule() {
    if (settings.schedule == Schedule::eager)
        for (auto &stream : streams) run_until(stream.get(), stream->issued);
    if (settings.schedule == Schedule::random)
        for (int steps = random_number() % 3; steps; steps--) run_any();
    while (queued > MOST_QUEUED) run_any();
}

void append(Stream *stream, Work work) {
    work.sequence = ++stream->issued;
    stream->clock.join(host_clock);
    stream->clock.set(stream->id, work.sequence);
    for (const SimAccess &access : work.accesses)
        if (settings.races && access.reach != SIM_SPARSE)
            touch(access, work.name, stream->id, work.sequence, stream->clock);
    stream->queue.push_back(std::move(work));
    queued++;
}

void append_wait(Stream *stream, Stream *awaited, uint64_t sequence, const Clock &clock) {
    stream->clock.join(clock);
    Work work;
    work.name = "wait";
    work.awaited = awaited;
    work.awaited_sequence = sequence;
    append(stream, std::move(work));
}

// The legacy stream and the blocking streams of its device wait for each other.
void wait_for_legacy_peers(Stream *stream) {
    if (!stream->blocking) return;
    Stream *legacy = devices[stream->device].legacy;
    for (size_t i = 0; i < streams.size(); i++) {
        Stream *other = streams[i].get();
        bool peers = other != stream && other->device == stream->device && other->blocking;
        if (!peers || (stream != legacy && other != legacy)) continue;
        if (other->done < other->issued) append_wait(stream, other, other->issued, other->clock);
        else stream->clock.join(other->clock);
    }
}

void host_waits(Stream *stream, uint64_t sequence, const Clock &clock) {
    run_until(stream, sequence);
    host_clock.join(clock);
}

void explain_fault(int signal, siginfo_t *info, void *) {
    char text[200];
    dprintf(standard_error, "[simulated CUDA] signal %d at %p", signal, info->si_addr);
    if (explain_address((Address)info->si_addr, text, sizeof text)) dprintf(standard_error, ": %s", text);
    if (running) dprintf(standard_error, ", in %s on device %d", running->name.c_str(), running->device);
    dprintf(standard_error, "\n");
    void *frames[40];
    backtrace_symbols_fd(frames, backtrace(frames, 40), standard_error);
    _exit(128 + signal);
}

}  // namespace

Stream *new_stream(int device, bool blocking, int priority) {
    streams.emplace_back(new Stream{(int)streams.size(), device, blocking, priority, {}, 0, 0, {}});
    open_streams.insert(streams.back().get());
    return streams.back().get();
}

Stream *find_stream(int device, void *handle) {
    if (handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        if (device < 0) return nullptr;
        Stream *&legacy = devices[device].legacy;
        return legacy ? legacy : legacy = new_stream(device, true, 0);
    }
    if (open_streams.count((Stream *)handle)) return (Stream *)handle;
    violation("a stream that does not exist, or was destroyed, is used: %p", handle);
    return nullptr;
}

CUresult close_stream(Stream *stream) {  // its work goes on
    open_streams.erase(stream);
    return CUDA_SUCCESS;
}

CUresult enqueue(Stream *stream, Work work) {
    if (CUresult forbidden = forbid_legacy(stream)) return forbidden;
    if (work.device < 0) work.device = stream->device;
    if (stream->capture) return capture_work(stream, std::move(work));
    wait_for_legacy_peers(stream);
    append(stream, std::move(work));
    follow_schedule();
    return sticky;
}

CUresult wait_for_stream(Stream *stream) {
    if (CUresult forbidden = forbid_wait(stream)) return forbidden;
    wait_for_legacy_peers(stream);
    host_waits(stream, stream->issued, stream->clock);
    return sticky;
}

void wait_for_device(int device) {
    for (size_t i = 0; i < streams.size(); i++)
        if (streams[i]->device == device) host_waits(streams[i].get(), streams[i]->issued, streams[i]->clock);
}

CUresult record(Event &event, Stream *stream) {
    if (stream->device != event.device) {
        violation("an event of device %d is recorded on a stream of device %d", event.device, stream->device);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (stream->capture) return capture_record(event, stream);
    wait_for_legacy_peers(stream);
    auto made = std::make_shared<Record>();
    Work work;
    work.name = "event record";
    work.run = [made] { made->milliseconds = milliseconds(); };
    append(stream, std::move(work));
    made->stream = stream;
    made->sequence = stream->issued;
    made->clock = stream->clock;
    event.last = made;
    follow_schedule();
    return sticky;
}

CUresult wait_in_stream(Stream *stream, Event &event) {
    if (!event.last) return CUDA_SUCCESS;  // an event that was never recorded is done
    if (stream->capture || event.last->capture) return capture_wait(stream, event);
    if (stream == event.last->stream) return sticky;
    append_wait(stream, event.last->stream, event.last->sequence, event.last->clock);
    follow_schedule();
    return sticky;
}

CUresult wait_for_event(Event &event) {
    if (!event.last) return CUDA_SUCCESS;
    if (event.last->capture) return CUDA_ERROR_CAPTURED_EVENT;
    host_waits(event.last->stream, event.last->sequence, event.last->clock);
    return sticky;
}

CUresult query_event(Event &event) {
    if (!event.last) return CUDA_SUCCESS;
    Record &last = *event.last;
    if (last.capture) return CUDA_ERROR_CAPTURED_EVENT;
    follow_schedule();
    if (++last.asked % PATIENCE == 0 && last.stream->done < last.sequence) run_next(last.stream);
    if (last.stream->done < last.sequence) return CUDA_ERROR_NOT_READY;
    host_clock.join(last.clock);
    return sticky;
}

CUresult query_stream(Stream *stream) {
    static int asked = 0;
    if (CUresult forbidden = forbid_wait(stream)) return forbidden;
    follow_schedule();
    if (++asked % PATIENCE == 0 && stream->done < stream->issued) run_next(stream);
    if (stream->done < stream->issued) return CUDA_ERROR_NOT_READY;
    host_clock.join(stream->clock);
    return sticky;
}

}  // namespace sim

using namespace sim;

EXPORT void sim_explain_faults() {
    standard_error = dup(STDERR_FILENO);  // before pytest captures it
    struct sigaction action = {};
    action.sa_sigaction = explain_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}
