// The stand-in driver: streams, events, graphs, and waiting for words in memory.
//
// Each stream is a queue and a thread of its own, so what is not ordered by an event or a synchronisation really runs
// in any order. CUDA_ON_CPU_DELAY_US=n makes it worse: each piece of work first sleeps up to n microseconds.
#include "driver.hpp"

#include <cstdlib>
#include <ctime>
#include <random>
#include <thread>
#include <utility>
#include <unistd.h>

namespace on_cpu {

static long long now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void Stream::wait_for(uint64_t count) {
    std::unique_lock<std::mutex> hold(lock);
    changed.wait(hold, [&] { return done >= count; });
}

uint64_t Stream::count_issued() {
    std::lock_guard<std::mutex> hold(lock);
    return issued;
}

static void delay() {
    static const unsigned most_us = [] {
        const char *word = std::getenv("CUDA_ON_CPU_DELAY_US");
        return word ? static_cast<unsigned>(std::atoi(word)) : 0;
    }();
    if (most_us == 0) return;
    thread_local std::minstd_rand random(static_cast<unsigned>(now_ns()));
    usleep(random() % (most_us + 1));
}

void Turns::take(Work work) {
    if (held_ && work.begins_early) {
        Work front = std::move(*held_);
        held_.reset();
        bool has_run = false;
        Front run_front = [&] {
            if (!std::exchange(has_run, true)) front.run(nullptr);
        };
        work.run(&run_front);
        return run_front();
    }
    settle();
    if (work.is_kernel && random_() / 2 % 2) held_ = std::move(work);
    else work.run(nullptr);
}

void Turns::settle() {
    if (!held_) return;
    Work front = std::move(*held_);
    held_.reset();
    front.run(nullptr);
}

static void serve(std::shared_ptr<Stream> stream) {
    Turns turns(0);
    uint64_t begun = 0;
    std::unique_lock<std::mutex> hold(stream->lock);
    for (;;) {
        if (!turns.hold_back()) stream->changed.wait(hold, [&] { return !stream->work.empty() || stream->closed; });
        if (stream->work.empty() && !turns.hold_back()) return;
        if (stream->work.empty()) {
            hold.unlock();
            turns.settle();
        } else {
            Work next = std::move(stream->work.front());
            stream->work.pop_front();
            ++begun;
            hold.unlock();
            delay();
            turns.take(std::move(next));
        }
        hold.lock();
        if (turns.hold_back()) continue;
        stream->done = begun;
        stream->changed.notify_all();
    }
}

// The driver's lock is held.
std::shared_ptr<Stream> start_stream(Device *device, bool non_blocking) {
    auto stream = std::make_shared<Stream>();
    stream->device = device;
    stream->non_blocking = non_blocking;
    driver().streams.insert(stream);
    std::thread(serve, stream).detach();
    return stream;
}

std::shared_ptr<Stream> find_stream(void *handle) {
    if (!handle || handle == reinterpret_cast<void *>(1)) return current->legacy;
    std::lock_guard<std::mutex> hold(driver().lock);
    for (auto &stream : driver().streams)
        if (stream.get() == handle && !stream->closed) return stream;
    return nullptr;
}

static Work plain(std::function<void()> work) {
    return {[work = std::move(work)](const Front *) { work(); }, false, false};
}

static void push(Stream &stream, Work work) {
    std::lock_guard<std::mutex> hold(stream.lock);
    stream.work.push_back(std::move(work));
    ++stream.issued;
    stream.changed.notify_all();
}

static std::vector<std::shared_ptr<Stream>> streams_of(const Device *device) {
    std::lock_guard<std::mutex> hold(driver().lock);
    std::vector<std::shared_ptr<Stream>> found;
    for (auto &stream : driver().streams)
        if (stream->device == device) found.push_back(stream);
    return found;
}

// Stream 0 and the streams made without CU_STREAM_NON_BLOCKING wait for each other.
static void order_with_legacy(const std::shared_ptr<Stream> &stream) {
    auto &legacy = stream->device->legacy;
    if (stream->non_blocking) return;
    if (stream != legacy) {
        if (uint64_t count = legacy->count_issued()) push(*stream, plain([=] { legacy->wait_for(count); }));
        return;
    }
    for (auto &other : streams_of(stream->device))
        if (other != stream && !other->non_blocking) {
            uint64_t count = other->count_issued();
            push(*stream, plain([=] { other->wait_for(count); }));
        }
}

static void enqueue_work(const std::shared_ptr<Stream> &stream, Work work) {
    Work guarded = work;
    guarded.run = [run = std::move(work.run)](const Front *front) {
        if (!driver().lost) run(front);
    };
    {
        std::lock_guard<std::mutex> hold(stream->lock);
        if (stream->capture) {
            stream->capture->nodes.push_back(std::move(guarded));
            return;
        }
    }
    order_with_legacy(stream);
    push(*stream, std::move(guarded));
}

void enqueue(const std::shared_ptr<Stream> &stream, std::function<void()> work) {
    enqueue_work(stream, plain(std::move(work)));
}
void enqueue_kernel(const std::shared_ptr<Stream> &stream, std::function<void(const Front *)> run, bool begins_early) {
    enqueue_work(stream, {std::move(run), true, begins_early});
}

void synchronize_device() {
    for (auto &stream : streams_of(current)) stream->wait_for(stream->count_issued());
}

static Event *find_event(void *handle) {
    std::lock_guard<std::mutex> hold(driver().lock);
    auto found = driver().events.find(static_cast<Event *>(handle));
    return found == driver().events.end() ? nullptr : *found;
}

static void wait_for(Record &record) {
    std::unique_lock<std::mutex> hold(record.lock);
    record.changed.wait(hold, [&] { return record.done; });
}

static bool is_done(Record &record) {
    std::lock_guard<std::mutex> hold(record.lock);
    return record.done;
}

// A call that a capturing stream does not allow spoils its capture.
CUresult refuse_in_capture(const std::shared_ptr<Stream> &stream) {
    std::lock_guard<std::mutex> hold(stream->lock);
    if (!stream->capture) return CUDA_SUCCESS;
    stream->capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult refuse_in_captures() {
    CUresult refused = CUDA_SUCCESS;
    for (auto &stream : streams_of(current))
        if (CUresult error = refuse_in_capture(stream)) refused = error;
    return refused;
}

} // namespace on_cpu

using namespace on_cpu;

// ---- Streams ----------------------------------------------------------------------------------------------------------

EXPORT CUresult cuStreamCreateWithPriority(void **out, unsigned flags, int) {
    if (CUresult error = usable()) return error;
    if (!may_allocate(0)) return CUDA_ERROR_OUT_OF_MEMORY;
    std::lock_guard<std::mutex> hold(driver().lock);
    *out = start_stream(current, flags & 1).get();
    return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamCreate(void **out, unsigned flags) { return cuStreamCreateWithPriority(out, flags, 0); }

// Work that was enqueued is still done.
EXPORT CUresult cuStreamDestroy_v2(void *handle) {
    auto stream = handle && current ? find_stream(handle) : nullptr;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    {
        std::lock_guard<std::mutex> hold(stream->lock);
        stream->closed = true;
        stream->changed.notify_all();
    }
    stream->wait_for(stream->count_issued());
    std::lock_guard<std::mutex> hold(driver().lock);
    driver().streams.erase(stream);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(void *handle) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult error = refuse_in_capture(stream)) return error;
    order_with_legacy(stream);
    stream->wait_for(stream->count_issued());
    return usable();
}

EXPORT CUresult cuStreamQuery(void *handle) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult error = refuse_in_capture(stream)) return error;
    std::lock_guard<std::mutex> hold(stream->lock);
    return stream->done == stream->issued ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuStreamWaitEvent(void *handle, void *event_handle, unsigned) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(handle);
    Event *event = find_event(event_handle);
    if (!stream || !event) return CUDA_ERROR_INVALID_HANDLE;
    {
        std::lock_guard<std::mutex> hold(stream->lock);
        if (stream->capture && stream->capture != event->captured) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
        if (event->captured) { // a stream that waits for a captured event joins the capture; nodes keep their order
            stream->capture = event->captured;
            return CUDA_SUCCESS;
        }
    }
    if (std::shared_ptr<Record> record = event->record) push(*stream, plain([record] { wait_for(*record); }));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchHostFunc(void *handle, void (*function)(void *), void *data) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    enqueue(stream, [=] { function(data); });
    return CUDA_SUCCESS;
}

// ---- Words in memory --------------------------------------------------------------------------------------------------

EXPORT CUresult cuStreamWriteValue32_v2(void *handle, CUdeviceptr at, unsigned value, unsigned) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (at % 4 != 0 || !reachable(at, 4)) return CUDA_ERROR_INVALID_VALUE;
    enqueue(stream, [=] { __atomic_store_n(reinterpret_cast<unsigned *>(at), value, __ATOMIC_RELEASE); });
    return CUDA_SUCCESS;
}

// The condition: 0 for at least (as a signed difference), 1 for equal, 2 for a bit in common, 3 for neither.
static bool holds(unsigned seen, unsigned value, unsigned condition) {
    switch (condition) {
    case 0: return static_cast<int>(seen - value) >= 0;
    case 1: return seen == value;
    case 2: return (seen & value) != 0;
    default: return ~(seen | value) != 0;
    }
}

EXPORT CUresult cuStreamWaitValue32_v2(void *handle, CUdeviceptr at, unsigned value, unsigned flags) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (at % 4 != 0 || !reachable(at, 4)) return CUDA_ERROR_INVALID_VALUE;
    enqueue(stream, [=] {
        auto *word = reinterpret_cast<unsigned *>(at);
        for (unsigned turn = 0; !driver().lost && !holds(__atomic_load_n(word, __ATOMIC_ACQUIRE), value, flags & 3);)
            usleep(++turn < 100 ? 1 : 50);
    });
    return CUDA_SUCCESS;
}

// ---- Events -----------------------------------------------------------------------------------------------------------

EXPORT CUresult cuEventCreate(void **out, unsigned flags) {
    if (CUresult error = usable()) return error;
    if (!may_allocate(0)) return CUDA_ERROR_OUT_OF_MEMORY;
    auto *event = new Event;
    event->timed = !(flags & 2);
    std::lock_guard<std::mutex> hold(driver().lock);
    driver().events.insert(event);
    *out = event;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(void *handle) {
    Event *event = find_event(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    std::lock_guard<std::mutex> hold(driver().lock);
    driver().events.erase(event);
    delete event;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(void *handle, void *stream_handle) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(stream_handle);
    Event *event = find_event(handle);
    if (!stream || !event) return CUDA_ERROR_INVALID_HANDLE;
    {
        std::lock_guard<std::mutex> hold(stream->lock);
        event->captured = stream->capture;
        if (event->captured) return CUDA_SUCCESS;
    }
    auto record = std::make_shared<Record>();
    event->record = record;
    order_with_legacy(stream);
    push(*stream, plain([record] {
        std::lock_guard<std::mutex> hold(record->lock);
        record->at_ns = now_ns();
        record->done = true;
        record->changed.notify_all();
    }));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventQuery(void *handle) {
    if (CUresult error = usable()) return error;
    Event *event = find_event(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (event->captured) return CUDA_ERROR_CAPTURED_EVENT;
    if (own_captures > 0) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return !event->record || is_done(*event->record) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventSynchronize(void *handle) {
    if (CUresult error = usable()) return error;
    Event *event = find_event(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (event->captured) return CUDA_ERROR_CAPTURED_EVENT;
    if (event->record) wait_for(*event->record);
    return usable();
}

EXPORT CUresult cuEventElapsedTime_v2(float *elapsed_ms, void *start_handle, void *end_handle) {
    if (CUresult error = usable()) return error;
    Event *start = find_event(start_handle), *end = find_event(end_handle);
    if (!start || !end || !start->record || !end->record || !start->timed || !end->timed)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!is_done(*start->record) || !is_done(*end->record)) return CUDA_ERROR_NOT_READY;
    *elapsed_ms = static_cast<float>(end->record->at_ns - start->record->at_ns) * 1e-6f;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuEventElapsedTime(float *elapsed_ms, void *start, void *end) {
    return cuEventElapsedTime_v2(elapsed_ms, start, end);
}

// ---- Graphs -----------------------------------------------------------------------------------------------------------
// A graph is the list of what was captured, in the order of the calls: one of the orders that its edges allow.

EXPORT CUresult cuStreamBeginCapture_v2(void *handle, int mode) {
    if (CUresult error = usable()) return error;
    auto stream = handle ? find_stream(handle) : nullptr; // stream 0 cannot be captured
    if (!stream) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    std::lock_guard<std::mutex> hold(stream->lock);
    if (stream->capture) return CUDA_ERROR_INVALID_VALUE;
    stream->capture = std::make_shared<Graph>();
    stream->capture->mode = mode;
    stream->capture_origin = true;
    if (mode == 0) ++driver().captures;
    if (mode == 1) ++own_captures;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamEndCapture(void *handle, void **out) {
    *out = nullptr;
    if (CUresult error = usable()) return error;
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    std::shared_ptr<Graph> graph;
    {
        std::lock_guard<std::mutex> hold(stream->lock);
        if (!stream->capture || !stream->capture_origin) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
        graph = stream->capture;
        stream->capture_origin = false;
    }
    for (auto &joined : streams_of(stream->device)) {
        std::lock_guard<std::mutex> hold(joined->lock);
        if (joined->capture == graph) joined->capture = nullptr;
    }
    if (graph->mode == 0) --driver().captures;
    if (graph->mode == 1) --own_captures;
    if (graph->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    *out = new std::shared_ptr<Graph>(graph);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(void *handle, int *status) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    std::lock_guard<std::mutex> hold(stream->lock);
    *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphInstantiateWithFlags(void **out, void *graph, unsigned long long) {
    if (CUresult error = usable()) return error;
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    if (!may_allocate(0)) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = new std::shared_ptr<Graph>(*static_cast<std::shared_ptr<Graph> *>(graph));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphUpload(void *, void *) { return usable(); }

EXPORT CUresult cuGraphGetNodes(void *graph, void **, size_t *count) {
    *count = (*static_cast<std::shared_ptr<Graph> *>(graph))->nodes.size();
    return usable();
}

EXPORT CUresult cuGraphLaunch(void *executable, void *handle) {
    if (CUresult error = usable()) return error;
    auto stream = find_stream(handle);
    if (!stream || !executable) return CUDA_ERROR_INVALID_HANDLE;
    auto graph = *static_cast<std::shared_ptr<Graph> *>(executable);
    enqueue(stream, [graph] {
        static std::atomic<unsigned> launches{0};
        Turns turns(launches++);
        for (auto &node : graph->nodes) turns.take(node);
        turns.settle();
    });
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(void *graph) {
    delete static_cast<std::shared_ptr<Graph> *>(graph);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphExecDestroy(void *executable) { return cuGraphDestroy(executable); }
