// Runs a grid: blocks on a few threads of the operating system, the lanes of a block as fibers.
//
// A fiber is a stack and the registers that a call preserves. It takes up lanes one after another; when a lane must
// wait (for a barrier, or for its warp), the fiber stays with it and the block goes on with whoever can run: a lane
// that was woken, or the next one on a fresh fiber. When nobody can run and lanes are left, the kernel is stuck, and
// the report says where each of them waits.
//
// Lanes and blocks run in the order that CUDA_ON_CPU_ORDER says: forward, backward, or shuffled. A kernel that gives
// different results has a race.
#include "execute.hpp"

#include "run.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <utility>
#include <unistd.h>
#include <vector>
#include <ucontext.h>

namespace on_cpu {

__thread LaneView *lane = nullptr;

// ---- Switching stacks -------------------------------------------------------------------------------------------------

#ifdef __x86_64__
// Saves what a call preserves on this stack, leaves its top in *from, and goes on with the other.
extern "C" void on_cpu_switch(void **from, void *to);
asm(R"(
.text
.globl on_cpu_switch
.hidden on_cpu_switch
.type on_cpu_switch,@function
on_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size on_cpu_switch,.-on_cpu_switch
)");
struct Context {
    void *top = nullptr;
};
static void switch_to(Context &from, Context &to) { on_cpu_switch(&from.top, to.top); }
static void prepare(Context &context, unsigned char *stack, size_t bytes, void (*entry)()) {
    auto *top = reinterpret_cast<void **>(reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t{15});
    *--top = nullptr;                         // where `entry` would return to; it never does
    *--top = reinterpret_cast<void *>(entry); // what the switch returns to
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    context.top = top;
}
#else
struct Context {
    ucontext_t saved;
};
static void switch_to(Context &from, Context &to) { swapcontext(&from.saved, &to.saved); }
static void prepare(Context &context, unsigned char *stack, size_t bytes, void (*entry)()) {
    getcontext(&context.saved);
    context.saved.uc_stack.ss_sp = stack;
    context.saved.uc_stack.ss_size = bytes;
    context.saved.uc_link = nullptr;
    makecontext(&context.saved, entry, 0);
}
#endif

// ---- A block ----------------------------------------------------------------------------------------------------------

constexpr unsigned MAX_LANES = 1024;
// Not a power of two: the tops of the stacks would fall into the same lines of the cache.
constexpr size_t STACK_BYTES = 96 * 1024 + 320;
constexpr size_t SHARED_BYTES = 256 * 1024;
constexpr uint64_t CANARY = 0xC0DEC0DEC0DEC0DE;

enum class State : uint8_t { Unborn, Ready, AtBarrier, AtMeeting, AtFront, Ended };

struct Copy {
    void *to;
    const void *from;
    unsigned bytes, group;
};

struct Rendezvous {
    Said said;
    unsigned mask = 0, arrived = 0, left = 0;
    size_t bytes = 0;
    bool complete = false;
    uint64_t bit = 0;
    uint64_t *open = nullptr;
    Place here{};
};

struct Fiber;
struct Lane : LaneView {
    Fiber *fiber;
    State state;
    Place waits;
    unsigned copy_group;
    std::vector<Copy> copies;
};

struct Fiber {
    Context context;
    unsigned char *stack = nullptr;
    Lane *runs = nullptr;
};

struct Warp {
    // A lane leaves one meeting before it goes to the next, so 64 are enough.
    Rendezvous meetings[64];
    uint64_t open = 0; // bit i: meetings[i] is in use
    unsigned alive = 0;
};

// What a thread of the operating system needs to run blocks; made once for each.
struct Worker {
    std::vector<Fiber> fibers;
    std::vector<Lane> lanes{MAX_LANES};
    std::unique_ptr<Warp[]> warps{new Warp[MAX_LANES / 32]};
    std::vector<Lane *> ready; // a ring
    std::vector<unsigned> order;
    unsigned char *shared = nullptr, *stacks = nullptr;
    Context scheduler;

    BlockView view;
    Launch *launch = nullptr;
    unsigned count = 0, next = 0, fibers_used = 0, ended = 0, at_barrier = 0, predicates = 0, last_predicates = 0;
    unsigned at_front = 0; // how many wait for the kernel in front
    unsigned ordered = 0; // how many of `order` are arranged
    size_t ready_first = 0, ready_count = 0;
    Place barrier{};
    std::string failure;

    Worker();
    bool run(Launch &launch, uint64_t block);
    void run_front();
    Lane *bear();
    void wake(Lane *waiting);
    Fiber *runnable();
    void go_on();
    void fail(const std::string &why);
    std::string where_lanes_wait() const;
};

static __thread Worker *worker __attribute__((tls_model("initial-exec"))) = nullptr;

static Worker &this_worker() {
    if (!worker) worker = new Worker; // for as long as the process: its threads are never joined
    return *worker;
}

Worker::Worker() : fibers(MAX_LANES), ready(MAX_LANES), order(MAX_LANES) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    size_t bytes = STACK_BYTES * MAX_LANES;
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    void *room = mmap(nullptr, SHARED_BYTES + 4096, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED || room == MAP_FAILED) {
        std::perror("cuda-on-cpu: no memory for the stacks of a block");
        std::abort();
    }
    stacks = static_cast<unsigned char *>(memory);
    shared = static_cast<unsigned char *>(room);
    mprotect(shared + SHARED_BYTES, 4096, PROT_NONE);
    for (unsigned at = 0; at < MAX_LANES; ++at) {
        fibers[at].stack = stacks + at * STACK_BYTES;
        std::memcpy(fibers[at].stack, &CANARY, sizeof CANARY);
    }
}

static void poison_static_shared(const Library &library);
static unsigned char *static_shared(const Library &library);

static std::string describe(Dim3 at) {
    return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}
// Two literals of one file may be two objects, where an inline function was compiled twice.
static bool same(Place one, Place other) {
    return one.line == other.line && (one.file == other.file || std::strcmp(one.file, other.file) == 0);
}
static std::string describe(Place at) { return std::string(at.file) + ":" + std::to_string(at.line); }

// Ends the block, and with it the launch; the fibers are abandoned as they stand.
void Worker::fail(const std::string &why) {
    if (!failure.empty()) return;
    failure = std::string(launch->kernel->name) + ", block " + describe(view.index) + ": " + why;
}

static void fiber_main() {
    Worker &self = *worker;
    for (;;) {
        Lane *runs = static_cast<Lane *>(lane);
        self.launch->kernel->call(self.launch->arguments);
        if (!runs->copies.empty()) wait_copies(0);
        if (self.launch->begins_early && !runs->has_waited) self.fail("a lane left without await_front");
        runs->state = State::Ended;
        self.warps[(runs - self.lanes.data()) / 32].alive &= ~(1u << runs->in_warp);
        ++self.ended;
        if (self.next < self.count) { // take up the next lane on this very stack
            Lane *born = self.bear();
            born->fiber = runs->fiber;
            born->fiber->runs = born;
            lane = born;
            continue;
        }
        self.go_on();
    }
}

// The next lane that has not begun.
Lane *Worker::bear() {
    unsigned at = order[next++];
    Lane &born = lanes[at];
    const Dim3 &threads = view.threads;
    if (threads.y == 1 && threads.z == 1) born.thread = Dim3(at, 0, 0);
    else born.thread = Dim3(at % threads.x, at / threads.x % threads.y, at / threads.x / threads.y);
    born.block = &view;
    born.in_warp = at % 32;
    born.has_waited = false;
    born.state = State::Ready;
    born.copy_group = 0;
    born.copies.clear();
    return &born;
}

void Worker::wake(Lane *waiting) {
    waiting->state = State::Ready;
    ready[(ready_first + ready_count++) % MAX_LANES] = waiting;
}

// The next fiber that can run, or nobody.
Fiber *Worker::runnable() {
    if (ready_count > 0) {
        Lane *woken = ready[ready_first];
        ready_first = (ready_first + 1) % MAX_LANES;
        --ready_count;
        return woken->fiber;
    }
    if (next == count) return nullptr;
    Lane *born = bear();
    Fiber *fresh = &fibers[fibers_used++]; // no fiber is ever idle while lanes are unborn: each goes on with the next
    prepare(fresh->context, fresh->stack, STACK_BYTES, fiber_main);
    fresh->runs = born;
    born->fiber = fresh;
    return fresh;
}

// Leaves the lane that runs now to whoever can run, or to the scheduler. Returns when this lane is woken.
void Worker::go_on() {
    Fiber *self = static_cast<Lane *>(lane)->fiber;
    Fiber *other = failure.empty() ? runnable() : nullptr;
    if (other == self) return;
    if (!other) {
        lane = nullptr;
        switch_to(self->context, scheduler);
    } else {
        lane = other->runs;
        switch_to(self->context, other->context);
    }
}

std::string Worker::where_lanes_wait() const {
    std::string text;
    for (unsigned at = 0; at < count;) {
        const Lane &first = lanes[at];
        unsigned end = at + 1;
        auto alike = [&](const Lane &other) {
            return other.state == first.state && (first.state == State::Ended || other.waits.line == first.waits.line);
        };
        while (end < count && alike(lanes[end])) ++end;
        text += "\n    lanes " + std::to_string(at) + " to " + std::to_string(end - 1);
        if (first.state == State::Ended) text += " have ended";
        else if (first.state == State::Unborn) text += " have not begun";
        else text += " wait at " + describe(first.waits);
        at = end;
    }
    return text;
}

static void arrange(std::vector<unsigned> &order, unsigned count, uint64_t seed) {
    for (unsigned at = 0; at < count; ++at) order[at] = at;
    if (run_order() == Order::Backward) std::reverse(order.begin(), order.begin() + count);
    if (run_order() == Order::Shuffled) {
        std::minstd_rand random(static_cast<unsigned>(seed * 2654435761u + 1));
        std::shuffle(order.begin(), order.begin() + count, random);
    }
}

bool Worker::run(Launch &what, uint64_t block) {
    launch = &what;
    const Dim3 &grid = what.grid, &threads = what.threads;
    Dim3 index(block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y);
    size_t dynamic_bytes = (what.shared_bytes + 15) / 16 * 16;
    view = {index, threads, grid, shared + SHARED_BYTES - dynamic_bytes};
    std::memset(view.dynamic_shared, 0xFF, dynamic_bytes);
    poison_static_shared(what.library);

    count = threads.x * threads.y * threads.z;
    next = fibers_used = ended = at_barrier = at_front = predicates = 0;
    ready_first = ready_count = 0;
    failure.clear();
    if (run_order() != Order::Forward || ordered < count) arrange(order, count, what.seed + block);
    ordered = count;
    for (unsigned at = 0; at < count; ++at) lanes[at].state = State::Unborn;
    for (unsigned warp = 0; warp * 32 < count; ++warp) {
        unsigned lanes_here = std::min(32u, count - warp * 32);
        warps[warp].alive = lanes_here == 32 ? ~0u : (1u << lanes_here) - 1;
        warps[warp].open = 0;
    }

    for (Fiber *fiber = runnable(); fiber; fiber = runnable()) {
        lane = fiber->runs;
        switch_to(scheduler, fiber->context);
        lane = nullptr;
        if (!failure.empty() || at_front == 0) break;
        run_front();
    }

    if (failure.empty() && ended < count) fail("stuck: some lanes wait for others that never come" + where_lanes_wait());
    for (unsigned at = 0; at < fibers_used; ++at)
        if (std::memcmp(fibers[at].stack, &CANARY, sizeof CANARY) != 0) fail("a lane used more than its stack");
    if (failure.empty()) return true;
    what.fail(failure);
    return false;
}

// Nobody can go on before the kernel in front has run: on this thread, which has a second place for that.
void Worker::run_front() {
    static __thread Worker *spare __attribute__((tls_model("initial-exec"))) = nullptr;
    unsigned char *shared_now = static_shared(launch->library);
    std::vector<unsigned char> kept(shared_now, shared_now + launch->library.shared_bytes);
    std::swap(worker, spare);
    (*std::exchange(launch->front, nullptr))();
    std::swap(worker, spare);
    std::copy(kept.begin(), kept.end(), shared_now);
    at_front = 0;
    for (unsigned at = 0; at < count; ++at)
        if (lanes[order[at]].state == State::AtFront) wake(&lanes[order[at]]);
}

// ---- What lanes call --------------------------------------------------------------------------------------------------

void fail_lane(const char *why, Place here) {
    Worker &self = *worker;
    self.fail("lane " + describe(lane->thread) + " at " + describe(here) + ": " + why);
    self.go_on();
    std::abort(); // nobody goes on with a failed block
}

int sync_block(int predicate, Place here) {
    Worker &self = *worker;
    Lane *runs = static_cast<Lane *>(lane);
    if (self.at_barrier == 0) self.barrier = here;
    else if (!same(self.barrier, here))
        fail_lane(("not all lanes come to the same barrier; others are at " + describe(self.barrier)).c_str(), here);
    if (self.ended > 0) fail_lane("a barrier, but some lanes of the block have ended", here);
    self.predicates += predicate != 0;
    if (++self.at_barrier < self.count) {
        runs->state = State::AtBarrier;
        runs->waits = here;
        self.go_on();
        return static_cast<int>(self.last_predicates);
    }
    self.at_barrier = 0;
    self.last_predicates = self.predicates;
    self.predicates = 0;
    for (unsigned at = 0; at < self.count; ++at) {
        Lane &waiting = self.lanes[self.order[at]];
        if (waiting.state == State::AtBarrier) self.wake(&waiting);
    }
    return static_cast<int>(self.last_predicates);
}

void await_front(Place here) {
    Worker &self = *worker;
    Lane *runs = static_cast<Lane *>(lane);
    runs->has_waited = true;
    if (!self.launch->front) return;
    runs->state = State::AtFront;
    runs->waits = here;
    ++self.at_front;
    self.go_on();
}

unsigned active_mask() {
    Worker &self = *worker;
    return self.warps[(static_cast<Lane *>(lane) - self.lanes.data()) / 32].alive;
}

void sleep(unsigned ns) {
    if (ns > 1000) usleep(ns / 1000);
    else sched_yield();
    worker->wake(static_cast<Lane *>(lane));
    worker->go_on();
}

// The meeting of this mask that still waits for lanes, or a new one.
static Rendezvous &find_meeting(Warp &warp, unsigned mask, Place here) {
    for (uint64_t open = warp.open; open != 0; open &= open - 1) {
        Rendezvous &meeting = warp.meetings[__builtin_ctzll(open)];
        if (!meeting.complete && meeting.mask == mask) return meeting;
    }
    int at = __builtin_ctzll(~warp.open);
    warp.open |= uint64_t{1} << at;
    Rendezvous &meeting = warp.meetings[at];
    meeting.open = &warp.open;
    meeting.bit = uint64_t{1} << at;
    meeting.complete = false;
    meeting.mask = mask;
    meeting.arrived = meeting.left = 0;
    meeting.here = here;
    return meeting;
}

Rendezvous *meet(unsigned mask, const void *said, size_t bytes, void (*combine)(Said &), Place here) {
    Worker &self = *worker;
    Lane *runs = static_cast<Lane *>(lane);
    unsigned first = static_cast<unsigned>(runs - self.lanes.data()) / 32 * 32;
    Warp &warp = self.warps[first / 32];
    if (!(mask >> runs->in_warp & 1)) fail_lane("a lane is not in the mask it gives", here);
    if (mask & ~warp.alive) fail_lane("the mask names lanes that have ended or never were", here);
    Rendezvous &meeting = find_meeting(warp, mask, here);
    if (meeting.arrived == 0) meeting.bytes = bytes;
    else if (meeting.bytes != bytes || !same(meeting.here, here))
        fail_lane(("lanes of a warp meet at different places; others are at " + describe(meeting.here)).c_str(), here);
    meeting.arrived |= 1u << runs->in_warp;
    if (bytes > 0) std::memcpy(meeting.said.bytes[runs->in_warp], said, bytes);
    if (meeting.arrived != mask) {
        runs->state = State::AtMeeting;
        runs->waits = here;
        self.go_on();
        return &meeting;
    }
    if (combine) combine(meeting.said);
    meeting.complete = true;
    for (unsigned at = 0; at < 32; ++at)
        if ((mask >> at & 1) && at != runs->in_warp) self.wake(&self.lanes[first + at]);
    return &meeting;
}

const Said &heard(const Rendezvous *rendezvous) { return rendezvous->said; }

void leave(Rendezvous *rendezvous) {
    rendezvous->left |= 1u << lane->in_warp;
    if (rendezvous->left == rendezvous->mask) *rendezvous->open &= ~rendezvous->bit;
}

void copy_later(void *to, const void *from, unsigned bytes, Place here) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 != 0)
        fail_lane("cp_async16: an address is not 16-byte aligned", here);
    std::memset(to, 0xFF, 16);
    Lane *runs = static_cast<Lane *>(lane);
    runs->copies.push_back({to, from, bytes, runs->copy_group});
}

void commit_copies() { ++static_cast<Lane *>(lane)->copy_group; }

void wait_copies(unsigned pending_groups) {
    Lane *runs = static_cast<Lane *>(lane);
    size_t done = 0;
    for (; done < runs->copies.size(); ++done) {
        const Copy &copy = runs->copies[done];
        if (copy.group + pending_groups >= runs->copy_group) break;
        std::memcpy(copy.to, copy.from, copy.bytes);
        if (copy.bytes < 16) std::memset(static_cast<char *>(copy.to) + copy.bytes, 0, 16 - copy.bytes);
    }
    runs->copies.erase(runs->copies.begin(), runs->copies.begin() + static_cast<long>(done));
}

// ---- Faults -----------------------------------------------------------------------------------------------------------
// A lane that touches what it must not ends its launch with a report, as on a device; the process lives on.

#ifdef __x86_64__
static struct sigaction former[NSIG];

static void leave_failed_block() {
    worker->go_on();
    std::abort();
}

static std::string describe_fault(int signal, const siginfo_t *info) {
    if (signal == SIGSEGV && info->si_code == SI_KERNEL) return "a misaligned access";
    if (signal == SIGILL) return "a check failed (alignment, or an index outside its array)";
    if (signal == SIGFPE) return "a division by zero";
    return describe_address(reinterpret_cast<uintptr_t>(info->si_addr));
}

static void on_fault(int signal, siginfo_t *info, void *data) {
    if (!lane || !worker) { // not ours: as if we had never been here, and the instruction faults once more
        sigaction(signal, &former[signal], nullptr);
        return;
    }
    worker->launch->illegal_address = true;
    worker->fail("lane " + describe(lane->thread) + ": " + describe_fault(signal, info));
    auto &registers = static_cast<ucontext_t *>(data)->uc_mcontext.gregs;
    registers[REG_RSP] = ((registers[REG_RSP] - 256) & ~15LL) - 8; // below the red zone, as after a call
    registers[REG_RIP] = reinterpret_cast<greg_t>(leave_failed_block);
}

void catch_faults() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) sigaction(signal, &action, &former[signal]);
}
#else
void catch_faults() {}
#endif

// ---- A grid -----------------------------------------------------------------------------------------------------------

Order run_order() {
    static const Order order = [] {
        const char *word = std::getenv("CUDA_ON_CPU_ORDER");
        if (!word || !std::strcmp(word, "forward")) return Order::Forward;
        if (!std::strcmp(word, "backward")) return Order::Backward;
        if (!std::strcmp(word, "shuffled")) return Order::Shuffled;
        std::fprintf(stderr, "cuda-on-cpu: CUDA_ON_CPU_ORDER is forward, backward or shuffled, not %s\n", word);
        std::abort();
    }();
    return order;
}

void Launch::fail(const std::string &why) {
    std::lock_guard<std::mutex> hold(lock);
    if (failure.empty()) failure = why;
    failed = true;
}

// Takes a block, if one is left.
static bool take_block(Launch &launch) {
    uint64_t blocks = launch.blocks(), turn = launch.next_block.fetch_add(1);
    if (turn >= blocks || launch.failed) return false;
    bool backward = run_order() == Order::Backward || (run_order() == Order::Shuffled && launch.seed % 2);
    this_worker().run(launch, backward ? blocks - 1 - turn : turn);
    return true;
}

// Takes blocks until none is left. Any number of threads may help with a launch.
static void take_blocks(Launch &launch) {
    while (take_block(launch)) {}
}

// Threads that help with grids of several blocks. They never decide whether a launch ends: the stream's own thread
// can run every block itself, so a kernel that waits for the host or another stream holds up nobody else.
class Helpers {
  public:
    Helpers() {
        unsigned cores = std::max(1u, std::thread::hardware_concurrency());
        for (unsigned at = 1; at < std::min(cores, 8u); ++at) std::thread([this] { serve(); }).detach();
    }
    void offer(const std::shared_ptr<Launch> &launch) {
        std::lock_guard<std::mutex> hold(lock_);
        offered_.push_back(launch);
        some_.notify_all();
    }
    void withdraw(const std::shared_ptr<Launch> &launch) {
        std::unique_lock<std::mutex> hold(lock_);
        offered_.erase(std::remove(offered_.begin(), offered_.end(), launch), offered_.end());
        done_.wait(hold, [&] { return launch->helping == 0; });
    }

  private:
    void serve() {
        std::unique_lock<std::mutex> hold(lock_);
        for (;;) {
            some_.wait(hold, [&] { return !offered_.empty(); });
            std::shared_ptr<Launch> launch = offered_.front();
            ++launch->helping;
            hold.unlock();
            take_blocks(*launch);
            hold.lock();
            --launch->helping;
            offered_.erase(std::remove(offered_.begin(), offered_.end(), launch), offered_.end());
            done_.notify_all();
        }
    }
    std::mutex lock_;
    std::condition_variable some_, done_;
    std::vector<std::shared_ptr<Launch>> offered_;
};

std::string run_grid(const std::shared_ptr<Launch> &launch) {
    static Helpers &helpers = *new Helpers;
    // One block begins before the kernel in front has run.
    if (launch->front) take_block(*launch);
    launch->front = nullptr;
    bool shared_out = launch->blocks() > 1;
    if (shared_out) helpers.offer(launch);
    take_blocks(*launch);
    if (shared_out) helpers.withdraw(launch);
    return launch->failure;
}

// ---- Static shared memory ---------------------------------------------------------------------------------------------

struct TlsIndex {
    unsigned long module, offset;
};
extern "C" void *__tls_get_addr(TlsIndex *);

static unsigned char *static_shared(const Library &library) {
    if (library.shared_bytes == 0) return nullptr;
    TlsIndex start{library.tls_module, 0};
    return static_cast<unsigned char *>(__tls_get_addr(&start));
}

static void poison_static_shared(const Library &library) {
    if (library.shared_bytes > 0) std::memset(static_shared(library), 0xFF, library.shared_bytes);
}

} // namespace on_cpu
