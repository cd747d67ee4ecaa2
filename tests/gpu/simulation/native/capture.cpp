// Stream capture and graphs: which calls are forbidden while a stream is captured, and what was queued on it meanwhile,
// which each launch queues once more, in the order of the capture. Random numbers of a launch are those of the capture.
#include "driver.h"

#include <algorithm>

namespace sim {

namespace {

std::vector<std::unique_ptr<Capture>> captures;  // those under way
uint64_t last_id = 0;
thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

struct Graph {
    std::vector<Work> nodes;
};

CUresult invalidate(Capture &capture, CUresult error) {
    capture.invalidated = true;
    return error;
}

Capture *capture_by(uint64_t id) {
    for (auto &capture : captures)
        if (capture->id == id) return capture.get();
    return nullptr;
}

// Whether this thread may make no unsafe call because of the capture, by the rules of
// cuThreadExchangeStreamCaptureMode.
bool prohibits(const Capture &capture) {
    bool own = capture.thread == std::this_thread::get_id();
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    if (own) return capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    return thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

void leave(Capture &capture) {
    for (Stream *stream : capture.members) stream->capture = nullptr;
    auto is_it = [&](const std::unique_ptr<Capture> &other) { return other.get() == &capture; };
    captures.erase(std::find_if(captures.begin(), captures.end(), is_it));
}

}  // namespace

CUresult capture_work(Stream *stream, Work work) {
    Capture &capture = *stream->capture;
    if (capture.invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    capture.nodes.push_back(std::move(work));
    stream->captured++;
    if (stream != capture.origin) capture.loose.insert(stream);
    return CUDA_SUCCESS;
}

CUresult capture_record(Event &event, Stream *stream) {
    event.last = std::make_shared<Record>();
    event.last->stream = stream;
    event.last->capture = stream->capture->id;
    event.last->captured = stream->captured;
    return CUDA_SUCCESS;
}

// A stream that waits for a captured event is captured from then on; nothing else may cross the border of a capture.
CUresult capture_wait(Stream *stream, Event &event) {
    Capture *capture = capture_by(event.last->capture);
    if (!capture || (stream->capture && stream->capture != capture)) {
        if (stream->capture) invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    Stream *awaited = event.last->stream;
    if (awaited->captured == event.last->captured) capture->loose.erase(awaited);
    stream->capture = capture;
    capture->members.insert(stream);
    if (stream != capture->origin) capture->loose.insert(stream);
    return CUDA_SUCCESS;
}

CUresult forbid_wait(Stream *stream) {
    if (!stream->capture) return CUDA_SUCCESS;
    return invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

CUresult forbid_device_wait(int device) {
    for (auto &capture : captures)
        if (capture->origin->device == device) return invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return CUDA_SUCCESS;
}

CUresult forbid_unsafe(const char *) {
    CUresult result = CUDA_SUCCESS;
    for (auto &capture : captures)
        if (prohibits(*capture)) result = invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return result;
}

// Work on the legacy stream would wait for a blocking stream that is captured.
CUresult forbid_legacy(Stream *stream) {
    if (captures.empty() || stream != devices[stream->device].legacy) return CUDA_SUCCESS;
    for (auto &capture : captures)
        for (Stream *member : capture->members)
            if (member->blocking && member->device == stream->device)
                return invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    return CUDA_SUCCESS;
}

}  // namespace sim

using namespace sim;

EXPORT CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    ENTER(cuStreamBeginCapture)
    Stream *stream = find_stream(current_device(), handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (stream == devices[stream->device].legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    captures.emplace_back(new Capture{++last_id, mode, std::this_thread::get_id(), stream, {stream}, {}, false, {}});
    stream->capture = captures.back().get();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    ENTER(cuStreamEndCapture)
    *graph = nullptr;
    Stream *stream = find_stream(current_device(), handle);
    if (!stream || !stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    Capture &capture = *stream->capture;
    bool own = capture.thread == std::this_thread::get_id() || capture.mode == CU_STREAM_CAPTURE_MODE_RELAXED;
    if (!own) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (stream != capture.origin) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    CUresult result = capture.invalidated      ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                      : !capture.loose.empty() ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                                               : CUDA_SUCCESS;
    if (!result) *graph = (CUgraph) new Graph{std::move(capture.nodes)};
    leave(capture);
    return result;
}

EXPORT CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    uint64_t id;
    ENTER(cuStreamIsCapturing)
    return cuStreamGetCaptureInfo(handle, status, (cuuint64_t *)&id, nullptr, nullptr, nullptr, nullptr);
}

EXPORT CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                       const CUgraphNode **, const CUgraphEdgeData **, size_t *dependencies) {
    ENTER(cuStreamGetCaptureInfo)
    Stream *stream = find_stream(current_device(), handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult forbidden = forbid_legacy(stream)) return forbidden;
    const Capture *capture = stream->capture;
    *status = !capture               ? CU_STREAM_CAPTURE_STATUS_NONE
              : capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                     : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = nullptr;
    if (dependencies) *dependencies = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    ENTER(cuThreadExchangeStreamCaptureMode)
    std::swap(*mode, thread_mode);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *, size_t *count) {
    ENTER(cuGraphGetNodes)
    *count = ((Graph *)graph)->nodes.size();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *executable, CUgraph graph, unsigned long long) {
    ENTER(cuGraphInstantiateWithFlags)
    *executable = (CUgraphExec) new Graph(*(Graph *)graph);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph) {
    ENTER(cuGraphDestroy)
    delete (Graph *)graph;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec executable) {
    ENTER(cuGraphExecDestroy)
    delete (Graph *)executable;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphLaunch(CUgraphExec executable, CUstream handle) {
    ENTER(cuGraphLaunch)
    Stream *stream = find_stream(current_device(), handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) {
        violation("NOT SIMULATED: cuGraphLaunch on a stream that is captured");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    for (const Work &node : ((Graph *)executable)->nodes)
        if (CUresult error = enqueue(stream, node)) return error;
    return CUDA_SUCCESS;
}
