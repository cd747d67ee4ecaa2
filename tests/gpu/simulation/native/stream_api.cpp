// The calls on streams and events.
#include "driver.h"

#include <unordered_map>

namespace sim {

namespace {

std::unordered_map<CUevent, std::unique_ptr<Event>> events;

Event *find_event(CUevent handle) {
    auto found = events.find(handle);
    if (found != events.end()) return found->second.get();
    violation("an event that does not exist, or was destroyed, is used: %p", (void *)handle);
    return nullptr;
}

}  // namespace

}  // namespace sim

using namespace sim;

EXPORT int sim_launch(int device, void *handle, const char *name, SimRun run, SimRun drop, void *argument,
                      const SimAccess *accesses, int count) {
    std::shared_ptr<void> kept(argument, drop);
    ENTER(cuLaunchKernel)
    Stream *stream = find_stream(device, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->device != device) {
        violation("%s: a kernel for device %d on a stream of device %d", name, device, stream->device);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    Work work;
    std::string why;
    work.name = name;
    work.accesses.assign(accesses, accesses + count);
    for (SimAccess &access : work.accesses)  // where there are no gaps it is looked into like any other
        if (access.reach == SIM_SPARSE && accessible(device, access, &why)) access.reach = SIM_KERNEL;
    work.run = [run, kept] { run(kept.get()); };
    return enqueue(stream, std::move(work));
}

EXPORT int sim_wait_for_stream(int device, void *handle) {
    Lock lock(mutex);
    Stream *stream = find_stream(device, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    counter("stream_sync")++;
    return wait_for_stream(stream);
}

EXPORT int sim_stream_priority(void *handle) {
    Lock lock(mutex);
    Stream *stream = find_stream(current_device(), handle);
    return stream ? stream->priority : 0;
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned flags, int priority) {
    ENTER(cuStreamCreateWithPriority)
    NEED_CONTEXT
    *handle = (CUstream)new_stream(current_device(), !(flags & CU_STREAM_NON_BLOCKING), priority);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream *handle, unsigned flags) {
    return cuStreamCreateWithPriority(handle, flags, 0);
}

// A call on a stream by its handle.
#define STREAM(handle)                                      \
    Stream *stream = find_stream(current_device(), handle); \
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;

EXPORT CUresult cuStreamDestroy(CUstream handle) {
    ENTER(cuStreamDestroy)
    STREAM(handle)
    return close_stream(stream);
}

EXPORT CUresult cuStreamSynchronize(CUstream handle) {
    ENTER(cuStreamSynchronize)
    STREAM(handle)
    counter("stream_sync")++;
    return wait_for_stream(stream);
}

EXPORT CUresult cuStreamQuery(CUstream handle) {
    ENTER(cuStreamQuery)
    STREAM(handle)
    return query_stream(stream);
}

EXPORT CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *argument) {
    ENTER(cuLaunchHostFunc)
    STREAM(handle)
    Work work;
    work.name = "host function";
    work.run = [=] { function(argument); };
    return enqueue(stream, std::move(work));
}

EXPORT CUresult cuEventCreate(CUevent *handle, unsigned flags) {
    ENTER(cuEventCreate)
    NEED_CONTEXT
    auto event = std::make_unique<Event>(Event{current_device(), !(flags & CU_EVENT_DISABLE_TIMING), nullptr});
    *handle = (CUevent)event.get();
    events[*handle] = std::move(event);
    return CUDA_SUCCESS;
}

#define EVENT(name, handle)           \
    Event *name = find_event(handle); \
    if (!name) return CUDA_ERROR_INVALID_HANDLE;

EXPORT CUresult cuEventDestroy(CUevent handle) {  // waits on it that are queued go on
    ENTER(cuEventDestroy)
    EVENT(event, handle)
    events.erase(handle);
    (void)event;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent handle, CUstream on) {
    ENTER(cuEventRecord)
    EVENT(event, handle)
    STREAM(on)
    return record(*event, stream);
}

EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent awaited, unsigned) {
    ENTER(cuStreamWaitEvent)
    EVENT(event, awaited)
    STREAM(handle)
    return wait_in_stream(stream, *event);
}

EXPORT CUresult cuEventQuery(CUevent handle) {
    ENTER(cuEventQuery)
    EVENT(event, handle)
    UNSAFE_IN_CAPTURE(cuEventQuery)
    return query_event(*event);
}

EXPORT CUresult cuEventSynchronize(CUevent handle) {
    ENTER(cuEventSynchronize)
    EVENT(event, handle)
    UNSAFE_IN_CAPTURE(cuEventSynchronize)
    counter("event_sync")++;
    return wait_for_event(*event);
}

EXPORT CUresult cuEventElapsedTime(float *elapsed, CUevent from, CUevent to) {
    ENTER(cuEventElapsedTime)
    EVENT(start, from)
    EVENT(stop, to)
    if (!start->timed || !stop->timed || !start->last || !stop->last) return CUDA_ERROR_INVALID_HANDLE;
    if (start->device != stop->device) {
        violation("elapsed time between events of devices %d and %d", start->device, stop->device);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    for (const Record *record : {start->last.get(), stop->last.get()})
        if (record->stream->done < record->sequence) return CUDA_ERROR_NOT_READY;
    *elapsed = stop->last->milliseconds - start->last->milliseconds;
    return CUDA_SUCCESS;
}
